"""Manifests for other launchers, against the fields that their schemas have.

``pytest tests/unit/test_render.py``
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import yaml

from llmx.cli.render import main
from llmx.errors import ConfigError

TEXT, COUNT = "text", "count"
MOUNTS = [{"name": TEXT, "mountPath": TEXT}]
VOLUMES = [
    {"name": TEXT, "persistentVolumeClaim": {"claimName": TEXT}, "emptyDir": {"medium": TEXT}}
]
JOBSET: dict[str, Any] = {
    "apiVersion": TEXT,
    "kind": TEXT,
    "metadata": {"name": TEXT},
    "spec": {
        "failurePolicy": {"maxRestarts": COUNT},
        "replicatedJobs": [
            {
                "name": TEXT,
                "replicas": COUNT,
                "template": {
                    "spec": {
                        "parallelism": COUNT,
                        "completions": COUNT,
                        "completionMode": TEXT,
                        "backoffLimit": COUNT,
                        "template": {
                            "spec": {
                                "restartPolicy": TEXT,
                                "terminationGracePeriodSeconds": COUNT,
                                "containers": [
                                    {
                                        "name": TEXT,
                                        "image": TEXT,
                                        "command": [TEXT],
                                        "args": [TEXT],
                                        "env": [
                                            {
                                                "name": TEXT,
                                                "value": TEXT,
                                                "valueFrom": {"fieldRef": {"fieldPath": TEXT}},
                                            }
                                        ],
                                        "resources": {"limits": {"nvidia.com/gpu": COUNT}},
                                        "volumeMounts": MOUNTS,
                                    }
                                ],
                                "volumes": VOLUMES,
                            }
                        },
                    }
                },
            }
        ],
    },
}
"""The part of the published schemas of JobSet v1alpha2 and of batch/v1 Job that is used."""
POD_PATCH: dict[str, Any] = {
    "terminationGracePeriodSeconds": COUNT,
    "containers": [{"name": TEXT, "volumeMounts": MOUNTS}],
    "volumes": VOLUMES,
}
NODE_PATCH = {"name": TEXT, "template": {"spec": {"template": {"spec": POD_PATCH}}}}
TRAINJOB: dict[str, Any] = {
    "apiVersion": TEXT,
    "kind": TEXT,
    "metadata": {"name": TEXT},
    "spec": {
        "runtimeRef": {"name": TEXT},
        "trainer": {
            "image": TEXT,
            "command": [TEXT],
            "args": [TEXT],
            "env": [{"name": TEXT, "value": TEXT}],
            "numNodes": COUNT,
            "numProcPerNode": COUNT,
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": COUNT}},
        },
        "runtimePatches": [
            {
                "manager": TEXT,
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [NODE_PATCH]}}},
            }
        ],
    },
}
"""The part of the published schema of TrainJob v1alpha1 (Kubeflow Trainer, August 2026) in use."""
WORDS = ("hardware=a100x2_v100x2", "run_dir=/runs/a", "name='my run'", "task.steps=20")
K8S = ("--image", "me/llmx:1", "--volume=runs:/runs")


def unknown_fields(value: Any, schema: Any, where: str = "") -> list[str]:
    """Fields that the schema does not have, or that have another type there."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [where]
        return [
            problem
            for key, inner in value.items()
            for problem in (
                unknown_fields(inner, schema[key], f"{where}.{key}")
                if key in schema
                else [f"{where}.{key}"]
            )
        ]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [where]
        return [
            problem
            for index, inner in enumerate(value)
            for problem in unknown_fields(inner, schema[0], f"{where}[{index}]")
        ]
    return [] if isinstance(value, str if schema == TEXT else int) else [where]


def rendered(*words: str) -> str:
    out = io.StringIO()
    assert main(words, stream=out) == 0
    return out.getvalue()


def test_a_trainjob_has_the_fields_of_its_schema() -> None:
    manifest = yaml.safe_load(rendered("trainjob", *K8S, *WORDS))
    assert unknown_fields(manifest, TRAINJOB) == []
    trainer = manifest["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 2}}
    assert trainer["args"][:2] == ["-m", "llmx"]
    assert {"run_dir=/runs/a", "name='my run'", "launch=external"} <= set(trainer["args"])
    (patch,) = manifest["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert pod["containers"][0]["volumeMounts"][0] == {"name": "runs", "mountPath": "/runs"}


def test_a_jobset_has_the_fields_of_its_schema() -> None:
    manifest = yaml.safe_load(rendered("k8s", *K8S, *WORDS))
    assert unknown_fields(manifest, JOBSET) == []
    assert manifest["metadata"]["name"] == "llmx-my-run"
    (job,) = manifest["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == 2
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    args = container["args"]
    assert "--master-addr=llmx-my-run-node-0-0.llmx-my-run" in args
    assert args[args.index("-m") + 1 :][0] == "llmx"
    assert {"run_dir=/runs/a", "name='my run'", "launch=external"} <= set(args)
    assert not any(word.startswith("hardware") for word in args)


def test_a_task_of_skypilot_starts_torchrun() -> None:
    words = ("hardware=a100x8", "run_dir=/runs/a", "name='my run'")
    manifest = yaml.safe_load(rendered("skypilot", *words))
    assert manifest["resources"]["accelerators"].endswith(":8")
    assert manifest["run"].count("torchrun") == 1
    assert manifest["run"].rstrip().endswith("launch=external")


def test_sbatch_prints_the_script_that_is_submitted() -> None:
    request = ("hardware=slurm", "hardware.nodes=2", "hardware.slots=4", "hardware.device=a100_80g")
    text = rendered("sbatch", *request, "run_dir=/runs/a")
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert "resume /runs/a hardware=slurm" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs one of k8s, trainjob, sbatch, skypilot"),
        (["k8s", *WORDS], "needs --image NAME"),
        (["k8s", "--image=x", *WORDS], "--volume not set"),
        (["k8s", "--image=x", "--volume=runs:/other", *WORDS], "with run_dir in it"),
        (["k8s", *K8S, "hardware=a100x8"], "set run_dir=DIR"),
        (["skypilot", "hardware=cpu2", "run_dir=/runs/a"], "no name of SkyPilot is known for cpu"),
    ],
)
def test_what_cannot_be_rendered_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(words)
