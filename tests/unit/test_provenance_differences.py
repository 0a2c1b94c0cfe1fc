"""What differs from then, and how grave it is."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from llmx.run.provenance.differences import (
    BREAKS,
    HARMLESS,
    MAY,
    NUMERIC_CODE,
    SEVERITIES,
    differences,
    not_recorded,
    plan_differences,
)
from tests.composing import composed

THEN: dict[str, Any] = {
    "llmx": "0.1.0",
    "git": {"commit": "a" * 40, "diff": "", "untracked": {}},
    "code": {"llmx/train/loop.py": "1", "llmx/report/page.py": "1"},
    "task_code": {"mine/task.py": "1", "mine/helpers.py": "1"},
    "python": {"version": "3.11.7"},
    "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "wandb": "0.31.0", "numpy": None},
    "nvidia_driver": "570.86.15",
    "cuda": "12.8",
    "nccl": {"nvidia-nccl-cu12": "2.26.2"},
    "gpus": ["NVIDIA A100-SXM4-80GB"] * 2,
    "cpu": "Big avx2",
    "environment": {"OMP_NUM_THREADS": "8", "NCCL_DEBUG": "WARN"},
    "config": "1",
    "fingerprints": {
        "data": {"path": "/d", "digest": "1", "bytes": 10, "exact": True},
        "eval_data": None,
        "tokenizer": {"path": "/t", "digest": "1", "bytes": 10, "exact": True},
        "model": None,
    },
}


def changed(*path: str, to: Any) -> dict[str, Any]:
    now = copy.deepcopy(THEN)
    place = now
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return now


def test_nothing_differs_from_itself() -> None:
    assert differences(THEN, copy.deepcopy(THEN)) == []
    assert not_recorded(THEN) == []


@pytest.mark.parametrize(
    ("path", "to", "severity", "what", "advice"),
    [
        (("packages", "torch"), "2.12.0", BREAKS, "torch", "pip install torch==2.13.0"),
        (("packages", "deepspeed"), None, MAY, "deepspeed", "pip install deepspeed==0.19.8"),
        (("packages", "numpy"), "2.4", MAY, "numpy", "pip uninstall numpy"),
        (("packages", "wandb"), "0.30", HARMLESS, "wandb", ""),
        (("python", "version"), "3.11.9", HARMLESS, "Python", ""),
        (("python", "version"), "3.12.1", MAY, "Python", ""),
        (("nvidia_driver",), "560.1", MAY, "NVIDIA driver", ""),
        (("cuda",), None, BREAKS, "CUDA of torch", ""),
        (("nccl",), {}, MAY, "NCCL", "pip install nvidia-nccl-cu12==2.26.2"),
        (("gpus",), ["Tesla V100"], BREAKS, "GPUs", "same type of device"),
        (("cpu",), "Other", HARMLESS, "CPU", ""),  # the GPUs compute
        (("code", "llmx/train/loop.py"), "2", MAY, "code that trains: train/loop.py", "checkout"),
        (("code", "llmx/report/page.py"), "2", HARMLESS, "code around it: report/page.py", ""),
        (("task_code", "mine/task.py"), "2", MAY, "code of the task: mine/task.py", "restore"),
        (("task_code",), None, MAY, "code of the task: mine/helpers.py, mine/task.py", "restore"),
        (("git", "commit"), "b" * 40, HARMLESS, "commit (the code is the same)", ""),
        (("environment", "OMP_NUM_THREADS"), "4", MAY, "OMP_NUM_THREADS", "OMP_NUM_THREADS=8"),
        (("environment", "NCCL_ALGO"), "Tree", MAY, "NCCL_ALGO", "unset NCCL_ALGO"),
        (("environment", "NCCL_DEBUG"), "INFO", HARMLESS, "NCCL_DEBUG", ""),
        (("fingerprints", "data", "digest"), "2", BREAKS, "data", "restore /d"),
        (("fingerprints", "tokenizer"), None, BREAKS, "tokenizer",
         "its new place: model.tokenizer=PATH"),
    ],
)  # fmt: skip
def test_each_difference_has_its_severity_and_its_remedy(path, to, severity, what, advice) -> None:
    (found,) = differences(THEN, changed(*path, to=to))
    assert (found.severity, found.what) == (severity, what)
    assert advice in found.advice
    assert bool(advice) == bool(found.advice)
    assert found.then != found.now or what.startswith("code")


def test_a_record_without_python_is_compared_by_the_rest() -> None:
    """As a torn record, or that of a host that gave no survey, in the place of today's."""
    now = {key: value for key, value in changed("cpu", to="Other").items() if key != "python"}
    assert [found.what for found in differences(THEN, now)] == ["CPU"]


def test_on_a_machine_without_gpus_the_cpu_computes() -> None:
    then = changed("gpus", to=[])
    now = copy.deepcopy(then)
    now["cpu"] = "Big avx2 avx512f"
    (found,) = differences(then, now)
    assert (found.severity, found.what) == (BREAKS, "CPU")


def test_the_gravest_come_first() -> None:
    now = changed("packages", "wandb", to="1")
    now["packages"]["torch"], now["packages"]["deepspeed"] = "1", "1"
    order = [SEVERITIES.index(found.severity) for found in differences(THEN, now)]
    assert order == [0, 1, 2]


def test_other_hardware_is_said_by_what_decides_numbers() -> None:
    one, two = composed(["hardware=cpu2"]), composed(["hardware=a100x2_v100x2"])
    found = plan_differences(
        one.plan.to_dict(), two.plan.to_dict(), ds_then=one.ds_config, ds_now=two.ds_config
    )
    assert {difference.what for difference in found} >= {"precision", "devices of the ranks"}
    assert all(difference.severity == BREAKS for difference in found)
    same = plan_differences(
        one.plan.to_dict(), one.plan.to_dict(), ds_then=one.ds_config, ds_now=one.ds_config
    )
    assert same == []


def test_another_deepspeed_json_for_the_same_plan_is_said_by_key() -> None:
    one = composed(["hardware=cpu2"])
    other = copy.deepcopy(one.ds_config)
    other["zero_optimization"]["reduce_bucket_size"] = 7
    plan = one.plan.to_dict()
    (found,) = plan_differences(plan, plan, ds_then=one.ds_config, ds_now=other)
    assert found.what == "DeepSpeed's zero_optimization.reduce_bucket_size"
    assert (found.severity, found.now) == (MAY, "7")


def test_whatever_computes_counts_as_code_that_trains() -> None:
    """The layers of the ranks, as the import contract lists them: a new one must not be missing."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(
        r'name = "worker > [^"\n]*"\ntype = "layers"\nlayers = \[(.*?)\]', text, re.DOTALL
    )
    assert found is not None
    modules = re.findall(r"llmx[\w.]+", found.group(1))
    assert len(modules) > 5
    for module in modules:
        path = module.replace(".", "/")
        assert f"{path}.py" in NUMERIC_CODE or f"{path}/".startswith(NUMERIC_CODE), module


def test_another_teacher_breaks_the_numbers() -> None:
    teacher = {"path": "/teacher", "digest": "1", "bytes": 10, "exact": True}
    then = changed("fingerprints", "frozen", to={"teacher": teacher})
    assert differences(then, copy.deepcopy(then)) == []
    now = changed("fingerprints", "frozen", to={"teacher": {**teacher, "digest": "2"}})
    (found,) = differences(then, now)
    assert (found.severity, found.what) == (BREAKS, "model 'teacher' of the task")
    (gone,) = differences(then, THEN)
    assert gone.advice == "restore /teacher"
    assert differences(THEN, now) == []
