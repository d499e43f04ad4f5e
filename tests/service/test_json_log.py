"""Log lines as JSON: of the formatter, and of a server's calls."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.serving import BYTE_VOCABULARY, serving

from stemserve.json_log import JsonFormatter
from stemserve.proto.v1 import inference_pb2
from stemserve.service.call_facts import log_context
from stemserve.service.client import Client, ClientError
from stemserve.service.config.tracing import TracingConfig
from stemserve.service.serving.call_watch import CallWatch
from stemserve.service.tracing.tracer import Tracer

SECRET = "a-text-of-the-user"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter("service", log_context))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.texts]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    log = logging.getLogger("stemserve")
    level = log.level
    log.addHandler(handler)
    log.setLevel("INFO")
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


def test_a_line_is_an_object_whatever_it_says(lines: Lines) -> None:
    log = logging.getLogger("stemserve.a_module")
    log.info('a "quoted"\nline with %s', "über", extra={"fields": {"count": 3}})
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("it failed")
    assert all("\n" not in text for text in lines.texts)
    first, second = lines.objects
    assert first["message"] == 'a "quoted"\nline with über' and first["count"] == 3
    assert first["level"] == "info" and first["logger"] == "stemserve.a_module"
    assert first["process"] == "service" and first["time"].endswith("Z")
    assert "ValueError: wrong" in second["exception"] and "call_id" not in second


async def test_a_line_for_each_call_with_its_ids_and_without_its_content(lines: Lines) -> None:
    traces: list[Any] = []
    tracer = Tracer(TracingConfig(), traces.append)
    engine = BigramEngine(random_bigrams(BYTE_VOCABULARY))
    request = inference_pb2.ScoreRequest(query=SECRET, items=[SECRET])

    def named() -> tuple[tuple[str, str], ...]:
        return (("x-request-id", "proxy-7"),)

    watch = CallWatch(tracer, log_calls=True)
    async with (
        serving(engine, watch=watch) as served,
        Client(served.target, headers=named) as client,
    ):
        with pytest.raises(ClientError):
            await client.score_request(request)
        request.log_likelihood.SetInParent()
        await client.score_request(request)
        await served.client.score_request(request)
        failed, named_line, own = [
            line for line in lines.objects if line["logger"].endswith("calls")
        ]
    assert SECRET not in "".join(lines.texts)
    assert (failed["code"], failed["problem"]) == ("INVALID_ARGUMENT", "InvalidRequest")
    assert failed["method"] == named_line["method"] == "stemserve.v1.Inference/Score"
    assert named_line["code"] == own["code"] == "OK" and named_line["seconds"] > 0
    assert failed["call_id"] == named_line["call_id"] == "proxy-7"
    assert len(own["call_id"]) == 16
    assert [line["trace_id"] for line in (failed, named_line, own)] == [
        trace.ids.hex_trace_id for trace in traces
    ]


async def test_an_id_that_is_more_than_an_id_is_not_logged(lines: Lines) -> None:
    def named() -> tuple[tuple[str, str], ...]:
        return (("x-request-id", "what a user wrote"),)

    engine = BigramEngine(random_bigrams(BYTE_VOCABULARY))
    async with (
        serving(engine, watch=CallWatch(log_calls=True)) as served,
        Client(served.target, headers=named) as client,
    ):
        await client.model()
    assert "what a user wrote" not in "".join(lines.texts)
    assert len(lines.objects[-1]["call_id"]) == 16
