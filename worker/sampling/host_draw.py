"""Tokens drawn from logits on a CPU; kernels/sampling draws the same on a CUDA device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import Int32
from stemserve.kernels.sampling.slot_tables import GREEDY_TEMPERATURE, DrawnTokens
from stemserve.worker.sampling.truncation import Truncation, truncate
from stemserve.worker.sampling.uniform import uniform

Params = NDArray[Any]  # SLOT
_CPU = torch.device("cpu")


def draw_on_host(
    logits: Tensor,  # [samples, vocab] float32
    params: Params,  # [samples]
    index: Int32,  # [samples] tokens that the slot's request generated before
) -> DrawnTokens:
    tokens = logits.argmax(-1)  # the lowest id on a tie
    random = np.flatnonzero(params["temperature"] > GREEDY_TEMPERATURE)
    if len(random):
        u = uniform(params["seed"][random], index[random].astype(np.uint64))
        tokens[random] = _draw(_rows_of(logits, random), params[random], device_tensor(u, _CPU))
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    return DrawnTokens(tokens, logprobs, ~(logits.amax(-1) + logprobs).isfinite())


def _rows_of(values: Tensor, rows: NDArray[np.intp]) -> Tensor:
    return values if len(rows) == len(values) else values[device_tensor(rows, _CPU)]


def _column(values: NDArray[np.float32]) -> Tensor:  # [n, 1]
    return device_tensor(values[:, None], _CPU)


def _draw(
    logits: Tensor,  # [samples, vocab] float32
    params: Params,  # [samples]
    u: Tensor,  # [samples] float64 in [0, 1)
) -> Tensor:  # [samples] int64
    """Temperature, top_k, top_p over what top_k left, min_p; then the inverse of the cumulated
    distribution, in the order of token ids, at u."""
    # Relative to the most likely token, whose weight is 1.
    distances = logits - logits.amax(-1, keepdim=True)
    weights = (distances / _column(params["temperature"])).exp()
    truncated = np.flatnonzero((params["top_k"] > 0) | (params["top_p"] < 1))
    if len(truncated):
        limits = Truncation.of(params["top_k"][truncated], params["top_p"][truncated], weights)
        weights[truncated] = truncate(_rows_of(weights, truncated), limits)
    if params["min_p"].any():
        weights = torch.where(weights < _column(params["min_p"]), 0.0, weights)
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    target = u[:, None] * cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, target, right=True).squeeze(-1)
    # A row of NaN finds no place; it must not point outside the vocabulary.
    return tokens.clamp_max(logits.shape[-1] - 1)
