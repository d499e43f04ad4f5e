"""Generative retrieval: beams over a set of ids, here the names of capitals.

The model writes the id of what is asked for, token by token. A trie of all ids holds the beams to
ids that exist, so that the best n of them come in one call, each with its score. Run it beside a
server: `stemserve serve`, then `python examples/generative_retrieval.py`.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError, SampleNews, chat_request

CAPITALS: Mapping[str, str] = json.loads((Path(__file__).parent / "capitals.json").read_text())
ASKED = ("Japan", "Kenya", "Austria", "New Zealand", "Chile", "Iceland")
BEAMS = 16
BEST = 3
MANY_LENGTH = 8

console = Console(highlight=False)


def request(country: str, trie_id: str) -> inference_pb2.GenerateRequest:
    """A score is the log-probability of an id and its end: 0 does not divide it by the tokens."""
    messages = [
        {"role": "user", "content": f"What is the capital of {country}?"},
        {"role": "assistant", "content": f"The capital of {country} is"},
    ]
    return inference_pb2.GenerateRequest(
        chat=chat_request(messages, continue_final_message=True),
        trie_id=trie_id,
        beam_search=inference_pb2.BeamSearch(width=BEAMS, length_penalty=0.0),
        n=BEST,
        max_new_tokens=16,
    )


async def found(client: Client, asked: inference_pb2.GenerateRequest) -> Sequence[SampleNews]:
    """Best first."""
    return [news async for step in client.generate(asked) for news in step.news]


async def ask(client: Client) -> None:
    trie = await client.tries.upload([f" {city}." for city in CAPITALS.values()])
    console.print(f"\n{trie.sequences} ids, a trie of {trie.nodes} nodes, {trie.num_bytes:,} bytes")
    table = Table("capital of", f"best {BEST} of {BEAMS} beams, with their scores")
    right = 0
    for country in ASKED:
        best = await found(client, request(country, trie.trie_id))
        right += best[0].text == f" {CAPITALS[country]}."
        cells = [f"{news.text.strip(' .')} {news.score:.2f}" for news in best]
        table.add_row(country, ", ".join(cells))
    console.print(table)
    console.print(f"{right} of {len(ASKED)} are right; no answer is anything but an id of the set.")


async def ask_many(client: Client, count: int) -> None:
    """Random ids of several tokens, as codes of items are; the beams find the likeliest of them."""
    vocab = (await client.model()).vocab_size
    ids = np.random.default_rng(0).integers(100, vocab, (count, MANY_LENGTH), np.int32)
    started = time.perf_counter()
    trie = await client.tries.upload(list(ids))
    uploaded = time.perf_counter() - started
    asked = request("Japan", trie.trie_id)
    started = time.perf_counter()
    best = await found(client, asked)
    seconds = time.perf_counter() - started
    known = {tuple(each) for each in ids.tolist()}
    legal = all(news.token_ids[:MANY_LENGTH] in known for news in best)
    console.print(
        f"\n{trie.sequences:,} ids of {MANY_LENGTH} tokens: uploaded in {uploaded:.1f} s, "
        f"{trie.num_bytes / 1e6:.0f} MB;\n{BEAMS} beams over them in {1e3 * seconds:.0f} ms, "
        f"{'all' if legal else 'NOT all'} answers among them."
    )
    await client.tries.delete(trie.trie_id)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--many", type=int, default=0, metavar="N", help="also N random ids")
    options = parser.parse_args()
    async with Client(options.server, timeout_s=300.0) as client:
        await ask(client)
        if options.many:
            await ask_many(client, options.many)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (ClientError, ValueError) as error:  # no server, or an address that is none
        sys.exit(str(error))
