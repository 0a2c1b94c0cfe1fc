"""``python -m llmx render k8s|trainjob|sbatch|skypilot ...``: the manifest of a job.

    python -m llmx render k8s --image me/llmx:1 --volume runs:/runs hardware=h100x8 experiment=...

The nodes and GPUs are those of the plan. ``sbatch`` prints the script that ``launch.slurm.submit``
submits. The others start ``torchrun`` on every node, and each process becomes its rank
(``launch=external``).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import yaml

from llmx.config import Experiment
from llmx.errors import ConfigError
from llmx.plan.types import Plan

TARGETS = ("k8s", "trainjob", "sbatch", "skypilot")
PORT = 29500
SKYPILOT_NAMES = {
    "t4": "T4", "v100_16g": "V100", "v100_32g": "V100-32GB", "a10": "A10G", "l40s": "L40S",
    "a100_40g": "A100", "a100_80g": "A100-80GB", "h100_80g": "H100", "h200_141g": "H200",
}  # fmt: skip
"""Device type -> the name of SkyPilot."""


def main(words: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Print the manifest of a command; returns the exit code."""
    from llmx.cli.arguments import read_line
    from llmx.cli.plan import composed_line
    from llmx.lifecycle.batch import batch_script

    out = stream or sys.stdout
    if not words or words[0] not in TARGETS:
        raise ConfigError(
            f"render: needs one of {', '.join(TARGETS)}, e.g. python -m llmx render k8s."
        )
    target, (flags, rest) = words[0], _flags(words[1:])
    line = read_line(rest)
    composed = composed_line(line)
    exp, plan = composed.experiment, composed.plan
    if not any(word.startswith("run_dir=") for word in line.overrides):
        raise ConfigError(
            "render: set run_dir=DIR, on a file system that all nodes share; the job is continued "
            "there when it starts again."
        )
    if target == "sbatch":
        print(
            batch_script(exp, plan, words=line.overrides, config_dir=line.config_dir),
            end="",
            file=out,
        )
        return 0
    if line.config_dir:
        raise ConfigError(
            f"--config-dir {line.config_dir}: is not on the nodes. Put the options on the command "
            "line, or into the image (a run of your own: render sbatch)."
        )
    sizes = {host.slots for host in plan.hosts}
    if len(sizes) > 1:
        raise ConfigError(
            f"render {target}: all nodes have the same number of GPUs, and those of this plan have "
            f"{', '.join(map(str, sorted(sizes)))}. Set hardware.slots={min(sizes)}."
        )
    args = [word for word in line.overrides if not word.startswith(("hardware", "launch"))]
    args += [f"launch.env.{name}={value}" for name, value in exp.launch.env.items()]
    args += ["launch=external"]
    if target == "skypilot":
        manifest = skypilot(exp, plan, args)
    else:
        make = jobset if target == "k8s" else trainjob
        manifest = make(exp, plan, args, image=flags["image"], mounts=_mounts(exp, target, **flags))
    yaml.safe_dump(manifest, out, sort_keys=False, width=100)
    return 0


def _flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """``--image X`` and ``--volume CLAIM:/PATH``, and the other words."""
    flags, rest, remaining = {"image": "", "volume": ""}, [], list(words)
    while remaining:
        word = remaining.pop(0)
        name, equal, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in flags:
            rest.append(word)
        elif equal or remaining:
            flags[name] = value if equal else remaining.pop(0)
        else:
            raise ConfigError(f"{word}: needs a value.")
    return flags, rest


@dataclass(frozen=True)
class Mounts:
    """Of the volume with the runs and of shared memory: parts of a pod."""

    volumes: list[dict[str, Any]]
    mounts: list[dict[str, str]]


def _mounts(exp: Experiment, target: str, *, image: str, volume: str) -> Mounts:
    if not image:
        raise ConfigError(f"render {target}: needs --image NAME, with llmx and torchrun in it.")
    claim, _, path = volume.partition(":")
    if not claim or not path.startswith("/") or not exp.run_dir.startswith(path.rstrip("/") + "/"):
        raise ConfigError(
            f"render {target}: --volume {volume or 'not set'}: names the claim of a shared volume "
            "and where it is mounted, with run_dir in it, e.g. --volume runs:/runs run_dir=/runs/a "
            f"(run_dir is {exp.run_dir})."
        )
    return Mounts(
        [
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
        [{"name": "runs", "mountPath": path}, {"name": "shm", "mountPath": "/dev/shm"}],
    )


def _job_name(exp: Experiment) -> str:
    """Of letters that Kubernetes and SkyPilot take."""
    return re.sub(r"[^a-z0-9]+", "-", f"llmx-{exp.name}".lower()).strip("-")[:40].rstrip("-")


def _words(args: Sequence[str]) -> list[str]:
    """The command's words in a pod, where $(NAME) would stand for a variable."""
    return ["-m", "llmx", *(word.replace("$(", "$$(") for word in args)]


def _env(exp: Experiment) -> list[dict[str, Any]]:
    return [{"name": key, "value": value} for key, value in exp.hardware.env.items()]


def jobset(
    exp: Experiment, plan: Plan, args: Sequence[str], *, image: str, mounts: Mounts
) -> dict[str, Any]:
    """A JobSet (``jobset.x-k8s.io/v1alpha2``): one pod on each node, restarted as often as
    ``launch.max_restarts`` says."""
    name = _job_name(exp)
    nodes, slots = len(plan.hosts), plan.hosts[0].slots
    torchrun = [
        f"--nnodes={nodes}",
        "--node-rank=$(POD_INDEX)",
        f"--nproc-per-node={slots}",
        f"--master-addr={name}-node-0-0.{name}",
        f"--master-port={PORT}",
    ]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container: dict[str, Any] = {
        "name": "trainer",
        "image": image,
        "command": ["torchrun"],
        "args": [*torchrun, *_words(args)],
        "env": [
            {"name": "POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            *_env(exp),
        ],
        "volumeMounts": mounts.mounts,
    }
    if plan.on_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": slots}}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60 + int(exp.launch.stop_grace_s),
        "containers": [container],
        "volumes": mounts.volumes,
    }
    job = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": exp.launch.max_restarts},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def trainjob(
    exp: Experiment, plan: Plan, args: Sequence[str], *, image: str, mounts: Mounts
) -> dict[str, Any]:
    """A TrainJob of Kubeflow Trainer from 2.2 on (``trainer.kubeflow.org/v1alpha1``). Its runtime
    ``torch-distributed`` tells torchrun about nodes and processes (``PET_*``)."""
    slots = plan.hosts[0].slots
    trainer: dict[str, Any] = {
        "image": image,
        "command": ["torchrun"],
        "args": _words(args),
        "env": _env(exp),
        "numNodes": len(plan.hosts),
        "numProcPerNode": slots,
    }
    if plan.on_gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": slots}}
    pod = {
        "terminationGracePeriodSeconds": 60 + int(exp.launch.stop_grace_s),
        "containers": [{"name": "node", "volumeMounts": mounts.mounts}],
        "volumes": mounts.volumes,
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "llmx.io/render",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _job_name(exp)},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "runtimePatches": [patch],
        },
    }


def skypilot(exp: Experiment, plan: Plan, args: Sequence[str]) -> dict[str, Any]:
    """A task of SkyPilot."""
    device = plan.hosts[0].device
    if device not in SKYPILOT_NAMES:
        raise ConfigError(
            f"render skypilot: no name of SkyPilot is known for {device}; known: "
            f"{', '.join(SKYPILOT_NAMES)}. Render one of these, and change `accelerators` in it."
        )
    run = (
        'torchrun --nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" '
        f"--nproc-per-node={plan.hosts[0].slots} "
        f'--master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port={PORT} '
        f"-m llmx {shlex.join(args)}\n"
    )
    manifest: dict[str, Any] = {
        "name": _job_name(exp),
        "num_nodes": len(plan.hosts),
        "resources": {"accelerators": f"{SKYPILOT_NAMES[device]}:{plan.hosts[0].slots}"},
    }
    if exp.hardware.env:
        manifest["envs"] = dict(exp.hardware.env)
    return manifest | {"run": run}
