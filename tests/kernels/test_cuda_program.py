"""CUDA sources and their compiler, as far as they can be tested without a GPU."""

import re

import pytest
import torch

from stemserve.kernels import cuda_program
from stemserve.kernels.codec.hopper import FILES, FLOATS, INTEGERS, POINTERS
from stemserve.kernels.cuda_program import SOURCES, CudaError, compile_source

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_sources_need_no_header() -> None:
    for file in FILES:
        assert "#include" not in (SOURCES / file).read_text()


def test_the_arguments_are_in_the_order_of_the_kernel() -> None:
    source = (SOURCES / FILES[-1]).read_text()
    signature = re.search(r"tree_kernel\((.*?)\)", source, re.DOTALL)
    assert signature
    names = [part.split()[-1].lstrip("*") for part in signature.group(1).split(",")]
    assert names == ["k_pages", "v_pages", *POINTERS, *INTEGERS, *FLOATS]


def test_a_missing_library_is_named() -> None:
    with pytest.raises(CudaError, match="libnothing"):
        cuda_program._library("libnothing.so.1")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.gpu
@on_gpu
def test_an_error_of_a_source_is_told() -> None:
    with pytest.raises(CudaError, match="undefined"):
        compile_source("__global__ void f() { nothing(); }", ["--gpu-architecture=sm_90a"])
