"""Traces by simple arithmetic in the place of the process that makes them: for tests of what a plan
does with a trace, whatever network it is of."""

from __future__ import annotations

import json
from typing import Any

from llmx.config import Experiment, experiment_from_dict
from llmx.plan.trace import (
    FETCH,
    FETCH_BACKWARD,
    GRADIENT,
    RELEASE,
    RELEASE_BACKWARD,
    Event,
    StepTrace,
    TracedParameter,
)
from tests.composing import networks

KEPT = {"none": 12, "selective": 7, "full": 1}
"""Elements that a layer keeps for the backward pass, by token and hidden width."""
WORK = 4
"""Elements that a layer takes while it computes."""


def answers(_program: str, request: str, **_options: Any) -> list[dict[str, Any]]:
    """The answers of ``llmx.train.memory_trace`` to a request."""
    job = json.loads(request)
    exp = experiment_from_dict(job["experiment"])
    return [answer(exp, **one) for one in job["traces"]]


def answer(exp: Experiment, **run: Any) -> dict[str, Any]:
    """The answer to one request; a problem for a network that cannot be built."""
    try:
        return {"trace": trace(exp, **run).to_dict()}
    except OSError:
        return {"problem": "not made up"}


def trace(
    exp: Experiment, *, checkpointing: str, precision: str, micro_batch: int, **_run: Any
) -> StepTrace:
    """An embedding, layers that are alike, and a head; weights of a layer as one parameter."""
    built = networks(exp)
    network = next(network for network in built.values() if network.num_trained)
    width = 4 if precision == "fp32" else 2
    hidden = micro_batch * exp.data.seq_len * network.hidden_size * width
    kept, work = KEPT[checkpointing] * hidden, WORK * hidden
    logits = 2 * micro_batch * exp.data.seq_len * network.vocab_size * width
    table, layers = network.vocab_size * network.hidden_size, network.num_layers
    is_tied = network.num_looked_up < table
    trains = network.num_trained == network.num_parameters
    num_frozen = network.num_parameters - (0 if trains else network.num_trained)
    layer = (num_frozen - network.num_packed - (1 if is_tied else 2) * table) // layers
    sizes = [table, *[layer] * layers, 0 if is_tied else table]
    parameters = [TracedParameter(size, trains) for size in sizes]
    own = [[index] for index in range(len(sizes))]
    if not trains:
        for number in range(1, layers + 1):
            own[number].append(len(parameters))
            parameters.append(TracedParameter(network.num_trained // layers, True))
    events, live = [], 0
    for module in range(len(sizes)):
        events.append(Event(FETCH, module, live, live))
        is_head = module == layers + 1
        peak, live = live + (logits if is_head else work), live + (logits if is_head else kept)
        events.append(Event(RELEASE, module, max(peak, live), live))
    again = 0 if checkpointing == "none" else KEPT["none"] * hidden
    for module in reversed(range(len(sizes))):
        is_head = module == layers + 1
        events.append(Event(FETCH_BACKWARD, module, live, live))
        peak, live = live + again + (0 if is_head else work), live - (logits if is_head else kept)
        for index in own[module]:
            if parameters[index].trained:
                events.append(Event(GRADIENT, index, peak, live))
                peak = live
        events.append(Event(RELEASE_BACKWARD, module, peak, live))
    buffers = round(network.num_packed * 0.52)
    modules = tuple(map(tuple, own))
    return StepTrace(tuple(parameters), modules, tuple(events), buffers=buffers, networks=built)
