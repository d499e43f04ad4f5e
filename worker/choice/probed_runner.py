"""A runner whose steps are probed, and whose results say what the probes found."""

from dataclasses import dataclass

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.choice.probe import Prober
from stemserve.worker.result import LaunchedStep
from stemserve.worker.runner import ModelRunner
from stemserve.worker.steps.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbedStep:
    launched: LaunchedStep
    probes: list[worker_pb2.Probe]  # that were done before it

    @property
    def step_id(self) -> int:
        return self.launched.step_id

    def result(self) -> worker_pb2.StepResult:
        result = self.launched.result()
        result.probes.extend(self.probes)
        return result


class ProbedRunner:
    def __init__(self, runner: ModelRunner, prober: Prober) -> None:
        self._runner = runner
        self._prober = prober

    @property
    def uses_gpu(self) -> bool:
        return self._runner.uses_gpu

    @property
    def num_classes(self) -> int:
        return self._runner.num_classes

    def decode(self, plan: worker_pb2.StepPlan) -> Step:
        """Raises BadPlan."""
        return self._runner.decode(plan)

    def launch(self, plan: worker_pb2.StepPlan) -> _ProbedStep:
        """Raises as the runner's."""
        launched = self._runner.launch(plan)
        choices = [group.planned.choice for ran in launched.ran for group in ran.groups]
        self._prober.note(choices)
        return _ProbedStep(launched=launched, probes=self._prober.take())
