"""Time several sides of a comparison turn by turn, so that a busy machine disturbs all alike."""

from collections.abc import Callable, Mapping
from statistics import median

from rich.progress import Progress

# Runs its side once and says how many seconds count.
Side = Callable[[], float]


def interleaved(
    sides: Mapping[str, Side], *, repeats: int, progress: Progress, title: str
) -> dict[str, list[float]]:
    """Seconds of each side, one value a repeat; a first round warms up and is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    task = progress.add_task(title, total=(repeats + 1) * len(sides))
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            progress.update(task, description=f"{title}: {name}")
            value = run()
            if repeat:
                seconds[name].append(value)
            progress.advance(task)
    progress.update(task, description=title)
    return seconds


def ratio(seconds: Mapping[str, list[float]], peer: str, ours: str) -> float:
    """Median of the peer over median of ours."""
    return median(seconds[peer]) / median(seconds[ours])
