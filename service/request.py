"""What the servicers ask of the batcher, and what it answers: token ids in, numbers out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from stemserve.service.constraints.constraint import Constraint
    from stemserve.service.tracing.call_trace import CallTrace

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """The leading tokens of a sequence whose full pages the tenants of a sharing group share."""

    salt: bytes  # the group's
    tokens: int


NO_TRUNK = Trunk(salt=b"", tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Realm:
    """Where a sequence's pages belong: sequences share pages only where they belong alike."""

    salt: bytes = b""  # of the tenant: of all pages behind the trunk, its partial last one too
    trunk: Trunk = NO_TRUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreJob:
    """Read-outs of many token sequences ("units") that continue a few contexts.

    A unit is an item, or an item with the first tokens of a label of several tokens behind it.
    Read-outs (gathers) are sorted by unit; gather g reads the log-probabilities of
    gather_ids[gather_indptr[g]:gather_indptr[g + 1]] after token gather_offset[g] of its unit;
    offset -1 is the last token of the unit's context. No units: the contexts are only computed.
    """

    request_id: str
    contexts: tuple[Int32, ...]  # token ids of each; may be empty arrays
    unit_tokens: Int32  # packed
    unit_indptr: Int32  # [units + 1]
    unit_context: Int32  # [units]
    gather_unit: Int32  # [gathers], ascending
    gather_offset: Int32  # [gathers]
    gather_indptr: Int32  # [gathers + 1]
    gather_ids: Int32
    classify: bool = False  # read the classification head at each unit's last token
    priority: int = 0  # higher first
    deadline: float | None = None  # time.monotonic() value
    salt: bytes = b""  # of the prefix tree: jobs share pages only under one salt
    trunks: tuple[Trunk, ...] = ()  # of the contexts; empty: they have none
    tenant: str = ""
    kernel: int = 0  # proto Kernel; 0: the cost model chooses
    partial: bool = False  # at the deadline, answer with what is read
    parts: bool = False  # tell of units as they are read, in ScoreParts before the result
    trace: "CallTrace | None" = None  # is told what happens to the job

    def realm(self, context: int) -> Realm:
        return Realm(salt=self.salt, trunk=self.trunks[context] if self.trunks else NO_TRUNK)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """How one sample of a GenerateJob draws its tokens."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # already different for each sample
    bias_ids: Int32
    bias_values: Float32
    banned_ids: Int32
    min_new_tokens: int
    top_logprobs: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # empty: all
    logprob_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # read at each place

    @property
    def counts_tokens(self) -> bool:
        """What it draws depends on what it drew."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


class EarlyStopping:
    """When a beam search ends before its beams have max_new_tokens."""

    HEURISTIC = "heuristic"  # width hypotheses beat the best beam, taken at its length of now
    FIRST = "first"  # there are width hypotheses
    NEVER = "never"  # width hypotheses beat whatever the best beam could still become


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSpec:
    """How a GenerateJob searches for the likeliest sequences."""

    width: int
    best: int  # how many of them are answered
    length_penalty: float  # a score is the sum of log-probabilities / tokens ** length_penalty
    early_stopping: str  # EarlyStopping
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    request_id: str
    prompt: Int32  # at least one token
    samplers: tuple[SamplerSpec, ...]  # one a sample; none with beams
    max_new_tokens: int  # already cut to the model's context; at least 1
    stop_ids: frozenset[int]  # end a sample; EOS among them unless it is ignored
    priority: int = 0
    deadline: float | None = None
    salt: bytes = b""
    trunk: Trunk = NO_TRUNK
    tenant: str = ""
    kernel: int = 0
    constraint: "Constraint | None" = None  # of each sample's output
    prompt_logprobs: bool = False  # read the log-probabilities of the prompt's tokens too
    beams: BeamSpec | None = None  # search; None: draw samples
    trace: "CallTrace | None" = None  # is told what happens to the job
    draft_tokens: int | None = None  # most that are guessed ahead; None: as the batcher has it

    @property
    def realm(self) -> Realm:
        return Realm(salt=self.salt, trunk=self.trunk)

    @property
    def num_samples(self) -> int:
        """Sequences that are answered."""
        return len(self.samplers) if self.beams is None else self.beams.best


Job = ScoreJob | GenerateJob


def stored_sequences(job: Job) -> list[tuple[Int32, Realm]]:
    """What the job has in pages, and where they belong."""
    if isinstance(job, GenerateJob):
        return [(job.prompt, job.realm)]
    return [(tokens, job.realm(index)) for index, tokens in enumerate(job.contexts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUsage:
    """Tokens by how they were satisfied; prompt = cached + shared + computed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    shared_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    kv_read_bytes: int = 0  # this job's share, by rows, of the steps that it took part in
    kv_avoided_bytes: int = 0
    drafted_tokens: int = 0  # guessed ahead and verified
    accepted_tokens: int = 0  # of those: guessed right


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTiming:
    queue_s: float = 0.0  # submit to first planned step
    engine_s: float = 0.0  # first planned step to last result


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    request_id: str
    gather_logprobs: Float32  # parallel to gather_ids
    gather_argmax: Int32  # [gathers] most likely token id
    class_scores: Float32  # [units, classes]; [0, 0] unless classify
    failed_units: Int32  # units whose logits were not finite
    unread_units: Int32  # of a job with `partial`: not computed before the deadline
    usage: JobUsage
    timing: JobTiming


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScorePart:
    """Units of a running job that are read to their end.

    The arrays are the job's own and grow up with it: only what belongs to units that were told of
    is there, and that does not change any more.
    """

    request_id: str
    units: Int32  # new ones, ascending
    failed_units: Int32  # of them: logits were not finite
    gather_logprobs: Float32  # parallel to gather_ids
    gather_argmax: Int32  # [gathers]
    class_scores: Float32  # [units, classes]; [0, 0] unless classify


class StopCause:
    STOP_ID = "stop"
    LENGTH = "length"
    COMPLETE = "complete"  # the constraint leaves nothing that could follow
    NONE_LEFT = "none_left"  # of a beam search: there are fewer sequences than were asked for


class TopTokens(NamedTuple):
    """The most likely tokens at a place, most likely first, then the sampler's logprob_ids."""

    ids: Sequence[int]
    logprobs: Sequence[float]  # raw


class SampleTokens(NamedTuple):
    """New tokens of one sample, in order; at least one, unless it is NONE_LEFT."""

    sample: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]  # raw, parallel to token_ids
    tops: Sequence[TopTokens] = ()  # parallel to token_ids; empty: nobody asked
    finish: str | None = None  # StopCause, of the last of them
    score: float = 0.0  # of a beam search


class GenerateChunk(NamedTuple):
    """All new tokens of a job from one step, or burst; the last chunk carries usage and timing."""

    request_id: str
    news: Sequence[SampleTokens]
    usage: JobUsage | None = None
    timing: JobTiming | None = None
    prompt_logprobs: Float32 | None = None  # in the last, if asked for: of all but the first token
    searched_tokens: int = 0  # of beams that are not in the news

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens.token_ids) for tokens in self.news)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    request_id: str
    error: Exception


Event = ScoreResult | ScorePart | GenerateChunk | JobFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker says of its model and itself in its handshake."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_tokens: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    kv_pages: int
    sampler_slots: int
    steps_in_flight: int
    has_lm_head: bool
    class_labels: tuple[str, ...]
    kv_bytes_per_token: int
    kv_dtype: str = ""  # of the numbers in the pages
    max_burst_steps: int = 1  # decode steps that may be sent at once
    deterministic: bool = False  # results do not depend on what runs beside them, or on the cache
    cost_table_json: str = field(default="", repr=False)
    torch_version: str = ""
    cuda_version: str = ""  # that torch was built for


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    queued_requests: int
    running_requests: int
    queued_tokens: int  # that must still be computed
    free_pages: int
    cached_pages: int  # evictable
    used_pages: int
    queued_by_priority: tuple[int, int, int] = (0, 0, 0)  # below 0, 0, above 0
    oldest_queued_s: float = 0.0  # how long the first of them waits
    pinned_pages: int = 0  # of those used
    steps_in_flight: int = 0  # sent and not answered
    # Since the worker was attached.
    evicted_pages: int = 0  # to make room for others
    cleared_pages: int = 0  # because somebody asked
    suspensions: int = 0  # of generations, whose pages were taken
    draft_steps: int = 0  # that verified drafts
