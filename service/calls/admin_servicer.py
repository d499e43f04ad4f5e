"""The Admin service, for whoever runs the server."""

import logging
from collections.abc import Callable
from typing import Protocol

import grpc

from stemserve.proto.v1 import admin_pb2, admin_pb2_grpc
from stemserve.service.serving.call_status import Context

_log = logging.getLogger(__name__)


class CachingEngine(Protocol):
    async def clear_cache(self) -> int:
        """Free the pages that nobody uses or pins; returns how many. Raises NotReady."""
        ...


class AdminServicer(admin_pb2_grpc.AdminServicer):
    def __init__(self, engine: CachingEngine, *, drain: Callable[[], None]) -> None:
        """`drain` does what SIGTERM does."""
        self._engine = engine
        self._drain = drain

    def add_to(self, server: grpc.aio.Server) -> None:
        admin_pb2_grpc.add_AdminServicer_to_server(self, server)

    async def ClearCache(
        self, request: admin_pb2.ClearCacheRequest, context: Context
    ) -> admin_pb2.ClearCacheResponse:
        freed = await self._engine.clear_cache()
        _log.info("admin: freed %d cached pages", freed)
        return admin_pb2.ClearCacheResponse(freed_pages=freed)

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        _log.info("admin: draining")
        self._drain()
        return admin_pb2.DrainResponse()
