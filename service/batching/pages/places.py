"""What jobs take of the worker: pages of its cache and sampler slots."""

from dataclasses import dataclass

from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.pins import Pins
from stemserve.service.batching.pages.sampler_slots import SamplerSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    cache: KvCache
    pins: Pins  # pages of the cache that no job may have
    slots: SamplerSlots
    vocab_size: int
