"""Launches of a Triton kernel, layer after layer, with arguments of the same kinds.

Triton binds the arguments of every launch anew, to find the program that it compiled for their
kinds; that takes the host two thirds of a launch. What is left of it is for the most part the
launch laid out again (raw_launch.py).
"""

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stemserve.kernels.raw_launch import CannotRecord, RawLaunch, current_stream, record

log = logging.getLogger(__name__)

ALIGNMENT = 16  # by which Triton tells pointers, in bytes, and whole numbers apart
MOST_INT32 = 2**31 - 1

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """Compiled for some kinds of arguments."""

    compiled: Any
    raw: RawLaunch | None  # None: this version of Triton launches in another way
    values: tuple[int, ...]  # of the kernel's constants


_programs: dict[Key, _Program] = {}  # of all kernels: plans come and go


class RepeatedLaunch:
    """One kernel on one grid; the arguments are tensors, numbers and constants, in this order."""

    def __init__(self, kernel: Any, programs: int, **constants: int) -> None:
        """`constants` are those of the kernel, in its order, and then options of the launch."""
        self._kernel = kernel
        self._programs = programs
        self._constants = constants
        self._key: Key | None = None  # of the launch before
        self._program: _Program | None = None

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple[int, ...]) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (*(at % ALIGNMENT for at in addresses), numbers, tensors[1].dtype)
        if key != self._key:
            kinds = self._kinds(addresses, tensors, numbers)
            self._program = _programs.get(kinds)
            if self._program is None:
                self._launch_first(kinds, tensors, numbers)
                return
            self._key = key
        if self._program is not None:
            self._launch(self._program, addresses, tensors, numbers)

    def _launch(
        self,
        program: _Program,
        addresses: list[int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[int, ...],
    ) -> None:
        if program.raw is None:
            program.compiled[(self._programs, 1, 1)](*tensors, *numbers, *program.values)
            return
        stream = current_stream(tensors[0])
        program.raw.launch((*addresses, *numbers, *program.values), self._programs, stream)

    def _kinds(
        self, addresses: list[int], tensors: tuple[Tensor, ...], numbers: tuple[int, ...]
    ) -> Key:
        """What Triton compiles a program of its own for."""
        return (
            *(id(self._kernel), tensors[0].device, *self._constants.items()),
            *((of.dtype, at % ALIGNMENT == 0) for of, at in zip(tensors, addresses, strict=True)),
            *((n == 1, n % ALIGNMENT == 0, n > MOST_INT32) for n in numbers),
        )

    def _launch_first(
        self, kinds: Key, tensors: tuple[Tensor, ...], numbers: tuple[int, ...]
    ) -> None:
        compiled = self._kernel[(self._programs,)](*tensors, *numbers, **self._constants)
        if compiled is None:  # the interpreter compiles nothing
            return
        names = self._kernel.arg_names
        values = tuple(v for name, v in self._constants.items() if name in names)
        try:
            arguments, stream = (*tensors, *numbers, *values), current_stream(tensors[0])
            raw = record(compiled, self._programs, arguments, stream)
        except CannotRecord as error:
            raw = None
            log.warning("copies and merges are launched by Triton, which takes longer: %s", error)
        _programs[kinds] = _Program(compiled=compiled, raw=raw, values=values)
