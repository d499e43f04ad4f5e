"""The client library where there is no server, or not yet."""

import socket

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine
from tests.service.serving import serving

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client, ClientError
from stemserve.service.client.errors import client_error


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with Client(f"127.0.0.1:{closed_port()}") as client:
        with pytest.raises(ClientError) as failure:
            await client.model()
        assert failure.value.code is grpc.StatusCode.UNAVAILABLE
        assert failure.value.message


async def test_a_timeout_is_the_deadline_of_each_call() -> None:
    async with serving(BigramEngine()) as served:
        served.engine.hold.clear()
        async with Client(served.target, timeout_s=0.1) as client:
            with pytest.raises(ClientError) as failure:
                await client.score_tokens(
                    [np.zeros(2, dtype=np.int32)], inference_pb2.LogLikelihood()
                )
            assert failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_one_text_in_place_of_several_is_refused_before_any_call() -> None:
    async with Client(f"127.0.0.1:{closed_port()}") as client:
        with pytest.raises(TypeError, match="items is one text"):
            await client.score("yes", inference_pb2.LogLikelihood())
        with pytest.raises(TypeError, match="sequences is one text"):
            await client.tries.upload("yes")


async def test_top_n_rows_name_their_items_and_plain_rows_are_in_order() -> None:
    async with serving(BigramEngine()) as served:
        items = [np.array(item, dtype=np.int32) for item in ([0, 2], [0, 0], [0, 1])]
        mode = inference_pb2.LogLikelihood(token_logprobs=True)
        plain = await served.client.score_tokens(items, mode)
        best = await served.client.score_tokens(
            items, mode, options=inference_pb2.ScoreRequest(top_n=2)
        )
        assert plain.item_index.tolist() == [0, 1, 2]
        assert best.item_index.tolist() == [1, 2]
        assert best.scores.tolist() == plain.scores[[1, 2]].tolist()
        assert [row.tolist() for row in best.token_logprobs] == [
            plain.token_logprobs[row].tolist() for row in (1, 2)
        ]


def test_a_connection_that_ends_under_a_request_is_unavailable() -> None:
    """gRPC's client calls that an internal error, as if the server had one."""
    nothing = grpc.aio.Metadata()
    cut = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core"
    )
    fault = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "fault of the server")
    assert client_error(cut).code is grpc.StatusCode.UNAVAILABLE
    assert client_error(fault).code is grpc.StatusCode.INTERNAL
