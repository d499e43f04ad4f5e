"""A model for whose larger steps there is no memory."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tests.worker.assembly import assemble
from tests.worker.tiny_model import CPU, VOCAB, kv_shape
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.models.layer_ops import Gathered, PageWrites
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.loader import load_model
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.runner import ModelRunner


class SmallMemory:
    """Fails where it hurts: in the last layer, when nearly everything has been written."""

    def __init__(self, model: Transformer, rows: int) -> None:
        self._model = model
        self.rows = rows
        self.failing_logits = 0  # so many products of the head fail
        self.shortages = 0

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        keep_rows: Tensor | None,
        pages: PageWrites,
    ) -> Tensor:
        last = self._model.config.num_layers - 1

        def narrow(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer == last and len(q) > self.rows:
                self._run_short()
            return attend(layer, q, k, v)

        return self._model.hidden(token_ids, positions, narrow, keep_rows, pages)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.failing_logits:
            self.failing_logits -= 1
            self._run_short()
        return self._model.logits(hidden)

    def gather(
        self, hidden: Tensor, rows: NDArray[np.integer], tokens: NDArray[np.integer]
    ) -> Gathered:
        return self._model.gather(hidden, rows, tokens)

    def class_scores(self, hidden: Tensor) -> Tensor:
        return self._model.class_scores(hidden)

    def _run_short(self) -> None:
        self.shortages += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")


def save_wide_model(folder: Path, seed: int) -> None:
    """Its steps take 200 KB a row."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=20_000,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, kw_only=True)
class SmallRunner:
    runner: ModelRunner
    pool: KvPool
    model: SmallMemory


def small_runner(folder: Path, rows: int) -> SmallRunner:
    """Of a tiny model; it has no memory for more rows at once."""
    loaded = load_model(folder, dtype=torch.float32)
    model = SmallMemory(loaded, rows)
    pool = KvPool(kv_shape(loaded.config, 4), CPU)
    pool.poison(np.arange(pool.shape.pages, dtype=np.int32))
    runner = assemble(model, loaded.config.heads, pool)
    return SmallRunner(runner=runner, pool=pool, model=model)
