"""A checkpoint of the random weights that `--load-format dummy` makes."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import write_random

from stemserve.worker.models.dummy_weights import fill_with_random
from stemserve.worker.models.hf_config import read_hf_config
from stemserve.worker.models.loader import load_model
from stemserve.worker.models.parameters import allocate, checkpoint_slots

safetensors: Any = import_module("safetensors.torch")


def test_the_checkpoint_holds_the_weights_of_a_dummy_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    written = safetensors.load_file(write_random(tmp_path, torch.device("cpu")))
    config = read_hf_config(tmp_path / "config.json")
    slots = checkpoint_slots(config, allocate(config, torch.float32, torch.device("cpu")))
    fill_with_random(slots, lambda done, total: None)
    assert written.keys() == slots.keys()
    for name, weight in slots.items():
        torch.testing.assert_close(written[name], weight, rtol=0, atol=0)
    load_model(tmp_path)  # no tensor is missing, none is too many
