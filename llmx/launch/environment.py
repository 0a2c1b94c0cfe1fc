"""The environment of the ranks: per run, allow-listed, without secrets.

DeepSpeed forwards only names beginning with ``PYTHON``, ``MLFLOW``, ``MV2``, ``UCX`` (and
``NCCL`` on CUDA) to other hosts; everything else must stand in the file that ``DS_ENV_FILE``
names. That file becomes part of a command line which every user of every host can read
with ``ps``, so nothing secret may ever enter it.

Two sources: names *written in the config* (``hardware.env``, ``launch.env``), and
allow-listed names of the environment llmx was started in. ``cat RUN_DIR/ds_env`` shows the
result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from llmx.errors import ConfigError
from llmx.launch.spec import LaunchSpec
from llmx.text import CONTROL, SURROGATES

COPIED_PREFIXES = (
    "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "CUDA_", "OMP_", "MKL_",
    "KMP_", "GOMP_", "DS_", "UCX_", "OMPI_MCA_", "FI_", "LLMX_", "PYTHON",
)  # fmt: skip
COPIED_NAMES = frozenset(
    {
        "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_DATASETS_OFFLINE",
        "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "PATH",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME",
        "CC", "CXX", "MAX_JOBS", "NO_COLOR",
    }
)  # fmt: skip
"""Copied from the environment llmx was started in."""

RESERVED = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK",
        "CROSS_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ENV_FILE", "DS_ACCELERATOR",
        "LLMX_RUN_TOKEN", "CUDA_VISIBLE_DEVICES", "PDSH_RCMD_TYPE", "PDSH_SSH_ARGS_APPEND",
    }
)  # fmt: skip
"""Set by the launch itself: in a config they would be overruled or break the run."""

LAUNCHER_NAMES = frozenset(
    {
        "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "SSH_AUTH_SOCK", "VIRTUAL_ENV",
        "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "MODULEPATH", "OPAL_PREFIX", "LIBRARY_PATH", "CPATH",
    }
)  # fmt: skip
LAUNCHER_PREFIXES = ("LC_", "SLURM_", "PMIX_", "PRTE_", "XDG_RUNTIME", "MUNGE_")
"""What the launcher on this machine needs besides, and which stays on it."""

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|(^|_)(API_?)?KEYS?($|_)|APIKEY|(^|_)AUTH($|_)|^WANDB_"
)
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bAKIA[A-Z0-9]{12,}"
    r"|://[^/\s:@]+:[^/\s@]+@|-----BEGIN"
)
_NOT_SECRET = frozenset({"LLMX_RUN_TOKEN", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ONE_LINE = re.compile(f"[^{CONTROL}{SURROGATES}]*")
_PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)
"""What DeepSpeed passes on without adding double quotes."""


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable looks like a credential, by its name or by its value."""
    if name in _NOT_SECRET:
        return False
    return bool(_SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value))


def check_config_env(env: Mapping[str, str], *, key: str) -> list[str]:
    """Every problem of a config's variables (``key``: ``launch.env`` or ``hardware.env``)."""
    problems: list[str] = []
    for name, value in env.items():
        where = f"{key}.{name}"
        if not _NAME.fullmatch(name):
            problems.append(f"{where}: not the name of a variable; use letters, digits and _.")
        elif is_secret(name, value):
            problems.append(
                f"{where}: looks like a secret, and the variables of the ranks are readable by "
                "every user of every host. Leave it out: W&B and its key stay in the supervisor, "
                "and a gated model is downloaded before the run (set model.path to the directory)."
            )
        elif name in RESERVED:
            problems.append(f"{where}: set by the launch itself; remove it{_instead(name)}.")
        elif not _ONE_LINE.fullmatch(value):
            problems.append(
                f"{where}: has a line break or another control character; one line of text is all "
                "that travels to other hosts."
            )
    return problems


def _instead(name: str) -> str:
    return {
        "MASTER_ADDR": " and set hardware.master_addr",
        "MASTER_PORT": " and set launch.master_port",
        "CUDA_VISIBLE_DEVICES": "; export it before starting llmx (on this machine alone), or set "
        "slots of the host",
    }.get(name, "")


def rank_env(spec: LaunchSpec) -> dict[str, str]:
    """The whole environment that the launch gives to a rank, without a secret.

    Raises ConfigError for a variable of the config that may not travel.
    """
    exp, plan = spec.exp, spec.plan
    problems = check_config_env(exp.hardware.env, key="hardware.env")
    problems += check_config_env(exp.launch.env, key="launch.env")
    if problems:
        raise ConfigError("\n".join(problems))
    env = {
        name: value
        for name, value in spec.environ.items()
        if _is_copied(name)
        and value
        and _NAME.fullmatch(name)
        and _ONE_LINE.fullmatch(value)
        and not is_secret(name, value)
    }
    env.setdefault("OMP_NUM_THREADS", str(_threads(spec)))
    env["PATH"] = _prepended(str(Path(spec.python).parent), env.get("PATH", "/usr/bin:/bin"))
    if spec.code_root is not None:
        env["PYTHONPATH"] = _prepended(spec.code_root, env.get("PYTHONPATH", ""))
    env["PYTHONFAULTHANDLER"] = "1"  # a rank that dies of SIGSEGV says where
    chosen = len(plan.hosts) == 1 or any(host.interface for host in plan.hosts)
    for name, value in _interfaces(spec).items():
        if chosen or name not in env:  # what a user has exported is better than what we found
            env[name] = value
    env.update(exp.hardware.env)
    env.update(exp.launch.env)
    env["DS_ACCELERATOR"] = plan.accelerator
    env["MASTER_ADDR"] = plan.master_addr
    env["MASTER_PORT"] = str(spec.port)
    env["LLMX_RUN_TOKEN"] = spec.token
    return dict(sorted(env.items()))


def launcher_env(spec: LaunchSpec) -> dict[str, str]:
    """What ``deepspeed`` and its launcher need on this machine beside ``rank_env``."""
    return {
        name: value
        for name, value in sorted(spec.environ.items())
        if (name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES))
        and not is_secret(name, value)
    }


def render_ds_env(env: Mapping[str, str], *, shell: bool) -> str:
    """The file of ``DS_ENV_FILE``: ``NAME=value`` a line, nothing else (a blank line crashes it).

    ``shell``: the values are read by a shell on the other host (pdsh), inside the double
    quotes that DeepSpeed adds, so what a shell would expand is escaped here. Without a shell
    (mpirun) those quotes would become part of the value, which is refused.
    """
    lines: list[str] = []
    for name, value in env.items():
        if not _NAME.fullmatch(name) or not _ONE_LINE.fullmatch(value):
            raise ConfigError(
                f"{name[:60]!r}: its value has a line break or another control character, or its "
                "name is not one; it cannot travel to other hosts. Unset it, or change it."
            )
        if not _PLAIN.fullmatch(value):
            if not shell:
                raise ConfigError(
                    f"{name}={value!r}: DeepSpeed passes values over OpenMPI only if they have "
                    "letters, digits and @%+=:,./-_ alone. Change the value, unset it in the "
                    "environment, or use launch.transport=pdsh."
                )
            value = re.sub(r'(["$`\\])', r"\\\1", value)
        if shell:
            value = value.replace("%", "%%")  # pdsh expands %h, %n, %u
        lines.append(f"{name}={value}\n")
    return "".join(lines)


def _is_copied(name: str) -> bool:
    if name in RESERVED:
        return False
    return name in COPIED_NAMES or name.startswith(COPIED_PREFIXES)


def _prepended(first: str, paths: str) -> str:
    """``paths`` with ``first`` at the front, once."""
    rest = [path for path in paths.split(":") if path and path != first]
    return ":".join([first, *rest])


def _threads(spec: LaunchSpec) -> int:
    """OpenMP threads of a rank: the cores shared out, and at most 8 beside a GPU."""
    slots = max(host.slots for host in spec.plan.hosts)
    share = max(1, spec.cores // slots)
    return share if spec.plan.accelerator == "cpu" else min(8, share)


def _interfaces(spec: LaunchSpec) -> dict[str, str]:
    """Which network the ranks talk over.

    On one machine that is the loopback, whatever its host name resolves to. Over several,
    gloo takes one name for all hosts; where they differ, a rank takes its own host's from
    ``LLMX_INTERFACES`` (in the order of the hosts).
    """
    if len(spec.plan.hosts) == 1:
        return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    names = list(spec.interfaces)
    if not names or not all(names):
        return {}
    if len(set(names)) == 1:
        return {"GLOO_SOCKET_IFNAME": str(names[0]), "NCCL_SOCKET_IFNAME": str(names[0])}
    return {"LLMX_INTERFACES": ",".join(str(name) for name in names)}
