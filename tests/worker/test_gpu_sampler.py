"""Draws on a GPU, against those on a CPU."""

import numpy as np
import pytest
import torch
from tests.worker.plans import blob
from tests.worker.tiny_model import CPU

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import encode_float32
from stemserve.worker.sampling.params import decode_masks, decode_sampler
from stemserve.worker.sampling.sampler import Drawn, Sampler
from stemserve.worker.steps.reads import Samples


def random_sampler(rng: np.random.Generator, slot: int) -> worker_pb2.Sampler:
    return worker_pb2.Sampler(
        slot=slot,
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=int(rng.choice([0, 1, 3, 20])),
        top_p=float(rng.choice([1.0, 0.9, 0.5, 0.05])),
        min_p=float(rng.choice([0.0, 0.2])),
        seed=int(rng.integers(2**63)),
    )


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_draws() -> None:
    """Plain samples beside biased, banned and curious ones."""
    rng = np.random.default_rng(seed := int(torch.seed()) % 2**31)
    print(f"seed {seed}")
    rows, vocab = 40, 2000
    logits = device_tensor(rng.normal(0, 3, (rows, vocab)).astype(np.float32), CPU)
    messages = [random_sampler(rng, slot) for slot in range(rows)]
    for slot, params in enumerate(messages):
        likely: list[int] = logits[slot].topk(4).indices.numpy().tolist()
        params.top_logprobs = slot % 3
        if slot % 4 == 1:
            params.banned_ids = blob(likely[:2])
        if slot % 4 == 2:
            params.bias_ids = blob(likely)
            params.bias_values = encode_float32(np.array([-1.0, 2.0, -np.inf, 0.5]))
        if slot % 4 == 3:
            params.min_tokens_banned_ids, params.min_new_tokens = blob(likely[1:]), 3
    at = int32(range(rows))
    samples = Samples(rows=at, slots=at, index=rng.integers(0, 6, rows).astype(np.int32))
    drawn: list[Drawn] = []
    for device in (CPU, torch.device("cuda")):
        sampler = Sampler(rows, device)
        sampler.admit([decode_sampler(m, slots=rows, vocab_size=vocab) for m in messages])
        drawn.append(sampler.draw(logits.to(device), samples).on_host())
        torch.cuda.synchronize()
        assert torch.equal(sampler.tables.last_token[:rows].cpu(), drawn[-1].tokens)
    cpu, gpu = drawn
    # A random number that lies where two tokens meet is a matter of rounding.
    assert (cpu.tokens != gpu.tokens).sum() <= 1
    same = cpu.tokens == gpu.tokens
    assert (cpu.logprobs - gpu.logprobs)[same].abs().max() < 1e-5
    assert not gpu.failed.any()
    assert gpu.top_counts.tolist() == cpu.top_counts.tolist()
    for row, count in enumerate(cpu.top_counts.tolist()):
        assert torch.equal(cpu.top_ids[row, :count], gpu.top_ids[row, :count])


@pytest.mark.gpu
def test_a_gpu_reads_the_likeliest_of_masks_as_a_cpu_does() -> None:
    """Masks as ids, of more and fewer than are read, and as bits; beside samples without one."""
    rng = np.random.default_rng(seed := int(torch.seed()) % 2**31)
    print(f"seed {seed}")
    rows, vocab, most = 40, 5000, 33
    logits = torch.tensor(rng.normal(0, 3, (rows, vocab)), dtype=torch.float32)
    samplers = [
        worker_pb2.Sampler(slot=row, top_logprobs=most, reads_only=True) for row in range(rows)
    ]
    masks: list[worker_pb2.TokenMask] = []
    for row in range(rows):
        legal = np.sort(rng.permutation(vocab)[: int(rng.choice([1, 20, 150, 4000]))])
        if row % 5 == 4:
            flags = np.zeros(vocab, np.bool_)
            flags[legal] = True
            bits = np.packbits(flags, bitorder="little").tobytes()
            masks.append(worker_pb2.TokenMask(slot=row, allowed=bits))
        elif row % 5:
            masks.append(worker_pb2.TokenMask(slot=row, allowed_ids=blob(legal.tolist())))
    drawn: list[Drawn] = []
    for device in (CPU, torch.device("cuda")):
        sampler = Sampler(rows, device)
        sampler.admit([decode_sampler(each, slots=rows, vocab_size=vocab) for each in samplers])
        sampler.mask(decode_masks(masks, vocab_size=vocab))
        samples = Samples(
            rows=int32(range(rows)), slots=int32(range(rows)), index=int32([0] * rows)
        )
        drawn.append(sampler.read(logits.to(device), samples).on_host())
    torch.cuda.synchronize()
    cpu, gpu = drawn
    assert not gpu.failed.any() and (gpu.tokens == -1).all()
    assert gpu.top_counts.tolist() == cpu.top_counts.tolist()
    for row, count in enumerate(cpu.top_counts.tolist()):
        assert torch.equal(cpu.top_ids[row, :count], gpu.top_ids[row, :count])
        differences = (cpu.top_logprobs - gpu.top_logprobs)[row, :count].abs()
        assert differences.max() < 1e-4
