"""Everything between the snapshot and the start of ``deepspeed``: agents, checks, port, sync.

Each step that fails raises LaunchError with the host, what is wrong there and the fix.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import secrets
import subprocess
from collections.abc import Callable
from pathlib import Path

from llmx.doctor import survey as survey_program
from llmx.doctor.compare import asked_of_hosts, compare_hosts, extensions
from llmx.doctor.diagnose import Failure, diagnose
from llmx.errors import ConfigError, LaunchError
from llmx.launch import sync
from llmx.launch.environment import is_secret, rank_env
from llmx.launch.fleet import AgentError, Channel, Message, local_channel, remote_channel
from llmx.launch.render import write_rendered
from llmx.launch.spec import LaunchSpec
from llmx.launch.ssh import render_ssh_config
from llmx.launch.transports import transport_of
from llmx.rundir import write_json, write_text
from llmx.text import plural


class Unreachable(LaunchError):
    """Hosts that do not answer over ssh."""

    def __init__(self, message: str, hosts: list[str]) -> None:
        super().__init__(message)
        self.hosts = tuple(hosts)


HELLO_TIMEOUT_S = 60.0
SURVEY_TIMEOUT_S = 180.0
"""Torch is imported in it, which takes a minute from a busy network disk."""
MODULES = ("torch", "deepspeed", "transformers", "numpy", "yaml")
"""What a rank imports; looked for on every other host without importing them."""


def start_agents(spec: LaunchSpec, inbox: queue.Queue[tuple[Channel, Message]]) -> list[Channel]:
    """Start an agent on this machine and on every host that ssh reaches; this one's is first."""
    plan, run_dir = spec.plan, spec.run_dir
    write_text(run_dir.ssh_config, render_ssh_config(plan.hosts))
    local = tuple(index for index, host in enumerate(plan.hosts) if host.is_local)
    name = plan.hosts[local[0]].name if local else "this machine"
    channels = [local_channel(name, local, run_dir.logs / "agent-local.log", inbox)]
    if transport_of(plan.transport).has_agents:
        channels += [
            remote_channel(
                host.name,
                (index,),
                run_dir.logs / f"agent-{host.name}.log",
                inbox,
                ssh_config=run_dir.ssh_config,
                python=spec.python,
            )
            for index, host in enumerate(plan.hosts)
            if not host.is_local
        ]
    session = secrets.token_hex(4)
    for channel in channels:
        channel.session = session
        channel.start(agent_env())
    return channels


def agent_env() -> dict[str, str]:
    """For agents and their ssh. Without a token, since they are no processes of the run; and
    without secrets, since they need none."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "LLMX_RUN_TOKEN" and not is_secret(name, value)
    }


def greet(spec: LaunchSpec, channels: list[Channel]) -> None:
    """Introduce every agent to the run and check what it finds on its host."""
    nonce = f".run-{spec.token}"
    write_text(spec.run_dir.root / nonce, "")
    try:
        pending = [
            (channel, channel.post("hello", **hello_message(spec, channel, nonce)))
            for channel in channels
        ]
        problems: list[str] = []
        missing: list[str] = []
        for channel, replies in pending:
            try:
                channel.hello = channel.wait(replies, timeout_s=HELLO_TIMEOUT_S)
            except AgentError as error:
                problems.append(_unreachable(channel, str(error)))
                missing.append(channel.name)
                continue
            channel.shared = not channel.is_remote or bool(channel.hello["sees_run_dir"])
            problems += _host_problems(spec, channel)
        for channel in channels:
            channel.ping()
    finally:
        (spec.run_dir.root / nonce).unlink(missing_ok=True)
    if missing:
        raise Unreachable("\n".join(problems), missing)
    if problems:
        raise LaunchError("\n".join(problems))


def clear(spec: LaunchSpec, channels: list[Channel], say: Callable[[str], None]) -> None:
    """End what an earlier attempt of the same run left on any host."""
    grace_s = spec.exp.launch.stop_grace_s
    pending = [(channel, channel.post("clear", grace_s=grace_s)) for channel in channels]
    for channel, replies in pending:
        try:
            counts = channel.wait(replies, timeout_s=grace_s + 30)
        except AgentError as error:
            raise LaunchError(
                f"{channel.name}: cannot tell whether an earlier attempt still runs there: {error}"
            ) from error
        if counts["ended"]:
            ended = plural(counts["ended"], "process", "processes")
            say(f"{channel.name}: ended {ended} of an earlier attempt")
        if counts["left"]:
            raise LaunchError(
                f"{channel.name}: {plural(counts['left'], 'process', 'processes')} of an earlier "
                "attempt cannot be killed (state D in `ps`: blocked in the kernel). Restart that "
                "host, or run without it."
            )


def hello_message(spec: LaunchSpec, channel: Channel, nonce: str) -> Message:
    """What an agent must know of its run; the agent looks for the file ``nonce`` there."""
    launch = spec.exp.launch
    message: Message = {
        "token": spec.token,
        "session": channel.session,
        "run_dir": str(spec.run_dir.root),
        "nonce": nonce,
        "grace_s": launch.stop_grace_s,
        "code": spec.worker_path,
    }
    if channel.is_remote:
        message |= {
            # A hiccup of the network is shorter than that; a dead supervisor closes the channel.
            "silence_s": max(15.0, launch.heartbeat_timeout_s / 2),
            "python": spec.python,
            "modules": list(MODULES) if spec.code_root else [*MODULES, "llmx"],
        }
    else:
        transport = transport_of(spec.plan.transport)
        message["cancel"] = transport.cancel(spec, force=False)
        message["cancel_force"] = transport.cancel(spec, force=True)
        message["signals"] = {name: transport.signal(spec, name) for name in ("USR1", "USR2")}
    return message


def _unreachable(channel: Channel, said: str) -> str:
    found = diagnose(Failure(log=said))
    if found.name:
        return f"{channel.name}: {found.cause}. Fix: {found.fix}."
    return (
        f"{channel.name}: not reached over ssh: {said}. Try it: ssh -F RUN_DIR/ssh_config "
        f"{channel.name} true"
    )


def _host_problems(spec: LaunchSpec, channel: Channel) -> list[str]:
    """What keeps ranks from starting on a host that answered."""
    if not channel.is_remote:
        return []
    hello, problems = channel.hello, []
    python = hello.get("python") or {}
    if "error" in python:
        problems.append(
            f"{channel.name}: {spec.python} does not run there ({python['error']}). Install the "
            "same environment at the same path on every host, or set launch.python."
        )
    elif python.get("missing"):
        problems.append(
            f"{channel.name}: {spec.python} has no {', '.join(python['missing'])}. Install the "
            "same packages on every host (pip install -c constraints.txt ...)."
        )
    if spec.exp.launch.sync == "rsync":
        if not hello["rsync"]:
            problems.append(
                f"{channel.name}: launch.sync=rsync needs rsync there; apt-get install rsync."
            )
    elif not channel.shared:
        problems.append(
            f"{channel.name}: does not see the run directory {spec.run_dir.root}: there is no "
            "shared file system. Set launch.sync=rsync, or put run_dir on a shared one."
        )
    elif not hello["sees_code"]:
        problems.append(
            f"{channel.name}: does not see the code ({spec.worker_path}). Set launch.sync=rsync, "
            "or install llmx on every host."
        )
    return problems


def survey(spec: LaunchSpec, channels: list[Channel]) -> tuple[str, ...]:
    """Compare the hosts of a run over several; LaunchError with all that cannot work together.

    Returns warnings. A run on this machine alone is looked at only where something can be missing
    (GPUs, extensions that DeepSpeed compiles), and without importing torch: it starts at once.
    """
    asked = asked_of_hosts(spec.exp, spec.plan)
    ranks = rank_env(spec)
    names = ("PATH", "CUDA_HOME", "CUDA_PATH", "TORCH_EXTENSIONS_DIR")
    asked["env"] = {name: ranks[name] for name in names if name in ranks}
    if not any(channel.is_remote for channel in channels):
        return _survey_here(spec, asked)
    program = Path(survey_program.__file__).read_text(encoding="utf-8")
    request = {
        "python": spec.python,
        "program": program,
        "arguments": [
            str(spec.run_dir.root),
            str(Path(spec.worker_path).parent),
            json.dumps(asked),
        ],
    }
    used = [channel for channel in channels if channel.hosts]
    pending = [(channel, channel.post("survey", **request)) for channel in used]
    surveys = {}
    for channel, replies in pending:
        try:
            surveys[channel.name] = channel.wait(replies, timeout_s=SURVEY_TIMEOUT_S)["facts"]
        except AgentError as error:
            raise LaunchError(
                f"{channel.name}: {spec.python} cannot tell what is installed there: {error}"
            ) from error
    findings = compare_hosts(
        spec.exp,
        spec.plan,
        surveys,
        offsets_s={channel.name: channel.offset_s for channel in used},
    )
    write_json(spec.run_dir.hosts, surveys)
    if findings.errors:
        raise LaunchError("\n".join(findings.errors))
    return findings.warnings


def _survey_here(spec: LaunchSpec, asked: Message) -> tuple[str, ...]:
    """The same for a run on this machine; the ranks themselves ask torch what it was built for."""
    host, *others = spec.plan.hosts
    needed = extensions(spec.exp) or spec.plan.accelerator == "cuda"
    if others or not host.is_local or not needed:
        return ()  # Slurm's hosts are out of reach
    arguments = [str(spec.run_dir.root), "", json.dumps({**asked, "torch": False})]
    try:
        done = subprocess.run(
            [spec.python, survey_program.__file__, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SURVEY_TIMEOUT_S,
            check=True,
        )
        facts = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        return (f"this machine could not be checked before the start: {error}",)
    findings = compare_hosts(spec.exp, spec.plan, {host.name: facts})
    if findings.errors:
        # No network is between: what is missing here is missing at a restart, too.
        raise ConfigError("\n".join(findings.errors))
    return findings.warnings


def settle(spec: LaunchSpec, channels: list[Channel]) -> LaunchSpec:
    """Take a free port on the master's host and find the interfaces; writes the final files."""
    spec = dataclasses.replace(
        spec, port=_port(spec, channels), interfaces=_interfaces(spec, channels)
    )
    _knock(spec, channels)
    write_rendered(spec)
    return spec


def _knock(spec: LaunchSpec, channels: list[Channel]) -> None:
    """LaunchError where a host does not get to the place where the ranks meet: a firewall, or an
    address of another network. The ranks themselves would find that out after half an hour."""
    to, first = spec.plan.master_addr, spec.plan.hosts[0].name
    master, used = channel_of(channels, 0), [c for c in channels if c.hosts]
    if master is None or len(used) < 2:
        return
    problems = []
    try:
        master.ask("listen", port=spec.port, timeout_s=30)
        pending = [(channel, channel.post("knock", to=to, port=spec.port)) for channel in used]
        for channel, replies in pending:
            try:
                channel.wait(replies, timeout_s=30)
            except AgentError as error:
                problems.append(
                    f"{channel.name}: cannot connect to {first} at {to} port {spec.port} "
                    f"({error}), where the ranks meet. Set hardware.master_addr to an address of "
                    "it that all hosts reach, or open the ports between the hosts in the firewall."
                )
        master.ask("listen", port=0, timeout_s=30)
    except AgentError as error:
        raise LaunchError(f"{first}: cannot listen on port {spec.port}: {error}") from error
    if problems:
        raise LaunchError("\n".join(problems))


def channel_of(channels: list[Channel], host: int) -> Channel | None:
    """The channel that covers a host of the plan."""
    return next((channel for channel in channels if host in channel.hosts), None)


def _port(spec: LaunchSpec, channels: list[Channel]) -> int:
    wanted = spec.exp.launch.master_port
    # Under Slurm the master may be out of reach; a port that is free here is the best guess.
    channel = channel_of(channels, 0) or channels[0]
    try:
        port = int(channel.ask("port", want=wanted, timeout_s=30)["port"])
    except AgentError as error:
        raise LaunchError(f"{channel.name}: no answer about a free port: {error}") from error
    if not port:
        raise LaunchError(
            f"launch.master_port={wanted}: taken on {channel.name} (`ss -ltnp 'sport = :{wanted}'` "
            "shows by whom). Set launch.master_port=0, which takes a free one."
            if wanted
            else f"{channel.name}: found no free port between 20000 and 32700."
        )
    return port


def _interfaces(spec: LaunchSpec, channels: list[Channel]) -> tuple[str | None, ...]:
    """As configured; where nothing is, the interface on the way to another host."""
    hosts = spec.plan.hosts
    found: list[str | None] = [host.interface for host in hosts]
    if len(hosts) == 1 or all(found):
        return tuple(found)
    for index, host in enumerate(hosts):
        channel = channel_of(channels, index)
        if found[index] is None and channel is not None:
            peer = next(other for other in hosts if other is not host)
            try:
                found[index] = channel.ask("route", to=peer.address, timeout_s=30)["interface"]
            except AgentError as error:
                raise LaunchError(
                    f"{host.name}: cannot connect to {peer.name} at {peer.address} ({error}). Set "
                    "the address of the host to one that the other hosts can reach."
                ) from error
    return tuple(found)


def bring(spec: LaunchSpec, channels: list[Channel], say: Callable[[str], None]) -> None:
    """``launch.sync=rsync``: everything the ranks read, to every other host."""
    remote = {channel.name: channel for channel in channels if channel.is_remote}
    if spec.exp.launch.sync != "rsync" or not remote:
        return

    def make_dirs(host: str, paths: list[str]) -> None:
        try:
            remote[host].ask("mkdir", paths=paths, timeout_s=60)
        except AgentError as error:
            raise LaunchError(
                f"launch.sync=rsync: {host}: cannot make the directories: {error}. The same paths "
                "must be writable on every host."
            ) from error

    sync.push(
        spec,
        list(remote),
        private_run_dirs={name for name, channel in remote.items() if not channel.shared},
        make_dirs=make_dirs,
        say=say,
    )
