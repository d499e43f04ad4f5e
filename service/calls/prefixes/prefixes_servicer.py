"""The Prefixes service."""

import asyncio
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from stemserve.proto.v1 import inference_pb2, prefixes_pb2, prefixes_pb2_grpc
from stemserve.service.caller import Caller, current_caller
from stemserve.service.calls.context_encoder import ContextEncoder, EncodedContext
from stemserve.service.calls.prefixes.prefix_keeper import PrefixKeeper
from stemserve.service.calls.prefixes.prefix_registry import (
    NewPrefix,
    PrefixRegistry,
    RegisteredPrefix,
)
from stemserve.service.calls.validation import check_characters, check_id, check_tokens, check_ttl
from stemserve.service.calls.wire_tokens import TOKEN_BYTES
from stemserve.service.engine import Engine
from stemserve.service.errors import InvalidRequest, NotPrefixOwner, PrefixNotFound
from stemserve.service.limits import Limits
from stemserve.service.serving.call_status import Context, remaining_deadline

DEFAULT_PAGE = 100
LARGEST_PAGE = 1_000


class PrefixesServicer(prefixes_pb2_grpc.PrefixesServicer):
    def __init__(
        self,
        registry: PrefixRegistry,
        contexts: ContextEncoder,
        engine: Engine,
        keeper: PrefixKeeper,
        limits: Limits,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._contexts = contexts
        self._engine = engine
        self._keeper = keeper
        self._limits = limits
        self._clock = clock

    async def Register(
        self, request: prefixes_pb2.RegisterRequest, context: Context
    ) -> prefixes_pb2.RegisterResponse:
        deadline, caller = remaining_deadline(context), current_caller()
        _check_register(request, self._limits)
        if request.shared:
            self._check_shared(request.parent_prefix_id, caller)
        content = await self._content(request, caller)
        new = NewPrefix(
            prefix_id=request.prefix_id,
            parent_id=request.parent_prefix_id,
            tokens=content.tokens,
            trunk=content.trunk,
            ttl_s=request.ttl_seconds,
            warm=request.warm,
            pin=request.pin,
            shared=request.shared,
        )
        prefix = self._registry.register(caller, new, most_tokens=self._most_tokens(caller))
        with self._withdrawn_on_error(prefix, caller, new):
            if request.warm or request.pin:
                await self._keeper.warm(prefix, deadline=deadline)
            return prefixes_pb2.RegisterResponse(prefix=await self._message(prefix))

    async def Get(
        self, request: prefixes_pb2.GetRequest, context: Context
    ) -> prefixes_pb2.GetResponse:
        check_id("prefix_id", request.prefix_id)
        prefix = self._registry.get(current_caller(), request.prefix_id)
        return prefixes_pb2.GetResponse(prefix=await self._message(prefix))

    async def List(
        self, request: prefixes_pb2.ListRequest, context: Context
    ) -> prefixes_pb2.ListResponse:
        check_id("page_token", request.page_token)
        size = min(request.page_size or DEFAULT_PAGE, LARGEST_PAGE)
        page = self._registry.page(current_caller(), after=request.page_token, count=size + 1)
        messages = await asyncio.gather(*map(self._message, page[:size]))
        more = len(page) > size
        return prefixes_pb2.ListResponse(
            prefixes=messages, next_page_token=page[size - 1].prefix_id if more else ""
        )

    async def Renew(
        self, request: prefixes_pb2.RenewRequest, context: Context
    ) -> prefixes_pb2.RenewResponse:
        check_id("prefix_id", request.prefix_id)
        check_ttl(request.ttl_seconds)
        caller = current_caller()
        prefix = self._registry.renew(caller, request.prefix_id, ttl_s=request.ttl_seconds)
        return prefixes_pb2.RenewResponse(prefix=await self._message(prefix))

    async def Release(
        self, request: prefixes_pb2.ReleaseRequest, context: Context
    ) -> prefixes_pb2.ReleaseResponse:
        check_id("prefix_id", request.prefix_id)
        self._registry.release(current_caller(), request.prefix_id)
        await self._keeper.let_go()
        return prefixes_pb2.ReleaseResponse()

    def _check_shared(self, parent_id: str, caller: Caller) -> None:
        if not caller.group:
            raise InvalidRequest("shared", "the caller's tenant is in no sharing group")
        if parent_id and not self._registry.get(caller, parent_id).shared:
            raise InvalidRequest("shared", f"its parent {parent_id!r} is not shared")

    async def _content(
        self, request: prefixes_pb2.RegisterRequest, caller: Caller
    ) -> EncodedContext:
        """What a context of this parent and content would be."""
        content = inference_pb2.Context(prefix_id=request.parent_prefix_id)
        if request.tokens:
            content.tokens = request.tokens
        else:
            content.text = request.text
        (encoded,) = await self._contexts.encode("content", [content], caller)
        context_tokens = self._engine.facts.context_tokens
        if len(encoded.tokens) >= context_tokens:
            raise InvalidRequest(
                "content",
                f"has {len(encoded.tokens)} tokens with its parents, which leaves no room in the "
                f"model's {context_tokens}",
            )
        return encoded

    def _most_tokens(self, caller: Caller) -> int | None:
        if not caller.max_prefix_bytes:
            return None
        return caller.max_prefix_bytes // max(1, self._engine.facts.kv_bytes_per_token)

    @contextmanager
    def _withdrawn_on_error(
        self, prefix: RegisteredPrefix, caller: Caller, asked: NewPrefix
    ) -> Generator[None]:
        """A Register that fails has registered nothing: no owner, and no pin."""
        try:
            yield
        except BaseException:
            # It may have expired, or others released it.
            with suppress(PrefixNotFound, NotPrefixOwner):
                self._registry.withdraw(caller, prefix.prefix_id, asked)
            raise

    async def _message(self, prefix: RegisteredPrefix) -> prefixes_pb2.Prefix:
        expires_s = time.time() + prefix.expires_s - self._clock()
        realm = prefix.realm(current_caller())
        return prefixes_pb2.Prefix(
            prefix_id=prefix.prefix_id,
            parent_prefix_id=prefix.parent_id,
            token_count=len(prefix.tokens),
            resident_tokens=await self._engine.resident_tokens(prefix.tokens, realm),
            ttl_seconds=prefix.ttl_s,
            expires_unix_seconds=expires_s if math.isfinite(expires_s) else 0.0,
            pinned=prefix.pin,
            shared=prefix.shared,
        )


def _check_register(request: prefixes_pb2.RegisterRequest, limits: Limits) -> None:
    check_id("prefix_id", request.prefix_id)
    check_id("parent_prefix_id", request.parent_prefix_id)
    check_ttl(request.ttl_seconds)
    if not request.text and not request.tokens:
        raise InvalidRequest("content", "is empty; give text or tokens")
    check_characters(len(request.text), limits)
    check_tokens("tokens", len(request.tokens) // TOKEN_BYTES, limits)
