"""What differs from host to host: keys of ``hardware.hosts`` for another Python, other paths, an
environment, a container. Pure.

``python -m llmx help hardware.hosts`` lists them; ``docs/cluster.md`` shows a use of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from llmx.config.build import shown
from llmx.config.schema import DataConfig, Experiment, HardwareConfig, HostConfig, ModelConfig

KEYS = ("python", "root", "env", "setup", "data", "model", "enter")
"""Keys of a host that only agents can follow: other launchers start one command on all hosts."""


def keys_of(host: HostConfig) -> list[str]:
    """The keys of ``KEYS`` that a host sets."""
    return [key for key in KEYS if getattr(host, key)]


def host_named(hardware: HardwareConfig, name: str) -> HostConfig:
    """The config of a host of the plan."""
    return next((host for host in hardware.hosts if host.name == name), HostConfig(name=name))


def path_on(hardware: HardwareConfig, host: HostConfig, path: str) -> str:
    """The path on ``host`` of what is at ``path`` on the launching machine (``root``)."""
    here = (hardware.root or "").rstrip("/")
    if not host.root or not here or not (path == here or path.startswith(f"{here}/")):
        return path
    return host.root.rstrip("/") + path[len(here) :]


def experiment_on(exp: Experiment, host: HostConfig) -> Experiment:
    """The experiment with the paths of a host."""
    if host.root:
        hardware = exp.hardware
        exp = with_texts(exp, lambda path: path_on(hardware, host, path))
        exp = dataclasses.replace(exp, hardware=hardware)
    data, model = exp.data, exp.model
    if host.data:
        data = dataclasses.replace(data, path=host.data)
    if host.model:
        tokenizer = host.model if model.tokenizer == model.path else model.tokenizer
        model = dataclasses.replace(model, path=host.model, tokenizer=tokenizer)
    return dataclasses.replace(exp, data=data, model=model)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        parts = {name: with_texts(getattr(value, name), change) for name in names}
        return dataclasses.replace(value, **parts)
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {key: with_texts(item, change) for key, item in value.items()}
    return value


def by_host_problems(
    hardware: HardwareConfig, data: DataConfig, model: ModelConfig
) -> Iterator[str]:
    """Every broken rule: value, rule and fix."""
    for host in hardware.hosts:
        where = f"hardware.hosts ({shown(host.name)})"
        for key in ("python", "root", "setup", "data", "model"):
            path = getattr(host, key)
            if path and not path.startswith("/"):
                yield f"{where}: {key}={shown(path)}: must be an absolute path of this host."
        if host.data and not data.path:
            yield f"{where}: data stands for data.path there, which is not set. Set data.path."
        if host.model and not model.path:
            yield f"{where}: model stands for model.path there, which is not set. Set model.path."
        if host.enter and (not host.enter[0] or host.enter[0].startswith("-")):
            yield (
                f"{where}: enter={shown(host.enter[0])}: must begin with a program. Write e.g. "
                "enter: [docker, exec, -i, trainer]."
            )
