"""Hosts that draw samples instead of training (``rollout.hosts``). Pure.

``python -m llmx plan task=grpo hardware=... rollout.hosts=[node-b]`` applies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmx.config.accelerators import ACCELERATORS
from llmx.config.build import shown
from llmx.config.schema import Experiment, HardwareConfig, RolloutConfig
from llmx.errors import did_you_mean

TRANSPORTS = ("auto", "ssh", "local")
"""With which the supervisor's agents can reach the rollout hosts, and the ranks their variables."""
SILENT_S = 30.0
"""A server that sends nothing for so long is lost."""
HANG_TIMEOUT_S = 600.0
"""The least that ``launch.hang_timeout_s=null`` stands for (``launch.supervision.progress``)."""


def with_rollout_hosts(
    hardware: HardwareConfig, rollout: RolloutConfig
) -> tuple[HardwareConfig, RolloutConfig]:
    """Take the hosts that do not train out of ``hardware.hosts``: they are ``rollout.servers``
    then. Those that are no longer named come back."""
    host_names = {host.name for host in hardware.hosts}
    hosts = [*hardware.hosts, *(host for host in rollout.servers if host.name not in host_names)]
    return (
        replace(hardware, hosts=[host for host in hosts if host.name not in rollout.hosts]),
        replace(rollout, servers=[host for host in hosts if host.name in rollout.hosts]),
    )


def rollout_problems(exp: Experiment) -> Iterator[str]:
    """Every broken rule: value, rule and fix."""
    rollout, launch = exp.rollout, exp.launch
    if not rollout.hosts:
        if rollout.max_staleness:
            yield (
                f"rollout.max_staleness={rollout.max_staleness}: only rollout servers draw ahead, "
                "the ranks draw the samples of a step when they train it. Set rollout.hosts to "
                "hosts that do not train, or rollout.max_staleness=0."
            )
        return
    where = f"rollout.hosts={shown(rollout.hosts)}"
    hang_s, wait_s = launch.hang_timeout_s, SILENT_S + rollout.wait_s
    if 0 < (HANG_TIMEOUT_S if hang_s is None else hang_s) <= wait_s:
        yield (
            f"launch.hang_timeout_s={shown(hang_s)}: where a rollout server is lost the ranks wait "
            f"{wait_s:g} s for its samples (30 s of silence, and rollout.wait_s={rollout.wait_s:g})"
            f", which would count as a hang. Set launch.hang_timeout_s={2 * wait_s:g}, or a "
            "smaller rollout.wait_s."
        )
    names = [host.name for host in rollout.servers]
    trains = [host.name for host in exp.hardware.hosts]
    for name in rollout.hosts:
        if name not in names:
            all_names = [*names, *trains]
            yield (
                f"{where}: {shown(name)} is not in hardware.hosts."
                f"{did_you_mean(name[:100], all_names)} Hosts: {', '.join(all_names) or 'none'}."
            )
    if names and not trains:
        yield f"{where}: then no host is left to train. Leave one of them out."
    kinds = {
        exp.hardware.devices[host.device].accelerator
        for host in rollout.servers
        if host.device in exp.hardware.devices
    }
    if len(kinds) > 1:
        yield f"{where}: CPUs and GPUs do not draw the samples of one run. Name hosts of one kind."
    for kind in kinds - {"cpu"}:
        if not ACCELERATORS[kind].trains:
            yield f"{where}: rollout servers need torch.cuda or a CPU, and accelerator={kind}."
    if launch.transport not in TRANSPORTS or exp.hardware.kind in ("slurm", "external"):
        yield (
            f"{where}: rollout servers are started by llmx's agents over ssh, and here another "
            "program starts the ranks. Use launch.transport=ssh with a hardware file, or leave "
            "rollout.hosts out."
        )
    if exp.model.trust_remote_code:
        yield (
            f"{where}: a rollout server builds the model from its config alone, and "
            "model.trust_remote_code=true needs the repository's code. Leave rollout.hosts out."
        )
    if exp.adapter.kind != "none" and exp.adapter.quantize != "none":
        yield (
            f"{where}: adapter.quantize={exp.adapter.quantize}: rollout servers hold weights in "
            "the precision of the run. Use adapter=lora, or leave rollout.hosts out."
        )
    if rollout.vllm_python and exp.adapter.kind != "none":
        yield (
            f"rollout.vllm_python={shown(rollout.vllm_python)}, adapter={exp.adapter.kind}: vLLM "
            "gets whole models here. Leave one of them out."
        )
    slots = max((host.slots for host in rollout.servers), default=0)
    if rollout.port and rollout.port + slots > 65536:
        yield (
            f"rollout.port={rollout.port}: each slot of a host has the next port, and 65535 is the "
            "last one. Set a lower one."
        )
