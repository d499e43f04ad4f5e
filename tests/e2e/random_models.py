"""Small random models of every family: in transformers, and in a worker of ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import pytest
import torch
from tests.e2e.engine_rig import EngineRig, InProcessWorker, start_worker
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


class MakeRig(Protocol):
    def __call__(
        self,
        model: RandomModel,
        *,
        max_step_tokens: int = 512,
        eos_ids: frozenset[int] = frozenset(),
    ) -> EngineRig: ...


class RandomModels:
    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._made: dict[tuple[str, int, int], RandomModel] = {}

    def lm(
        self, family: str, *, context_tokens: int = CONTEXT_TOKENS, kv_pages: int = KV_PAGES
    ) -> RandomModel:
        key = (f"{family}ForCausalLM", context_tokens, kv_pages)
        if key not in self._made:
            self._made[key] = self._make(*key, HEADS[family])
        return self._made[key]

    def classifier(self, family: str, num_labels: int) -> RandomModel:
        class_name = f"{family}ForSequenceClassification"
        config = {**HEADS[family], "num_labels": num_labels}
        return self._make(class_name, CONTEXT_TOKENS, KV_PAGES, config)

    def _make(
        self, class_name: str, context_tokens: int, kv_pages: int, config: Mapping[str, object]
    ) -> RandomModel:
        torch.default_generator.manual_seed(20)
        model = random_model(
            class_name, vocab_size=VOCAB, max_position_embeddings=context_tokens, **config
        )
        folder = self._folders.mktemp(class_name)
        model.save_pretrained(folder)
        return RandomModel(oracle=Oracle(model), worker=start_worker(folder, kv_pages=kv_pages))
