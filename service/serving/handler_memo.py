"""Wrap each method's handler once, not once a call."""

from collections.abc import Callable
from typing import Any

Handler = Any  # a grpc.RpcMethodHandler, which cannot be subscripted at run time


class HandlerMemo:
    """An interceptor is asked for the handler of every call, and most give the same each time."""

    def __init__(self, wrap: Callable[[str, Handler], Handler]) -> None:
        """`wrap` gets the method's full name too."""
        self._wrap = wrap
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}  # by method: handler, wrapped

    def wrapped(self, method: str, handler: Handler) -> Handler:
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self._wrap(method, handler))
        return known[1]
