"""Messages as the JSON that the CLI prints."""

import json
import math

import numpy as np
import pytest
from google.protobuf import json_format

from stemserve.proto.v1 import inference_pb2
from stemserve.service.commands.plain_json import as_json


def test_field_names_are_the_protos_and_numbers_stay_numbers() -> None:
    message = inference_pb2.ScoreResponse(
        scores=[0.25, math.nan],
        shape=[2],
        over_labels=True,
        usage=inference_pb2.Usage(cached_tokens=1 << 60),
        errors=[inference_pb2.ItemError(index=1, code=3, message="too long")],
    )
    printed = json.loads(json.dumps(as_json(message), allow_nan=False))
    assert printed["scores"] == [0.25, None]
    assert printed["usage"]["cached_tokens"] == 1 << 60
    assert printed["errors"] == [{"index": 1, "code": 3, "message": "too long"}]
    assert printed["label_mass"] == []
    assert "timing" not in printed


@pytest.mark.parametrize("seed", range(3))
def test_floats_are_short_and_exact(seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=50).astype(np.float32)
    message = inference_pb2.ScoreResponse(scores=values.tolist())
    printed = as_json(message)["scores"]
    assert np.array_equal(np.array(printed, np.float32), values)
    assert max(len(str(value)) for value in printed) <= 16


def test_maps_enums_and_optionals_agree_with_protobufs_own_json() -> None:
    message = inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParams(seed=0, logit_bias={7: 1.5, 9: -2.0}),
        kernel=inference_pb2.KERNEL_CODEC,
        stop=["a", "b"],
    )
    oracle = json_format.MessageToDict(message, preserving_proto_field_name=True)
    printed = as_json(message)
    assert printed["sampling"]["logit_bias"] == oracle["sampling"]["logit_bias"]
    assert printed["sampling"]["seed"] == int(oracle["sampling"]["seed"])
    assert printed["kernel"] == oracle["kernel"]
    assert printed["stop"] == oracle["stop"]
    assert "n" not in printed
