"""The rollout servers of an attempt: started on ``rollout.hosts``, watched, restarted, ended.

Their hosts have agents of their own, apart from those of the hosts that train: whatever happens
there is no failure of the run, since the ranks draw samples themselves where no server answers. An
agent ends its servers with the run, and a server ends with its agent (``llmx.rollout.server``).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from llmx.errors import LaunchError
from llmx.launch.agents.connection import AgentError, Connection, Message
from llmx.launch.agents.mesh import SIZE, TIMEOUT_S, find_nodes
from llmx.launch.agents.preflight import (
    HostsUnreachable,
    connection_of,
    handshake,
    handshake_message,
    kill_leftovers,
    reserve_on,
    start_watching,
)
from llmx.launch.agents.shutdown import shut_down
from llmx.launch.environment import gpus_of_hosts, tool_env
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.console import RunLog
from llmx.launch.supervision.tail import apply_update
from llmx.launch.sync import push
from llmx.launch.transports import transport_of
from llmx.plan.types import RankPlan
from llmx.rollout.protocol import (
    LISTEN,
    SERVER_MODULE,
    VLLM_PYTHON,
    ServerAddress,
    render_servers,
)
from llmx.text import plural

RESTARTS = 20
"""Restarts of one server in an attempt."""
RESTART_WAIT_S = 2.0
"""Before a server is started again, and between two tries to reach its host."""
STOP_S = 5.0

Inbox = queue.Queue[tuple[Connection, Message]]


class RolloutPool:
    """Used once. ``prepare``, then ``start``, then ``stop``."""

    def __init__(self, spec: LaunchSpec, log: RunLog, *, session: str) -> None:
        """``session``: of the agents of the attempt, none of which ends another."""
        hosts = spec.plan.rollout_hosts
        host_of_server = [at for at, host in enumerate(hosts) for _ in range(host.slots)]
        plan = replace(
            spec.plan,
            hosts=hosts,
            rollout_hosts=(),
            ranks=tuple(
                RankPlan(spec.plan.world_size + number, at, hosts[at].device, 1)
                for number, at in enumerate(host_of_server)
            ),
            accelerator=spec.exp.hardware.devices[hosts[0].device].accelerator,
            transport="ssh",
        )
        exp = spec.exp
        exp = replace(
            exp,
            hardware=replace(exp.hardware, hosts=list(exp.rollout.servers), reach=None),
            # The ranks send the model, and nothing else is read there.
            model=replace(exp.model, path=None, tokenizer=None),
            data=replace(exp.data, path="", eval_path=None, sources=[]),
            task=replace(exp.task, options={}),
            launch=replace(exp.launch, sync_extra=[]),
        )
        self.spec = replace(
            spec, exp=exp, plan=plan, worker=SERVER_MODULE, cores=None, interfaces=()
        )
        """As if the rollout hosts were those that train: a server is started like a rank, with a
        number that no rank has."""
        self.log = log
        self.inboxes: list[Inbox] = [queue.Queue() for _ in hosts]
        """One for each host: no host waits for another one that is lost."""
        self.connections = [
            connection_of(self.spec, at, inbox) for at, inbox in enumerate(self.inboxes)
        ]
        for connection in self.connections:
            connection.session = session
        self.places: dict[int, ServerAddress] = {}
        """Server, by its number, -> where it listens."""
        self.restarts: dict[int, int] = {}
        self.threads: list[threading.Thread] = []
        self.ending = threading.Event()

    def prepare(
        self,
        training: Sequence[Connection],
        take_turn: Callable[[LaunchSpec, list[Connection]], None],
        *,
        is_restart: bool,
    ) -> tuple[ServerAddress, ...]:
        """Check the hosts, and find where their servers will listen.

        Args:
            training: the agents of the hosts that train.
            take_turn: called for hosts that other runs may use.
            is_restart: hosts that do not answer are left out, unless none does.

        Raises:
            LaunchError: a host cannot be reached or used, or the first host that trains does not
                reach it.
        """
        for connection in self.connections:
            connection.start(tool_env())
        try:
            self.spec = handshake(self.spec, self.connections)
        except HostsUnreachable as error:
            away = [connection for connection in self.connections if connection.name in error.hosts]
            if not is_restart or len(away) == len(self.connections):
                # No host that trains: nothing is to be waited for.
                raise LaunchError(str(error)) from error
            self.log.warning(f"the other rollout hosts draw all samples: {error}")
            for connection in away:
                self.connections.remove(connection)
                connection.close(timeout_s=0.2)
            self.spec = handshake(self.spec, self.connections)
        kill_leftovers(self.spec, self.connections, self.log)
        take_turn(self.spec, self.connections)
        first = next(connection for connection in training if 0 in connection.hosts)
        for connection in self.connections:
            self._find_places(connection, first)
        push(self.spec, self.connections, self.log.info)
        return tuple(self.places.values())

    def _find_places(self, connection: Connection, first: Connection) -> None:
        """The address of a host on the way to rank 0, which is tried, and a port per server."""
        at, name = connection.hosts[0], connection.name
        hosts = self.spec.plan.hosts
        try:
            route = first.request("network", to=hosts[at].address, timeout_s=30)
        except AgentError as error:
            raise LaunchError(
                f"{first.name}: has no route to the rollout host {name} ({error}). Set the address "
                "of that host to one that the others can reach."
            ) from error
        address = find_nodes(hosts, [connection], to=route["address"])[name].address
        fixed = self.spec.exp.rollout.port
        ranks = self._servers_of(connection)
        for local, rank in enumerate(ranks):
            port = fixed + local if fixed else 0
            reserved = reserve_on(connection, "rollout.port", fixed, port=port)
            self.places[rank] = ServerAddress(name, address, reserved)
        self._try_way(connection, first, self.places[ranks[0]])

    def _try_way(self, connection: Connection, first: Connection, place: ServerAddress) -> None:
        token = "rollout-probe"
        listen = {"address": place.address, "port": place.port, "token": token}
        try:
            connection.request("listen", timeout_s=30, **listen)
            peers = [(place.host, place.address, place.port)]
            replies = first.send("probe", peers=peers, token=token, size=SIZE, timeout_s=TIMEOUT_S)
            reply = first.wait_for(replies, timeout_s=4 * TIMEOUT_S + 30)
            connection.request("listen", timeout_s=30, address="")
        except AgentError as error:
            raise LaunchError(f"{place.host}: the way to it cannot be tried: {error}") from error
        result = reply["results"][place.host]
        if result["stage"]:
            raise LaunchError(
                f"{first.name} does not reach the rollout host {place.host} at "
                f"{place.address}:{place.port} ({result['stage']}: {result['error']}). Open TCP to "
                "that host in its firewall (rollout.port sets the port), or set its interface."
            )

    def start(self) -> None:
        """Start all servers, and watch them from now on."""
        start_watching(self.connections, self.log, port=0)
        for connection in self.connections:
            self._start_servers(connection, self._servers_of(connection))
        hosts = ", ".join(f"{c.name} ({len(self._servers_of(c))})" for c in self.connections)
        self.log.info(f"{plural(len(self.places), 'rollout server')}: {hosts}")
        for inbox in self.inboxes:
            thread = threading.Thread(target=self._watch, args=(inbox,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _servers_of(self, connection: Connection) -> list[int]:
        return [rank.rank for rank in self.spec.plan.ranks if rank.host in connection.hosts]

    def _start_servers(self, connection: Connection, servers: Sequence[int]) -> None:
        message = transport_of("ssh").start_message(self.spec, connection.hosts[0])
        of_host = sorted(message["ranks"])
        gpus = gpus_of_hosts(self.spec).get(connection.name, [])
        message["log"] = "rollout"
        message["ranks"] = {
            server: {
                **message["ranks"][server],
                "CUDA_VISIBLE_DEVICES": gpus[of_host.index(server)] if gpus else "",
                LISTEN: render_servers([self.places[server]]),
                VLLM_PYTHON: self.spec.exp.rollout.vllm_python or "",
            }
            for server in servers
        }
        try:
            connection.request("start", timeout_s=60, **message)
        except AgentError as error:
            self.log.warning(f"{connection.name}: cannot start its rollout servers: {error}")

    def _watch(self, inbox: Inbox) -> None:
        """Watch the servers of one host until the end: what they write is kept, those that die are
        started again, and where the connection breaks there is a new one."""
        while not self.ending.is_set():
            try:
                connection, message = inbox.get(timeout=0.5)
            except queue.Empty:
                continue
            match message.get("event"):
                case "append" | "replace":
                    with contextlib.suppress(OSError, ValueError):
                        apply_update(self.spec.run_dir, message)
                case "rank_exit":
                    self._restart(connection, message["rank"])
                case "lost" if connection.lost_at is not None:  # else of a try before the last
                    self._connect_again(connection)

    def _restart(self, connection: Connection, server: int) -> None:
        """Start a server again that has exited, unless it has done so too often."""
        count = self.restarts[server] = self.restarts.get(server, 0) + 1
        place = self.places[server]
        where = f"rollout server {place.name}"
        if count > RESTARTS:
            self.log.warning(
                f"{where} has exited {count} times; it is not started again. "
                f"logs/rollout-{server:03d}.log says why"
            )
        elif not self.ending.wait(RESTART_WAIT_S):
            self.log.warning(f"{where} has exited; it is started again ({count} of {RESTARTS})")
            self._start_servers(connection, [server])

    def _connect_again(self, connection: Connection) -> None:
        """A new agent on a host whose connection broke. It ends the one before it, and that one's
        servers exit; new ones are started in their place. The host may have lost its disk."""
        self.log.warning(f"rollout host {connection.name}: the connection broke")
        while not self.ending.wait(RESTART_WAIT_S):
            try:
                connection.renew(tool_env())
                hello = handshake_message(self.spec, connection, "")
                connection.request("handshake", timeout_s=20, take_over=True, **hello)
                connection.request("kill_leftovers", timeout_s=30, grace_s=0)
                push(self.spec, [connection], self.log.debug)
                stream = not connection.shared
                connection.request("watch", timeout_s=20, stream=stream, port=0)
            except (AgentError, LaunchError) as error:
                self.log.debug(f"{connection.name}: {error}")
                continue
            self._start_servers(connection, self._servers_of(connection))
            self.log.info(f"rollout host {connection.name}: connected again")
            return

    def stop(self) -> None:
        """End the servers on every host, and their agents."""
        self.ending.set()
        for connection in self.connections:
            if self.threads and connection.lost_at:
                connection.abort()
        for thread in self.threads:
            thread.join(timeout=70)
        shut_down(self.spec, self.connections, self.log, grace_s=STOP_S)
        for connection in self.connections:
            connection.close(timeout_s=5 if connection.lost_at is None else 0.2)
