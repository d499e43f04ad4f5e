"""An engine with the interface of vLLM's `LLM`, for the peer's process: a log-probability is a
function of the prompt. It is written into a folder as the package `vllm`."""

from pathlib import Path

PACKAGE = '''
"""A toy."""

import time
from types import SimpleNamespace

__version__ = "0.0.toy"


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **options):
        assert options["enable_prefix_caching"] and options["skip_tokenizer_init"]
        if options["load_format"] != "auto":
            raise ValueError("no such load format")

    def generate(self, prompts, params, use_tqdm):
        time.sleep(params.max_tokens * 1e-3)
        return [self._output(prompt["prompt_token_ids"], params) for prompt in prompts]

    def _output(self, tokens, params):
        ids = getattr(params, "logprob_token_ids", None) or [tokens[-1]]
        read = {i: SimpleNamespace(logprob=-(sum(tokens) % 97) - i / 1000) for i in ids}
        if len(tokens) == 13:
            raise RuntimeError("out of luck")
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[read])])
'''
INPUTS = """
def TokensPrompt(prompt_token_ids):
    return {"prompt_token_ids": prompt_token_ids}
"""


def write_toy(folder: Path) -> Path:
    """Its PYTHONPATH."""
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "inputs.py").write_text(INPUTS)
    return folder
