"""The interface of a transport, and what all transports share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llmx.launch.render.environment import render_ds_env
from llmx.launch.render.hostfile import HostSlots
from llmx.launch.spec import LaunchSpec


class Transport:
    """One way of starting ranks on hosts. Stateless: everything comes from the arguments."""

    name: str
    programs: tuple[tuple[str, str], ...] = ()
    """What must be on PATH of this machine: (program, Debian package)."""
    has_agents = True
    """Whether the supervisor starts an agent on every other host over ssh."""
    ends_by_itself = True
    """Whether to wait for the launcher after the last rank has exited: one that removes files of
    its own. DeepSpeed's leaves nothing, and takes two to three seconds to notice."""
    ds_env_for_shell = True
    """Whether a shell on the other host reads the values of ``ds_env``."""

    def argv(self, spec: LaunchSpec) -> list[str]:
        """The exact ``deepspeed`` command."""
        raise NotImplementedError

    def env(self, spec: LaunchSpec) -> dict[str, str]:
        """What the transport adds to the environment of ``deepspeed``."""
        return {"DS_ENV_FILE": str(spec.run_dir.ds_env)}

    def ds_env(self, env: Mapping[str, str]) -> str:
        """The text of ``RUN_DIR/ds_env`` for the environment of a rank."""
        return render_ds_env(env, shell=self.ds_env_for_shell)

    def hostfile(self, spec: LaunchSpec) -> Iterable[HostSlots]:
        """The lines of ``RUN_DIR/hostfile``."""
        return [HostSlots(host.name, host.slots) for host in spec.plan.hosts]

    def further_files(self, spec: LaunchSpec) -> dict[str, str]:
        """Files of the run directory that only this transport needs: name -> text."""
        return {}

    def cancel(self, spec: LaunchSpec, *, force: bool) -> list[list[str]]:
        """Commands for this machine that end ranks which no agent reaches: with SIGTERM, or
        (``force``) with SIGKILL."""
        return []

    def signal(self, spec: LaunchSpec, name: str) -> list[list[str]]:
        """Commands for this machine that send ``SIG<name>`` to ranks which no agent reaches."""
        return []


def deepspeed_argv(spec: LaunchSpec, launcher: list[str]) -> list[str]:
    """``deepspeed`` with every value explicit that it would guess otherwise.

    Given a hostfile, DeepSpeed checks its first host over ssh with the user's own settings, unless
    told not to; the address and the port would be ``hostname -I`` and 29500.
    """
    script = Path(spec.python).parent / "deepspeed"
    # The first line of the script names its Python: a kernel reads no blank in it, and 127 bytes.
    runs = script.is_file() and " " not in str(script) and len(os.fsencode(spec.python)) < 125
    return [
        *([str(script)] if runs else [spec.python, "-m", "deepspeed.launcher.runner"]),
        f"--hostfile={spec.run_dir.hostfile}",
        "--no_ssh_check",
        f"--master_addr={spec.plan.master_addr}",
        f"--master_port={spec.port}",
        *launcher,
    ]


def module_argv(spec: LaunchSpec) -> list[str]:
    """The program of a rank as a module, with one argument and no ``--local_rank``."""
    return ["--module", "--no_local_rank", spec.worker, str(spec.run_dir.root)]


def chosen_devices(spec: LaunchSpec) -> dict[str, list[int]]:
    """The GPUs of each host by index, where ``hardware`` names some; empty: the first ones."""
    if spec.plan.accelerator != "cuda":
        return {}
    used = {host.name: host.slots for host in spec.plan.hosts}
    named = {
        host.name: list(host.device_indices)
        for host in spec.exp.hardware.hosts
        if host.device_indices
    }
    if not used.keys() & named.keys():
        return {}
    return {name: named.get(name) or list(range(slots)) for name, slots in used.items()}


def include_argv(devices: Mapping[str, Sequence[int]]) -> list[str]:
    """``--include`` of ``deepspeed`` for the chosen GPUs: its launcher makes only them visible."""
    if not devices:
        return []
    parts = (f"{name}:{','.join(map(str, chosen))}" for name, chosen in devices.items())
    return [f"--include={'@'.join(parts)}"]


def slots_for(devices: Mapping[str, Sequence[int]]) -> list[HostSlots]:
    """The hostfile for ``include_argv``: DeepSpeed needs slots up to the highest index."""
    return [HostSlots(name, max(chosen) + 1) for name, chosen in devices.items()]
