"""The rules of ``launch`` and of the ranks' variables (``launch.env``, ``hardware.env``). Pure.

``python -m llmx plan launch.transport=...`` applies them. The range of a single field stands beside
it in ``llmx.config.schema``; here is what holds between fields and hosts. A transport has its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from llmx.config.plugins import TRANSPORTS
from llmx.config.schema import HardwareConfig, LaunchConfig
from llmx.redact import is_secret
from llmx.text import CONTROL, SURROGATES

RESERVED = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK",
        "CROSS_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ENV_FILE", "DS_ACCELERATOR",
        "LLMX_RUN_TOKEN", "CUDA_VISIBLE_DEVICES", "PDSH_RCMD_TYPE", "PDSH_SSH_ARGS_APPEND",
    }
)  # fmt: skip
"""Variables that the launch sets itself."""
_INSTEAD = {
    "MASTER_ADDR": ", and set hardware.master_addr=ADDRESS",
    "MASTER_PORT": ", and set launch.master_port=PORT",
    "CUDA_VISIBLE_DEVICES": ", and export it before llmx is started (a run on this machine), or "
    "set the slots of the host",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ONE_LINE = re.compile(f"[^{CONTROL}{SURROGATES}]*")


def launch_problems(launch: LaunchConfig, hardware: HardwareConfig) -> Iterator[str]:
    """Every broken rule: value, rule and fix."""
    yield from env_problems(hardware.env, key="hardware.env")
    yield from env_problems(launch.env, key="launch.env")
    for index, path in enumerate(launch.sync_extra):
        if not path.startswith(("/", "~")):
            yield (
                f"launch.sync_extra[{index}]={path}: must be an absolute path, as it is the same "
                "on every host. Write e.g. /data/more."
            )
    if launch.transport != "auto":
        # By its name: the schema does not depend on what launches.
        yield from TRANSPORTS.load(launch.transport)().problems(launch, hardware)


def env_problems(env: Mapping[str, str], *, key: str) -> Iterator[str]:
    """Every problem of the variables of a config (``key``: ``launch.env`` or ``hardware.env``)."""
    for name, value in env.items():
        where = f"{key}.{name}"
        if not _NAME.fullmatch(name):
            yield f"{where}: is not the name of a variable. Use letters, digits and _."
        elif is_secret(name, value):
            yield (
                f"{where}: looks like a secret, and every user of a host can read the variables of "
                "the ranks. Leave it out: W&B and its key stay in the supervisor, and a gated "
                "model is downloaded before the run (set model.path to the directory)."
            )
        elif name in RESERVED:
            yield f"{where}: is set by llmx. Leave it out{_INSTEAD.get(name, '')}."
        elif not is_one_line(value):
            yield (
                f"{where}: has a line break or another control character, which cannot be passed "
                "to other hosts. Write it on one line."
            )


def is_variable_name(name: str) -> bool:
    """Whether a shell takes ``name`` for a variable."""
    return _NAME.fullmatch(name) is not None


def is_one_line(value: str) -> bool:
    """Whether ``value`` is text without control characters."""
    return _ONE_LINE.fullmatch(value) is not None
