"""What the step planner asks of jobs that generate: rows of one token each, behind a prompt."""

from abc import abstractmethod

from stemserve.service.batching.jobs.job_progress import JobProgress, Ticket
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.request import Event, Job


class DecodingProgress(JobProgress):
    decodes = True

    def __init__(self, job: Job, ticket: Ticket) -> None:
        super().__init__(job, ticket)
        self.is_yielding = False  # gives its pages up when its rows in flight are answered
        self.lacks_pages = False  # it could not go on for want of pages
        self.num_live = 0  # sequences that have not ended

    @property
    def draft_tokens(self) -> int:
        """That its drafts of a step may have; 0: it has no drafts."""
        return 0

    @property
    def expected_tokens(self) -> float:
        """Of such drafts, the tokens that will likely come."""
        return 0.0

    @property
    @abstractmethod
    def may_burst(self) -> bool:
        """Its next rows can run before the tokens of the last are known here."""

    @property
    @abstractmethod
    def is_decoding(self) -> bool:
        """It may have decode rows."""

    @abstractmethod
    def missing_pages(self, steps: int) -> int:
        """Pages that it lacks for so many rows more of each sequence."""

    @abstractmethod
    def plan_decodes(self, step: StepBuilder, limit: int) -> bool:
        """Add decode rows while the step has fewer rows than `limit`. False: there is no page for
        one now."""

    def collect(self) -> list[Event]:
        """Take the masks that were made beside the step loop."""
        return []

    def find_drafts(self) -> bool:
        """Make the drafts that the next step may verify; whether there are any."""
        return False

    def plan_drafts(self, step: StepBuilder, limit: int) -> bool:
        """Add rows that verify what was found, behind the decode rows of all. False: there is no
        page for one now."""
        return True
