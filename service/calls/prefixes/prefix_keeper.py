"""Compute prefixes ahead of their use, and keep what is pinned in the cache."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from stemserve.service.calls.prefixes.prefix_registry import PrefixRegistry, RegisteredPrefix
from stemserve.service.calls.scores.scoring import context_job
from stemserve.service.engine import Engine
from stemserve.service.errors import NotReady, PrefixNotFound, QueueFull, RequestError

PERIOD_S = 1.0  # how long pages of an expired pin may stay
REWARM_PRIORITY = -100  # after a restart, callers come first
RETRY_S = 1.0
PIN_ATTEMPTS = 3  # pages may be evicted between their computation and the pin

_log = logging.getLogger(__name__)


class PrefixKeeper:
    def __init__(
        self, registry: PrefixRegistry, engine: Engine, *, note: Callable[[int], None]
    ) -> None:
        """`note` is told once a second how many prefixes are registered."""
        self._registry = registry
        self._note = note
        self._engine = engine
        self._generation = engine.generation
        self._numbers = count()

    async def warm(
        self, prefix: RegisteredPrefix, *, deadline: float | None, priority: int = 0
    ) -> None:
        """Compute the prefix, and pin it if it is to be pinned. Raises RequestError."""
        for _ in range(PIN_ATTEMPTS):
            request_id = f"warm-{next(self._numbers)}:{prefix.prefix_id}"
            job = context_job(
                prefix.tokens,
                prefix.trunk,
                prefix.owner,
                request_id=request_id,
                deadline=deadline,
            )
            await self._engine.score(replace(job, priority=priority))
            if not prefix.pin:
                return
            realm = prefix.realm(prefix.owner)
            try:
                pinned = await self._engine.pin(prefix.pin_key, prefix.tokens, realm)
            finally:  # a call that is cancelled may have pinned it too
                is_gone = not self._registry.wants_pin(prefix)
                if is_gone:
                    self._registry.drop_again(prefix)
            if is_gone:
                await self.let_go()
                raise PrefixNotFound(prefix.prefix_id)
            if pinned == len(prefix.tokens):
                return
        raise QueueFull(
            f"prefix {prefix.prefix_id!r} is evicted as fast as it is computed, so it cannot be "
            "pinned now; retry later",
            retry_after_s=RETRY_S,
        )

    async def let_go(self) -> None:
        """Give the pages of dropped prefixes back; when cancelled, the next time."""
        while (prefix := self._registry.next_dropped()) is not None:
            try:
                await self._engine.unpin(prefix.pin_key)
            except NotReady:  # its pages went with the worker
                _log.debug("no worker holds prefix %s", prefix.prefix_id)
            except asyncio.CancelledError:  # with the question, or its answer
                self._registry.drop_again(prefix)
                raise

    async def keep(self) -> None:
        """Runs until cancelled: expired pins are let go, a new worker is given its prefixes."""
        rewarming: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(PERIOD_S)
                try:
                    await self.let_go()
                except Exception:  # a fault with one; the others' turn comes
                    _log.exception("cannot let a prefix go")
                self._note(len(self._registry))
                if self._engine.generation == self._generation:
                    continue
                self._generation = self._engine.generation
                if rewarming is not None:
                    rewarming.cancel()
                # Beside this loop: under load callers come first, for as long as it takes.
                rewarming = tasks.create_task(self._rewarm())

    async def _rewarm(self) -> None:
        prefixes = self._registry.to_keep_warm()
        for prefix in prefixes:
            if prefix.pin and not self._registry.wants_pin(prefix):
                continue
            try:
                await self.warm(prefix, deadline=None, priority=REWARM_PRIORITY)
            except RequestError as error:
                _log.warning("prefix %s is not warm: %s", prefix.prefix_id, error)
            except Exception:
                _log.exception("prefix %s is not warm", prefix.prefix_id)
        if prefixes:
            _log.info("%d registered prefixes were computed for the new worker", len(prefixes))
