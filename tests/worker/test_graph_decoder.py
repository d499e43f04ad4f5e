"""Decode steps by graphs against the same steps launch by launch.

Without a GPU the graphs' work is done anew each time, its kernels in Triton's interpreter.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.worker.decode_rig import CPU, LIMITS, MAX_BURST, Rig, make_rig
from tests.worker.decode_story import PAGE, PAGES, Decoded, Story, drawn, greedy

from stemserve.kernels.codec.division import Division, PieceCosts
from stemserve.kernels.codec.pairs import Pairing
from stemserve.kernels.codec.planner import Planner
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.graphs.decode_check import failures

TOLERANCE = 2e-4  # of log-probabilities in float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def seed() -> int:
    """Fresh every run; a failing test shows it."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


def one_by_one(
    rig: Rig, story: Story, chosen: list[Decoded], steps: list[int]
) -> dict[int, list[tuple[int, float]]]:
    """Tokens and log-probabilities of each slot, by steps without a burst."""
    found: dict[int, list[tuple[int, float]]] = {s.slot: [] for s in chosen}
    left = list(steps)
    now = [Decoded(**vars(s)) for s in chosen]
    while any(left):
        rows = [i for i, count in enumerate(left) if count]
        some = [now[i] for i in rows]
        tokens, logprobs = drawn(rig.step(story.decode(some, [1] * len(some))))
        for i, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            found[now[i].slot].append((token, logprob))
            left[i] -= 1
        story.advance(some, [1] * len(some))
    return found


def in_a_burst(
    rig: Rig, story: Story, chosen: list[Decoded], steps: list[int]
) -> dict[int, list[tuple[int, float]]]:
    result = rig.step(story.decode(chosen, steps))
    assert [group.reason for group in result.groups] == ["graph"]
    tokens, logprobs = (values.reshape(max(steps), -1) for values in drawn(result))
    return {
        s.slot: list(zip(tokens[:count, row].tolist(), logprobs[:count, row].tolist(), strict=True))
        for row, (s, count) in enumerate(zip(chosen, steps, strict=True))
    }


def assert_alike(
    found: dict[int, list[tuple[int, float]]], expected: dict[int, list[tuple[int, float]]]
) -> None:
    for slot, pairs in expected.items():
        assert [token for token, _ in found[slot]] == [token for token, _ in pairs]
        differences = np.array([a - b for (_, a), (_, b) in zip(found[slot], pairs, strict=True)])
        assert np.abs(differences).max() < TOLERANCE


def sampler(slot: int, rng: np.random.Generator, kind: str) -> worker_pb2.Sampler:
    if kind == "greedy" or (kind != "random" and rng.random() < 0.3):
        return greedy(slot)
    message = worker_pb2.Sampler(slot=slot, temperature=0.9, top_p=1.0, seed=int(rng.integers(99)))
    if rng.random() < 0.5:
        message.top_k, message.top_p, message.min_p = 20, 0.95, 0.01
    if kind == "edited":
        message.top_logprobs = int(rng.integers(0, 4))
        message.banned_ids = np.array([1, 7], np.int32).tobytes()
    return message


def test_graphs_of_few_rows_run_plans_of_paired_bins(tmp_path: Path, seed: int) -> None:
    """These are made for a kernel of which a graph of one tile has none."""
    story = Story.random(seed, sequences=4, trunk=6)
    plain = make_rig(tmp_path, CPU, torch.float32)
    graphs = make_rig(tmp_path, CPU, torch.float32, (4,))
    assert graphs.codec is not None
    graphs.codec.planner = Planner(
        group=graphs.codec.shape.group,
        bins=graphs.codec.bins,
        window=0,
        costs=PieceCosts(),
        division=Division(),
        pairing=Pairing(least_steps=0),
    )
    prefill = story.prefill([greedy(s.slot) for s in story.sequences])
    for rig in (plain, graphs):
        rig.step(prefill)
    steps = [3] * 4
    alive: list[Decoded] = list(story.sequences)
    expected = one_by_one(plain, story, alive, steps)
    assert_alike(in_a_burst(graphs, story, alive, steps), expected)


@pytest.mark.parametrize("kind", ["greedy", "random", "edited"])
@pytest.mark.parametrize("device", DEVICES)
def test_bursts_by_graphs_draw_what_single_steps_draw(
    tmp_path: Path, device: str, kind: str, seed: int
) -> None:
    story = Story.random(seed, sequences=int(np.random.default_rng(seed).integers(1, 9)))
    samplers = [sampler(s.slot, story.rng, kind) for s in story.sequences]
    where = torch.device(device)
    plain = make_rig(tmp_path, where, torch.float32)
    graphs = make_rig(tmp_path, where, torch.float32, (2, 8))
    prefill = story.prefill(samplers)
    first = [drawn(rig.step(prefill))[0].tolist() for rig in (plain, graphs)]
    assert first[0] == first[1]
    alive: list[Decoded] = list(story.sequences)
    for repeat in (1, int(story.rng.integers(2, MAX_BURST)), 3):
        count = int(story.rng.integers(1, len(alive) + 1))
        chosen = story.choose(alive, count)
        steps = [min(repeat, int(n)) for n in story.rng.integers(1, 2 * repeat + 1, count)]
        steps[0] = repeat
        found = in_a_burst(graphs, story, chosen, steps)
        assert_alike(found, one_by_one(plain, story, chosen, steps))
        story.advance(chosen, steps)
        # What a slot holds behind its last sub-step is of no use.
        alive = [s for s in alive if s not in chosen or steps[chosen.index(s)] == repeat]
        if not alive:
            break
    assert not graphs.decoder or not graphs.decoder.fallbacks


@pytest.mark.parametrize("kind", ["greedy", "random", "edited"])
@pytest.mark.parametrize("device", DEVICES)
def test_drafts_are_verified_by_a_graph(tmp_path: Path, device: str, kind: str, seed: int) -> None:
    """Rows that follow one another in the same pages draw what they draw one by one."""
    story = Story.random(seed, sequences=3)
    samplers = [sampler(s.slot, story.rng, kind) for s in story.sequences]
    where = torch.device(device)
    plain = make_rig(tmp_path, where, torch.float32)
    graphs = make_rig(tmp_path, where, torch.float32, (4, 32))
    prefill = story.prefill(samplers)
    first = [drawn(rig.step(prefill))[0].tolist() for rig in (plain, graphs)]
    assert first[0] == first[1]
    counts: list[int] = story.rng.integers(1, 10, 3).tolist()
    expected = one_by_one(plain, story, story.sequences, counts)
    drafts = [
        [token, *(following for following, _ in expected[s.slot][:-1])]
        for s, token in zip(story.sequences, first[0], strict=True)
    ]
    plan = story.verify(story.sequences, drafts)
    result = graphs.step(plan)
    assert [group.reason for group in result.groups] == ["graph"]
    found: dict[int, list[tuple[int, float]]] = {s.slot: [] for s in story.sequences}
    slots = np.frombuffer(plan.sample_slots, np.int32).tolist()
    index = np.frombuffer(plan.sample_index, np.int32).tolist()
    tokens, logprobs = drawn(result)
    read = zip(index, slots, tokens.tolist(), logprobs.tolist(), strict=True)
    for _, slot, token, logprob in sorted(read):
        found[slot].append((token, logprob))
    assert_alike(found, expected)
    # What is stored is what one row after the other stores: the next steps say so.
    story.advance(story.sequences, counts)
    again = [[expected[s.slot][-1][0]] for s in story.sequences]
    plan = story.verify(story.sequences, again)
    behind = [drawn(rig.step(plan)) for rig in (plain, graphs)]
    assert behind[0][0].tolist() == behind[1][0].tolist()
    assert np.abs(behind[0][1] - behind[1][1]).max() < TOLERANCE


def test_padded_rows_touch_no_page(tmp_path: Path, seed: int) -> None:
    story = Story.random(seed, sequences=3)
    rig = make_rig(tmp_path, CPU, torch.float32, (8,))
    rig.step(story.prefill([greedy(s.slot) for s in story.sequences]))
    before = [rig.pool.k_pages(layer).clone() for layer in range(3)]
    steps = [4, 1, 2]
    rig.step(story.decode(story.sequences, steps))
    written = np.zeros((PAGES + 1, PAGE), np.bool_)
    for sequence, count in zip(story.sequences, steps, strict=True):
        at = sequence.stored + np.arange(count)
        written[np.array(sequence.pages)[at // PAGE], at % PAGE] = True
    for layer in range(3):
        same = (rig.pool.k_pages(layer) == before[layer]) | before[layer].isnan()
        changed = ~(same & (rig.pool.k_pages(layer).isnan() == before[layer].isnan()))
        assert (changed.flatten(2).any(-1).numpy() == written).all()


def test_what_no_graph_takes_runs_launch_by_launch(tmp_path: Path) -> None:
    story = Story.random(3, sequences=5)
    rig = make_rig(tmp_path, CPU, torch.float32, (2,))
    assert rig.decoder is not None
    rig.step(story.prefill([greedy(s.slot) for s in story.sequences]))
    chosen = story.sequences[:3]
    result = rig.step(story.decode(chosen, [1] * 3))
    assert "graph" not in {group.reason for group in result.groups}
    assert rig.decoder.fallbacks == {"rows": 1}
    assert [(f.path, f.reason, f.count) for f in result.fallbacks] == [("decode_graph", "rows", 1)]
    story.advance(chosen, [1] * 3)
    forced = story.decode(chosen[:2], [1] * 2)
    forced.segment_kernel = np.array([7, 7], np.int32).tobytes()  # paged
    result = rig.step(forced)
    assert [group.reason for group in result.groups] == ["forced"]
    assert not result.fallbacks
    assert rig.decoder.fallbacks == {"rows": 1}


def test_rows_that_fail_are_told(tmp_path: Path) -> None:
    story = Story.random(5, sequences=4)
    rig = make_rig(tmp_path, CPU, torch.float32, (4,))
    rig.step(story.prefill([greedy(s.slot) for s in story.sequences]))
    rig.pool.poison(np.array(story.sequences[2].pages[:1], np.int32))
    result = rig.step(story.decode(story.sequences, [3, 3, 2, 3]))
    failed = np.frombuffer(result.failed_rows, np.int32).tolist()
    assert {2, 6} <= set(failed)  # rows of one tile fail together
    assert 10 not in failed  # it counts no more


@pytest.mark.parametrize("device", DEVICES)
def test_the_start_finds_graphs_that_do_something_else(tmp_path: Path, device: str) -> None:
    where = torch.device(device)
    plain = make_rig(tmp_path, where, torch.float32)
    rig = make_rig(tmp_path, where, torch.float32, (1, 4))
    assert not failures(rig.runner, plain.runner, [1, 3, 4], LIMITS)
    wrong = failures(rig.runner, plain.runner, [1, 7], LIMITS)
    assert wrong == {7: "no graph took the step"}
    other = make_rig(tmp_path, where, torch.float32, head_dim=16)
    assert failures(rig.runner, other.runner, [1, 4], LIMITS).keys() == {1, 4}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bins"), [(torch.bfloat16, 4), (torch.float16, 0)], ids=str)
def test_half_precision_is_as_exact_as_launch_by_launch(
    tmp_path: Path, dtype: torch.dtype, bins: int, seed: int
) -> None:
    """With few bins several tiles read the trunk in pairs."""
    device = torch.device("cuda")
    story = Story.random(seed, sequences=40, trunk=120)
    exact = make_rig(tmp_path, device, torch.float32, head_dim=128)
    plain = make_rig(tmp_path, device, dtype, head_dim=128)
    graphs = make_rig(tmp_path, device, dtype, (8, 48), head_dim=128, bins=bins)
    prefill = story.prefill([greedy(s.slot) for s in story.sequences])
    for rig in (exact, plain, graphs):
        rig.step(prefill)
    worst = {"plain": 0.0, "graphs": 0.0}
    for count in (40, 5, 1, 33, 8):
        chosen = story.choose(story.sequences, count)
        plan = story.decode(chosen, [1] * count, given=True)
        tokens, logprobs = drawn(exact.step(plan))
        for name, rig in (("plain", plain), ("graphs", graphs)):
            found, of_found = drawn(rig.step(plan))
            same = found == tokens  # the others have a rival that is about as likely
            assert same.mean() > 0.7
            error = float(np.abs(of_found - logprobs)[same].max(initial=0.0))
            worst[name] = max(worst[name], error)
        story.advance(chosen, [1] * count)
    assert worst["graphs"] < 2 * worst["plain"] + 0.02
    assert graphs.decoder and not graphs.decoder.fallbacks


@pytest.mark.gpu
def test_a_replay_gives_the_same_bits_whatever_ran_before(tmp_path: Path, seed: int) -> None:
    story = Story.random(seed, sequences=30, trunk=40)
    rig = make_rig(tmp_path, torch.device("cuda"), torch.bfloat16, (8, 32), head_dim=128)
    rig.step(story.prefill([greedy(s.slot) for s in story.sequences]))
    plans = {
        count: story.decode(story.sequences[:count], [4] * count, given=True)
        for count in (30, 1, 3, 16, 9)
    }
    first = {count: drawn(rig.step(plan)) for count, plan in plans.items()}
    for count in story.rng.permutation([*plans] * 3).tolist():
        tokens, logprobs = drawn(rig.step(plans[count]))
        assert np.array_equal(tokens, first[count][0])
        assert np.array_equal(logprobs, first[count][1])
