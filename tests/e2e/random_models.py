"""Small models, in transformers and in a worker of ours: random ones, and one with given logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from tests.e2e.engine_rig import EngineRig
from tests.e2e.in_process_engine import InProcessWorker, start_worker
from tests.e2e.oracle import Oracle
from tests.reference_models import random_model

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
VOCAB = 272  # wider than the tokenizer's 258
CONTEXT_TOKENS = 2048
KV_PAGES = 700
HEADS: dict[str, dict[str, object]] = {  # where the family's default is not hidden size / heads
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"head_dim": 12},
}


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    oracle: Oracle
    worker: InProcessWorker


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(0, VOCAB, count).tolist()
    return tokens


class MakeRig(Protocol):
    def __call__(
        self,
        model: RandomModel,
        *,
        max_step_tokens: int = 512,
        eos_ids: frozenset[int] = frozenset(),
    ) -> EngineRig: ...


class RandomModels:
    def __init__(
        self,
        folders: pytest.TempPathFactory,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        flags: Sequence[str] = (),
    ) -> None:
        self._folders = folders
        self._device = device
        self._dtype = dtype
        self._flags = flags
        self._made: dict[tuple[str, int, int, int], RandomModel] = {}

    def lm(
        self,
        family: str,
        *,
        context_tokens: int = CONTEXT_TOKENS,
        kv_pages: int = KV_PAGES,
        query_heads: int = 4,
    ) -> RandomModel:
        key = (family, context_tokens, kv_pages, query_heads)
        if key not in self._made:
            config = {**HEADS[family], "num_attention_heads": query_heads}
            class_name = f"{family}ForCausalLM"
            self._made[key] = self._make(class_name, context_tokens, kv_pages, config)
        return self._made[key]

    def seeded(self, family: str, seed: int) -> RandomModel:
        """A model of its own for each seed."""
        torch.default_generator.manual_seed(seed)
        heads = {**HEADS[family], "tie_word_embeddings": bool(seed % 2)}
        model = random_model(f"{family}ForCausalLM", vocab_size=VOCAB, **heads)
        return self._serve(model, kv_pages=KV_PAGES)

    def classifier(self, family: str, num_labels: int) -> RandomModel:
        class_name = f"{family}ForSequenceClassification"
        config = {**HEADS[family], "num_labels": num_labels}
        return self._make(class_name, CONTEXT_TOKENS, KV_PAGES, config)

    def bigram(self, logits: Sequence[Sequence[float]]) -> RandomModel:
        """The logits of the next token are the row of the last token, whatever came before."""
        model = random_model("LlamaForCausalLM", vocab_size=len(logits))
        hidden_size: int = model.config.hidden_size
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
                    weight.zero_()
            weights["model.norm.weight"].fill_(1.0)
            for token, row in enumerate(logits):
                weights["model.embed_tokens.weight"][token, token] = 1.0
                # The norm makes the square root of the hidden size of a single 1.
                column = torch.tensor(row) / hidden_size**0.5
                weights["lm_head.weight"][:, token] = column
        return self._serve(model, kv_pages=KV_PAGES)

    def _make(
        self, class_name: str, context_tokens: int, kv_pages: int, config: Mapping[str, object]
    ) -> RandomModel:
        torch.default_generator.manual_seed(20)
        model = random_model(
            class_name, vocab_size=VOCAB, max_position_embeddings=context_tokens, **config
        )
        return self._serve(model, kv_pages=kv_pages)

    def _serve(self, model: Any, *, kv_pages: int) -> RandomModel:
        folder = self._folders.mktemp("model")
        model.save_pretrained(folder)
        worker = start_worker(
            folder,
            kv_pages=kv_pages,
            device=self._device,
            dtype=self._dtype,
            flags=self._flags,
        )
        return RandomModel(oracle=Oracle(model), worker=worker)
