"""`stemserve prefixes` and `explain` against a real server and a real worker."""

from pathlib import Path

import pytest
from tests.e2e.cli_runs import Run, parsed

from stemserve.proto.v1 import info_pb2, prefixes_pb2


def test_prefixes_are_registered_used_and_released(run: Run, address: str) -> None:
    server = ("--server", address, "--json")
    text = "a long story about a prefix " * 3
    named = ("--text", text, "--prefix-id", "story", "--warm")
    registered = parsed(run("prefixes", "register", *server, *named))["prefix"]
    assert registered["prefix_id"] == "story"
    assert registered["resident_tokens"] == registered["token_count"] == len(text)
    score = parsed(run("score", *server, "--prefix-id", "story", "--item", "the end"))
    assert score["usage"]["cached_tokens"] >= len(text) - 1
    renewed = parsed(run("prefixes", "renew", *server, "story", "--ttl-seconds", 50))["prefix"]
    assert renewed["ttl_seconds"] == 50.0
    listed = parsed(run("prefixes", "list", *server))["prefixes"]
    assert [prefix["prefix_id"] for prefix in listed] == ["story"]
    assert parsed(run("prefixes", "get", *server, "story"))["prefix"]["token_count"] == len(text)
    assert parsed(run("prefixes", "release", *server, "story")) == {}
    gone = run("prefixes", "get", *server, "story")
    assert gone.returncode == 1
    assert "NOT_FOUND: prefix 'story' is not registered" in gone.stderr
    fields = prefixes_pb2.Prefix.DESCRIPTOR.fields_by_name
    assert registered.keys() == set(fields)


def test_a_prefix_is_a_text_or_a_file(run: Run, address: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a story")
    for words in ((), ("--text", "a", "--file", file)):
        done = run("prefixes", "register", "--server", address, *words)
        assert done.returncode == 2 and "give one of --text and --file" in done.stderr


@pytest.mark.parametrize(
    "request_words", [("--query", "same start ", "--item", "a", "--item", "b"), ("--prompt", "p")]
)
def test_explain_shows_the_forest_and_the_costs(
    run: Run, address: str, request_words: tuple[str, ...]
) -> None:
    words = ("explain", "--server", address, *request_words)
    answer = parsed(run(*words, "--json"))
    assert answer.keys() == set(info_pb2.ExplainResponse.DESCRIPTOR.fields_by_name)
    group = answer["steps"][0]["groups"][0]
    assert group["chosen"] in {strategy["kernel"] for strategy in group["strategies"]}
    shown = run(*words).stdout
    assert "step 1:" in shown
    assert group["chosen"].removeprefix("KERNEL_").lower() + " *" in shown
