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
    if best == "fp32":
        return best, "CPU ranks compute fp32 fastest and exactly"
    lacking = [
        f"{name} ({', '.join(hosts)})"
        for name, hosts in hosts_by_device.items()
        if "bf16" not in devices[name].precisions
    ]
    if best == "fp16":
        return best, f"{' and '.join(lacking)} has no bf16"
    return best, "every device supports it"


def _best(hosts_by_device: Mapping[str, list[str]], devices: Mapping[str, DeviceConfig]) -> str:
    used = [devices[name] for name in hosts_by_device]
    if any(device.accelerator == "cpu" for device in used):
        return "fp32"
    for precision in ("bf16", "fp16"):
        if all(precision in device.precisions for device in used):
            return precision
    return "fp32"
