"""Many samples over one prompt, which is stored, computed and read once: the best of eight.

Run it beside a server: `stemserve serve`, then `python examples/samples.py`.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError, chat_request

SAMPLES = 8
DOCUMENTS = json.loads((Path(__file__).parent / "documents.json").read_text())["documents"]
(TIDES,) = (each["text"] for each in DOCUMENTS if each["title"] == "tides")
QUESTION = f"{TIDES}\n\nWrite a title for this passage."
REQUEST = inference_pb2.GenerateRequest(
    chat=chat_request([{"role": "user", "content": QUESTION}]),
    n=SAMPLES,
    max_new_tokens=24,
    logprobs=True,
    sampling=inference_pb2.SamplingParams(temperature=0.5, top_p=0.95, seed=7),
)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    options = parser.parse_args()
    texts = [""] * SAMPLES
    logprobs: list[list[float]] = [[] for _ in texts]
    usage = None
    async with Client(options.server) as client:
        async for step in client.generate(REQUEST):
            for news in step.news:  # of each sample that has some
                texts[news.sample] += news.text
                logprobs[news.sample] += news.logprobs
            usage = step.usage  # in the last step
    means = [sum(each) / len(each) for each in logprobs]
    for mean, text in sorted(zip(means, texts, strict=True), reverse=True):
        print(f"{mean:6.2f}  {' '.join(text.split())}")
    assert usage is not None
    print(f"{usage.prompt_tokens} prompt tokens, {usage.output_tokens} of the samples; ", end="")
    print(f"KV {usage.kv_read_bytes / 1e6:.0f} MB read, {usage.kv_avoided_bytes / 1e6:.0f} avoided")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (ClientError, ValueError) as error:  # no server, or an address that is none
        sys.exit(str(error))
