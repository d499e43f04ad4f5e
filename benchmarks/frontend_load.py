"""Send Score calls to a server as fast as it answers, from a process of its own.

Requests are serialised before the clock starts and answers are kept as bytes, so that the sender
takes as little as it can of the cores that the server needs. Prints one JSON line.
"""

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator

import grpc
import numpy as np
import uvloop
from workloads import random_tokens

from stemserve.proto.v1 import inference_pb2

ITEMS = 100
ITEM_TOKENS = (12, 16)  # least and most
LABEL_IDS = (1_000, 2_000)
SCORE = "/stemserve.v1.Inference/Score"
SCORE_STREAM = "/stemserve.v1.Inference/ScoreStream"


def request(rng: np.random.Generator, number: int, prefix_id: str) -> inference_pb2.ScoreRequest:
    lengths = rng.integers(ITEM_TOKENS[0], ITEM_TOKENS[1] + 1, ITEMS)
    return inference_pb2.ScoreRequest(
        request_id=f"call-{number}",
        contexts=[inference_pb2.Context(prefix_id=prefix_id)],
        item_tokens=inference_pb2.PackedTokens(
            tokens=random_tokens(rng, int(lengths.sum())).astype("<u4").tobytes(),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).tolist(),
        ),
        label_probabilities=inference_pb2.LabelProbabilities(label_token_ids=LABEL_IDS),
    )


def check(answer: inference_pb2.ScoreResponse) -> None:
    if list(answer.shape) != [ITEMS, len(LABEL_IDS)] or answer.errors:
        raise RuntimeError(f"not an answer to {ITEMS} items: shape {list(answer.shape)}")


async def unary(channel: grpc.aio.Channel, requests: deque[bytes], in_flight: int) -> list[bytes]:
    score: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SCORE)
    answers: list[bytes] = []

    async def one_after_the_other() -> None:
        while requests:
            answers.append(await score(requests.popleft()))

    async with asyncio.TaskGroup() as senders:
        for _ in range(in_flight):
            senders.create_task(one_after_the_other())
    return answers


async def stream(channel: grpc.aio.Channel, requests: deque[bytes], in_flight: int) -> list[bytes]:
    room = asyncio.Semaphore(in_flight)

    async def send() -> AsyncIterator[bytes]:
        while requests:
            await room.acquire()
            yield requests.popleft()

    calls: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
    calls = channel.stream_stream(SCORE_STREAM)
    answers: list[bytes] = []
    async for answer in calls(send()):
        answers.append(answer)
        room.release()
    return answers


async def measure(options: argparse.Namespace) -> dict[str, float]:
    rng = np.random.default_rng(options.seed)
    messages = [request(rng, i, options.prefix_id) for i in range(options.calls)]
    if options.stream:
        wrapped = [inference_pb2.ScoreStreamRequest(request=message) for message in messages]
        waiting = deque(message.SerializeToString() for message in wrapped)
    else:
        waiting = deque(message.SerializeToString() for message in messages)
    send = stream if options.stream else unary
    async with grpc.aio.insecure_channel(options.server) as channel:
        started = time.perf_counter()
        answers = await send(channel, waiting, options.in_flight)
        seconds = time.perf_counter() - started
    for answer in answers:
        if options.stream:
            check(inference_pb2.ScoreStreamResponse.FromString(answer).response)
        else:
            check(inference_pb2.ScoreResponse.FromString(answer))
    return {"calls": len(answers), "seconds": seconds, "request_bytes": messages[0].ByteSize()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="HOST:PORT")
    parser.add_argument("--prefix-id", required=True)
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--stream", action="store_true", help="one ScoreStream, not unary calls")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(uvloop.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
