"""The rules of the ``adapter`` group that need no network: names and values.

Which modules a network has is asked where it is known: ``llmx.plan.adapter`` for the
architectures that are planned, ``llmx.models.adapter`` for every other one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from llmx.config.build import shown
from llmx.config.schema import ALL_LINEAR, AdapterConfig, ModelConfig, ZeroConfig
from llmx.errors import did_you_mean


def is_named(module: str, target: str) -> bool:
    """Whether ``target`` is this module's dotted name, or the end of it."""
    return module == target or module.endswith(f".{target}")


def matching(modules: Iterable[str], targets: Iterable[str]) -> list[str]:
    """The modules that one of ``targets`` names, in their order."""
    targets = list(targets)
    return [name for name in modules if any(is_named(name, target) for target in targets)]


def short_names(modules: Iterable[str]) -> list[str]:
    """The last parts of dotted names, each once, in their order: what a user would type."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))


def no_such_module(key: str, target: str, modules: Iterable[str], what: str) -> str:
    """The message for a name that no module has. ``what``: those of ``modules``, in words."""
    names = short_names(modules)
    near = did_you_mean(target.rpartition(".")[2][:100], names)
    return (
        f"{key}: {shown(target)} names no {what} of the model.{near} It has "
        f"{', '.join(names[:40])}{', ...' if len(names) > 40 else ''}."
    )


def output_head_target(target: str) -> str:
    """The message for the output head among the targets: it sees the target positions only, fused
    with the loss, and is often the embedding as well."""
    return (
        f"adapter.targets: {target} is the output head, which is not adapted. Train it whole with "
        f"adapter.modules_to_save=[{target}], or leave it out."
    )


def adapter_problems(adapter: AdapterConfig, model: ModelConfig) -> Iterator[str]:
    """One message for each broken rule between the fields."""
    if adapter.kind == "none":
        yield from _without_effect(adapter)
        return
    if model.init == "scratch":
        yield (
            f"adapter.kind={adapter.kind} with model.init=scratch: an adapter is trained beside "
            "pretrained weights, and random ones are kept nowhere. Set model=hf and model.path "
            "(the model/ of a run of yours will do), or adapter=none."
        )
    if not adapter.targets:
        yield (
            "adapter.targets is empty: nothing would be adapted. Set "
            f"adapter.targets=[{ALL_LINEAR}], or names of linear layers as [q_proj, v_proj]."
        )
    if ALL_LINEAR in adapter.targets and len(adapter.targets) > 1:
        yield (
            f"adapter.targets: {ALL_LINEAR} stands beside other names. Leave it alone in the list, "
            "or leave it out."
        )
    both = [name for name in adapter.modules_to_save if name in adapter.targets]
    if both:
        yield (
            f"adapter.modules_to_save: {both[0]} is one of adapter.targets, too: it is adapted or "
            "trained whole. Take it out of one of them."
        )
    if model.freeze:
        yield (
            f"model.freeze={shown(model.freeze)} beside adapter.kind={adapter.kind}, which "
            "freezes the whole model. Leave model.freeze out."
        )


def quantize_problems(
    adapter: AdapterConfig, model: ModelConfig, zero: ZeroConfig, accelerators: Collection[str]
) -> Iterator[str]:
    """One message for each reason why frozen weights cannot be kept in 4 bits."""
    if "none" in (adapter.kind, adapter.quantize):
        return
    key = f"adapter.quantize={adapter.quantize}"
    if "cpu" in accelerators:
        yield (
            f"{key} trains on CUDA only: the kernels of bitsandbytes that unpack 4-bit weights "
            "fast are those for GPUs. Use adapter=lora on CPUs."
        )
    if zero.stage == 3:
        yield (
            f"{key} with zero.stage=3: ZeRO-3 shards parameters of the dtype of the run, and "
            "packed 4-bit weights are none; every rank would hold them whole all the same. Set "
            "zero=stage2, which shards the optimizer; or adapter=lora, whose 16-bit base "
            "zero=stage3 shards."
        )
    if model.compile:
        yield f"{key} with model.compile=true has not been tried. Set model.compile=false."
    kind = model.config.get("model_type", model.kind) if model.kind == "hf" else model.kind
    if kind == "gpt2":
        yield (
            f"{key}: the layers of a GPT-2 are stored transposed, and are not quantized. Use "
            "adapter=lora."
        )


def _without_effect(adapter: AdapterConfig) -> Iterator[str]:
    """An adapter that was described and not switched on."""
    plain = AdapterConfig()
    for field in dataclasses.fields(AdapterConfig):
        value = getattr(adapter, field.name)
        if field.name != "kind" and value != getattr(plain, field.name):
            yield (
                f"adapter.{field.name}={shown(value)} has no effect with adapter.kind=none. Add "
                "adapter=lora, or leave it out."
            )
