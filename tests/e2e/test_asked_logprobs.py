"""Log-probabilities of given tokens at each generated position, against transformers."""

import numpy as np
import pytest
from tests.e2e.engine_rig import Generated
from tests.e2e.generate_cases import generation
from tests.e2e.random_models import VOCAB, MakeRig, RandomModels, random_tokens
from tests.e2e.score_cases import TOLERANCE

from stemserve.proto.v1 import inference_pb2


@pytest.mark.parametrize("kv_pages", [700, 20])
async def test_asked_tokens_are_read_at_each_position_also_of_neighbours_that_ask_for_others(
    models: RandomModels, make_rig: MakeRig, rng: np.random.Generator, kv_pages: int
) -> None:
    model = models.lm("Qwen3", kv_pages=kv_pages)
    rig = make_rig(model)
    sampling = inference_pb2.SamplingParams(temperature=1.0, seed=4)
    asked: list[list[int]] = [random_tokens(rng, 5), [], [VOCAB - 1, 0, 0], [9]]
    prompts = [random_tokens(rng, length) for length in (5, 17, 33, 40)]
    tops = [0, 2, 3, 0]
    requests = [
        generation(
            prompt,
            max_new_tokens=20,
            n=1 + number % 2,
            sampling=sampling,
            top_logprobs=tops[number],
            logprob_token_ids=asked[number],
        )
        for number, prompt in enumerate(prompts)
    ]
    answers = await rig.run(*requests)
    for prompt, ids, top, answer in zip(prompts, asked, tops, answers, strict=True):
        assert isinstance(answer, Generated), answer
        for sample, tokens in answer.tokens.items():
            rows = model.oracle.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
            assert [len(each) for each in answer.top[sample]] == ([top] * 20 if top else [])
            if ids:
                assert np.abs(np.array(answer.asked[sample]) - rows[:, ids]).max() < TOLERANCE
            else:
                assert not answer.asked
