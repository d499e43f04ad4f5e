"""Turn a Score request into token ids, and find the items that cannot be scored."""

from dataclasses import replace

import grpc
import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.calls.chat_validation import check_score_chat
from stemserve.service.calls.context_encoder import NO_TOKENS, ContextEncoder, EncodedContext
from stemserve.service.calls.scores.plain_call import PlainCalls
from stemserve.service.calls.scores.score_call import Problem, ScoreCall
from stemserve.service.calls.validation import (
    check_answer,
    check_count,
    check_priority,
    check_score,
    check_tokens,
)
from stemserve.service.calls.wire_tokens import check_known, decode_ids, decode_packed
from stemserve.service.errors import InvalidRequest
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import PackedTokens
from stemserve.service.request import Int32, WorkerFacts
from stemserve.service.text.tokenizer import TokenizerPool

Labels = tuple[tuple[int, ...], ...]
Lengths = NDArray[np.int64]

NO_ITEM_TOKENS = Problem(code=grpc.StatusCode.INVALID_ARGUMENT, message="the item has no tokens")
UNPREDICTABLE = Problem(
    code=grpc.StatusCode.INVALID_ARGUMENT,
    message="the item's only token has no context to be predicted from",
)


class ScoreEncoder:
    def __init__(
        self, contexts: ContextEncoder, pool: TokenizerPool, limits: Limits, facts: WorkerFacts
    ) -> None:
        self._contexts = contexts
        self._pool = pool
        self._limits = limits
        self._facts = facts
        self._plain_calls = PlainCalls(limits, facts)

    async def encode(
        self,
        request: inference_pb2.ScoreRequest,
        caller: Caller,
        *,
        most_items: int | None = None,  # of one answer, where it comes in parts
    ) -> ScoreCall:
        """Raises RequestError. An item that is too long is an error of the item; the call is
        refused when a context leaves no room for any item, or every item is too long."""
        if (plain := self._plain_calls.decode(request, caller)) is not None:
            return plain
        return await self.encode_any(request, caller, most_items=most_items)

    async def encode_any(
        self,
        request: inference_pb2.ScoreRequest,
        caller: Caller,
        *,
        most_items: int | None = None,
    ) -> ScoreCall:
        """As `encode`, whatever the call is."""
        check_score(request, self._limits, self._facts, most_items=most_items)
        if request.HasField("chat") or request.item_marker:
            check_score_chat(request, self._limits)
        check_priority(request.priority, caller)
        contexts, query = await self._around(request, caller)
        items = await self._items(request)
        labels = await self._labels(request.label_probabilities)
        count = len(items)
        item_context = (
            np.array(request.item_context, dtype=np.int32)
            if request.item_context
            else np.zeros(count, dtype=np.int32)
        )
        tokens = len(items.tokens) + len(query) * count
        check_tokens("items", tokens, self._limits)
        if request.log_likelihood.token_logprobs:
            longest = np.sort(items.lengths)[::-1][: most_items or count]
            check_answer(
                request,
                self._limits,
                self._facts,
                most_items=most_items,
                item_tokens=int(longest.sum()),
            )
        call = ScoreCall(
            request=request,
            caller=caller,
            limits=self._limits,
            contexts=tuple(context.tokens for context in contexts),
            trunks=tuple(context.trunk for context in contexts),
            items=items,
            item_context=item_context,
            query=query,
            labels=labels,
            problems={},
            classes=len(self._facts.class_labels),
        )
        return find_problems(call, self._facts.context_tokens)

    async def _around(
        self, request: inference_pb2.ScoreRequest, caller: Caller
    ) -> tuple[tuple[EncodedContext, ...], Int32]:
        """The contexts, and what is read after each item."""
        if not request.HasField("chat"):
            return await self._context_tokens(request, caller), await self._query(request)
        if not request.item_marker:
            return (await self._contexts.encode_chat("chat", request.chat),), NO_TOKENS
        before, behind = await self._contexts.encode_around(
            "chat", request.chat, request.item_marker
        )
        # A likelihood is the item's own: nothing is read behind it.
        return (before,), NO_TOKENS if request.HasField("log_likelihood") else behind

    async def _context_tokens(
        self, request: inference_pb2.ScoreRequest, caller: Caller
    ) -> tuple[EncodedContext, ...]:
        text = "" if request.item_first else request.query
        contexts = request.contexts or [inference_pb2.Context(text=text)]
        return await self._contexts.encode("contexts", contexts, caller)

    async def _items(self, request: inference_pb2.ScoreRequest) -> PackedTokens:
        vocab_size = self._facts.vocab_size
        if request.items:
            items = await self._texts(request)
            check_known("items", items.tokens, vocab_size)
        else:
            items = decode_packed("item_tokens", request.item_tokens, vocab_size)
        if not request.truncate_item_tokens:
            return items
        kept = min(request.truncate_item_tokens, self._facts.context_tokens)
        return items.heads(np.full(len(items), kept, dtype=np.int32))

    async def _texts(self, request: inference_pb2.ScoreRequest) -> PackedTokens:
        if request.HasField("chat"):
            return await self._contexts.encode_items("items", request.items)
        return await self._pool.encode_continuations(request.items)

    async def _query(self, request: inference_pb2.ScoreRequest) -> Int32:
        if not request.item_first:
            return NO_TOKENS
        query = (await self._pool.encode_continuations([request.query])).tokens
        if not query.size:
            raise InvalidRequest("query", "has no tokens")
        return check_known("query", query, self._facts.vocab_size)

    async def _labels(self, request: inference_pb2.LabelProbabilities) -> Labels:
        field, vocab_size = "label_probabilities", self._facts.vocab_size
        if request.label_token_ids:
            ids = decode_ids(f"{field}.label_token_ids", request.label_token_ids, vocab_size)
            labels: Labels = tuple((token_id,) for token_id in ids.tolist())
        else:
            packed = (
                decode_packed(f"{field}.label_tokens", request.label_tokens, vocab_size)
                if request.HasField("label_tokens")
                else await self._pool.encode_continuations(request.labels)
            )
            check_known(f"{field}.labels", packed.tokens, vocab_size)
            labels = tuple(tuple(packed[index].tolist()) for index in range(len(packed)))
        _check_labels(f"{field}.labels", labels, self._limits)
        return labels


def _check_labels(field: str, labels: Labels, limits: Limits) -> None:
    first: dict[tuple[int, ...], int] = {}
    for index, label in enumerate(labels):
        if not label:
            raise InvalidRequest(field, f"label {index} has no tokens")
        check_count(field, len(label), "max_label_tokens", limits.max_label_tokens)
        if first.setdefault(label, index) != index:
            raise InvalidRequest(
                field, f"labels {first[label]} and {index} are the same tokens; send each once"
            )


def find_problems(call: ScoreCall, context_tokens: int) -> ScoreCall:
    """Most calls have none, which a look at the longest of their parts tells."""
    lengths = call.items.lengths
    contexts = [len(context) for context in call.contexts]
    # The last token of a label is predicted, never read.
    behind = len(call.query) + max(map(len, call.labels), default=1) - 1
    likelihood = call.request.HasField("log_likelihood")
    if (
        len(lengths)
        and lengths.min() > 0
        and max(contexts) + int(lengths.max()) + behind <= context_tokens
        and (min(contexts) > 0 or not likelihood)
    ):
        return call
    before = np.array(contexts, dtype=np.int64)[call.item_context]
    needed = before + lengths + behind
    _check_room(call, before + behind, needed, context_tokens)
    problems = {
        index: _too_long(int(needed[index]), context_tokens)
        for index in np.flatnonzero((needed > context_tokens) & (lengths > 0)).tolist()
    }
    problems |= dict.fromkeys(np.flatnonzero(lengths == 0).tolist(), NO_ITEM_TOKENS)
    if likelihood and not call.request.item_first:
        alone = np.flatnonzero((before == 0) & (lengths == 1))
        problems |= dict.fromkeys(alone.tolist(), UNPREDICTABLE)
    return replace(call, problems=problems)


def _check_room(call: ScoreCall, around: Lengths, needed: Lengths, context_tokens: int) -> None:
    """`around` is what each item comes with, `needed` the same with the item."""
    full = np.flatnonzero(around >= context_tokens)
    if len(full):
        raise InvalidRequest(
            f"contexts[{call.item_context[full[0]]}]",
            f"has {around[full[0]]} tokens with the query and labels, which leaves no room for an "
            f"item in the model's {context_tokens}",
        )
    if (needed > context_tokens).all():
        raise InvalidRequest("items[0]", _too_long(int(needed[0]), context_tokens).message)


def _too_long(needed: int, context_tokens: int) -> Problem:
    return Problem(
        code=grpc.StatusCode.INVALID_ARGUMENT,
        message=f"the item has {needed} tokens with its context, more than the model's "
        f"{context_tokens}; shorten it or set truncate_item_tokens",
    )
