"""Tokens drawn from logits on the device, as the tables of the slots say."""

from typing import NamedTuple

import torch
from torch import Tensor

from stemserve.kernels.sampling.slot_tables import GREEDY_TEMPERATURE, SlotTables

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
BITS = 48


class DrawnTokens(NamedTuple):
    tokens: Tensor  # [n] int64
    logprobs: Tensor  # [n] float32: of the logits as they are
    failed: Tensor  # [n] bool: there was nothing finite to draw from


def draw_tokens(
    logits: Tensor,  # [n, vocab] float32
    tables: SlotTables,
    slots: Tensor,  # [n] int64
    index: Tensor,  # [n] int64: tokens that the slot's request generated before
) -> DrawnTokens:
    """Also keeps the tokens as the slots' last ones. No launch depends on what the tensors hold."""
    vocab = logits.shape[1]
    params = tables.params[slots]
    singles, doubles = params.view(torch.float32), params.view(torch.float64)
    temperature, top_p, min_p = singles[:, 0:1], doubles[:, 1:2], singles[:, 4:5]
    top_k = params.view(torch.int32)[:, 1:2].long()
    most = torch.where(top_k > 0, top_k, vocab)
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperature.clamp_min(1e-6)).exp()
    ordered, ids = weights.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(vocab, device=logits.device)
    cumulated = ordered.cumsum(-1, dtype=torch.float64)
    total = cumulated.gather(-1, most - 1)
    by_mass = (cumulated < top_p * total).sum(-1, keepdim=True) + 1
    count = torch.where(top_p < 1, by_mass.minimum(most), most)
    stays = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, ids, rank < count)
    weights = torch.where(stays & (weights >= min_p), weights, 0.0)
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    target = _uniform(params[:, 3], index)[:, None] * cumulated[:, -1:]
    random = torch.searchsorted(cumulated, target, right=True).clamp_max(vocab - 1)
    greedy = logits.argmax(-1, keepdim=True)
    tokens = torch.where(temperature > GREEDY_TEMPERATURE, random, greedy)
    logprobs = (logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)).squeeze(-1)
    tokens = tokens.squeeze(-1)
    tables.last_token.index_copy_(0, slots, tokens)
    return DrawnTokens(tokens, logprobs, ~logprobs.isfinite())


def _uniform(seeds: Tensor, index: Tensor) -> Tensor:  # [n] float64 in [0, 1)
    """Philox 4x32-10: the key is the seed, the counter the index."""
    c0, c1 = index & LOW, (index >> 32) & LOW
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seeds & LOW, (seeds >> 32) & LOW
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & LOW) ^ c1 ^ k0,
            second & LOW,
            ((first >> 32) & LOW) ^ c3 ^ k1,
            first & LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    bits = (c0 << (BITS - 32)) | (c1 >> (64 - BITS))
    return bits.double() / 2.0**BITS
