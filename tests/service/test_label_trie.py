"""Label reads against the set of label prefixes."""

import numpy as np
import pytest

from stemserve.service.calls.scores.label_trie import plan_label_reads

Label = tuple[int, ...]


def random_labels(seed: int) -> list[Label]:
    rng = np.random.default_rng(seed)
    drawn = [tuple(rng.integers(0, 3, rng.integers(1, 6)).tolist()) for _ in range(20)]
    return list(dict.fromkeys(drawn))


@pytest.mark.parametrize("seed", range(10))
def test_each_label_token_is_read_after_exactly_the_tokens_before_it(seed: int) -> None:
    labels = random_labels(seed)
    reads = plan_label_reads(tuple(labels))
    gather = np.repeat(np.arange(len(reads.gather_depth)), np.diff(reads.gather_indptr))
    for index, label in enumerate(labels):
        positions = reads.label_reads[reads.label_indptr[index] : reads.label_indptr[index + 1]]
        assert reads.gather_ids[positions].tolist() == list(label)
        for depth, position in enumerate(positions):
            g = gather[position]
            suffix = reads.suffixes[int(reads.gather_suffix[g])]
            assert reads.gather_depth[g] == depth
            assert suffix[:depth].tolist() == list(label[:depth])


@pytest.mark.parametrize("seed", range(10))
def test_there_is_one_gather_a_label_prefix_and_one_suffix_a_deepest_prefix(seed: int) -> None:
    labels = random_labels(seed)
    prefixes = {label[:depth] for label in labels for depth in range(len(label))}
    deepest = {p for p in prefixes if not any(q[:-1] == p for q in prefixes if q)}
    reads = plan_label_reads(tuple(labels))
    assert len(reads.gather_depth) == len(prefixes)
    assert len(reads.suffixes) == len(deepest)
    assert {tuple(reads.suffixes[i].tolist()) for i in range(len(reads.suffixes))} == deepest


@pytest.mark.parametrize("seed", range(10))
def test_gathers_are_sorted_by_suffix_then_depth(seed: int) -> None:
    reads = plan_label_reads(tuple(random_labels(seed)))
    order = list(zip(reads.gather_suffix.tolist(), reads.gather_depth.tolist(), strict=True))
    assert order == sorted(order)


def test_labels_of_one_token_need_no_suffix() -> None:
    reads = plan_label_reads(((5,), (2,), (9,)))
    assert len(reads.suffixes) == 1
    assert not len(reads.suffixes.tokens)
    assert reads.gather_ids.tolist() == [5, 2, 9]
    assert (reads.gather_suffix.tolist(), reads.gather_depth.tolist()) == ([0], [0])
    assert (reads.gather_indptr.tolist(), reads.label_reads.tolist()) == ([0, 3], [0, 1, 2])
    assert reads.label_indptr.tolist() == [0, 1, 2, 3]
    assert reads.disjoint.all()


def test_a_label_that_continues_another_is_not_disjoint() -> None:
    assert plan_label_reads(((1,), (1, 2), (2, 1))).disjoint.tolist() == [True, False, True]
