"""What serves tries, put together."""

import asyncio
import time

from stemserve.service.calls.tries.trie_registry import TrieBounds, TrieRegistry
from stemserve.service.calls.tries.trie_upload import TrieReader
from stemserve.service.calls.tries.tries_servicer import TriesServicer
from stemserve.service.constraints.compiler import ConstraintCompiler
from stemserve.service.constraints.trie_builder import TrieBuilder
from stemserve.service.limits import Limits
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.request import WorkerFacts
from stemserve.service.text.tokenizer import TokenizerPool

PERIOD_S = 1.0  # how long the memory of an expired trie may stay


class TrieParts:
    def __init__(
        self,
        pool: TokenizerPool,
        facts: WorkerFacts,
        limits: Limits,
        compiler: ConstraintCompiler,
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self.builder = TrieBuilder(
            pool.tokenizer.eos_ids,
            vocab_size=facts.vocab_size,
            longest=facts.context_tokens,
            max_ms=limits.max_compile_ms,
        )
        bounds = TrieBounds(max_tries=limits.max_tries, max_bytes=limits.max_trie_bytes)
        self.registry = TrieRegistry(bounds, clock=time.monotonic)
        reader = TrieReader(pool, compiler, self.builder, limits, vocab_size=facts.vocab_size)
        self.servicer = TriesServicer(self.registry, reader, clock=time.monotonic)

    async def keep(self) -> None:
        """Runs until cancelled: what has expired is dropped, and what is there is counted."""
        while True:
            self._metrics.tries(len(self.registry), self.registry.num_bytes)
            await asyncio.sleep(PERIOD_S)
