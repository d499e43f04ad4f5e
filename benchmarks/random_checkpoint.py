"""Write the random weights of `--load-format dummy` as a checkpoint, so that a peer has them too.

    python benchmarks/random_checkpoint.py FOLDER ...

Each folder has a config.json; model.safetensors is added.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from stemserve.worker.models.dummy_weights import fill_with_random
from stemserve.worker.models.hf_config import read_hf_config
from stemserve.worker.models.parameters import allocate, checkpoint_slots


def write_random(folder: Path, device: torch.device) -> Path:
    config = read_hf_config(folder / "config.json")
    dtype = config.checkpoint_dtype or torch.float32
    slots = checkpoint_slots(config, allocate(config, dtype, device))
    fill_with_random(slots, lambda done, total: None)
    path = folder / "model.safetensors"
    # Copies: parts of a fused parameter share its memory.
    save_file({name: slot.cpu().clone() for name, slot in slots.items()}, path, {"format": "pt"})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for folder in parser.parse_args().folders:
        print(write_random(folder, device))


if __name__ == "__main__":
    main()
