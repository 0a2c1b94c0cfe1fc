"""Starts ranks by forking, so that torch, DeepSpeed and transformers are imported once for many
runs: a run of two ranks costs two seconds instead of thirty.

``python -m tests.programs.ranks SOCKET`` reads JSON lines: ``{"start": [run directory of each
rank], "port": n, "env": {}}`` answers ``{"pids": [...]}``, ``{"wait": [pids]}`` answers ``{"codes":
[...]}``. Each child is ``llmx.worker.main``, as ``deepspeed`` would start it.

On ``SOCKET`` it takes what ``tests/programs/deepspeed_client.py`` was called with, which stands in
for the program ``deepspeed`` (``tests.forked_ranks``).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import runpy
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import llmx.data
import llmx.train.loop  # noqa: F401
from llmx import worker
from tests.programs.leaving import run_and_leave

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def start(run_dirs: list[str], *, port: int, env: dict[str, str]) -> list[int]:
    """One child a rank."""
    pids = []
    for rank, run_dir in enumerate(run_dirs):
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with(parent)
            place = rank_place(rank, len(run_dirs), address="127.0.0.1", port=port)
            os.environ.update(place, **env)
            sys.path += filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
            os.setsid()
            code = 1
            try:
                code = worker.main([run_dir])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return pids


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. DeepSpeed's shared-memory collectives
    wait for a dead peer in a busy loop in which no signal handler of Python ever runs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def rank_place(rank: int, world: int, *, address: str, port: int) -> dict[str, str]:
    """What DeepSpeed's launcher tells a rank of one host."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_SIZE": world,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}


def wait(pid: int) -> int:
    """The exit code of a rank. Where the tests have ended meanwhile, this process ends as well,
    and its ranks with it."""
    tests = select.poll()
    tests.register(0, 0)  # reports that the pipe was closed, and nothing else
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if tests.poll(10):
            os._exit(1)


def take(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What the stand-in was called with, and its standard output and error."""
    head, fds, _, _ = socket.recv_fds(connection, 4, 2)
    (size,) = struct.unpack("!I", head)
    text = b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    return json.loads(text), fds


def launch(connection: socket.socket) -> int:
    """Fork the ranks of one command and wait for them; where one fails, or the command was killed,
    end the others. The exit code of the command."""
    asked, fds = take(connection)
    for number, descriptor in zip((1, 2), fds, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num_gpus", type=int)
    parser.add_argument("--hostfile", type=Path)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, required=True)
    for flag in ("--no_ssh_check", "--no_local_rank", "--module"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(asked["argv"])
    world = options.num_gpus
    if world is None:
        (world,) = map(int, re.findall(r"slots=(\d+)", options.hostfile.read_text()))
    running = {}
    for rank in range(world):
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with(parent)
            connection.close()
            place = rank_place(rank, world, address=options.master_addr, port=options.master_port)
            run_program(options.program, {**asked["env"], **place}, asked["cwd"])
        running[pid] = rank
    code = 0
    while running:
        gone = connection in select.select([connection], [], [], 0.01)[0]
        for pid in list(running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del running[pid]
                code = code or abs(os.waitstatus_to_exitcode(status))
        if gone or code:
            end(list(running))
            running.clear()
            code = code or 1
    return code


def end(pids: list[int]) -> None:
    """As DeepSpeed's launcher does it: asked first."""
    for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience_s
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while pids and time.monotonic() < deadline:
            pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
            time.sleep(0.01)


def run_program(argv: list[str], environment: dict[str, str], directory: str) -> None:
    """Be ``python -m MODULE ...`` (or ``python FILE.py ...``) in this environment."""
    os.environ.clear()
    os.environ.update(environment)
    show_environment(environment)
    os.chdir(directory)
    more = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [directory, *filter(None, more)]
    sys.argv = list(argv)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")

    def program() -> None:
        if argv[0].endswith(".py"):
            runpy.run_path(argv[0], run_name="__main__")
        else:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)

    run_and_leave(program)


def show_environment(environment: dict[str, str]) -> None:
    """In ``/proc/PID/environ``, too, by which llmx finds the processes of a run."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, past = int(fields[47]), int(fields[48])  # env_start and env_end
    text = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    room = past - begin
    assert len(text) < room, f"{len(text)} bytes of environment, room for {room}"
    ctypes.memmove(begin, text.ljust(room, b"\0"), room)


def main() -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    print(json.dumps({"ready": True}), flush=True)
    launches: list[int] = []
    lines = os.fdopen(0, "rb", buffering=0)
    while True:
        ready, _, _ = select.select([lines, listener], [], [], 1.0)
        launches = [pid for pid in launches if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if listener in ready:
            connection, _ = listener.accept()
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                code = 1
                try:
                    end_with(server)
                    listener.close()
                    code = launch(connection)
                except BaseException:
                    traceback.print_exc()
                with contextlib.suppress(OSError):
                    connection.sendall(bytes([code]))
                os._exit(code)
            connection.close()
            launches.append(pid)
        if lines not in ready:
            continue
        line = lines.readline()
        if not line:
            return
        asked = json.loads(line)
        if "start" in asked:
            answer = {"pids": start(asked["start"], port=asked["port"], env=asked["env"])}
        else:
            answer = {"codes": [wait(pid) for pid in asked["wait"]]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
