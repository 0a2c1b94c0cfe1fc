"""Reinforcement learning on two hosts of unequal speed: samples/s of one pool, and of two.

    python benchmarks/rollout_hosts.py --cpu 0.5 --link 1000

The hosts are network namespaces of this machine (``tests/cluster``; it needs root) with a quota of
one core and of ``--cpu`` cores, one thread each. Four arrangements of ``task=grpo`` on the same
prompts: the fast host alone; both train and draw (the split is measured); the fast one trains and
the slow one draws, in turn (``max_staleness=0``) and ahead (1). They run one by one, forwards
and then backwards, and a round counts the median step of each. Samples/s are prompts times group
size over the time of a step.

It wants two cores to itself and takes about six minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import write_result  # noqa: E402

PROMPTS, GROUP = 8, 8
ROLLOUT = ["rollout.hosts=[node-b]"]
ARRANGEMENTS: dict[str, tuple[tuple[int, int], list[str]]] = {
    "fast host alone": ((1, 0), []),
    "both train and draw": ((1, 1), []),
    "slow host draws, in turn": ((1, 1), ROLLOUT),
    "slow host draws, ahead": ((1, 1), [*ROLLOUT, "rollout.max_staleness=1"]),
}
ONE_POOL = 2
"""The first so many arrangements have one pool."""


def main() -> int:
    """Measure, print, write benchmarks/results/rollout_hosts.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", type=float, default=0.5, help="cores of the slow host")
    parser.add_argument("--link", type=float, default=1000.0, help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14, help="of a run (default 14)")
    options = parser.parse_args()
    if not 0.05 <= options.cpu <= 1 or options.link <= 0 or min(options.rounds, options.steps) < 1:
        parser.error("--cpu 0.05 to 1, --link over 0, --rounds and --steps from 1")
    from tests.cluster.netns import Cluster
    from tests.cluster.requirements import missing

    if reason := missing("rsync"):
        print(f"not possible here: {reason}", file=sys.stderr)
        return 1
    speeds: dict[str, list[float]] = {name: [] for name in ARRANGEMENTS}
    with tempfile.TemporaryDirectory(prefix="llmx-rollout-") as place, Cluster(hosts=2) as cluster:
        for host, cores in zip(cluster.hosts, (1.0, options.cpu), strict=True):
            host.limit_bandwidth(options.link)
            host.limit_cpu(cores)
        for number in range(options.rounds):
            names = list(ARRANGEMENTS) if number % 2 == 0 else list(ARRANGEMENTS)[::-1]
            for name in names:
                speed = measure(
                    cluster,
                    Path(place) / f"{number}-{names.index(name)}",
                    name,
                    steps=options.steps,
                )
                speeds[name].append(speed)
                print(f"round {number + 1}: {name}: {speed:.1f} samples/s", flush=True)
    write(speeds, options)
    return 0


def measure(cluster: Any, directory: Path, name: str, *, steps: int) -> float:
    """Samples/s of one run, whose first steps do not count."""
    from tests.cluster.launching import start_llmx

    slots, words = ARRANGEMENTS[name]
    directory.mkdir()
    overrides = [
        "task=grpo", "data.seq_len=128", "task.options.rewards=[length]",
        f"task.options.group_size={GROUP}", "task.options.max_new_tokens=48",
        "model.config.hidden_size=128", "model.config.intermediate_size=384",
        "model.config.num_hidden_layers=4", f"batch.global_batch={PROMPTS}",
        f"batch.micro_batch={GROUP}", f"task.steps={steps}", "task.log_every_steps=1",
        "task.save_model=false", "checkpoint=none", "launch.transport=ssh", *words,
    ]  # fmt: skip
    run = start_llmx(cluster, directory, slots=slots, overrides=overrides)
    if run.wait(timeout_s=900):
        raise RuntimeError(run.output())
    times = [r["step_time_s"] for r in run.records() if r["kind"] == "train"]
    return PROMPTS * GROUP / statistics.median(times[min(4, steps // 2) :])


def write(speeds: dict[str, list[float]], options: argparse.Namespace) -> None:
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    names = list(ARRANGEMENTS)
    one_pool = max(names[:ONE_POOL], key=medians.__getitem__)
    two_pools = max(names[ONE_POOL:], key=medians.__getitem__)
    lines = [
        f"One host with 1 core, one with {options.cpu:g}; {options.link:g} Mbit/s; "
        f"{PROMPTS} prompts, {GROUP} completions each, {options.steps} steps; "
        f"{options.rounds} round(s).",
        "",
        "| arrangement | samples/s, median | each round |",
        "|---|---:|---|",
        *(
            f"| {name} | {medians[name]:.1f} | {', '.join(f'{v:.1f}' for v in speeds[name])} |"
            for name in names
        ),
        "",
        f"Best of two pools ({two_pools}) against best of one ({one_pool}): "
        f"{medians[two_pools] / medians[one_pool]:.2f} times (aim: 1.3).",
    ]
    write_result("rollout_hosts", "Rollout hosts", lines)


if __name__ == "__main__":
    sys.exit(main())
