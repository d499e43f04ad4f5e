"""A worker as a process of its own: its RPCs over a Unix socket, and the ways in which it ends."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from tests.worker.plans import PlanBuilder
from tests.worker.tiny_model import COSTS, CPU, VOCAB, oracle_logprobs, save_tiny_model
from transformers import LlamaForCausalLM

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.pricing.cost_table_file import load_cost_tables, parse_tables, tables_json
from stemserve.proto.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from stemserve.worker.blobs import decode_float32
from stemserve.worker.calibrate import calibrate
from stemserve.worker.config import ConfigError

START_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LlamaForCausalLM:
    (folder / "costs.json").write_text(tables_json([COSTS]))
    return save_tiny_model(folder, seed=3)


def command(folder: Path, socket: Path, *more: str) -> list[str]:
    flags = ["--listen", f"unix:{socket}", "--model", str(folder), "--threads", "1"]
    flags += ["--device", "cpu", "--kv-pages", "64", "--page-size", "4", "--sampler-slots", "4"]
    flags += ["--cost-table", str(folder / "costs.json"), *more]
    return [sys.executable, "-m", "stemserve.worker", *flags]


@dataclass(frozen=True, kw_only=True)
class Worker:
    process: subprocess.Popen[bytes]
    socket: Path
    stub: worker_pb2_grpc.WorkerStub


def connect(socket: Path) -> tuple[grpc.Channel, worker_pb2_grpc.WorkerStub]:
    channel = grpc.insecure_channel(f"unix:{socket}")
    return channel, worker_pb2_grpc.WorkerStub(channel)


def wait_until_ready(process: subprocess.Popen[bytes], channel: grpc.Channel) -> None:
    ready = grpc.channel_ready_future(channel)
    while not ready.done():
        assert process.poll() is None, f"the worker ended with {process.returncode}"
        time.sleep(0.05)


def start(folder: Path, socket: Path, *more: str, fds: Sequence[int] = ()) -> Iterator[Worker]:
    process = subprocess.Popen(command(folder, socket, *more), pass_fds=fds)
    channel, stub = connect(socket)
    try:
        wait_until_ready(process, channel)
        yield Worker(process=process, socket=socket, stub=stub)
    finally:
        channel.close()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def worker(
    folder: Path, oracle: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    yield from start(folder, tmp_path_factory.mktemp("socket") / "w.sock")


@pytest.fixture
def own_worker(folder: Path, oracle: LlamaForCausalLM, tmp_path: Path) -> Iterator[Worker]:
    yield from start(folder, tmp_path / "w.sock")


def request(plan: PlanBuilder, step_id: int) -> worker_pb2.RunRequest:
    return worker_pb2.RunRequest(plan=plan.build(step_id))


def scored_prompt(tokens: list[int]) -> PlanBuilder:
    plan = PlanBuilder()
    row = plan.prefill(plan.node(len(tokens), range(-(-len(tokens) // 4))), tokens)
    plan.gather(row + len(tokens) - 1, range(VOCAB))
    return plan


def test_describe_tells_facts_limits_and_the_cost_table(worker: Worker, folder: Path) -> None:
    facts = worker.stub.Describe(worker_pb2.DescribeRequest())
    assert (facts.architecture, facts.dtype, facts.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert (facts.vocab_size, facts.layers, facts.context_tokens) == (VOCAB, 3, 256)
    assert (facts.query_heads, facts.kv_heads, facts.head_dim) == (4, 2, 8)
    assert (facts.page_size, facts.kv_pages, facts.sampler_slots) == (4, 64, 4)
    assert (facts.steps_in_flight, facts.has_lm_head, facts.model) == (2, True, folder.name)
    assert facts.kv_bytes_per_token == 3 * 2 * 2 * 8 * 4
    assert parse_tables(facts.cost_table_json)[0].head_dim == 8


def test_the_socket_is_for_its_owner_only(worker: Worker) -> None:
    assert stat.S_IMODE(worker.socket.stat().st_mode) == 0o600


def test_results_come_in_order_and_are_right_beside_a_bad_plan(
    worker: Worker, oracle: LlamaForCausalLM
) -> None:
    prompts = [[5, 6, 7], [9] * 12, [1, 2, 3, 4, 5]]
    bad = PlanBuilder()
    bad.prefill(bad.node(4, [64]), [1], stored=False)
    plans = [scored_prompt(prompts[0]), scored_prompt(prompts[1]), bad, scored_prompt(prompts[2])]
    requests = [request(plan, 20 + i) for i, plan in enumerate(plans)]
    results = [response.result for response in worker.stub.Run(iter(requests))]
    assert [result.step_id for result in results] == [20, 21, 22, 23]
    assert results[2].error == "bad plan: node_pages must be in 0..63; found 64"
    del results[2]
    for tokens, result in zip(prompts, results, strict=True):
        found = device_tensor(decode_float32("", result.gather_logprobs), CPU)
        expected = oracle_logprobs(oracle, tokens)[-1]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert result.step_seconds > 0 and result.groups[0].phase == "prefill"


def test_a_second_service_is_refused_until_the_first_has_left(worker: Worker) -> None:
    first_channel, first = connect(worker.socket)
    stream = first.Run(iter([request(scored_prompt([1]), 1)]))
    assert next(stream).result.step_id == 1
    stream.cancel()
    first_channel.close()
    answers = worker.stub.Run(iter([request(scored_prompt([1]), 2)]))
    assert [a.result.step_id for a in answers] == [2]


def test_two_streams_at_a_time_are_refused(worker: Worker) -> None:
    release = threading.Event()

    def plans() -> Iterator[worker_pb2.RunRequest]:
        yield request(scored_prompt([1]), 1)
        release.wait(START_S)

    stream = worker.stub.Run(plans())
    assert next(stream).result.step_id == 1
    with pytest.raises(grpc.RpcError) as refused:
        next(worker.stub.Run(iter([request(scored_prompt([1]), 2)])))
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    release.set()
    assert list(stream) == []


def test_predict_answers_and_refuses_bad_plans(worker: Worker) -> None:
    plan = PlanBuilder()
    plan.item(plan.node(8, [0, 1]), [1, 2])
    answer = worker.stub.Predict(worker_pb2.PredictRequest(plan=plan.build()))
    (group,) = answer.groups
    kernels = {strategy.kernel for strategy in group.strategies}
    assert group.chosen in kernels and inference_pb2.KERNEL_MULTI_ITEM in kernels
    plan.token_ids[0] = VOCAB
    with pytest.raises(grpc.RpcError, match=f"bad plan: token_ids.*{VOCAB}") as refused:
        worker.stub.Predict(worker_pb2.PredictRequest(plan=plan.build()))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_worker_cleanly(own_worker: Worker, number: signal.Signals) -> None:
    stream = own_worker.stub.Run(iter([request(scored_prompt([1]), 1)]))
    next(stream)
    own_worker.process.send_signal(number)
    assert own_worker.process.wait(START_S) == 0
    assert not own_worker.socket.exists()


def test_an_open_stream_is_told_that_the_worker_stops(own_worker: Worker) -> None:
    release = threading.Event()

    def plans() -> Iterator[worker_pb2.RunRequest]:
        yield request(scored_prompt([1]), 1)
        release.wait(START_S)

    stream = own_worker.stub.Run(plans())
    next(stream)
    own_worker.process.terminate()
    with pytest.raises(grpc.RpcError, match="the worker is stopping") as ended:
        next(stream)
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    release.set()
    assert own_worker.process.wait(START_S) == 0


def test_the_worker_ends_with_its_parent(
    folder: Path, oracle: LlamaForCausalLM, tmp_path: Path
) -> None:
    read_end, write_end = os.pipe()
    flags = ("--parent-fd", str(read_end))
    for worker in start(folder, tmp_path / "w.sock", *flags, fds=[read_end]):
        os.close(read_end)
        assert worker.process.poll() is None
        os.close(write_end)
        assert worker.process.wait(START_S) == 0


def test_a_signal_ends_a_worker_that_is_still_starting(
    folder: Path, oracle: LlamaForCausalLM, tmp_path: Path
) -> None:
    # No table of costs comes with this type: the worker measures for some seconds.
    words = command(folder, tmp_path / "w.sock", "--dtype", "bfloat16")
    words = [word for word in words if "cost" not in word]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        if process.stderr is None:
            pytest.fail("no stderr")
        assert any("measuring" in line for line in process.stderr)
        process.terminate()
        assert "told to end before serving" in process.stderr.read()
    assert process.returncode == 0


def test_calibrate_writes_a_table_that_a_worker_takes(
    folder: Path, oracle: LlamaForCausalLM, tmp_path: Path
) -> None:
    output = tmp_path / "measured.json"
    words = [sys.executable, "-m", "stemserve.worker", "calibrate", "--quick", "--threads", "1"]
    words += ["--model", str(folder), "--output", str(output)]
    subprocess.run(words, check=True, timeout=120, capture_output=True)
    (table,) = load_cost_tables(output)
    assert (table.device, table.dtype, table.query_heads, table.threads) == ("cpu", "float32", 4, 1)


def test_calibrate_refuses_an_output_before_it_measures(
    folder: Path, oracle: LlamaForCausalLM, tmp_path: Path
) -> None:
    for output, problem in ((tmp_path, "is a folder"), (tmp_path / "no/x.json", "no folder")):
        with pytest.raises(ConfigError, match=problem):
            calibrate(["--model", str(folder), "--output", str(output)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-pages", "20000000"], "not enough memory: 20000000 KV pages need"),
        (["--model", "/nowhere"], "--model /nowhere does not exist"),
        (["--listen", "nonsense"], "--listen 'nonsense' is neither unix:/path nor host:port"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_its_last_line(
    folder: Path, oracle: LlamaForCausalLM, tmp_path: Path, flags: list[str], message: str
) -> None:
    words = command(folder, tmp_path / "w.sock", *flags)
    ended = subprocess.run(words, capture_output=True, text=True, timeout=START_S, check=False)
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("stemserve.worker: error: ") and message in last
