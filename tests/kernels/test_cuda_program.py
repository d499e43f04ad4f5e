"""CUDA sources and their compiler, as far as they can be tested without a GPU."""

import ctypes

import pytest
import torch

from stemserve.kernels import cuda_program
from stemserve.kernels.codec_hopper import FILES, Arguments
from stemserve.kernels.cuda_program import SOURCES, CudaError, compile_source

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_sources_need_no_header() -> None:
    for file in FILES:
        assert "#include" not in (SOURCES / file).read_text()


def test_the_arguments_are_laid_out_as_the_kernel_takes_them() -> None:
    """Eight addresses, six numbers, two factors."""
    assert ctypes.sizeof(Arguments) == 8 * 8 + 6 * 4 + 2 * 4


def test_a_missing_library_is_named() -> None:
    with pytest.raises(CudaError, match="libnothing"):
        cuda_program._library("libnothing.so.1")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.gpu
@on_gpu
def test_an_error_of_a_source_is_told() -> None:
    with pytest.raises(CudaError, match="undefined"):
        compile_source("__global__ void f() { nothing(); }", ["--gpu-architecture=sm_90a"])
