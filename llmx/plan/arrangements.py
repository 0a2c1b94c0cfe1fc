"""``rollout.hosts=auto``: which hosts train and which draw samples. Pure.

Every division of the hosts is planned (``llmx.compose.complete``), and the one with the shortest
predicted step is taken. Hosts with the same device and slots are interchangeable.

    python -m llmx plan task=grpo hardware=a100x2_v100x2 rollout.hosts=auto ...
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from llmx.config.schema import Experiment, HostConfig
from llmx.errors import ConfigError
from llmx.plan.make import server_problems
from llmx.plan.types import Arrangement, Plan

MOST = 64
"""Arrangements that are planned."""
CLEARLY_SHORTER = 0.95
"""Steps that are not shorter by more than this count as equal: then the ranks draw, or fewer hosts
do."""


def drawing_hosts(hosts: Sequence[HostConfig]) -> list[tuple[str, ...]]:
    """Names of the hosts that draw, for each way to divide them; none first. The last hosts of a
    type draw. Of many alike, 1, 2, 4, ... draw.

    Raises:
        ConfigError: there are too many ways.
    """
    types: dict[tuple[str, int], list[str]] = {}
    for host in hosts:
        types.setdefault((host.device, host.slots), []).append(host.name)
    counts = [_counts(len(names)) for names in types.values()]
    if math.prod(map(len, counts)) > MOST:
        raise ConfigError(
            f"rollout.hosts=auto: hosts of {len(types)} types (device and slots) can be divided in "
            f"{math.prod(map(len, counts))} ways, and at most {MOST} are planned. Name the hosts "
            "that draw: rollout.hosts=[node-b]."
        )
    divisions = []
    for drawn in itertools.product(*counts):
        names = {
            name
            for of_type, count in zip(types.values(), drawn, strict=True)
            for name in of_type[len(of_type) - count :]
        }
        if len(names) < len(hosts):
            divisions.append(tuple(host.name for host in hosts if host.name in names))
    return sorted(divisions, key=len)


def _counts(hosts: int) -> list[int]:
    """0 to 4, and above that powers of two and all but one."""
    counts = {count for count in range(hosts + 1) if count <= 4 or count & (count - 1) == 0}
    return sorted({*counts, hosts - 1, hosts})


def arrangement_of(exp: Experiment, plan: Plan) -> Arrangement:
    """The predicted step of a plan, or why it is no choice."""
    trains = tuple(host.name for host in plan.hosts)
    draws = tuple(host.name for host in plan.rollout_hosts)
    problems = [part.warning for part in plan.memory if part.warning]
    if plan.time is not None and plan.time.unknown:
        return Arrangement(trains, draws, problem=plan.time.unknown)
    if plan.time is None or plan.time.rollout is None:
        return Arrangement(trains, draws, problem="the architecture of the model is not known")
    if problems := [*problems, *server_problems(exp, plan)]:
        return Arrangement(trains, draws, plan.time.step_s, problem=problems[0])
    return Arrangement(trains, draws, plan.time.step_s, plan.time.rollout)


def with_chosen(arrangements: Sequence[Arrangement]) -> list[Arrangement]:
    """The arrangements, the one with the shortest step marked as chosen.

    Raises:
        ConfigError: none can be predicted.
    """
    possible = [choice for choice in arrangements if not choice.problem]
    if not possible:
        # The model fits nowhere: the plan says so, with advice, where most hosts train.
        possible = [choice for choice in arrangements if choice.step_s][:1]
    if not possible:
        problem = min((choice.problem for choice in arrangements), key=len)
        raise ConfigError(
            "rollout.hosts=auto predicts steps by data sheets alone, and here it cannot: "
            f"{problem}. Set what is missing, or name the hosts that draw: rollout.hosts=[node-b]."
        )
    shortest = min(choice.step_s for choice in possible)
    chosen = next(choice for choice in possible if choice.step_s * CLEARLY_SHORTER <= shortest)
    return [replace(choice, chosen=choice is chosen) for choice in arrangements]
