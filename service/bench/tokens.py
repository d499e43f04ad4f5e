"""The token ids of a row's rounds, and the requests that carry them: the same for every engine."""

import zlib
from dataclasses import dataclass

import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.rows import DecodeRow, Row, ScoreRow, UnsharedRow
from stemserve.service.client import token_blob
from stemserve.service.request import Int32

MOST_IDS = 150_000  # below the special ids of a large vocabulary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRound:
    prefixes: Int32  # [calls, prefix_tokens]
    items: Int32  # [calls, items, item_tokens]
    label_ids: tuple[int, int]

    def requests(self, prefix_ids: tuple[str, ...] = ()) -> list[bytes]:
        """One serialised Score request a call; with registered prefixes or with their tokens."""
        count, length = self.items.shape[1:]
        offsets = range(0, (count + 1) * length, length)
        labels = inference_pb2.LabelProbabilities(label_token_ids=self.label_ids)
        contexts = [
            inference_pb2.Context(prefix_id=prefix_id)
            if prefix_id
            else inference_pb2.Context(tokens=token_blob(prefix))
            for prefix_id, prefix in zip(
                prefix_ids or ("",) * len(self.prefixes), self.prefixes, strict=True
            )
        ]
        return [
            inference_pb2.ScoreRequest(
                contexts=[context],
                item_tokens=inference_pb2.PackedTokens(tokens=token_blob(items), offsets=offsets),
                label_probabilities=labels,
            ).SerializeToString()
            for context, items in zip(contexts, self.items, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRound:
    prefix: Int32  # [prefix_tokens]; that of every round
    own: Int32  # [requests, own_tokens]

    def requests(self, new_tokens: int) -> list[bytes]:
        return [
            inference_pb2.GenerateRequest(
                prompt=inference_pb2.Context(tokens=token_blob(np.concatenate((self.prefix, own)))),
                sampling=inference_pb2.SamplingParams(temperature=0),
                max_new_tokens=new_tokens,
                ignore_eos=True,
                logprobs=True,
            ).SerializeToString()
            for own in self.own
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    """Random ids; a round of a row has the same ids whenever it is asked for."""

    vocab: int
    seed: int

    def score_round(self, row: ScoreRow, number: int) -> ScoreRound:
        rng = self._rng(row, number)
        first, second = rng.choice(min(self.vocab, MOST_IDS), 2, replace=False)
        return ScoreRound(
            prefixes=self._ids(rng, row.calls, row.prefix_tokens),
            items=self._ids(rng, row.calls, row.items, row.item_tokens),
            label_ids=(int(first), int(second)),
        )

    def decode_round(self, row: DecodeRow, number: int) -> DecodeRound:
        return DecodeRound(
            prefix=self._ids(self._rng(row, -1), row.prefix_tokens),
            own=self._ids(self._rng(row, number), row.requests, row.own_tokens),
        )

    def unshared_round(self, row: UnsharedRow, number: int) -> DecodeRound:
        return DecodeRound(
            prefix=np.empty(0, dtype=np.int32),
            own=self._ids(self._rng(row, number), row.requests, row.prompt_tokens),
        )

    def _rng(self, row: Row, number: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(row.name.encode()), number + 1])

    def _ids(self, rng: np.random.Generator, *shape: int) -> Int32:
        return rng.integers(0, min(self.vocab, MOST_IDS), shape, dtype=np.int32)
