"""The likeliest of the tokens that a step's masks allow, for beams under a constraint."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.host_array import device_tensor
from stemserve.worker.sampling.logit_edits import unpacked
from stemserve.worker.sampling.params import TokenMask
from stemserve.worker.sampling.truncation import largest

Tops = tuple[Tensor, Tensor]  # [rows, count] int64 and float32, likeliest first


def masked_tops(
    raw: Tensor,  # [rows, vocab] log-probabilities
    masks: Sequence[TokenMask],  # [rows]
    count: int,
) -> Tops:
    """What is behind a mask's own number of tokens is of no use."""
    few = np.array([len(mask.ids) > 0 for mask in masks], np.bool_)
    if few.all():
        return _of_ids(raw, masks, count)
    if not few.any():
        return _of_bits(raw, masks, count)
    ids = raw.new_zeros((len(masks), count), dtype=torch.int64)
    logprobs = raw.new_zeros((len(masks), count))
    for rows, read in ((np.flatnonzero(few), _of_ids), (np.flatnonzero(~few), _of_bits)):
        at = device_tensor(rows.astype(np.int64), raw.device)
        found, values = read(raw[at], [masks[row] for row in rows.tolist()], count)
        ids.index_copy_(0, at, found)
        logprobs.index_copy_(0, at, values)
    return ids, logprobs


def _of_ids(raw: Tensor, masks: Sequence[TokenMask], count: int) -> Tops:
    """Nothing but these tokens is looked at."""
    columns = np.arange(max(count, *(len(mask.ids) for mask in masks)))
    lengths = np.array([len(mask.ids) for mask in masks])[:, None]
    padded = np.zeros((len(masks), len(columns)), np.int64)
    padded[columns < lengths] = np.concatenate([mask.ids for mask in masks])
    ids = device_tensor(padded, raw.device)
    is_there = device_tensor(columns < lengths, raw.device)
    # Of equal ones the first, so the lowest id.
    places, logprobs = largest(raw.gather(1, ids).where(is_there, -torch.inf), count)
    return ids.gather(1, places), logprobs


def _of_bits(raw: Tensor, masks: Sequence[TokenMask], count: int) -> Tops:
    allowed = unpacked([mask.bits for mask in masks], raw)
    return largest(raw.where(allowed, -torch.inf), count)
