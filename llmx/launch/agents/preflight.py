"""The preflight of an attempt: agents, checks of every host, port, interfaces.

Each step that fails raises LaunchError with the host, the problem and the fix.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmx.config.schema import LaunchConfig
from llmx.errors import ConfigError, LaunchError
from llmx.failures.diagnose import diagnose
from llmx.hardware.compare import (
    asked_of_hosts,
    compare_hosts,
    disk_problem,
    extensions,
    ram_problem,
    storage_of,
)
from llmx.hardware.survey import space_facts
from llmx.launch.agents.connection import (
    LOCAL_AGENT,
    AgentError,
    Connection,
    Message,
    agent_argv,
    request_all,
    survey_source,
)
from llmx.launch.agents.mesh import Node, find_nodes, mesh_problems, probe_mesh
from llmx.launch.environment import configured_env, gpus_of_hosts, rank_env, tool_env
from llmx.launch.files import write_rendered
from llmx.launch.spec import LaunchSpec
from llmx.launch.ssh_config import render_ssh_config
from llmx.launch.supervision.console import RunLog
from llmx.launch.sync import HostRecord, survey_request
from llmx.launch.transports import transport_of
from llmx.run.rundir import write_json, write_text
from llmx.text import plural

HANDSHAKE_TIMEOUT_S = 60.0
SURVEY_TIMEOUT_S = 180.0
"""The survey imports torch, which takes up to a minute from a busy network file system."""
MODULES = ("torch", "deepspeed", "transformers", "numpy", "yaml")
"""Modules that a rank imports. Every other host is checked for them, without importing them."""


class HostsUnreachable(LaunchError):
    """Hosts that do not answer over ssh."""

    def __init__(self, message: str, hosts: list[str]) -> None:
        super().__init__(message)
        self.hosts = tuple(hosts)


def start_agents(
    spec: LaunchSpec, inbox: queue.Queue[tuple[Connection, Message]]
) -> list[Connection]:
    """Start an agent on this machine (the first of the list) and on every host that uses ssh."""
    plan = spec.plan
    write_text(spec.run_dir.ssh_config, render_ssh_config([*plan.hosts, *plan.rollout_hosts]))
    local = tuple(
        index
        for index, host in enumerate(plan.hosts)
        if host.is_local and not spec.host(index).enter
    )
    name = plan.hosts[local[0]].name if local else "this machine"
    log = spec.run_dir.logs / "agent-local.log"
    connections = [Connection(name, local, LOCAL_AGENT, log, inbox, is_remote=False)]
    if transport_of(plan.transport).has_agents:
        remote = (index for index in range(len(plan.hosts)) if index not in local)
        connections += [connection_of(spec, index, inbox) for index in remote]
    session = secrets.token_hex(4)
    for connection in connections:
        connection.session = session
        connection.start(tool_env())
    return connections


def connection_of(
    spec: LaunchSpec, index: int, inbox: queue.Queue[tuple[Connection, Message]]
) -> Connection:
    """The connection to a host of the plan, whose agent is not started yet."""
    host, enter, argv = spec.plan.hosts[index], spec.host(index).enter, LOCAL_AGENT
    is_remote = bool(enter) or not host.is_local
    if is_remote:
        config = None if host.is_local else spec.run_dir.ssh_config
        argv = agent_argv(host.name, ssh_config=config, python=spec.python_on(index), enter=enter)
    log = spec.run_dir.logs / f"agent-{host.name}.log"
    return Connection(host.name, (index,), argv, log, inbox, is_remote=is_remote)


def handshake(spec: LaunchSpec, connections: list[Connection]) -> LaunchSpec:
    """Tell every agent about the run, and check its host. Returns the spec with what the hosts make
    visible."""
    nonce = f".run-{secrets.token_hex(8)}"
    write_text(spec.run_dir.root / nonce, "")
    problems: list[str] = []
    missing: list[str] = []
    try:
        for connection, reply in request_all(
            connections,
            "handshake",
            timeout_s=HANDSHAKE_TIMEOUT_S,
            message=lambda each: handshake_message(spec, each, nonce),
        ):
            if isinstance(reply, AgentError):
                problems.append(_unreachable(spec, connection, str(reply)))
                missing.append(connection.name)
                continue
            connection.host_info = reply
            connection.shared = not connection.is_remote or bool(reply["sees_run_dir"])
            problems += _host_problems(spec, connection)
        for connection in connections:
            connection.ping()
    finally:
        (spec.run_dir.root / nonce).unlink(missing_ok=True)
    if missing:
        raise HostsUnreachable("\n".join(problems), missing)
    if problems:
        raise LaunchError("\n".join(problems))
    visible = {
        agent.name: str(agent.host_info["gpus"])
        for agent in connections
        if agent.is_remote and agent.host_info["gpus"] is not None
    }
    return dataclasses.replace(spec, visible_gpus=visible)


def handshake_message(spec: LaunchSpec, connection: Connection, nonce: str) -> Message:
    """The handshake of an agent with its run. ``nonce``: a file in the run directory by which it
    finds out whether it shares it."""
    launch = spec.exp.launch
    message: Message = {
        "token": spec.token,
        "session": connection.session,
        "run_dir": str(spec.run_dir.root),
        "nonce": nonce,
        "grace_s": launch.stop_grace_s,
        "code": spec.worker_path,
    }
    if connection.hosts:
        index, config = connection.hosts[0], spec.host(connection.hosts[0])
        message |= {
            "place": str(index),
            "run_dir": spec.path_on(index, spec.run_dir.root),
            "code": spec.path_on(index, spec.worker_path),
            "setup": config.setup,
            "paths": [path for path in (config.data, config.model) if path],
        }
    if connection.is_remote:
        return message | {
            "orphan_timeout_s": _orphan_timeout_s(launch),
            "python": spec.python_on(connection.hosts[0]),
            "modules": list(MODULES) if spec.code_root else [*MODULES, "llmx"],
        }
    transport = transport_of(spec.plan.transport)
    return message | {
        "cancel": transport.cancel(spec, force=False),
        "cancel_force": transport.cancel(spec, force=True),
        "signals": {name: transport.signal(spec, name) for name in ("USR1", "USR2")},
    }


def _orphan_timeout_s(launch: LaunchConfig) -> float:
    """How long an agent keeps the ranks without a supervisor. An elastic run goes on without a lost
    host, whose ranks must have ended by then."""
    if not launch.elastic:
        return launch.orphan_timeout_s
    return min(launch.orphan_timeout_s, max(15.0, launch.heartbeat_timeout_s / 2))


def take_over(spec: LaunchSpec, connection: Connection) -> None:
    """Connect anew to a host whose connection broke or is silent. The ranks there go on: a new
    agent ends the one before it, and reports what the supervisor has not received yet.

    AgentError where the host does not answer. Where the ranks were ended,
    ``connection.ranks_ended`` says why.
    """
    connection.renew(tool_env())
    reply = connection.request(
        "handshake", timeout_s=20, take_over=True, **handshake_message(spec, connection, "")
    )
    connection.ranks_ended = reply.get("ranks_ended")
    connection.request(
        "watch",
        timeout_s=20,
        **_watch_message(connection, spec.port),
        ranks=connection.ranks,
        offsets=connection.offsets,
    )


def _unreachable(spec: LaunchSpec, connection: Connection, stderr: str) -> str:
    failure = diagnose(stderr)
    if failure.name:
        return f"{connection.name}: {failure.cause}. Fix: {failure.fix}."
    test = shlex.join(["ssh", "-F", str(spec.run_dir.ssh_config), connection.name, "true"])
    return (
        f"{connection.name}: cannot be reached over ssh: {stderr}. Test it with: {test}. If that "
        "hangs although the host answers a ping, try large packets: ping -M do -s 1472 HOST. Where "
        "these are lost: ip link set dev eth0 mtu 1400 on both machines."
    )


def _host_problems(spec: LaunchSpec, connection: Connection) -> list[str]:
    """Problems that prevent ranks from starting on a host that answered."""
    info = connection.host_info
    problems = [
        f"{path} is not there. Copy it there, or correct data and model of the host."
        for path in info["absent"]
    ]
    if info["setup_error"]:
        setup = spec.host(connection.hosts[0]).setup
        problems.append(
            f"the setup script {setup} fails ({info['setup_error']}). Try it there: "
            f"bash -c '. {setup}'"
        )
    if connection.is_remote:
        index, syncs = connection.hosts[0], spec.exp.launch.sync == "rsync"
        program, python = spec.python_on(index), info.get("python") or {}
        run_dir, code = (
            spec.path_on(index, path) for path in (spec.run_dir.root, spec.worker_path)
        )
        facts = (
            (
                "error" in python,
                f"{program} does not run there ({python.get('error')}). Install the same "
                "environment at the same path on every host, or set python of the host to its path "
                "there, e.g. /opt/venv/bin/python (launch.python: of all hosts).",
            ),
            (
                python.get("missing"),
                f"{program} has no {', '.join(python.get('missing', ()))}. Install the same "
                "packages on every host (pip install -c constraints.txt ...).",
            ),
            (
                info["cannot_write"] and (connection.shared or syncs),
                f"the run directory is not writable there ({info['cannot_write']}). Make it "
                "writable for this user (chown, chmod, the mount's options), set user of the host, "
                "or set run_dir to another directory.",
            ),
            (
                syncs and not info["rsync"],
                "launch.sync=rsync needs rsync there. Install it: apt-get install rsync.",
            ),
            (
                not syncs and not connection.shared,
                f"does not see the run directory {run_dir}: it is not on a shared file system. Set "
                "launch.sync=rsync, or set run_dir to a directory on a shared one (root of the "
                "host, where it is at another path there).",
            ),
            (
                not syncs and connection.shared and not info["sees_code"],
                f"does not see the code ({code}). Set launch.sync=rsync, or install llmx on every "
                "host.",
            ),
        )
        problems += [problem for is_so, problem in facts if is_so]
    return [f"{connection.name}: {problem}" for problem in problems]


def kill_leftovers(spec: LaunchSpec, connections: list[Connection], log: RunLog) -> None:
    """End the processes of an earlier attempt of the same run on every host."""
    grace_s = spec.exp.launch.stop_grace_s
    for connection, reply in request_all(
        connections,
        "kill_leftovers",
        timeout_s=grace_s + 30,
        message=lambda each: {"grace_s": grace_s},
    ):
        if isinstance(reply, AgentError):
            raise LaunchError(
                f"{connection.name}: it is unknown whether an earlier attempt still runs there: "
                f"{reply}"
            ) from reply
        if reply["ended"]:
            ended = plural(reply["ended"], "process", "processes")
            log.info(f"{connection.name}: ended {ended} of an earlier attempt")
        if reply["left"]:
            raise LaunchError(
                f"{connection.name}: {plural(reply['left'], 'process', 'processes')} of an earlier "
                "attempt cannot be killed (state D in `ps`: blocked in the kernel). Reboot that "
                "host, or run without it."
            )


def uses_of_hosts(
    spec: LaunchSpec, connections: list[Connection], *, is_trial: bool, queued_at: int = 0
) -> list[tuple[str, str]]:
    """A sentence on each other run that has a host or a GPU of this one, with its run directory
    (empty: runs that have waited for the host since before ``queued_at``; 0: this one does not
    wait). ``is_trial``: the other trials of a sweep, whose directories are beside this one, are no
    others.

    LaunchError where a host of a run that waits has been lost meanwhile.
    """
    plan, uses = spec.plan, list[tuple[str, str]]()
    # Runs on the CPU of this machine alone are small, and share it.
    shared = not (plan.on_gpus or transport_of(plan.transport).has_agents)
    if spec.exp.launch.allow_busy or (shared and not queued_at):
        return []
    gpus = gpus_of_hosts(spec)
    for connection, reply in request_all(
        [connection for connection in connections if connection.hosts],
        "busy",
        timeout_s=30,
        message=lambda _: {"queued_at": queued_at},
    ):
        if isinstance(reply, AgentError):
            if queued_at:
                text = _unreachable(spec, connection, str(reply))
                raise HostsUnreachable(text, [connection.name]) from reply
            continue  # no /proc
        host = plan.hosts[connection.hosts[0]].name
        runs: dict[str, list[Message]] = {}
        for rank in reply["ranks"]:
            is_sibling = is_trial and Path(rank["run_dir"]).parent == spec.run_dir.root.parent
            if not is_sibling and (not plan.on_gpus or may_use(rank["device"], gpus.get(host, []))):
                runs.setdefault(rank["run_dir"], []).append(rank)
        for run_dir, ranks in runs.items():
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(ranks[0]["since"]))
            text = f"is busy with {plural(len(ranks), 'rank')} of {run_dir}, a run of "
            uses.append((f"{host}: {text}{ranks[0]['user']}, since {since}", run_dir))
        if reply["ahead"]:
            uses.append((f"{host}: {plural(reply['ahead'], 'run')} queued before this one", ""))
    return uses


def may_use(device: str | None, gpus: Sequence[str]) -> bool:
    """Whether a rank on ``device`` (empty: on the CPU; None: unknown) may use one of these GPUs."""
    if device is None:
        return True
    if device and any(gpu.isdecimal() != device.isdecimal() for gpu in gpus):
        return True  # a number and a UUID may be one GPU
    return device in gpus


def check_busy(spec: LaunchSpec, connections: list[Connection], *, is_trial: bool) -> None:
    """LaunchError where another run trains on the hosts, or on the GPUs that this one would use."""
    uses = uses_of_hosts(spec, connections, is_trial=is_trial)
    if uses:
        raise LaunchError(
            "\n".join(
                f"{text}. Wait for its end (launch.queue=true does), end it where it was started "
                f"(python -m llmx stop {run_dir}), or use other hosts. launch.allow_busy=true "
                "starts this run beside it."
                for text, run_dir in uses
            )
        )


def check_environments(
    spec: LaunchSpec, connections: list[Connection], *, is_restart: bool = False
) -> tuple[str, ...]:
    """Compare the environments of all hosts; LaunchError with everything that is incompatible, and
    ConfigError where a disk is too small for the run.

    Returns warnings. A run on this machine alone is checked only where something can be missing
    (GPUs, extensions that DeepSpeed compiles), and without importing torch, so that it starts fast.
    Its disk and RAM are always looked at. ``is_restart``: too little disk is a warning, since the
    supervisor waits for space by itself.
    """
    problems = transport_of(spec.plan.transport).host_problems(spec)
    if problems:
        raise LaunchError("\n".join(problems))
    here = space_facts(str(spec.run_dir.root))
    space = check_disks(spec, {None: here}, is_restart=is_restart)
    is_alone = not any(connection.is_remote for connection in connections)
    if is_alone:
        host, *other_hosts = spec.plan.hosts
        if other_hosts or not host.is_local:
            return space  # the hosts of Slurm cannot be checked from here
        if not (extensions(spec.exp.zero, spec.exp.optim) or spec.plan.on_gpus):
            storage = storage_of(spec.plan, host.name)
            warning = "" if storage is None else ram_problem(storage, host.name, here)
            return (*space, warning) if warning else space
    surveys, unsurveyed = survey_hosts(spec, connections, is_alone=is_alone)
    if unsurveyed:
        text = "\n".join(unsurveyed.values())
        if is_alone:
            return (*space, f"not checked before the start: {text}")
        raise LaunchError(text)
    offsets_s, gpus = clock_offsets(connections), gpus_of_hosts(spec)
    findings = compare_hosts(spec.exp, spec.plan, surveys, offsets_s=offsets_s, gpus=gpus)
    if not is_alone:
        write_json(spec.run_dir.hosts, surveys)
    # At a restart the memory of the ranks before may not be free yet.
    if findings.busy and not (spec.exp.launch.allow_busy or is_restart):
        raise LaunchError("\n".join(findings.busy))
    if findings.errors:
        # Without a network: what is missing now would be missing at a restart.
        raise (ConfigError if is_alone else LaunchError)("\n".join(findings.errors))
    remote = {
        agent.name: surveys[agent.name]
        for agent in connections
        if agent.hosts and agent.is_remote and not agent.shared
    }
    space += check_disks(spec, remote, is_restart=is_restart)
    return (*space, *findings.busy, *findings.warnings)


def _questions(spec: LaunchSpec, index: int) -> Message:
    """The questions of this experiment to the survey of a host."""
    questions = asked_of_hosts(spec.exp.zero, spec.exp.optim, spec.plan)
    ranks = rank_env(spec, index)
    if spec.host(index).setup:  # its agent has what the script exports
        ranks = configured_env(spec, index)
    names = (
        "PATH", "CUDA_HOME", "CUDA_PATH", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME",
        "DS_SKIP_CUDA_CHECK",
    )  # fmt: skip
    questions["env"] = {name: ranks[name] for name in names if name in ranks}
    return questions


def survey_hosts(
    spec: LaunchSpec,
    connections: list[Connection],
    *,
    is_alone: bool = False,
    remove: Mapping[str, Sequence[str]] | None = None,
) -> tuple[dict[str, Message], dict[str, str]]:
    """Host -> its survey, by the agents; all hosts at once. And host -> why it has none.

    ``is_alone``: there is no host to compare with, and the ranks themselves check what torch was
    built for; ``remove``: host -> stale locks that are removed first.
    """
    used = [connection for connection in connections if connection.hosts]
    records: dict[str, tuple[HostRecord, str]] = {}

    def request(connection: Connection) -> Message:
        index, name = connection.hosts[0], connection.name
        questions, python = _questions(spec, index), spec.python_on(index)
        if is_alone:
            questions["torch"] = False
        record, key = HostRecord(spec.plan.hosts[index]), survey_request(python, questions)
        records[name] = record, key
        questions |= {"known": record.survey(key), "remove": (remove or {}).get(name)}
        paths = (spec.run_dir.root, Path(spec.worker_path).parent)
        arguments = [*(spec.path_on(index, path) for path in paths), json.dumps(questions)]
        return {"python": python, "program": survey_source(), "arguments": arguments}

    surveys, problems = {}, {}
    for connection, reply in request_all(
        used, "survey", timeout_s=SURVEY_TIMEOUT_S, message=request
    ):
        name = connection.name
        if isinstance(reply, AgentError):
            python = spec.python_on(connection.hosts[0])
            problems[name] = f"{name}: {python} cannot survey this host: {reply}"
            continue
        surveys[name] = reply["facts"]
        record, key = records[name]
        record.note_survey(key, reply["facts"])
    return surveys, problems


def clock_offsets(connections: list[Connection]) -> dict[str, float]:
    """Host -> its clock minus that of this machine, seconds."""
    return {agent.name: agent.clock_offset_s for agent in connections if agent.hosts}


def check_disks(
    spec: LaunchSpec, facts: Mapping[Any, Message], *, is_restart: bool
) -> tuple[str, ...]:
    """Warnings of disks that may become full. ``facts``: by the name of a host with a run directory
    of its own; None: this machine."""
    errors, warnings = [], []
    for name, disk in facts.items():
        where = str(spec.run_dir.root) if name is None else f"{name}: {spec.run_dir.root}"
        error, warning = disk_problem(spec.plan.storage, name, disk, where=where)
        errors += [error] if error else []
        warnings += [warning] if warning else []
    if errors and not is_restart:
        raise ConfigError("\n".join(errors))
    return (*errors, *warnings)


def resolve_network(spec: LaunchSpec, connections: list[Connection]) -> LaunchSpec:
    """Reserve a port on the host of rank 0, find the interfaces, and probe the network between the
    hosts; writes the final files. LaunchError where two hosts do not reach each other."""
    spec = dataclasses.replace(spec, port=reserve_port(spec, connections))
    nodes = check_network(spec, connections)
    interfaces = tuple(
        nodes[host.name].interface if host.name in nodes else host.interface
        for host in spec.plan.hosts
    )
    spec = dataclasses.replace(spec, interfaces=interfaces)
    write_rendered(spec)
    return spec


def network_problem(spec: LaunchSpec, connections: list[Connection]) -> str:
    """What keeps the hosts from reaching each other now (``launch.probe``), with the likely cause;
    empty where nothing does, or where an agent does not answer."""
    try:
        check_network(dataclasses.replace(spec, port=0), connections)
    except LaunchError as error:
        lost = any(connection.lost_at is not None for connection in connections)
        return "" if lost else str(error)
    return ""


def check_network(spec: LaunchSpec, connections: list[Connection]) -> dict[str, Node]:
    """The interfaces of the hosts; LaunchError where a host does not reach the rendezvous
    (``spec.port``; 0: there is none), or another host (``launch.probe``). The ranks themselves
    would find that out after hours."""
    if len(spec.plan.hosts) < 2:
        return {}
    nodes = find_nodes(spec.plan.hosts, connections)
    if connection_to(connections, 0) is not None and len(nodes) > 1:
        mesh = probe_mesh(
            nodes,
            connections,
            port=spec.port,
            rendezvous=spec.rendezvous,
            pairs=spec.exp.launch.probe,
        )
        if problems := mesh_problems(mesh):
            raise LaunchError("\n".join(problems))
    return nodes


def start_ranks(spec: LaunchSpec, connections: list[Connection]) -> None:
    """Every agent starts the ranks of its host; LaunchError where one cannot."""
    transport = transport_of(spec.plan.transport)
    pending = [
        (connection, connection.send("start", **transport.start_message(spec, host)))
        for connection in connections
        for host in connection.hosts
    ]
    problems = []
    for connection, replies in pending:
        try:
            connection.wait_for(replies, timeout_s=60)
        except AgentError as error:
            problems.append(f"{connection.name}: cannot start its ranks: {error}")
    if problems:
        raise LaunchError("\n".join(problems))


def start_watching(connections: list[Connection], log: RunLog, *, port: int) -> None:
    """The agents begin to report ranks, and to send what these write on private disks."""
    for connection, reply in request_all(
        connections,
        "watch",
        timeout_s=30,
        message=lambda each: _watch_message(each, port),
    ):
        if isinstance(reply, AgentError):
            log.debug(f"{connection.name}: does not monitor its ranks: {reply}")


def _watch_message(connection: Connection, port: int) -> Message:
    return {"stream": not connection.shared, "port": port, "statuses": connection.statuses}


def connection_to(connections: list[Connection], host: int) -> Connection | None:
    """The connection to a host of the plan."""
    return next((connection for connection in connections if host in connection.hosts), None)


def reserve_port(spec: LaunchSpec, connections: list[Connection]) -> int:
    """A port on the host of rank 0, kept as long as its agent lives."""
    if (fixed := transport_of(spec.plan.transport).fixed_port(spec)) is not None:
        return fixed
    chosen = spec.exp.launch.master_port
    # Under Slurm the host of rank 0 has no agent: a port that is free here is the best guess.
    connection = connection_to(connections, 0) or connections[0]
    return reserve_on(connection, "launch.master_port", chosen, port=chosen)


def reserve_on(connection: Connection, key: str, value: int, *, port: int) -> int:
    """A port on a host, kept as long as its agent lives: ``port``, which follows from the value of
    a key, or any free one where it is 0."""
    try:
        reserved = int(connection.request("reserve_port", want=port, timeout_s=30)["port"])
    except AgentError as error:
        raise LaunchError(f"{connection.name}: cannot reserve a port: {error}") from error
    if not reserved:
        busy = "" if value == port else f"{port} "
        raise LaunchError(
            f"{key}={value}: {busy}is in use on {connection.name} (`ss -ltnp 'sport = :{port}'` "
            f"shows by which process). Set {key}=0, which takes a free one."
            if port
            else f"{connection.name}: found no free port between 20000 and 32700."
        )
    return reserved
