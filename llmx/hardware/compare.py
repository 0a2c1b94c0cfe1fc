"""Finds what keeps hosts from training together, by their surveys. Pure.

Errors stop the launch with the fix; warnings are shown and the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmx import text as human
from llmx.config.optimizers import optimizer_of
from llmx.config.schema import (
    Experiment,
    HardwareConfig,
    OptimConfig,
    ZeroConfig,
)
from llmx.plan import cuda_builds
from llmx.plan.types import HostStorage, Plan, StoragePlan
from llmx.text import plural

MIB, GIB = 1024**2, 1024**3


@dataclass(frozen=True)
class Extension:
    """An extension that DeepSpeed compiles on each host for a setting of the config."""

    setting: str
    instead: str
    """The override to set where it cannot be compiled."""
    cuda: bool = False
    """Needs NVIDIA's compiler, of the CUDA that torch is built for."""
    libaio: bool = False


def extensions(zero: ZeroConfig, optim: OptimConfig) -> tuple[Extension, ...]:
    """The extensions of an experiment, none of which a rank can do without."""
    compiled = []
    if compiler := optimizer_of(optim.kind).compiled:
        setting = f"optim.kind={optim.kind}"
        compiled.append(Extension(setting, "optim.kind=adamw", cuda=compiler == "cuda"))
    for key in ("quantized_weights", "quantized_gradients"):
        if getattr(zero, key):
            compiled.append(Extension(f"zero.{key}=true", f"zero.{key}=false", cuda=True))
    if "nvme" in (zero.offload_optimizer, zero.offload_param):
        key = "offload_optimizer" if zero.offload_optimizer == "nvme" else "offload_param"
        compiled.append(Extension(f"zero.{key}=nvme", f"zero.{key}=cpu", libaio=True))
    return tuple(compiled)


def asked_of_hosts(zero: ZeroConfig, optim: OptimConfig, plan: Plan) -> dict[str, Any]:
    """The further questions to a survey of this experiment (``llmx/hardware/survey.py``)."""
    nvme = any(extension.libaio for extension in extensions(zero, optim))
    return {
        "torch": plan.on_gpus,
        "gpu_processes": plan.on_gpus,
        "aio": nvme,
        "nvme": zero.nvme_path if nvme else None,
    }


AUTO = "model.attention=auto, which uses what is installed"
BITSANDBYTES = ("bitsandbytes", "bitsandbytes (pip install 'llmx[qlora]')")
PACKAGES = {
    "model.attention=flash_attention_2": (
        "flash_attn", "flash-attn (pip install flash-attn --no-build-isolation)", AUTO
    ),
    "model.attention=flash_attention_3": (
        "flash_attn_interface",
        "flash-attn-3 (https://github.com/Dao-AILab/flash-attention, directory hopper)", AUTO
    ),
    "adapter.quantize=nf4": (*BITSANDBYTES, "adapter=lora"),
    "adapter.quantize=fp4": (*BITSANDBYTES, "adapter=lora"),
    "optim.kind=adam8bit": (*BITSANDBYTES, "optim=adamw"),
}  # fmt: skip
"""A choice -> the module that it needs, where that is from, and what to choose without it."""
CLOCK_S = 5.0
"""A difference of clocks that makes logs of hosts hard to read side by side."""


@dataclass
class Findings:
    """The result of a comparison of hosts, in sentences for the user."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    """GPUs of the run that other processes use."""


def compare_hosts(
    exp: Experiment,
    plan: Plan,
    surveys: Mapping[str, dict[str, Any]],
    *,
    offsets_s: Mapping[str, float] | None = None,
    gpus: Mapping[str, Sequence[str]] | None = None,
) -> Findings:
    """Judge the surveys of the hosts, by name, in hostfile order.

    ``offsets_s``: each host's clock minus the supervisor's, seconds; ``gpus``: of the ranks of each
    host (``llmx.launch.environment.gpus_of_hosts``).
    """
    findings = Findings()
    _compare_versions(findings, surveys)
    if exp.launch.sync != "rsync":  # with it the code comes after the survey
        codes = {name: facts.get("code") for name, facts in surveys.items()}
        fix = "Install the same version on all of them, or set launch.sync=rsync, which copies it."
        findings.errors += _differs("The code of llmx", codes, fix)
    if plan.on_gpus:
        findings.errors += cuda_builds.problems(
            {
                name: {
                    "capabilities": facts.get("capabilities"),
                    "driver": facts.get("driver"),
                    "torch": facts["packages"].get("torch"),
                    **_torch(facts),
                }
                for name, facts in surveys.items()
            }
        )
        findings.errors += _devices(exp.hardware, plan, surveys)
    for name, facts in surveys.items():
        gpus_of_host = (gpus or {}).get(name, ())
        findings.errors += _missing_gpus(name, gpus_of_host, facts)
        findings.busy += _gpus_in_use(name, gpus_of_host, facts)
        findings.warnings += _gpu_health(name, gpus_of_host, facts)
        findings.warnings += _infiniband(exp, name, facts)
        _check_host(findings, exp, plan, name, facts)
    for name, offset_s in (offsets_s or {}).items():
        if abs(offset_s) > CLOCK_S:
            findings.warnings.append(
                f"{name}: its clock is {offset_s:+.0f} s off; start chrony or ntpd on this host."
            )
    return findings


def _compare_versions(findings: Findings, surveys: Mapping[str, dict[str, Any]]) -> None:
    pythons = {name: facts["python"].rsplit(".", 1)[0] for name, facts in surveys.items()}
    findings.errors += _differs("Python", pythons, "Install one version.")
    has_gpus = any(facts["gpus"] for facts in surveys.values())
    for package in sorted({package for facts in surveys.values() for package in facts["packages"]}):
        versions = {name: facts["packages"].get(package) for name, facts in surveys.items()}
        fix = "Install the same version on all hosts (pip install -c constraints.txt ...)."
        if package == "torch" and has_gpus and any(versions.values()):
            newest = max(filter(None, versions.values()))
            fix = cuda_builds.advice(*cuda_builds.requirements(surveys.values()), torch=newest)
        is_grave = package in ("torch", "deepspeed")
        sentences = findings.errors if is_grave else findings.warnings
        sentences += _differs(package, versions, fix)
    # What torch has loaded counts; the names of packages only where it could not be asked.
    loaded_by_torch = {name: _torch(facts).get("nccl") for name, facts in surveys.items()}
    installed = {name: ", ".join(facts["nccl"]) or "none" for name, facts in surveys.items()}
    findings.errors += _differs(
        "NCCL",
        loaded_by_torch if all(loaded_by_torch.values()) else installed,
        "Ranks with different NCCL fail at the first collective; install the same torch "
        "everywhere.",
    )


def _differs(what: str, values: Mapping[str, Any], fix: str) -> Iterator[str]:
    """A sentence where hosts differ: ``torch differs between hosts: 2.13.0 on a, b; 2.9.1 on c``.
    ``values``: by host."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(str(value), []).append(name)
    if len(groups) > 1:
        listed = "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
        yield f"{what} differs between hosts: {listed}. {fix}"


def _torch(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about the build of torch; empty where they are not known."""
    return facts.get("torch_build") or {}


def _torch_again(facts: Mapping[str, Any]) -> str:
    """The command that installs the torch of a host with what it needs."""
    version, cuda = facts["packages"].get("torch") or "", _torch(facts).get("cuda")
    if not version or not cuda:
        return "pip install --force-reinstall torch"
    public, build = version.split("+")[0], "cu" + cuda.replace(".", "")
    return (
        f'pip install --force-reinstall "torch=={public}+{build}" '
        f"--index-url {cuda_builds.INDEX}{build}"
    )


def _missing_gpus(name: str, gpus: Sequence[str], facts: Mapping[str, Any]) -> Iterator[str]:
    """GPUs that were chosen and are not there."""
    count = facts["gpus"] or 0
    over = [gpu for gpu in gpus if gpu.isdecimal() and int(gpu) >= count]
    if over and count >= len(gpus):
        yield (
            f"{name}: GPU {over[0]} is not there: this host has {plural(count, 'GPU')}, numbered "
            f"from 0. Use numbers below {count} in gpus of the host, or in CUDA_VISIBLE_DEVICES "
            "there."
        )


def _check_host(
    findings: Findings, exp: Experiment, plan: Plan, name: str, facts: dict[str, Any]
) -> None:
    model, zero, optim, adapter = exp.model, exp.zero, exp.optim, exp.adapter
    errors, warnings = findings.errors, findings.warnings
    slots = sum(host.slots for host in plan.hosts if host.name == name)
    if plan.on_gpus and (facts["gpus"] or 0) < slots:
        fix = "Set slots to the number of its GPUs."
        if not facts["gpus"]:
            fix = (
                "Run nvidia-smi there: its driver is not loaded, or the container was started "
                "without --gpus all. Else leave this host out."
            )
        errors.append(
            f"{name}: slots={slots}, but this host has {plural(facts['gpus'] or 0, 'GPU')}. {fix}"
        )
    if len(facts["nccl"]) > 1:
        errors.append(
            f"{name}: several NCCL builds are installed ({', '.join(facts['nccl'])}), and each "
            "overwrites the files of the other. Uninstall all of them and install torch again: "
            f"pip uninstall -y {' '.join(nccl.split('==')[0] for nccl in facts['nccl'])}; "
            f"{_torch_again(facts)}."
        )
    needed = extensions(zero, optim)
    errors += [line for extension in needed for line in _cannot_build(extension, plan, name, facts)]
    if any(extension.cuda for extension in needed) and _skips_cuda_check(facts):
        warnings.append(
            f"{name}: DS_SKIP_CUDA_CHECK=1: DeepSpeed compiles its extensions with CUDA "
            f"{facts['nvcc']} for a torch of CUDA {_torch(facts)['cuda']}, which is untested."
        )
    errors += _nvme(zero, plan, name, facts)
    for choice in (
        f"model.attention={model.attention}",
        f"adapter.quantize={adapter.quantize}",
        f"optim.kind={optim.kind}",
    ):
        module, package, instead = PACKAGES.get(choice, ("", "", ""))
        if module and module not in facts.get("modules", [module]):
            errors.append(
                f"{name}: {choice} needs the package {package}, which is not installed. Install it "
                f"on every host, or set {instead}."
            )
    if facts["stale_locks"]:
        line = (
            f"{name}: a build of an extension was left unfinished ({facts['stale_locks'][0]}); "
            'ranks would wait for it at "Loading extension module". Remove the lock.'
        )
        if needed:
            errors.append(line)
        else:
            warnings.append(line)
    if facts["free_bytes"] < GIB:
        warnings.append(
            f"{name}: {facts['free_bytes'] / GIB:.1f} GiB free on the disk of the run directory."
        )
    storage = storage_of(plan, name)
    through_shm = storage.shm_bytes if storage is not None else 0
    if plan.on_gpus and 0 < facts["shm_bytes"] < max(512 * MIB, through_shm):
        takes = f" (about {through_shm // MIB} MiB without P2P)" if through_shm else ""
        warnings.append(
            f"{name}: /dev/shm has {facts['shm_bytes'] // MIB} MiB; NCCL between GPUs of a host "
            f"may fail there{takes}. In a container: --shm-size=8g or --ipc=host."
        )
    if storage is not None and (text := ram_problem(storage, name, facts)):
        warnings.append(text)
    if 0 <= facts["open_files"] < 4096:
        warnings.append(
            f"{name}: at most {facts['open_files']} open files per process (ulimit -n); data "
            'workers may fail with "Too many open files". Raise it to 65536.'
        )


def _gpus_in_use(name: str, gpus: Sequence[str], facts: Mapping[str, Any]) -> Iterator[str]:
    """Memory that other processes have on the GPUs of a host's ranks."""
    for process in facts.get("gpu_processes", ()):
        if _is_of(process, gpus):
            yield (
                f"{name}: GPU {process['gpu']} has {process['mib']:,} MiB in use by process "
                f"{process['pid']} of {process['user']} ({process['command']}). Wait, end it, or "
                "list other GPUs (gpus of the host). launch.allow_busy=true starts this run beside "
                "it."
            )


def _is_of(gpu: Mapping[str, Any], gpus: Sequence[str]) -> bool:
    """Whether a GPU, or one with a process, is among those that ``gpus`` names."""
    return any(name == gpu["gpu"] or gpu["uuid"].startswith(name) for name in gpus)


SLOWED_BY = {
    0x40: "heat (the hardware itself)",
    0x20: "heat (the driver)",
    0x80: "the power supply (power brake)",
    0x08: "the hardware (heat or power)",
}
"""Bits of NVML's clock event reasons that are no regular operation, the most exact first."""
UNSEEN_MIB = 1024
"""Memory in use that the driver alone does not take."""


def _gpu_health(name: str, gpus: Sequence[str], facts: Mapping[str, Any]) -> Iterator[str]:
    """Faults that the driver reports of the GPUs of a host's ranks."""
    in_use = {process["gpu"] for process in facts.get("gpu_processes", ())}
    for state in facts.get("gpu_states", ()):
        gpu = state["gpu"]
        if not _is_of(state, gpus):
            continue
        if state["ecc_errors"]:
            errors = plural(int(state["ecc_errors"]), "uncorrectable ECC error")
            yield (
                f"{name}: GPU {gpu} has {errors} since its driver was loaded: processes on it "
                f"crash. Reset it (nvidia-smi --gpu-reset -i {gpu}); if errors come back, have it "
                "replaced."
            )
        reason = next((r for bit, r in SLOWED_BY.items() if int(state["slowed_by"] or 0) & bit), "")
        if reason:
            heat = "" if state["celsius"] is None else f" at {state['celsius']:.0f} °C"
            yield (
                f"{name}: GPU {gpu} is slowed down{heat} by {reason}, and all ranks wait for it. "
                f"Look at its cooling and power: nvidia-smi -q -i {gpu} -d PERFORMANCE,POWER."
            )
        limit_w, usual_w = state["power_limit_w"], state["usual_power_limit_w"]
        if limit_w and usual_w and limit_w < 0.95 * usual_w:
            yield (
                f"{name}: GPU {gpu} is limited to {limit_w:.0f} of {usual_w:.0f} W, which makes it "
                f"slower. Raise the limit: nvidia-smi -i {gpu} -pl {usual_w:.0f}."
            )
        if state["lanes"] and state["usual_lanes"] and state["lanes"] < state["usual_lanes"]:
            yield (
                f"{name}: GPU {gpu} uses {state['lanes']:.0f} of {state['usual_lanes']:.0f} PCIe "
                "lanes: copies to the host take longer. Seat the card or its riser again."
            )
        used_mib = state["used_mib"] or 0
        if used_mib > UNSEEN_MIB and gpu not in in_use:
            yield (
                f"{name}: GPU {gpu} has {used_mib:,.0f} MiB in use by a process that cannot be "
                f"seen from here (a container, another user). On the host itself: sudo fuser -v "
                f"/dev/nvidia{gpu}. Or list other GPUs (gpus of the host)."
            )


def _infiniband(exp: Experiment, name: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """Why NCCL would not use InfiniBand or RoCE, or fail with it."""
    ports = facts.get("infiniband", ())
    of_host = next((host.env for host in exp.hardware.hosts if host.name == name), {})
    environment = {**exp.hardware.env, **of_host, **exp.launch.env}
    active = [port for port in ports if port["state"] == "ACTIVE"]
    if not ports or environment.get("NCCL_IB_DISABLE") == "1":
        return
    if not active:
        listed = ", ".join(f"{port['port']} {port['state'] or 'unknown'}" for port in ports)
        yield (
            f"{name}: no port of its InfiniBand adapters is active ({listed}): NCCL uses TCP, "
            "which is slower. Look at the cable, the switch and its subnet manager (ibstat)."
        )
        return
    if 0 <= facts.get("locked_bytes", -1) < 64 * MIB:
        yield (
            f"{name}: processes may lock {facts['locked_bytes'] // 1024} KiB of memory "
            "(ulimit -l). InfiniBand locks its buffers: NCCL fails with Cannot allocate memory. "
            "Set memlock to unlimited (/etc/security/limits.conf, in Slurm also "
            "PropagateResourceLimitsExcept=MEMLOCK)."
        )


def runs_on(name: str, ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Other runs of llmx on a host. ``ranks``: as its agent lists them (``Agent.do_busy``)."""
    runs: dict[tuple[str, bool], list[str]] = {}
    for rank in ranks:
        runs.setdefault((rank["run_dir"], rank["is_dead"]), []).append(str(rank["pid"]))
    for (run_dir, is_dead), pids in runs.items():
        processes = " ".join(pids)
        if is_dead:
            yield (
                f"{name}: processes of {run_dir} are here, without an agent of its supervisor. If "
                f"python -m llmx status {run_dir} says that the run is dead, end them: kill -9 "
                f"{processes}"
            )
        else:
            yield (
                f"{name}: {run_dir} trains here now (processes {processes}). Wait, or use other "
                "hosts."
            )


def _cannot_build(
    extension: Extension, plan: Plan, name: str, facts: Mapping[str, Any]
) -> Iterator[str]:
    """Why a host cannot compile what DeepSpeed compiles there, if it cannot."""
    missing = []
    if not facts["compiler"]:
        missing.append("a C++ compiler (apt-get install g++)")
    if not facts["ninja"]:
        missing.append("ninja (pip install ninja)")
    if extension.libaio and facts.get("libaio") is False and facts["compiler"]:
        missing.append("libaio with its header (apt-get install libaio-dev)")
    cuda = _torch(facts).get("cuda")
    if extension.cuda and plan.on_gpus and "nvcc" in facts:
        nvcc = facts["nvcc"]
        if not nvcc:
            missing.append(f"the CUDA toolkit {cuda or ''}".rstrip() + " (nvcc; set CUDA_HOME)")
        elif cuda and not cuda_builds.compiles_for(nvcc, cuda) and not _skips_cuda_check(facts):
            same_major = nvcc.split(".")[0] == cuda.split(".")[0]
            instead = "; or set launch.env.DS_SKIP_CUDA_CHECK=1" if same_major else ""
            missing.append(f"the CUDA toolkit {cuda} of torch (nvcc is {nvcc}{instead})")
    if missing:
        yield (
            f"{name}: {extension.setting} is an extension that DeepSpeed compiles on each host, "
            f"and this one lacks {' and '.join(missing)}. Install it, or set {extension.instead}."
        )


def _skips_cuda_check(facts: Mapping[str, Any]) -> bool:
    """Whether DS_SKIP_CUDA_CHECK=1 lets DeepSpeed compile with another minor version of CUDA;
    another major one torch itself refuses."""
    nvcc, cuda = facts.get("nvcc"), _torch(facts).get("cuda")
    if not nvcc or not cuda or cuda_builds.compiles_for(nvcc, cuda):
        return False
    return bool(facts.get("skips_cuda_check")) and nvcc.split(".")[0] == cuda.split(".")[0]


def _nvme(zero: ZeroConfig, plan: Plan, name: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the disk that states are offloaded to."""
    disk, path, storage = facts.get("nvme"), zero.nvme_path, storage_of(plan, name)
    need = (storage.nvme_bytes if storage is not None else None) or 0
    if disk and not disk["writable"]:
        yield (
            f"{name}: zero.nvme_path={path} is not writable. Set it to a directory of a fast disk "
            "that exists on every host."
        )
    elif disk and disk["free_bytes"] < need:
        yield (
            f"{name}: zero.nvme_path={path} has {disk['free_bytes'] / GIB:.0f} GiB free, and the "
            f"states of its ranks take {need / GIB:.0f} GiB. Free some space, or give another disk."
        )


def storage_of(plan: Plan, name: str) -> HostStorage | None:
    """The part of the plan's storage that is a host's; None where it is not known."""
    return None if plan.storage is None else plan.storage.on(name)


def _devices(
    hardware: HardwareConfig, plan: Plan, surveys: Mapping[str, dict[str, Any]]
) -> Iterator[str]:
    """GPUs that are not those that the hardware file describes."""
    for host in plan.hosts:
        capabilities = (surveys.get(host.name) or {}).get("capabilities") or []
        described = hardware.devices[host.device].compute_capability
        if described and capabilities and described not in capabilities:
            listed = ", ".join(sorted({f"{capability:g}" for capability in capabilities}))
            yield (
                f"{host.name}: device={host.device} has compute capability {described:g}, but its "
                f"GPUs have {listed}. Name the true device in the hardware file."
            )


def disk_problem(
    storage: StoragePlan | None, host: str | None, facts: Mapping[str, Any], *, where: str
) -> tuple[str, str]:
    """(error, warning) where a run has too little disk space; empty where it has enough, or where
    the sizes are not known.

    Args:
        host: one with a run directory of its own; None is the launching machine, which has whole
            checkpoints.
        facts: free bytes and checkpoints of the run on that disk (``survey.space_facts``).
        where: the host and the run directory, for the sentences.
    """
    if storage is None:
        return "", ""
    sizes = storage.on(host) or storage
    checkpoint, model = sizes.checkpoint_bytes, sizes.model_bytes
    if checkpoint is None or model is None:
        return "", ""
    at_once, at_rest, present = (
        storage.checkpoints_at_once, storage.checkpoints_kept, facts.get("checkpoints", 0)
    )  # fmt: skip
    has = f"{where} has {human.size(facts['free_bytes'])} of free disk space"
    # The first checkpoint and the second one, which is complete before the first is removed; then
    # the model beside the last one.
    at_first = 2 if at_once is None else min(2, at_once)
    new, stays = max(at_first - present, min(1, at_first)), max(0, min(1, at_first) - present)
    least = max(new * checkpoint, stays * checkpoint + model)
    if facts["free_bytes"] < least:
        instead = "Free some space, or set run_dir to a directory on a larger disk."
        if at_once == 0:
            return f"{has}, and the final model takes {human.size(least)}. {instead}", ""
        text = f"{has}. A checkpoint takes {human.size(checkpoint)}"
        if present:
            text += ", and the last one is removed only when the next is complete"
        elif at_first > 1:
            text += ", and the first one is removed only when the second is complete"
        text += f": with the final model at least {human.size(least)} is needed. {instead}"
        return f"{text} checkpoint=none saves no training state.", ""
    needed = storage.disk_bytes(checkpoint, model)
    if needed is None or at_once is None or at_rest is None:
        return "", ""
    needed -= min(present, at_rest) * checkpoint
    if facts["free_bytes"] >= needed:
        return "", ""
    text = (
        f"{has}, and up to {human.size(needed)} more is needed: {plural(at_once, 'checkpoint')} of "
        f"{human.size(checkpoint)} at once, and model/. When the disk is full, saves fail."
    )
    if at_rest > 1:
        fewer = replace(storage, checkpoints_at_once=min(2, at_once), checkpoints_kept=1)
        text += (
            f" With checkpoint.keep.last=1 they take "
            f"{human.size(fewer.disk_bytes(checkpoint, model) or 0)}, if neither "
            "checkpoint.keep.best nor checkpoint.keep.every keeps more."
        )
    return "", text


def problems_here(plan: Plan, run_dir: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Sentences about what this machine lacks now, of RAM for its ranks and of disk
    (``survey.space_facts``)."""
    problems = [*disk_problem(plan.storage, None, facts, where=run_dir)]
    local = {host.name for host in plan.hosts if host.is_local}
    for host in plan.storage.hosts if plan.storage is not None else ():
        if local & set(host.hosts):
            problems.append(ram_problem(host, "this machine", facts))
    return tuple(text for text in problems if text)


def ram_problem(host: HostStorage, name: str, facts: Mapping[str, Any]) -> str:
    """A warning where a host has less RAM available than the plan takes; empty otherwise."""
    available, needed = facts.get("ram_available_bytes"), host.ram_bytes
    if not available or needed is None or needed <= available:
        return ""
    return (
        f"{name}: {human.size(needed)} of RAM predicted, {human.size(available)} available now: "
        f"the kernel may kill ranks. {host.less_ram}"
    )
