"""How many of the server's places a tenant can take, whatever the others do."""

from collections.abc import Mapping

OWN_PART = 0.5  # of all places, divided among the tenants by weight; the rest is whoever's comes


class TenantShares:
    """Each tenant has a part of its own, so that one cannot fill the server against the others."""

    def __init__(self, limit: int, weights: Mapping[str, float]) -> None:
        """`limit` of all that is taken: open calls, requests that wait, or their tokens."""
        total = sum(weights.values())
        # Whole places: a part of one is of no use, and the others could not have it.
        self._own = {
            name: int(OWN_PART * limit * weight / total) for name, weight in weights.items()
        }
        self._common = limit - sum(self._own.values())

    def fits(self, taken: Mapping[str, int], tenant: str, amount: int) -> bool:
        """Whether a tenant may take so much more beside what is taken, by tenant."""
        if not self._own:  # as mostly: no tenant has a part
            return sum(taken.values()) + amount <= self._common
        if taken.get(tenant, 0) + amount <= self._own.get(tenant, 0):
            return True
        after = {**taken, tenant: taken.get(tenant, 0) + amount}
        above = sum(max(0, held - self._own.get(name, 0)) for name, held in after.items())
        return above <= self._common
