"""`stemserve generate` against a real server and a real worker of random weights."""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cli_runs import Run, StartServer, parsed


def test_generate_prints_one_json_object_with_all_samples(run: Run, address: str) -> None:
    words = ("generate", "--server", address, "--prompt", "once", "--max-new-tokens", 6)
    answer = parsed(run(*words, "--n", 3, "--seed", 5, "--ignore-eos", "--logprobs", "--json"))
    assert answer["sample_index"] == [0, 1, 2]
    assert len(answer["text"]) == 3
    assert answer["token_offsets"] == [0, 6, 12, 18]
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 18
    assert answer["finish_reason"] == ["FINISH_REASON_LENGTH"] * 3
    assert answer["usage"]["output_tokens"] == 18
    again = parsed(run(*words, "--n", 3, "--seed", 5, "--ignore-eos", "--json"))
    assert again["token_ids"] == answer["token_ids"]


def test_generate_streams_the_text_that_json_holds(run: Run, address: str) -> None:
    words = ("generate", "--server", address, "--prompt", "once", "--temperature", 0)
    text = parsed(run(*words, "--max-new-tokens", 8, "--json"))["text"][0]
    assert run(*words, "--max-new-tokens", 8).stdout.startswith(text)


def test_generate_takes_penalties_and_allowed_tokens(run: Run, address: str) -> None:
    words = ("generate", "--server", address, "--prompt", "once", "--temperature", 0, "--json")
    long = (*words, "--max-new-tokens", 30, "--ignore-eos")
    assert len(set(parsed(run(*long, "--frequency-penalty", 100))["token_ids"])) == 30
    some = parsed(run(*long, "--allow-token", 70, "--n", 2, "--logprobs", "--logprob-token", 70))
    assert len(parsed(run(*words, "--prompt-logprobs"))["prompt_logprobs"]) == len("once") - 1
    assert set(some["token_ids"]) == {70} and some["asked_logprobs"] == some["logprobs"]
    assert run(*words, "--repetition-penalty", 0).returncode != 0


def test_generate_guesses_ahead_and_says_what_came_of_it(
    run: Run, start_server: StartServer, dummy_options: list[object], tmp_path: Path
) -> None:
    """Where drafts need not pay, since the steps of a busy machine take any time."""
    config = tmp_path / "stemserve.toml"
    config.write_text("[speculation]\nleast_gain = 0\n")
    _, ports = start_server("--config", config, *dummy_options)
    address = f"127.0.0.1:{ports['rpc']}"
    prompt = ("generate", "--server", address, "--prompt", "once", "--temperature", 0)
    words = (*prompt, "--max-new-tokens", 60, "--ignore-eos", "--allow-token", 70)
    usage = parsed(run(*words, "--draft-tokens", 4, "--json"))["usage"]
    assert usage["drafted_tokens"] >= usage["accepted_tokens"] > 0
    assert "drafted tokens accepted" in run(*words, "--draft-tokens", 4).stdout
    assert "drafted" not in run(*words, "--draft-tokens", 0).stdout
    assert run(*words, "--draft-tokens", 33).returncode != 0


def test_generate_takes_a_constraint(run: Run, address: str, tmp_path: Path) -> None:
    words = ("generate", "--server", address, "--prompt", "once", "--json")
    assert parsed(run(*words, "--choice", "yes", "--choice", "no"))["text"][0] in ("yes", "no")
    assert parsed(run(*words, "--regex", "[ab]{3}!"))["text"][0][3:] == "!"
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": [7, null]}')
    grammar.write_text('start: "x" "y"')
    assert parsed(run(*words, "--json-schema", schema))["text"][0] in ("7", "null")
    assert parsed(run(*words, "--grammar", grammar))["text"] == ["xy"]
    assert run(*words, "--regex", "a", "--choice", "a").returncode != 0
    assert run(*words, "--regex", "(").returncode != 0


def greedy(run: Run, address: str, *words: object) -> dict[str, Any]:
    """Six tokens, the likeliest ones unless the words say otherwise."""
    always = ("--server", address, "--max-new-tokens", 6, "--ignore-eos", "--json")
    return parsed(run("generate", *always, "--prompt", "once", *words))


def test_generate_searches_with_beams(run: Run, address: str) -> None:
    words = ("--beams", 4, "--n", 3, "--length-penalty", 0, "--early-stopping", "never")
    found = greedy(run, address, *words, "--logprobs")
    assert found["sample_index"] == [0, 1, 2]
    assert found["beam_scores"] == sorted(found["beam_scores"], reverse=True)
    sums = [sum(found["logprobs"][6 * beam : 6 * beam + 6]) for beam in range(3)]
    assert found["beam_scores"] == pytest.approx(sums, abs=1e-4)
    mean = greedy(run, address, "--beams", 4, "--logprobs")
    assert mean["beam_scores"] == pytest.approx([sum(mean["logprobs"]) / 6], abs=1e-4)
    one = greedy(run, address, "--beams", 1)
    assert one["token_ids"] == greedy(run, address, "--temperature", 0)["token_ids"]


def test_generate_prints_beams_with_their_scores(run: Run, address: str) -> None:
    words = ("generate", "--server", address, "--prompt", "once", "--max-new-tokens", 4)
    shown = run(*words, "--beams", 3, "--n", 2).stdout.splitlines()
    for rank in range(2):
        assert any(line.startswith(f"--- sample {rank}, score -") for line in shown)
    assert run(*words, "--beams", 3).stdout.startswith("--- sample 0, score -")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--beams", 4, "--early-stopping", "sometimes"), "heuristic, first, never"),
        (("--length-penalty", 1), "--beams"),
        (("--early-stopping", "first"), "--beams"),
        (("--beams", -1), "-1"),
        (("--beams", 4, "--temperature", 1), "INVALID_ARGUMENT: sampling.temperature"),
        (("--beams", 4, "--stream-interval", 2), "INVALID_ARGUMENT: stream_interval"),
        (("--beams", 2, "--n", 3), "INVALID_ARGUMENT: n"),
        (("--stream-interval", 9_000), "INVALID_ARGUMENT: stream_interval"),
        (("--chat", "hello"), "cannot be given with --prompt"),
        (("--tools", "/nowhere.json"), "go with --chat"),
    ],
)
def test_generate_says_what_is_wrong_with_an_option(
    run: Run, address: str, words: tuple[object, ...], problem: str
) -> None:
    done = run("generate", "--server", address, "--prompt", "once", *words)
    assert done.returncode in (1, 2)
    assert problem in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_generate_names_what_is_missing_or_unreadable(
    run: Run, address: str, tmp_path: Path
) -> None:
    nothing = run("generate", "--server", address)
    assert nothing.returncode == 1 and "give a text, token ids, a prefix" in nothing.stderr
    file = tmp_path / "schema.json"
    file.write_bytes(b"\xff\xfe{")
    for option in ("--json-schema", "--grammar"):
        done = run("generate", "--server", address, "--prompt", "once", option, file)
        assert done.returncode == 2 and "it is not UTF-8 text" in " ".join(done.stderr.split())


def test_generate_draws_from_what_truncation_leaves(run: Run, address: str) -> None:
    likeliest = greedy(run, address, "--temperature", 0)["token_ids"]
    for words in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1)):
        assert greedy(run, address, "--temperature", 3, *words)["token_ids"] == likeliest
    assert greedy(run, address, "--temperature", 3, "--seed", 1)["token_ids"] != likeliest
    repelled = greedy(run, address, "--temperature", 0, "--presence-penalty", 100)["token_ids"]
    assert len(set(repelled)) == 6


def test_generate_ends_where_it_is_told(run: Run, address: str) -> None:
    text = greedy(run, address, "--allow-token", 66, "--allow-token", 67, "--seed", 4)["text"][0]
    assert set(text) <= {"c", "d"} and len(text) == 6
    words = ("--allow-token", 66, "--allow-token", 67, "--seed", 4, "--stop", text[2:4])
    stopped = greedy(run, address, *words)
    assert stopped["text"][0] == text[: text.index(text[2:4])]
    assert stopped["finish_reason"] == ["FINISH_REASON_STOP"]
    late = greedy(run, address, *words, "--min-new-tokens", 6)
    assert len(late["token_ids"]) == 6


@pytest.mark.parametrize(
    "words",
    [
        ("--stream-interval", 4),
        ("--stream-interval", 1),
        ("--priority", -1),
        ("--kernel", "paged"),
        ("--timeout", 60),
    ],
)
def test_generate_says_the_same_however_it_is_served(
    run: Run, address: str, words: tuple[object, ...]
) -> None:
    plain = greedy(run, address, "--temperature", 0)
    other = greedy(run, address, "--temperature", 0, *words)
    assert (other["token_ids"], other["text"]) == (plain["token_ids"], plain["text"])


def test_generate_continues_a_registered_prefix(run: Run, address: str) -> None:
    text = "a long story about generation " * 2
    named = ("--text", text, "--prefix-id", "tale", "--warm")
    assert run("prefixes", "register", "--server", address, *named).returncode == 0
    answer = greedy(run, address, "--prefix-id", "tale", "--temperature", 0, "--top-logprobs", 2)
    assert answer["usage"]["cached_tokens"] >= len(text) - 1
    whole = ("--prompt", text + "once", "--temperature", 0)
    assert answer["token_ids"] == greedy(run, address, *whole)["token_ids"]
    for token, top in zip(answer["token_ids"], answer["top_logprobs"], strict=True):
        assert top["tokens"][0]["token_id"] == token
        assert len(top["tokens"]) == 2


def test_generate_refuses_a_chat_where_the_model_has_no_template(run: Run, address: str) -> None:
    done = run("generate", "--server", address, "--chat", "hello")
    assert done.returncode == 1
    assert "INVALID_ARGUMENT: chat" in done.stderr
