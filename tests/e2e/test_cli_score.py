"""`stemserve score` against a real server and a real worker of random weights."""

from pathlib import Path

import pytest
from tests.e2e.cli_runs import Run, parsed

from stemserve.proto.v1 import inference_pb2


def test_score_prints_label_probabilities_as_one_json_object(run: Run, address: str) -> None:
    words = ("score", "--server", address, "--query", "a fruit? ", "--labels", " yes, no")
    answer = parsed(run(*words, "--items", "-", "--json", stdin="apple\n\nstone\n pear\n"))
    assert answer["shape"] == [3, 2]
    assert len(answer["scores"]) == 6
    rows = [sum(answer["scores"][row * 2 : row * 2 + 2]) for row in range(3)]
    assert answer["label_mass"] == pytest.approx(rows, rel=1e-5)
    usage = answer["usage"]
    parts = usage["cached_tokens"] + usage["shared_tokens"] + usage["computed_tokens"]
    assert usage["prompt_tokens"] == parts
    assert answer.keys() <= set(inference_pb2.ScoreResponse.DESCRIPTOR.fields_by_name)


def test_score_without_labels_is_the_likelihood_of_each_item(
    run: Run, address: str, tmp_path: Path
) -> None:
    items = tmp_path / "items.txt"
    items.write_text("one\ntwo\n")
    words = ("score", "--server", address, "--query", "count: ", "--token-logprobs", "--json")
    answer = parsed(run(*words, "--items", items, "--item", "three"))
    assert answer["shape"] == [3]
    offsets = answer["token_logprob_offsets"]
    assert offsets == [0, 3, 6, 11]
    sums = [
        sum(answer["token_logprobs"][start:stop])
        for start, stop in zip(offsets, offsets[1:], strict=False)
    ]
    assert answer["scores"] == pytest.approx(sums, abs=1e-5)


def test_several_contexts_score_every_item(run: Run, address: str) -> None:
    words = ("score", "--server", address, "--json", "--query", " end")
    many = parsed(run(*words, "--context", "a", "--context", "b", "--item", "x", "--item", "y"))
    alone = [
        parsed(run(*words, "--context", context, "--item", item))["scores"][0]
        for context in "ab"
        for item in "xy"
    ]
    assert many["scores"] == pytest.approx(alone, abs=1e-4)


def test_score_prints_a_table_for_people(run: Run, address: str) -> None:
    done = run("score", "--server", address, "--query", "q", "--item", "x", "--labels", "a,b")
    assert done.returncode == 0
    assert {"item", "'a'", "'b'", "label", "mass"} <= set(done.stdout.split())
    assert "computed" in done.stdout


def test_score_fails_only_if_no_item_could_be_scored(run: Run, address: str) -> None:
    one_token = ("--item", "a")  # with nothing before it, nothing predicts it
    for json_wanted in ((), ("--json",)):
        words = ("score", "--server", address, *one_token, *json_wanted)
        failed = run(*words)
        assert failed.returncode == 1
        assert "no context to be predicted from" in failed.stdout
        assert run(*words, "--item", "abc").returncode == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--chat", "Judge {item}", "--item-marker", "{item}"), "chat: this model has no chat"),
        (("--chat", "Judge", "--item-marker", "{item}"), "item_marker: '{item}' stands 0 times"),
        (("--item-marker", "{item}"), "item_marker: needs a chat"),
        (("--chat", "Judge", "--query", "q"), "query: cannot be given together with chat"),
        (("--chat-kwargs", "{}"), "go with --chat"),
    ],
)
def test_score_says_what_is_wrong_with_a_chat(
    run: Run, address: str, words: tuple[str, ...], problem: str
) -> None:
    done = run("score", "--server", address, "--item", "x", *words)
    assert done.returncode in (1, 2)
    assert problem in " ".join(done.stderr.split())
