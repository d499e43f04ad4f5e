"""The fused kernels' results from their definitions, in plain torch: their oracle in float64."""

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., width]
    weight: Tensor,  # [..., width]
    eps: float,
) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def silu_mul(
    gate_up: Tensor,  # [rows, 2 * width]
) -> Tensor:  # [rows, width]
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def rotated(
    x: Tensor,  # [rows, heads, head_dim]
    cos: Tensor,  # [rows, head_dim / 2]
    sin: Tensor,  # [rows, head_dim / 2]
) -> Tensor:
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def logprobs(
    hidden: Tensor,  # [rows, width]
    weight: Tensor,  # [vocab, width]
) -> Tensor:  # [rows, vocab]
    return (hidden.double() @ weight.double().T).log_softmax(-1)
