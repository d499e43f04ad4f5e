"""What a Score call is asked for, as its options say."""

from dataclasses import dataclass

import typer

from stemserve.proto.v1 import inference_pb2
from stemserve.service.commands.options import read_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMode:
    """The options of `stemserve score` that choose and shape its scores."""

    labels: str | None
    classify: bool
    apply_softmax: bool
    temperature: float
    token_logprobs: bool
    length_normalized: bool

    def __post_init__(self) -> None:
        """Refuse what would have no effect. Raises typer.BadParameter."""
        of_labels = self.labels is not None
        if of_labels and self.classify:
            raise typer.BadParameter("--labels cannot be given with --classify")
        if self.apply_softmax and not (of_labels or self.classify):
            raise typer.BadParameter("--apply-softmax needs --labels or --classify")
        if self.temperature and not of_labels:
            raise typer.BadParameter("--temperature needs --labels")
        if (of_labels or self.classify) and (self.token_logprobs or self.length_normalized):
            raise typer.BadParameter(
                "--token-logprobs and --length-normalized are of a log-likelihood: leave out "
                "--labels and --classify"
            )

    def write(self, request: inference_pb2.ScoreRequest) -> None:
        if self.labels is not None:
            request.label_probabilities.labels.extend(read_labels(self.labels))
            request.label_probabilities.apply_softmax = self.apply_softmax
            request.label_probabilities.temperature = self.temperature
        elif self.classify:
            request.classification.apply_softmax = self.apply_softmax
        else:
            request.log_likelihood.token_logprobs = self.token_logprobs
            request.log_likelihood.length_normalized = self.length_normalized
