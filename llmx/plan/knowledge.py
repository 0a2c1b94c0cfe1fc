"""Everything that a plan rests on beside the experiment. Pure; ``llmx.lifecycle.knowledge`` gathers
it. Without it the memory of a plan is unknown, and speeds are those of data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from llmx.config.addresses import LOCAL_NAMES
from llmx.config.schema import Experiment
from llmx.plan.learned import Observation, contexts_gib, known_of
from llmx.plan.step_time import LearnedSpeeds
from llmx.plan.trace import NO_TRACES, Traces
from llmx.plan.types import DrawnSamples, NetworkBeside, Plan


@dataclass(frozen=True)
class Knowledge:
    """The facts of the task, of this machine and of earlier runs."""

    local_names: frozenset[str] = LOCAL_NAMES
    """Names and addresses of this machine; a host among them needs no ssh."""
    beside: tuple[NetworkBeside, ...] = ()
    """Networks of the task beside the one that is exported."""
    drawn: DrawnSamples | None = None
    """The samples that the task generates in a step; None where it reads them."""
    traces: Traces = NO_TRACES
    """The real micro step on fake tensors."""
    runs: tuple[Observation, ...] = ()
    """Finished runs, the oldest first."""
    runs_file: str = ""
    """The path of their file, for a person."""

    @cached_property
    def contexts_gib(self) -> Mapping[str, float]:
        """The size of the CUDA context by type of device, where finished runs have shown it."""
        return contexts_gib(self.runs)

    def learned(self, exp: Experiment, plan: Plan) -> LearnedSpeeds:
        """The speeds that finished runs have shown for a plan."""
        return known_of(self.runs, exp, plan, path=self.runs_file)


NO_KNOWLEDGE = Knowledge()
