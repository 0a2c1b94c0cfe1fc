"""Traces by simple arithmetic in the place of the process that makes them: for tests of what a plan
does with a trace, whatever network it is of."""

from __future__ import annotations

import json
from typing import Any

from llmx.config import Experiment, experiment_from_dict
from llmx.plan.adapter import adapter_size, network_modules, trained_parameters
from llmx.plan.geometry import model_geometry
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

KEPT = {"none": 12, "selective": 7, "full": 1}
"""Elements that a layer keeps for the backward pass, by token and hidden width."""
WORK = 4
"""Elements that a layer takes while it computes."""


def answers(_program: str, request: str, **_options: Any) -> list[dict[str, Any]]:
    """The answers of ``llmx.train.memory_trace`` to a request."""
    job = json.loads(request)
    exp = experiment_from_dict(job["experiment"])
    return [answer(exp, **one) for one in job["traces"]]


def answer(exp: Experiment, *, activation_checkpointing: str, **run: Any) -> dict[str, Any]:
    """The answer to one request; a problem for an architecture without a geometry."""
    if model_geometry(exp.model) is None:
        return {"problem": "not made up"}
    return {"trace": trace(exp, checkpointing=activation_checkpointing, **run).to_dict()}


def trace(
    exp: Experiment, *, checkpointing: str, precision: str, micro_batch: int, **_run: Any
) -> StepTrace:
    """An embedding, layers that are alike, and a head; weights of a layer as one parameter."""
    shape, modules = model_geometry(exp.model), network_modules(exp.model)
    assert shape is not None
    width = 4 if precision == "fp32" else 2
    hidden = micro_batch * exp.data.seq_len * shape.hidden_size * width
    kept, work = KEPT[checkpointing] * hidden, WORK * hidden
    logits = 2 * micro_batch * exp.data.seq_len * shape.vocab_size * width
    table = shape.vocab_size * shape.hidden_size
    adapter, layers = adapter_size(exp.model, exp.adapter), shape.num_layers
    is_tied = modules is not None and not modules.others.get("lm_head", 0)
    layer = (shape.num_parameters - (1 if is_tied else 2) * table) // layers
    packed = adapter.quantized // layers if adapter else 0
    sizes = [table, *[layer - packed] * layers, 0 if is_tied else table]
    trains = (adapter is None) and not exp.model.freeze
    parameters = [TracedParameter(size, trains) for size in sizes]
    own = [[index] for index in range(len(sizes))]
    if not trains:
        num_trained = trained_parameters(exp.model, exp.adapter) or 0
        if adapter is None:  # frozen parts of the network, by elements
            parameters = [TracedParameter(size - num_trained // layers, False) for size in sizes]
        for number in range(1, layers + 1):
            own[number].append(len(parameters))
            parameters.append(TracedParameter(num_trained // layers, True))
    events, live = [], 0
    for module in range(len(sizes)):
        events.append(Event(FETCH, module, live, live))
        is_head = module == layers + 1
        peak, live = live + (logits if is_head else work), live + (logits if is_head else kept)
        events.append(Event(RELEASE, module, max(peak, live), live))
    for module in reversed(range(len(sizes))):
        is_head, again = (
            module == layers + 1,
            0 if checkpointing == "none" else KEPT["none"] * hidden,
        )
        events.append(Event(FETCH_BACKWARD, module, live, live))
        peak, live = live + again + (0 if is_head else work), live - (logits if is_head else kept)
        for index in own[module]:
            if parameters[index].trained:
                events.append(Event(GRADIENT, index, peak, live))
                peak = live
        events.append(Event(RELEASE_BACKWARD, module, peak, live))
    return StepTrace(
        tuple(parameters),
        tuple(map(tuple, own)),
        tuple(events),
        buffers=round((adapter.quantized if adapter else 0) * 0.52),
        flops=6.0 * shape.num_parameters * micro_batch * exp.data.seq_len,
        num_packed=packed * layers,
    )
