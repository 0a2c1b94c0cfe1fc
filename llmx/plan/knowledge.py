"""Everything that a plan rests on beside the experiment. Pure; ``llmx.lifecycle.knowledge`` gathers
it, and a plan without it takes formulas and data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from llmx.config.addresses import LOCAL_NAMES
from llmx.config.schema import Experiment
from llmx.plan.learned import Observation, contexts_gib, known_of
from llmx.plan.step_time import LearnedSpeeds
from llmx.plan.trace import NO_TRACES, Traces
from llmx.plan.types import SUMMED, DrawnSamples, NetworkBeside, Plan


@dataclass(frozen=True)
class Knowledge:
    """The facts of the task, of this machine and of earlier runs."""

    local_names: frozenset[str] = LOCAL_NAMES
    """Names and addresses of this machine; a host among them needs no ssh."""
    beside: tuple[NetworkBeside, ...] = ()
    """Networks of the task beside the one that is exported."""
    logits: str = SUMMED
    """The logits that the loss of the task needs (``Task.logits``)."""
    drawn: DrawnSamples | None = None
    """The samples that the task generates in a step; None where it reads them."""
    traces: Traces = NO_TRACES
    """The real micro step on fake tensors; where they do not cover a plan, the formula counts."""
    runs: tuple[Observation, ...] = ()
    """Finished runs, the oldest first."""
    runs_file: str = ""
    """The path of their file, for a person."""
    vocabulary: int | None = None
    """Rows that the tokenizer needs; None: not known."""

    @cached_property
    def contexts_gib(self) -> Mapping[str, float]:
        """The size of the CUDA context by type of device, where finished runs have shown it."""
        return contexts_gib(self.runs)

    def learned(self, exp: Experiment, plan: Plan) -> LearnedSpeeds:
        """The speeds that finished runs have shown for a plan."""
        return known_of(self.runs, exp, plan, path=self.runs_file)

    @property
    def by_formula(self) -> Knowledge:
        """The same without traces."""
        return replace(self, traces=NO_TRACES)


NO_KNOWLEDGE = Knowledge()
