"""The commands of the CLI against a real server and a real worker of random weights."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.served import children
from typer.testing import CliRunner

from stemserve.proto.v1 import inference_pb2, info_pb2, prefixes_pb2, tries_pb2
from stemserve.service.cli import app

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
Words = Callable[..., list[str]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def dummy_options(tiny_model: Path) -> list[object]:
    return ["--model", tiny_model, "--load-format", "dummy", "--kv-pages", 500, "--threads", 1]


@pytest.fixture(scope="module")
def address(start_server: StartServer, dummy_options: list[object]) -> str:
    _, ports = start_server(*dummy_options)
    return f"127.0.0.1:{ports['rpc']}"


@pytest.fixture
def run() -> Run:
    """A command in this process."""

    def run(*words: object, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        arguments = [str(word) for word in words]
        done = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_process(stemserve_command: Words) -> Run:
    """A command as a process of its own."""

    def run(*words: object, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            stemserve_command(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    return run


def parsed(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


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


def test_tries_are_uploaded_used_and_deleted(run: Run, address: str, tmp_path: Path) -> None:
    server = ("--server", address, "--json")
    texts, tokens = tmp_path / "texts", tmp_path / "tokens"
    texts.write_text("one\n two\nthree\n\n")
    tokens.write_text("[1, 2]\n[3]\n")
    made = parsed(run("tries", "upload", *server, "--file", texts, "--trie-id", "t"))["trie"]
    assert (made["trie_id"], made["sequences"]) == ("t", 3)
    assert made.keys() == set(tries_pb2.Trie.DESCRIPTOR.fields_by_name)
    ids = parsed(run("tries", "upload", *server, "--file", tokens, "--tokens"))["trie"]
    assert ids["sequences"] == 2
    words = ("generate", *server, "--prompt", "say ", "--trie", "t")
    assert parsed(run(*words))["text"][0] in ("one", " two", "three")
    found = parsed(run(*words, "--beams", 5, "--n", 4))
    assert sorted(found["text"]) == ["", " two", "one", "three"]
    assert found["finish_reason"][3] == "FINISH_REASON_NONE_LEFT"
    plain = [word for word in words if word != "--json"]
    shown = run(*plain, "--beams", 5, "--n", 4)
    assert "sample 3: no sequence is left" in shown.stdout
    listed = parsed(run("tries", "list", *server))["tries"]
    assert sorted(trie["trie_id"] for trie in listed) == sorted(["t", ids["trie_id"]])
    assert parsed(run("tries", "get", *server, "t"))["trie"]["nodes"] == made["nodes"]
    assert parsed(run("tries", "delete", *server, "t")) == {}
    gone = run(*words)
    assert gone.returncode == 1 and "NOT_FOUND: trie 't' is not there" in gone.stderr
    assert run(*words, "--choice", "a").returncode == 2
    tokens.write_text("[1, -2]\n")
    assert run("tries", "upload", *server, "--file", tokens, "--tokens").returncode == 2


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


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("score", "--item", "x", "--labels", ""), "empty label"),
        (("score", "--query", "q"), "give items with --items FILE"),
        (("score", "--items", "/nowhere"), "cannot read --items /nowhere"),
        (("score", "--item", "x", "--kernel", "magic"), "'magic' is not one of naive, split"),
        (("explain",), "give items (a Score call) or --prompt"),
        (("serve", "--kernel", "magic"), "'magic' is not one of naive, split"),
        (("serve", "--port", "70000"), "port 70000 is not in 0 .. 65535"),
        (("serve", "--kv-memory", "much"), "'much' is not a size such as 512M or 2G"),
        (("serve", "--model", "/nowhere"), "no such name or path"),
    ],
)
def test_a_wrong_option_is_named(run: Run, words: tuple[str, ...], problem: str) -> None:
    done = run(*words)
    assert done.returncode in (1, 2)
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refused_call_is_one_line_with_the_status(run: Run, address: str) -> None:
    done = run("generate", "--server", address, "--prompt", "x", "--top-p", 7)
    assert done.returncode == 1
    assert done.stderr.startswith(f"stemserve: {address}: INVALID_ARGUMENT: sampling.top_p")
    assert len(done.stderr.splitlines()) == 1


def test_no_server_is_one_line_with_advice(run: Run) -> None:
    done = run("score", "--server", "127.0.0.1:1", "--item", "x")
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stderr
    assert "`stemserve serve` starts one" in done.stderr


@pytest.mark.parametrize(
    "command", ["", "serve", "score", "generate", "explain", "prefixes register"]
)
def test_help_is_given(run: Run, command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.returncode == 0
    assert "usage" in done.stdout.lower()


def test_help_of_worker_lists_the_options_of_the_process(run_process: Run) -> None:
    done = run_process("worker", "--help")
    assert done.returncode == 0
    assert "--listen" in done.stdout


def test_a_worker_that_cannot_load_its_model_ends_the_server(
    run_process: Run, tiny_model: Path
) -> None:
    free = ("--port", 0, "--health-port", 0, "--metrics-port", 0)
    done = run_process("serve", *free, "--model", tiny_model)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("stemserve: the worker process ended with exit")
    assert "safetensors" in done.stderr


def test_a_killed_worker_is_replaced_and_answers_the_same(
    run: Run, start_server: StartServer, dummy_options: list[object]
) -> None:
    server, ports = start_server(*dummy_options)
    words = ("score", "--server", f"127.0.0.1:{ports['rpc']}", "--query", "q", "--item", "abc")
    before = parsed(run(*words, "--json"))["scores"]
    (worker,) = children(server.pid)
    os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while (after := run(*words, "--json")).returncode and time.monotonic() < deadline:
        assert "UNAVAILABLE" in after.stderr
    assert parsed(after)["scores"] == before
    assert children(server.pid) != [worker]


def test_a_killed_server_leaves_no_worker(
    start_server: StartServer, dummy_options: list[object]
) -> None:
    server, _ = start_server(*dummy_options)
    (worker,) = children(server.pid)
    server.kill()
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


def test_score_fails_only_if_no_item_could_be_scored(run: Run, address: str) -> None:
    one_token = ("--item", "a")  # with nothing before it, nothing predicts it
    for json_wanted in ((), ("--json",)):
        words = ("score", "--server", address, *one_token, *json_wanted)
        failed = run(*words)
        assert failed.returncode == 1
        assert "no context to be predicted from" in failed.stdout
        assert run(*words, "--item", "abc").returncode == 0


def test_calibrate_writes_costs_that_serve_takes(
    run_process: Run, tiny_model: Path, tmp_path: Path, start_server: StartServer
) -> None:
    costs = tmp_path / "costs.json"
    words = ["--model", tiny_model, "--output", costs, "--threads", 1, "--quick"]
    done = run_process("calibrate", *words)
    assert done.returncode == 0, done.stderr
    assert f"--cost-table {costs}" in done.stdout
    table = json.loads(costs.read_text())["tables"][0]
    assert (table["device"], table["threads"]) == ("cpu", 1)
    options = ["--model", tiny_model, "--load-format", "dummy", "--kv-pages", 99]
    start_server(*options, "--cost-table", costs)


def test_calibrate_says_what_is_wrong(run_process: Run, tmp_path: Path) -> None:
    done = run_process("calibrate", "--model", tmp_path / "nothing")
    assert done.returncode == 1
    assert "no such name or path" in done.stderr
