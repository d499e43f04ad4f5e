"""The constraint that a Generate request asks for."""

import asyncio
import hashlib
import json
from functools import partial

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.calls.tries.trie_registry import TrieRegistry
from stemserve.service.calls.wire_tokens import decode_ids, decode_packed
from stemserve.service.constraints.compiler import ConstraintCompiler
from stemserve.service.constraints.constraint import Constraint
from stemserve.service.constraints.grammar import Source
from stemserve.service.constraints.token_trie import TokenTrie
from stemserve.service.constraints.trie_builder import TrieBuilder
from stemserve.service.errors import InvalidRequest
from stemserve.service.metrics.call_metrics import Metrics

SEQUENCES = "token_sequences"


class RequestConstraints:
    def __init__(
        self,
        compiler: ConstraintCompiler,
        builder: TrieBuilder,
        registry: TrieRegistry,
        metrics: Metrics,
        *,
        vocab_size: int,
    ) -> None:
        self._compiler = compiler
        self._builder = builder
        self._registry = registry
        self._metrics = metrics
        self._vocab_size = vocab_size

    async def of(self, request: inference_pb2.GenerateRequest, caller: Caller) -> Constraint | None:
        """Of a request that was checked. Raises RequestError."""
        kind = request.WhichOneof("constraint")
        match kind:
            case None:
                return None
            case "token_sequences":
                return self._with_stops(
                    await self._sequences(request.token_sequences, caller), request
                )
            case "trie_id":
                return self._with_stops(self._named(request.trie_id, caller), request)
            case "choice":
                source = Source(kind, json.dumps(sorted(set(request.choice.texts))))
            case _:
                source = Source(kind, getattr(request, kind))
        return await self._compiler.compiled(caller.tenant, source)

    def _named(self, trie_id: str, caller: Caller) -> Constraint:
        found = False
        try:
            trie = self._registry.use(caller, trie_id).trie
            found = True
        finally:
            self._metrics.constraint_looked_up("trie_id", found=found)
        return trie

    async def _sequences(self, message: inference_pb2.PackedTokens, caller: Caller) -> Constraint:
        # Of a large set, tens of milliseconds.
        source = Source(SEQUENCES, await asyncio.to_thread(_digest, message))
        build = partial(self._trie, message)
        return await self._compiler.compiled(caller.tenant, source, build)

    def _trie(self, message: inference_pb2.PackedTokens) -> TokenTrie:
        """In a thread. Raises InvalidRequest."""
        sequences = decode_packed(SEQUENCES, message, self._vocab_size)
        return self._builder.build(SEQUENCES, sequences)

    def _with_stops(
        self, constraint: Constraint, request: inference_pb2.GenerateRequest
    ) -> Constraint:
        """A whole sequence may end with one of the request's stop ids too."""
        stop_ids = decode_ids("stop_token_ids", request.stop_token_ids, self._vocab_size)
        if not isinstance(constraint, TokenTrie) or not len(stop_ids):
            return constraint
        if constraint.holds(stop_ids):
            raise InvalidRequest("stop_token_ids", "names a token that an allowed sequence holds")
        return constraint.ending_with(stop_ids)


def _digest(message: inference_pb2.PackedTokens) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
