"""Write, load and verify the snapshot of a run: what the ranks read and nothing else.

``config.yaml`` is the whole resolved config. Before anything is launched it is read back and
compared, so a value that YAML or the schema would change cannot slip through.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from llmx import __version__
from llmx.config import SCHEMA_VERSION, Experiment, experiment_from_dict, to_dict
from llmx.errors import ConfigError
from llmx.plan.types import Plan
from llmx.rundir import RunDir, read_json, write_json, write_text

PACKAGES = (
    "torch", "deepspeed", "transformers", "datasets", "tokenizers", "accelerate", "safetensors",
    "hydra-core", "omegaconf", "numpy", "wandb",
)  # fmt: skip


def write(
    exp: Experiment, plan: Plan, ds_config: dict[str, Any], *, overrides: list[str]
) -> RunDir:
    """Write the snapshot into ``exp.run_dir``; refuses a directory that holds a run already."""
    run = RunDir(Path(exp.run_dir))
    if run.config.exists():
        raise ConfigError(
            f"run_dir={run.root} holds a run already; a run is never overwritten. Choose another "
            "directory, or move that one away."
        )
    run.root.mkdir(parents=True, exist_ok=True)
    write_text(run.config, dump_config(exp))
    if load(run) != exp:
        raise ConfigError(
            f"{run.config} does not read back as it was written; a value of the config has no "
            "faithful form in YAML. Values are plain text, numbers, lists and mappings."
        )
    write_text(run.overrides, yaml.safe_dump(overrides, allow_unicode=True))
    write_json(run.plan, plan.to_dict())
    if Plan.from_dict(read_json(run.plan)) != plan:
        raise ConfigError(f"{run.plan} does not read back as it was written.")
    write_json(run.ds_config, ds_config)
    write_json(run.provenance, provenance(overrides))
    return run


class _Dumper(yaml.SafeDumper):
    """PyYAML writes Unicode's own line breaks bare, and reads them back as spaces."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_config(exp: Experiment) -> str:
    """The text of ``config.yaml``: groups in the order of the schema."""
    return yaml.dump(to_dict(exp), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def load(run: RunDir) -> Experiment:
    """Read ``config.yaml`` back; ConfigError for a snapshot of a newer llmx."""
    if not run.config.is_file():
        raise ConfigError(f"{run.root} is no run directory: it has no config.yaml.")
    values = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    version = values.get("schema_version") if isinstance(values, dict) else None
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise ConfigError(
            f"{run.config}: schema_version={version}, but this llmx ({__version__}) reads up to "
            f"{SCHEMA_VERSION}. Install the llmx that wrote it, or a newer one."
        )
    return experiment_from_dict(values)


def provenance(overrides: list[str]) -> dict[str, Any]:
    """Where a run comes from: code, packages, machine, and what was typed."""
    return {
        "created": time.time(),
        "overrides": overrides,
        "llmx": __version__,
        "git": git_state(Path(__file__).parent),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": {"node": platform.node(), "system": platform.platform()},
        "packages": {name: _version(name) for name in PACKAGES},
        "nvidia_driver": _nvidia_driver(),
        "parent": None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_driver() -> str | None:
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0].strip() if version.exists() else None


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and the diff of tracked files of the checkout; None outside one."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *args],
                capture_output=True, text=True, timeout=10, check=False, errors="replace",
            )  # fmt: skip
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    # An installed llmx may lie inside somebody else's checkout: only its own code counts.
    tracked = git("ls-files", "--error-unmatch", "snapshot.py")
    if commit is None or tracked is None:
        return None
    return {"commit": commit.strip(), "diff": git("diff", "HEAD") or ""}
