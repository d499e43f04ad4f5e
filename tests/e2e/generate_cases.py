"""Generate calls of token ids."""

from collections.abc import Sequence

import numpy as np
from tests.e2e.engine_rig import Generated
from tests.e2e.oracle import Oracle
from tests.e2e.score_cases import blob

from stemserve.proto.v1 import inference_pb2

GREEDY = inference_pb2.SamplingParams(temperature=0.0)


def generation(prompt: Sequence[int], **options: object) -> inference_pb2.GenerateRequest:
    """Greedy and past the end token, unless the options say otherwise."""
    fields: dict[str, object] = {"sampling": GREEDY, "ignore_eos": True, **options}
    context = inference_pb2.Context(tokens=blob(prompt))
    request = inference_pb2.GenerateRequest(prompt=context)
    for name, value in fields.items():
        match value:
            case inference_pb2.SamplingParams():
                request.sampling.CopyFrom(value)
            case list():
                getattr(request, name).extend(value)
            case _:
                setattr(request, name, value)
    return request


def prompt_and_tokens(
    rng: np.random.Generator, oracle: Oracle, vocab: int, *, length: int, count: int
) -> tuple[list[int], list[int]]:
    """A random prompt and its greedy continuation, none of it a matter of rounding."""
    while True:
        prompt: list[int] = rng.integers(0, vocab, length).tolist()
        tokens = oracle.greedy(prompt, count)
        if tokens is not None:
            return prompt, tokens


def assert_samples(
    answer: object,
    tokens: list[int],
    *,
    n: int,
    finish: int = inference_pb2.FINISH_REASON_LENGTH,
) -> Generated:
    """Each of the n samples has these tokens."""
    assert isinstance(answer, Generated), answer
    assert answer.tokens == dict.fromkeys(range(n), tokens)
    assert answer.finish == dict.fromkeys(range(n), finish)
    usage = answer.usage
    parts = usage.cached_tokens + usage.shared_tokens + usage.computed_tokens
    assert usage.prompt_tokens == parts
    assert usage.output_tokens == n * len(tokens)
    return answer
