"""The calls that most are: items in token ids behind one context, and labels of one token each.

They are checked as a whole, in a fraction of the code that looks at all that a call can be.
"""

import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.calls.scores.score_call import ScoreCall
from stemserve.service.calls.validation import ERROR_BYTES, FLOAT_BYTES, MAX_ID_CHARACTERS
from stemserve.service.calls.wire_tokens import NO_IDS, TOKEN_BYTES
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import PackedTokens
from stemserve.service.request import NO_TRUNK, Int32, WorkerFacts

WIRE, IDS = np.dtype("<u4"), np.dtype("<i4")
_REQUEST, _LABELS = inference_pb2.ScoreRequest, inference_pb2.LabelProbabilities
_CONTEXTS = _REQUEST.CONTEXTS_FIELD_NUMBER
_ITEMS = _REQUEST.ITEM_TOKENS_FIELD_NUMBER
_MODE = _REQUEST.LABEL_PROBABILITIES_FIELD_NUMBER
# Whatever else is set, the call is none of these.
_PLAIN = {
    *(_CONTEXTS, _ITEMS, _MODE, _REQUEST.REQUEST_ID_FIELD_NUMBER),
    *(_REQUEST.TOP_N_FIELD_NUMBER, _REQUEST.PRIORITY_FIELD_NUMBER),
    _REQUEST.PARTIAL_RESULTS_FIELD_NUMBER,
}
_LABEL_IDS = _LABELS.LABEL_TOKEN_IDS_FIELD_NUMBER
_PLAIN_LABELS = ([_LABEL_IDS], [_LABEL_IDS, _LABELS.APPLY_SOFTMAX_FIELD_NUMBER])
_TOKENS_ALONE = [inference_pb2.Context.TOKENS_FIELD_NUMBER]


class PlainCalls:
    def __init__(self, limits: Limits, facts: WorkerFacts) -> None:
        self._limits = limits
        self._facts = facts

    def decode(self, request: inference_pb2.ScoreRequest, caller: Caller) -> ScoreCall | None:
        """None: it is another call, or something is wrong with it, which ScoreEncoder tells."""
        fields = {field.number: value for field, value in request.ListFields()}
        if not (fields.keys() <= _PLAIN and _CONTEXTS in fields and _ITEMS in fields):
            return None
        contexts = fields[_CONTEXTS]
        if len(contexts) > 1 or [f.number for f, _ in contexts[0].ListFields()] != _TOKENS_ALONE:
            return None
        context = self._token_ids(contexts[0].tokens)
        items = self._items(fields[_ITEMS])
        labels = self._labels(fields[_MODE]) if _MODE in fields else None
        if context is None or items is None or labels is None:
            return None
        if not self._fits(request, caller, len(context), items, len(labels)):
            return None
        return ScoreCall(
            request=request,
            caller=caller,
            limits=self._limits,
            contexts=(context,),
            trunks=(NO_TRUNK,),
            items=items,
            item_context=np.zeros(len(items), np.int32),
            query=NO_IDS,
            labels=labels,
            problems={},
            classes=len(self._facts.class_labels),
        )

    def _token_ids(self, blob: bytes) -> Int32 | None:
        """Read-only. None: there are none, or one is not of this model."""
        if not blob or len(blob) % TOKEN_BYTES:
            return None
        wire = np.frombuffer(blob, WIRE)
        if np.maximum.reduce(wire) >= self._facts.vocab_size:
            return None
        return wire.view(IDS)

    def _items(self, packed: inference_pb2.PackedTokens) -> PackedTokens | None:
        """None unless each has tokens."""
        tokens, indptr = self._token_ids(packed.tokens), np.array(packed.offsets, np.int64)
        if tokens is None or len(indptr) < 2 or indptr[0] or indptr[-1] != len(tokens):
            return None
        if np.minimum.reduce(indptr[1:] - indptr[:-1]) < 1:
            return None
        return PackedTokens(tokens=tokens, indptr=indptr.astype(np.int32))

    def _labels(
        self, labels: inference_pb2.LabelProbabilities
    ) -> tuple[tuple[int, ...], ...] | None:
        """None unless they are distinct tokens of this model, and it has an LM head."""
        if [field.number for field, _ in labels.ListFields()] not in _PLAIN_LABELS:
            return None
        ids = tuple(labels.label_token_ids)
        if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= self._facts.vocab_size:
            return None
        return tuple((token,) for token in ids) if self._facts.has_lm_head else None

    def _fits(
        self,
        request: inference_pb2.ScoreRequest,
        caller: Caller,
        context: int,
        items: PackedTokens,
        labels: int,
    ) -> bool:
        """The limits hold, by a margin where they depend on what else the call says."""
        limits, count = self._limits, len(items)
        longest = int(np.maximum.reduce(items.lengths))
        answer_bytes = count * max((labels + 2) * FLOAT_BYTES, ERROR_BYTES)
        return (
            count <= limits.max_items
            and labels <= limits.max_labels
            and context + longest <= self._facts.context_tokens
            and context + len(items.tokens) <= limits.max_request_tokens
            and answer_bytes <= limits.max_message_bytes
            and len(request.request_id) <= MAX_ID_CHARACTERS
            and (caller.max_priority is None or request.priority <= caller.max_priority)
        )
