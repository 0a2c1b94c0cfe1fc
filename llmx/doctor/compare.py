"""What keeps hosts from training together, seen in their surveys. Pure.

Errors stop the launch with the fix; warnings are shown and the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmx.config.schema import Experiment
from llmx.plan.types import Plan

MIB, GIB = 1024**2, 1024**3
BUILT = ("cpu_adam", "fused_adam")
"""Optimizers that DeepSpeed compiles on each host."""
CLOCK_S = 5.0
"""A difference of clocks that makes logs of hosts hard to read side by side."""


@dataclass(frozen=True)
class Findings:
    """Whole sentences for the user."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def compare_hosts(
    exp: Experiment,
    plan: Plan,
    surveys: Mapping[str, dict[str, Any]],
    *,
    offsets_s: Mapping[str, float] | None = None,
) -> Findings:
    """Judge the surveys of the hosts, by name, in hostfile order.

    ``offsets_s``: each host's clock minus the supervisor's, seconds.
    """
    errors, warnings = _versions(surveys)
    codes = {name: str(facts.get("code")) for name, facts in surveys.items()}
    # With rsync the code comes after the survey.
    if exp.launch.sync != "rsync" and len(set(codes.values())) > 1:
        errors.append(
            f"The code of llmx differs between hosts: {_by_value(codes)}. Install the same on all "
            "of them, or set launch.sync=rsync, which brings it."
        )
    for name, facts in surveys.items():
        more_errors, more_warnings = _host(exp, plan, name, facts)
        errors += more_errors
        warnings += more_warnings
    for name, offset_s in (offsets_s or {}).items():
        if abs(offset_s) > CLOCK_S:
            warnings.append(
                f"{name}: its clock is {offset_s:+.0f} s off; start chrony or ntpd there."
            )
    return Findings(tuple(errors), tuple(warnings))


def _versions(surveys: Mapping[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    errors, warnings = [], []
    pythons = {name: facts["python"].rsplit(".", 1)[0] for name, facts in surveys.items()}
    if len(set(pythons.values())) > 1:
        errors.append(f"Python differs between hosts: {_by_value(pythons)}. Install one version.")
    packages = sorted({package for facts in surveys.values() for package in facts["packages"]})
    for package in packages:
        versions = {name: facts["packages"].get(package) for name, facts in surveys.items()}
        if len(set(versions.values())) > 1:
            line = (
                f"{package} differs between hosts: {_by_value(versions)}. Install the same "
                "everywhere (pip install -c constraints.txt ...)."
            )
            (errors if package in ("torch", "deepspeed") else warnings).append(line)
    nccl = {name: ", ".join(facts["nccl"]) or "none" for name, facts in surveys.items()}
    if len(set(nccl.values())) > 1:
        errors.append(
            f"NCCL differs between hosts: {_by_value(nccl)}. Ranks with different NCCL fail at the "
            "first collective; install the same torch everywhere."
        )
    return errors, warnings


def _host(
    exp: Experiment, plan: Plan, name: str, facts: dict[str, Any]
) -> tuple[list[str], list[str]]:
    errors, warnings = [], []
    slots = sum(host.slots for host in plan.hosts if host.name == name)
    if plan.accelerator == "cuda" and (facts["gpus"] or 0) < slots:
        errors.append(
            f"{name}: slots={slots}, but its NVIDIA driver has {facts['gpus'] or 'no'} GPUs. Set "
            "slots to what is there."
        )
    if len(facts["nccl"]) > 1:
        errors.append(
            f"{name}: several NCCL builds are installed ({', '.join(facts['nccl'])}); torch loads "
            "one of them by chance. Uninstall the one that is not torch's (pip uninstall)."
        )
    needs_build = exp.optim.kind in BUILT
    if needs_build and not (facts["ninja"] and facts["compiler"]):
        missing = "ninja (pip install ninja)" if not facts["ninja"] else "g++ (apt install g++)"
        errors.append(
            f"{name}: optim.kind={exp.optim.kind} is compiled on each host, and this one lacks "
            f"{missing}. Install it, or set optim.kind=adamw."
        )
    if facts["stale_locks"]:
        line = (
            f"{name}: a build of an extension was left unfinished ({facts['stale_locks'][0]}); "
            'ranks would wait for it at "Loading extension module". Remove the lock.'
        )
        (errors if needs_build else warnings).append(line)
    if facts["free_bytes"] < GIB:
        warnings.append(
            f"{name}: {facts['free_bytes'] / GIB:.1f} GiB free on the disk of the run directory."
        )
    if plan.accelerator == "cuda" and 0 < facts["shm_bytes"] < 512 * MIB:
        warnings.append(
            f"{name}: /dev/shm has {facts['shm_bytes'] // MIB} MiB; NCCL between GPUs of a host "
            "may fail there. In a container: --shm-size=8g or --ipc=host."
        )
    if 0 <= facts["open_files"] < 4096:
        warnings.append(
            f"{name}: at most {facts['open_files']} open files a process (ulimit -n); data "
            'workers may fail with "Too many open files". Raise it to 65536.'
        )
    return errors, warnings


def _by_value(values: Mapping[str, Any]) -> str:
    """``2.13.0 on a, b; 2.9.1 on c``."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(str(value), []).append(name)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
