import json

import pytest
from dram_section import MARKER, METRICS, NoCounters, counted, savings

CALLS = [
    {"tree": "t", "engine": "codec", "kv_bytes": 1000},
    {"tree": "t", "engine": "fi_decode", "kv_bytes": 1000},
]


def profile(kernels: list[tuple[str, tuple[str, str, str]]]) -> str:
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for number, (kernel, values) in enumerate(kernels):
        for metric, value in zip(METRICS, values, strict=True):
            lines.append(f'"{number}","{kernel}","{metric}","byte","{value}"')
    return "\n".join(["==PROF== Connected", f"calls {json.dumps(CALLS)}", *lines])


def test_the_kernels_after_a_marker_are_one_call() -> None:
    marker = (f"{MARKER}(long)", ("5", "5", "5"))
    output = profile(
        [
            marker,
            ("tree_kernel", ("1,000", "10", "40")),
            ("merge_kernel", ("20", "1", "2")),
            marker,
            ("decode", ("2,040", "0", "100")),
        ]
    )
    rows = counted(output)
    assert [row["read_bytes"] for row in rows] == [1020, 2040]
    assert [row["l2_read_bytes"] for row in rows] == [42 * 32, 3200]
    assert rows[0]["written_bytes"] == 11
    assert rows[0]["read_over_unique_kv"] == 1.02
    assert savings(rows) == {"t": 2.0}


@pytest.mark.parametrize(
    "output",
    ["==ERROR== no permission", profile([]), profile([(f"{MARKER}()", ("0", "0", "0"))])],
)
def test_a_profile_without_every_call_is_refused(output: str) -> None:
    with pytest.raises(NoCounters):
        counted(output)
