"""What decodes a tree: an engine plans once and is then called once a layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernel_trees import PAGE_TOKENS, Case

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.strategy import Kernel, Phase, Strategy

Call = Callable[[LayerKV], torch.Tensor]  # [rows, query_heads, head_dim]
Strategies = Callable[[HeadShape], dict[tuple[Phase, Kernel], Strategy]]


class CannotRun(Exception):
    """An engine does not take a tree; the message says why."""


def _any_pages(case: Case) -> int | None:
    return None


def whole_pages(case: Case) -> int | None:
    """For block tables: shared pages must be full."""
    return PAGE_TOKENS


@dataclass(frozen=True, kw_only=True)
class Engine:
    name: str
    prepare: Callable[[Case, torch.Tensor], Call]
    pages: Callable[[Case], int | None] = _any_pages  # tokens of whole pages that it needs


def strategy_engine(kernel: Kernel, strategies: Strategies) -> Engine:
    """One of the project's own, as the worker calls it."""

    def prepare(case: Case, q: torch.Tensor) -> Call:
        strategy = strategies(case.shape)[Phase.DECODE, kernel]
        refusal = strategy.refusal(case.layout)
        if refusal is not None:
            raise CannotRun(refusal)
        plan = strategy.plan(case.layout)
        return lambda kv: strategy.run(plan, q, kv).out

    # Tree decode reads any tree; the others' layouts promise full pages in inner nodes.
    pages = _any_pages if kernel is Kernel.CODEC else whole_pages
    return Engine(name=str(kernel), prepare=prepare, pages=pages)
