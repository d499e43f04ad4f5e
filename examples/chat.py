"""A chat of several turns, printed as it is written; what was said before comes from the cache.

Run it beside a server: `stemserve serve`, then `python examples/chat.py`.
"""

import argparse
import asyncio
import sys

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError, Usage

SYSTEM = "You answer in one short sentence."
QUESTIONS = ("What is the capital of Italy?", "And of France?", "And of Spain?")
OPTIONS = inference_pb2.GenerateRequest(
    max_new_tokens=40, sampling=inference_pb2.SamplingParams(temperature=0.0)
)


async def answer(client: Client, messages: list[dict[str, str]]) -> tuple[str, Usage]:
    """Printed as it comes."""
    text, usage = "", None
    async for step in client.chat(messages, options=OPTIONS):
        for news in step.news:
            print(news.text, end="", flush=True)
            text += news.text
        usage = step.usage
    assert usage is not None
    return text, usage


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    options = parser.parse_args()
    messages = [{"role": "system", "content": SYSTEM}]
    async with Client(options.server) as client:
        for question in QUESTIONS:
            print(f"> {question}")
            messages.append({"role": "user", "content": question})
            text, usage = await answer(client, messages)
            messages.append({"role": "assistant", "content": text})
            print(f"  ({usage.cached_tokens} tokens cached, {usage.computed_tokens} computed)")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (ClientError, ValueError) as error:  # no server, or an address that is none
        sys.exit(str(error))
