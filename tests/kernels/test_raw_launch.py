"""What a recorded launch gives to the entry in C, against what Triton's own launcher gives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia_driver
from triton.runtime import driver as runtime

from stemserve.kernels.raw_launch import CannotRecord, record

nvidia: Any = nvidia_driver  # untyped

STREAM = 77
META = [{"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [4, 8], "fp4_padded": False}]
SIGNATURES = {
    "descriptor": (
        {"a": "tensordesc<fp16[4, 8]>", "b": "*fp32", "n": "i32", "C": "constexpr"},
        META,
    ),
    "tensors": ({"a": "*fp16", "b": "*fp32", "n": "i32", "C": "constexpr"}, None),
}


@dataclass(kw_only=True)
class Rows:
    """As much of a descriptor as Triton's launcher reads."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def without_lists(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(g) if g.__class__ is list else g for g in given)


@dataclass
class Entry:
    """In place of the one in C; it notes what it gets."""

    calls: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])

    def __call__(self, *given: Any) -> None:
        self.calls.append(without_lists(given))


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that only makes descriptors."""

    def fill(*given: Any) -> tuple[Any, ...]:
        return ("map", *without_lists(given))

    utils = SimpleNamespace(fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(runtime, "_active", SimpleNamespace(utils=utils))


def launcher(entry: Entry, signature: dict[str, str], meta: Any) -> Any:
    """Triton's own, around the entry."""
    made: Any = object.__new__(nvidia.CudaLauncher)
    made.launch = nvidia.wrap_handle_tensordesc(entry, signature, meta)
    made.arg_annotations, made.kernel_signature, made.num_ctas = ["annotated"], b"packed", 1
    made.global_scratch_size = made.profile_scratch_size = 0
    made.global_scratch_align = made.profile_scratch_align = 1
    made.launch_cooperative_grid, made.launch_pdl = False, True
    return made


def compiled(entry: Entry, kind: str) -> Any:
    signature, meta = SIGNATURES[kind]
    return SimpleNamespace(
        run=launcher(entry, signature, meta),
        function=1234,
        packed_metadata=(4, 1, 0),
        metadata=SimpleNamespace(tensordesc_meta=meta),
        src=SimpleNamespace(signature=signature),
    )


def arguments(kind: str) -> tuple[Any, ...]:
    rows, sums = torch.zeros(6, 8, dtype=torch.float16), torch.zeros(6)
    first = Rows(base=rows, shape=[6, 8], strides=[8, 1]) if kind == "descriptor" else rows
    return first, sums, 6, 99


def as_addresses(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(as_address, given))


def as_address(value: Any) -> Any:
    if value.__class__ is tuple:
        return as_addresses(value)
    return value.data_ptr() if isinstance(value, Tensor) else value


@pytest.mark.usefixtures("maps")
@pytest.mark.parametrize("kind", SIGNATURES)
def test_the_entry_gets_what_tritons_launcher_gives_it(kind: str) -> None:
    entry = Entry()
    kernel, given = compiled(entry, kind), arguments(kind)
    recorded = record(kernel, 5, given, STREAM)
    assert not entry.calls
    kernel.run(5, 1, 1, STREAM, kernel.function, kernel.packed_metadata, None, None, None, *given)
    run: Callable[[], None] = recorded.bound()
    run()
    run()
    launched, *again = entry.calls
    assert [as_addresses(call) for call in again] == [as_addresses(launched)] * 2
    assert not any(isinstance(value, Tensor) for value in recorded.values)


@pytest.mark.usefixtures("maps")
def test_a_launch_may_be_repeated_with_other_arguments() -> None:
    entry = Entry()
    kernel, given = compiled(entry, "tensors"), arguments("tensors")
    other = arguments("tensors")
    recorded = record(kernel, 5, given, STREAM)
    recorded.launch((other[0].data_ptr(), other[1].data_ptr(), 8, 99), 7, STREAM + 1)
    kernel.run(
        *(7, 1, 1, STREAM + 1, kernel.function, kernel.packed_metadata, None, None, None),
        *(*other[:2], 8, 99),
    )
    repeated, launched = entry.calls
    assert as_addresses(repeated) == as_addresses(launched)


class FlatLauncher:
    """The arguments one by one, as of Triton 3.6."""

    def __init__(self, entry: Entry) -> None:
        self.launch = entry

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *given: Any) -> None:
        self.launch(x, y, z, stream, function, False, False, None, None, *given)


def test_an_entry_may_take_arguments_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT_LEN", 13, raising=False)

    def flat_wrap(entry: Callable[..., None], signature: object, meta: object) -> Any:
        return entry

    entry = Entry()
    kernel, given = compiled(entry, "tensors"), arguments("tensors")
    kernel.run = FlatLauncher(entry)
    monkeypatch.setattr(nvidia, "wrap_handle_tensordesc", flat_wrap)
    recorded = record(kernel, 5, given, STREAM)
    recorded.bound()()
    recorded.launch(as_addresses(given), 5, STREAM)
    kernel.run(5, 1, 1, STREAM, kernel.function, kernel.packed_metadata, None, None, None, *given)
    bound, repeated, launched = (as_addresses(call) for call in entry.calls)
    assert bound == repeated == launched


def test_an_unknown_launcher_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nvidia, "wrap_handle_tensordesc")
    with pytest.raises(CannotRecord, match="wrap_handle_tensordesc"):
        record(compiled_without_wrap(), 5, arguments("tensors"), STREAM)


def compiled_without_wrap() -> Any:
    return SimpleNamespace(
        run=FlatLauncher(Entry()),
        metadata=SimpleNamespace(),
        src=SimpleNamespace(signature={}),
    )
