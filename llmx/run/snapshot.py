"""Write, load and verify the snapshot of a run: what the ranks read and nothing else.

``config.yaml`` is the whole resolved config. Before anything is launched it is read back and
compared, so a value that YAML or the schema would change cannot slip through.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llmx.config import Experiment, experiment_of_snapshot, to_dict
from llmx.config.schema import FAILURES
from llmx.config.yaml_files import dump_yaml, read_yaml
from llmx.errors import ConfigError, disk_is_full
from llmx.plan.types import Plan
from llmx.run import trust
from llmx.run.provenance import record
from llmx.run.rundir import (
    RunDir,
    load_yaml,
    no_run,
    read_file,
    read_json,
    read_mapping,
    write_json,
    write_text,
)
from llmx.text import one_line


def write(
    exp: Experiment,
    plan: Plan,
    ds_config: dict[str, Any],
    *,
    overrides: list[str],
    environment: Mapping[str, str],
    parent: RunDir | None = None,
) -> RunDir:
    """Write the snapshot into ``exp.run_dir``; refuses a directory that already contains a run.
    One that failed before its first step is put aside.

    ``environment``: of the ranks; ``parent``: the run that this one repeats.
    """
    run = RunDir(Path(exp.run_dir))
    try:
        if run.config.exists():
            if not failed_before_a_step(run):
                raise ConfigError(
                    f"run_dir={run.root} already contains a run; a run is never overwritten. "
                    f"Continue it with python -m llmx resume {shlex.quote(str(run.root))}, or "
                    "choose another directory."
                )
            put_aside(run.root)
        run.root.mkdir(parents=True, exist_ok=True)
        write_identity(run, parent=parent)  # first: a directory with it is of llmx
        write_config(run, exp, plan, ds_config)
        write_text(run.overrides, yaml.safe_dump(overrides, allow_unicode=True))
        values = record(exp, plan, overrides, environment=environment, parent=parent)
        write_provenance(run, values)
    except OSError as error:
        raise _unwritable(run, error) from error
    return run


def failed_before_a_step(run: RunDir) -> bool:
    """Whether the run in a directory is over, and has trained nothing that could be lost."""
    result = read_mapping(run.result)
    if result.get("outcome") not in set(FAILURES) - {"interrupted"} or result.get("steps"):
        return False
    with contextlib.suppress(OSError):
        return run.newest_step() == 0 and '"kind": "train"' not in run.metrics.read_text()
    return True  # without metrics.jsonl


def put_aside(run_dir: Path) -> Path | None:
    """Rename the directory of an attempt that did not end well: ``NAME.attempt-1``, ``-2``, ...
    Where it is now; None where nothing is in it.

    Raises:
        ConfigError: it is not of a run of llmx, or cannot be renamed.
    """
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return None
    if run_id(RunDir(run_dir)) is None:
        raise ConfigError(
            f"{run_dir}: has files, and is no run of llmx (it has no run.json). The run is "
            "written there. Move it away."
        )
    number = 1
    while (target := run_dir.with_name(f"{run_dir.name}.attempt-{number}")).exists():
        number += 1
    try:
        run_dir.rename(target)
    except OSError as error:
        raise ConfigError(
            f"{run_dir}: cannot be renamed ({error.strerror}) to make room for another "
            "attempt. Move it away."
        ) from error
    return target


def _unwritable(run: RunDir, error: OSError) -> ConfigError:
    fix = "Free some space, or set run_dir to another disk."
    if not disk_is_full(error):
        fix = "Set run_dir to a directory where you may write."
    place = one_line(str(run.root), limit=200)
    return ConfigError(f"run_dir={place}: cannot be written ({error.strerror or error}). {fix}")


def write_provenance(run: RunDir, values: Mapping[str, Any]) -> None:
    """``provenance.json``, with the hash of ``config.yaml`` as it is now: an edit is noticed."""
    config = read_mapping(run.config)
    write_json(run.provenance, {**values, "config": hash_of(config) if config else None})


def read_overrides(run: RunDir, damage: list[str] | None = None) -> list[str]:
    """The overrides as typed (``overrides.yaml``); empty where they cannot be read."""
    return list(read_file(run.overrides, damage))


def hash_of(config: Mapping[str, Any]) -> str:
    """32 hexadecimal digits of the values: comments, order and layout do not count."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def write_config(run: RunDir, exp: Experiment, plan: Plan, ds_config: dict[str, Any]) -> None:
    """Write what the ranks read, and compare what reads back; ConfigError where it differs."""
    write_text(run.config, dump_config(exp))
    if load(run) != exp:
        raise ConfigError(
            f"{run.config} does not read back as it was written; a value of the config has no "
            "faithful form in YAML. Values are plain text, numbers, lists and mappings."
        )
    write_json(run.plan, plan.to_dict())
    if Plan.from_dict(read_json(run.plan)) != plan:
        raise ConfigError(f"{run.plan} does not read back as it was written.")
    write_json(run.ds_config, ds_config)
    trust.sign(run, trust.code_of(exp))


def write_identity(run: RunDir, *, parent: RunDir | None = None) -> str:
    """``run.json``: the id that all attempts of this run share; an id that is there stays."""
    identity = run_id(run)
    if identity is None:
        identity = secrets.token_hex(8)
        origin = None if parent is None else run_id(parent) or str(parent.root)
        write_json(run.identity, {"run_id": identity, "created": time.time(), "parent": origin})
    return identity


def run_id(run: RunDir) -> str | None:
    """The id in ``run.json``; None where there is none, or a text that llmx has not made: it
    becomes a part of commands and names."""
    identity = read_mapping(run.identity).get("run_id")
    is_id = isinstance(identity, str) and re.fullmatch(r"[A-Za-z0-9_-]{7,64}", identity)
    return identity if is_id else None


def run_token(run: RunDir) -> str:
    """The secret by which processes of the run are known, the same for all attempts of this user,
    in a file that nobody else can read. It begins with the id: a copy of the directory that gets an
    id of its own gets a secret of its own."""
    path, identity = run.root / f".token-{os.getuid()}", write_identity(run)
    with contextlib.suppress(OSError, ValueError):
        token = path.read_text(encoding="utf-8")
        if re.fullmatch(f"{identity}-[0-9a-f]{{32}}", token):
            return token
    token = f"{identity}-{secrets.token_hex(16)}"
    write_text(path, token, mode=0o600)
    return token


def dump_config(exp: Experiment) -> str:
    """The text of ``config.yaml``: groups in the order of the schema."""
    return dump_yaml(to_dict(exp))


def load(run: RunDir) -> Experiment:
    """Read ``config.yaml`` back; ConfigError where another version of llmx wrote it."""
    if not run.config.is_file():
        raise ConfigError(no_run(run.root))
    try:
        values = load_yaml(run.config)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        read_yaml(run.config)  # says what is wrong, and in which line
        raise ConfigError(f"{run.config}: cannot be read as YAML. Is the file whole?") from error
    return experiment_of_snapshot(values, source=str(run.config))
