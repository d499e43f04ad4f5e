"""Pairs of bins for the kernel of codec_hopper.cu, in which two bins share a block.

What both of a pair read is loaded once. So bins whose pieces begin alike are put together, and each
piece says how many of its first steps the other bin reads with it. The order of a bin's pieces may
change: half of the blocks read the nodes of several tiles first, which takes products, and half
their other pages, which takes memory.
"""

from dataclasses import dataclass

import numpy as np

from stemserve.kernels.codec.host_tables import HostTables
from stemserve.kernels.codec.tiles import MASKED, STEP_TOKENS
from stemserve.kernels.layout import Int32

STEPS, FIRST, NEXT = 2, 3, 8  # fields of a record; see pieces.py
SHARED = 9  # first steps of the piece that are read together with the other bin's
OTHER_BASE = 10  # steps that the other bin's ring of stages holds before them
LEAST_SHARED = 4  # steps for which it pays


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """When bins are paired (H200)."""

    wide: int = 48  # tokens: cost of a step of a wide node that two bins read together
    least_steps: int = 9  # of the longest bin: in shorter ones the start outweighs what it saves


class _Tables:
    def __init__(self, records: Int32, words: Int32, masks: Int32, per_step: int) -> None:
        self.records = records
        self.words = words.reshape(-1, per_step)
        self.masks = masks.reshape(-1, per_step)

    def first_words(self, record: int) -> bytes:
        words: Int32 = self.words[self.records[record, FIRST]]
        return words.tobytes()

    def common_steps(self, one: int, other: int) -> int:
        """First steps in which two pieces read the same pages, all rows whole; an even number."""
        a, b = self.records[one], self.records[other]
        steps = int(min(a[STEPS], b[STEPS]))
        if a[FIRST] == b[FIRST]:
            return steps if a[STEPS] == b[STEPS] else 0
        of_a, of_b = (slice(int(first), int(first) + steps) for first in (a[FIRST], b[FIRST]))
        alike = (self.words[of_a] == self.words[of_b]).all(1)
        alike &= (self.masks[of_a].max(1) < MASKED) & (self.masks[of_b].max(1) < MASKED)
        common = int(np.argmin(np.append(alike, False))) & ~1
        return common if common >= LEAST_SHARED else 0


def _chains(records: Int32, bins: int) -> list[list[int]]:
    """Records of each bin's pieces, in turn."""
    following = records[:, NEXT].tolist()
    steps = records[:, STEPS].tolist()
    chains: list[list[int]] = []
    for head in range(bins):
        chain = [head] if steps[head] else []
        while chain and following[chain[-1]] >= 0:
            chain.append(following[chain[-1]])
        chains.append(chain)
    return chains


def _in_turns(tables: _Tables, chains: list[list[int]], wide_end: int) -> list[bytes]:
    """Put every second part of the wide nodes after the other pieces of its bins.

    Returns what each bin should have in common with its partner.
    """
    part, last = -1, -1
    keys: list[bytes] = []
    for chain in chains:
        keys.append(tables.first_words(chain[0]) if chain else b"")
        first = int(tables.records[chain[0], FIRST]) if chain else wide_end
        if first < wide_end:
            part += first != last
            last = first
            if part % 2:
                chain.append(chain.pop(0))
    return keys


def _partners(keys: list[bytes]) -> list[int]:
    """An order of the bins in which places 2i and 2i + 1 have the same key where they can."""
    alike: dict[bytes, list[int]] = {}
    for owner, key in enumerate(keys):
        alike.setdefault(key, []).append(owner)
    order: list[int] = []
    single: list[int] = []
    for owners in alike.values():
        paired = len(owners) // 2 * 2
        order += owners[:paired]
        single += owners[paired:]
    return order + single


def _share(tables: _Tables, pair: list[list[int]], table: Int32, at: dict[int, int]) -> None:
    """Say in the new table what the pieces of two bins have in common, in the order of both."""
    base, position = [0, 0], 0
    done = [0, 0]

    def pass_by(side: int, until: int) -> None:
        for record in pair[side][done[side] : until]:
            base[side] += int(tables.records[record, STEPS])
        done[side] = until

    for index, record in enumerate(pair[0]):
        for place in range(position, len(pair[1])):
            other = pair[1][place]
            common = tables.common_steps(record, other)
            if not common:
                continue
            pass_by(0, index)
            pass_by(1, place)
            table[at[record], [SHARED, OTHER_BASE]] = common, base[1]
            table[at[other], [SHARED, OTHER_BASE]] = common, base[0]
            for side, one in enumerate((record, other)):
                base[side] += (common + 1) // 2 + int(tables.records[one, STEPS]) - common
                done[side] += 1
            position = place + 1
            break


def long_enough(host: HostTables, pairing: Pairing) -> bool:
    steps = np.bincount(host.pieces.bin, host.pieces.steps)
    return bool(steps.max(initial=0) >= pairing.least_steps)


def pair_bins(host: HostTables, bins: int) -> Int32:
    """The plan's records in their new order."""
    streams, records = host.streams, host.records
    wide_end = int(streams.region_step[streams.num_wide])
    tables = _Tables(records, streams.words, streams.masks, STEP_TOKENS // host.layout.page_size)
    chains = _chains(records, bins)
    order = _partners(_in_turns(tables, chains, wide_end))
    table = records.copy()
    table[:bins] = 0
    table[:bins, NEXT] = -1
    at: dict[int, int] = {}  # where a record went
    for place, owner in enumerate(order):
        chain = chains[owner]
        places = [place, *sorted(record for record in chain if record >= bins)]
        for target, following, record in zip(places, [*places[1:], -1], chain, strict=False):
            at[record] = target
            table[target] = records[record]
            table[target, NEXT] = following
    for place in range(0, bins - 1, 2):
        pair = [chains[order[place]], chains[order[place + 1]]]
        _share(tables, pair, table, at)
    return table
