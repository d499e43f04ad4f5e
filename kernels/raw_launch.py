"""Launches of a compiled Triton kernel straight through its entry in C.

Before each launch Triton makes the descriptors of tensors anew and asks the driver about every
pointer. Here a launch is recorded once, as Triton's own code lays it out, and given to the entry
as often as wanted: with numbers instead of tensors, which the entry takes as addresses.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

STREAM = 3  # its place among what the entry takes, behind the grid


class CannotRecord(RuntimeError):
    """This version of Triton launches in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLaunch:
    """One launch; whoever has it keeps alive what its addresses name."""

    entry: Callable[..., None]
    before: tuple[Any, ...]  # grid, stream, function, options
    values: tuple[Any, ...]  # the kernel's arguments, in whatever the entry takes for them
    is_nested: bool  # the entry takes the values as one argument

    def bound(self) -> Callable[[], None]:
        """On the stream on which it was recorded."""
        values = (self.values,) if self.is_nested else self.values
        return partial(self.entry, *self.before, *values)

    def launch(self, values: tuple[Any, ...], programs: int, stream: int) -> None:
        """With other arguments, on another grid; of a kernel without descriptors."""
        options = self.before[STREAM + 1 :]
        if self.is_nested:
            self.entry(programs, 1, 1, stream, *options, values)
        else:
            self.entry(programs, 1, 1, stream, *options, *values)


def current_stream(tensor: Tensor) -> int:
    """Of the tensor's device, as launches take it."""
    raw: Any = torch._C  # pyright: ignore[reportPrivateUsage]: the public call makes an object
    return int(raw._cuda_getCurrentRawStream(tensor.get_device()))


def record(compiled: Any, programs: int, arguments: Sequence[Any], stream: int) -> RawLaunch:
    """What `compiled[(programs, 1, 1)](*arguments)` would launch; nothing is launched.

    Raises CannotRecord. Tensors among the arguments become addresses.
    """
    taken: list[tuple[Any, ...]] = []

    def take(*given: Any) -> None:
        taken.append(given)

    values = [_address(value) for value in arguments]
    try:
        entry, launcher = _entry_and_recorder(compiled, take)
        # No hooks: nobody looks at single launches while steps run.
        launcher(
            *(programs, 1, 1, stream, compiled.function, compiled.packed_metadata),
            *(None, None, None, *values),
        )
        (given,) = taken
        is_nested = isinstance(given[-1], (list, tuple))
        begin = len(given) - 1 if is_nested else _options(given)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        raise CannotRecord(f"a launch cannot be recorded: {error!r}") from error
    found = given[-1] if is_nested else given[begin:]
    return RawLaunch(entry=entry, before=given[:begin], values=tuple(found), is_nested=is_nested)


def _options(given: Sequence[Any]) -> int:
    """How many of these come before the kernel's arguments."""
    from triton.backends.nvidia import driver

    module: Any = driver
    return int(module._BASE_ARGS_FORMAT_LEN)


def _entry_and_recorder(
    compiled: Any, take: Callable[..., None]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Triton's entry in C, and its launcher with `take` in the entry's place."""
    from triton.backends.nvidia import driver

    module: Any = driver  # untyped
    launcher = compiled.run
    entry = launcher.launch
    if inspect.isfunction(entry):  # it expands descriptors, and then calls the entry
        entry = inspect.getclosurevars(entry).nonlocals["launcher"]
    recorder = copy.copy(launcher)
    meta = getattr(compiled.metadata, "tensordesc_meta", None)
    recorder.launch = module.wrap_handle_tensordesc(take, dict(compiled.src.signature), meta)
    return entry, recorder


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value
