"""The host agent: one small process on each host that monitors a run there and ends it reliably.

One file, standard library only, so that it can be sent over ssh to a host which has neither llmx
nor a shared file system. It exchanges JSON lines with the supervisor over stdin and stdout. It
finds the processes of its run by ``LLMX_RUN_TOKEN`` in their environment, never by a pattern that
another run might match, and only among the processes of its own user: another user may have the
same variable.

With ``launch.transport=ssh`` it also starts the ranks of its host, as its own children.

It ends the run on its host on request and when the supervisor exits, for whatever reason: its stdin
closes, on another host after a ``bye``. Where the connection is silent or breaks without that (the
supervisor is suspended, or its host or network failed), the agent keeps the ranks for
``orphan_timeout_s``: a supervisor that comes back meanwhile takes them over with a new agent, which
ends this one. After that time the ranks are orphaned: they save a checkpoint and are ended.

    echo '{"cmd": "handshake", "id": 1, "token": "20300101"}' | python llmx/launch/agents/agent.py
"""

# os instead of pathlib: importing pathlib would take a third of the start time.
# ruff: noqa: PTH103, PTH108, PTH110, PTH112, PTH113, PTH115, PTH116, PTH118, PTH119, PTH120, PTH123, PTH202, PTH207, PTH208
from __future__ import annotations

import array
import base64
import collections
import contextlib
import errno
import fcntl
import glob
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Message = dict[str, Any]  # not at run time: hosts may have an old Python
SCAN_S = 0.5
CHUNK = 65536
# Of one file in one poll: much output in one log must not delay the other files.
STREAM_BYTES = 1 << 20
SUSPENDED_S = 5.0  # between two polls: this process itself was suspended
ORPHAN_GRACE_S = 15.0  # for the ranks to save a checkpoint after the supervisor disappeared
STREAMED = ("metrics.jsonl", "rollouts.jsonl", "logs/rank-*.log", "logs/rollout-*.log")
MIN_TOKEN = 7
PIPE_BYTES = 4096  # a pipe that is writable takes so many without blocking
RANKS_ENDED = "ranks/ended.json"  # of the run directory: when and why the ranks here were ended
REPLACED = ("samples.json", "tables.json", "inputs.json", "data.json", "balance.json")
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
JOBS = {"SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "LSB_JOBID"}  # where no agent may be
QUEUE = "llmx-queue-"  # names of runs that wait for this host end with the time since when
PROBES = 64  # connections of this host that are tried at once
PORTS = range(20000, 32700)  # below the kernel's ports for outgoing connections


class SupervisorUnreachable(Exception):
    """The ranks are orphaned: for too long the supervisor reads nothing and sends nothing."""


class Process:
    """One process of the run, from /proc."""

    def __init__(self, pid: int, parent: int, argv: list[str], environ: dict[str, str]) -> None:
        self.pid, self.parent, self.argv, self.environ = pid, parent, argv, environ

    @property
    def rank(self) -> int | None:
        for name in RANK_NAMES:
            value = self.environ.get(name, "")
            if value.isdigit():
                return int(value)
        return None

    @property
    def is_runner(self) -> bool:
        """DeepSpeed's runner. Its SIGTERM handler runs `pkill -f` with a pattern that matches every
        DeepSpeed launch of this user, so it is only ever ended by SIGKILL."""
        head = self.argv[:4]
        return "deepspeed.launcher.runner" in head or any(
            os.path.basename(part) == "deepspeed" for part in head[:2]
        )


class ProcessTable:
    """Finds the processes of a run; remembers all others, so that each is read once."""

    def __init__(self, token: str) -> None:
        if len(token) < MIN_TOKEN:
            raise ValueError(f"a run token of {len(token)} characters: at least {MIN_TOKEN}")
        self.variable = f"LLMX_RUN_TOKEN={token}".encode()
        self.tag = tag_of(token).encode()
        self.ignored: dict[int, str] = {}
        self.host = _link("/proc/self/ns/uts")

    def find(self, *, fresh: bool = False) -> list[Process]:
        """Every live process of the run on this host, except this one and its ancestors."""
        ancestors = _ancestors(os.getpid())
        processes, ignored = [], {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) in ancestors:
                continue
            pid = int(entry)
            stat = _stat(pid)
            if stat is None or stat[0] in ("Z", "X"):
                continue
            if not fresh and self.ignored.get(pid) == stat[2]:
                ignored[pid] = stat[2]
                continue
            process = self._read(pid, int(stat[1]))
            if process is not None:
                processes.append(process)
            elif _age_s(stat[2]) > 5:  # a younger one may be between fork and exec
                ignored[pid] = stat[2]
        self.ignored = ignored
        return processes

    def _read(self, pid: int, parent: int) -> Process | None:
        environ, cmdline = _bytes(f"/proc/{pid}/environ"), _bytes(f"/proc/{pid}/cmdline")
        argv = cmdline.rstrip(b"\0").split(b"\0")
        # The shell that pdsh starts here reads the token from its file, mpirun's daemon has none.
        is_shell = b"$(: " + self.tag + b";" in cmdline
        if not (self.variable in environ.split(b"\0") or is_shell or self.tag in argv):
            return None
        if _user_id(pid) != os.getuid():
            return None  # anybody can start a process with this variable
        # A container or a UTS namespace with the same process table is another host.
        if self.host and _link(f"/proc/{pid}/ns/uts") not in ("", self.host):
            return None
        pairs = (part.split(b"=", 1) for part in environ.split(b"\0") if b"=" in part)
        return Process(
            pid,
            parent,
            [part.decode("utf-8", "replace") for part in argv],
            {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in pairs},
        )


def terminate_processes(
    table: ProcessTable,
    grace_s: float,
    grace_ended: Callable[[], bool] = lambda: False,
    first_signal: int = signal.SIGINT,
    ranks_are_remote: bool = False,
) -> dict[str, int]:
    """End every process of the run here: a signal to the ranks, SIGTERM to all, SIGKILL to all.

    ``first_signal``: to the ranks, SIGUSR1 to save a checkpoint and exit, SIGINT to exit.
    ``grace_ended``: whether to stop waiting. ``ranks_are_remote``: the scheduler signals the ranks,
    and the processes here (srun) exit when these have.

    Returns how many processes were found, how many were killed, and how many are left (0, unless
    one is blocked in the kernel).
    """
    found_pids: set[int] = set()

    def alive() -> list[Process]:
        processes = table.find(fresh=True)
        found_pids.update(process.pid for process in processes)
        return processes

    def wait(seconds: float, only_ranks: bool) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not grace_ended():
            if not any(process.rank is not None or not only_ranks for process in alive()):
                return
            time.sleep(0.1)

    for process in alive():
        if process.is_runner:
            _signal(process.pid, signal.SIGKILL)
    if grace_s > 0:
        for process in rank_processes(alive()):
            _signal(process.pid, first_signal)
        wait(grace_s, only_ranks=not ranks_are_remote)
        for process in alive():
            if process.rank is None and not process.is_runner:
                _signal(process.pid, signal.SIGTERM)
        wait(min(2.0, grace_s), only_ranks=False)
    killed_pids: set[int] = set()
    deadline = time.monotonic() + 5
    while (processes := alive()) and time.monotonic() < deadline:
        for process in processes:
            killed_pids.add(process.pid)
            _signal(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    return {"ended": len(found_pids), "killed": len(killed_pids), "left": len(processes)}


def rank_processes(processes: list[Process]) -> list[Process]:
    """The ranks themselves: the children of a rank inherit its variables."""
    rank_of = {process.pid: process.rank for process in processes}
    return [
        process
        for process in processes
        if process.rank is not None and rank_of.get(process.parent) != process.rank
    ]


class Agent:
    """Executes the supervisor's commands; between them it monitors ranks and files."""

    def __init__(self) -> None:
        self.token = ""
        self.run_dir = ""
        self.table: ProcessTable | None = None
        self.hello: Message = {}  # the handshake
        self.session = ""  # the beginning of the names of the agents of this attempt
        self.port = 0
        self.reserved: list[socket.socket] = []
        self.listening: list[socket.socket] = []
        self.claim: socket.socket | None = None
        self.turn: socket.socket | None = None  # its name is the place of this run in the queue
        self.watching = self.streaming = self.stopped = False
        self.ranks: dict[int, int] = {}
        self.statuses: dict[int, bytes] = {}  # by rank, as sent
        self.setup_env: dict[str, str] = {}
        self.children: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self.offsets: dict[str, int] = {}
        self.stamps: dict[str, tuple[int, int]] = {}
        self.inodes: dict[str, int] = {}
        self.output = True
        self.backlog: collections.deque[Message] = collections.deque()
        self.wake, self.lock = threading.Event(), threading.Lock()
        self.last_message_at = time.monotonic()
        self.closed_at: float | None = None
        self.received = ""  # a signal from outside

    def serve(self) -> None:
        """Serve until the supervisor exits, or has been unreachable for ``orphan_timeout_s``."""
        for number in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by ranks
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self.listen, daemon=True).start()
        last_scan, polled_at = 0.0, time.monotonic()
        try:
            while True:
                self.wake.wait(0.2)
                self.wake.clear()
                closed = self.closed_at is not None
                while self.backlog:
                    self.execute(self.backlog.popleft())
                now = time.monotonic()
                if now - polled_at > SUSPENDED_S:
                    self.last_message_at = now  # this process was suspended
                polled_at = now
                if closed:
                    break
                if self.patience_s() == 0:
                    raise SupervisorUnreachable
                if self.watching and self.output and now - last_scan >= SCAN_S:
                    last_scan = now
                    self.poll()
        except (SupervisorUnreachable, KeyboardInterrupt):
            self.report_end()
        self.output = False
        if not self.stopped:
            # The run can be resumed later, so the ranks save a checkpoint.
            self.shut_down(min(self.grace_s, ORPHAN_GRACE_S), save=True)

    @property
    def grace_s(self) -> float:
        return float(self.hello.get("grace_s", 10.0))

    def patience_s(self) -> float | None:
        """How much longer the supervisor may be unreachable; None where its end shows by itself."""
        timeout_s = float(self.hello.get("orphan_timeout_s", 0.0))
        if not timeout_s:
            return None  # the pipes are the supervisor's own
        return max(0.0, self.last_message_at + timeout_s - time.monotonic())

    def report_end(self) -> None:
        """Tell the supervisor, which may come back and read it, and write it down for the agent of
        one that cannot be reached now."""
        report = {
            "event": "ranks_ended",
            "time": time.time(),
            "silent_s": time.monotonic() - self.last_message_at,
            "signal": self.received,
        }
        if self.watching and not self.stopped:
            with (
                contextlib.suppress(OSError),
                open(os.path.join(self.run_dir, RANKS_ENDED), "w", encoding="utf-8") as file,
            ):
                json.dump(report, file)
            with contextlib.suppress(SupervisorUnreachable):
                self.send(report)

    def listen(self) -> None:
        """Receive commands, and reply to pings at once: a slow disk, which delays everything else
        here, must not make this a lost host."""
        pending, ended = b"", False
        with contextlib.suppress(OSError, ValueError, KeyError, SupervisorUnreachable):
            while not ended and (data := os.read(0, CHUNK)):
                self.last_message_at = time.monotonic()
                *lines, pending = (pending + data).split(b"\n")
                for message in [json.loads(line) for line in lines if line.strip()]:
                    if message["cmd"] == "ping":
                        self.execute(message)
                    elif message["cmd"] == "bye":
                        ended = True
                    else:
                        self.backlog.append(message)
                self.wake.set()
        if ended or self.patience_s() is None:
            self.closed_at = time.monotonic()
        else:
            self.output = False  # the connection broke; a supervisor may come back with another one
        self.wake.set()

    def grace_ended(self) -> bool:
        """Whether the ranks have no more time: a second stop arrived, or the supervisor exited."""
        if self.closed_at is not None and time.monotonic() - self.closed_at > ORPHAN_GRACE_S:
            return True
        return any(message["cmd"] == "stop" for message in list(self.backlog))

    def execute(self, message: Message) -> None:
        """Execute one command; the reply has its ``id``."""
        command = getattr(self, f"do_{message['cmd']}")
        try:
            reply = command(message)
        except Exception as error:  # the supervisor decides what follows
            reply = {"error": f"{type(error).__name__}: {error}"}
        self.send({"event": message["cmd"], "id": message.get("id"), **reply})

    def do_handshake(self, message: Message) -> Message:
        self.token = message["token"]
        self.table = ProcessTable(self.token)
        self.run_dir = message.get("run_dir", "")
        self.hello, self.session = message, f"{tag_of(self.token)}-{message.get('session', '')}-"
        name = f"{self.session}{message.get('place', '')}-"
        setup_error = self.source(message["setup"]) if message.get("setup") else ""
        if message.get("take_over"):
            self._kill_agents(name)
        if self.claim is None and message.get("session"):
            self.claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.suppress(OSError):
                # By it later agents find this process; freed when it ends.
                self.claim.bind(f"\0llmx-agent-{name}{os.getpid()}")
                self.claim.listen(8)
        nonce = message.get("nonce", "")
        code, python = message.get("code"), message.get("python")
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "sees_run_dir": bool(nonce) and os.path.exists(os.path.join(self.run_dir, nonce)),
            "setup_error": setup_error,
            "absent": [path for path in message.get("paths", []) if not os.path.exists(path)],
            "cannot_write": _write_problem(self.run_dir, ("", "ranks", "logs")),
            "sees_code": code is None or os.path.exists(code),
            "python": _python_info(python, message.get("modules", [])) if python else None,
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "rsync": any(
                os.access(os.path.join(path, "rsync"), os.X_OK)
                for path in os.environ.get("PATH", "/usr/bin:/bin").split(":")
            ),
            "oom_kills": _oom_kills(),
            "ranks_ended": json.loads(_bytes(os.path.join(self.run_dir, RANKS_ENDED)) or b"null"),
        }

    def source(self, script: str) -> str:
        """Take over the environment that a shell has after a script; what is wrong with it, if
        anything."""
        shell = next((path for path in ("/bin/bash", "/usr/bin/bash") if os.path.exists(path)), "")
        show = "import json, os; print(json.dumps(dict(os.environ)))"
        command = [
            '. "$1" >&2 || exit; exec "$2" -I -S -c "$3"',
            "sh",
            script,
            sys.executable,
            show,
        ]
        try:
            output = _printed([shell or "/bin/sh", "-c", *command], timeout_s=120)
            environ = json.loads(output.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            return str(error)
        shells = ("_", "SHLVL", "PWD", "OLDPWD")
        self.setup_env = {
            name: value
            for name, value in environ.items()
            if os.environ.get(name) != value and name not in shells
        }
        os.environ.update(self.setup_env)
        return ""

    def do_ping(self, message: Message) -> Message:
        return {"sent": message.get("sent"), "time": time.time()}

    def do_survey(self, message: Message) -> Message:
        """Facts of this host, from a program of the supervisor, run by the Python of the ranks."""
        argv = [message["python"], "-c", message["program"], *message["arguments"]]
        # The last line: the start of an environment may print something.
        return {"facts": json.loads(_printed(argv, timeout_s=150).splitlines()[-1])}

    def do_busy(self, message: Message) -> Message:
        """The ranks of other runs on this host, of every user: a command line is public. And how
        many runs wait for this host since before ``queued_at``, where this one waits, too.

        ``is_dead``: it is known to have no agent, as it would outside a job of a scheduler. Those
        of ``kill`` are ended."""
        ranks, ended = [], []
        bound = _bytes("/proc/net/unix").decode("utf-8", "replace")
        queued_at = message.get("queued_at", 0)
        if queued_at and self.turn is None:
            self.turn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.suppress(OSError):
                self.turn.bind(f"\0{QUEUE}{queued_at}")  # freed when this process ends
        host = _link("/proc/self/ns/uts")
        for entry in os.listdir("/proc"):
            argv = _bytes(f"/proc/{entry}/cmdline").decode("utf-8", "replace").split("\0")[:-1]
            stat = _stat(int(entry)) if entry.isdigit() and _is_rank(argv) else None
            if stat is None or stat[0] in ("Z", "X") or argv[-1] == self.run_dir:
                continue
            if host and _link(f"/proc/{entry}/ns/uts") not in ("", host):
                continue
            pid = int(entry)
            text = _bytes(f"/proc/{pid}/environ").decode("utf-8", "replace")
            # Empty for a process of another user.
            environ = dict(part.split("=", 1) for part in text.split("\0") if "=" in part)
            token, user = environ.get("LLMX_RUN_TOKEN", ""), _user_id(pid)
            is_dead = (
                token != ""
                and user == os.getuid()
                and not JOBS.intersection(environ)
                and f"@llmx-agent-{tag_of(token)}-" not in bound
            )
            if is_dead and pid in message.get("kill", ()):
                _signal(pid, signal.SIGKILL)
                ended.append(pid)
                continue
            ranks.append(
                {
                    "pid": pid,
                    "run_dir": argv[-1],
                    "user": _user_name(user),
                    "since": time.time() - _age_s(stat[2]),
                    "device": _device_of(environ),
                    "is_dead": is_dead,
                }
            )
        waiting = [
            int(name.partition("@" + QUEUE)[2])
            for name in bound.split()
            if name.startswith("@" + QUEUE) and name[len(QUEUE) + 1 :].isdigit()
        ]
        ahead = sum(since < queued_at for since in waiting)
        return {"ranks": ranks, "ahead": ahead, "ended": ended}

    def do_reserve_port(self, message: Message) -> Message:
        """A free port, reserved against other runs as long as this process lives."""
        fixed = message.get("want", 0)
        candidates = [fixed] if fixed else random.sample(PORTS, 200)
        for port in candidates:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # An abstract name is freed when its owner ends, however it ends.
                claim.bind(f"\0llmx-port-{port}")
                _close(_listen(port))
            except OSError:
                claim.close()
                continue
            self.port = port
            self.reserved.append(claim)
            return {"port": port}
        return {"port": 0}

    def do_network(self, message: Message) -> Message:
        """The interface that ranks use here: the one of that name, else the one on the route to
        another host; its address and MTU. ``interfaces``: all of this host, name -> addresses."""
        interfaces, name = _interfaces(), message.get("interface")
        address: str | None
        if name is None:
            address = _address_towards(message["to"])
            bare = address.partition("%")[0]
            name = next((name for name, listed in interfaces.items() if bare in listed), None)
        else:
            addresses = interfaces.get(name, [])
            address = next((a for a in addresses if not a.startswith("fe80:")), None)
        return {
            "interface": name,
            "address": address,
            "interfaces": interfaces,
            "mtu": int(_bytes(f"/sys/class/net/{name}/mtu") or 0),
            "ports": _bytes("/proc/sys/net/ipv4/ip_local_port_range").decode().split(),
        }

    def do_listen(self, message: Message) -> Message:
        """Answer the probes of other hosts on a fresh port of an address, as ranks listen, and on
        ``port`` of every address where it is not 0. Without an address: no longer."""
        for listener in self.listening:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends accept() of its thread
            listener.close()
        self.listening = []
        if not message["address"]:
            return {}
        self.listening += _listen(message["port"]) if message["port"] else []
        family = socket.AF_INET6 if ":" in message["address"] else socket.AF_INET
        fresh = socket.create_server((message["address"], 0), family=family, backlog=1024)
        self.listening.append(fresh)
        for listener in self.listening:
            arguments = (listener, message["token"].encode())
            threading.Thread(target=_answer_probes, args=arguments, daemon=True).start()
        return {"port": fresh.getsockname()[1]}

    def do_probe(self, message: Message) -> Message:
        """Connect to every peer (name, address, port) at once, and exchange ``size`` bytes."""
        from concurrent.futures import ThreadPoolExecutor  # not for each start of an agent

        token, size, timeout_s = message["token"].encode(), message["size"], message["timeout_s"]

        def probe(peer: tuple[str, str, int]) -> tuple[str, Message]:
            name, address, port = peer
            return name, _probe(address, port, token, size, timeout_s)

        with ThreadPoolExecutor(PROBES) as threads:
            return {"results": dict(threads.map(probe, message["peers"]))}

    def do_mkdir(self, message: Message) -> Message:
        for path in message["paths"]:
            os.makedirs(path, exist_ok=True)
        return {}

    def do_put(self, message: Message) -> Message:
        """Write small files into a directory, each whole or not at all."""
        os.makedirs(message["path"], exist_ok=True)
        for name, data in message["files"].items():
            path = os.path.join(message["path"], name)
            with open(f"{path}.new", "wb") as file:
                file.write(base64.b64decode(data))
            os.replace(f"{path}.new", path)
        return {}

    def do_watch(self, message: Message) -> Message:
        """Begin to report ranks and the statuses of ``statuses``, and (on a private disk) to stream
        the files that they write.

        ``offsets``, ``ranks``: what the supervisor has received already, where this agent takes
        over from another one."""
        self._write_token()
        self.streaming = message.get("stream", False)
        self.port = message.get("port", self.port)
        self.statuses = dict.fromkeys(message.get("statuses", ()), b"")
        if "offsets" in message:
            self.offsets = dict(message["offsets"])
            self.ranks = {int(rank): pid for rank, pid in message["ranks"].items()}
        elif self.streaming:
            for path in self._matches(("ranks/rank-*.json", "ranks/.rank-*.tmp", RANKS_ENDED)):
                os.unlink(os.path.join(self.run_dir, path))  # of an earlier attempt
            for path in self._matches(STREAMED):
                status = os.stat(os.path.join(self.run_dir, path))
                self.offsets[path], self.inodes[path] = status.st_size, status.st_ino
        self.watching = True
        return {"offsets": self.offsets}

    def do_start(self, message: Message) -> Message:
        """Start ranks: rank -> its variables, beside those of all. ``inherit``: they also get those
        of this process. What they print before they redirect it goes to their logs, too. ``log``:
        how these are called, of what is started in the same way and is no rank.

        What the setup script of the host exports wins, but for the variables of ``fixed``; lists of
        directories begin with those of ``first``."""
        env = {**(os.environ if message["inherit"] else {}), **message["env"]}
        for name, value in self.setup_env.items():
            if name in message["first"]:
                value = f"{message['first'][name]}:{value}"
            if name not in message["fixed"]:
                env[name] = value
        os.makedirs(os.path.join(self.run_dir, "logs"), exist_ok=True)
        for name, variables in message["ranks"].items():
            rank = int(name)
            log_name = f"logs/{message.get('log', 'rank')}-{rank:03d}.log"
            with open(os.path.join(self.run_dir, log_name), "ab") as log:
                child = subprocess.Popen(
                    message["argv"],
                    cwd=self.run_dir,
                    env={**env, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.children[rank], self.ranks[rank] = child, child.pid
            self.send({"event": "rank_start", "rank": rank, "pid": child.pid})
        return {}

    def _write_token(self) -> None:
        """Write the token for the shell that pdsh starts here: its command line, which ``ps`` shows
        to every user, has the name of this file."""
        path = os.path.join(self.run_dir, f".token-{os.getuid()}")
        if os.path.isdir(self.run_dir) and _bytes(path) != self.token.encode():
            new = f"{path}-{socket.gethostname()}-{os.getpid()}.tmp"
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(self.token)
            os.replace(new, path)

    def do_flush(self, message: Message) -> Message:
        self.poll()
        return {"oom_kills": _oom_kills()}

    def do_kill_leftovers(self, message: Message) -> Message:
        """End what an earlier attempt of the same run left here. Its supervisor may have exited a
        moment ago, and its ranks may be saving a checkpoint: they get the time for it."""
        if self.table is None:
            return {"ended": 0, "killed": 0, "left": 0}
        self._kill_agents(f"{tag_of(self.token)}-", keep=self.session)
        counts = terminate_processes(self.table, message["grace_s"], first_signal=signal.SIGUSR1)
        # Also where nothing was found: a Slurm job continues when the host of its srun fails.
        _run_all(self.hello.get("cancel_force", []))
        return counts

    def _kill_agents(self, prefix: str, keep: str = "\n") -> None:
        """End other agents of the run, by the beginning of their names. One that misses its
        supervisor would end the ranks, also those of the next attempt.

        Any user can bind such a name: what is ended is an agent, and of this user."""
        prefix, keep = f"@llmx-agent-{prefix}", f"@llmx-agent-{keep}"
        for line in _bytes("/proc/net/unix").decode("utf-8", "replace").splitlines():
            name = line.split(" ")[-1]
            if not name.startswith(prefix) or name.startswith(keep):
                continue
            pid, user = owner_of(name[1:])
            # Without a pid it is in another container, or has exited just now.
            if pid > 0 and user == os.getuid() and _is_agent(pid):
                _signal(pid, signal.SIGKILL)

    def do_signal(self, message: Message) -> Message:
        """Send a signal (``USR2``, ``QUIT``) to the ranks of the run that are on this host."""
        _run_all(self.hello.get("signals", {}).get(message["name"], []))
        processes = rank_processes(self.table.find(fresh=True)) if self.table else []
        ranks = [process for process in processes if process.rank in message["ranks"]]
        for process in ranks:
            _signal(process.pid, getattr(signal, "SIG" + message["name"]))
        return {"ranks": [process.rank for process in ranks]}

    def do_list_files(self, message: Message) -> Message:
        """Files of the run directory that match the patterns: relative path -> bytes."""
        sizes = {}
        for path in self._matches(message["patterns"]):
            full = os.path.join(self.run_dir, path)
            with contextlib.suppress(OSError):
                if os.path.isfile(full):
                    sizes[path] = os.path.getsize(full)
        return {"files": sizes}

    def do_stop(self, message: Message) -> Message:
        self.watching = False
        save = message.get("save", False)
        counts = self.shut_down(message.get("grace_s", self.grace_s), self.grace_ended, save=save)
        self.stopped = True
        self.stream()
        return counts

    def shut_down(
        self, grace_s: float, grace_ended: Callable[[], bool] = lambda: False, save: bool = False
    ) -> dict[str, int]:
        """End the run on this host and remove its files in /dev/shm. ``save``: the ranks may save a
        checkpoint first, within the grace."""
        if self.table is None:
            return {"ended": 0, "killed": 0, "left": 0}
        save = save and grace_s > 0
        to_save = self.hello.get("signals", {}).get("USR1", []) if save else []
        _run_all(to_save or self.hello.get("cancel", []))
        counts = terminate_processes(
            self.table,
            grace_s,
            grace_ended,
            first_signal=signal.SIGUSR1 if save else signal.SIGINT,
            ranks_are_remote=bool(to_save),
        )
        _run_all(self.hello.get("cancel_force", []))
        # Of ranks that were killed while they replaced their status. Only those of this host: the
        # others may be writing their last status into the same directory now.
        temporary = self._matches(f"ranks/.rank-{rank:03d}.json.*.tmp" for rank in self.ranks)
        files = [os.path.join(self.run_dir, path) for path in temporary]
        if self.port:
            files += glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_*_{self.port}_*")
        for path in files:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return counts

    def poll(self) -> None:
        """Report ranks that started or exited, and stream new content of files."""
        if self.table is None:
            return
        ended = self._ended_children() if self.children else self._ended_processes(self.table)
        self.stream()  # what a rank wrote is sent before its end
        for rank, code in ended.items():
            pid, self.ranks[rank] = self.ranks[rank], 0
            self.send(
                {
                    "event": "rank_exit",
                    "rank": rank,
                    "pid": pid,
                    "code": code,
                    "time": time.time(),
                    "oom_kills": _oom_kills(),
                    "disk_free": _disk_free(self.run_dir),
                }
            )

    def _ended_children(self) -> dict[int, int | None]:
        """Ranks that have exited since the last look, and their exit codes."""
        codes = {rank: child.poll() for rank, child in self.children.items() if self.ranks[rank]}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _ended_processes(self, table: ProcessTable) -> dict[int, int | None]:
        """Ranks of another program that have exited, without their codes; reports new ranks."""
        processes = table.find()
        for process in rank_processes(processes):
            rank = process.rank
            if rank is not None and rank not in self.ranks:
                self.ranks[rank] = process.pid
                if self.turn is not None:
                    self.turn.close()  # the next one sees the rank
                self.send({"event": "rank_start", "rank": rank, "pid": process.pid})
        pids = {process.pid for process in processes if process.rank is not None}
        return {rank: None for rank, pid in self.ranks.items() if pid and pid not in pids}

    def stream(self) -> None:
        """Send the statuses that changed since the last poll, and of a private disk what ranks
        wrote since then; replaced files as a whole."""
        for rank, before in self.statuses.items():
            # Opened each time: a network disk shows a new one late otherwise.
            text = _bytes(os.path.join(self.run_dir, f"ranks/rank-{rank:03d}.json"))
            if text not in (before, b""):
                self.statuses[rank] = text
                self.send({"event": "status", "rank": rank, "status": json.loads(text)})
        for path in self._matches(STREAMED) if self.streaming else ():
            with contextlib.suppress(OSError), open(os.path.join(self.run_dir, path), "rb") as file:
                status = os.fstat(file.fileno())
                inode = self.inodes.setdefault(path, status.st_ino)
                if inode != status.st_ino or status.st_size < self.offsets.get(path, 0):
                    # Replaced (a resumed run truncates its metrics): sent as a whole.
                    data = file.read()
                    self.send_file({"event": "replace", "path": path}, data)
                    self.offsets[path], self.inodes[path] = len(data), status.st_ino
                    continue
                offset = self.offsets.get(path, 0)
                file.seek(offset)
                end = offset + STREAM_BYTES
                while offset < end and (data := file.read(CHUNK)):
                    self.send_file({"event": "append", "path": path, "offset": offset}, data)
                    self.offsets[path] = offset = offset + len(data)
        for path in self._matches(REPLACED) if self.streaming else ():
            with contextlib.suppress(OSError):
                full = os.path.join(self.run_dir, path)
                status = os.stat(full)
                stamp = (status.st_mtime_ns, status.st_ino)
                if self.stamps.get(path) != stamp:
                    with open(full, "rb") as file:
                        self.send_file({"event": "replace", "path": path}, file.read())
                    self.stamps[path] = stamp

    def _matches(self, patterns: Iterable[str]) -> list[str]:
        root = glob.escape(self.run_dir)
        return [
            os.path.relpath(path, self.run_dir)
            for pattern in patterns
            for path in sorted(glob.glob(os.path.join(root, pattern), recursive=True))
        ]

    def send_file(self, message: Message, data: bytes) -> None:
        self.send({**message, "bytes": len(data), "data": base64.b64encode(data).decode()})

    def send(self, message: Message) -> None:
        """Write a message, unless the connection is broken."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        with self.lock:
            while data and self.output:
                # An agent that blocks in a write could not end the run.
                if not select.select([], [1], [], self.patience_s())[1]:
                    self.output = False  # half a line may be written
                    raise SupervisorUnreachable
                try:
                    data = data[os.write(1, data[:PIPE_BYTES]) :]
                except OSError:
                    self.output = False

    def _on_signal(self, number: int, frame: object) -> None:
        self.received = signal.Signals(number).name
        raise KeyboardInterrupt


def tag_of(token: str) -> str:
    """The hash that names a run where every user can read it: on command lines, in sockets."""
    import hashlib  # not for each start of an agent

    return hashlib.blake2b(token.encode(), digest_size=8).hexdigest()


def owner_of(name: str) -> tuple[int, int]:
    """Process and user of who has bound an abstract name; (0, -1) where nobody has."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.connect("\0" + name)
            credentials = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return 0, -1
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


def _is_rank(argv: list[str]) -> bool:
    """Whether this is the command line of a rank or a rollout server of llmx; DeepSpeed's
    launchers have a longer one."""
    return (
        len(argv) > 2
        and argv[-2].endswith(("llmx.worker", "/llmx/worker.py", "llmx.rollout.server"))
        and os.path.basename(argv[0]).startswith("python")
        and not any("deepspeed" in part for part in argv)
    )


def _is_agent(pid: int) -> bool:
    """Whether this is the command line of an agent: of the bootstrap, or of this file."""
    argv = _bytes(f"/proc/{pid}/cmdline").split(b"\0")
    return any(b"llmx-remote" in part or part.endswith(b"/agents/agent.py") for part in argv)


def _user_id(pid: int) -> int | None:
    """The real user of a process: who started it, also where a program changes its user."""
    for line in _bytes(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


def _user_name(user_id: int | None) -> str:
    import pwd  # not for each start of an agent

    if user_id is None:
        return ""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def _device_of(values: dict[str, str]) -> str | None:
    """The GPU of a rank by its environment, as CUDA_VISIBLE_DEVICES names it; empty for a rank on
    the CPU, None where it is not known."""
    if not values:
        return None
    hosts = values.get("LLMX_GPUS", "").split(":")
    host = int(values.get("CROSS_RANK", "0" if len(hosts) == 1 else len(hosts)))
    if host >= len(hosts):
        return None
    visible = hosts[host] or values.get("CUDA_VISIBLE_DEVICES", "")
    devices = [word for word in visible.split(",") if word]
    local = values.get("LOCAL_RANK", "0")
    return devices[int(local)] if local.isdigit() and int(local) < len(devices) else ""


def _run_all(commands: list[list[str]]) -> None:
    for argv in commands:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
            )


def _listen(port: int) -> list[socket.socket]:
    """Listen on every address; OSError where one is in use."""
    families = [(socket.AF_INET, "0.0.0.0")]
    if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
        families.append((socket.AF_INET6, "::"))
    sockets: list[socket.socket] = []
    try:
        for family, address in families:
            sockets.append(socket.socket(family, socket.SOCK_STREAM))
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Closed connections of a run that has just ended do not count as in use.
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sockets[-1].bind((address, port))
            sockets[-1].listen(64)
    except OSError:
        _close(sockets)
        raise
    return sockets


def _answer_probes(listener: socket.socket, token: bytes) -> None:
    """Answer probes until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=_answer_probe, args=(peer, token), daemon=True).start()


def _answer_probe(peer: socket.socket, token: bytes) -> None:
    """The other side of ``_probe``. The peer closes first, so that the port is free at once."""
    with peer, contextlib.suppress(OSError):
        peer.settimeout(60)
        if _receive(peer, len(token)) != token:
            return
        peer.sendall(b"1")
        size = int.from_bytes(_receive(peer, 8), "big")
        _receive(peer, size)
        peer.sendall(b"2")
        _receive(peer, 1)
        peer.sendall(bytes(size))
        peer.recv(1)


def _probe(address: str, port: int, token: bytes, size: int, timeout_s: float) -> Message:
    """Connect to another host, exchange a byte, send ``size`` bytes and receive as many. Where it
    fails: ``stage`` has the step (``connect``, ``byte``, ``send``, ``receive``), ``error`` the name
    of the error; else ``seconds`` has what the answer of a byte takes."""
    stage, seconds = "connect", 0.0
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as peer:
            for stage, data, expected in (
                ("byte", token, 1),
                ("send", size.to_bytes(8, "big") + bytes(size), 1),
                ("receive", b"3", size),
            ):
                sent_at = time.monotonic()
                peer.sendall(data)
                if _receive(peer, expected) != b"1" and stage == "byte":
                    raise OSError(errno.EPROTO, "another program answers")
                if stage == "byte":
                    seconds = time.monotonic() - sent_at
    except OSError as error:
        # A time-out of Python has no number.
        name = errno.errorcode.get(error.errno or errno.ETIMEDOUT, type(error).__name__)
        return {"stage": stage, "error": name}
    return {"stage": "", "error": "", "seconds": seconds}


def _receive(peer: socket.socket, size: int) -> bytes:
    """Receive ``size`` bytes; ConnectionResetError where the peer closes before."""
    received = bytearray()
    while len(received) < size:
        data = peer.recv(min(size - len(received), 1 << 20))
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "closed")
        received += data
    return bytes(received)


def _close(sockets: list[socket.socket]) -> None:
    for listener in sockets:
        listener.close()


def _address_towards(host: str) -> str:
    """The address of this host on the route to another one."""
    failure: OSError | None = None
    for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(place)
            except OSError as error:  # no route in this address family
                failure = failure or error
                continue
            return str(probe.getsockname()[0])
    raise failure or OSError(f"{host} has no address")


def _interfaces() -> dict[str, list[str]]:
    """The interfaces that are up -> their addresses, IPv4 first, as NCCL and gloo choose."""
    interfaces: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            with contextlib.suppress(OSError):  # it is gone, or has no address
                fcntl.ioctl(probe.fileno(), 0x8913, request, True)  # SIOCGIFFLAGS
                if struct.unpack_from("H", request, 16)[0] & 1:  # IFF_UP
                    interfaces[name] = []
                    fcntl.ioctl(probe.fileno(), 0x8915, request, True)  # SIOCGIFADDR
                    interfaces[name] = [socket.inet_ntoa(request.tobytes()[20:24])]
    for line in sorted(_bytes("/proc/net/if_inet6").decode().splitlines()):
        words = line.split()
        if words[-1] in interfaces:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
            interfaces[words[-1]].append(address)
    return interfaces


def _python_info(python: str, modules: list[str]) -> Message:
    """The version of a Python, and the modules that it lacks, without importing them."""
    code = (
        "import sys, importlib.util as u, json;"
        "print(json.dumps([sys.version.split()[0],"
        "[m for m in sys.argv[1:] if u.find_spec(m) is None]]))"
    )
    try:
        version, missing = json.loads(_printed([python, "-c", code, *modules], timeout_s=60))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"error": str(error)}
    return {"version": version, "missing": missing}


def _printed(argv: list[str], *, timeout_s: float) -> bytes:
    """The output of a program; ValueError with its last line on stderr where it fails."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}")
    return done.stdout


def _write_problem(root: str, names: tuple[str, ...]) -> str:
    """Why this user cannot make files in directories below ``root``, or in the nearest one above
    that is there; empty where it can."""
    for name in names if root else ():
        path = os.path.join(root, name)
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        probe = os.path.join(
            path, f".llmx-{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.tmp"
        )
        try:
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.unlink(probe)
        except OSError as error:
            return f"{path}: {error.strerror}, as user {_user_name(os.getuid())}"
    return ""


def _disk_free(path: str) -> int | None:
    """Free bytes where the ranks write: 0 on a disk that is read-only or fails, None where
    unknown."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return 0 if error.errno in (errno.EIO, errno.ESTALE) else None
    if disk.f_flag & os.ST_RDONLY:
        return 0
    return disk.f_bavail * disk.f_frsize


def _oom_kills() -> int:
    """The number of processes that the kernel's OOM killer has ended since this host booted."""
    for line in _bytes("/proc/vmstat").splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


def _ancestors(pid: int) -> set[int]:
    ancestors = set()
    while pid > 0:
        ancestors.add(pid)
        stat = _stat(pid)
        pid = int(stat[1]) if stat else 0
    return ancestors


def _stat(pid: int) -> tuple[str, str, str] | None:
    """State, parent and start time (clock ticks since boot) of a process."""
    fields = _bytes(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    return fields[0].decode(), fields[1].decode(), fields[19].decode()


def _age_s(start_ticks: str) -> float:
    boot = float(_bytes("/proc/uptime").split()[0] or 0)
    return boot - int(start_ticks) / os.sysconf("SC_CLK_TCK")


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    Agent().serve()
