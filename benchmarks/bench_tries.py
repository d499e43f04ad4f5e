"""What sets of sequences cost: to build, to follow with beams, and to read out under their masks.

CPU time of this process on one thread, best of several. Run it with
`PYTHONPATH=benchmarks python benchmarks/bench_tries.py`.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf

import numpy as np
import torch

from stemserve.kernels.layout import Int32, int32
from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.beams.beam_guides import BeamGuides
from stemserve.service.batching.steps.step_readouts import StepReadouts
from stemserve.service.constraints.token_trie import TokenTrie, build_trie
from stemserve.service.packed_tokens import PackedTokens, offsets
from stemserve.worker.sampling.params import decode_masks, decode_sampler
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.steps.reads import Samples

VOCAB = 49_152
END_IDS = int32([2])
WIDTHS = (8, 32, 256)
ALLOWED = 8  # tokens of a mask
BUILDS, TURNS = 3, 7
DEPTH = 2  # tokens that the measured beams have

Numbers = Mapping[str, float]


def seconds(work: Callable[[], object], turns: int) -> float:
    best = inf
    for _ in range(turns):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def built(table: Int32) -> tuple[TokenTrie, Numbers]:
    lengths = np.full(len(table), table.shape[1], np.int32)
    packed = PackedTokens(tokens=table.ravel(), indptr=offsets(lengths))

    def build() -> TokenTrie:
        return build_trie(packed, vocab_size=VOCAB, end_ids=END_IDS)

    trie = build()
    return trie, {"build_s": seconds(build, BUILDS), "megabytes": trie.num_bytes / 1e6}


def beams(trie: TokenTrie, width: int, rng: np.random.Generator) -> Numbers:
    """The host's work for one step of a search, by its beams' states and masks."""

    def choice(guides: BeamGuides, live: int) -> tuple[Int32, Int32]:
        each = [guides.mask(beam).ids for beam in range(live)]
        pairs = [
            (beam, token)
            for beam, ids in enumerate(each)
            for token in rng.choice(ids, min(len(ids), -(-width // live)), replace=False).tolist()
        ]
        parents, tokens = zip(*pairs[:width], strict=True)
        return int32(parents), int32(tokens)

    best: dict[str, float] = {}
    for _ in range(TURNS):
        guides, live, states_s = BeamGuides(trie, END_IDS, 0), 1, 0.0
        for depth in range(DEPTH):
            parents, tokens = choice(guides, live)
            started = time.process_time()
            guides.advance(parents, tokens, depth + 1)
            states_s, live = time.process_time() - started, len(parents)
        plan, started = worker_pb2.StepPlan(), time.process_time()
        readouts = StepReadouts()
        for beam in range(live):
            readouts.add_mask(beam, guides.mask(beam))
        readouts.write(plan)
        masks_s, started = time.process_time() - started, time.process_time()
        decode_masks(plan.masks, vocab_size=VOCAB)
        decode_s = time.process_time() - started
        found = {"states_us": states_s, "masks_us": masks_s, "decode_us": decode_s}
        best = {name: min(1e6 * each, best.get(name, inf)) for name, each in found.items()}
    return best


def read_out(width: int, rng: np.random.Generator) -> Numbers:
    """The worker's work behind the logits, with a mask of few tokens a beam and without."""
    logits = torch.tensor(rng.normal(0, 1, (width, VOCAB)), dtype=torch.float32)
    every = int32(range(width))
    samples = Samples(rows=every, slots=every, index=int32([0] * width))
    found: dict[str, float] = {}
    for name, of_mask in (("free_ms", False), ("masked_ms", True)):
        sampler = Sampler(width, torch.device("cpu"))
        messages = [
            worker_pb2.Sampler(slot=slot, top_logprobs=width + 1, reads_only=True)
            for slot in range(width)
        ]
        sampler.admit([decode_sampler(each, slots=width, vocab_size=VOCAB) for each in messages])
        if of_mask:
            masks = [
                worker_pb2.TokenMask(
                    slot=slot,
                    allowed_ids=np.sort(rng.permutation(VOCAB)[:ALLOWED]).astype("<i4").tobytes(),
                )
                for slot in range(width)
            ]
            sampler.mask(decode_masks(masks, vocab_size=VOCAB))
        found[name] = 1e3 * seconds(partial(sampler.read, logits, samples), TURNS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1_000_000, metavar="N")
    count = parser.parse_args().sequences
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    sets = {
        "8 tokens, uniform": rng.integers(3, VOCAB, (count, 8)),
        "8 tokens of a Zipf law": 3 + rng.zipf(1.3, (count, 8)) % (VOCAB - 3),
        "4 codes of 256": rng.integers(3, 259, (count, 4)),
    }
    for name, table in sets.items():
        trie, numbers = built(table.astype(np.int32))
        print(json.dumps({"set": name, **numbers}))
        for width in WIDTHS:
            print(json.dumps({"set": name, "beams": width, **beams(trie, width, rng)}))
    for width in WIDTHS:
        print(json.dumps({"beams": width, **read_out(width, rng)}))


if __name__ == "__main__":
    main()
