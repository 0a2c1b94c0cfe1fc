"""Which way this run feeds its model: tried on every host at the start, the same layout for all.

``data.layout=auto`` packs rows where they are then isolated, and pads them where they are not.
Each type of device has the attention that suits it. Shown by
``python -m pytest tests/unit/test_train_choose_way.py``.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from llmx.config import Experiment
from llmx.errors import ConfigError
from llmx.models.attention import Way, ways
from llmx.models.isolation import Answer, find_ways
from llmx.models.loss import takes
from llmx.models.varlen import SEGMENTS, VARLEN, register
from llmx.plan.types import Plan

IMPLEMENTATIONS = {"varlen": VARLEN, "segments": SEGMENTS}
"""What ``model.attention`` calls what transformers knows under another name."""
ON_CUDA = (VARLEN, "flash_attention_2", "flash_attention_3", "flex_attention")
"""Tried on the device itself: they have no kernel, or no backward pass, on a CPU."""
PLAIN = ("sdpa", "eager")


def choose_way(exp: Experiment, plan: Plan, config: Any, *, device: torch.device) -> Way:
    """The way of this rank. Collective; ConfigError, on all ranks, where there is none."""
    register()  # also where nothing is tried: the model is then built with what the others found
    mine = None
    # One rank a host asks: the others have the same packages and devices.
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        try:
            mine = answer(exp, plan, config, device=device)
        except ConfigError as error:  # told to the others, who would wait for an answer
            mine = Answer(None, None, config_error=str(error))
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine and mine.to_dict())
    asked = {
        plan.ranks[rank].host: Answer.from_dict(values)
        for rank, values in enumerate(everyone)
        if values is not None
    }
    for host, each in asked.items():
        if each.config_error:
            raise ConfigError(f"Host {plan.hosts[host].name}: {each.config_error}")
    layout = common_layout(exp, list(asked.values()))
    own = asked[plan.ranks[torch.distributed.get_rank()].host]
    way: Way | None = getattr(own, layout)
    if torch.distributed.get_rank() == 0:
        lines = told(exp, own, layout)
        if device.type == "cuda" and way is not None:
            lines.append(_attention_line(way))
        for line in lines:
            print(line, flush=True)
    if way is None:  # nothing could be tried: as most models take it
        wanted = candidates(exp, plan, device)[0] if layout == "packed" else "sdpa"
        way = _untried(exp, config, wanted, layout)
    return way


def common_layout(exp: Experiment, answers: list[Answer]) -> str:
    """``packed`` or ``padded``, for all hosts; ConfigError where neither is right."""
    for answer in answers:
        if answer.why_not_trained:
            raise ConfigError(
                f"{exp.model.path or exp.model.name or exp.model.kind} cannot be trained here: "
                f"{answer.why_not_trained}. Choose a causal language model."
            )
    wanted = exp.data.layout
    if wanted == "padded":
        return wanted
    refused = [answer for answer in answers if not answer.packed and not answer.unknown]
    if wanted == "packed":
        if refused:
            raise ConfigError(
                f"data.layout=packed is not right for this model: {refused[0].why_not_packed}. "
                "Set data.layout=auto (or padded)."
            )
        return wanted
    return "packed" if all(answer.packed for answer in answers) else "padded"


def told(exp: Experiment, answer: Answer, layout: str) -> list[str]:
    """What a reader of the log should know: why packing is off, that nothing was tried."""
    if answer.unknown:
        return [f"Rows are {layout}; whether that is right for this model is not known: "
                f"{answer.unknown}."]  # fmt: skip
    if exp.data.layout == "auto" and layout == "padded":
        why = answer.why_not_packed or "another host of the run cannot pack them"
        return [f"Rows are not packed (data.layout=auto): {why}."]
    return []


def _attention_line(way: Way) -> str:
    line = f"Attention of this device: {way.implementation}, told by {way.told_by}"
    if way.layout == "packed" and way.implementation in PLAIN:
        line += (
            ". WARNING: packed rows are isolated by a dense mask here, since no kernel without one "
            "is right for this model: slow, and kept for each layer. data.layout=padded needs none"
        )
    return f"{line}."


def answer(exp: Experiment, plan: Plan, config: Any, *, device: torch.device) -> Answer:
    """What the trials on this host say."""
    options = {
        "seq_len": exp.data.seq_len,
        "trust_remote_code": exp.model.trust_remote_code,
    }
    found = Answer(None, None)
    if exp.data.layout != "padded":
        why, unknown = "", None
        for name in candidates(exp, plan, device):
            where = _where(name, plan, device)
            found = find_ways(
                config, implementations=[name], layouts=["packed"], **where, **options
            )
            if found.packed or found.why_not_trained:
                return found
            if found.unknown:  # with heads as wide as the model's; the next may be tried without
                unknown = unknown or found
            elif _says_more(found.why_not_packed, why):
                why = found.why_not_packed
        if unknown:
            return unknown
        found = Answer(None, None, why_not_packed=why)
        if exp.data.layout == "packed":
            return found
    for name in padded_candidates(exp):
        where = _where(name, plan, device)
        padded = find_ways(config, implementations=[name], layouts=["padded"], **where, **options)
        if padded.padded or padded.unknown:
            break
    return Answer(None, padded.padded, found.why_not_packed, padded.why_not_trained, padded.unknown)


def _says_more(new: str, old: str) -> bool:
    """A row that changes says more than a kernel that does not run."""
    return not old or new.startswith("the loss of a row")


def candidates(exp: Experiment, plan: Plan, device: torch.device) -> list[str]:
    """Implementations of attention for packed rows on this device, the preferred one first."""
    chosen = exp.model.attention
    if chosen != "auto":
        return [_possible(IMPLEMENTATIONS.get(chosen, chosen), chosen, device)]
    if device.type != "cuda":
        return list(PLAIN)
    first = IMPLEMENTATIONS.get(plan.attention_on(_device_name(plan)), SEGMENTS)
    found = [first] if first == VARLEN and _has_varlen(device) else []
    if first == VARLEN:
        found += [name for name in ("flash_attention_3", "flash_attention_2") if _installed(name)]
        found.append("flex_attention")
    return [*found, SEGMENTS, *PLAIN]


def padded_candidates(exp: Experiment) -> list[str]:
    """Implementations for rows in lines of their own, which need no mask."""
    return [exp.model.attention] if exp.model.attention in PLAIN else list(PLAIN)


def _device_name(plan: Plan) -> str:
    return plan.ranks[int(os.environ.get("RANK", "0"))].device


def _possible(name: str, chosen: str, device: torch.device) -> str:
    """``name``; ConfigError where it cannot run on this device or is not installed."""
    if name in ON_CUDA and device.type != "cuda":
        # Flex attention has no backward pass on a CPU (torch 2.13 fails while it compiles one).
        raise ConfigError(
            f"model.attention={chosen} trains on CUDA only, this run is on {device.type}. "
            "Set model.attention=auto."
        )
    if name.startswith("flash_attention") and not _installed(name):
        raise ConfigError(
            f"model.attention={chosen} needs the package flash-attn, which is not installed on "
            "this host. Set model.attention=varlen (PyTorch's own kernel), or auto."
        )
    if name == VARLEN and not _has_varlen(device):
        raise ConfigError(
            f"model.attention={chosen} needs PyTorch 2.10 or newer and a GPU of compute capability "
            "8.0 or higher. Set model.attention=auto."
        )
    return name


def _installed(name: str) -> bool:
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    return importlib.util.find_spec(package[name]) is not None


def _has_varlen(device: torch.device) -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _where(name: str, plan: Plan, device: torch.device) -> dict[str, Any]:
    """Device and dtype of a trial: the CPU in fp32 shows the most, but for kernels of CUDA."""
    if name not in ON_CUDA:
        return {}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return {"device": device, "dtype": dtypes[plan.precision], "real_heads": True}


def _untried(exp: Experiment, config: Any, implementation: str, layout: str) -> Way:
    """The way that most models take, by the arguments of the forward."""
    if layout == "packed":
        return ways(implementation, layout)[0]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or takes(model, "position_ids"):
        return Way(implementation, "positions", layout)
    return Way(implementation, "padding", layout)
