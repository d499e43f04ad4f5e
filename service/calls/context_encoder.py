"""Token ids of the contexts and prompts that requests name."""

from collections.abc import Sequence

import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.calls.prefix_registry import PrefixRegistry
from stemserve.service.calls.validation import check_tokens
from stemserve.service.calls.wire_tokens import TOKEN_BYTES, check_known, decode_tokens
from stemserve.service.limits import Limits
from stemserve.service.request import Int32
from stemserve.service.text.tokenizer import TokenizerPool

NO_TOKENS: Int32 = np.zeros(0, dtype=np.int32)


class ContextEncoder:
    """A registered prefix, then text or tokens. Token ids are taken as they are, without a BOS."""

    def __init__(
        self, pool: TokenizerPool, prefixes: PrefixRegistry, *, vocab_size: int, limits: Limits
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._prefixes = prefixes
        self._vocab_size = vocab_size

    async def encode(
        self, field: str, contexts: Sequence[inference_pb2.Context], caller: Caller
    ) -> tuple[Int32, ...]:
        starts = [self._start(context, caller.tenant) for context in contexts]
        sent = sum(len(context.tokens) for context in contexts) // TOKEN_BYTES
        check_tokens(field, sum(map(len, starts)) + sent, self._limits)
        for index, context in enumerate(contexts):
            if context.tokens:
                tokens = decode_tokens(f"{field}[{index}].tokens", context.tokens, self._vocab_size)
                starts[index] = np.concatenate((starts[index], tokens))
        await self._add_fronts(field, contexts, starts)
        await self._add_continuations(field, contexts, starts)
        check_tokens(field, sum(map(len, starts)), self._limits)
        return tuple(starts)

    def _start(self, context: inference_pb2.Context, owner: str) -> Int32:
        if not context.prefix_id:
            return NO_TOKENS
        return self._prefixes.use(owner, context.prefix_id).tokens

    async def _add_fronts(
        self, field: str, contexts: Sequence[inference_pb2.Context], starts: list[Int32]
    ) -> None:
        """An empty context is an empty text: it too begins with a BOS where there is one."""
        rows = [
            index
            for index, context in enumerate(contexts)
            if not context.prefix_id and context.WhichOneof("continuation") != "tokens"
        ]
        if not any(contexts[row].text for row in rows) and self._pool.tokenizer.bos_id is None:
            return
        fronts = await self._pool.encode_front([contexts[row].text for row in rows])
        for row, tokens in zip(rows, fronts, strict=True):
            starts[row] = check_known(f"{field}[{row}].text", tokens, self._vocab_size)

    async def _add_continuations(
        self, field: str, contexts: Sequence[inference_pb2.Context], starts: list[Int32]
    ) -> None:
        rows = [i for i, context in enumerate(contexts) if context.prefix_id and context.text]
        if not rows:
            return
        packed = await self._pool.encode_continuations([contexts[row].text for row in rows])
        for index, row in enumerate(rows):
            tokens = check_known(f"{field}[{row}].text", packed[index], self._vocab_size)
            starts[row] = np.concatenate((starts[row], tokens))
