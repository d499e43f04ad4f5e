"""Beam search: the likeliest sequences of a prompt, best first, beside the greedy one.

Run it beside a server: `stemserve serve`, then `python examples/beams.py`.
"""

import argparse
import asyncio
import sys

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError

PROMPT = "The sea rises twice a day because"
TOKENS = 16


def request(beams: int, best: int) -> inference_pb2.GenerateRequest:
    """One beam is the greedy sequence. A score is the log-probability a token."""
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text=PROMPT),
        beam_search=inference_pb2.BeamSearch(width=beams, length_penalty=1.0),
        n=best,
        max_new_tokens=TOKENS,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    options = parser.parse_args()
    print(PROMPT)
    async with Client(options.server) as client:
        for beams, best in ((1, 1), (8, 3)):
            print(f"{beams} beam{'s' * (beams > 1)}")
            async for step in client.generate(request(beams, best)):
                for news in step.news:
                    print(f"  {news.score:.4f} {news.text}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (ClientError, ValueError) as error:  # no server, or an address that is none
        sys.exit(str(error))
