"""Precision: what the weakest device of the run supports, and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from llmx.config.schema import DeviceConfig
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


def _best(hosts_by_device: Mapping[str, list[str]], devices: Mapping[str, DeviceConfig]) -> str:
    used = [devices[name] for name in hosts_by_device]
    if any(device.accelerator == "cpu" for device in used):
        return "fp32"
    for precision in ("bf16", "fp16"):
        if all(precision in device.precisions for device in used):
            return precision
    return "fp32"
