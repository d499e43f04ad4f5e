"""Merging partial states: base of the LSE, empty parts, order."""

import math

import pytest
import torch
from torch import Tensor

from stemserve.kernels import reference
from stemserve.kernels.attention_state import AttentionState, merge_states
from stemserve.kernels.torch_paths.schedule import merge_into


def parts(*states: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Parts of one row and one head, of one channel: (out, lse) each."""
    outs = torch.tensor([out for out, _ in states]).view(-1, 1, 1, 1)
    return outs, torch.tensor([lse for _, lse in states]).view(-1, 1, 1)


def test_b21_the_log_sum_exp_is_natural() -> None:
    out, lse = merge_states(*parts((1.0, math.log(4)), (6.0, 0.0)))
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(1.6094, abs=1e-4)


def test_b21_two_empty_parts_are_empty() -> None:
    out, lse = merge_states(*parts((0.0, -math.inf), (0.0, -math.inf)))
    assert (out.item(), lse.item()) == (0.0, -math.inf)


@pytest.mark.parametrize("empty_lse", [-math.inf, math.inf])
@pytest.mark.parametrize("rubbish", [0.0, math.nan, math.inf])
def test_b21_an_empty_part_changes_nothing_whatever_it_holds(
    empty_lse: float, rubbish: float
) -> None:
    for state in (((rubbish, empty_lse), (6.0, 0.5)), ((6.0, 0.5), (rubbish, empty_lse))):
        out, lse = merge_states(*parts(*state))
        assert (out.item(), lse.item()) == (6.0, 0.5)


def random_parts(seed: int) -> tuple[Tensor, Tensor]:
    """LSE far apart, and every third state empty."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(5, 12, 3, 8, generator=generator)
    lses = 30 * torch.randn(5, 12, 3, generator=generator)
    empty = torch.rand(5, 12, 3, generator=generator) < 1 / 3
    return outs.masked_fill(empty.unsqueeze(-1), 0.0), lses.masked_fill(empty, -math.inf)


@pytest.mark.parametrize("seed", range(5))
def test_merge_of_many_parts_is_the_oracle(seed: int) -> None:
    outs, lses = random_parts(seed)
    state, expected = merge_states(outs, lses), reference.merge_states(outs, lses)
    torch.testing.assert_close(state.out.double(), expected.out, atol=1e-5, rtol=0)
    torch.testing.assert_close(state.lse.double(), expected.lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_merge_of_one_part_after_another_is_the_oracle(seed: int) -> None:
    outs, lses = random_parts(seed)
    state = AttentionState(outs[0].clone(), lses[0].clone())
    for part in range(1, len(outs)):
        merge_into(state, AttentionState(outs[part], lses[part]), 0)
    expected = reference.merge_states(outs, lses)
    torch.testing.assert_close(state.out.double(), expected.out, atol=1e-5, rtol=0)
    torch.testing.assert_close(state.lse.double(), expected.lse, atol=1e-5, rtol=0)


def test_parts_may_be_merged_in_any_order() -> None:
    outs, lses = random_parts(9)
    forward, backward = merge_states(outs, lses), merge_states(outs.flip(0), lses.flip(0))
    torch.testing.assert_close(forward.out, backward.out, atol=1e-5, rtol=0)
