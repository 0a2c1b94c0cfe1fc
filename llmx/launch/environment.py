"""The environment of the ranks: per run, allow-listed, without secrets.

DeepSpeed forwards only names that begin with ``PYTHON``, ``MLFLOW``, ``MV2``, ``UCX`` (and ``NCCL``
on CUDA) to other hosts; all others come from the file of ``DS_ENV_FILE``. DeepSpeed puts that file
on a command line which every user of every host can read with ``ps``, so it must hold no secret.

There are two sources: variables of the config (``hardware.env``, ``launch.env``), and allow-listed
variables of the environment in which llmx was started. ``cat RUN_DIR/ds_env`` shows the result.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from llmx.config.build import shown
from llmx.config.plugins import TRANSPORTS
from llmx.config.user_code import user_code
from llmx.config.validate import (
    RESERVED,
    env_problems,
    is_one_line,
    is_variable_name,
)
from llmx.errors import ConfigError, LaunchError
from llmx.hardware.detect import HIDES_ALL
from llmx.launch.spec import LaunchSpec
from llmx.plan.threads import threads_per_rank
from llmx.plan.types import HostPlan
from llmx.redact import is_secret
from llmx.rollout.protocol import SERVERS, render_servers
from llmx.text import plural

TOKEN = "LLMX_RUN_TOKEN"
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
"""Copied from the environment in which llmx was started."""

LAUNCHER_NAMES = frozenset(
    {
        "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "SSH_AUTH_SOCK", "VIRTUAL_ENV",
        "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "MODULEPATH", "OPAL_PREFIX", "LIBRARY_PATH", "CPATH",
    }
)  # fmt: skip
LAUNCHER_PREFIXES = ("LC_", "SLURM_", "PMIX_", "PRTE_", "XDG_RUNTIME", "MUNGE_")
"""Needed by the launcher on this machine, and not forwarded to ranks."""

_PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)
"""Values that DeepSpeed forwards without double quotes."""


def rank_env(spec: LaunchSpec, host: int | None = None) -> dict[str, str]:
    """The whole environment that the launch gives to a rank of a host (None: what all of them
    have), without secrets.

    Raises ConfigError for a variable of the config that breaks a rule.
    """
    exp, plan = spec.exp, spec.plan
    configured = [("hardware", exp.hardware.env), ("launch", exp.launch.env)]
    configured += [(host_config.name, host_config.env) for host_config in exp.hardware.hosts]
    if problems := [
        problem
        for name, variables in configured
        for problem in env_problems(variables, key=f"{name}.env")
    ]:
        raise ConfigError("\n".join(problems))
    env = {
        name: value
        for name, value in spec.environ.items()
        if name not in RESERVED
        and (name in COPIED_NAMES or name.startswith(COPIED_PREFIXES))
        and value
        and is_variable_name(name)
        and is_one_line(value)
        and not is_secret(name, value)
    }
    if plan.on_gpus:
        # CUDA counts GPUs by their speed unless it is told to count as nvidia-smi does.
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    python = spec.python if host is None else spec.python_on(host)
    env["PATH"] = _prepended(str(Path(python).parent), env.get("PATH", "/usr/bin:/bin"))
    roots = [str(code.root) for code in user_code(exp.task) if not code.is_installed]
    for root in [*roots, *filter(None, [spec.code_root])]:
        there = root if host is None else spec.path_on(host, root)
        env["PYTHONPATH"] = _prepended(there, env.get("PYTHONPATH", ""))
    env["PYTHONFAULTHANDLER"] = "1"  # a rank that dies of SIGSEGV says where
    chosen = len(plan.hosts) == 1 or any(host.interface for host in plan.hosts)
    for name, value in _interfaces(spec).items():
        if chosen or name not in env:  # an exported one wins over a detected one
            env[name] = value
    env.update(configured_env(spec, host))
    if spec.cores is not None and "OMP_NUM_THREADS" not in env:
        ranks = max(host.slots for host in plan.hosts)
        threads = threads_per_rank(
            exp, plan.accelerator, cores=spec.cores, ranks=ranks, environment=env
        )
        env["OMP_NUM_THREADS"] = str(threads)
    if gpus := gpus_of_hosts(spec):
        env["LLMX_GPUS"] = ":".join(",".join(gpus[host.name]) for host in plan.hosts)
    env["DS_ACCELERATOR"] = plan.accelerator
    address, port = spec.rendezvous(host)
    env["MASTER_ADDR"], env["MASTER_PORT"] = address, str(port)
    env[TOKEN] = spec.token
    if spec.rollout_servers:
        env[SERVERS] = render_servers(spec.rollout_servers)
    return dict(sorted(env.items()))


def configured_env(spec: LaunchSpec, host: int | None) -> dict[str, str]:
    """The variables that the config sets for the ranks of a host."""
    of_host = {} if host is None else spec.host(host).env
    return {**spec.exp.hardware.env, **of_host, **spec.exp.launch.env}


def gpus_of_hosts(spec: LaunchSpec) -> dict[str, list[str]]:
    """The GPUs of the ranks of each host, as CUDA_VISIBLE_DEVICES names them; empty on the CPU, and
    where a scheduler chooses.

    Ranks set the variable themselves (``llmx.worker``), because DeepSpeed's launcher overwrites it
    with 0 to slots - 1, and takes no UUIDs.
    """
    if not spec.plan.on_gpus or TRANSPORTS.load(spec.plan.transport).allocates:
        return {}
    chosen = {host.name: host.gpus for host in spec.exp.hardware.hosts}
    visible = dict(spec.visible_gpus)
    exported = spec.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    for host in spec.plan.hosts:
        if host.is_local and exported:
            visible[host.name] = exported
    return {
        host.name: _gpus_of(host, chosen.get(host.name, []), visible.get(host.name))
        for host in spec.plan.hosts
    }


def _gpus_of(host: HostPlan, chosen: list[str], visible: str | None) -> list[str]:
    """The GPUs of one host. Numbers in ``chosen`` count those that ``visible`` leaves."""
    if visible is None or not all(gpu.isdecimal() for gpu in chosen):
        return chosen or [str(number) for number in range(host.slots)]
    words = [] if visible.strip() in HIDES_ALL else visible.split(",")
    visible_gpus = [word.strip() for word in words if word.strip()]
    numbers = [int(gpu) for gpu in chosen] or list(range(host.slots))
    if max(numbers) >= len(visible_gpus):
        request = f"gpus=[{', '.join(chosen)}] counts" if chosen else f"slots={host.slots} needs"
        raise LaunchError(
            f"{host.name}: CUDA_VISIBLE_DEVICES={shown(visible)} there leaves "
            f"{plural(len(visible_gpus), 'GPU')}, and {request} {max(numbers) + 1}. Unset or "
            "change it there, or set slots and gpus of the host."
        )
    return [visible_gpus[number] for number in numbers]


def launcher_env(spec: LaunchSpec) -> dict[str, str]:
    """Variables that ``deepspeed`` and its launcher need on this machine beside ``rank_env``."""
    return {
        name: value
        for name, value in sorted(spec.environ.items())
        if (name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES))
        and not is_secret(name, value)
    }


def tool_env() -> dict[str, str]:
    """The environment of agents, ssh and rsync: without secrets, which they do not need, without a
    token, since they are not processes of the run, and with messages in English. Not by
    ``LC_ALL=C``: ssh passes it on, and Python then reads ``.pth`` files as ASCII, whatever path is
    in them."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in (TOKEN, "LC_ALL", "LANGUAGE") and not is_secret(name, value)
    } | {"LC_MESSAGES": "C"}


def render_ds_env(env: Mapping[str, str], *, shell: bool, transport: str) -> str:
    """The file of ``DS_ENV_FILE``: lines of ``NAME=value`` (a blank line crashes its reader).

    ``shell``: a shell on the other host reads the values (pdsh), inside the double quotes that
    DeepSpeed adds, so special characters are escaped. Without a shell (mpirun) those quotes would
    become part of the value, so such values are refused.
    """
    lines: list[str] = []
    for name, value in env.items():
        if not is_variable_name(name) or not is_one_line(value):
            raise ConfigError(
                f"{name[:60]!r}: the name is not a valid variable name, or the value has a line "
                "break or another control character. It cannot be passed to other hosts: unset or "
                "change it."
            )
        if not _PLAIN.fullmatch(value):
            if not shell:
                fix = "Change the value, unset it in the environment"
                if name == "PYTHONPATH":  # also the directory of llmx, where pip did not install it
                    fix = "Move that directory to a path of these characters"
                raise ConfigError(
                    f"{name}={value!r}: with launch.transport={transport} DeepSpeed passes only "
                    f"values of letters, digits and @%+=:,./-_. {fix}, or use "
                    "launch.transport=ssh."
                )
            value = re.sub(r'(["$`\\])', r"\\\1", value)
            if value != value.strip():
                value = f'""{value}""'  # DeepSpeed strips it, and adds a quote on both sides
        if shell:
            value = value.replace("%", "%%")  # pdsh expands %h, %n, %u
        lines.append(f"{name}={value}\n")
    return "".join(lines)


def render_exports(env: Mapping[str, str]) -> str:
    """Lines for a shell that set these variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items()))


def _prepended(first: str, paths: str) -> str:
    """``paths`` with ``first`` at the front, once."""
    remaining = [path for path in paths.split(":") if path and path != first]
    return ":".join([first, *remaining])


def _interfaces(spec: LaunchSpec) -> dict[str, str]:
    """The network interfaces of NCCL and gloo.

    On one machine that is the loopback, whatever the host name resolves to. On several hosts, gloo
    takes one name for all; where the names differ, each rank takes that of its own host from
    ``LLMX_INTERFACES`` (in the order of the hosts).
    """
    names = ["lo"] if len(spec.plan.hosts) == 1 else list(spec.interfaces)
    if not names or not all(names):
        return {}
    if len(set(names)) == 1:
        return {"GLOO_SOCKET_IFNAME": str(names[0]), "NCCL_SOCKET_IFNAME": str(names[0])}
    return {"LLMX_INTERFACES": ",".join(str(name) for name in names)}
