"""vLLM, offline, as a peer of bench_engine.py: see engine_peer.py for what it is asked.

Prefix caching and CUDA graphs are on; one token is generated for each item of a Score row. It is
run by the Python of its own environment.
"""

import argparse
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--memory", type=float, required=True, help="share of the GPU's")
    parser.add_argument("--kv-bytes", type=int, help="of the KV cache, out of that memory")
    parser.add_argument("--max-model-len", type=int, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine logs to standard output
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # It draws with top-k and top-p, which no row does, and needs FlashInfer.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    from vllm import LLM, __version__  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(
        model=options.model,
        load_format=options.load_format,
        skip_tokenizer_init=True,
        max_model_len=options.max_model_len,
        gpu_memory_utilization=options.memory,
        kv_cache_memory_bytes=options.kv_bytes,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    answers.write(json.dumps({"version": __version__}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answer = score if request["kind"] == "score" else decode
        answers.write(json.dumps(answer(engine, request)) + "\n")


def score(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    labels = request["label_ids"]
    prompts = [
        prefix + item
        for prefix, items in zip(request["prefixes"], request["items"], strict=True)
        for item in items
    ]
    outputs, seconds = generate(engine, prompts, max_tokens=1, logprob_token_ids=labels)
    first = [output.outputs[0].logprobs[0] for output in outputs]
    return {
        "seconds": seconds,
        "logprobs": [[found[label].logprob for label in labels] for found in first],
    }


def decode(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    prompts = [request["prefix"] + own for own in request["own"]]
    outputs, seconds = generate(engine, prompts, max_tokens=request["new_tokens"], logprobs=0)
    first = [next(iter(output.outputs[0].logprobs[0].values())) for output in outputs]
    return {"seconds": seconds, "logprobs": [token.logprob for token in first]}


def generate(engine: Any, prompts: list[list[int]], **sampling: Any) -> tuple[list[Any], float]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt  # type: ignore[import-not-found,unused-ignore]

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **sampling)
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    started = time.perf_counter()
    outputs = engine.generate(inputs, params, use_tqdm=False)
    return outputs, time.perf_counter() - started


if __name__ == "__main__":
    main()
