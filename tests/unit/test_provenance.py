"""A run's origin: what is recorded of it, what differs from then, how grave that is, its hosts."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmx.hardware import survey
from llmx.launch import rank_environment
from llmx.lifecycle.resume.run_state import (
    ask_hosts,
    host_differences,
    hosts_then_and_now,
    of_this_machine,
)
from llmx.run.provenance import code_files, content, git_state, record
from llmx.run.provenance.content import fingerprint, fingerprints, hub_commit
from llmx.run.provenance.differences import (
    BREAKS,
    HARMLESS,
    MAY,
    NUMERIC_CODE,
    SEVERITIES,
    Difference,
    differences,
    not_recorded,
    plan_differences,
)
from llmx.run.rundir import RunDir, write_json
from tests.composing import composed
from tests.conftest import REPOSITORY

# --- What is recorded ------------------------------------------------------------------------


def git(directory, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(directory), *identity, *words], check=True)


@pytest.fixture
def package(tmp_path) -> Path:
    """``pkg`` with one tracked file, in a repository of its own."""
    package = tmp_path / "pkg"
    package.mkdir()
    assert git_state(package) is None
    git(tmp_path, "init", "-q")
    (package / "__init__.py").write_text("a = 1\n")
    assert git_state(package) is None  # nothing of it is tracked
    git(tmp_path, "add", "."), git(tmp_path, "commit", "-qm", "x")
    return package


def state_of(package: Path) -> dict[str, Any]:
    state = git_state(package)
    assert state is not None
    return state


def test_commit_diff_and_untracked_files(package, tmp_path, monkeypatch) -> None:
    (package / "__init__.py").write_text("a = 2\n")
    (package / "new.py").write_text("b = 1\n")
    (tmp_path / "elsewhere.py").write_text("c = 1\n")
    (tmp_path / "notes.txt").write_text("d")
    state = state_of(package)
    assert len(state["commit"]) == 40
    assert "+a = 2" in state["diff"]
    # The text only of what llmx would run.
    assert state["untracked"] == {"elsewhere.py": None, "pkg/new.py": "b = 1\n"}
    assert json.dumps(state)
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert git_state(package) is None


def test_the_diff_applies_again_whatever_the_users_configuration(package, tmp_path) -> None:
    (package / "__init__.py").write_bytes(b"# caf\xe9\n")
    assert state_of(package)["diff"] is None, "no UTF-8: recorded as no other one"
    for name, value in (("diff.noprefix", "true"), ("color.ui", "always"), ("diff.relative", "1")):
        git(tmp_path, "config", name, value)
    (package / "__init__.py").write_text("a = '\u2028 übergröße'\n", encoding="utf-8")
    (package / "blob.bin").write_bytes(bytes(range(256)))
    git(tmp_path, "add", "pkg/blob.bin")
    patch = tmp_path / "then.patch"
    patch.write_text(state_of(package)["diff"], encoding="utf-8")
    git(tmp_path, "stash", "-q")
    git(tmp_path, "apply", str(patch))
    assert (package / "__init__.py").read_text(encoding="utf-8") == "a = '\u2028 übergröße'\n"
    assert (package / "blob.bin").read_bytes() == bytes(range(256))


def test_every_file_of_the_package_has_a_hash(tmp_path) -> None:
    files = code_files()
    assert {"llmx/train/loop.py", "llmx/__init__.py"} <= set(files)
    (tmp_path / "a.py").write_text("a")
    before = code_files(tmp_path)
    (tmp_path / "a.py").write_text("b")
    assert code_files(tmp_path).keys() == before.keys() == {"llmx/a.py"}
    assert code_files(tmp_path) != before


def test_a_fingerprint_is_of_the_content_not_of_the_place(tmp_path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("hello")
    one, two = (fingerprint(str(tmp_path / name), kind="models") for name in ("one", "two"))
    glob = fingerprint(str(tmp_path / "one" / "*.txt"), kind="datasets")
    assert one is not None
    assert (one["files"], one["bytes"], one["exact"]) == (1, 5, True)
    assert one["digest"] == (two or {})["digest"] == (glob or {})["digest"]
    (tmp_path / "two" / "a.txt").rename(tmp_path / "two" / "b.txt")
    assert fingerprint(str(tmp_path / "two"), kind="models") != two
    assert fingerprint(str(tmp_path / "none"), kind="models") is None
    assert fingerprint(str(tmp_path / "*.none"), kind="models") is None


def test_one_byte_counts_in_a_small_input_and_the_ends_in_a_large_one(
    tmp_path, monkeypatch
) -> None:
    """Of a large one also its size."""
    file = tmp_path / "a.bin"
    data = bytearray(os.urandom(3 << 20))
    file.write_bytes(data)
    small = fingerprint(str(file), kind="models")
    data[1_234_567] ^= 1
    file.write_bytes(data)
    assert fingerprint(str(file), kind="models") != small

    monkeypatch.setattr(content, "FULL_BYTES", 1 << 20)
    large = fingerprint(str(file), kind="models")
    assert large is not None
    assert not large["exact"]
    for at in (0, len(data) - 1):
        data[at] ^= 1
        file.write_bytes(data)
        assert fingerprint(str(file), kind="models") != large
        data[at] ^= 1
    file.write_bytes(data[:-1])
    assert fingerprint(str(file), kind="models") != large


def test_a_hub_id_is_known_by_its_commit(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert fingerprint("owner/name", kind="models") is None
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    assert hub_commit("owner/name", kind="models") == "abc123"
    found = fingerprint("owner/name", kind="models")
    assert found is not None
    assert found["digest"] == "abc123"
    assert hub_commit("owner/name", kind="models", revision="v2") is None
    (repository / "snapshots" / "f").mkdir(parents=True)
    assert hub_commit("owner/name", kind="models", revision="f") == "f"


def test_the_tokenizer_is_not_the_whole_model(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("1")
    exp = composed([]).experiment
    model = dataclasses.replace(exp.model, path=str(tmp_path), tokenizer=None)
    before = fingerprints(model, exp.data)
    (tmp_path / "model.safetensors").write_text("2")
    after = fingerprints(model, exp.data)
    assert before["tokenizer"] == after["tokenizer"]
    assert before["model"]["digest"] != after["model"]["digest"]
    assert before["data"]["files"] == 2  # the demo's


def test_facts_of_a_gpu_machine(tmp_path) -> None:
    driver = tmp_path / "version"
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025"
    driver.write_text(f"{version}\nGCC 12\n")
    assert survey.nvidia_driver(str(driver)) == "570.86.15"
    assert survey.nvidia_driver(str(tmp_path / "none")) is None
    for index, name in enumerate(("NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB")):
        folder = tmp_path / "gpus" / f"0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    names = survey.gpu_names(str(tmp_path / "gpus"))
    assert names == ["NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB"]
    cpu = tmp_path / "cpuinfo"
    cpu.write_text("model name\t: Big CPU @ 2 GHz\nflags\t\t: fpu avx2 sse avx512f\n" * 2)
    assert survey.cpu_model(str(cpu)) == "Big CPU @ 2 GHz avx2 avx512f"


def test_the_record_is_whole_and_has_the_ranks_variables(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    token = "hf_" + "a" * 30
    monkeypatch.setenv("HF_TOKEN", token)
    done = composed(["hardware=cpu2", "launch.env.NCCL_DEBUG=INFO"])
    variables = rank_environment(done.experiment, done.plan)
    made = record(done.experiment, done.plan, ["seed=1"], environment=variables)
    assert made["environment"]["OMP_NUM_THREADS"] == "3"
    assert made["environment"]["NCCL_ALGO"] == "Ring"
    assert made["packages"]["torch"]
    assert made["parent"] is None
    assert token[:9] not in json.dumps(made)


# --- What differs from then ------------------------------------------------------------------

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


def test_what_a_torn_record_lacks_is_not_compared() -> None:
    """As that of a host that gave no survey. Without GPUs, the CPU computes."""
    now = {key: value for key, value in changed("cpu", to="Other").items() if key != "python"}
    assert [found.what for found in differences(THEN, now)] == ["CPU"]
    (found,) = differences(changed("gpus", to=[]), {**now, "python": THEN["python"], "gpus": []})
    assert (found.severity, found.what) == (BREAKS, "CPU")


def test_the_gravest_come_first_and_nothing_differs_from_itself() -> None:
    assert differences(THEN, copy.deepcopy(THEN)) == not_recorded(THEN) == []
    now = changed("packages", "wandb", to="1")
    now["packages"]["torch"], now["packages"]["deepspeed"] = "1", "1"
    order = [SEVERITIES.index(found.severity) for found in differences(THEN, now)]
    assert order == [0, 1, 2]


def test_another_plan_is_said_by_what_decides_numbers() -> None:
    one, two = composed(["hardware=cpu2"]), composed(["hardware=a100x2_v100x2"])
    plan, ds_config = one.plan.to_dict(), one.ds_config
    assert plan_differences(plan, plan, ds_then=ds_config, ds_now=ds_config) == []
    found = plan_differences(plan, two.plan.to_dict(), ds_then=ds_config, ds_now=two.ds_config)
    assert {difference.what for difference in found} >= {"precision", "devices of the ranks"}
    assert all(difference.severity == BREAKS for difference in found)
    # Another JSON of DeepSpeed for the same plan is said by key.
    other = copy.deepcopy(ds_config)
    other["zero_optimization"]["reduce_bucket_size"] = 7
    (row,) = plan_differences(plan, plan, ds_then=ds_config, ds_now=other)
    assert row.what == "DeepSpeed's zero_optimization.reduce_bucket_size"
    assert (row.severity, row.now) == (MAY, "7")


def test_whatever_computes_counts_as_code_that_trains() -> None:
    """The layers of the ranks, as the import contract lists them: a new one must not be missing."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
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


# --- The hosts of a run: asked with the real program, compared by name -----------------------


def test_every_host_is_asked_and_one_out_of_reach_is_said(tmp_path) -> None:
    done = composed(["hardware=cpu2"], run_dir=tmp_path)
    away = dataclasses.replace(
        done.plan.hosts[0], name="away.invalid", address="away.invalid", is_local=False
    )
    hosts = (*done.plan.hosts, away)
    plan = dataclasses.replace(done.plan, hosts=hosts, transport="ssh")
    found = ask_hosts(done.experiment, plan)
    here = found["localhost"]
    assert here["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert here["packages"]["torch"]
    assert "away.invalid" in found["away.invalid"]["error"]

    run = RunDir(tmp_path)
    assert hosts_then_and_now(run, done.experiment, plan) == []  # nothing was recorded
    then = {"localhost": survey.survey("/"), "away.invalid": survey.survey("/")}
    then["localhost"]["packages"] = {**then["localhost"]["packages"], "torch": "1.0"}
    write_json(run.hosts, then)
    rows = {row.what: row for row in hosts_then_and_now(run, done.experiment, plan)}
    assert set(rows) == {"localhost: torch", "away.invalid: cannot be asked"}
    assert rows["localhost: torch"].severity == BREAKS
    assert rows["away.invalid: cannot be asked"].severity == MAY
    # A run on one host has nothing to ask.
    assert hosts_then_and_now(run, done.experiment, done.plan) == []


def test_a_host_is_compared_with_itself_and_not_with_others() -> None:
    facts = survey.survey("/")
    assert host_differences({"a": facts}, {"a": facts}) == []
    assert host_differences({"a": facts}, {"b": {**facts, "cpu": "other"}}) == []
    (row,) = host_differences({"a": facts}, {"a": {**facts, "cpu": "other"}})
    assert row.what == "a: CPU"
    # A survey of before names, drivers and CPUs were asked for.
    old = {key: facts[key] for key in ("python", "packages", "nccl", "gpus")}
    assert host_differences({"a": old}, {"a": facts}) == []


def test_where_no_rank_runs_packages_compute_nothing() -> None:
    rows = [
        Difference(BREAKS, "torch", "1", "2", "pip install torch==1"),
        Difference(BREAKS, "data", "1", "2"),
        Difference(MAY, "code that trains: train/loop.py", "1", "2"),
    ]
    here, away = composed(["hardware=cpu2"]).plan, composed(["hardware=a100x2_v100x2"]).plan
    assert of_this_machine(rows, here) == rows
    judged = of_this_machine(rows, away)
    assert [row.severity for row in judged] == [HARMLESS, BREAKS, MAY]
    assert judged[0].advice == ""
