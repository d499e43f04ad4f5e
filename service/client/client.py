"""The async client library: typed calls of a stemserve server."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from stemserve.proto.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    info_pb2,
    info_pb2_grpc,
    prefixes_pb2,
    prefixes_pb2_grpc,
    tries_pb2_grpc,
)
from stemserve.service.client import decoding
from stemserve.service.client.answers import Metadata, answer_of, answers_of, pages_of
from stemserve.service.client.calls import NOT_KNOWN, Calls
from stemserve.service.client.channel import PLAINTEXT, Access, Headers, open_channel, options_of
from stemserve.service.client.chat_request import chat_request
from stemserve.service.client.errors import ClientError, status_error
from stemserve.service.client.modes import Mode, with_mode
from stemserve.service.client.prefixes import KnownPrefixes, with_id
from stemserve.service.client.results import GenerateStep, Prefix, Scores
from stemserve.service.client.routing import route
from stemserve.service.client.tries import TrieCalls
from stemserve.service.packed_tokens import pack
from stemserve.service.request import Int32


class Client:
    """Use as `async with Client("localhost:50051") as client`. Calls raise ClientError.

    `options` are fields of the request that have no argument of their own.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = None,
        access: Access = PLAINTEXT,
        reregister: bool = False,
        headers: Headers | None = None,
        hashes: bool = False,
    ) -> None:
        """`target` is HOST:PORT, unix:/path or another URI that gRPC knows; ValueError if it has no
        port. `timeout_s` is the deadline of each call. Raises OSError if a file of `access` is bad.
        `headers` gives metadata to go with a call, such as the `traceparent` of the span around it.

        `reregister` is for a router before several servers: a prefix that this client registered,
        or a trie that it uploaded, is told again to a server that does not know it, also where it
        had expired.
        `hashes` is for several servers without a router: `target` names them all, and calls of one
        prefix go to one of them.
        """
        self._channel = open_channel(target, access, options_of(hashes=hashes), headers=headers)
        self._timeout_s = timeout_s
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._prefixes: Any = prefixes_pb2_grpc.PrefixesStub(self._channel)
        self._info: Any = info_pb2_grpc.InfoStub(self._channel)
        self._known = KnownPrefixes() if reregister else None
        tries: Any = tries_pb2_grpc.TriesStub(self._channel)
        self.tries = TrieCalls(tries, remembers=reregister, timeout_s=timeout_s)
        self._calls = Calls(self._prefixes, self.tries, known=self._known, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def score(
        self,
        items: Sequence[str],
        mode: Mode,
        *,
        query: str = "",
        contexts: Sequence[inference_pb2.Context] = (),
        options: inference_pb2.ScoreRequest | None = None,
    ) -> Scores:
        """Score texts as continuations of the query, or of the contexts.

        Raises TypeError for one text in place of several, which would be scored letter by letter.
        """
        if isinstance(items, str):
            raise TypeError("items is one text; give a sequence of texts")
        request = inference_pb2.ScoreRequest(items=items, query=query, contexts=contexts)
        return await self.score_request(with_mode(request, mode, options))

    async def score_tokens(
        self,
        items: Sequence[Int32],
        mode: Mode,
        *,
        contexts: Sequence[inference_pb2.Context] = (),
        options: inference_pb2.ScoreRequest | None = None,
    ) -> Scores:
        """Score token ids as continuations of the contexts."""
        packed = pack(items)
        request = inference_pb2.ScoreRequest(
            item_tokens=inference_pb2.PackedTokens(
                tokens=token_blob(packed.tokens), offsets=packed.indptr.tolist()
            ),
            contexts=contexts,
        )
        return await self.score_request(with_mode(request, mode, options))

    async def rank(self, query: str, prefix_ids: Sequence[str]) -> Scores:
        """Log P(query | prefix) for each registered prefix: one row each, in their order."""
        return await self.score(
            [query] * len(prefix_ids),
            inference_pb2.LogLikelihood(),
            contexts=[inference_pb2.Context(prefix_id=prefix_id) for prefix_id in prefix_ids],
            options=inference_pb2.ScoreRequest(item_context=range(len(prefix_ids))),
        )

    async def score_request(self, request: inference_pb2.ScoreRequest) -> Scores:
        response: inference_pb2.ScoreResponse = await self._calls.answer(
            self._inference.Score, request
        )
        return decoding.scores(response)

    async def score_parts(
        self, request: inference_pb2.ScoreRequest, *, most_items: int
    ) -> AsyncGenerator[Scores, None]:
        """The answer in parts of at most that many items, as they are scored.

        `item_index` names a part's items; the last part has the usage. Closing it early cancels the
        call.
        """

        async def message() -> AsyncGenerator[inference_pb2.ScoreStreamRequest, None]:
            yield inference_pb2.ScoreStreamRequest(request=request, stream_items=most_items)

        stream = self._score_stream(message(), route(request))
        async with aclosing(stream) as answers:
            async for _, part in answers:
                if isinstance(part, ClientError):
                    raise part
                yield part

    async def score_stream(
        self,
        requests: AsyncIterator[inference_pb2.ScoreRequest | inference_pb2.ScoreStreamRequest],
    ) -> AsyncGenerator[tuple[str, Scores | ClientError], None]:
        """Answers by request id as they are ready. ScoreStreamRequest asks for parts or cancels."""
        async with aclosing(self._score_stream(requests, ())) as answers:
            async for answer in answers:
                yield answer

    async def _score_stream(
        self,
        requests: AsyncIterator[inference_pb2.ScoreRequest | inference_pb2.ScoreStreamRequest],
        metadata: Metadata,
    ) -> AsyncGenerator[tuple[str, Scores | ClientError], None]:

        async def messages() -> AsyncGenerator[inference_pb2.ScoreStreamRequest, None]:
            async for request in requests:
                if isinstance(request, inference_pb2.ScoreStreamRequest):
                    yield request
                else:
                    yield inference_pb2.ScoreStreamRequest(request=request)

        call = self._inference.ScoreStream(messages(), timeout=self._timeout_s, metadata=metadata)
        async with aclosing(answers_of(call, inference_pb2.ScoreStreamResponse)) as answers:
            async for answer in answers:
                if answer.HasField("error"):
                    yield answer.request_id, status_error(answer.error)
                else:
                    yield answer.request_id, decoding.scores(answer.response, more=answer.more)

    async def generate(
        self, request: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[GenerateStep, None]:
        """Closing it early cancels the call."""
        begun, told = False, set[str]()
        while True:
            call = self._inference.Generate(
                request, timeout=self._timeout_s, metadata=route(request)
            )
            try:
                async with aclosing(answers_of(call, inference_pb2.GenerateResponse)) as answers:
                    async for answer in answers:
                        begun = True
                        yield decoding.generate_step(answer)
                return
            except ClientError as error:
                if begun or error.reason in told:
                    raise
                if not await self._calls.told_again(error, request):
                    raise
                told.add(error.reason)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        options: inference_pb2.GenerateRequest | None = None,
    ) -> AsyncGenerator[GenerateStep, None]:
        """Generate after messages of a role and a content each, by the model's chat template."""
        request = inference_pb2.GenerateRequest(
            chat=chat_request(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        )
        if options is not None:
            request.MergeFrom(options)
        async with aclosing(self.generate(request)) as steps:
            async for step in steps:
                yield step

    async def register(self, request: prefixes_pb2.RegisterRequest) -> Prefix:
        if self._known is not None:
            request = with_id(request)
        response: prefixes_pb2.RegisterResponse = await self._calls.answer(
            self._prefixes.Register, request
        )
        if self._known is not None:
            self._known.remember(request)
        return decoding.prefix(response.prefix)

    async def get_prefix(self, prefix_id: str) -> Prefix:
        request = prefixes_pb2.GetRequest(prefix_id=prefix_id)
        response: prefixes_pb2.GetResponse = await self._calls.answer(self._prefixes.Get, request)
        return decoding.prefix(response.prefix)

    async def list_prefixes(self) -> tuple[Prefix, ...]:
        """All of them, page by page. Behind a router: those of one server."""

        def read(token: str) -> Awaitable[prefixes_pb2.ListResponse]:
            request = prefixes_pb2.ListRequest(page_token=token)
            return answer_of(self._prefixes.List(request, timeout=self._timeout_s))

        pages = pages_of(read)
        return tuple([decoding.prefix(one) async for page in pages for one in page.prefixes])

    async def renew_prefix(self, prefix_id: str, *, ttl_seconds: float = 0.0) -> Prefix:
        request = prefixes_pb2.RenewRequest(prefix_id=prefix_id, ttl_seconds=ttl_seconds)
        response: prefixes_pb2.RenewResponse = await self._calls.answer(
            self._prefixes.Renew, request
        )
        return decoding.prefix(response.prefix)

    async def release_prefix(self, prefix_id: str) -> None:
        """Behind a router: on the server that calls with it go to; others drop it in its time."""
        request = prefixes_pb2.ReleaseRequest(prefix_id=prefix_id)
        was_known = self._known is not None and prefix_id in self._known
        if self._known is not None:
            self._known.forget(prefix_id)
        try:
            await self._calls.answer(self._prefixes.Release, request)
        except ClientError as error:
            if not was_known or error.reason != NOT_KNOWN:
                raise

    async def model(self) -> info_pb2.GetModelResponse:
        call = self._info.GetModel(info_pb2.GetModelRequest(), timeout=self._timeout_s)
        response: info_pb2.GetModelResponse = await answer_of(call)
        return response

    async def limits(self) -> info_pb2.GetLimitsResponse:
        call = self._info.GetLimits(info_pb2.GetLimitsRequest(), timeout=self._timeout_s)
        response: info_pb2.GetLimitsResponse = await answer_of(call)
        return response

    async def load(self) -> info_pb2.GetLoadResponse:
        call = self._info.GetLoad(info_pb2.GetLoadRequest(), timeout=self._timeout_s)
        response: info_pb2.GetLoadResponse = await answer_of(call)
        return response

    async def explain(self, request: info_pb2.ExplainRequest) -> info_pb2.ExplainResponse:
        response: info_pb2.ExplainResponse = await self._calls.answer(self._info.Explain, request)
        return response


def token_blob(tokens: Int32) -> bytes:
    """Token ids as the fields of type bytes hold them."""
    return tokens.astype("<u4").tobytes()
