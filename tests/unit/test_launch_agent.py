"""What the agent of a host does, with real processes and real signals."""

from __future__ import annotations

import base64
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmx.launch.agents.agent import ProcessTable
from llmx.launch.agents.connection import AgentError
from llmx.run.rundir import write_json
from tests.agents import Rig, is_running, wait_until

STUBBORN = (
    "for name in ('SIGTERM', 'SIGINT', 'SIGUSR1'):\n"
    "    signal.signal(getattr(signal, name), signal.SIG_IGN)"
)
PAUSE = "import signal; signal.pause()"
CHILD = f"child = subprocess.Popen([sys.executable, '-c', {PAUSE!r}])\n"
# Binds a name, as any user can.
BIND = "name = socket.socket(socket.AF_UNIX); name.bind(chr(0) + sys.argv[1]); name.listen()"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as made:
        yield made


def test_stop_ends_this_run_only_and_a_signal_goes_to_ranks_alone(rig: Rig) -> None:
    mine, other = [rig.process(), rig.process(rank=0)], rig.process(own=False)
    rank = rig.process(rank=3)
    assert rig.ask("signal", name="USR2", ranks=[3])["ranks"] == [3]
    assert rank.wait(timeout=5) == -signal.SIGUSR2
    assert [process.poll() for process in (*mine, other)] == [None] * 3
    counts = rig.ask("stop", grace_s=2.0)
    assert (counts["ended"], counts["left"]) == (2, 0)
    assert [process.wait(timeout=5) for process in mine] == [-signal.SIGTERM, -signal.SIGINT]
    assert other.poll() is None


def test_ranks_may_save_before_they_leave(rig: Rig) -> None:
    """They get SIGUSR1, and their children, which inherit the rank's number, get nothing."""
    rank = rig.process(
        f"{CHILD}def save(*_): print('child', child.poll(), flush=True); child.kill(); sys.exit()\n"
        "signal.signal(signal.SIGUSR1, save)",
        rank=0,
    )
    assert rig.ask("stop", grace_s=10, save=True)["left"] == 0
    assert rank.stdout is not None
    assert rank.stdout.read() == b"child None\n"
    assert rank.wait(timeout=5) == 0


def test_leftovers_of_an_earlier_attempt_are_cleared(rig: Rig) -> None:
    left, other = [rig.process(), rig.process(STUBBORN, rank=0)], rig.process(own=False)
    counts = rig.ask("kill_leftovers", grace_s=2)
    assert (counts["ended"], counts["left"]) == (2, 0)
    assert [process.wait(timeout=5) for process in left] == [-signal.SIGTERM, -signal.SIGKILL]
    assert other.poll() is None
    assert rig.ask("kill_leftovers", grace_s=5)["ended"] == 0, "it goes on after that"


def test_ranks_are_asked_before_their_launcher(rig: Rig) -> None:
    """A launcher that is ended first would kill its ranks before they have saved anything."""
    note = rig.directory / "note"
    code = (
        f"def end(*_): open({str(note)!r}, 'a').write(sys.argv[1]); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); signal.signal(signal.SIGINT, end)"
    )
    rig.process(code, "launcher ")
    rig.process(code, "rank ", rank=0)
    rig.ask("stop", grace_s=5)
    assert note.read_text() == "rank launcher "


def test_the_runner_of_deepspeed_is_never_asked(rig: Rig) -> None:
    """Its handler of SIGTERM would run `pkill -f` on everybody's launches."""
    runner = rig.process("", "deepspeed.launcher.runner")
    assert rig.ask("stop", grace_s=2)["left"] == 0
    assert runner.wait(timeout=5) == -signal.SIGKILL


def test_what_a_run_leaves_in_dev_shm(rig: Rig) -> None:
    port = rig.ask("reserve_port", want=0)["port"]
    base = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1"
    mine, other = Path(f"{base}_{port}_0"), Path(f"{base}_{port + 1}_llmx-test")
    mine.touch()
    other.touch()
    try:
        rig.ask("stop", grace_s=2.0)
        assert (mine.exists(), other.exists()) == (False, True)
    finally:
        mine.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def test_ports_are_free_and_reserved(rig: Rig, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert rig.ask("reserve_port", want=listener.getsockname()[1])["port"] == 0
    port = rig.ask("reserve_port", want=0)["port"]
    assert 20000 <= port < 32768
    with Rig(tmp_path / "second") as second:
        assert second.ask("reserve_port", want=port)["port"] == 0


def test_ranks_are_reported(rig: Rig) -> None:
    rig.ask("watch", stream=False)
    rank = rig.process(CHILD, rank=3)
    started = rig.event("rank_start")
    assert (started["rank"], started["pid"]) == (3, rank.pid)
    before = time.time()
    rank.kill()
    rank.wait()
    ended = rig.event("rank_exit")
    assert (ended["rank"], ended["pid"]) == (3, rank.pid)
    assert before - 1 < ended["time"] < time.time() + 1
    assert rig.ask("stop", grace_s=2.0)["ended"] == 1  # its child


def start_message(code: str, *ranks: int, **env: str) -> dict[str, Any]:
    """Ranks that run a line of Python."""
    return {
        "argv": [sys.executable, "-c", code],
        "env": {"PATH": os.environ["PATH"], "ODD": "two $words", **env},
        "inherit": False,
        "first": {"PATH": "/my/bin"},
        "fixed": ["FIXED"],
        "ranks": {rank: {"RANK": str(rank)} for rank in ranks},
    }


def test_ranks_that_the_agent_starts(rig: Rig) -> None:
    """Its children: with the signals and the environment of any process, their codes known."""
    rig.ask("watch")
    code = (
        "import os, signal, sys; rank = os.environ['RANK']\n"
        "kinds = [signal.getsignal(getattr(signal, 'SIG' + n)) for n in ('QUIT', 'TERM', 'HUP')]\n"
        "print(sorted(set(os.environ) - {'LC_CTYPE'}), os.environ['ODD'], set(kinds), flush=True)\n"
        "signal.getsignal(signal.SIGINT) is signal.default_int_handler or sys.exit(9)\n"
        "os.kill(os.getpid(), 9) if rank == '1' else sys.exit(int(rank))"
    )
    rig.ask("start", **start_message(code, 1, 2))
    codes = {event["rank"]: event["code"] for event in (rig.event("rank_exit") for _ in range(2))}
    assert codes == {1: -signal.SIGKILL, 2: 2}
    for rank in (1, 2):
        log = (rig.directory / f"logs/rank-{rank:03d}.log").read_text()
        assert log == "['ODD', 'PATH', 'RANK'] two $words {<Handlers.SIG_DFL: 0>}\n"


def test_what_a_setup_script_exports_wins_but_for_the_config(rig: Rig) -> None:
    """The Python of the ranks stays first in PATH, too."""
    script = rig.directory / "$(touch canary)'s `setup`; false"
    assert "No such" in rig.handshake(setup=str(script))["setup_error"]
    for wrong, error in (("return 3", "exit code 3"), ("export X=$(", "exit code")):
        script.write_text(f"{wrong}\n")
        assert error in rig.handshake(setup=str(script))["setup_error"]
    script.write_text("echo welcome\nexport PATH=/opt/x:$PATH A='two $words $(id)' FIXED=1\nB=2\n")
    assert rig.handshake(setup=str(script))["setup_error"] == ""
    rig.ask("watch")
    code = "import os; print(*(os.environ.get(n) for n in ('PATH', 'A', 'FIXED', 'B')), sep='|')"
    rig.ask("start", **start_message(code, 0, A="here", FIXED="by config"))
    assert rig.event("rank_exit")["code"] == 0
    log = (rig.directory / "logs/rank-000.log").read_text()
    assert log == f"/my/bin:/opt/x:{os.environ['PATH']}|two $words $(id)|by config|None\n"


def test_an_error_comes_back(rig: Rig) -> None:
    with pytest.raises(ValueError, match="1 characters: at least 7"):
        ProcessTable("0")  # it would end every process that has `--uid 0`
    with pytest.raises(AgentError, match="No such file.*: '/no/python'"):
        rig.ask("start", **{**start_message("", 0), "argv": ["/no/python"]})


def sent(message: dict[str, Any]) -> bytes:
    return base64.b64decode(message["data"])


def test_files_of_a_private_disk_are_streamed(rig: Rig) -> None:
    log, status = rig.directory / "logs/rank-001.log", rig.directory / "ranks/rank-001.json"
    for path in (log, status):
        path.parent.mkdir()
        path.write_text("of an earlier attempt\n")
    rig.ask("watch", stream=True, statuses=[0, 1])
    assert not status.exists()
    big = "x" * 200_000
    with log.open("a") as stream:
        stream.write(f"first\n{big}\n")
    text = b""
    while not text.endswith(b"x\n"):
        text += sent(rig.event("append"))
    assert text.decode() == f"first\n{big}\n"
    for state in ("training", "finished"):
        write_json(status, {"state": state})
        message = rig.event("status")
        assert (message["rank"], message["status"]) == (1, {"state": state})
    with log.open("a") as stream:
        stream.write("last words\n")
    rig.ask("flush")
    assert sent(rig.event("append")) == b"last words\n"


def test_a_rewritten_file_is_sent_whole(rig: Rig) -> None:
    """Rank 0 cuts its metrics back where a run goes on from a checkpoint."""
    metrics = rig.directory / "metrics.jsonl"
    metrics.write_text("of an earlier attempt\n")
    rig.ask("watch", stream=True)
    shorter = rig.directory / "shorter"
    shorter.write_text("of an\n")
    os.replace(shorter, metrics)
    assert sent(rig.event("replace")) == b"of an\n"
    with metrics.open("a") as stream:
        stream.write("two\n")
    message = rig.event("append")
    assert (message["offset"], sent(message)) == (6, b"two\n")


def test_a_flood_in_a_log_does_not_hold_up_the_metrics(rig: Rig) -> None:
    """In a run directory whose name a glob would take for a pattern, and which another host has
    given its files."""
    root = rig.directory / "lr=[1e-3]"
    rig.ask("put", path=str(root), files={"config.yaml": base64.b64encode(b"seed: 1\n").decode()})
    assert [(path.name, path.read_text()) for path in root.iterdir()] == [
        ("config.yaml", "seed: 1\n")
    ]
    (root / "logs").mkdir()
    rig.handshake(run_dir=str(root))
    rig.ask("watch", stream=True)
    flood = os.urandom(1 << 16) * 40
    (root / "logs/rank-000.log").write_bytes(flood)
    (root / "metrics.jsonl").write_text("{}\n")
    assert len(rig.ask("list_files", patterns=["logs/*"])["files"]) == 1
    paths, text = [], b""
    while len(text) < len(flood):
        message = rig.event("append")
        paths.append(message["path"])
        if message["path"] != "metrics.jsonl":
            assert message["offset"] == len(text)
            text += sent(message)
    assert text == flood
    assert "metrics.jsonl" in paths[:-1]


def test_the_status_of_a_rank_elsewhere_stays(rig: Rig) -> None:
    """Hosts that share the run directory end one after the other."""
    ranks = rig.directory / "ranks"
    ranks.mkdir()
    rig.ask("watch", stream=False)
    rig.process(rank=0)
    rig.event("rank_start")
    here, elsewhere = ranks / ".rank-000.json.7.tmp", ranks / ".rank-001.json.7.tmp"
    here.touch()
    elsewhere.touch()
    rig.ask("stop", grace_s=0)
    assert (here.exists(), elsewhere.exists()) == (False, True)


def test_the_handshake_looks_around(rig: Rig) -> None:
    (rig.directory / ".nonce").touch()
    answer = rig.handshake(
        nonce=".nonce", code="/nonexistent.py", python=sys.executable, modules=["json", "no_such"]
    )
    assert (answer["sees_run_dir"], answer["sees_code"]) == (True, False)
    assert answer["python"]["missing"] == ["no_such"]
    assert answer["host"] == socket.gethostname()
    assert rig.handshake(run_dir=str(rig.directory / "new"))["cannot_write"] == ""
    assert list(rig.directory.glob(".llmx-*")) == []
    other = rig.handshake(python="/nonexistent/python", run_dir="/proc/run")
    assert "error" in other["python"]
    assert other["sees_run_dir"] is False
    assert other["cannot_write"].startswith("/proc: "), "which takes no file of anybody"
    addresses = ["127.0.0.1", *(["::1"] if Path("/proc/net/if_inet6").read_text() else [])]
    found = [rig.ask("network", to=address) for address in addresses]
    assert [(way["address"], way["interface"]) for way in found] == [(to, "lo") for to in addresses]
    os.kill(answer["pid"], signal.SIGKILL)
    with pytest.raises(AgentError, match="the connection closed"):  # and no time-out
        rig.ask("flush")


def test_an_agent_of_an_earlier_attempt_does_not_end_the_next(rig: Rig) -> None:
    """It may notice only now that its supervisor is gone, when the next attempt runs already."""
    old_pid = rig.handshake(session="one")["pid"]
    with (
        Rig(rig.directory / "sibling", token=rig.token) as sibling,
        Rig(rig.directory / "later", token=rig.token) as later,
    ):
        for each in (later, sibling):
            each.handshake(session="two")
        assert later.ask("kill_leftovers", grace_s=1)["left"] == 0
        wait_until(lambda: not is_running(old_pid))
        rank = rig.process()
        rig.connection.close(timeout_s=5)
        assert sibling.ask("list_files", patterns=[])["files"] == {}, "of this attempt"
        assert rank.poll() is None
        assert later.ask("stop", grace_s=1)["ended"] == 1
        assert rank.wait(timeout=10) != 0


def test_processes_of_others_are_none_of_the_run(rig: Rig) -> None:
    """Another program that has bound an agent's name; of another user even with the token in its
    environment and on its command line."""
    others = [rig.process(BIND, f"llmx-agent-{rig.tag}-zero-0-1", own=False)]
    if os.getuid() == 0:
        drop = "os.setuid(65534); "
        others += [
            rig.process(drop, rig.tag, rank=0),
            rig.process(drop + BIND, f"llmx-agent-{rig.tag}-zero-0-2", "llmx-remote"),
        ]
    rig.handshake(session="one")
    rig.ask("watch", stream=False)
    rank = rig.process(rank=1)
    assert rig.event("rank_start")["rank"] == 1
    assert rig.ask("kill_leftovers", grace_s=1)["ended"] == 1
    assert rank.wait(timeout=5) != 0
    assert [process.poll() for process in others] == [None] * len(others)


def test_the_token_is_for_a_shell_that_pdsh_starts(rig: Rig) -> None:
    """The shell has the token only in its variables; it is known by the tag on its command line."""
    rig.ask("watch", stream=False)
    path = rig.directory / f".token-{os.getuid()}"
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (rig.token, 0o600)
    line = f'export LLMX_RUN_TOKEN="$(: {rig.tag}; cat {path})"; echo $LLMX_RUN_TOKEN; sleep 60; :'
    with subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == f"{rig.token}\n"
        assert rig.ask("stop", grace_s=1)["ended"] == 2
