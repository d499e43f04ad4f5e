"""What tests of all folders share: the default model, and workers that compute nothing."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.triton_interpreter import interpret_without_gpu
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

interpret_without_gpu()

FAKE_WORKER = Path(__file__).parent / "fake_worker.py"
DEFAULT_MODEL = Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """SmolLM2-135M-Instruct, which `make model` fetches."""
    path = Path(__file__).resolve().parents[1] / DEFAULT_MODEL
    if not path.is_file():
        pytest.fail(f"{DEFAULT_MODEL} is missing; run make model", pytrace=False)
    return path


@pytest.fixture
def fake_worker_command() -> Callable[..., list[str]]:
    """The command line of a fake worker, without its address: options in, words out."""

    def command(*options: object) -> list[str]:
        return [sys.executable, str(FAKE_WORKER), *map(str, options)]

    return command


@pytest.fixture
def fake_worker(
    fake_worker_command: Callable[..., list[str]], tmp_path: Path
) -> Iterator[Callable[..., str]]:
    """Starts fake workers that end with the test: options in, address out.

    On a Unix socket, with one for steps, or on a port.
    """
    running: list[subprocess.Popen[bytes]] = []

    def start(*options: object, tcp: bool = False) -> str:
        address = f"unix:{tmp_path / f'worker-{len(running)}.sock'}"
        if tcp:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
        running.append(subprocess.Popen(fake_worker_command("--listen", address, *options)))
        return address

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shape of a small Llama, a tokenizer of one token a byte, and no weights."""
    folder = tmp_path_factory.mktemp("tiny-model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token_id for token_id, character in enumerate(alphabet)}
    tokenizer = cast(Any, Tokenizer(models.BPE(vocab=vocabulary, merges=[])))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
