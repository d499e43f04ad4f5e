"""Make the servicers and add them to a server."""

import asyncio
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc

import stemserve
from stemserve.proto.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    info_pb2,
    info_pb2_grpc,
    prefixes_pb2,
    prefixes_pb2_grpc,
    tries_pb2,
    tries_pb2_grpc,
)
from stemserve.service.caller import current_caller
from stemserve.service.calls.context_encoder import ContextEncoder
from stemserve.service.calls.generation.generate_runner import GenerateRunner
from stemserve.service.calls.generation.generation import GenerateEncoder
from stemserve.service.calls.generation.request_constraints import RequestConstraints
from stemserve.service.calls.inference_servicer import InferenceServicer
from stemserve.service.calls.info_servicer import InfoServicer
from stemserve.service.calls.prefixes.prefix_keeper import PrefixKeeper
from stemserve.service.calls.prefixes.prefix_registry import PrefixRegistry, RegistryBounds
from stemserve.service.calls.prefixes.prefixes_servicer import PrefixesServicer
from stemserve.service.calls.scores.score_encoder import ScoreEncoder
from stemserve.service.calls.scores.score_runner import ScoreRunner
from stemserve.service.calls.tries.trie_parts import TrieParts
from stemserve.service.constraints.compile_queue import CompileQueue
from stemserve.service.constraints.compiler import ConstraintCompiler
from stemserve.service.engine import Engine
from stemserve.service.limits import Limits
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.serving.call_watch import CallWatch
from stemserve.service.text.tokenizer import Tokenizer, TokenizerPool
from stemserve.service.text.tokenizer_files import load_tokenizer, no_tokenizer

SERVICES = tuple(
    file.services_by_name[name].full_name
    for file, name in (
        (inference_pb2.DESCRIPTOR, "Inference"),
        (prefixes_pb2.DESCRIPTOR, "Prefixes"),
        (tries_pb2.DESCRIPTOR, "Tries"),
        (info_pb2.DESCRIPTOR, "Info"),
    )
)


def model_tokenizer(model: Path, *, dummy: bool) -> Tokenizer:
    """Raises OSError or ValueError. A dummy model may have none: requests then send token ids."""
    folder = model.parent if model.name == "config.json" else model
    if dummy and not (folder / "tokenizer.json").is_file() and folder.is_dir():
        return no_tokenizer(folder)
    return load_tokenizer(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallThreads:
    """Threads for what would hold the RPC loop up."""

    short: ThreadPoolExecutor  # texts of most calls
    long: ThreadPoolExecutor  # texts that take a while
    compile_queue: CompileQueue  # constraints


class Services:
    """The public services over one engine, which knows its worker's facts by now."""

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: Tokenizer,
        threads: CallThreads,
        limits: Limits,
        metrics: Metrics,
        watch: CallWatch | None = None,
    ) -> None:
        facts = engine.facts
        registry = _prefix_registry(limits)

        async def admit(least_tokens: int) -> None:
            await engine.check_rates(current_caller().tenant, least_tokens)

        pool = TokenizerPool(tokenizer, threads.short, long_executor=threads.long, admit=admit)
        contexts = ContextEncoder(pool, registry, vocab_size=facts.vocab_size, limits=limits)
        score = ScoreRunner(ScoreEncoder(contexts, pool, limits, facts), engine, metrics)
        compiler = _compiler(tokenizer, threads.compile_queue, metrics, engine, limits)
        self._compiler = compiler
        self._tries = TrieParts(pool, facts, limits, compiler, metrics)
        constraints = RequestConstraints(
            compiler,
            self._tries.builder,
            self._tries.registry,
            metrics,
            vocab_size=facts.vocab_size,
        )
        generate = GenerateRunner(
            GenerateEncoder(contexts, tokenizer.eos_ids, limits, facts, constraints),
            tokenizer,
            engine,
            metrics,
            entropy=lambda: secrets.randbits(64),
        )
        self._inference = InferenceServicer(
            score,
            generate,
            metrics,
            max_stream_calls=limits.max_stream_calls,
            watch=watch or CallWatch(),
        )
        self._keeper = PrefixKeeper(registry, engine, note=metrics.prefixes)
        self._prefixes = PrefixesServicer(
            registry, contexts, engine, self._keeper, limits, clock=time.monotonic
        )
        self._info = InfoServicer(
            engine, registry, score, generate, limits, version=stemserve.__version__
        )

    async def prepare(self) -> None:
        """To be awaited once, before there are calls."""
        await self._compiler.prepare()

    async def keep(self) -> None:
        """Runs until cancelled: looks after prefixes and tries."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keeper.keep())
            tasks.create_task(self._tries.keep())

    def add_to(self, server: grpc.aio.Server) -> None:
        """The server may run already."""
        running = cast(grpc.aio.Server, _RunningServer(server))
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, running)
        prefixes_pb2_grpc.add_PrefixesServicer_to_server(self._prefixes, running)
        tries_pb2_grpc.add_TriesServicer_to_server(self._tries.servicer, running)
        info_pb2_grpc.add_InfoServicer_to_server(self._info, running)


def _prefix_registry(limits: Limits) -> PrefixRegistry:
    bounds = RegistryBounds(max_prefixes=limits.max_prefixes, max_tokens=limits.max_prefix_tokens)
    return PrefixRegistry(bounds, clock=time.monotonic)


def _compiler(
    tokenizer: Tokenizer, queue: CompileQueue, metrics: Metrics, engine: Engine, limits: Limits
) -> ConstraintCompiler:
    return ConstraintCompiler(
        tokenizer,
        queue,
        metrics,
        vocab_size=engine.facts.vocab_size,
        max_compile_ms=limits.max_compile_ms,
    )


class _RunningServer:
    """As the generated code sees a server. Methods are registered by name before a server starts
    only; generic handlers serve the same methods and may come at any time."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        pass
