"""Requests whose right answers are found out while nothing else runs."""

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client

TOLERANCE = 1e-3  # what batches, the cache and the order of work may change a log-probability by
CITIES = ("Paris", "Rome", "Berlin", "Madrid", "Lisbon", "Vienna", "Prague", "Athens")
QUESTIONS = (
    "The capital of France is",
    "A city that was built on seven hills is",
    "The river Danube flows through the city of",
    "In the year 1755 an earthquake destroyed the city of",
)
TALES = ("Once upon a time", "The best way to learn a language", "The sun rises in")
NEW_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A Score call, or a greedy Generate call where there are no items."""

    text: str
    items: tuple[str, ...] = ()

    async def ask(self, client: Client) -> "Answer":
        if self.items:
            scores = await client.score(
                list(self.items), inference_pb2.LogLikelihood(), query=self.text
            )
            return Answer(scores=scores.scores.astype(np.float64))
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Context(text=self.text),
            max_new_tokens=NEW_TOKENS,
            sampling=inference_pb2.SamplingParams(temperature=0.0),
        )
        text = [news.text async for step in client.generate(request) for news in step.news]
        return Answer(text="".join(text))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    scores: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    text: str = ""

    def agrees(self, other: "Answer") -> bool:
        return (
            self.text == other.text
            and self.scores.shape == other.scores.shape
            and bool(np.allclose(self.scores, other.scores, rtol=0, atol=TOLERANCE))
        )


def questions() -> list[Question]:
    scored = [Question(text=text, items=tuple(f" {c}" for c in CITIES)) for text in QUESTIONS]
    return [*scored, *(Question(text=text) for text in TALES)]


class KnownAnswers:
    """A question at random, and whether its answer is right."""

    def __init__(self, known: list[tuple[Question, Answer]]) -> None:
        self._known = known

    @classmethod
    async def find_out(cls, client: Client) -> "KnownAnswers":
        return cls([(question, await question.ask(client)) for question in questions()])

    async def check(self, client: Client, rng: random.Random) -> bool:
        question, answer = rng.choice(self._known)
        return (await question.ask(client)).agrees(answer)
