"""The calls that a fleet shall answer."""

from dataclasses import dataclass

from stemserve.worker.config import ConfigError

UNITS = ("calls", "items", "tokens")  # of a demand; tokens are generated ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Calls that are alike: of Score with items, of Generate with samples."""

    prefix_tokens: int
    hit_rate: float = 0.0  # share of calls whose prefix is cached
    items: int = 0  # of a Score call
    item_tokens: int = 0
    token_logprobs: bool = False  # each token of an item is read, not its last one only
    samples: int = 0  # of a Generate call
    new_tokens: int = 0  # of each sample

    def __post_init__(self) -> None:
        if bool(self.items) == bool(self.samples):
            raise ConfigError("give --items (calls of Score) or --samples (calls of Generate)")
        if self.items and self.item_tokens < 1:
            raise ConfigError("--items needs --item-tokens")
        if self.samples and self.new_tokens < 1:
            raise ConfigError("--samples needs --new-tokens")
        if self.prefix_tokens < 1:
            raise ConfigError("--prefix-tokens must be at least 1")
        if not 0 <= self.hit_rate <= 1:
            raise ConfigError("--hit-rate must be from 0 to 1")

    @property
    def generates(self) -> bool:
        return self.samples > 0

    @property
    def own_tokens(self) -> int:
        """Stored of a call beside its prefix; items are not."""
        return self.samples * self.new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What shall be met. A second: calls, items or generated tokens, as the unit says."""

    per_second: float | None = None  # None: only what one GPU can do is asked
    unit: str = "calls"  # one of UNITS
    latency_s: float | None = None  # that 99 of 100 calls stay within
    headroom: float = 0.3  # share of each GPU that stays free
    spares: int = 1  # GPUs that may fail

    def __post_init__(self) -> None:
        if self.per_second is not None and self.per_second <= 0:
            raise ConfigError(f"--{self.unit}-per-second must be more than 0")
        if self.latency_s is not None and self.latency_s <= 0:
            raise ConfigError("--latency-ms must be more than 0")
        if not 0 <= self.headroom < 1:
            raise ConfigError("--headroom must be from 0 to below 1")
        if self.spares < 0:
            raise ConfigError("--spares must not be negative")

    def calls_per_second(self, workload: Workload) -> float | None:
        """Raises ConfigError where the calls have no such unit."""
        if self.per_second is None:
            return None
        size = {"calls": 1, "items": workload.items, "tokens": workload.own_tokens}[self.unit]
        if not size:
            raise ConfigError(f"such calls have no {self.unit}")
        return self.per_second / size
