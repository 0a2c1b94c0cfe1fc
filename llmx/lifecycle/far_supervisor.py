"""``launch.supervisor=HOST``: the supervisor of a run on a host of the cluster, detached.

python -m llmx experiment=demo hardware=mine launch.supervisor=first
python -m llmx attach user@host:RUN           its console (``llmx.observe.control``)

The run directory is written here, as for every run. A host that does not see it gets it with code,
model and data (``launch=rsync``), and here only its ``ssh_config`` stays. ``resume`` starts it
there.
"""

from __future__ import annotations

import base64
import dataclasses
import queue
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from llmx.errors import ConfigError, LaunchError
from llmx.launch.agents.connection import AgentError, Connection
from llmx.launch.agents.preflight import handshake, start_agents
from llmx.launch.environment import rank_env, tool_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.ssh_config import ssh_argv
from llmx.launch.sync import push
from llmx.launch.transports import transport_of
from llmx.lifecycle.detach import detach
from llmx.lifecycle.start import supervised
from llmx.plan.types import HostPlan

SSH_FAILED = 255


def start_on(name: str, launch: LaunchSpec) -> int:
    """Start the supervisor of a prepared run on a host (``first``: the first one); returns as soon
    as it holds the run there."""
    hosts = launch.plan.hosts
    host = hosts[0] if name == "first" else next(host for host in hosts if host.name == name)
    index = hosts.index(host)
    config, root = launch.host(index), launch.run_dir.root
    if config.enter or launch.path_on(index, root) != str(root):
        raise ConfigError(
            f"launch.supervisor={host.name}: this host has a root or a container (enter) of its "
            "own. Log in to it, and start the run there with launch.detach=true."
        )
    if host.is_local:
        return detach(launch.run_dir, lambda: supervised(launch))
    if not transport_of(launch.plan.transport).has_agents:
        raise ConfigError(
            f"launch.supervisor={name}: needs ssh, and launch.transport={launch.plan.transport} "
            "does without. Log in to the host, and start the run there with launch.detach=true."
        )
    alone = dataclasses.replace(launch, plan=dataclasses.replace(launch.plan, hosts=(host,)))
    shared = _hand_over(alone)
    print(f"On {host.name}:", flush=True)
    ssh_config = launch.run_dir.ssh_config
    words = [launch.python_on(index), "-m", "llmx", "resume", str(root), "trust=true"]
    script = "".join([*_exports(launch, index), f"exec {shlex.join(words)}\n"])
    # By stdin: a command line is public.
    argv = ssh_argv(ssh_config, host.name, ["/bin/sh"])
    code = subprocess.run(argv, input=script, text=True, env=tool_env(), check=False).returncode
    if code == SSH_FAILED:
        raise LaunchError(f"{host.name}: the ssh connection broke while the run was started.")
    if code:
        return code
    if not shared:
        for path in root.iterdir():
            if path != ssh_config:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    where = _location(host, launch)
    print(f"From here:\n  its console:    python -m llmx attach {where}")
    print(f"  its state:      python -m llmx status {where}")
    print(f"  save and end:   python -m llmx stop {where}")
    return 0


def _hand_over(alone: LaunchSpec) -> bool:
    """Check the host, and copy there what it does not see; whether it shares the run directory.
    ``alone``: the launch with this host only."""
    inbox: queue.Queue[tuple[Connection, dict[str, Any]]] = queue.Queue()
    connections = start_agents(alone, inbox)
    try:
        handshake(alone, connections)
        push(alone, connections, print)
        connection = connections[-1]
        overrides = alone.run_dir.overrides
        if not connection.shared and overrides.exists():
            data = base64.b64encode(overrides.read_bytes()).decode()
            try:
                connection.request(
                    "put", timeout_s=30, path=str(overrides.parent), files={overrides.name: data}
                )
            except AgentError as error:
                raise LaunchError(f"{connection.name}: cannot write {overrides}: {error}") from None
        return connection.shared
    finally:
        for connection in connections:
            connection.close(timeout_s=5)


def _exports(launch: LaunchSpec, index: int) -> Iterator[str]:
    """What the ranks get of the environment here, and what finds the code."""
    for key, value in rank_env(launch, index).items():
        if launch.environ.get(key) == value or key == "PYTHONPATH":
            yield f"export {key}={shlex.quote(value)}\n"


def _location(host: HostPlan, launch: LaunchSpec) -> str:
    """The run as ``attach`` takes it here."""
    root, ssh_config = launch.run_dir.root, launch.run_dir.ssh_config
    if host.ssh_port == 22 and not host.identity_file:
        user = f"{host.user}@" if host.user else ""
        return shlex.quote(f"{user}{host.address}:{root}")
    return shlex.join([f"{host.name}:{root}", "--ssh-config", str(ssh_config)])
