"""Experiments on made-up hosts, and what is rendered for their launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from llmx.config import experiment_from_dict
from llmx.config.schema import Experiment
from llmx.launch.spec import LaunchSpec
from llmx.plan import make_plan
from llmx.run.rundir import RunDir

ENVIRON = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/ada",
    "LANG": "C.UTF-8",
    "NCCL_DEBUG": "WARN",
    "HF_HOME": "/data/hf",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "WANDB_API_KEY": "0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "x",
    "LLMX_PROXY": "http://ada:pw@proxy:3128",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "CUDA_VISIBLE_DEVICES": "2,3",
    "PS1": "$ ",
}
"""Of the shell that starts a run."""
_SHEETS = {
    "a100": {"accelerator": "cuda", "precisions": ["fp32", "bf16", "fp16"]},
    "cpu": {"accelerator": "cpu", "precisions": ["fp32"]},
}


def experiment(
    transport: str, slots: tuple[int, ...], device: str = "a100", **launch: object
) -> Experiment:
    """A run on node-a, node-b and so on, with so many ranks on each; ``local``: on this machine."""
    local = transport == "local"
    hosts = [
        {
            "name": "localhost" if local else f"node-{chr(97 + i)}",
            "address": None if local else f"10.0.0.{i + 1}",
            "ssh_port": 22 if local else 2201 + i,
            "user": None if local else "ada",
            "identity_file": None if local else "/home/ada/.ssh/id cluster",
            "slots": count,
            "device": device,
            "interface": None if local else "eth1",
        }
        for i, count in enumerate(slots)
    ]
    return experiment_from_dict(
        {
            "run_dir": "/runs/demo",
            "model": {"kind": "llama", "init": "scratch", "config": {"hidden_size": 64}},
            "task": {"steps": 10},
            "batch": {"accumulation": 1},
            "precision": "fp32",
            "hardware": {
                "hosts": hosts,
                "devices": {device: _SHEETS[device]},
                "env": {"NCCL_IB_DISABLE": "1"},
            },
            "launch": {"transport": transport, **launch},
        }
    )


def spec_of(exp: Experiment, **changes: object) -> LaunchSpec:
    """What is launched of an experiment."""
    plan = make_plan(exp)
    spec = LaunchSpec(
        exp=exp,
        plan=plan,
        run_dir=RunDir(Path(exp.run_dir)),
        port=29876,
        token="00c0ffee00c0ffee",
        python="/opt/venv/bin/python3",
        code_root="/home/ada/llmx",
        environ=ENVIRON,
        cores=16 if plan.transport in ("local", "slurm") else None,
        interfaces=tuple(host.interface for host in plan.hosts),
    )
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
