"""Random forests of jobs, in random company, equal the same jobs evaluated one by one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.service.batcher_rig import Rig, make_rig
from tests.service.toy_jobs import assert_right, generate_job, label_job, likelihood_job
from tests.service.toy_model import VOCAB

from stemserve.service.batching.samples.sample_pages import generate_pages
from stemserve.service.batching.samples.speculation import DraftPolicy
from stemserve.service.errors import EngineFault, NeverFits
from stemserve.service.request import GenerateJob, Job


@dataclass(frozen=True)
class Setting:
    seed: int
    budget: int
    pages: int
    slots: int
    steps_in_flight: int
    jobs: int
    cancels: bool
    faults: bool
    burst: int
    draft_tokens: int = 0


SETTINGS = st.builds(
    Setting,
    seed=st.integers(0, 2**32 - 1),
    budget=st.integers(1, 64),
    pages=st.integers(6, 40),
    slots=st.integers(1, 8),
    steps_in_flight=st.integers(1, 3),
    jobs=st.integers(1, 10),
    cancels=st.booleans(),
    faults=st.booleans(),
    burst=st.sampled_from([1, 2, 4, 8]),
    draft_tokens=st.sampled_from([0, 0, 1, 4, 8]),
)


class Forest:
    """Draws sequences that continue one another at any length."""

    def __init__(self, seed: int, pages: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._sequences: list[list[int]] = [[]]
        self._longest = pages * 16 * 3 // 4

    def tokens(self, count: int) -> list[int]:
        return list(map(int, self.rng.integers(0, VOCAB, count)))

    def sequence(self) -> list[int]:
        known = self._sequences[self.rng.integers(len(self._sequences))]
        start = known[: self.rng.integers(len(known) + 1)] if self.rng.random() < 0.5 else known
        length = int(self.rng.choice([0, 1, 3, 15, 16, 17, 40]))
        found = (start + self.tokens(length))[: self._longest]
        self._sequences.append(found)
        return found

    def job(self, number: int) -> Job:
        rng, name = self.rng, f"job {number}"
        options = {
            "priority": int(rng.integers(3)),
            "salt": b"other" if rng.random() < 0.1 else b"",
        }
        if rng.random() < 0.5:
            return generate_job(
                name,
                self.sequence() or self.tokens(1),
                samples=int(rng.integers(1, 5)),
                max_new_tokens=int(rng.choice([1, 2, 5, 20, 40])),
                temperature=float(rng.choice([0.0, 1.0])),
                stop_ids=frozenset(self.tokens(int(rng.integers(2)))),
                seed=int(rng.integers(1000)),
                **options,
            )
        contexts = [self.sequence() for _ in range(rng.integers(1, 5))]
        longest = int(rng.choice([1, 4, 20, 70]))
        items = [self.tokens(int(rng.integers(1, longest + 1))) for _ in range(rng.integers(8))]
        of_item = rng.integers(len(contexts), size=len(items)).tolist()
        if rng.random() < 0.5:
            return likelihood_job(name, contexts, items, of_item, **options)
        classify = bool(rng.random() < 0.3)
        labels = self.tokens(2)
        return label_job(name, contexts, items, labels, of_item, classify=classify, **options)


def known_rig(**options: Any) -> Rig:
    """The speed of its decode steps is known, so that there are bursts from the start."""
    rig = make_rig(**options)
    rig.run(generate_job("first", [0], max_new_tokens=6))
    rig.answers.clear()
    return rig


def run(rig: Rig, forest: Forest, jobs: list[Job], *, cancels: bool, faults: bool) -> set[str]:
    """Submit the jobs at random moments; returns those that were cancelled or refused."""
    dropped: set[str] = set()
    ahead = list(jobs)
    running = True
    turns = 0
    while ahead or running:
        turns += 1
        assert turns < 20_000, "the batcher does not come to an end"
        chance = forest.rng.random()
        running = True
        if ahead and chance < 0.3:
            job = ahead.pop(0)
            try:
                rig.submit(job)
            except NeverFits:
                dropped.add(job.request_id)
        elif cancels and rig.answers and chance < 0.4:
            name = str(forest.rng.choice(sorted(rig.answers)))
            answer = rig.answers[name]
            if answer.result is None and answer.last is None:
                dropped.add(name)
            rig.batcher.cancel(name)
        elif chance < 0.7 and len(rig.in_flight) < rig.steps_in_flight:
            running = rig.plan() is not None or bool(rig.in_flight)
        elif rig.in_flight:
            rig.answer("out of luck" if faults and forest.rng.random() < 0.1 else "")
    while rig.turn():
        pass
    return dropped


def check(rig: Rig, jobs: list[Job], dropped: set[str], *, faults: bool) -> None:
    for job in jobs:
        answer = rig.answers.get(job.request_id)
        if job.request_id in dropped or answer is None:
            continue
        if not (faults and isinstance(answer.error, EngineFault)):
            assert_right(job, answer)
    rig.batcher.check_idle()


# Another job computes the end of a context that is only to be computed.
COMPUTED_BY_ANOTHER = Setting(
    seed=27560,
    budget=1,
    pages=6,
    slots=1,
    steps_in_flight=1,
    jobs=5,
    cancels=False,
    faults=False,
    burst=1,
)


@example(setting=COMPUTED_BY_ANOTHER)
@given(setting=SETTINGS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_company_gives_the_answers_of_one_by_one_evaluation(setting: Setting) -> None:
    rig = known_rig(
        pages=setting.pages,
        budget=setting.budget,
        slots=setting.slots,
        in_flight=setting.steps_in_flight,
        burst=setting.burst,
        drafts=DraftPolicy(default_tokens=setting.draft_tokens, least_gain=0),
    )
    forest = Forest(setting.seed, setting.pages)
    jobs = [forest.job(number) for number in range(setting.jobs)]
    dropped = run(rig, forest, jobs, cancels=setting.cancels, faults=setting.faults)
    check(rig, jobs, dropped, faults=setting.faults)


RESUMED_BEHIND_A_COPY = Setting(
    seed=454,
    budget=8,
    pages=8,
    slots=8,
    steps_in_flight=1,
    jobs=5,
    cancels=False,
    faults=False,
    burst=1,
)


@example(setting=RESUMED_BEHIND_A_COPY, spare_pages=1)
@given(setting=SETTINGS, spare_pages=st.integers(0, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_generations_that_outgrow_the_pool_end_as_if_they_were_alone(
    setting: Setting, spare_pages: int
) -> None:
    forest = Forest(setting.seed, 12)
    jobs: list[Job] = [
        generate_job(
            f"job {number}",
            forest.sequence() or forest.tokens(1),
            samples=int(forest.rng.integers(1, 5)),
            max_new_tokens=int(forest.rng.choice([1, 10, 30, 60])),
            temperature=1.0,
            seed=number * 10,
            priority=int(forest.rng.integers(2)),
        )
        for number in range(setting.jobs)
    ]
    jobs.append(likelihood_job("score", [forest.sequence()], [forest.tokens(70)]))
    largest = max(generate_pages(job, 16) for job in jobs if isinstance(job, GenerateJob))
    rig = known_rig(
        pages=largest + spare_pages,
        budget=setting.budget,
        in_flight=setting.steps_in_flight,
        burst=setting.burst,
        drafts=DraftPolicy(default_tokens=setting.draft_tokens, least_gain=0),
    )
    dropped = run(rig, forest, jobs, cancels=setting.cancels, faults=setting.faults)
    check(rig, jobs, dropped, faults=setting.faults)
