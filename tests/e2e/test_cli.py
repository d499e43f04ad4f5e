"""What all commands of the CLI have in common: help, wrong options, refusals, no server."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.e2e.cli_runs import Run, Words
from tests.service.certificates import Authority

import stemserve


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("score", "--item", "x", "--labels", ""), "empty label"),
        (("score", "--query", "q"), "give items with --items FILE"),
        (("score", "--items", "/nowhere"), "cannot read --items /nowhere"),
        (("score", "--item", "x", "--kernel", "magic"), "'magic' is not one of naive, split"),
        (("explain",), "give items (a Score call) or --prompt"),
        (("score", "--item", "x", "--timeout", "nan"), "nan is not more than 0"),
        (("score", "--item", "x", "--timeout", "0"), "0 is not more than 0"),
        (("--certificate", "/c.pem", "score"), "--certificate and --private-key ("),
        (("--ca", "/no.pem", "score", "--item", "x"), "--ca /no.pem: No such file"),
        (("--api-key", "a\nb", "score"), "--api-key (STEMSERVE_API_KEY): the key has a line end"),
        (("--traceparent", "z", "score"), "--traceparent (TRACEPARENT) 'z' is not like"),
        (("bench", "--serve-options", '"'), "--serve-options '\"': No closing quotation"),
        (("bench", "--output", "/"), "--output / is a folder"),
        (("bench", "--metrics", "here"), "--metrics 'here' is not a URL"),
        (("bench", "--metrics", "http://127.0.0.1:1/m"), "--metrics http://127.0.0.1:1/m: "),
        (("bench", "--server", "localhost"), "'localhost' has no port"),
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


def test_the_version_is_told(run: Run) -> None:
    assert run("--version").stdout == f"stemserve {stemserve.__version__}\n"


def test_help_of_capacity_is_one_page_with_all_options(run_process: Run) -> None:
    done = run_process("capacity", "--help")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.lower().count("usage:") == 1
    for option in ("--model", "--prefix-tokens", "--hit-rate", "--latency-ms", "--json"):
        assert len(re.findall(rf"^  {option}\b", done.stdout, re.MULTILINE)) == 1, option


def test_output_that_nobody_takes_ends_a_command_without_a_traceback(
    stemserve_command: Words, address: str
) -> None:
    """A full disk is told; that nobody reads on is not worth a word."""
    words = stemserve_command("serve", "--print-config")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "stemserve: cannot write to standard output: No space left on device\n"
    read, write = os.pipe()
    os.close(read)
    words = stemserve_command("generate", "--server", address, "--prompt", "a")
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_text_that_the_terminal_cannot_show_is_shown_escaped(
    stemserve_command: Words, address: str
) -> None:
    done = subprocess.run(
        stemserve_command("score", "--server", address, "--query", "ü", "--item", "é"),
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert rb"'\xe9'" in done.stdout


@pytest.mark.parametrize("option", ["--tls", "--ca"])
def test_tls_at_a_plaintext_port_is_one_line_that_says_what_to_do(
    option: str, run_process: Run, address: str, tmp_path: Path
) -> None:
    options = [option] if option == "--tls" else [option, Authority(tmp_path).certificate]
    done = run_process(*options, "score", "--server", address, "--query", "a", "--item", "b")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"stemserve: {address}: UNAVAILABLE: no TLS on that port")
