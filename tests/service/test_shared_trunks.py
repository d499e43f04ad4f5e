"""Tenants of a group share the pages of its trunks, and never a page of anything else."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.service.batcher_rig import Rig, make_rig
from tests.service.literal_worker import PAGE
from tests.service.toy_jobs import (
    again,
    assert_right,
    generate_job,
    int32,
    label_job,
    likelihood_job,
    random_tokens,
    run_right,
)

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.pages.page_node import PageNode, token_key
from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.errors import NeverFits
from stemserve.service.request import NO_TRUNK, GenerateJob, Job, Realm, Trunk, stored_sequences

GROUPS = {"a1": b"group A", "a2": b"group A", "a3": b"group A", "b": b"group B", "alone": b""}


@dataclass(frozen=True)
class Setting:
    seed: int
    budget: int
    pages: int
    jobs: int
    steps_in_flight: int
    faults: bool


SETTINGS = st.builds(
    Setting,
    seed=st.integers(0, 2**32 - 1),
    budget=st.integers(1, 64),
    pages=st.integers(8, 40),
    jobs=st.integers(2, 12),
    steps_in_flight=st.integers(1, 3),
    faults=st.booleans(),
)


class Tenants:
    """Draws sequences that continue the trunks of both groups, which have the same tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        root = random_tokens(seed, 40)
        cut = int(self.rng.integers(1, 40))
        self.trunks = [root, root[:cut], root[:cut] + random_tokens(seed + 1, 30)]
        self._behind = [random_tokens(seed + n, int(self.rng.integers(0, 25))) for n in range(3)]

    def draw(self, tenant: str) -> tuple[list[int], Trunk]:
        """Tokens that any tenant may have, alone or behind a trunk of its group."""
        trunk = self.trunks[self.rng.integers(len(self.trunks))]
        behind = self._behind[self.rng.integers(len(self._behind))]
        behind = behind[: self.rng.integers(len(behind) + 1)]
        is_shared = GROUPS[tenant] and self.rng.random() < 0.7
        shared = Trunk(salt=GROUPS[tenant], tokens=len(trunk)) if is_shared else NO_TRUNK
        return trunk + behind, shared

    def job(self, number: int) -> Job:
        rng = self.rng
        tenant = list(GROUPS)[rng.integers(len(GROUPS))]
        owner: dict[str, Any] = {"salt": tenant.encode(), "tenant": tenant}
        name = f"job {number}"
        if rng.random() < 0.5:
            tokens, trunk = self.draw(tenant)
            samples, new_tokens = int(rng.integers(1, 4)), int(rng.choice([1, 3, 20]))
            return generate_job(
                name, tokens, samples=samples, max_new_tokens=new_tokens, trunk=trunk, **owner
            )
        drawn = [self.draw(tenant) for _ in range(rng.integers(1, 4))]
        contexts = [tokens for tokens, _ in drawn]
        owner["trunks"] = tuple(trunk for _, trunk in drawn)
        items = [random_tokens(number + n, int(rng.integers(1, 30))) for n in range(4)]
        of_item: list[int] = rng.integers(len(drawn), size=4).tolist()
        if rng.random() < 0.5:
            return likelihood_job(name, contexts, items, of_item, **owner)
        return label_job(name, contexts, items, [1, 2], of_item, **owner)


def owner_and_path(node: PageNode) -> tuple[bytes, bytes]:
    """The salt under which a page is, and the tokens from the tree's root to its end."""
    owner, path = None, b""
    at: PageNode | None = node
    while at is not None:
        if not at.is_root:
            path = at.key + path
        elif owner is None:
            owner = at.key
        at = at.parent
    assert owner is not None
    return owner, path


def check_owners(rig: Rig, jobs: dict[str, Job], trunks: list[list[int]]) -> None:
    batcher = rig.batcher
    shared = [token_key(int32(trunk)) for trunk in trunks]
    for node in batcher._cache.tree.nodes():  # pyright: ignore[reportPrivateUsage]
        owner, path = owner_and_path(node)
        if owner.startswith(b"group"):
            assert node.size == PAGE and any(trunk.startswith(path) for trunk in shared)
        else:
            assert owner.decode() in GROUPS
    for progress in batcher._jobs.live():  # pyright: ignore[reportPrivateUsage]
        job = jobs[progress.request_id]
        for node in progress.held_nodes():
            owner, path = owner_and_path(node)
            realms = [realm for _, realm in stored_sequences(job)]
            assert owner == job.salt or owner in {realm.trunk.salt for realm in realms}


@given(setting=SETTINGS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_page_is_read_where_it_does_not_belong_and_all_answers_are_right(
    setting: Setting,
) -> None:
    rig = make_rig(pages=setting.pages, budget=setting.budget, in_flight=setting.steps_in_flight)
    tenants = Tenants(setting.seed)
    jobs = {job.request_id: job for job in map(tenants.job, range(setting.jobs))}
    ahead, turns = list(jobs.values()), 0
    while ahead or rig.in_flight or rig.plan() is not None:
        turns += 1
        assert turns < 20_000, "the batcher does not come to an end"
        if ahead and tenants.rng.random() < 0.4:
            try:
                rig.submit(ahead.pop(0))
            except NeverFits:
                continue
        while len(rig.in_flight) < rig.steps_in_flight and rig.plan() is not None:
            pass
        check_owners(rig, jobs, tenants.trunks)
        if rig.in_flight:
            rig.answer("broken" if setting.faults and tenants.rng.random() < 0.05 else "")
        check_owners(rig, jobs, tenants.trunks)
    for name, answer in rig.answers.items():
        if not (setting.faults and answer.error is not None):
            assert_right(jobs[name], answer)
    rig.batcher.check_idle()


def common(a: list[int], b: list[int]) -> int:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


class KnownSequences:
    """What each tenant may find, by comparing whole sequences."""

    def __init__(self) -> None:
        self._shared: list[tuple[bytes, list[int]]] = []
        self._own: list[tuple[bytes, Trunk, list[int]]] = []

    def hits(self, tokens: list[int], realm: Realm) -> int:
        end = realm.trunk.tokens // PAGE * PAGE
        group = realm.trunk.salt if end else b""
        trunk, rest = tokens[:end], tokens[end:]
        found = max((common(trunk, t) for g, t in self._shared if g == group), default=0)
        if found < end:
            return found
        alike = [
            sequence[end:]
            for salt, other, sequence in self._own
            if salt == realm.salt
            and (other.salt if other.tokens >= PAGE else b"") == group
            and other.tokens // PAGE * PAGE == end
            and sequence[:end] == trunk
        ]
        return end + max((common(rest, sequence) for sequence in alike), default=0)

    def add(self, tokens: list[int], realm: Realm) -> None:
        if realm.trunk.tokens >= PAGE:
            end = realm.trunk.tokens // PAGE * PAGE
            self._shared.append((realm.trunk.salt, tokens[:end]))
        self._own.append((realm.salt, realm.trunk, tokens))


@pytest.mark.parametrize("seed", range(12))
def test_a_tenant_hits_what_it_or_its_group_has_computed_and_no_more(seed: int) -> None:
    rig, tenants, known = make_rig(pages=600), Tenants(seed), KnownSequences()
    for number in range(40):
        tenant = list(GROUPS)[tenants.rng.integers(len(GROUPS))]
        tokens, trunk = tenants.draw(tenant)
        job = label_job(f"{number}", [tokens], [[1]], [0], salt=tenant.encode(), trunks=(trunk,))
        (usage,) = run_right(rig, job)
        assert usage.cached_tokens == known.hits(tokens, job.realm(0)), number
        known.add(tokens, job.realm(0))
    rig.batcher.check_idle()


@pytest.mark.parametrize("extra", [0, 1, 7])
def test_what_a_generation_leaves_behind_a_trunk_is_its_tenants(extra: int) -> None:
    rig = make_rig(pages=60)
    prompt = random_tokens(1, 2 * PAGE + extra)
    trunk = Trunk(salt=b"group A", tokens=2 * PAGE)
    job = generate_job("first", prompt, max_new_tokens=40)
    run_right(rig, replace(job, salt=b"a1", trunk=trunk))
    talk = prompt + rig.answers["first"].tokens[0][:-1]
    mine = rig.batcher.resident_tokens(int32(talk), Realm(salt=b"a1", trunk=trunk))
    others = rig.batcher.resident_tokens(int32(talk), Realm(salt=b"a2", trunk=trunk))
    assert (mine, others) == (len(talk), 2 * PAGE)
    rig.batcher.check_idle()


@pytest.mark.parametrize("tokens", [2 * PAGE, 3 * PAGE - 5])
def test_a_pinned_trunk_stays_for_the_whole_group(tokens: int) -> None:
    rig = make_rig(pages=20)
    context = random_tokens(1, tokens)
    trunk = Trunk(salt=b"group A", tokens=tokens)
    mine, other = Realm(salt=b"a1", trunk=trunk), Realm(salt=b"a2", trunk=trunk)
    run_right(rig, label_job("warm", [context], [[1]], [0], salt=b"a1", trunks=(trunk,)))
    assert rig.batcher.pin("trunk", int32(context), mine) == tokens
    for seed in range(10, 14):
        run_right(rig, label_job(f"{seed}", [random_tokens(seed, 12 * PAGE)], [[1]], [0]))
    assert rig.batcher.resident_tokens(int32(context), mine) == tokens
    assert rig.batcher.resident_tokens(int32(context), other) == 2 * PAGE
    rig.batcher.unpin("trunk")
    rig.batcher.check_idle()


def rows_of(plan: worker_pb2.StepPlan) -> int:
    return len(unpack_int32(plan.token_ids))


@pytest.mark.parametrize("seed", range(6))
def test_explained_steps_are_those_that_run(seed: int) -> None:
    rig, tenants = make_rig(pages=200, budget=24), Tenants(seed)
    for number in range(6):
        run_right(rig, tenants.job(number))
    job = tenants.job(6)
    while isinstance(job, GenerateJob):
        job = tenants.job(6)
    explained = [rows_of(plan) for plan, _ in rig.batcher.explain(job)]
    first = len(rig.plans)
    run_right(rig, again(job, 1))
    assert explained == [rows_of(plan) for plan in rig.plans[first:]]
