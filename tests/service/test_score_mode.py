"""What `stemserve score` asks for, which options it refuses together, and how it shows items."""

from typing import Any

import pytest
import typer

from stemserve.proto.v1 import inference_pb2
from stemserve.service.commands.score import SHOWN_CHARACTERS, shown_item
from stemserve.service.commands.score_mode import ScoreMode


def mode(**options: Any) -> ScoreMode:
    plain: dict[str, Any] = {
        "labels": None,
        "classify": False,
        "apply_softmax": False,
        "temperature": 0.0,
        "token_logprobs": False,
        "length_normalized": False,
    }
    return ScoreMode(**{**plain, **options})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"labels": "a,b", "classify": True}, "cannot be given with --classify"),
        ({"apply_softmax": True}, "needs --labels or --classify"),
        ({"temperature": 2.0}, "needs --labels"),
        ({"classify": True, "temperature": 2.0}, "needs --labels"),
        ({"labels": "a,b", "token_logprobs": True}, "leave out --labels"),
        ({"classify": True, "length_normalized": True}, "leave out --labels"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(typer.BadParameter, match=problem):
        mode(**options)


def test_the_options_choose_the_mode_of_the_request() -> None:
    labels, classes, likelihood = (inference_pb2.ScoreRequest() for _ in range(3))
    mode(labels=" a, b", apply_softmax=True, temperature=2.0).write(labels)
    assert labels.label_probabilities == inference_pb2.LabelProbabilities(
        labels=[" a", " b"], apply_softmax=True, temperature=2.0
    )
    mode(classify=True, apply_softmax=True).write(classes)
    assert classes.classification == inference_pb2.Classification(apply_softmax=True)
    mode(token_logprobs=True, length_normalized=True).write(likelihood)
    assert likelihood.log_likelihood == inference_pb2.LogLikelihood(
        token_logprobs=True, length_normalized=True
    )


def test_a_call_without_options_asks_for_a_log_likelihood() -> None:
    request = inference_pb2.ScoreRequest()
    mode().write(request)
    assert request.WhichOneof("mode") == "log_likelihood"


def test_a_long_item_is_shown_by_its_beginning() -> None:
    whole = "x" * SHOWN_CHARACTERS
    assert shown_item(whole) == repr(whole)
    assert shown_item(whole + "y") == repr(whole + "...")
