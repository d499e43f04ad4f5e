"""`stemserve serve`, `worker` and `calibrate` as processes."""

import json
import os
import signal
import time
from pathlib import Path

from tests.e2e.cli_runs import PATIENCE_S, Run, StartServer, parsed
from tests.e2e.served import children


def test_a_worker_that_cannot_load_its_model_ends_the_server(
    run_process: Run, tiny_model: Path
) -> None:
    free = ("--port", 0, "--health-port", 0, "--metrics-port", 0)
    done = run_process("serve", *free, "--model", tiny_model)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("stemserve: the worker process ended with exit")
    assert "safetensors" in done.stderr


def test_a_cache_that_does_not_fit_is_refused_by_the_name_of_the_servers_flag(
    run_process: Run, tiny_model: Path
) -> None:
    words = ("--model", tiny_model, "--load-format", "dummy", "--device", "cpu")
    free = ("--port", 0, "--health-port", 0, "--metrics-port", 0)
    done = run_process("serve", *free, *words, "--kv-memory", "8000G")
    assert done.returncode == 1
    assert "pass a smaller --kv-pages or --kv-memory (" in done.stderr


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


def test_help_of_worker_lists_the_options_of_the_process(run_process: Run) -> None:
    done = run_process("worker", "--help")
    assert done.returncode == 0
    assert "--listen" in done.stdout
    assert done.stdout.startswith("usage: stemserve worker ")


def test_a_worker_takes_its_settings_from_the_file_of_a_server(
    run_process: Run, tmp_path: Path
) -> None:
    file = tmp_path / "stemserve.toml"
    file.write_text('model = "/nowhere"\n')
    done = run_process("worker", "--config", file, "--listen", "127.0.0.1:0")
    assert done.returncode == 1 and "model '/nowhere': no such name or path" in done.stderr
    file.write_text("[worker]\nkv_pagse = 3\n")
    done = run_process("worker", "--listen", "127.0.0.1:0", "--config", file)
    assert done.returncode == 1 and "kv_pagse" in done.stderr
