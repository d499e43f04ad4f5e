"""The forward pass of a decoder-only model, without its attention."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stemserve.worker.models.errors import ModelError
from stemserve.worker.models.layers import Attend, DecoderLayer
from stemserve.worker.models.linear import DenseLinear, fastest_linear
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.parameters import ModelWeights
from stemserve.worker.models.rope import RotaryEmbedding


class Transformer:
    """A model whose rows are tokens of any sequences; `attend` knows which row sees what.

    Takes the layers out of `weights` one by one: on a CPU each is packed into another layout, and
    there is never a second copy of more than one layer.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._embedding = weights.embedding
        self._norm = weights.norm
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, self.device)
        self._layers = [
            DecoderLayer(config, index, weights.layers.pop(0)) for index in range(config.num_layers)
        ]
        self._lm_head = None if weights.lm_head is None else fastest_linear(weights.lm_head)
        self._classifier = None if weights.classifier is None else DenseLinear(weights.classifier)

    @property
    def has_lm_head(self) -> bool:
        return self._lm_head is not None

    def hidden(
        self,
        token_ids: Tensor,  # [rows]
        positions: Tensor,  # [rows]
        attend: Attend,
        keep_rows: Tensor | None = None,  # [kept] row numbers; None: all rows
    ) -> Tensor:  # [kept, hidden]
        """Hidden states after the final norm.

        With `keep_rows`, only these rows go on after the last layer's attention.
        """
        with torch.inference_mode():
            rotation = self._rotary.rotation(positions)
            residual = F.embedding(token_ids, self._embedding)
            for layer in self._layers[:-1]:
                residual = layer.forward(residual, rotation, attend, None)
            residual = self._layers[-1].forward(residual, rotation, attend, keep_rows)
            return F.rms_norm(residual, (self.config.hidden_size,), self._norm, self.config.rms_eps)

    def logits(
        self,
        hidden: Tensor,  # [n, hidden]
    ) -> Tensor:  # [n, vocab], float32
        if self._lm_head is None:
            raise ModelError(f"{self.config.architecture} has no language-model head")
        with torch.inference_mode():
            return self._lm_head(hidden).float()

    def class_scores(
        self,
        hidden: Tensor,  # [n, hidden]
    ) -> Tensor:  # [n, classes], float32
        if self._classifier is None:
            raise ModelError(f"{self.config.architecture} has no classification head")
        with torch.inference_mode():
            return self._classifier(hidden).float()
