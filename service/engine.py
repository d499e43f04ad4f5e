"""What the servicers see of the engine: jobs in, results and token streams out."""

from collections.abc import AsyncGenerator
from typing import Protocol

from stemserve.proto.v1 import worker_pb2
from stemserve.service.request import (
    GenerateChunk,
    GenerateJob,
    Int32,
    Job,
    Load,
    Realm,
    ScoreJob,
    ScorePart,
    ScoreResult,
    WorkerFacts,
)
from stemserve.service.stream_pace import StreamPace


class Engine(Protocol):
    """All methods are called on the RPC event loop. Cancelling a call cancels its job."""

    @property
    def facts(self) -> WorkerFacts: ...

    @property
    def generation(self) -> int:
        """Counts the workers; what was cached went with the one before."""
        ...

    async def score(self, job: ScoreJob) -> ScoreResult:
        """Raises RequestError: QueueFull, NeverFits, DeadlinePassed, NotReady, EngineFault."""
        ...

    def score_parts(self, job: ScoreJob) -> AsyncGenerator[ScorePart | ScoreResult, None]:
        """Parts as they are read, then the result. Raises as `score`; closing it cancels the job.

        `job.parts` is set. A reader that is behind gets all that has come as one part.
        """
        ...

    def generate(self, job: GenerateJob, pace: StreamPace) -> AsyncGenerator[GenerateChunk, None]:
        """Chunks until the one with usage, of several steps where `pace` or the reader's delay
        has it. Raises as `score`; closing it cancels the job."""
        ...

    def stop_sample(self, request_id: str, sample: int) -> None:
        """End one sample of a running GenerateJob (a stop string matched)."""
        ...

    async def explain(
        self, job: Job
    ) -> list[tuple[worker_pb2.StepPlan, worker_pb2.PredictResponse, Int32]]:
        """The steps that the job would take now, each with the worker's prediction and, per forest
        node, how many of its tokens are in the cache. Runs nothing."""
        ...

    async def check_rates(self, tenant: str, least_tokens: int) -> None:
        """Raises QuotaExceeded where a job of so many tokens would be refused with it now."""
        ...

    async def load(self) -> Load: ...

    async def pin(self, key: str, tokens: Int32, realm: Realm) -> int:
        """Keep what is computed of a sequence in the cache, until `unpin` or a new worker.

        Returns how many leading tokens that are. Raises QuotaExceeded, NotReady.
        """
        ...

    async def unpin(self, key: str) -> None:
        """Raises NotReady: then nothing is pinned any more."""
        ...

    async def resident_tokens(self, tokens: Int32, realm: Realm) -> int:
        """How many leading tokens of the sequence are in the KV cache."""
        ...
