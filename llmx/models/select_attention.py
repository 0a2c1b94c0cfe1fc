"""Selects attention and layout: tried on every host at the start, the same layout for all.

``data.layout=auto`` packs rows where it is shown that they are then isolated, and pads them
everywhere else. Each type of device has the attention that suits it. Shown by
``python -m pytest tests/unit/test_train_select_attention.py``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from llmx.collectives import all_gather
from llmx.config import DataConfig, ModelConfig
from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod
from llmx.models.factory import DTYPES
from llmx.models.isolation import TrialResult, find_methods
from llmx.models.loss import takes
from llmx.models.model import CAUSAL_LM, CLASSIFICATION, MASKED_LM
from llmx.models.pooling import pools_itself
from llmx.models.varlen import (
    IMPLEMENTATIONS,
    SEGMENTS,
    VARLEN,
    has_kernel,
    name_of_attention,
    register,
)
from llmx.plan.types import Plan

ON_CUDA = (VARLEN, "flash_attention_3", "flash_attention_2", "flex_attention")
"""Implementations without a kernel, or a backward pass, on a CPU; the preferred one first."""
PLAIN = ("sdpa", "eager")


def select_attention(
    model: ModelConfig,
    data: DataConfig,
    plan: Plan,
    config: Any,
    *,
    device: torch.device,
    head: str = CAUSAL_LM,
) -> AttentionMethod:
    """The method of this rank, for a network with this ``head``. Collective; ConfigError, on all
    ranks, where there is none."""
    register()  # also where nothing is tried: the model is then built with what the others found
    trial, problem = None, None
    # One rank a host tries: the others have the same packages and devices.
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        try:
            trial = try_on_this_host(model, data, plan, config, device=device, head=head)
        except ConfigError as error:
            problem = str(error)
    by_rank = all_gather((trial, problem))
    for rank, (_, refusal) in enumerate(by_rank):
        if refusal:
            raise ConfigError(f"Host {plan.hosts[plan.ranks[rank].host].name}: {refusal}")
    by_host = {plan.ranks[rank].host: result for rank, (result, _) in enumerate(by_rank) if result}
    layout = common_layout(model, data, list(by_host.values()), head=head)
    host_result = by_host[plan.ranks[torch.distributed.get_rank()].host]
    if torch.distributed.get_rank() == 0:
        for line in log_lines(data, plan, by_host, layout):
            print(line, flush=True)
    if layout == "padded" and host_result.packed is not None:
        # Another host cannot pack them, and the trial of this one has stopped at packed rows.
        host_result = try_layouts(model, data, config, packing=(), head=head)
        common_layout(model, data, [host_result], head=head)
    method: AttentionMethod | None = getattr(host_result, layout)
    return method or _untried(config, head)


def common_layout(
    model: ModelConfig, data: DataConfig, results: Sequence[TrialResult], *, head: str = CAUSAL_LM
) -> str:
    """``packed`` or ``padded``, for all hosts; ConfigError where neither is right."""
    for result in results:
        if result.why_not_trained:
            other = "a causal language model" if head == CAUSAL_LM else "another architecture"
            raise ConfigError(
                f"{model.path or model.name or model.kind} cannot be trained here: "
                f"{result.why_not_trained}. Choose {other}."
            )
    if data.layout == "padded":
        return "padded"
    refused = [result for result in results if not result.packed]
    if refused and data.layout == "packed":
        raise ConfigError(
            f"data.layout=packed cannot be used with this model: {refused[0].why_not_packed}. "
            "Set data.layout=auto (or padded)."
        )
    return "padded" if refused else "packed"


def log_lines(
    data: DataConfig, plan: Plan, by_host: dict[int, TrialResult], layout: str
) -> list[str]:
    """Lines for the log: why packing is off, what could not be tried, and the attention of each
    type of GPU."""
    lines = []
    unknown = next((result.unknown for result in by_host.values() if result.unknown), "")
    refused = [(host, result) for host, result in by_host.items() if not result.packed]
    if data.layout == "auto" and refused:
        host, result = refused[0]
        where = "" if len(refused) == len(by_host) else f" on host {plan.hosts[host].name}"
        lines.append(f"Rows are not packed (data.layout=auto){where}: {result.why_not_packed}.")
    elif unknown:
        lines.append(
            f"Rows are padded. Whether this model is right with it is not known: {unknown}."
        )
    pairs = {
        (plan.ranks[rank.rank].device, method)
        for rank in plan.ranks
        if (method := getattr(by_host.get(rank.host), layout, None)) is not None
    }
    if plan.on_gpus:
        lines += [_attention_line(*pair) for pair in sorted(pairs, key=str)]
    return lines


def _attention_line(device: str, method: AttentionMethod) -> str:
    line = f"Attention on {device}: {name_of_attention(method.implementation)}"
    if method.layout == "packed" and method.implementation in PLAIN:
        line += (
            ". WARNING: packed rows are isolated by a dense mask here, since no kernel without one "
            "is right for this model: slow, and kept for each layer. data.layout=padded needs none"
        )
    return f"{line}."


def try_on_this_host(
    model: ModelConfig,
    data: DataConfig,
    plan: Plan,
    config: Any,
    *,
    device: torch.device,
    head: str = CAUSAL_LM,
) -> TrialResult:
    """The result of the trials on this host."""
    packing = candidates(model.attention, plan, device) if data.layout != "padded" else ()
    on_cuda = {"device": device, "dtype": DTYPES[plan.precision], "real_heads": True}
    return try_layouts(model, data, config, packing=packing, on_cuda=on_cuda, head=head)


def try_layouts(
    model: ModelConfig,
    data: DataConfig,
    config: Any,
    *,
    packing: Sequence[str],
    on_cuda: Mapping[str, Any] | None = None,
    head: str = CAUSAL_LM,
) -> TrialResult:
    """Packed rows with each implementation of ``packing``, until one is right; else padded ones.
    Trials are made on the CPU, in fp32, which shows the most; those of ``ON_CUDA`` as ``on_cuda``
    says.

    A trial that could not be made (``unknown``) does not end the search, and never allows packing:
    rows are packed where isolation was shown. A leak that was shown says more than it.
    """
    options: dict[str, Any] = {
        "seq_len": data.seq_len,
        "trust_remote_code": model.trust_remote_code,
        "head": head,
    }
    why = unknown = ""
    if head == CLASSIFICATION and (
        name := pools_itself(config, trust_remote_code=model.trust_remote_code)
    ):
        packing, why = (), f"{name} pools a sequence in its own way, one sequence a line"
    for needs_cuda, names in groupby(packing, key=ON_CUDA.__contains__):
        where = on_cuda if needs_cuda and on_cuda else {}
        trial = find_methods(
            config, implementations=list(names), layouts=["packed"], **where, **options
        )
        if trial.packed or trial.why_not_trained:
            return trial
        unknown = unknown or trial.unknown
        if not why or trial.leaks:
            why = trial.why_not_packed
    if not why and unknown:
        why = f"it could not be shown that rows are then isolated: {unknown}"
    if data.layout == "packed":
        return TrialResult(why_not_packed=why)
    padded = find_methods(
        config,
        # In lines of their own, which need no mask.
        implementations=[model.attention] if model.attention in PLAIN else PLAIN,
        layouts=["padded"],
        **options,
    )
    return dataclasses.replace(padded, why_not_packed=why)


def candidates(attention: str, plan: Plan, device: torch.device) -> list[str]:
    """Implementations of attention for packed rows on this device, the preferred one first."""
    if attention != "auto":
        implementation = IMPLEMENTATIONS.get(attention, attention)
        if problem := _problem(implementation, device):
            raise ConfigError(f"model.attention={attention} {problem}")
        return [implementation]
    if device.type != "cuda":
        return list(PLAIN)
    device_name = plan.ranks[int(os.environ.get("RANK", "0"))].device
    has_flash = plan.attention_on(device_name) == "varlen"
    kernels = [name for name in ON_CUDA if has_flash and not _problem(name, device)]
    return [*kernels, SEGMENTS, *PLAIN]


def _problem(implementation: str, device: torch.device) -> str | None:
    """Why an implementation of attention cannot run on this device; None where it can."""
    if implementation in ON_CUDA and device.type != "cuda":
        # Flex attention has no backward pass on a CPU (torch 2.13 fails while it compiles one).
        return f"trains on CUDA only, this run is on {device.type}. Set model.attention=auto."
    if implementation.startswith("flash_attention") and not _installed(implementation):
        return (
            "needs the package flash-attn, which is not installed on this host. Set "
            "model.attention=varlen (PyTorch's own kernel), or auto."
        )
    too_old = implementation == VARLEN and torch.cuda.get_device_capability(device) < (8, 0)
    if implementation == VARLEN and (too_old or not has_kernel()):
        return (
            f"needs PyTorch 2.12 or newer (here: {torch.__version__}) and a GPU of compute "
            "capability 8.0 or higher. Set model.attention=auto."
        )
    return None


def _installed(name: str) -> bool:
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    return importlib.util.find_spec(package[name]) is not None


def _untried(config: Any, head: str) -> AttentionMethod:
    """The method for padded rows if nothing could be tried: that of most models with these
    arguments of the forward."""
    if head == MASKED_LM:
        return AttentionMethod("sdpa", "padding_mask", "padded", causal=False)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    takes_positions = model is None or takes(model, "position_ids")
    return AttentionMethod("sdpa", "position_ids" if takes_positions else "padding_mask", "padded")
