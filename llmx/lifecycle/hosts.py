"""Asks the hosts of a run over ssh, and compares them with the hosts of its launch.

``hosts.json`` of a run has what its launch found; before a reproduction or a resume the hosts
are asked again, with the same program, so that a difference is known before the start.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from llmx.config import Experiment
from llmx.config.by_host import host_named, path_on
from llmx.hardware.remote import SurveyError, run_survey
from llmx.launch.ssh_config import render_ssh_config, ssh_argv
from llmx.plan.types import HostPlan, Plan
from llmx.run.provenance.differences import HARMLESS, MAY, Difference, differences
from llmx.run.provenance.machine import PACKAGES
from llmx.run.rundir import RunDir, read_mapping
from llmx.run.scratch import scratch_directory

TIMEOUT_S = 30.0


def hosts_then_and_now(run: RunDir, exp: Experiment, plan: Plan) -> list[Difference]:
    """Ask the hosts of a run over several now, and list the differences from then."""
    then = read_mapping(run.hosts)
    if len(plan.hosts) < 2 or not then:
        return []
    return host_differences(then, ask_hosts(exp, plan))


def ask_hosts(exp: Experiment, plan: Plan) -> dict[str, dict[str, Any]]:
    """Host -> its survey; ``{"error": why}`` for one that does not answer. Hosts at once."""
    python = exp.launch.python or sys.executable
    with scratch_directory() as directory:
        config = directory / "ssh_config"
        config.write_text(render_ssh_config(plan.hosts), encoding="utf-8")

        def ask(host: HostPlan) -> dict[str, Any]:
            keys = host_named(exp.hardware, host.name)
            run_dir = path_on(exp.hardware, keys, exp.run_dir)
            words = [*keys.enter, keys.python or python, "-", run_dir]
            argv = words if host.is_local else ssh_argv(config, host.name, words)
            try:
                return run_survey(argv, timeout_s=TIMEOUT_S)
            except SurveyError as error:
                return {"error": str(error)}

        with ThreadPoolExecutor(max_workers=16) as pool:
            answers = list(pool.map(ask, plan.hosts))
    return {host.name: answer for host, answer in zip(plan.hosts, answers, strict=True)}


def host_differences(
    then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> list[Difference]:
    """The differences of each host that took part then and does now. Pure."""
    rows = []
    for name, facts in now.items():
        if "error" in facts:
            rows.append(Difference(MAY, f"{name}: cannot be asked", "-", str(facts["error"])))
        elif name in then and "error" not in then[name]:
            rows += [
                replace(row, what=f"{name}: {row.what}")
                for row in differences(_record(then[name]), _record(facts))
            ]
    return rows


def of_this_machine(rows: list[Difference], plan: Plan) -> list[Difference]:
    """Mark differences of this machine's packages and devices as harmless if no rank runs on it."""
    if any(host.is_local for host in plan.hosts):
        return rows
    machine = {*PACKAGES, "GPUs", "CPU", "NVIDIA driver", "CUDA of torch", "NCCL", "Python"}
    return [
        replace(row, severity=HARMLESS, what=f"{row.what} (here, where no rank runs)", advice="")
        if row.what in machine
        else row
        for row in rows
    ]


def _record(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A survey in the form of ``provenance.json``."""
    record: dict[str, Any] = {
        "python": {"version": facts.get("python")},
        "packages": facts.get("packages") or {},
        "nvidia_driver": facts.get("driver"),
        "nccl": dict(pin.split("==", 1) for pin in facts.get("nccl") or ()),
        "cpu": facts.get("cpu"),
    }
    if "gpu_names" in facts:
        record["gpus"] = facts["gpu_names"]
    return record
