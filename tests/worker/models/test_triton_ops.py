"""The fused operations of a CUDA device in whole models, against transformers and plain torch.

Without a GPU they run in Triton's interpreter.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.worker.models.test_transformer import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE
from torch import Tensor

pytest.importorskip("triton")

from stemserve.kernels.host_array import device_tensor
from stemserve.worker.memory.kv_pool import KvPool, KvShape
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.loader import load_model
from stemserve.worker.models.torch_ops import TorchOps
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.models.triton_ops import TritonOps
from stemserve.worker.steps.kv_writes import KvWrites

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS = 9
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, all biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama, yarn rope": ("LlamaForCausalLM", {"rope_parameters": YARN_ROPE}),
    "llama, linear rope": ("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE}),
    "qwen2, tied head": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", {"head_dim": 12, "rms_norm_eps": 1e-2}),
}
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(97, (TOKENS,), device=DEVICE)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    return load_model(folder, dtype=dtype, device=DEVICE, make_ops=TritonOps)


def logits_of(model: Transformer, token_ids: Tensor, attend: Attend) -> Tensor:
    positions = torch.arange(len(token_ids), device=DEVICE)
    return model.logits(model.hidden(token_ids, positions, attend))


@pytest.mark.parametrize(("class_name", "config"), CASES.values(), ids=list(CASES))
def test_float32_logits_equal_those_of_transformers(
    save_model: Any,
    causal_attend: Attend,
    token_ids: Tensor,
    tmp_path: Path,
    class_name: str,
    config: dict[str, object],
) -> None:
    reference = save_model(class_name, **config)
    logits = logits_of(load(tmp_path), token_ids, causal_attend)
    with torch.no_grad():
        expected = reference(token_ids.cpu()[None], use_cache=False).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", ["llama", "qwen2, tied head", "qwen3", "mistral"])
def test_half_precision_loses_no_more_than_transformers_does(
    save_model: Any, causal_attend: Attend, tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    class_name, config = CASES[case]
    token_ids = torch.randint(97, (200,), device=DEVICE)
    reference = save_model(class_name, **config).to(DEVICE)
    frequencies = {name: buffer.clone() for name, buffer in reference.named_buffers()}
    reference.to(dtype)
    logits = logits_of(load(tmp_path, dtype), token_ids, causal_attend)
    with torch.no_grad():
        lossy = reference(token_ids[None], use_cache=False).logits[0].double()
        reference.double()
        # `to(dtype)` rounded the frequencies of RoPE too: exact angles are part of exact logits.
        for name, buffer in reference.named_buffers():
            buffer.copy_(frequencies[name])
        exact = reference(token_ids[None], use_cache=False).logits[0]
    ours, theirs = (logits.double() - exact).abs(), (lossy - exact).abs()
    assert ours.mean() <= 1.25 * theirs.mean()
    # Not the largest: of 20,000 errors of two ways to round, one may be twice the other.
    assert ours.quantile(0.999) <= 1.5 * theirs.quantile(0.999)


@pytest.mark.parametrize("kept", [[], [0], [8, 5, 5, 2]])
def test_kept_rows_are_the_rows_of_the_whole(
    save_model: Any, causal_attend: Attend, token_ids: Tensor, tmp_path: Path, kept: list[int]
) -> None:
    save_model("Qwen3ForCausalLM", head_dim=16)
    model = load(tmp_path)
    rows = torch.tensor(kept, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(TOKENS, device=DEVICE)
    cut = model.hidden(token_ids, positions, causal_attend, rows)
    whole = model.hidden(token_ids, positions, causal_attend)
    torch.testing.assert_close(cut, whole[rows], atol=1e-5, rtol=0)


def test_pages_hold_what_plain_torch_puts_there(
    save_model: Any, causal_attend: Attend, token_ids: Tensor, tmp_path: Path
) -> None:
    save_model("Qwen3ForCausalLM", head_dim=16)
    slots = np.array([13, -1, 12, 0, 1, 2, -1, 30, 7], np.int32)
    pools: list[KvPool] = []
    for make_ops in (TritonOps, TorchOps):
        model = load_model(tmp_path, dtype=torch.float32, device=DEVICE, make_ops=make_ops)
        config = model.config
        shape = KvShape(
            layers=config.num_layers,
            pages=8,
            page_size=4,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
        )
        pools.append(KvPool(shape, DEVICE))
        writes = KvWrites(pools[-1], device_tensor(slots, DEVICE))
        positions = torch.arange(TOKENS, device=DEVICE)
        model.hidden(token_ids, positions, causal_attend, None, writes)
    ours, expected = pools
    written = torch.zeros(9 * 4, dtype=torch.bool, device=DEVICE)
    written[torch.from_numpy(slots[slots >= 0]).long().to(DEVICE)] = True  # pyright: ignore[reportUnknownMemberType]
    for layer in range(3):
        for found, wanted in (
            (ours.k_pages(layer), expected.k_pages(layer)),
            (ours.v_pages(layer), expected.v_pages(layer)),
        ):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
            assert torch.equal(found.flatten(0, 1).abs().amax((1, 2)) > 0, written)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_chosen_log_probabilities_are_over_the_full_vocabulary(
    save_model: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    save_model("LlamaForCausalLM", tie_word_embeddings=True, vocab_size=300)
    model = load(tmp_path, dtype)
    hidden = torch.randn(5, 48, device=DEVICE).to(dtype)
    rows, tokens = np.array([4, 0, 0, 3]), np.array([299, 0, 7, 100])
    found = model.gather(hidden, rows, tokens)
    exact = (hidden.double() @ embedding(model).double().T).log_softmax(-1).cpu()
    torch.testing.assert_close(
        found.logprobs.cpu().double(), exact[rows, tokens], atol=1e-4, rtol=0
    )
    assert torch.equal(found.argmax.cpu(), exact.argmax(-1))
    assert not found.failed.any()


def embedding(model: Transformer) -> Tensor:
    return model._embedding  # pyright: ignore[reportPrivateUsage]
