"""Which build of torch runs on which GPUs, and with which driver. Pure: versions in, sentences out.

A build of torch has machine code for some compute capabilities (``torch.cuda.get_arch_list()``),
and its CUDA version needs a driver of some age. PyPI has one build a version; the others are in
PyTorch's own indices. Table: https://github.com/pytorch/pytorch/blob/main/RELEASE.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INDEX = "https://download.pytorch.org/whl/"
DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the oldest branch of the driver that runs it
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""


@dataclass(frozen=True)
class Index:
    """One of PyTorch's indices: the GPUs that its newer wheels have code for."""

    name: str
    cuda: int
    oldest: float
    newest: float
    first_torch: tuple[int, int]
    last_torch: tuple[int, int] = (99, 0)

    def command(self, torch: str | None) -> str:
        """The command that installs this build, also over another one. ``torch``: the version that
        is there, kept where the index has it. Without the suffix pip takes any build for satisfied.
        """
        match = re.match(r"(\d+)\.(\d+)\.\d+", torch or "")
        if match is None:
            return f"pip install --force-reinstall torch --index-url {INDEX}{self.name}"
        minor = (int(match[1]), int(match[2]))
        nearest = min(max(minor, self.first_torch), self.last_torch)
        version = match[0] if nearest == minor else f"{nearest[0]}.{nearest[1]}.0"
        return (
            f'pip install --force-reinstall "torch=={version}+{self.name}" '
            f"--index-url {INDEX}{self.name}"
        )


INDICES = (
    Index("cu130", 13, 7.5, 12.1, first_torch=(2, 9)),
    Index("cu126", 12, 5.0, 9.0, first_torch=(2, 6), last_torch=(2, 14)),
)
"""The preferred one first. cu126 is the last that has Volta (V100)."""


def has_code_for(capability: float, arch_list: Iterable[str]) -> bool:
    """Whether a build with this arch list runs on a GPU of this compute capability.

    Machine code (``sm_80``) runs on the same major version from its minor one on; PTX
    (``compute_90``) is compiled by the driver for everything newer.
    """
    major, minor = _version(capability)
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        kind, arch_major, arch_minor = match[1], int(match[2]), int(match[3])
        if match[4] == "a":
            runs = (arch_major, arch_minor) == (major, minor)
        elif kind == "sm":
            runs = arch_major == major and arch_minor <= minor
        else:
            runs = (arch_major, arch_minor) <= (major, minor)
        if runs:
            return True
    return False


def _version(capability: float) -> tuple[int, int]:
    major, _, minor = f"{capability:.1f}".partition(".")
    return int(major), int(minor)


def least_driver(cuda: str | None) -> int | None:
    """The oldest branch of the NVIDIA driver for a CUDA version such as ``13.0``; None: unknown."""
    major = (cuda or "").split(".", 1)[0]
    return DRIVERS.get(int(major)) if major.isdecimal() else None


def driver_branch(driver: str | None) -> int | None:
    """The branch of a driver: 570 of ``570.86.15``; None where it has another form."""
    match = re.match(r"(\d{3})\.", driver or "")
    return int(match[1]) if match else None


def compiles_for(nvcc: str, cuda: str) -> bool:
    """Whether DeepSpeed compiles its extensions with this nvcc for a torch of this CUDA: with the
    same version, or another minor one of those that it lists (``cuda_minor_mismatch_ok`` in
    ``deepspeed/ops/op_builder/builder.py``), which CUDA 13 is not among."""
    versions = [".".join(version.split(".")[:2]) for version in (nvcc, cuda)]
    listed = all(re.fullmatch(r"11\.[0-8]|12\.[0-689]", version) for version in versions)
    return versions[0] == versions[1] or (listed and versions[0][:2] == versions[1][:2])


def requirements(hosts: Iterable[Mapping[str, Any]]) -> tuple[list[float], list[int]]:
    """Compute capabilities of the GPUs and branches of the drivers of all hosts."""
    facts = list(hosts)
    branches = [driver_branch(host.get("driver")) for host in facts]
    return [c for host in facts for c in _capabilities(host)], [b for b in branches if b]


def advice(
    capabilities: Sequence[float], drivers: Sequence[int], *, torch: str | None = None
) -> str:
    """Say what to install so that one torch runs on all of these GPUs with these drivers.
    ``torch``: the version that is installed."""
    fitting = [
        index
        for index in INDICES
        if all(index.oldest <= capability <= index.newest for capability in capabilities)
    ]
    runnable = [
        index for index in fitting if all(branch >= DRIVERS[index.cuda] for branch in drivers)
    ]
    if runnable:
        return f"Run on every host: {runnable[0].command(torch)}"
    if fitting:
        least = DRIVERS[fitting[0].cuda]
        return (
            f"Install NVIDIA driver {least} or newer, and run on every host: "
            f"{fitting[0].command(torch)}"
        )
    listed = ", ".join(f"{capability:g}" for capability in sorted(set(capabilities)))
    return (
        f"No build of torch has code for all GPUs of this run (compute capabilities {listed}): "
        "leave out the hosts of one kind."
    )


def problems(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences about what keeps torch from the GPUs of these hosts. Facts of a host, by its name:

    ``capabilities``: of its GPUs; ``driver``: e.g. ``570.86.15``; ``torch``, ``cuda``: versions of
    torch and of the CUDA it is built for; ``arch_list``; ``works``: torch could use a GPU there.
    What is not known is left out.
    """
    capabilities, drivers = requirements(hosts.values())
    sentences = []
    for name, facts in hosts.items():
        torch, cuda = facts.get("torch"), facts.get("cuda")
        needed, branch = least_driver(cuda), driver_branch(facts.get("driver"))
        fix = advice(capabilities, drivers, torch=torch)
        if torch and not cuda and capabilities:
            sentences.append(f"{name}: torch {torch} is built without CUDA. {fix}")
        # NVIDIA's package of forward compatibility (cuda-compat, in most containers) lets an older
        # driver run it.
        if needed and branch and branch < needed and not facts.get("works"):
            sentences.append(
                f"{name}: NVIDIA driver {facts['driver']} is too old for torch {torch}, which is "
                f"built for CUDA {cuda} and needs driver {needed}. Install a newer driver there. "
                f"Or: {fix}"
            )
        archs = facts.get("arch_list") or []
        lacking = sorted({c for c in _capabilities(facts) if not has_code_for(c, archs)})
        if archs and lacking:
            sentences.append(
                f"{name}: torch {torch} (CUDA {cuda}) has no code for its GPUs: their compute "
                f"capability is {', '.join(f'{missing:g}' for missing in lacking)}, torch has "
                f"{', '.join(archs)}. {fix}"
            )
    return sentences


def _capabilities(facts: Mapping[str, Any]) -> list[float]:
    return [capability for capability in facts.get("capabilities") or [] if capability > 0]
