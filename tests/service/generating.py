"""Generate calls for tests: token prompts, and all news by sample."""

import numpy as np
from tests.service.serving import Served

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import GenerateStep, SampleNews, token_blob

GREEDY = inference_pb2.SamplingParams(temperature=0)


def prompt(*tokens: int) -> inference_pb2.Context:
    return inference_pb2.Context(tokens=token_blob(np.array(tokens, dtype=np.int32)))


async def generated(
    served: Served, request: inference_pb2.GenerateRequest
) -> tuple[list[GenerateStep], dict[int, list[SampleNews]]]:
    steps = [step async for step in served.client.generate(request)]
    samples = dict[int, list[SampleNews]]()
    for step in steps:
        for news in step.news:
            samples.setdefault(news.sample, []).append(news)
    return steps, samples
