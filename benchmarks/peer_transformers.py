"""transformers as a peer: the usual ways to score and continue sequences that share a prefix."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    StaticCache,
)
from workloads import Int32, ScoreWorkload

Float32 = NDArray[np.float32]


class TransformersPeer:
    """One fp32 model with sdpa attention. Every method answers numbers; none keeps a cache."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )

    @torch.inference_mode()
    def score_padded(self, workload: ScoreWorkload) -> Float32:  # [items, labels]
        """All sequences, each with its whole prefix, as one batch (equal lengths: no padding)."""
        ids = torch.from_numpy(workload.sequences).long()
        logits = self.model(ids, logits_to_keep=1, use_cache=False).logits[:, -1]
        return _label_probabilities(logits, workload.label_ids)

    @torch.inference_mode()
    def prefill(self, prefix: Int32) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        self.model(torch.from_numpy(prefix).long()[None], cache=cache, logits_to_keep=1)
        return cache

    def repeated(self, cache: DynamicCache, *, batch: int) -> DynamicCache:
        """A cache of `batch` rows with a copy of the keys and values for each; a step grows it."""
        wide = copy.deepcopy(cache)
        wide.batch_repeat_interleave(batch)
        return wide

    @torch.inference_mode()
    def preallocated(self, cache: DynamicCache, *, batch: int, room: int) -> StaticCache:
        """The same, with room for more tokens: a step writes in place."""
        wide = StaticCache(
            config=self.model.config, max_cache_len=int(cache.get_seq_length()) + room
        )
        for layer, (keys, values, *_) in enumerate(cache):
            wide.update(keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1), layer)
        return wide

    @torch.inference_mode()
    def score_items(self, workload: ScoreWorkload, cache: DynamicCache | StaticCache) -> Float32:
        """The items alone, over a cache of the prefix that is already as wide as the batch."""
        ids = torch.from_numpy(workload.items).long()
        output = self.model(ids, cache=cache, logits_to_keep=1)
        return _label_probabilities(output.logits[:, -1], workload.label_ids)

    @torch.inference_mode()
    def log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> Float32:
        """One pair at a time: log P of each token of `continuation` after `context`."""
        ids = torch.tensor([[*context, *continuation]])
        keep = len(continuation) + 1
        logits = self.model(ids, logits_to_keep=keep, use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1 - keep :, None])
        values: Float32 = logprobs[:, 0].numpy()
        return values

    @torch.inference_mode()
    def decode(
        self, cache: DynamicCache | StaticCache, first: Sequence[int], *, steps: int
    ) -> "Decoded":
        """Greedy steps of a batch whose rows continue with `first`."""
        token = torch.tensor(first)[:, None]
        logprobs: list[Tensor] = []
        seconds: list[float] = []
        for _ in range(steps):
            started = time.perf_counter()
            logits = self.model(token, cache=cache).logits[:, -1]
            token = logits.argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - started)
            logprobs.append(logits.log_softmax(-1).gather(-1, token)[:, 0])
        return Decoded(logprobs=torch.stack(logprobs).numpy(), seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoded:
    logprobs: Float32  # [steps, batch] of the most likely token
    seconds: list[float]  # of each step


def _label_probabilities(logits: Tensor, label_ids: Sequence[int]) -> Float32:
    return logits.softmax(-1)[:, list(label_ids)].numpy()
