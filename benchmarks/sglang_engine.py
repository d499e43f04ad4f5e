"""SGLang, offline, as a peer of bench_engine.py: see engine_peer.py for what it is asked.

It is run by the Python of its own environment, and follows the interface of SGLang 0.5.17.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--memory", type=float, required=True, help="share of the GPU's")
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--enable-mis", action="store_true", help="items of a call in one mask")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine logs to standard output
    from sglang import Engine, __version__  # type: ignore[import-not-found,unused-ignore]

    # An item mask needs FlashInfer, and switches radix cache, CUDA graphs and chunks off.
    masked = {"enable_mis": True, "attention_backend": "flashinfer"} if options.enable_mis else {}
    engine = Engine(
        model_path=options.model,
        skip_tokenizer_init=True,
        context_length=options.max_model_len,
        mem_fraction_static=options.memory,
        **masked,
    )
    answers.write(json.dumps({"version": __version__}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer = score if request["kind"] == "score" else decode
        answers.write(json.dumps(answer(engine, request)) + "\n")


def score(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    async def all_calls() -> list[Any]:
        calls = [
            engine.async_score(query=prefix, items=items, label_token_ids=request["label_ids"])
            for prefix, items in zip(request["prefixes"], request["items"], strict=True)
        ]
        return await asyncio.gather(*calls)

    started = time.perf_counter()
    results = engine.loop.run_until_complete(all_calls())
    seconds = time.perf_counter() - started
    items = [item for result in results for item in result.scores]
    return {"seconds": seconds, "logprobs": [[math.log(p) for p in item] for item in items]}


def decode(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": request["new_tokens"], "ignore_eos": True}
    prompts = [request["prefix"] + own for own in request["own"]]
    started = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    seconds = time.perf_counter() - started
    first = [output["meta_info"]["output_token_logprobs"][0] for output in outputs]
    return {"seconds": seconds, "logprobs": [logprob for logprob, *_ in first]}


if __name__ == "__main__":
    main()
