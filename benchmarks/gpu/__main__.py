"""What the GPUs of this machine do: kernels, every path, generation, memory against the plan.

    python -m benchmarks.gpu                 every part that has not been measured yet
    python -m benchmarks.gpu paths rl        these parts, measured anew
    python -m benchmarks.gpu --pretend       shrunken sizes, also on a CPU: shows that it runs

Each part is a process of its own with eight minutes: one that fails, hangs or runs out of memory
stops no other. Each measure stands beside what is expected of it and is appended to
``OUT/gpu-CHIP.jsonl`` at once. ``OUT/gpu-CHIP.md`` is the table of all calls; the lines of several
machines of one kind make one file: ``cat A.jsonl B.jsonl``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.part import Context, Measure, NotHere, PartFailed
from benchmarks.machine import RESULTS, machine
from llmx.config.groups import CONF
from llmx.config.schema import DeviceConfig
from llmx.errors import ConfigError, did_you_mean, exit_code
from llmx.hardware import detect
from llmx.run.rundir import write_text
from llmx.run.scratch import scratch_directory

ROOT = Path(__file__).parents[2]

PARTS = {
    # name: (module:function, title)
    "kernels": ("kernels:kernels", "Versions, matrix products, attention kernels"),
    "paths": ("training:paths", "Six steps of every kind of run, against a CPU's losses"),
    "rl": ("training:rl", "GRPO on a network of 0.6B, 64 rows of 512 tokens"),
    "mfu": ("training:mfu", "Speed and memory of pretraining at 4096 tokens"),
    "resume": ("training:resume", "Resume, bit for bit; fp16 with a dynamic loss scale"),
    "server": ("training:server", "A rollout server beside the rank"),
    "packed": ("training:packed", "SFT, packed and padded"),
    "waits": ("training:waits", "Waiting for the GPU, by phase"),
    "saves": ("training:saves", "Saving in the background"),
    "several_gpus": ("training:several_gpus", "Several GPUs"),
}
"""In the order in which they run: what tells most comes first."""

LIMIT_S = 480.0
"""Of a part on a GPU."""
END_S = 45.0
"""Seconds in which a part that is told to end can end its own ranks."""


@dataclass
class Outcome:
    """How a part ended, and what is known of it from all calls."""

    state: str = "not ended"
    """``done``, ``failed``, ``not run``, or ``not ended``: the machine went away."""
    seconds: float = 0.0
    why: str = ""
    """Of a part that failed or was not run, in one line."""
    measures: dict[str, Measure] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    """What it need not measure again: an earlier call of it was ended before its last measure."""

    def begin(self) -> None:
        """It is called, perhaps again."""
        fine = {name for name, measure in self.measures.items() if measure.ok is not False}
        self.known = frozenset() if self.state == "done" else frozenset(fine)
        self.state, self.why = "not ended", "the machine went away"

    @property
    def ok(self) -> bool:
        """Nothing failed and nothing is below what is expected."""
        fine = self.state in ("done", "not run")
        return fine and all(measure.ok is not False for measure in self.measures.values())


class Records:
    """The lines of ``gpu-CHIP.jsonl``, and the table that is made of them."""

    def __init__(self, directory: Path, context: Context) -> None:
        chip = f"{context.num_gpus} x {context.device_name}" if context.cuda else "CPU"
        self.title = chip + (", pretended sizes" if context.pretend else "")
        name = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")
        self.path = directory / f"gpu-{name}.jsonl"

    def add(self, part: str, **values: Any) -> None:
        """Append a line, and flush it: what was measured stays when the machine goes away."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"part": part, **values}) + "\n")

    def read(self) -> tuple[list[str], dict[str, Outcome]]:
        """The machines of all lines, and what is known of each part. A later measure replaces
        an earlier one of its name."""
        machines: list[str] = []
        outcomes: dict[str, Outcome] = {}
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        for line in map(json.loads, text.splitlines()):
            outcome = outcomes.setdefault(line["part"], Outcome())
            if "machine" in line:
                machines += [line["machine"]] if line["machine"] not in machines else []
                outcome.begin()
            elif "state" in line:
                outcome.state, outcome.why = line["state"], line["why"]
                outcome.seconds = line["seconds"]
            else:
                measure = Measure(**line["measure"])
                outcome.measures[measure.name] = measure
        return machines, {part: outcomes[part] for part in PARTS if part in outcomes}

    def write_table(self) -> None:
        """``gpu-CHIP.md``, from all lines."""
        machines, outcomes = self.read()
        lines = [f"# What `make gpu` measured: {self.title}", "", *(f"- {m}" for m in machines), ""]
        for part, outcome in outcomes.items():
            lines += [f"## {PARTS[part][1]} (`{part}`, {outcome.seconds:.0f} s)", ""]
            if outcome.state != "done":
                lines += [f"{outcome.state}: {outcome.why}", ""]
            if outcome.measures:
                lines += ["| what | measured | expected | |", "|---|---|---|---|"]
                lines += [
                    f"| {m.name} | {m.shown()} | {m.expected} | {m.mark()} |"
                    for m in outcome.measures.values()
                ]
                lines.append("")
        write_text(self.path.with_suffix(".md"), "\n".join(lines).rstrip() + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the parts and report; 0 when nothing failed and every number is as expected."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="parts: " + ", ".join(PARTS),
        allow_abbrev=False,
    )
    parser.add_argument("parts", nargs="*", help="default: those that are not done yet")
    parser.add_argument("--pretend", action="store_true", help="shrunken sizes, also on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the table")
    parser.add_argument(
        "--work-dir", type=Path, help="directory for runs and data (default: a temporary one)"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    return exit_code(lambda: run_inside(options) if options.inside else run_parts(options))


def run_parts(options: argparse.Namespace) -> int:
    """Run each part as a process; write the table after each."""
    for name in options.parts:
        if name not in PARTS:
            raise ConfigError(
                f"there is no part {name!r}.{did_you_mean(name, PARTS)} Parts: {', '.join(PARTS)}."
            )
    with contextlib.ExitStack() as stack:
        options.work_dir = options.work_dir or stack.enter_context(scratch_directory())
        (options.work_dir / "logs").mkdir(parents=True, exist_ok=True)
        context = find_context(options.work_dir.absolute(), pretend=options.pretend)
        records = Records(options.out.absolute(), context)
        known = records.read()[1]
        ended = {part for part, outcome in known.items() if outcome.state in ("done", "not run")}
        names = [name for name in PARTS if name in (options.parts or PARTS.keys() - ended)]
        this_machine = f"{records.title}; {machine()}"
        print(this_machine, *([PRETENDED] if context.pretend else []), sep="\n", flush=True)
        for number, name in enumerate(names, start=1):
            print(f"\n[{number}/{len(names)}] {PARTS[name][1]} ({name})", flush=True)
            records.add(name, machine=this_machine)
            run_part(name, context, records)
            records.write_table()
    outcomes = records.read()[1]
    missed = [part for part, outcome in outcomes.items() if not outcome.ok]
    print(f"\n{len(outcomes)} of {len(PARTS)} parts are in {records.path.with_suffix('.md')}")
    print(f"not as expected: {', '.join(missed)}" if missed else "all as expected")
    return 1 if missed else 0


PRETENDED = "Shrunken sizes (--pretend): this shows that it runs; the numbers mean nothing."


def find_context(root: Path, *, pretend: bool) -> Context:
    """The GPUs of this machine as the catalogue of devices knows them, else its CPU."""
    gpus = detect.visible_gpus(detect.detect_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        if not pretend:
            raise ConfigError(
                "this benchmark measures GPUs, and this process sees none (nvidia-smi, "
                "CUDA_VISIBLE_DEVICES). --pretend runs every part shrunken on the CPU."
            )
        device = DeviceConfig(accelerator="cpu", precisions=["fp32"])
        return Context(root, pretend, device, "cpu", 0)
    catalogue = (CONF / "hardware" / "devices" / "catalogue.yaml").read_text(encoding="utf-8")
    devices = {name: DeviceConfig(**values) for name, values in yaml.safe_load(catalogue).items()}
    name, device = detect.match_device(gpus[0], devices)
    return Context(root, pretend, device, name, len(gpus))


def run_part(name: str, context: Context, records: Records) -> None:
    """One part as a process, ended when its time is over."""
    log = context.root / "logs" / f"{name}.log"
    words = ["--inside", name, "--work-dir", str(context.root), "--out", str(records.path.parent)]
    began = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", *words]
            + (["--pretend"] if context.pretend else []),
            cwd=ROOT,
            # llmx and its plugin of Hydra, where neither is installed.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "launchers")))},
            stdin=subprocess.DEVNULL,
            stderr=stream,
            start_new_session=True,
        )
        why = wait(process, limit_s=LIMIT_S if context.cuda else 3 * LIMIT_S)
    outcome = records.read()[1][name]
    if why or outcome.state == "not ended":
        outcome.state, outcome.why = "failed", why or f"exit code {process.returncode}"
        records.add(name, state="failed", why=outcome.why, seconds=time.monotonic() - began)
    if outcome.state != "done":
        print(f"  {outcome.state}: {outcome.why}")
    if outcome.state == "failed":
        lines = log.read_text(errors="replace").splitlines()[-15:]
        print("\n".join(f"    | {line}" for line in lines))
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def run_inside(options: argparse.Namespace) -> int:
    """Be the process of one part: append its measures and its end. Its runs write to the log."""
    (name,) = options.parts
    context = find_context(options.work_dir, pretend=options.pretend)
    records = Records(options.out, context)
    known = records.read()[1][name].known
    context = dataclasses.replace(context, known=known)
    module, function = PARTS[name][0].split(":")
    state, why, began = "done", "", time.monotonic()
    try:
        part = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        for measure in part(context):
            records.add(name, measure=dataclasses.asdict(measure))
            bound = f"  ({measure.expected})" if measure.expected else ""
            line = f"  {measure.name:<58} {measure.shown():<24}{bound} {measure.mark()}"
            print(line.rstrip(), flush=True)
    except NotHere as error:
        state, why = "not run", str(error)
    except Exception as error:  # whatever it is, the other parts run all the same
        traceback.print_exc()
        kind = "" if isinstance(error, PartFailed) else f"{type(error).__name__}: "
        state, why = "failed", f"{kind}{error}".splitlines()[0]
    records.add(name, state=state, why=why, seconds=time.monotonic() - began)
    return 0


def wait(process: subprocess.Popen[bytes], *, limit_s: float) -> str:
    """Wait for a part; empty, or why it was ended with all that it runs."""
    try:
        process.wait(timeout=limit_s)
        return ""
    except subprocess.TimeoutExpired:
        return f"it did not end within its {limit_s:,.3g} s"
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=END_S)
        with contextlib.suppress(ProcessLookupError):  # a rank may not end when it is told to
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
