import time

import torch
from choices import Choices
from kernel_trees import Case, case_of
from prefill_shapes import random_shapes, survey_grid
from sections import SECTIONS, Measured, RunPlan, Task, run_tasks, tasks


def tree(name: str, tokens: int) -> Case:
    return case_of(name, [(-1, tokens)] * 4, (32, 8, 128))


def test_tasks_run_in_order_and_what_comes_too_late_is_counted() -> None:
    measured = Measured()
    done: list[str] = []
    told: list[str] = []
    saved: list[list[str]] = []
    todo = [
        Task(section="table", name="first", measure=lambda: done.append("first")),
        Task(section="trees", name="second", measure=lambda: done.append("second")),
    ]
    run_tasks(todo, measured, time.perf_counter() + 60, told.append, lambda: saved.append([*done]))
    assert done == told == ["first", "second"]
    assert saved[-1] == done and not measured.late
    run_tasks(todo, measured, time.perf_counter() - 1, told.append, lambda: saved.append([*done]))
    assert len(done) == 2
    assert measured.late == {"table": 1, "trees": 1}


def test_long_trees_and_random_shapes_take_turns_and_short_trees_come_last() -> None:
    plan = RunPlan(
        sections=SECTIONS,
        table=[tree("table", 8192)],
        trees=[tree("short", 16), tree("long 1", 8192), tree("long 2", 8192)],
        shapes=[*survey_grid(), *random_shapes(3, 0)],
        peers=[],
        choices=Choices(device=torch.device("cpu"), dtype=torch.float32),
        rounds=1,
        table_only=(),
        deadline_s=0.0,
    )
    order = [(task.section, task.name) for task in tasks(plan, Measured())]
    assert order[0] == ("table", "table")
    assert [section for section, _ in order[1:10]] == ["prefill"] * 9
    assert [section for section, _ in order[10:]] == [
        "plans", "trees", "prefill", "trees", "prefill", "prefill", "division", "dram", "trees",
    ]  # fmt: skip
    assert [name for section, name in order if section == "trees"] == ["long 1", "long 2", "short"]
