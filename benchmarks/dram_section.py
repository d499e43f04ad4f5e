"""HBM bytes of tree decode by the GPU's own counters, beside the model and paged decode."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]

DRIVER = Path(__file__).parent / "measure_dram_bytes.py"
READ, WRITTEN, L2_SECTORS = METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors_op_read.sum",  # that the L2 cache was asked for
)
SECTOR_BYTES = 32
MARKER = "spin_kernel"
LONGEST_S = 120


class NoCounters(Exception):
    """The counters could not be read; the message says why."""


def dram_rows() -> list[Row]:
    """Raises NoCounters. Caches are left as the driver leaves them: full of other data."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoCounters("ncu (Nsight Compute) is not on the PATH")
    command = [
        ncu, "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none",
        "--metrics", ",".join(METRICS), "--csv", "--print-units", "base", sys.executable,
        str(DRIVER),
    ]  # fmt: skip
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise NoCounters(f"ncu took more than {LONGEST_S} s") from error
    if ran.returncode:
        raise NoCounters((ran.stdout + ran.stderr)[-400:].strip())
    return counted(ran.stdout)


def counted(output: str) -> list[Row]:
    """The driver's calls with the bytes of their kernels, from ncu's CSV."""
    lines = output.splitlines()
    announced = [line for line in lines if line.startswith("calls ")]
    headers = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    if not announced or not headers:
        raise NoCounters("ncu printed no counters: " + output[-300:].strip())
    calls: list[Row] = json.loads(announced[0].removeprefix("calls "))
    groups: list[Row] = []
    profile = [line for line in lines[headers[0] :] if line.startswith('"')]
    for entry in csv.DictReader(profile):
        if MARKER in entry["Kernel Name"]:
            if entry["Metric Name"] == READ:
                groups.append(dict.fromkeys(METRICS, 0.0))
        elif groups:
            groups[-1][entry["Metric Name"]] += float(entry["Metric Value"].replace(",", ""))
    if len(groups) != len(calls):
        raise NoCounters(f"{len(groups)} marked calls in the profile, {len(calls)} were made")
    return [
        call
        | {
            "read_bytes": int(group[READ]),
            "written_bytes": int(group[WRITTEN]),
            "l2_read_bytes": int(group[L2_SECTORS]) * SECTOR_BYTES,
            "read_over_unique_kv": round(group[READ] / call["kv_bytes"], 4),
        }
        for call, group in zip(calls, groups, strict=True)
    ]


def savings(rows: list[Row], kind: str = "read_bytes") -> dict[str, float]:
    """Bytes that paged decode reads over those that tree decode reads, a tree."""
    read = {(row["tree"], row["engine"]): row[kind] for row in rows}
    return {
        tree: round(read[tree, "fi_decode"] / ours, 2)
        for (tree, engine), ours in read.items()
        if engine == "codec" and (tree, "fi_decode") in read
    }
