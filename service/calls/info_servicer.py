"""The Info service."""

import asyncio
from dataclasses import asdict

from stemserve.proto.v1 import info_pb2, info_pb2_grpc
from stemserve.service.caller import current_caller
from stemserve.service.calls.explanation import explained_step
from stemserve.service.calls.generation.generate_runner import GenerateRunner
from stemserve.service.calls.prefixes.prefix_registry import PrefixRegistry
from stemserve.service.calls.scores.score_runner import ScoreRunner
from stemserve.service.engine import Engine
from stemserve.service.errors import InvalidRequest, QueueFull
from stemserve.service.limits import Limits
from stemserve.service.request import Job, stored_sequences
from stemserve.service.serving.call_status import Context, remaining_deadline

RETRY_S = 1.0


class InfoServicer(info_pb2_grpc.InfoServicer):
    def __init__(
        self,
        engine: Engine,
        registry: PrefixRegistry,
        score: ScoreRunner,
        generate: GenerateRunner,
        limits: Limits,
        *,
        version: str,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._score = score
        self._generate = generate
        self._limits = limits
        self._version = version
        # Planning takes the processor from running calls, and no queue or quota counts it.
        self._explains = asyncio.Semaphore(1)

    async def GetModel(
        self, request: info_pb2.GetModelRequest, context: Context
    ) -> info_pb2.GetModelResponse:
        facts = self._engine.facts
        return info_pb2.GetModelResponse(
            model=facts.model,
            architecture=facts.architecture,
            dtype=facts.dtype,
            device=facts.device,
            vocab_size=facts.vocab_size,
            context_tokens=facts.context_tokens,
            layers=facts.layers,
            query_heads=facts.query_heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            has_lm_head=facts.has_lm_head,
            class_labels=facts.class_labels,
            version=self._version,
            deterministic=facts.deterministic,
            kv_dtype=facts.kv_dtype,
        )

    async def GetLimits(
        self, request: info_pb2.GetLimitsRequest, context: Context
    ) -> info_pb2.GetLimitsResponse:
        facts = self._engine.facts
        limits = asdict(self._limits.on(facts.device))
        return info_pb2.GetLimitsResponse(
            **limits, page_size=facts.page_size, kv_pages=facts.kv_pages
        )

    async def GetLoad(
        self, request: info_pb2.GetLoadRequest, context: Context
    ) -> info_pb2.GetLoadResponse:
        load = await self._engine.load()
        told = info_pb2.GetLoadResponse.DESCRIPTOR.fields_by_name
        public = {name: value for name, value in asdict(load).items() if name in told}
        return info_pb2.GetLoadResponse(**public, registered_prefixes=len(self._registry))

    async def Explain(
        self, request: info_pb2.ExplainRequest, context: Context
    ) -> info_pb2.ExplainResponse:
        if self._explains.locked():
            raise QueueFull("another call is explained; retry later", retry_after_s=RETRY_S)
        async with self._explains:
            return await self._explain(await self._job(request, context))

    async def _explain(self, job: Job) -> info_pb2.ExplainResponse:
        steps = await self._engine.explain(job)
        explained = [explained_step(*step) for step in steps]
        cached = [
            await self._engine.resident_tokens(tokens, realm)
            for tokens, realm in stored_sequences(job)
        ]
        return info_pb2.ExplainResponse(
            steps=explained,
            cached_tokens=sum(cached),
            computed_tokens=sum(step.rows for step in explained),
        )

    async def _job(self, request: info_pb2.ExplainRequest, context: Context) -> Job:
        caller = current_caller()
        match request.WhichOneof("request"):
            case "score":
                return await self._score.job(request.score, caller=caller)
            case "generate":
                deadline = remaining_deadline(context)
                return await self._generate.job(
                    request.generate, caller=current_caller(), deadline=deadline
                )
            case _:
                raise InvalidRequest("request", "set score or generate")
