"""From a plan to running ranks and back: render, start, watch, end, collect.

``prepare`` writes ``hostfile``, ``ssh_config``, ``ds_env`` and ``command.txt``; ``supervise``
runs them to the end, over as many attempts as it takes, and writes ``result.json``. Nothing here
imports torch or deepspeed.
"""

from __future__ import annotations

from llmx.launch.hostfile import HostSlots, parse_hostfile, render_hostfile
from llmx.launch.render import check, render
from llmx.launch.result import Result
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervisor import supervise

prepare = render

__all__ = [
    "HostSlots",
    "LaunchSpec",
    "Result",
    "check",
    "parse_hostfile",
    "prepare",
    "render",
    "render_hostfile",
    "supervise",
]
