"""Generate on the CPU: many samples of one long prompt, against decode steps on a copied cache."""

from collections.abc import Callable
from itertools import repeat
from statistics import median

import numpy as np
from interleave import Comparison, Side
from numpy.typing import NDArray
from peer_transformers import TransformersPeer
from served import Context, Served
from transformers import DynamicCache, StaticCache
from workloads import random_tokens

from stemserve.proto.v1 import inference_pb2

OURS = "stemserve"
COPIED = "transformers, copied cache"
PREALLOCATED = "transformers, preallocated cache"

PROMPT_TOKENS = 4096
SAMPLES = 16
NEW_TOKENS = 32
PEER_STEPS = 8  # a round; its steps take alike


def token_times(
    served: Served, peer: TransformersPeer, rng: np.random.Generator
) -> Comparison[Context]:
    """Seconds a token. Greedy, so that both sides must find the same; no side knows that the
    samples are alike, each is computed by itself."""
    prompt = random_tokens(rng, PROMPT_TOKENS)
    # The last token of the prompt is the first step's input.
    cache, last = peer.prefill(prompt[:-1]), int(prompt[-1])

    def steps(widen: Callable[[], DynamicCache | StaticCache]) -> Side[Context]:
        def side(context: Context) -> tuple[NDArray[np.float32], float]:
            decoded = peer.decode(widen(), [last] * SAMPLES, steps=PEER_STEPS)
            return decoded.logprobs, median(decoded.seconds)

        return side

    copied = steps(lambda: peer.repeated(cache, batch=SAMPLES))
    preallocated = steps(lambda: peer.preallocated(cache, batch=SAMPLES, room=NEW_TOKENS))
    return Comparison(
        title="Generate, seconds a token",
        sides={OURS: _generate(served), COPIED: copied, PREALLOCATED: preallocated},
        work=repeat(served.register(prompt)),
    )


def _generate(served: Served) -> Side[Context]:
    def side(context: Context) -> tuple[NDArray[np.float32], float]:
        generated = served.generate(
            inference_pb2.GenerateRequest(
                prompt=context,
                sampling=inference_pb2.SamplingParams(temperature=0),
                n=SAMPLES,
                max_new_tokens=NEW_TOKENS,
                ignore_eos=True,
                logprobs=True,
            )
        )
        return generated.logprobs[:PEER_STEPS], generated.seconds_per_token

    return side
