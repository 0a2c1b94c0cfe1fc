"""A pretend cluster by hand: try llmx on hosts that are not there.

python -m tests.cluster check                   what this machine can do, and what is missing
python -m tests.cluster up --slots 2,1          a shell on the first of two hosts; ends with it
python -m tests.cluster up -- nvidia-smi        one command instead
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.cluster.launching import REPOSITORY, hardware_of
from tests.cluster.netns import Cluster, Unsupported
from tests.cluster.requirements import TRANSPORTS, missing
from tests.cluster.slurm import start_slurm


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster", description=__doc__, formatter_class=raw
    )
    commands = parser.add_subparsers(required=True, metavar="up | check")
    up = commands.add_parser("up", help="a cluster, until its shell or command ends")
    up.add_argument("--slots", default="1,1", help="ranks of each host (default 1,1)")
    disk = "a directory that is a disk of its own on every host; may be repeated"
    up.add_argument("--private", action="append", default=[], metavar="DIR", help=disk)
    only = "only the first host has the code: launch.sync=rsync must bring it"
    up.add_argument("--hide-checkout", action="store_true", help=only)
    up.add_argument("--slurm", action="store_true", help="start Slurm on it")
    up.add_argument("command", nargs=argparse.REMAINDER)
    up.set_defaults(run=_up)
    commands.add_parser("check", help="what this machine can do").set_defaults(run=_check)
    arguments = parser.parse_args()
    try:
        return int(arguments.run(arguments))
    except Unsupported as reason:
        print(f"not possible here: {reason}", file=sys.stderr)
        return 1


def _up(arguments: argparse.Namespace) -> int:
    if reason := missing(*(["slurm"] if arguments.slurm else [])):
        raise Unsupported(reason)
    slots = [int(word) for word in arguments.slots.split(",")]
    names = [f"node-{chr(ord('a') + index)}" for index in range(len(slots))]
    hidden = {name: [REPOSITORY] for name in names[1:]} if arguments.hide_checkout else {}
    with Cluster(hosts=names, private_paths=arguments.private, hidden=hidden) as cluster:
        if arguments.slurm:
            start_slurm(cluster, slots=max(slots))
        option = cluster.directory / "conf/hardware/pretend.yaml"
        option.parent.mkdir(parents=True)
        text = yaml.safe_dump({**hardware_of(cluster, slots), "name": "pretend"}, sort_keys=False)
        option.write_text(
            f"# A pretend cluster of {len(slots)} hosts; gone when it is closed.\n{text}"
        )
        command = [word for word in arguments.command if word != "--"]
        if not command:
            train = f"{sys.executable} -m llmx hardware=pretend --config-dir={option.parents[1]}"
            print(f"{option}:\n\n{text}\ntrain:        {train}", flush=True)
            print(f"another host: ssh -F {cluster.ssh_config} {names[-1]}", flush=True)
        enter = [*cluster.script("enter.py"), str(cluster.first.pid), "--cwd", Path.cwd()]
        shell = [os.environ.get("SHELL", "/bin/bash")]
        return subprocess.call([*enter, "--terminal", "1", "--", *(command or shell)])


def _check(_: argparse.Namespace) -> int:
    reason = missing()
    print(f"hosts      {reason or 'yes'}")
    for transport in TRANSPORTS:
        print(f"{transport:10} {missing(transport) or 'yes'}")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
