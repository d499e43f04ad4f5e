"""How well scores rank relevant documents (nDCG@10, AUC), and BM25 for reference."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Relevance = NDArray[np.bool_]
_WORD = re.compile(r"[a-z0-9]+")


def ndcg(scores: Float64, relevant: Relevance, *, depth: int = 10) -> float:
    """Mean over queries (rows); ties keep the documents' order."""
    gains = np.take_along_axis(relevant, np.argsort(-scores, axis=1, kind="stable"), 1)[:, :depth]
    discount = 1 / np.log2(np.arange(2, gains.shape[1] + 2))
    ideal = np.sort(relevant, axis=1)[:, ::-1][:, :depth]
    return float(np.mean((gains @ discount) / (ideal @ discount)))


def auc(scores: Float64, relevant: Relevance) -> float:
    """Chance that a relevant document scores above another one; mean over queries."""
    values: list[float] = []
    for row, good in zip(scores, relevant, strict=True):
        wins = row[good][:, None] - row[~good][None, :]
        values.append(float(np.mean((wins > 0) + 0.5 * (wins == 0))))
    return float(np.mean(values))


def bm25(
    queries: Sequence[str], documents: Sequence[str], *, k1: float = 1.2, b: float = 0.75
) -> Float64:  # [queries, documents]
    bags = [Counter(_words(document)) for document in documents]
    lengths = np.array([bag.total() for bag in bags])
    found_in = Counter(word for bag in bags for word in bag)
    scores = np.zeros((len(queries), len(documents)))
    for row, query in zip(scores, queries, strict=True):
        for word in _words(query):
            idf = np.log(1 + (len(bags) - found_in[word] + 0.5) / (found_in[word] + 0.5))
            count = np.array([bag[word] for bag in bags])
            row += idf * count * (k1 + 1) / (count + k1 * (1 - b + b * lengths / lengths.mean()))
    return scores


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
