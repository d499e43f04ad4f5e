"""Triton's interpreter in place of a GPU."""

import os

import torch


def interpret_without_gpu() -> None:
    """Triton reads the variable when it is first imported, as transformers does with its models."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
