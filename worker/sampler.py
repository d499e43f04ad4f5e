"""The next tokens: drawn from logits as each slot's parameters say."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.layout import Int32
from stemserve.kernels.sampling.slot_tables import SLOT, SlotTables
from stemserve.worker.blobs import BadPlan
from stemserve.worker.sampler_params import SamplerParams
from stemserve.worker.step import Samples, Step
from stemserve.worker.transfer import to_host
from stemserve.worker.truncation import Truncation, largest, truncate
from stemserve.worker.uniform import uniform

GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token a sample. A sample that had nothing finite to draw from is failed."""

    tokens: Tensor  # [samples] int64
    logprobs: Tensor  # [samples] float32, raw: before bias, bans, temperature and truncation
    failed: Tensor  # [samples] bool
    top_counts: Int32  # [samples] how many of the columns below each sample asked for
    top_ids: Tensor  # [samples, most] int64, most likely first; no columns where nobody asks
    top_logprobs: Tensor  # [samples, most] float32, raw

    def on_host(self) -> "Drawn":
        """Complete once an event that is recorded after this call has passed."""
        return Drawn(
            tokens=to_host(self.tokens),
            logprobs=to_host(self.logprobs),
            failed=to_host(self.failed),
            top_counts=self.top_counts,
            top_ids=to_host(self.top_ids),
            top_logprobs=to_host(self.top_logprobs),
        )


class Sampler:
    def __init__(self, slots: int, device: torch.device) -> None:
        self._params: list[SamplerParams | None] = [None] * slots
        self._has_token = np.zeros(slots, np.bool_)
        self.tables = SlotTables(slots, device)
        self._device = device

    def check(self, step: Step) -> None:
        """Raises BadPlan where the step reads a slot that holds nothing."""
        admitted = {params.slot for params in step.samplers}
        for slot in step.samples.slots.tolist():
            if slot not in admitted and self._params[slot] is None:
                raise BadPlan(f"sample_slots: no sampler was sent for slot {slot}")
        read = -1 - step.token_ids[step.token_ids < 0]
        if not self._has_token[read].all():
            slot = int(read[~self._has_token[read]][0])
            raise BadPlan(f"token_ids: no token was sampled into slot {slot} yet")

    def admit(self, samplers: Iterable[SamplerParams]) -> None:
        new = tuple(samplers)
        for params in new:
            self._params[params.slot] = params
            self._has_token[params.slot] = False
        rows = [(p.temperature, p.top_k, p.top_p, p.min_p, 0, p.seed) for p in new]
        self.tables.admit(np.asarray([p.slot for p in new], np.int64), np.array(rows, SLOT))

    @contextmanager
    def kept_on_error(self, samples: Samples) -> Generator[None]:
        """An error inside takes back the tokens that were drawn inside."""
        before = self.tables.last_token.clone() if len(samples.slots) else None
        try:
            yield
        except Exception:
            if before is not None:
                self.tables.last_token.copy_(before)
            raise

    def token_ids(self, token_ids: Int32) -> Tensor:  # [rows] int64
        """The step's token ids, with -1 - slot replaced by the slot's last token."""
        ids = device_tensor(token_ids.astype(np.int64), self._device)
        rows = np.flatnonzero(token_ids < 0)
        if len(rows):
            slots = device_tensor(-1 - token_ids[rows].astype(np.int64), self._device)
            ids[device_tensor(rows, self._device)] = self.tables.last_token[slots]
        return ids

    def takes_likeliest(self, samples: Samples) -> NDArray[np.bool_]:  # [samples]
        """Which samples are the most likely token, whatever the logits of the others."""
        pairs = zip(samples.slots.tolist(), samples.index.tolist(), strict=True)
        return np.array([_is_likeliest(self._known(slot), index) for slot, index in pairs], bool)

    def is_plain(self, samples: Samples) -> NDArray[np.bool_]:  # [samples]
        """Which samples the tables of the slots say all about."""
        pairs = zip(samples.slots.tolist(), samples.index.tolist(), strict=True)
        return np.array([_is_plain(self._known(slot), index) for slot, index in pairs], bool)

    def drew(self, slots: Int32) -> None:
        """The device put tokens into the slots."""
        self._has_token[slots] = True

    def take(
        self,
        tokens: Tensor,  # [samples] int64, the most likely ones
        logprobs: Tensor,  # [samples] float32
        failed: Tensor,  # [samples] bool
        slots: Int32,  # [samples]
    ) -> Drawn:
        self._keep(tokens, slots)
        none = logprobs.new_empty((len(slots), 0))
        return Drawn(
            tokens=tokens,
            logprobs=logprobs,
            failed=failed,
            top_counts=np.zeros(len(slots), np.int32),
            top_ids=none.long(),
            top_logprobs=none,
        )

    def draw(
        self,
        logits: Tensor,  # [samples, vocab] float32; overwritten
        logprobs: Tensor,  # [samples, vocab] float32, raw
        slots: Int32,  # [samples]
        index: Int32,  # [samples] tokens that the slot's request generated before
    ) -> Drawn:
        params = [self._known(slot) for slot in slots.tolist()]
        _edit(logits, params, index.tolist())
        tokens = logits.argmax(-1)  # the lowest id on a tie
        random = [i for i, p in enumerate(params) if p.temperature > GREEDY_TEMPERATURE]
        if random:
            seeds = np.asarray([params[i].seed for i in random], np.uint64)
            u = device_tensor(uniform(seeds, index[random].astype(np.uint64)), self._device)
            rows = _rows(random, len(params), self._device)
            tokens[rows] = _draw(logits[rows], [params[i] for i in random], u)
        self._keep(tokens, slots)
        counts = np.asarray([p.top_logprobs for p in params], np.int32)
        top_ids, top_logprobs = largest(logprobs, int(counts.max(initial=0)))
        drawn = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
        return Drawn(
            tokens=tokens,
            logprobs=drawn,
            # A NaN that is banned is left in the log-probabilities.
            failed=~(logits.amax(-1) + drawn).isfinite(),
            top_counts=counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _keep(self, tokens: Tensor, slots: Int32) -> None:
        self.tables.last_token[index_tensor(slots, self._device)] = tokens
        self.drew(slots)

    def _known(self, slot: int) -> SamplerParams:
        params = self._params[slot]
        if params is None:
            raise BadPlan(f"sample_slots: no sampler was sent for slot {slot}")
        return params


def _is_likeliest(params: SamplerParams, index: int) -> bool:
    return params.temperature <= GREEDY_TEMPERATURE and _is_plain(params, index)


def _is_plain(params: SamplerParams, index: int) -> bool:
    banned = params.min_tokens_banned_ids if index < params.min_new_tokens else ()
    edited = len(params.bias_ids) or len(params.banned_ids) or len(banned)
    return not (edited or params.top_logprobs)


def _edit(logits: Tensor, params: Sequence[SamplerParams], index: Sequence[int]) -> None:
    """Add the biases and ban the banned, in place."""
    biased = [(i, p.bias_ids) for i, p in enumerate(params) if len(p.bias_ids)]
    if biased:
        values = np.concatenate([params[i].bias_values for i, _ in biased])
        bias = device_tensor(values, logits.device)
        logits.index_put_(_cells(biased, logits.device), bias, accumulate=True)
    banned = [(i, p.banned_ids) for i, p in enumerate(params) if len(p.banned_ids)]
    banned += [
        (i, p.min_tokens_banned_ids)
        for i, p in enumerate(params)
        if index[i] < p.min_new_tokens and len(p.min_tokens_banned_ids)
    ]
    if banned:
        minus_infinity = torch.full((), -torch.inf, device=logits.device)
        logits.index_put_(_cells(banned, logits.device), minus_infinity)


def _cells(ids: Sequence[tuple[int, Int32]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows = np.repeat([row for row, _ in ids], [len(columns) for _, columns in ids])
    columns = np.concatenate([columns for _, columns in ids]).astype(np.int64)
    return device_tensor(rows, device), device_tensor(columns, device)


def _rows(rows: Sequence[int], total: int, device: torch.device) -> slice | Tensor:
    return slice(None) if len(rows) == total else device_tensor(np.asarray(rows), device)


def _column(values: Sequence[float], device: torch.device) -> Tensor:  # [n, 1] float32
    return device_tensor(np.asarray(values, np.float32)[:, None], device)


def _draw(
    logits: Tensor,  # [samples, vocab] float32
    params: Sequence[SamplerParams],
    u: Tensor,  # [samples] float64 in [0, 1)
) -> Tensor:  # [samples] int64
    """Temperature, top_k, top_p over what top_k left, min_p; then the inverse of the cumulated
    distribution, in the order of token ids, at u."""
    temperature = _column([p.temperature for p in params], logits.device)
    # Relative to the most likely token, whose weight is 1.
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()
    truncated = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1]
    if truncated:
        rows = _rows(truncated, len(params), logits.device)
        limits = Truncation.of([(params[i].top_k, params[i].top_p) for i in truncated], weights)
        weights[rows] = truncate(weights[rows], limits)
    if any(p.min_p for p in params):
        min_p = _column([p.min_p for p in params], logits.device)
        weights = torch.where(weights < min_p, 0.0, weights)
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    target = u[:, None] * cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, target, right=True).squeeze(-1)
    # A row of NaN finds no place; it must not point outside the vocabulary.
    return tokens.clamp_max(logits.shape[-1] - 1)
