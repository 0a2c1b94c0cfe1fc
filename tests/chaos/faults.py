"""What is done to the run, and how each fault ends again.

A fault strikes a host, waits for what the run does about it (a condition, with a time-out), and
undoes what an operator would undo: plug the cable in, free the disk, switch the host on. Which
faults there are, and which of them strike while the run recovers from another: ``kinds.py``.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from llmx.checkpoint.manifest import rank_file
from tests.chaos.site import Site
from tests.chaos.training import GaveUp
from tests.cluster.netns import Host, wait_until

COPY_LAGS_STEPS = 40
"""How far the copy on the supervisor's host is behind, at most, when a host burns down."""


def rank_killed(site: Site, chance: random.Random) -> str:
    """A rank is killed, as by the kernel's OOM killer."""
    return _kill_rank(site, chance.choice(site.trainers))


def _kill_rank(site: Site, host: Host) -> str:
    pids = site.ranks(host)
    if not pids:
        raise GaveUp(f"no rank on {host.name}\n{site.story()}")
    for pid in pids:
        site.signal(host, pid, signal.SIGKILL)
    _until_noticed(site, f"the death of the rank on {host.name}")
    return host.name


def agent_killed(site: Site, chance: random.Random) -> str:
    """The agent of the far host is killed: the ranks that it started train on, with a new agent."""

    def strike() -> None:
        for pid in site.agents(site.far):
            site.signal(site.far, pid, signal.SIGKILL)

    return _connected_again(site, strike)


def supervisor_killed(site: Site, chance: random.Random) -> str:
    """The supervisor dies without a word; its ranks must end by themselves; ``resume``."""
    assert site.process is not None
    site.process.kill()
    site.process.wait()
    site.until_empty()
    site.resume()
    return "node-a"


def supervisor_suspended(site: Site, chance: random.Random) -> str:
    """SIGSTOP for longer than ``launch.orphan_timeout_s``: the ranks save and end, and the
    supervisor starts them again when it goes on."""
    attempts, pid = len(site.attempts()), site.supervisor()["pid"]
    site.signal(site.near, pid, signal.SIGSTOP)
    try:
        site.until(lambda: not site.ranks(site.far), what="the end of the orphaned rank")
    finally:
        site.signal(site.near, pid, signal.SIGCONT)
    site.until(lambda: len(site.attempts()) > attempts, what="the end of the attempt")
    outcome = site.attempts()[attempts]["outcome"]
    if outcome != "orphaned":
        raise GaveUp(f"a suspended supervisor found {outcome}\n{site.story()}")
    return "node-a"


def control_cut(site: Site, chance: random.Random) -> str:
    """sshd and all its sessions die, and sshd starts again: the connection to the agent breaks, and
    nothing else, so the ranks must go on."""

    def strike() -> None:
        site.far.stop_sshd()
        site.far.start_sshd()

    return _connected_again(site, strike)


def _connected_again(site: Site, strike: Callable[[], None]) -> str:
    """The supervisor must connect to the far host anew, and start nothing again."""
    log, attempts = site.run_dir(site.near).supervisor_log, len(site.attempts())
    before = log.read_text().count("connected again")
    strike()
    site.until(lambda: log.read_text().count("connected again") > before, what="a new connection")
    if len(site.attempts()) > attempts:
        raise GaveUp(f"the ranks were started again\n{site.story()}")
    return "node-b"


def supervisor_asked(site: Site, chance: random.Random) -> str:
    """Preemption: SIGTERM to the supervisor, which saves and ends; ``resume``."""
    outcome = ask_supervisor(site)
    if outcome != "interrupted":
        raise GaveUp(f"SIGTERM ended as {outcome}\n{site.story()}")
    site.resume()
    return "node-a"


def ask_supervisor(site: Site) -> str:
    """SIGTERM to the supervisor; the outcome that it wrote, when nothing of the run is left."""
    assert site.process is not None
    site.process.terminate()
    site.until(site.is_over, what="the end after SIGTERM", may_end=True)
    site.until_empty()
    return str(site.result().get("outcome"))


def far_host_killed(site: Site, chance: random.Random) -> str:
    """The other host loses its power, and comes back with its disk."""
    silent = chance.random() < 0.7
    site.far.kill(silent=silent)
    _until_noticed(site, "the loss of node-b")
    site.boot(site.far)
    return "node-b" + (", silently" if silent else "")


def far_host_replaced(site: Site, chance: random.Random) -> str:
    """The other host burns down; an empty one takes its place."""
    site.until(
        lambda: site.copied() > 0 and site.copy_lags() <= COPY_LAGS_STEPS,
        what="a copied checkpoint",
    )
    site.may_repeat = site.copy_lags()
    site.far.kill()
    _until_noticed(site, "the loss of node-b")
    site.disks["node-b"].wipe()
    site.boot(site.far)
    return "node-b, its disk too"


def near_host_killed(site: Site, chance: random.Random) -> str:
    """The host of the supervisor loses its power; it is booted, then ``resume``."""
    assert site.process is not None
    site.near.kill()
    site.process.wait()
    site.boot(site.near)
    # The other host's agent has to notice the silence, before nobody is left to clash with.
    site.until_empty()
    site.resume()
    return "node-a"


def link_cut(site: Site, chance: random.Random) -> str:
    """Packets vanish until the run has noticed."""
    host = chance.choice(site.cluster.hosts)
    host.cut()
    _until_noticed(site, f"the silence of {host.name}")
    host.restore()
    return host.name


def link_dropped(site: Site, chance: random.Random) -> str:
    """Packets vanish for a moment: nobody needs to notice."""
    host = chance.choice(site.cluster.hosts)
    lasts_s = chance.uniform(0.2, 1.5)
    host.cut()
    over = time.monotonic() + lasts_s
    wait_until(lambda: time.monotonic() > over, timeout_s=5, what="the drop-out")
    host.restore()
    return f"{host.name}, {lasts_s:.1f} s"


def firewall_up(site: Site, chance: random.Random) -> str:
    """A firewall that ssh and the rendezvous pass, and connections of ranks do not: a hang, and the
    restart waits for the network, until somebody has read why."""
    host, attempts = chance.choice(site.cluster.hosts), len(site.attempts())
    host.block_high_ports()

    def waits() -> bool:
        return "network between the hosts" in site.supervisor().get("why", "")

    site.until(waits, what="a restart that waits for the network")
    host.unblock_high_ports()
    hung = site.attempts()[attempts]
    if hung["outcome"] != "hang":
        raise GaveUp(f"a firewall: {hung['cause']}\n{site.story()}")
    return host.name


def large_packets_lost(site: Site, chance: random.Random) -> str:
    """The way to a host takes smaller packets than before, and drops the others in silence."""
    host = chance.choice(site.cluster.hosts)
    host.limit_packets(1400)
    _until_noticed(site, f"the loss of large packets of {host.name}")
    host.limit_packets(None)
    return host.name


def disk_full(site: Site, chance: random.Random) -> str:
    """Not a byte is left; somebody makes room when a save has failed, or the run waits for it."""
    host = chance.choice(site.cluster.hosts)
    seen, attempts = len(site.failed_saves()), len(site.attempts())
    site.disks[host.name].fill()
    site.until(
        lambda: (
            len(site.failed_saves()) > seen
            or len(site.attempts()) > attempts
            or site.supervisor().get("state") in ("waiting", "preparing")
        ),
        what=f"a word about the full disk of {host.name}",
    )
    site.disks[host.name].free()
    return host.name


def checkpoint_damaged(site: Site, chance: random.Random) -> str:
    """A rank is killed, and before the restart a file of the newest checkpoint rots."""
    killed = _kill_rank(site, chance.choice(site.trainers))
    return f"{damage_newest(site, chance)}, after the rank on {killed} was killed"


def damage_newest(site: Site, chance: random.Random) -> str:
    """What a rank wrote into the newest checkpoint rots on its host, while no rank runs."""

    def no_rank() -> bool:
        return not any(site.ranks(host) for host in site.trainers if host.is_up)

    site.until(
        lambda: no_rank() or site.supervisor().get("state") == "running",
        what="the end of the ranks",
    )
    if not no_rank():  # the run was quicker: they may have read it already
        _kill_rank(site, chance.choice(site.trainers))
        site.until(no_rank, what="the end of the ranks")
    host = chance.choice(site.trainers)
    step, rank = site.newest(), site.trainers.index(host)
    path = site.run_dir(host).checkpoint(step) / rank_file(rank)
    size = path.stat().st_size
    how = chance.choice(("one bit", "cut", "removed"))
    if how == "one bit":
        with path.open("r+b") as stream:
            stream.seek(chance.randrange(size))
            (byte,) = stream.read(1)
            stream.seek(-1, 1)
            stream.write(bytes([byte ^ (1 << chance.randrange(8))]))
    elif how == "cut":
        with path.open("r+b") as stream:
            stream.truncate(chance.randrange(size))
    else:
        path.unlink()
    site.damaged.add((host.name, step))
    return f"{path.name} of step {step} on {host.name}: {how}"


def _until_noticed(site: Site, what: str) -> None:
    """Until the supervisor no longer says that the run is running as before."""
    attempts = len(site.attempts())
    before = site.supervisor().get("attempt")

    def noticed() -> bool:
        now = site.supervisor()
        return (
            now.get("state") not in ("running", None)
            or now.get("attempt") != before
            or len(site.attempts()) > attempts
        )

    site.until(noticed, what=what)


# --- Faults that strike while the run recovers from another one ---


def rank_killed_meanwhile(site: Site, chance: random.Random) -> str:
    """A rank is killed while it loads."""
    until_ranks_start(site)
    return f"{rank_killed(site, chance)}, as the ranks started"


def supervisor_killed_meanwhile(site: Site, chance: random.Random) -> str:
    """The supervisor dies while it recovers; ``resume``."""
    phase = _until_phase(site, chance)
    return f"{supervisor_killed(site, chance)}, {phase}"


def supervisor_asked_meanwhile(site: Site, chance: random.Random) -> str:
    """SIGTERM while it recovers. What it says then depends on how far it was; ``resume``."""
    phase = _until_phase(site, chance)
    outcome = ask_supervisor(site)
    if outcome == "ok":
        raise GaveUp(f"SIGTERM during a recovery ended as ok\n{site.story()}")
    site.resume()
    return f"node-a, {phase}"


def near_host_killed_meanwhile(site: Site, chance: random.Random) -> str:
    """The host of the supervisor loses its power while it recovers; ``resume``."""
    phase = _until_phase(site, chance)
    return f"{near_host_killed(site, chance)}, {phase}"


def _until_phase(site: Site, chance: random.Random) -> str:
    """Wait for a random phase of the recovery; in words."""
    phase = chance.choice(("at once", "hosts", "ranks"))
    if phase == "at once":
        return "at once"
    if phase == "hosts":
        site.until(
            lambda: site.supervisor().get("state") in ("preparing", "running"),
            what="the next attempt",
        )
        return "as the next attempt was prepared"
    until_ranks_start(site)
    return "as the ranks started"


def until_ranks_start(site: Site) -> None:
    """Until the ranks of the next attempt are there."""
    site.until(
        lambda: (
            site.supervisor().get("state") == "running"
            and all(site.ranks(host) for host in site.trainers)
        ),
        what="the ranks of the next attempt",
    )
