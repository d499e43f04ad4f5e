"""The forward pass of a decoder-only model, without its attention."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.fused.heads import Heads
from stemserve.worker.models.errors import ModelError
from stemserve.worker.models.layer_ops import (
    DeviceGather,
    Gathered,
    LayerOps,
    Likeliest,
    PageWrites,
    SplitHeads,
)
from stemserve.worker.models.layers import Attend, DecoderLayer
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.parameters import ModelWeights


class Transformer:
    """A model whose rows are tokens of any sequences; `attend` knows which row sees what.

    Takes the layers out of `weights` one by one: on a CPU each is packed into another layout, and
    there is never a second copy of more than one layer.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: LayerOps) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._embedding = weights.embedding
        self.ops = ops
        self._first_norm = weights.layers[0].attention_norm
        self._layers = [
            DecoderLayer(config, index, weights.layers.pop(0), _next_norm(weights), ops)
            for index in range(config.num_layers)
        ]
        self._lm_head = None if weights.lm_head is None else ops.lm_head(weights.lm_head)
        self._classifier = None if weights.classifier is None else ops.linear(weights.classifier)

    @property
    def has_lm_head(self) -> bool:
        return self._lm_head is not None

    @property
    def device_gather(self) -> DeviceGather | None:
        """Of the language-model head, if it has one."""
        return self._lm_head if isinstance(self._lm_head, DeviceGather) else None

    def hidden(
        self,
        token_ids: Tensor,  # [rows]
        positions: Tensor,  # [rows]
        attend: Attend,
        keep_rows: Tensor | None = None,  # [kept] row numbers; None: all rows
        pages: PageWrites | None = None,  # None: keys and values are not kept
    ) -> Tensor:  # [kept, hidden]
        """Hidden states after the final norm.

        With `keep_rows`, only these rows go on after the last layer's attention.
        """
        with torch.inference_mode():
            split = self.ops.heads(positions, pages)
            residual = self.embed(token_ids)
            heads = self.begin(residual, split)
            for layer in range(self.config.num_layers - 1):
                mixed = attend(layer, *heads).reshape(len(residual), -1)
                heads = self.between(layer, mixed, residual, split)
            mixed = attend(self.config.num_layers - 1, *heads).reshape(len(residual), -1)
            if keep_rows is not None:
                mixed, residual = mixed[keep_rows], residual[keep_rows]
            return self.end(mixed, residual)

    def embed(self, token_ids: Tensor) -> Tensor:  # [rows] to [rows, hidden], the first residual
        return F.embedding(token_ids, self._embedding)

    def embed_into(
        self,
        token_ids: Tensor,  # [rows]
        residual: Tensor,  # [rows, hidden], overwritten
    ) -> None:
        torch.index_select(self._embedding, 0, token_ids, out=residual)

    def begin(
        self,
        residual: Tensor,  # [rows, hidden]
        split: SplitHeads,
    ) -> Heads:
        """Up to the first attention."""
        return self._layers[0].heads(self.ops.norm(residual, self._first_norm), split)

    def between(
        self,
        layer: int,
        mixed: Tensor,  # [rows, query_heads * head_dim], the result of the layer's attention
        residual: Tensor,  # [rows, hidden], changed in place
        split: SplitHeads,
    ) -> Heads:
        """From one layer's attention to the next one's."""
        normed = self._layers[layer].rest(mixed, residual)
        return self._layers[layer + 1].heads(normed, split)

    def end(
        self,
        mixed: Tensor,  # [rows, query_heads * head_dim], the result of the last attention
        residual: Tensor,  # [rows, hidden], changed in place
    ) -> Tensor:  # [rows, hidden]
        """From the last attention to the final norm."""
        return self._layers[-1].rest(mixed, residual)

    def logits(
        self,
        hidden: Tensor,  # [n, hidden]
    ) -> Tensor:  # [n, vocab], float32
        if self._lm_head is None:
            raise ModelError(f"{self.config.architecture} has no language-model head")
        with torch.inference_mode():
            return self._lm_head.logits(hidden)

    def likeliest(
        self,
        hidden: Tensor,  # [n, hidden]
    ) -> Likeliest:
        if self._lm_head is None:
            raise ModelError(f"{self.config.architecture} has no language-model head")
        with torch.inference_mode():
            return self._lm_head.likeliest(hidden)

    def gather(
        self,
        hidden: Tensor,  # [n, hidden]
        rows: NDArray[np.integer],  # [chosen] of hidden
        tokens: NDArray[np.integer],  # [chosen]
    ) -> Gathered:
        """Log-probabilities of chosen tokens, and the most likely one of each row."""
        if self._lm_head is None:
            raise ModelError(f"{self.config.architecture} has no language-model head")
        with torch.inference_mode():
            return self._lm_head.gather(hidden, rows, tokens)

    def class_scores(
        self,
        hidden: Tensor,  # [n, hidden]
    ) -> Tensor:  # [n, classes], float32
        if self._classifier is None:
            raise ModelError(f"{self.config.architecture} has no classification head")
        with torch.inference_mode():
            return self._classifier(hidden).float()


def _next_norm(weights: ModelWeights) -> Tensor:
    """The norm before the first layer that is left, or the final one."""
    return weights.layers[0].attention_norm if weights.layers else weights.norm
