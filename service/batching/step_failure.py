"""What a failed step takes with it: its jobs, and all that builds on pages it did not compute."""

from collections.abc import Callable, Iterable, Set
from dataclasses import replace

from stemserve.service.batching.jobs.job_progress import JobProgress
from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.batching.steps.step_builder import IssuedStep


def undo_step(
    failed: IssuedStep,
    later: Iterable[IssuedStep],
    find_job: Callable[[int], JobProgress | None],
) -> list[int]:
    """Mark the pages as not computed; returns the arrival numbers of the jobs that must fail.

    `later` are the steps that were issued after it and are in flight, in order.
    """
    lost: dict[PageNode, int] = {}  # planned tokens that are left
    for share in failed.shares.values():
        for node, before in share.written.items():
            lost.setdefault(node, before)
    doomed = list(failed.shares)
    for step in later:
        for arrival, share in step.shares.items():
            job = find_job(arrival)
            reads_lost = job is not None and not lost.keys().isdisjoint(job.held_nodes())
            if arrival in failed.shares or reads_lost or not share.sources.isdisjoint(lost):
                if arrival not in doomed:
                    doomed.append(arrival)
                for node, before in share.written.items():
                    lost.setdefault(node, before)
    for node, before in lost.items():
        node.planned = min(node.planned, before)
    return doomed


def split_step(issued: IssuedStep, arrivals: Set[int]) -> tuple[IssuedStep, IssuedStep]:
    """What jobs with these numbers have of it, and the rest."""
    shares = issued.shares.items()
    theirs = {arrival: share for arrival, share in shares if arrival in arrivals}
    others = {arrival: share for arrival, share in shares if arrival not in arrivals}
    return replace(issued, shares=theirs), replace(issued, shares=others)
