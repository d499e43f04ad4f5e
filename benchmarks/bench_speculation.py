"""Generation with drafts of the next tokens (`draft_tokens`), beside the same without, on the CPU.

    PYTHONPATH=benchmarks python benchmarks/bench_speculation.py [--threads N] [--output FILE]

One server, one call at a time, with and without drafts in turn. `wall` is the time from the first
message to the last over the tokens between, at the client; `cpu` is what the server and its worker
took of a processor for the whole call, over its tokens: it counts the prompt too, which is cached,
and depends less on what else runs on the machine. Speeds are ratios of the best rounds. Greedy
texts must be the same with and without drafts, or no speed is reported; of sampled ones it is
counted how many are, since a random number may lie where rounding decides (docs/api.md).
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from bench_cpu import MODELS

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.server_process import RunningServer, running_server
from stemserve.service.client import Client, Usage
from stemserve.service.default_model import fetch_default

DRAFT_TOKENS = 8
NEW_TOKENS = 120
WARM_UP_TOKENS = 24
ROUNDS = 4

PASSAGE = (
    "The harbour of Aldermere lies at the mouth of the river Tarn, where two long stone piers "
    "reach out into the grey water. In the spring of 1871 the town council voted to deepen the "
    "channel, and within four years ships of nine hundred tons could unload at the eastern quay. "
    "The work cost eleven thousand pounds, most of it lent by the bank of Coram and Hale, whose "
    "ledgers survive in the county archive. Fishing remained the chief trade: some sixty boats "
    "left each evening for the herring grounds, and returned before noon with their catch."
)
TABLE = """Name, town, age, trade
Ada Marsh, Orrin, 41, baker
Tom Quill, Velden, 29, printer
Ruth Amsel, Orrin, 63, weaver
Ned Farrow, Castle Hythe, 35, carter
Ida Brandt, Velden, 52, printer
Sam Oakes, Castle Hythe, 19, baker
Joan Pell, Orrin, 47, weaver

The same as JSON, one object a line:
{"name": "Ada Marsh", "town": "Orrin", "age": 41, "trade": "baker"}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    message: str = ""
    prompt: str = ""  # instead of a message: goes on as it is
    copies: bool  # much of the answer is in the message
    temperature: float = 0.0


TEXTS: Mapping[str, Text] = {
    "repeat": Text(message=f"Repeat the following text word for word:\n\n{PASSAGE}", copies=True),
    "correct": Text(
        message="Correct the spelling in this text, and answer with the whole text:\n\n"
        + PASSAGE.replace("council", "counsil").replace("remained", "remaned"),
        copies=True,
    ),
    "records": Text(prompt=TABLE, copies=True),
    "story": Text(
        message="Write a story about a fox that learns to sail.", copies=False, temperature=0.8
    ),
    "explanation": Text(message="Explain how a refrigerator works.", copies=False, temperature=0.8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    tokens: list[int]
    wall_s: float  # a token
    cpu_s: float  # a token
    usage: Usage


async def generate(
    client: Client, server: RunningServer, text: Text, *, draft_tokens: int, new_tokens: int
) -> Timed:
    message = inference_pb2.ChatMessage(role="user", content=text.message)
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Context(text=text.prompt) if text.prompt else None,
        chat=None if text.prompt else inference_pb2.Chat(messages=[message]),
        sampling=inference_pb2.SamplingParams(temperature=text.temperature, seed=1),
        max_new_tokens=new_tokens,
        draft_tokens=draft_tokens,
    )
    tokens, counts, times = list[int](), list[int](), list[float]()
    usage, before = None, server.cpu_seconds
    async for step in client.generate(request):
        times.append(time.perf_counter())
        counts.append(sum(len(news.token_ids) for news in step.news))
        tokens += [token for news in step.news for token in news.token_ids]
        usage = step.usage or usage
    if usage is None:
        sys.exit("a call ended without its usage")
    return Timed(
        tokens=tokens,
        wall_s=(times[-1] - times[0]) / sum(counts[1:]),
        cpu_s=(server.cpu_seconds - before) / len(tokens),
        usage=usage,
    )


async def compare(client: Client, server: RunningServer, name: str, text: Text) -> dict[str, Any]:
    sides: dict[int, list[Timed]] = {0: [], DRAFT_TOKENS: []}
    for number in range(ROUNDS):
        # Who comes first changes, so that neither always finds the machine as the other left it.
        for draft_tokens, timed in list(sides.items())[:: 1 - 2 * (number % 2)]:
            timed.append(
                await generate(
                    client, server, text, draft_tokens=draft_tokens, new_tokens=NEW_TOKENS
                )
            )
    plain, drafting = sides.values()
    same = sum(one.tokens == other.tokens for one, other in zip(plain, drafting, strict=True))
    if same < ROUNDS and not text.temperature:
        sys.exit(f"no speed is reported: {name!r} differs with drafts")
    wall, cpu = (
        {
            label: [getattr(timed, f"{kind}_s") for timed in side]
            for label, side in (("plain", plain), ("drafts", drafting))
        }
        for kind in ("wall", "cpu")
    )
    found = {
        "tokens": len(plain[0].tokens),
        "temperature": text.temperature,
        "same_tokens": f"{same} of {ROUNDS} rounds",
        "wall_s_a_token": wall,
        "cpu_s_a_token": cpu,
        "drafted_tokens": [timed.usage.drafted_tokens for timed in drafting],
        "accepted_tokens": [timed.usage.accepted_tokens for timed in drafting],
        "speed_wall": round(min(wall["plain"]) / min(wall["drafts"]), 2),
        "speed_cpu": round(min(cpu["plain"]) / min(cpu["drafts"]), 2),
    }
    print(name, {k: v for k, v in found.items() if not k.endswith("a_token")}, file=sys.stderr)
    return found


async def measure(server: RunningServer) -> dict[str, Any]:
    async with Client(server.address) as client:
        for text in TEXTS.values():  # prompts are cached from here on, and the speed is known
            await generate(client, server, text, draft_tokens=0, new_tokens=WARM_UP_TOKENS)
        texts = {name: await compare(client, server, name, text) for name, text in TEXTS.items()}
    copying, others = (
        [texts[name] for name, text in TEXTS.items() if text.copies is copies]
        for copies in (True, False)
    )
    return {
        "draft_tokens": DRAFT_TOKENS,
        "texts": texts,
        "copying": {kind: [text[f"speed_{kind}"] for text in copying] for kind in ("wall", "cpu")},
        "others": {kind: [text[f"speed_{kind}"] for text in others] for kind in ("wall", "cpu")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="of the worker")
    parser.add_argument("--model", type=Path, help="GGUF file (default: fetched once)")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    model = options.model or fetch_default(MODELS, progress=print)
    flags = ["--model", str(model), "--threads", str(options.threads), "--dtype", "float32"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(flags, log=Path(folder) / "server.log") as server,
    ):
        results = asyncio.run(measure(server))
    if options.output:
        command = "python benchmarks/bench_speculation.py"
        report.write(options.output, command=command, threads=options.threads, results=results)
    print({kind: results[kind] for kind in ("copying", "others")})


if __name__ == "__main__":
    main()
