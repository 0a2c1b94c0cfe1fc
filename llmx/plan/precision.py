"""Precision: what the weakest device of the run supports, and why. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmx.config.schema import DeviceConfig, ZeroConfig
from llmx.errors import ConfigError


def choose_precision(
    wanted: str, hosts_by_device: Mapping[str, list[str]], devices: Mapping[str, DeviceConfig]
) -> tuple[str, str]:
    """``(precision, reason)`` for the device types in use.

    ``hosts_by_device``: device type -> names of the hosts that have it.
    Raises ConfigError when ``wanted`` is not supported by one of them; names the hosts.
    """
    if wanted != "auto":
        for name, hosts in hosts_by_device.items():
            supported = devices[name].precisions
            if wanted not in supported:
                common = _best(hosts_by_device, devices)
                raise ConfigError(
                    f"precision={wanted}: {name} ({', '.join(hosts)}) computes "
                    f"{', '.join(supported)} only. Use precision={common} or precision=auto."
                )
        return wanted, "set by precision="
    best = _best(hosts_by_device, devices)
    if any(devices[name].accelerator == "cpu" for name in hosts_by_device):
        return best, "CPU ranks compute fp32 fastest and exactly"
    if best == "fp32":
        lacking = _without(("bf16", "fp16"), hosts_by_device, devices)
        return best, f"{lacking} computes neither bf16 nor fp16"
    if best == "fp16":
        return best, f"{_without(('bf16',), hosts_by_device, devices)} has no bf16"
    return best, "every device supports it"


def _without(
    precisions: tuple[str, ...],
    hosts_by_device: Mapping[str, list[str]],
    devices: Mapping[str, DeviceConfig],
) -> str:
    """The device types that have none of ``precisions``, with their hosts; where each has one, but
    not the same one, all of them."""
    named = {name: f"{name} ({', '.join(hosts)})" for name, hosts in hosts_by_device.items()}
    lacking = [
        text for name, text in named.items() if not set(precisions) & set(devices[name].precisions)
    ]
    return " and ".join(lacking or named.values())


def choose_grad_accum(
    zero: ZeroConfig, precision: str, *, accumulation: int, fits: Callable[[str], bool]
) -> str:
    """In what gradients are summed over micro steps: ``fp32`` or ``precision``.

    ``fits``: whether the run fits its devices with that. Raises ConfigError for what DeepSpeed
    cannot do.
    """
    wanted, stage = zero.grad_accum_dtype, zero.stage
    if wanted == "auto":
        if precision == "fp32" or stage == 0:
            return precision
        # A single micro step sums nothing; at stage 2 it takes no more memory all the same, since
        # the update needs fp32 anyway.
        useful = accumulation > 1 or stage == 2
        return "fp32" if useful and fits("fp32") else precision
    if wanted == "precision":
        return precision
    if wanted == "fp32" and precision != "fp32" and stage == 0:
        raise ConfigError(
            f"zero.grad_accum_dtype=fp32 with zero.stage=0 and precision={precision}: DeepSpeed "
            f"sums in {precision} at stage 0. Set zero=stage1, or zero.grad_accum_dtype=auto."
        )
    if wanted not in ("fp32", precision):
        raise ConfigError(
            f"zero.grad_accum_dtype={wanted} with precision={precision}: gradients are summed in "
            f"fp32 or in the run's precision. Set zero.grad_accum_dtype=fp32 or =auto."
        )
    return wanted


def _best(hosts_by_device: Mapping[str, list[str]], devices: Mapping[str, DeviceConfig]) -> str:
    used = [devices[name] for name in hosts_by_device]
    if any(device.accelerator == "cpu" for device in used):
        return "fp32"
    for precision in ("bf16", "fp16"):
        if all(precision in device.precisions for device in used):
            return precision
    return "fp32"
