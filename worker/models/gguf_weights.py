"""Tensors of a GGUF file under their Hugging Face names, dequantised."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from stemserve.worker.models.dequantize import dequantize
from stemserve.worker.models.errors import WeightsError
from stemserve.worker.models.gguf_file import GgufFile
from stemserve.worker.models.model_config import ModelConfig

_PREFIXES = {
    "token_embd.": "model.embed_tokens.",
    "output_norm.": "model.norm.",
    "output.": "lm_head.",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufWeights:
    """Reads tensors of the llama architecture, which stores the rows of Q and K interleaved."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._gguf_names = {hugging_face_name(name): name for name in file.tensors}

    @property
    def source(self) -> str:
        return str(self._file.path)

    def names(self) -> Sequence[str]:
        return list(self._gguf_names)

    def read(self, name: str, config: ModelConfig) -> Tensor:
        tensor = self.read_raw(self._gguf_names[name])
        if ".q_proj." in name:
            return _half_split_rows(tensor, config.query_heads)
        if ".k_proj." in name:
            return _half_split_rows(tensor, config.kv_heads)
        return tensor

    def read_raw(self, gguf_name: str) -> Tensor:  # float32
        """A tensor as the file has it."""
        entry = self._file.tensors[gguf_name]
        try:
            kind = GGMLQuantizationType(entry.type_id)
        except ValueError as error:
            raise WeightsError(
                f"{self.source}: {gguf_name} has the unknown type {entry.type_id}"
            ) from error
        block_weights, block_bytes = GGML_QUANT_SIZES[kind]
        if entry.shape[-1] % block_weights:
            raise WeightsError(
                f"{self.source}: rows of {gguf_name} are no multiple of {block_weights} weights, "
                f"a block of {kind.name}"
            )
        num_bytes = math.prod(entry.shape) // block_weights * block_bytes
        try:
            values = dequantize(self._file.data(gguf_name, num_bytes), kind)
        except NotImplementedError as error:
            raise WeightsError(
                f"{self.source}: {gguf_name} has the type {kind.name}, which cannot be dequantised"
            ) from error
        # A view of the mapped file is not writable, which torch warns about.
        writable = values if values.flags.writeable else np.array(values)
        return torch.as_tensor(writable).view(entry.shape)


def hugging_face_name(name: str) -> str:
    """Unchanged where there is no counterpart."""
    for gguf_prefix, prefix in _PREFIXES.items():
        if name.startswith(gguf_prefix):
            return prefix + name.removeprefix(gguf_prefix)
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_PARTS:
            return f"model.layers.{layer}.{_LAYER_PARTS[part]}.{kind}"
        case _:
            return name


def _half_split_rows(tensor: Tensor, heads: int) -> Tensor:
    """Rows of a head from (0, d/2, 1, d/2 + 1, ...) back to (0, 1, ..., d - 1)."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
