"""Launches of a Triton kernel, layer after layer, with arguments of the same kinds.

Triton binds the arguments of every launch anew, to find the program that it compiled for their
kinds; that takes the host two thirds of a launch.
"""

from typing import Any

from torch import Tensor

ALIGNMENT = 16  # bytes, by which Triton tells pointers apart


class RepeatedLaunch:
    """One kernel on one grid; the arguments are tensors, numbers and constants, in this order."""

    def __init__(self, kernel: Any, programs: int, **constants: int) -> None:
        """`constants` are those of the kernel, in its order, and then options of the launch."""
        self._kernel = kernel
        self._programs = programs
        self._constants = constants
        self._key: tuple[object, ...] | None = None
        self._launch: Any = None
        self._values: tuple[int, ...] = ()

    def __call__(self, tensors: tuple[Tensor, ...], numbers: tuple[int, ...]) -> None:
        key = (*(tensor.data_ptr() % ALIGNMENT for tensor in tensors), numbers, tensors[1].dtype)
        if key == self._key:
            self._launch(*tensors, *numbers, *self._values)
            return
        compiled = self._kernel[(self._programs,)](*tensors, *numbers, **self._constants)
        if compiled is not None:  # the interpreter compiles nothing
            names = self._kernel.arg_names
            self._values = tuple(v for name, v in self._constants.items() if name in names)
            self._launch = compiled[(self._programs, 1, 1)]
            self._key = key
