"""The shutdown of an attempt: every host is asked to end its ranks, and outputs are pulled."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from llmx.errors import LlmxError
from llmx.launch.agents.connection import AgentError, Connection, Message
from llmx.launch.agents.preflight import take_over
from llmx.launch.spec import LaunchSpec
from llmx.launch.supervision.console import RunLog
from llmx.launch.sync import pull
from llmx.text import plural

REPLY_S = 15.0
"""After the grace: for the last processes to be killed, and for a second look for them."""


def shut_down(
    spec: LaunchSpec,
    connections: list[Connection],
    log: RunLog,
    *,
    lost: Collection[str] = (),
    launched: bool = False,
    requests: Callable[[], int] = lambda: 0,
    grace_s: float,
    save: bool = False,
) -> None:
    """Have every agent end the run on its host; wait until each reports that nothing is left.

    ``lost``: hosts that do not respond, whose own agents end the run there; ``requests``: how
    often the user asked for the shutdown, the second of which ends the grace at once; ``save``: the
    ranks may save a checkpoint within the grace, else they exit at once.

    A connection that was lost is made anew where the host answers again.
    """
    for connection in connections:
        if connection.name in lost:
            connection.send("stop", grace_s=0)  # in case that it still arrives
            connection.lost_at = connection.lost_at or time.time()
            log.debug(f"{connection.name}: lost; its own agent ends the run there")
    for connection in connections:
        if not launched or connection.lost_at is None or connection.name in lost:
            continue
        try:
            take_over(spec, connection)
        except AgentError as error:
            connection.lost_at = connection.lost_at or time.time()
            log.warning(
                f"{connection.name}: cannot be reached any more ({error}); its own agent ends the "
                f"run there {spec.exp.launch.orphan_timeout_s:.0f} s after it heard the supervisor "
                "last (launch.orphan_timeout_s)"
            )
    alive = [connection for connection in connections if connection.lost_at is None]
    pending = [(agent, agent.send("stop", grace_s=grace_s, save=save)) for agent in alive]
    # The first request started the shutdown; a second one may have arrived before it began.
    handled, deadline = min(requests(), 1), time.monotonic() + grace_s + REPLY_S
    for connection, reply in pending:
        while True:
            if requests() > handled:
                handled = requests()
                for other in alive:
                    other.send("stop", grace_s=0)  # a further stop ends the grace
            try:
                counts = connection.wait_for(reply, timeout_s=0.2)
            except AgentError as error:
                if connection.lost_at is None and time.monotonic() < deadline:
                    continue
                log.warning(
                    f"{connection.name}: it is unknown whether processes of the run are left "
                    f"there: {error}"
                )
            else:
                _log_counts(spec, connection, counts, log)
            break


def pull_outputs(spec: LaunchSpec, connections: list[Connection], log: RunLog) -> None:
    """Copy the outputs of hosts with private disks into the run directory of this machine."""
    for connection in connections:
        if connection.shared or connection.lost_at is not None:
            continue
        ranks = [rank.rank for rank in spec.plan.ranks if rank.host in connection.hosts]
        try:
            received = pull(spec, connection.name, ranks)
            log.debug(f"{connection.name}: {received} bytes of outputs pulled")
        except LlmxError as error:
            log.warning(
                f"{connection.name}: its outputs cannot be copied and remain there: {error}"
            )


def _log_counts(spec: LaunchSpec, connection: Connection, counts: Message, log: RunLog) -> None:
    log.debug(
        f"{connection.name}: {plural(counts['ended'], 'process', 'processes')} ended, "
        f"{counts['killed']} killed, {counts['left']} left"
    )
    if counts["left"]:
        left = plural(counts["left"], "process", "processes")
        log.warning(
            f"{connection.name}: {left} cannot be killed (state D in `ps`: blocked in the kernel)"
        )
