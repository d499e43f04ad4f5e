"""CUDA C++ kernels of this package: compiled at first use with NVRTC, launched by the driver.

NVRTC comes with every CUDA build of PyTorch, so neither a compiler nor headers must be installed.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).parent / "csrc"
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
ELEMENT_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of CUtensorMap


TensorMap = ctypes.Array[ctypes.c_char]


class CudaError(RuntimeError):
    """A call of the driver or of NVRTC failed."""


def _library(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CudaError(f"{name} cannot be loaded: {error}") from error


@cache
def _driver() -> ctypes.CDLL:
    return _library("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    """PyTorch's own, or the system's."""
    major = str(torch.version.cuda).split(".")[0]
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or []) if package else []:
        for found in sorted(Path(folder).glob(f"cu{major}/lib/libnvrtc-builtins.so.{major}.*")):
            _library(str(found))  # which the other looks for by its name
        for found in sorted(Path(folder).glob(f"cu{major}/lib/libnvrtc.so.{major}")):
            return _library(str(found))
    return _library(f"libnvrtc.so.{major}")


def _checked(status: int, call: str) -> None:
    if status:
        raise CudaError(f"{call} failed with code {status}")


def compile_source(source: str, options: Sequence[str], nvrtc: ctypes.CDLL | None = None) -> bytes:
    """The machine code of a program without headers."""
    lib = nvrtc or _nvrtc()
    program = ctypes.c_void_p()
    text = source.encode()
    _checked(
        lib.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if lib.nvrtcCompileProgram(program, len(options), flags):
            raise CudaError(f"a kernel does not compile:\n{_log(lib, program)}")
        size = ctypes.c_size_t()
        _checked(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _checked(lib.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _log(lib: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _checked(lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
    text = ctypes.create_string_buffer(size.value)
    _checked(lib.nvrtcGetProgramLog(program, text), "nvrtcGetProgramLog")
    return text.value.decode(errors="replace")


def _primary_context(device: torch.device) -> ctypes.c_void_p:
    """The context that PyTorch uses too."""
    cuda, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _checked(cuda.cuInit(0), "cuInit")
    _checked(cuda.cuDeviceGet(ctypes.byref(handle), device.index or 0), "cuDeviceGet")
    status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    _checked(status, "cuDevicePrimaryCtxRetain")
    return context


class CudaKernel:
    """One kernel of some source files, in PyTorch's context of a device."""

    def __init__(
        self,
        files: Sequence[str],
        name: str,
        options: Sequence[str],
        shared_bytes: int,
        device: torch.device,
    ) -> None:
        """`files`: compiled as one, in this order."""
        code = compile_source("".join((SOURCES / file).read_text() for file in files), options)
        self._shared_bytes = shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        cuda = _driver()
        self._context = _primary_context(device)
        self._enter_context()
        _checked(cuda.cuModuleLoadData(ctypes.byref(self._module), code), "cuModuleLoadData")
        _checked(
            cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
            "cuModuleGetFunction",
        )
        _checked(
            cuda.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared_bytes),
            "cuFuncSetAttribute",
        )

    def _enter_context(self) -> None:
        """A thread that has not used CUDA has no context."""
        current = ctypes.c_void_p()
        _checked(_driver().cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
        if current.value is None:
            _checked(_driver().cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def tensor_map(self, tensor: Tensor, box: Sequence[int]) -> TensorMap:
        return tensor_map(tensor, box)

    def launch(self, blocks: int, threads: int, addresses: Sequence[int]) -> None:
        """`addresses` of the arguments, in the kernel's order; runs on PyTorch's current stream."""
        arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        self._enter_context()
        cuda: Any = torch.cuda  # partly untyped
        stream = ctypes.c_void_p(cuda.current_stream().cuda_stream)
        status = _driver().cuLaunchKernel(
            self._function, blocks, 1, 1, threads, 1, 1, self._shared_bytes, stream, arguments, None
        )
        _checked(status, "cuLaunchKernel")


def tensor_map(tensor: Tensor, box: Sequence[int]) -> TensorMap:
    """How the copy engine reads boxes of a tensor into swizzled shared memory.

    `box` is from the last dimension to the first, of 64 elements there; what lies outside the
    tensor is read as zeros. A kernel takes the map by value.
    """
    rank = tensor.dim()
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    skipped = -ctypes.addressof(memory) % MAP_ALIGNMENT
    aligned = (ctypes.c_char * MAP_BYTES).from_buffer(memory, skipped)
    sizes = (ctypes.c_uint64 * rank)(*reversed(tensor.shape))
    bytes_apart = [stride * tensor.itemsize for stride in reversed(tensor.stride()[:-1])]
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(aligned),
        ELEMENT_TYPES[tensor.dtype],
        rank,
        ctypes.c_void_p(tensor.data_ptr()),
        sizes,
        (ctypes.c_uint64 * (rank - 1))(*bytes_apart),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        SWIZZLE_128,
        0,
        0,
    )
    _checked(status, "cuTensorMapEncodeTiled")
    return aligned
