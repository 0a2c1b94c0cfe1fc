"""Whether a run directory may run code: this user started the run, or says ``trust=true``.

A config can name code (a model of its own, a task, a Python on the hosts). llmx signs what a config
names when it writes it (of ``task.code_path`` also the content), with a key in this user's state
directory; what is not signed came from somewhere else, or was changed. ``docs/security.md`` says
what is trusted. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmx.config import Experiment, HostConfig, TaskConfig
from llmx.config.user_code import code_hashes, user_code
from llmx.errors import ConfigError
from llmx.run.rundir import RunDir, read_mapping, write_json

MODEL, TASK, LAUNCH = "model", "task", "launch"


def state_dir() -> Path:
    """Files that this user's llmx keeps: ``$XDG_STATE_HOME/llmx``."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "llmx"


def code_of(exp: Experiment) -> dict[str, list[str]]:
    """Part -> the settings that run code, in words; parts without any are left out."""
    task, launch, hardware = exp.task, exp.launch, exp.hardware
    entry_points = [word for word in (task.kind, *task.eval_metrics) if ":" in word]
    where = f" from {task.code_path} ({_digest(task)})" if entry_points and task.code_path else ""
    values = {
        "launch.python": launch.python,
        "launch.env": launch.env,
        "launch.openmpi_args": launch.openmpi_args,
        "launch.slurm.extra_args": launch.slurm.extra_args,
        "hardware.env": hardware.env,
        "hardware.hosts": [code for host in hardware.hosts if (code := _code_of_host(host))],
        "rollout.servers": [_code_of_host(host) for host in exp.rollout.servers],
    }
    parts = {
        MODEL: ["model.trust_remote_code=true"] if exp.model.trust_remote_code else [],
        TASK: [f"{word}{where}" for word in entry_points],
        LAUNCH: [f"{key}={_shown(value)}" for key, value in values.items() if value],
    }
    return {part: lines for part, lines in parts.items() if lines}


def _code_of_host(host: HostConfig) -> str | dict[str, Any]:
    """The host that ranks are started on, and what is started there beside llmx."""
    keys = ("python", "env", "setup", "enter")
    settings = {key: value for key in keys if (value := getattr(host, key))}
    address = "@".join(filter(None, (host.user, host.address or host.name)))
    return (
        {"host": address, **settings} if settings else "" if host.name == "localhost" else address
    )


def _digest(task: TaskConfig) -> str:
    """A hash of the files of the user's code, so that a signature covers their content."""
    try:
        hashes = code_hashes(*user_code(task))
    except (ConfigError, OSError):
        return "not on this machine"
    return f"sha256 {hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16]}"


def sign(run: RunDir, code: Mapping[str, list[str]]) -> None:
    """Note that this user starts ``run`` with this code. Where no key can be kept, nothing is."""
    key = _key(make=True) if code else None
    if key is None:
        return
    signatures = {part: _signature(key, part, lines) for part, lines in code.items()}
    write_json(run.signature, {**read_mapping(run.signature), **signatures})


def check_trusted(
    run: RunDir, code: Mapping[str, list[str]], *parts: str, trusted: bool, say: str
) -> None:
    """ConfigError where ``run`` names code of these ``parts`` that this user has not signed.

    Args:
        trusted: the user has said so.
        say: the word that says so, for the message.
    """
    checked = {part: code[part] for part in parts if part in code}
    if trusted or not checked:
        return
    key, signatures = _key(make=False), read_mapping(run.signature)
    foreign = [
        line
        for part, lines in checked.items()
        if key is None
        or not hmac.compare_digest(str(signatures.get(part)), _signature(key, part, lines))
        for line in lines
    ]
    if foreign:
        raise ConfigError(
            f"{run.root} was not started by you on this machine, or it or its code was changed. It "
            f"would run code: {', '.join(foreign)}. Look at its config.yaml and at that code, then "
            f"add {say}."
        )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _signature(key: bytes, part: str, lines: list[str]) -> str:
    return hmac.new(key, json.dumps([part, lines]).encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes | None:
    """This user's key; None where there is none, and none can be made."""
    path = state_dir() / "key"
    with contextlib.suppress(OSError):
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"key.{os.getpid()}")
            with os.fdopen(
                os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as out:
                out.write(secrets.token_hex(32).encode())
            with contextlib.suppress(FileExistsError):  # another command was quicker
                os.link(fresh, path)
            fresh.unlink()
        return path.read_bytes() or None
    return None
