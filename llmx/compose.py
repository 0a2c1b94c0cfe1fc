"""From composed values to a complete, validated experiment with its plan.

The one road from a config to a run, used by the command line and by the launcher plugin:
type the values, make the hardware explicit, make local paths absolute, check the rules,
plan. What a snapshot holds is the result, so it means the same on another machine.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.config import Experiment, HardwareConfig, HostConfig, experiment_from_dict
from llmx.config.model_rules import with_floats
from llmx.config.validate import validate
from llmx.doctor.detect import detect_hardware, local_names
from llmx.errors import ConfigError
from llmx.plan import Plan, ds_config, make_plan, model_geometry
from llmx.plan.geometry import position_limit


@dataclass(frozen=True)
class Composed:
    """An experiment ready to be written down and launched."""

    experiment: Experiment
    plan: Plan
    ds_config: dict[str, Any]


def compose(values: dict[str, Any]) -> Composed:
    """Type, complete, validate and plan; raises ConfigError with all that is wrong."""
    exp = complete(experiment_from_dict(values))
    return plan_experiment(exp)


def plan_experiment(exp: Experiment) -> Composed:
    """Validate and plan an experiment that is complete already (a snapshot)."""
    validate(exp, position_limit=position_limit(exp.model.config))
    plan = make_plan(exp, local_names=local_names())
    return Composed(exp, plan, ds_config(exp, plan, model_geometry(exp)))


def complete(exp: Experiment) -> Experiment:
    """Make explicit what the config leaves to this machine: hardware, paths, geometry."""
    hardware = resolve_hardware(exp.hardware)
    zero = exp.zero
    if zero.hpz_partition_size == 0 and hardware.hosts:
        zero = dataclasses.replace(zero, hpz_partition_size=hardware.hosts[0].slots)
    data = dataclasses.replace(
        exp.data,
        path=exp.data.path and _local_source(exp.data.path, "data.path"),
        eval_path=exp.data.eval_path and _local_source(exp.data.eval_path, "data.eval_path"),
        sources=[
            dataclasses.replace(
                source, path=_local_source(source.path, f"data.sources[{index}].path")
            )
            for index, source in enumerate(exp.data.sources)
        ],
        cache_dir=exp.data.cache_dir and str(Path(exp.data.cache_dir).expanduser().absolute()),
    )
    model = dataclasses.replace(
        exp.model,
        path=exp.model.path and _hub_or_local(exp.model.path, "model.path"),
        tokenizer=exp.model.tokenizer and _hub_or_local(exp.model.tokenizer, "model.tokenizer"),
    )
    # Groups bring epochs and warmup_fraction; a user who types steps means steps.
    task, optim = exp.task, exp.optim
    if task.steps is not None:
        task = dataclasses.replace(task, epochs=None)
    if optim.warmup_steps is not None:
        optim = dataclasses.replace(optim, warmup_fraction=None)
    # What a local model says of itself wins over nothing, and loses to what the user set.
    found = _local_model_config(model.path)
    if model.kind == "hf" and found:
        model = dataclasses.replace(model, config={**found, **model.config})
    model = dataclasses.replace(model, config=with_floats(model.config))
    run_dir = os.path.abspath(exp.run_dir) if exp.run_dir else ""
    name = exp.name or (Path(run_dir).name if run_dir else "")
    return dataclasses.replace(
        exp,
        name=name,
        run_dir=run_dir,
        model=model,
        data=data,
        task=task,
        zero=zero,
        hardware=hardware,
        optim=optim,
    )


def check_paths(exp: Experiment, plan: Plan) -> None:
    """Raise ConfigError for an absolute path that is not here, when all ranks are.

    A path of other hosts may be missing on this machine; their agents see to it.
    """
    if not all(host.is_local for host in plan.hosts):
        return
    named = {
        "model.path": exp.model.path,
        "model.tokenizer": exp.model.tokenizer,
        "data.path": None if exp.data.sources else exp.data.path,
        "data.eval_path": exp.data.eval_path,
        **{f"data.sources[{i}].path": part.path for i, part in enumerate(exp.data.sources)},
    }
    missing = [
        f"{where}={path}: no such file or directory on this machine. Give an existing path."
        for where, path in named.items()
        if path
        and Path(path).is_absolute()
        and not glob.has_magic(path)
        and not Path(path).exists()
    ]
    if missing:
        raise ConfigError("\n".join(missing))


def resolve_hardware(hardware: HardwareConfig) -> HardwareConfig:
    """``local`` and ``hostfile`` become a static list of hosts; ``slots`` is applied."""
    if hardware.kind == "local":
        hardware = detect_hardware(hardware)
    elif hardware.kind == "hostfile":
        hardware = _from_hostfile(hardware)
    hosts = [
        dataclasses.replace(host, device=host.device or hardware.device or "")
        for host in hardware.hosts
    ]
    limit = hardware.slots
    if limit is not None and hosts and all(1 <= limit <= host.slots for host in hosts):
        hosts = [dataclasses.replace(host, slots=limit) for host in hosts]
    return dataclasses.replace(hardware, hosts=hosts)


def _from_hostfile(hardware: HardwareConfig) -> HardwareConfig:
    from llmx.launch.hostfile import parse_hostfile

    if not hardware.path:
        raise ConfigError(
            "hardware=hostfile needs hardware.path=/path/to/hostfile (lines: NAME slots=N)."
        )
    if not hardware.device:
        raise ConfigError(
            "hardware=hostfile needs hardware.device=NAME, the device type of its slots; known: "
            f"{', '.join(hardware.devices)}."
        )
    path = Path(hardware.path).expanduser()
    if not path.is_file():
        raise ConfigError(f"hardware.path={hardware.path}: no such file. Give a hostfile's path.")
    hosts = [
        HostConfig(
            name=entry.name,
            slots=entry.slots,
            device=hardware.device,
            ssh_port=hardware.ssh_port,
            user=hardware.user,
            interface=hardware.interface,
        )
        for entry in parse_hostfile(path.read_text(encoding="utf-8"), source=str(path))
    ]
    return dataclasses.replace(hardware, kind="static", hosts=hosts)


def _local_source(path: str, where: str) -> str:
    """Absolute path of a local data source; ``demo`` and Hub ids stay as they are."""
    expanded = str(Path(path).expanduser())
    matches = glob.has_magic(expanded) and any(glob.iglob(expanded, recursive=True))  # noqa: PTH207
    return os.path.abspath(expanded) if matches else _hub_or_local(path, where)


def _hub_or_local(path: str, where: str) -> str:
    if path == "demo":
        return path
    expanded = Path(path).expanduser()
    return os.path.abspath(expanded) if expanded.exists() else _hub_id(path, where)


def _hub_id(path: str, where: str) -> str:
    """A path that is not here: a Hub id, or absolute and perhaps on the hosts only."""
    looks_local = path.startswith(("./", "../", "~")) or path.count("/") > 1
    if looks_local and not Path(path).is_absolute():
        raise ConfigError(
            f"{where}={path}: no such file or directory (seen from {Path.cwd()}). Give an "
            "existing path, or a Hub id of the form owner/name."
        )
    return path


def _local_model_config(path: str | None) -> dict[str, Any]:
    """``config.json`` of a model directory on this machine, else empty."""
    config = Path(path) / "config.json" if path and Path(path).is_absolute() else None
    if config is None or not config.is_file():
        return {}
    try:
        return dict(json.loads(config.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{config}: not valid JSON ({error}). Is the download complete?"
        ) from error
