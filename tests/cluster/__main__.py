"""A pretend cluster by hand: try llmx on hosts that are not there.

    python -m tests.cluster up --hosts 2              keep a cluster up until Ctrl-C
    python -m tests.cluster enter node-a              a shell on a host of it
    python -m tests.cluster enter node-a nvidia-smi   or one command
    python -m tests.cluster check                     what this machine can do, and what is missing

While ``up`` runs, it takes commands on its terminal: ``help`` lists them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.cluster import leftovers
from tests.cluster.faults import Faults
from tests.cluster.launching import hardware_of
from tests.cluster.netns import Cluster, Unsupported
from tests.cluster.requirements import TRANSPORTS, missing
from tests.cluster.slurm import start_slurm

OPTION = "conf/hardware/pretend.yaml"
REPOSITORY = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except Unsupported as reason:
        print(f"not possible here: {reason}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="up | enter | check")
    up = commands.add_parser("up", help="keep a cluster up until Ctrl-C")
    up.add_argument("--hosts", type=int, default=2, help="how many (default 2)")
    up.add_argument("--slots", default="1", help="ranks a host, e.g. 2,1 (default 1 each)")
    up.add_argument(
        "--private",
        action="append",
        default=[],
        metavar="DIR",
        help="a directory that is a disk of its own on every host; may be repeated",
    )
    up.add_argument(
        "--hide-checkout",
        action="store_true",
        help="only the first host has the code: launch.sync=rsync must bring it",
    )
    up.add_argument("--slurm", action="store_true", help="start Slurm on it")
    up.set_defaults(run=_up)
    enter = commands.add_parser("enter", help="a shell, or one command, on a host")
    enter.add_argument("host")
    enter.add_argument("command", nargs=argparse.REMAINDER)
    enter.set_defaults(run=_enter)
    check = commands.add_parser("check", help="what this machine can do")
    check.set_defaults(run=_check)
    return parser


def _up(arguments: argparse.Namespace) -> int:
    if reason := missing(*(["slurm"] if arguments.slurm else [])):
        raise Unsupported(reason)
    slots = [int(word) for word in arguments.slots.split(",")]
    slots = slots * arguments.hosts if len(slots) == 1 else slots
    if len(slots) != arguments.hosts:
        print(f"--slots {arguments.slots}: give one number, or {arguments.hosts}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [f"node-{chr(ord('a') + index)}" for index in range(arguments.hosts)]
    hidden = {name: [REPOSITORY] for name in names[1:]} if arguments.hide_checkout else {}
    with Cluster(hosts=names, private_paths=arguments.private, hidden=hidden) as cluster:
        if arguments.slurm:
            start_slurm(cluster, slots=max(slots))
        _introduce(cluster, slots)
        try:
            _obey(cluster)
        except KeyboardInterrupt:
            print()
    print("the cluster is down")
    return 0


def _introduce(cluster: Cluster, slots: list[int]) -> None:
    option = cluster.directory / OPTION
    option.parent.mkdir(parents=True)
    text = yaml.safe_dump({**hardware_of(cluster, slots), "name": "pretend"}, sort_keys=False)
    option.write_text(f"# A pretend cluster of {len(slots)} hosts; gone when it is closed.\n{text}")
    first = cluster.first.name
    python = shlex.quote(sys.executable)
    print(
        f"up: {', '.join(f'{host.name} ({host.address})' for host in cluster.hosts)}\n\n"
        f"hardware, in {option}:\n\n{text}\n"
        f"a shell:   {python} -m tests.cluster enter {first}\n"
        f"train:     {python} -m tests.cluster enter {first} {python} -m llmx \\\n"
        f"             hardware=pretend --config-dir={option.parents[1]}\n"
        f"ssh:       ssh -F {cluster.ssh_config} {cluster.hosts[-1].name}   (on a host)\n\n"
        "Ctrl-C ends it; help lists what can be done to a host.",
        flush=True,
    )


def _obey(cluster: Cluster) -> None:
    if not sys.stdin.isatty():
        signal.pause()
    while True:
        try:
            words = shlex.split(input("> "))
        except EOFError:
            return
        if words == ["quit"]:
            return
        try:
            if words:
                _order(cluster, *words)
        except (KeyError, ValueError) as error:
            print(f"{shlex.join(words)}: {error.args[0]} (help lists the commands)")
        except (RuntimeError, AssertionError, subprocess.CalledProcessError) as error:
            print(error)


def _order(cluster: Cluster, verb: str, name: str = "", *values: str) -> None:
    """One line of the terminal: a method of a host with its arguments (``limit_bandwidth node-b
    40``); KeyError or ValueError for a wrong one."""
    if verb == "help":
        for command, method in vars(Faults).items():
            if not command.startswith("_") and callable(method):
                print(f"{command} HOST ...  {(method.__doc__ or '').splitlines()[0]}")
        print("boot HOST  start_sshd HOST  stop_sshd HOST  processes HOST  quit")
        return
    method = getattr(cluster[name], verb, None)
    if verb.startswith("_") or not callable(method):
        raise ValueError(f"there is no command {verb}")
    pairs = [value.partition("=") for value in values]
    arguments = [yaml.safe_load(word) for word, _, value in pairs if not value]
    try:
        result = method(*arguments, **{k: yaml.safe_load(value) for k, _, value in pairs if value})
    except TypeError as error:
        raise ValueError(error) from error
    for pid, argv in (result or {}).items():
        print(f"{pid:7} {shlex.join(argv)[:150]}")


def _enter(arguments: argparse.Namespace) -> int:
    # Tests have clusters too: only one that was opened by hand has the option file.
    options = Path(tempfile.gettempdir()).glob(f"{leftovers.PREFIX}*/{OPTION}")
    opened = sorted(options, key=lambda path: path.stat().st_mtime)
    if not opened:
        print("no cluster is up: python -m tests.cluster up", file=sys.stderr)
        return 2
    directory = opened[-1].parents[2]
    pids = json.loads((directory / leftovers.HOSTS).read_text())
    if arguments.host not in pids:
        print(f"no host {arguments.host}: there are {', '.join(pids)}", file=sys.stderr)
        return 2
    pid = pids[arguments.host]
    command = arguments.command or [os.environ.get("SHELL", "/bin/bash")]
    there = Path(f"/proc/{pid}/root{Path.cwd()}")
    working_directory = str(Path.cwd()) if there.is_dir() else "/"
    script = [sys.executable, "-I", "-S", str(directory / "enter.py"), str(pid)]
    return subprocess.call([*script, "--cwd", working_directory, "--terminal", "1", "--", *command])


def _check(_: argparse.Namespace) -> int:
    reason = missing()
    print(f"hosts      {reason or 'yes'}")
    for transport in TRANSPORTS:
        print(f"{transport:10} {missing(transport) or 'yes'}")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
