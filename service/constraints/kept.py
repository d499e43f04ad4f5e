"""Compiled constraints that are kept for calls to come, each tenant's for itself."""

from collections import OrderedDict, defaultdict

from stemserve.service.constraints.constraint import Constraint
from stemserve.service.constraints.grammar import Source

KEPT = 64
KEPT_BYTES = 512 << 20  # of all of them, but for the last one used


class KeptConstraints:
    """Nobody can learn from the time of a call what another tenant has compiled."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, Source], Constraint] = OrderedDict()  # last used behind

    def get(self, tenant: str, source: Source) -> Constraint | None:
        kept = self._kept.get((tenant, source))
        if kept is not None:
            self._kept.move_to_end((tenant, source))
        return kept

    def put(self, tenant: str, source: Source, constraint: Constraint) -> None:
        """Where there is no room, whoever holds most loses what it has not used for longest."""
        self._kept[tenant, source] = constraint
        self._kept.move_to_end((tenant, source))
        while len(self._kept) > 1 and not self._fits():
            holder = self._largest_holder()
            del self._kept[next(key for key in self._kept if key[0] == holder)]

    def _fits(self) -> bool:
        total = sum(constraint.num_bytes for constraint in self._kept.values())
        return len(self._kept) <= KEPT and total <= KEPT_BYTES

    def _largest_holder(self) -> str:
        held = defaultdict[str, float](float)  # parts of all there may be
        for (tenant, _), constraint in self._kept.items():
            held[tenant] += 1 / KEPT + constraint.num_bytes / KEPT_BYTES
        return max(held, key=lambda tenant: held[tenant])
