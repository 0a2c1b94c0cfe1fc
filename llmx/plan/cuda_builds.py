"""Which build of torch runs on which GPUs, and with which driver. Pure: versions in, sentences out.

A build of torch has machine code for some compute capabilities (``torch.cuda.get_arch_list()``),
and its CUDA version needs a driver of some age. PyPI has one build a version; the others are in
PyTorch's own indices. Table: https://github.com/pytorch/pytorch/blob/main/RELEASE.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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


INDICES = (Index("cu130", 13, 7.5, 12.1), Index("cu126", 12, 5.0, 9.0))
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
    """``570`` of ``570.86.15``."""
    match = re.match(r"(\d{3})\.", driver or "")
    return int(match[1]) if match else None


def advice(capabilities: Sequence[float], drivers: Sequence[int]) -> str:
    """What to install so that one torch runs on all of these GPUs with these drivers."""
    listed = ", ".join(f"{each:g}" for each in sorted(set(capabilities)))
    fitting = [
        index
        for index in INDICES
        if all(index.oldest <= each <= index.newest for each in capabilities)
    ]
    now = [each for each in fitting if all(branch >= DRIVERS[each.cuda] for branch in drivers)]
    if now:
        return (
            "On every host of the run install torch from one index: pip install torch "
            f"--index-url {INDEX}{now[0].name}"
        )
    if fitting:
        least = DRIVERS[fitting[0].cuda]
        return (
            f"Install NVIDIA driver {least} or newer, and on every host of the run: pip install "
            f"torch --index-url {INDEX}{fitting[0].name}"
        )
    return (
        f"No build of torch has code for all GPUs of this run (compute capabilities {listed}): "
        "leave out the hosts of one kind."
    )


def problems(hosts: Mapping[str, Mapping[str, object]]) -> list[str]:
    """What keeps torch from the GPUs of these hosts. Facts of a host, by its name:

    ``capabilities``: of its GPUs; ``driver``: e.g. ``570.86.15``; ``torch``, ``cuda``: versions of
    torch and of the CUDA it is built for; ``arch_list``; ``works``: torch could use a GPU there.
    What is not known is left out.
    """
    capabilities = [each for facts in hosts.values() for each in _floats(facts, "capabilities")]
    drivers = [
        branch for facts in hosts.values() if (branch := driver_branch(_text(facts, "driver")))
    ]
    found = []
    for name, facts in hosts.items():
        torch, cuda = _text(facts, "torch"), _text(facts, "cuda")
        needed, branch = least_driver(cuda), driver_branch(_text(facts, "driver"))
        if torch and not cuda and capabilities:
            found.append(
                f"{name}: torch {torch} is built without CUDA. {advice(capabilities, drivers)}"
            )
        # NVIDIA's package of forward compatibility (cuda-compat, in most containers) lets an older
        # driver run it.
        if needed and branch and branch < needed and not facts.get("works"):
            found.append(
                f"{name}: NVIDIA driver {facts['driver']} is too old for torch {torch}, which is "
                f"built for CUDA {cuda} and needs driver {needed}. Install a newer driver there. "
                f"Or: {advice(capabilities, drivers)}"
            )
        archs = [str(arch) for arch in _list(facts, "arch_list")]
        lacking = sorted(
            {each for each in _floats(facts, "capabilities") if not has_code_for(each, archs)}
        )
        if archs and lacking:
            found.append(
                f"{name}: torch {torch} (CUDA {cuda}) has no code for its GPUs: their compute "
                f"capability is {', '.join(f'{each:g}' for each in lacking)}, torch has "
                f"{', '.join(archs)}. {advice(capabilities, drivers)}"
            )
    return found


def _text(facts: Mapping[str, object], key: str) -> str | None:
    value = facts.get(key)
    return str(value) if value else None


def _list(facts: Mapping[str, object], key: str) -> list[object]:
    value = facts.get(key)
    return list(value) if isinstance(value, list | tuple) else []


def _floats(facts: Mapping[str, object], key: str) -> list[float]:
    return [float(each) for each in _list(facts, key) if isinstance(each, int | float) and each > 0]
