"""Which tokens of a distribution top_k and top_p leave, and which are the most likely.

Of equal tokens those with the lowest ids stay.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import Int32

# Sorting a vocabulary of 49,152 takes 8 times as long on a CPU as finding its largest 1,024.
FIRST_SORTED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    most: Tensor  # [rows] int64, at most so many tokens stay
    mass: Tensor  # [rows] float64, and then the fewest that hold this share; 1: all
    longest: int  # the largest top_k

    @classmethod
    def of(
        cls,
        top_k: Int32,  # [rows] 0: off
        top_p: NDArray[np.float64],  # [rows] 1: off
        like: Tensor,  # [rows, vocab], on the device of the logits
    ) -> Self:
        most = np.where(top_k > 0, top_k, like.shape[-1])
        return cls(
            most=index_tensor(most, like.device),
            mass=device_tensor(top_p, like.device),
            longest=int(top_k.max(initial=0)),
        )


def truncate(
    weights: Tensor,  # [rows, vocab] float32, not normalised
    limits: Truncation,
) -> Tensor:  # [rows, vocab] weights with 0 for the tokens that go
    vocab = weights.shape[-1]
    first = min(vocab, max(FIRST_SORTED, limits.longest))
    ordered = weights.topk(first).values if first < vocab else _sorted(weights)
    counts = _counts(weights, ordered, limits)
    if first < vocab and bool((counts > first).any()):
        ordered = _sorted(weights)
        counts = _counts(weights, ordered, limits)
    return torch.where(_are_largest(weights, ordered, counts), weights, 0.0)


def largest(
    values: Tensor,  # [rows, vocab]
    count: int,
) -> tuple[Tensor, Tensor]:  # [rows, count] ids and values, largest first
    """Of equal ones the lowest ids, but for -inf on a CPU: any."""
    if not count:
        rows = len(values)
        return values.new_empty(rows, 0, dtype=torch.int64), values.new_empty(rows, 0)
    if not values.is_cpu:  # where asking whether some are equal would wait for the device
        found = _largest_by_id(values, count)
        return found, values.gather(-1, found)
    first = values.topk(min(count + 1, values.shape[-1]))
    ids = first.indices[:, :count].sort(-1).values
    least = first.values[:, count - 1]
    # No column behind: all are there.
    tied = (first.values[:, count:] == least[:, None]).any(-1) & (least != -torch.inf)
    if tied.any():
        ids[tied] = _largest_by_id(values[tied], count).sort(-1).values
    ordered, places = values.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, places), ordered


def _largest_by_id(values: Tensor, count: int) -> Tensor:  # [rows, count] ids
    """One integer a token that orders by value and then by id, so that nothing is sorted but what
    is returned; on a CPU that takes ten times as long as finding the largest values."""
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = torch.iinfo(torch.int32).max
    ids = last - torch.arange(values.shape[-1], device=values.device)
    return last - (((ordered.long() << 32) | ids).topk(count).values & last)


def _sorted(weights: Tensor) -> Tensor:
    return weights.sort(-1, descending=True).values


def _counts(weights: Tensor, ordered: Tensor, limits: Truncation) -> Tensor:  # [rows]
    """How many tokens stay; more than there are columns in `ordered` if they do not tell."""
    columns = ordered.shape[-1]
    cumulated = ordered.cumsum(-1, dtype=torch.float64)
    last = cumulated.gather(-1, limits.most.clamp_max(columns)[:, None] - 1)
    everything = weights.sum(-1, dtype=torch.float64, keepdim=True)
    total = torch.where(limits.most[:, None] > columns, everything, last)
    by_mass = (cumulated < limits.mass[:, None] * total).sum(-1) + 1
    return torch.where(limits.mass < 1, by_mass.minimum(limits.most), limits.most)


def _are_largest(values: Tensor, ordered: Tensor, counts: Tensor) -> Tensor:
    """Mask of the `counts` largest values of each row."""
    threshold = ordered.gather(-1, counts.clamp_max(ordered.shape[-1])[:, None] - 1)
    above = values > threshold
    equal = values == threshold
    spare = counts[:, None] - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= spare))
