"""The examples against a real server with the default model, and what README.md says of them."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.stem != "demo")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def address(
    start_server: Callable[..., tuple[object, dict[str, int]]], default_model_path: Path
) -> str:
    return f"127.0.0.1:{start_server('--model', default_model_path)[1]['rpc']}"


def run(name: str, address: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, "--server", address, *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def output(name: str, address: str, *options: str) -> list[str]:
    done = run(name, address, *options)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]


def without_numbers(line: str) -> str:
    """How much was cached, or the last digit of a score, differs from run to run."""
    return NUMBER.sub("#", line).strip()


def shown(name: str) -> list[str]:
    """What README.md shows as the output: the block behind the last mention of the file."""
    blocks = README.rsplit(f"examples/{name}", 1)[1].split("\n```\n")[1:]
    block = next(filter(str.strip, blocks))
    return [line for line in block.splitlines() if line]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_the_readme_shows(name: str, address: str) -> None:
    said, expected = output(name, address), shown(name)
    assert len(said) == len(expected)
    if name == "samples.py":  # draws of another machine may differ
        scores = [float(line.split()[0]) for line in said[:-1]]
        assert len(scores) == 8 and scores == sorted(scores, reverse=True)
        said, expected = said[-1:], expected[-1:]
    assert [without_numbers(line) for line in said] == [without_numbers(line) for line in expected]


def test_retrieval_over_many_random_ids_finds_some_of_them(address: str) -> None:
    *_, uploaded, searched = output("generative_retrieval.py", address, "--many", "2000")
    assert uploaded.startswith("2,000 ids of 8 tokens")
    assert searched.endswith("all answers among them.")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_without_a_server_says_what_to_start(name: str) -> None:
    done = run(name, "127.0.0.1:1")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("UNAVAILABLE: ") and line.endswith("`stemserve serve` starts one")


def test_an_example_at_an_address_without_a_port_says_so() -> None:
    done = run(EXAMPLES[0], "localhost")
    assert done.returncode == 1
    assert done.stderr == "'localhost' has no port; give HOST:PORT, as localhost:50051\n"


def test_a_demo_whose_server_does_not_start_ends_with_what_the_server_says() -> None:
    command = [sys.executable, str(ROOT / "examples/demo.py"), "--model", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    said, ended = done.stderr.splitlines()
    assert said.startswith("stemserve: model '/nowhere': no such name or path")
    assert ended == "the server did not start (exit code 1)"


def test_each_example_is_in_the_readme() -> None:
    for name in EXAMPLES:
        assert f"(examples/{name})" in README
