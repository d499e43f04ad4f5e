"""The worker's sampler slots that nobody uses."""

import heapq


class SamplerSlots:
    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise RuntimeError(f"{count} sampler slots asked of {len(self._free)} free ones")
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
