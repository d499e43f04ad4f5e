"""How much of the waiting queue a tenant can fill, whatever the others do."""

from collections.abc import Mapping

OWN_PART = 0.5  # of the queue, divided among the tenants by weight; the rest is whoever's comes


class QueueShares:
    """Each tenant has a part of its own, so that one cannot fill the queue against the others."""

    def __init__(self, limit: int, weights: Mapping[str, float]) -> None:
        """`limit` of what waits, in requests or tokens."""
        total = sum(weights.values())
        self._own = {name: OWN_PART * limit * weight / total for name, weight in weights.items()}
        self._common = limit - sum(self._own.values())

    def fits(self, waiting: Mapping[str, int], tenant: str, amount: int) -> bool:
        """Whether so much more of a tenant may wait beside what waits, by tenant."""
        if waiting.get(tenant, 0) + amount <= self._own.get(tenant, 0.0):
            return True
        after = {**waiting, tenant: waiting.get(tenant, 0) + amount}
        above = sum(max(0.0, held - self._own.get(name, 0.0)) for name, held in after.items())
        return above <= self._common
