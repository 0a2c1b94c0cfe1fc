"""Hosts are compared before a launch: what cannot train together is named, with the fix."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from llmx.hardware import survey as program
from llmx.hardware.compare import (
    GIB,
    Findings,
    asked_of_hosts,
    compare_hosts,
    disk_problem,
    problems_here,
    ram_problem,
)
from llmx.hardware.survey import space_facts
from llmx.plan import cuda_builds
from llmx.plan.types import StoragePlan
from tests.composing import planned
from tests.composing import sized as composed_once

composed = functools.cache(lambda *words: composed_once(list(words)))

ROOT = Path(__file__).parents[2]
CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CUDA12 = {"cuda": "12.6", "arch_list": CU126, "nccl": "2.27.3"}
CUDA13 = {"cuda": "13.0", "arch_list": CU130, "nccl": "2.27.3"}
PACKAGES = {"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.6"}
IB_PORT = {"port": "mlx5_0:1", "state": "ACTIVE", "rate": "200 Gb/sec (4X HDR)"}
FULL = {"writable": True, "free_bytes": GIB}
V100 = {"gpu_names": ["Tesla V100-SXM2-32GB"] * 2, "capabilities": [7.0, 7.0]}


def facts(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": "3.11.7", "packages": PACKAGES, "nccl": ["nvidia-nccl-cu12==2.27.3"],
        "gpus": 2, "gpu_names": ["NVIDIA A100-SXM4-40GB"] * 2, "capabilities": [8.0, 8.0],
        "torch_build": CUDA12, "driver": "570.86.15", "cpu": "Big CPU avx2",
        "free_bytes": 500 * GIB, "checkpoints": 0, "ram_available_bytes": 500 * GIB,
        "shm_bytes": 64 * GIB, "open_files": 65536, "locked_bytes": -1, "infiniband": [],
        "gpu_processes": [], "gpu_states": [], "container": "",
        "removed": [], "ninja": True, "compiler": True, "nvcc": "12.6", "skips_cuda_check": False,
        "libaio": None, "nvme": None, "modules": ["flash_attn"], "stale_locks": [],
        "code": "0123456789ab",
    }  # fmt: skip
    return {**found, **changes}


def judge(a: dict[str, Any], b: dict[str, Any], *overrides: str, **keywords: Any) -> Findings:
    done = composed("hardware=a100x2_v100x2", *overrides)
    b = {**b, **V100} if b["capabilities"] == [8.0, 8.0] else b
    return compare_hosts(done.experiment, done.plan, {"node-a": a, "node-b": b}, **keywords)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


ADAM = ["optim.kind=fused_adam"]
QUANTIZED = ["zero=stage3", "zero.quantized_weights=true"]
NVME = ["zero=infinity", "zero.nvme_path=/nvme"]
LARGE = ["zero=infinity", "model=llama2_7b", "data.seq_len=512"]
NCCL = "NCCL differs between hosts: "
NO_CODE = (
    "node-b: torch 2.13.0 (CUDA 13.0) has no code for its GPUs: their compute capability is 7, "
    "torch has sm_75"
)


@pytest.mark.parametrize(
    ("overrides", "change", "message"),
    [
        ([], {"python": "3.10.2"}, "Python differs between hosts: 3.11 on node-a; 3.10 on node-b"),
        ([], {"code": "ba98"}, "differs between hosts: 0123456789ab on node-a; ba98 on node-b"),
        (
            [], {"packages": {**PACKAGES, "torch": "2.13.0+cu126"}, "torch_build": CUDA12},
            "torch differs between hosts: 2.13.0 on node-a; 2.13.0+cu126 on node-b.*"
            '--force-reinstall "torch==2.13.0+cu126" --index-url',
        ),
        ([], {"torch_build": {**CUDA12, "nccl": "2.21.5"}}, f"{NCCL}2.27.3 on node-a; 2.21.5 on"),
        (
            [], {"torch_build": {"cuda": "12.6"}, "nccl": ["nvidia-nccl-cu12==2.21.5"]},
            f"{NCCL}nvidia-nccl-cu12==2.27.3 on node-a",
        ),
        ([], {"torch_build": CUDA13}, NO_CODE),
        ([], {"capabilities": [9.0, 9.0]}, "device=v100_32g has compute capability 7, but its GPU"),
        # They share the path of libnccl.so.2: without one of them the other has lost its library.
        (
            [], {"nccl": ["nvidia-nccl-cu12==2.27.3", "nvidia-nccl-cu13==2.28.3"]},
            "node-b: several NCCL builds.*pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13; pip "
            'install --force-reinstall "torch==2.13.0+cu126"',
        ),
        ([], {"gpus": 1}, "node-b: slots=2, but this host has 1 GPU."),
        ([], {"gpus": None}, "node-b: slots=2, but this host has 0 GPUs"),
        (ADAM, {"ninja": False}, "node-b: .*lacks ninja (pip install ninja)"),
        (ADAM, {"stale_locks": ["/c/x/lock"]}, "Remove the lock"),
        (ADAM, {"nvcc": None}, "node-b: .*lacks the CUDA toolkit 12.6 (nvcc"),
        (QUANTIZED, {"nvcc": None}, "node-b: .*quantized_weights=false"),
        (["zero=stage3_zeropp"], {"compiler": False}, "node-b: .*a C++ compiler (apt-get install"),
        (["zero=infinity"], {"libaio": False}, "node-b: .*libaio with its header"),
        (["zero=infinity"], {"ninja": False}, "node-b: .*zero.offload_optimizer=nvme is an exten"),
        (NVME, {"nvme": FULL | {"writable": False}}, "node-b: .*zero.nvme_path=/nvme is not wri"),
        (LARGE, {"nvme": FULL}, "node-b: .*has 1 GiB free, and the states of its ranks take"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_an_error(
    overrides: list[str], change: dict[str, Any], message: str
) -> None:
    here = facts(libaio=True, nvme={"writable": True, "free_bytes": 10**14})
    found = judge(here, {**here, **change}, *overrides).errors
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    assert any(re.search(pattern, error) for error in found), found
    equal = judge(here, here, *overrides, offsets_s={"node-a": 0.1, "node-b": -0.3})
    assert equal.errors == equal.warnings == []
    if "code" in change:  # rsync brings it, after the hosts are asked
        assert judge(here, {**here, **change}, "launch.sync=rsync").errors == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"free_bytes": GIB // 2}, "0.5 GiB free"),
        ({"shm_bytes": 64 * 1024**2}, "/dev/shm has 64 MiB"),
        ({"open_files": 1024}, "at most 1024 open files"),
        ({"stale_locks": ["/c/x/lock"]}, "Remove the lock"),
        ({"packages": {**PACKAGES, "numpy": "2.0.0"}}, "numpy differs"),
        ({"locked_bytes": 65536}, None),
        (
            {"locked_bytes": 65536, "infiniband": [IB_PORT]},
            "node-b: processes may lock 64 KiB of memory (ulimit -l)",
        ),
        (
            {"infiniband": [{**IB_PORT, "state": "DOWN"}]},
            "no port of its InfiniBand adapters is active (mlx5_0:1 DOWN)",
        ),
    ],
)
def test_what_may_hurt_is_a_warning(change: dict[str, Any], message: str | None) -> None:
    findings = judge(facts(), facts(**change))
    assert findings.errors == []
    assert len(findings.warnings) == (message is not None)
    assert all(str(message) in warning for warning in findings.warnings)
    (clock,) = judge(facts(), facts(), offsets_s={"node-b": 90.0}).warnings
    assert "node-b: its clock is +90 s off" in clock


def test_the_code_by_its_content(tmp_path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "launch/agent.py", "pass\n")
        (tmp_path / name / f"{name}.pyc").touch()
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert program.code_hash(one) == program.code_hash(two) is not None
    (tmp_path / "two/launch/agent.py").write_text("pass \n")
    assert program.code_hash(one) != program.code_hash(two)
    assert program.code_hash(str(tmp_path / "nothing")) is program.code_hash("") is None


def test_the_index_that_serves_all_hosts() -> None:
    """PyPI's torch of CUDA 13 runs on the A100s and not on the V100s, and its driver is newer."""
    old = judge(facts(torch_build=CUDA13), facts(torch_build=CUDA13), "precision=fp16").errors
    index = '"torch==2.13.0+cu126" --index-url https://download.pytorch.org/whl/cu126'
    assert len(old) == 3
    assert all(f"pip install --force-reinstall {index}" in error for error in old)
    assert "node-a: NVIDIA driver 570.86.15 is too old for torch 2.13.0" in old[0]
    assert "needs driver 580" in old[0]
    assert index in cuda_builds.advice([8.0], [550], torch="2.13.0"), "what the driver runs"
    none = judge(facts(torch_build={"cuda": None}), facts()).errors
    assert "node-a: torch 2.13.0 is built without CUDA" in none[0]


@pytest.mark.parametrize(
    ("capability", "runs_126", "runs_130"),
    [
        *((old, True, False) for old in (5.2, 7.0)),
        *((each, True, True) for each in (7.5, 8.0, 8.6, 8.9, 9.0)),
        *((new, False, True) for new in (10.0, 12.1)),
    ],
)
def test_the_gpus_that_a_build_runs_on(capability: float, runs_126: bool, runs_130: bool) -> None:
    assert cuda_builds.has_code_for(capability, CU126) is runs_126
    assert cuda_builds.has_code_for(capability, CU130) is runs_130
    indices = {index.name: index for index in cuda_builds.INDICES}
    for name, runs in (("cu126", runs_126), ("cu130", runs_130)):
        assert (indices[name].oldest <= capability <= indices[name].newest) is runs
    assert cuda_builds.has_code_for(capability, ["sm_90a", "noise"]) is (capability == 9.0)
    assert cuda_builds.has_code_for(capability, ["compute_80"]) is (capability >= 8.0)
    assert "leave out the hosts of one kind" in cuda_builds.advice([7.0, 12.0], [580])


def test_each_bound_admits_its_pin_and_no_torch_without_a_build_for_v100s() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    lines = re.findall(
        r'^  "([\w-]+)(>=[^"]*,<[^"]*)"', (ROOT / "pyproject.toml").read_text(), re.M
    )
    bounds = {name: SpecifierSet(text) for name, text in lines}
    assert [name for name in bounds if name in pins and pins[name] not in bounds[name]] == []
    major, minor = cuda_builds.INDICES[1].last_torch
    assert f"{major}.{minor + 1}" not in bounds["torch"]


@pytest.mark.parametrize(
    ("torch", "command"),
    [
        ("2.13.0", '"torch==2.13.0+cu126" --index-url https://download.pytorch.org/whl/cu126'),
        ("2.15.1+cu132", '"torch==2.14.0+cu126" --index-url'),  # the last one of that index
        ("2.4.0", '"torch==2.6.0+cu126" --index-url'),
        (None, "torch --index-url https://download.pytorch.org/whl/cu126"),
    ],
)
def test_the_printed_command_replaces_an_installed_build(torch: str | None, command: str) -> None:
    """pip takes any build of a version for satisfied, unless its suffix is asked for."""
    advice = cuda_builds.advice([7.0, 8.0], [570], torch=torch)
    assert f"pip install --force-reinstall {command}" in advice


@pytest.mark.parametrize(
    ("gpus", "index"),
    [
        ("8.0, 570.86.15", "cu126"),
        ("8.0, 580.65.06\n7.0, 580.65.06", "cu126"),
        ("8.0, 580.65.06\\n12.0, 580.65.06", ""),
        ("[N/A], 580.65.06", ""),
    ],
)
def test_make_takes_the_index_of_this_machines_gpus(tmp_path, gpus: str, index: str) -> None:
    write(tmp_path / "nvidia-smi", f"#!/bin/sh\nprintf '{gpus}\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    make = ["make", "-C", str(ROOT), "--dry-run", "venv", f"VENV={tmp_path}/venv"]
    url = "https://download.pytorch.org/whl/"
    of_index = f"'torch==2.13.0+{index}' --index-url {url}{index}"
    for words, expected in (
        ([], of_index if index else "torch==2.13.0"),
        (["TORCH_INDEX="], "torch==2.13.0"),
        ([f"TORCH_INDEX={url}cu999"], f"'torch==2.13.0+cu999' --index-url {url}cu999"),
    ):
        said = subprocess.check_output([*make, *words], env=environ, text=True)
        (line,) = [line for line in said.splitlines() if "torch==" in line]
        assert line.split("--quiet ")[1] == expected


@pytest.mark.parametrize(
    ("nvcc", "cuda", "skips", "error", "warning"),
    [
        ("12.4", "12.6", False, "", ""),
        ("13.2", "13.0", False, "(nvcc is 13.2; or set launch.env.DS_SKIP_CUDA_CHECK=1)", ""),
        ("13.2", "13.0", True, "", "compiles its extensions with CUDA 13.2 for a torch of CUDA 13"),
        ("12.8", "13.0", True, "(nvcc is 12.8)", ""),
    ],
)
def test_the_minor_version_of_nvcc(nvcc, cuda, skips, error, warning) -> None:
    """DeepSpeed has no list of minor versions of CUDA 13 that go together."""
    build = {**CUDA12, "cuda": cuda}
    host = facts(nvcc=nvcc, skips_cuda_check=skips, torch_build=build, driver="580.65.06")
    findings = judge(host, host, "optim.kind=fused_adam")
    assert [text for text in findings.errors if error in text] == findings.errors
    assert bool(findings.errors) == bool(error)
    assert bool(findings.warnings) == bool(warning)
    assert all(warning in text for text in findings.warnings)


def test_deepspeeds_own_list_of_minor_versions() -> None:
    from deepspeed.ops.op_builder.builder import cuda_minor_mismatch_ok as listed

    versions = [f"{major}.{minor}" for major in (11, 12, 13) for minor in range(10)]
    for nvcc in versions:
        for cuda in versions:
            together = {nvcc, cuda} <= set(listed.get(int(nvcc[:2]), ())) or nvcc == cuda
            assert cuda_builds.compiles_for(nvcc, cuda) is together, (nvcc, cuda)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.attention=flash_attention_2", "needs the package flash-attn .*=auto"),
        ("model=llama2_7b adapter=qlora zero=stage2", "=nf4 needs .*bitsandbytes .*qlora"),
        ("optim=adam8bit zero=stage0", "optim.kind=adam8bit needs .*bitsandbytes .*optim=ad"),
    ],
)
def test_what_was_chosen_needs_its_package(words: str, message: str) -> None:
    done = composed("hardware=a100x8", "precision=bf16", *words.split())
    for modules, says in (([], message), (program.MODULES, None)):
        surveys = {"localhost": facts(gpus=8, modules=[*modules])}
        errors = compare_hosts(done.experiment, done.plan, surveys).errors
        assert len(errors) == (says is not None)
        assert all(re.search(str(says), error) for error in errors)


@pytest.mark.parametrize(
    ("words", "gpus", "nvme"),
    [(["hardware=cpu2"], False, None), (["hardware=a100x8", *NVME], True, "/nvme")],
)
def test_what_is_asked_of_hosts(words: list[str], gpus: bool, nvme: str | None) -> None:
    done = composed(*words)
    asked = asked_of_hosts(done.experiment.zero, done.experiment.optim, done.plan)
    assert asked == {"torch": gpus, "gpu_processes": gpus, "aio": nvme is not None, "nvme": nvme}


def test_memory_of_gpus_in_use_names_its_owner() -> None:
    """GPU 5 is not one of the two that ranks use."""
    process = {"mib": 30121, "uuid": "GPU-a1", "pid": 4711, "user": "ada", "command": "train.py"}
    busy = facts(gpu_processes=[{**process, "gpu": gpu} for gpu in "15"])
    gpus = {"node-a": ["0", "1"], "node-b": ["0", "1"]}
    (problem,) = judge(facts(), busy, gpus=gpus).busy
    assert problem.startswith(
        "node-b: GPU 1 has 30,121 MiB in use by process 4711 of ada (train.py). Wait"
    )
    assert judge(facts(), busy, gpus={"node-b": ["0", "2"]}).busy == []
    assert len(judge(facts(), busy, gpus={"node-b": ["GPU-a1"]}).busy) == 2


# As nvidia-smi prints it with --format=csv,noheader,nounits.
A100 = "0, GPU-a, 4, 40960, 0, 0x0000000000000001, 400.00, 400.00, 4, 16, 16, 31\n"
V100_SICK = "1, GPU-b, 16131, 32768, 2, 0x0000000000000048, 250.00, 300.00, 3, 8, 16, 88\n"
GTX = "2, GPU-c, 11, 8192, [N/A], [Not Supported], [N/A], [N/A], 3, 16, 16, 40\n"


def test_the_state_of_the_gpus() -> None:
    states = program.parse_gpu_states(f"{A100}{V100_SICK}{GTX}No devices were found\n")
    assert [state["gpu"] for state in states] == ["0", "1", "2"]
    assert states[1]["slowed_by"] == 0x48
    assert states[2]["ecc_errors"] is states[2]["power_limit_w"] is None
    gpus = {"node-a": ["0", "GPU-b", "2"], "node-b": ["0"]}
    assert judge(facts(gpu_states=[states[0], states[2]]), facts(), gpus=gpus).warnings == []
    warnings = judge(facts(gpu_states=states), facts(), gpus=gpus).warnings
    for warning, said in zip(
        warnings,
        (
            "2 uncorrectable ECC errors since its driver was loaded: processes on it crash",
            "is slowed down at 88 °C by heat (the hardware itself), and all ranks wait for it",
            "is limited to 250 of 300 W, which makes it slower",
            "uses 8 of 16 PCIe lanes: copies to the host take longer",
            "16,131 MiB in use by a process that cannot be seen from here (a container",
        ),
        strict=True,
    ):
        assert warning.startswith("node-a: GPU 1 ")
        assert said in warning


def surveyed(*words: str, **env: str) -> dict[str, Any]:
    """By the program alone, as a host runs it."""
    isolated = [] if "PYTHONPATH" in env else ["-I"]
    argv = [sys.executable, *isolated, program.__file__, *words]
    env = {**os.environ, **env}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_the_cuda_of_torch_without_importing_it(tmp_path) -> None:
    write(tmp_path / "torch/__init__.py", "raise SystemExit('imported')\n")
    version = (
        "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None"
    )
    write(tmp_path / "torch/version.py", version)
    found = surveyed(str(tmp_path), PYTHONPATH=str(tmp_path))
    assert found["torch_build"] == {"cuda": "13.0"}
    write(tmp_path / "torch/version.py", "cuda = None\nhip: str = '6.4.43482-0f2d60242'\n")
    text = "from llmx.hardware.survey import toolkit_of_torch as of; print(of('cuda'), of('hip'))"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, "-c", text]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "None 6.4.43482\n"


def test_what_is_read_from_files_of_a_host(tmp_path: Path, monkeypatch) -> None:
    assert program.count_gpus(f"{tmp_path}/") is None
    for node, gpu in enumerate((0, 0, 41123, 3391)):  # two CPUs, two GPUs of AMD
        write(tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id", f"{gpu}\n")
    assert program.count_gpus(f"{tmp_path}/") == 2
    for name, text in {"state": "4: ACTIVE", "rate": "100 Gb/sec (4X EDR)"}.items():
        write(tmp_path / "adapters/mlx5_0/ports/1" / name, f"{text}\n")
    (port,) = program.infiniband_ports(str(tmp_path / "adapters"))
    assert port == {**IB_PORT, "rate": "100 Gb/sec (4X EDR)"}
    # The CUDA compiler where torch looks.
    write(
        tmp_path / "bin/nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 12.6, V12.6.85'\n"
    )
    (tmp_path / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert program.nvcc() == "12.6"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "runtime_only"))
    assert program.nvcc() is None
    # A host is asked over ssh, where no environment is activated; the PATH of the ranks begins
    # beside their Python.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not program.which("ninja")
    (tmp_path / "ninja").touch(mode=0o755)
    assert program.which("ninja")


def test_the_program_runs_by_itself(tmp_path) -> None:
    """Here torch has no CUDA; and the compiler looks for libaio as DeepSpeed does."""
    old = tmp_path / "torch_extensions" / "py311_cpu" / "cpu_adam" / "lock"
    write(old, "")
    os.utime(old, (0, 0))
    env = {"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": str(tmp_path)}
    place = str(tmp_path / "not/there")
    asked = json.dumps({"torch": True, "aio": True, "nvme": place})
    found = surveyed(place, "", asked, **env)
    assert set(found) == {*facts(), "stamp"}
    assert "arch_list" in found["torch_build"]
    assert isinstance(found["libaio"], bool)
    assert found["nvme"]["writable"]
    assert found["packages"]["torch"]
    assert found["free_bytes"] > 0
    assert found["stale_locks"] == [str(old)]


def storage(at_once: int | None, kept: int | None) -> StoragePlan:
    """Checkpoints of 10 GiB and a model of 2 GiB."""
    return StoragePlan((), 10 * GIB, kept, at_once, 2 * GIB, private=False)


@pytest.mark.parametrize(
    ("plan", "there", "first", "most", "says"),
    [
        (storage(3, 2), 0, 20, 30, "the first one is removed only when the second is complete"),
        (storage(1, 1), 0, 12, 12, "GiB: with the final model at least"),  # one save, at the end
        (storage(0, 0), 0, 2, 2, "GiB of free disk space, and the final model takes"),
        (storage(None, None), 0, 20, 20, "checkpoint=none saves no training state"),
        (storage(3, 2), 1, 10, 20, "the last one is removed only when the next is"),  # resumed
        (storage(3, 2), 2, 10, 10, ""),
        (storage(3, 2), 9, 10, 10, ""),
    ],
)
def test_the_space_that_is_needed(
    plan: StoragePlan, there: int, first: int, most: int, says: str
) -> None:
    """``first``: without it an error; ``most``: without it a warning."""

    def found(free: int) -> tuple[str, str]:
        disk = {"free_bytes": free, "checkpoints": there}
        return disk_problem(plan, None, disk, where="node-a: /runs/a")

    error, none = found(first * GIB - 1)
    assert error.startswith(f"node-a: /runs/a has {first}.0 GiB of free")
    assert f" {first}.0 GiB" in error[30:]
    assert says in error
    assert none == ""
    for free in (first * GIB, most * GIB - 1)[: 2 * (most > first)]:
        error, warning = found(free)
        assert error == ""
        assert f"up to {most}.0 GiB more is needed: 3 checkpoints of 10.0 GiB" in warning
        assert "With checkpoint.keep.last=1 they take 20.0 GiB" in warning
    assert found(most * GIB) == ("", "")


def test_a_host_with_a_disk_of_its_own() -> None:
    plan = composed("model=llama3_8b", "hardware=a100x2_v100x2", "launch=rsync").plan
    disk = {"free_bytes": 0, "checkpoints": 0}
    sizes = []
    for host in (None, "node-b"):
        error, _ = disk_problem(plan.storage, host, disk, where="/runs/a")
        sizes.append(float(re.findall(r"takes ([\d.]+) GiB", error)[0]))
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.02)
    assert disk_problem(None, None, disk, where="/runs/a") == ("", "")
    unknown = composed("model=hf", "model.path=owner/name", "hardware=a100x8").plan
    assert disk_problem(unknown.storage, None, disk, where="/runs/a") == ("", "")


@pytest.mark.usefixtures("made_up_traces")
def test_ram_that_is_not_there() -> None:
    plan = planned(["model=llama3_8b", "hardware=a100x8", "zero=stage2_offload"]).plan
    (host,) = plan.storage.hosts
    for found in ({"ram_available_bytes": 1000 * GIB}, {"ram_available_bytes": None}, {}):
        assert ram_problem(host, "node-a", found) == "", "{}: a survey of an older llmx"
    text = ram_problem(host, "node-a", {"ram_available_bytes": 64 * GIB})
    assert re.match(r"node-a: .*64\.0 GiB available now.*zero=infinity", text)


@pytest.mark.usefixtures("made_up_traces")
def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    found = space_facts(str(tmp_path / "run" / "not" / "there"))
    assert found["checkpoints"] == 0
    disk = os.statvfs(tmp_path)
    assert found["free_bytes"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.2)
    assert GIB / 16 < found["ram_available_bytes"] < 2**50
    (tmp_path / "checkpoints/step-00000010").mkdir(parents=True)
    (tmp_path / "checkpoints/.step-00000020.partial").mkdir()
    (tmp_path / "checkpoints/latest").touch()
    assert space_facts(str(tmp_path))["checkpoints"] == 1
    plan = planned(["model=llama3_8b", "hardware=a100x8"]).plan
    little = {"free_bytes": GIB, "checkpoints": 0, "ram_available_bytes": GIB}
    problems = problems_here(plan, "/runs/a", little)
    assert problems[0].startswith("/runs/a has 1.0 GiB of free disk space")
    assert problems[1].startswith("this machine: ")
