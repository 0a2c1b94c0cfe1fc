"""What the GPUs of this machine do: kernels, training runs, memory against the plan, against peers.

    python -m benchmarks.gpu                      every part that this machine can run
    python -m benchmarks.gpu --parts matmul,mfu   some of them
    python -m benchmarks.gpu --tiny               tiny sizes, to test that it runs (also on a CPU)

Each part is a process of its own with a time limit: one that fails, hangs or runs out of memory
never stops the next. Every number stands beside what is expected of it. ``make gpu`` sets up a
bare machine first and keeps the table under ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path

import yaml

from benchmarks.gpu.part import Context, Measure, NotHere, Outcome, PartFailed
from llmx import __version__
from llmx.config.groups import CONF
from llmx.config.schema import DeviceConfig
from llmx.errors import ConfigError, did_you_mean, exit_code
from llmx.hardware import detect
from llmx.run.rundir import write_json, write_text
from llmx.run.scratch import scratch_directory

ROOT = Path(__file__).parents[2]

PARTS: dict[str, tuple[str, str, float]] = {
    # name: (module:function, title, minutes at most)
    "versions": ("kernels:versions", "Versions", 1),
    "matmul": ("kernels:matmul", "Matrix products and memory", 1),
    "attention": ("kernels:attention", "Attention kernels, forward and backward", 3),
    "demo": ("training:demo", "The demo", 4),
    "stages": ("training:stages", "ZeRO stages and offload", 5),
    "resume": ("training:resume", "Resume, bit for bit", 5),
    "mfu": ("training:mfu", "Speed and memory of pretraining at 4096 tokens", 8),
    "packed": ("training:packed", "SFT, packed and padded", 4),
    "saves": ("training:saves", "Saving in the background", 5),
    "fp16": ("training:fp16", "fp16 with a dynamic loss scale", 4),
    "synchronisations": ("training:synchronisations", "Waiting for the GPU", 3),
    "several_gpus": ("training:several_gpus", "Several GPUs", 6),
    "peers": ("peers:peers", "Packed SFT against TRL and the Hugging Face Trainer", 8),
}
"""In the order in which they run: what is quick and tells most comes first."""

END_S = 45.0
"""Seconds in which a part that is told to end can end its own ranks."""


def main(argv: list[str] | None = None) -> int:
    """Run the parts and report; 0 when nothing failed and every number is as expected."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="parts: " + ", ".join(PARTS),
        allow_abbrev=False,
    )
    parser.add_argument("--parts", metavar="A,B", help="only these (default: all)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test that it runs")
    parser.add_argument("--minutes", type=float, default=60, help="start no new part after so long")
    parser.add_argument("--out", type=Path, help="directory for gpu-CHIP.md and gpu-CHIP.json")
    parser.add_argument(
        "--work-dir", type=Path, help="directory for runs and data (default: a temporary one)"
    )
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    return exit_code(lambda: run_job(options.job) if options.job else run_parts(options))


def parts_in_order(words: str | None) -> list[str]:
    """The parts of ``--parts`` in their order. Raises ConfigError for an unknown one."""
    names = [word.strip() for word in words.split(",") if word.strip()] if words else list(PARTS)
    for name in names:
        if name not in PARTS:
            raise ConfigError(
                f"--parts: there is no part {name!r}.{did_you_mean(name, PARTS)} "
                f"Parts: {', '.join(PARTS)}."
            )
    return [name for name in PARTS if name in names]


def run_parts(options: argparse.Namespace) -> int:
    """Run every part in turn, print its measures as they come, and write the table after each."""
    names = parts_in_order(options.parts)
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        root = options.work_dir or stack.enter_context(scratch_directory())
        root = root.absolute()
        (root / "logs").mkdir(parents=True, exist_ok=True)
        context = find_context(root, tiny=options.tiny)
        machine = describe(context)
        print("\n".join(machine), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        for number, name in enumerate(names, start=1):
            title = PARTS[name][1]
            print(f"\n[{number}/{len(names)}] {title} ({name})", flush=True)
            if time.monotonic() - began > 60 * options.minutes:
                late = f"the {options.minutes:g} minutes of --minutes were used up"
                outcome = Outcome(name, title, "not run", why=late)
            else:
                outcome = run_part(name, context)
            show(outcome)
            outcomes.append(outcome)
            if options.out:
                # After each part: what was measured stays when the machine goes away.
                write(options.out, outcomes, machine)
    failed = [outcome.part for outcome in outcomes if not outcome.ok]
    done = sum(outcome.state == "done" for outcome in outcomes)
    print(f"\n{done} of {len(outcomes)} parts ran", end="")
    print(f"; not as expected: {', '.join(failed)}" if failed else "; all as expected")
    return 1 if failed else 0


def find_context(root: Path, *, tiny: bool) -> Context:
    """The GPUs of this machine as the catalogue of devices knows them, else its CPU."""
    gpus = detect.visible_gpus(detect.detect_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        if not tiny:
            raise ConfigError(
                "this benchmark measures GPUs, and this process sees none (nvidia-smi, "
                "CUDA_VISIBLE_DEVICES). --tiny runs every part shrunken on the CPU."
            )
        device = DeviceConfig(accelerator="cpu", precisions=["fp32"])
        return Context(root, tiny, device, "cpu", 0)
    catalogue = (CONF / "hardware" / "devices" / "catalogue.yaml").read_text(encoding="utf-8")
    devices = {name: DeviceConfig(**values) for name, values in yaml.safe_load(catalogue).items()}
    name, device = detect.match_device(gpus[0], devices)
    return Context(root, tiny, device, name, len(gpus))


def describe(context: Context) -> list[str]:
    """Date, chip and versions, a line each."""
    packages = ("torch", "deepspeed", "transformers")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    chip = f"{context.num_gpus} x {context.device_name}" if context.cuda else "CPU"
    lines = [
        f"{time.strftime('%Y-%m-%d')}; {chip}; {os.cpu_count()} cores; "
        f"Python {platform.python_version()}, {versions}, llmx {__version__}"
    ]
    if context.tiny:
        lines.append("Shrunken sizes (--tiny): this shows that it runs; the numbers mean nothing.")
    return lines


def run_part(name: str, context: Context) -> Outcome:
    """One part as a process, ended when its time is over."""
    _, title, minutes = PARTS[name]
    job = context.root / f"{name}.json"
    values = {**dataclasses.asdict(context), "root": str(context.root)}
    job.write_text(json.dumps({"part": name, "context": values}), encoding="utf-8")
    answer = job.with_suffix(".outcome.json")
    answer.unlink(missing_ok=True)
    log = context.root / "logs" / f"{name}.log"
    began = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", "--job", str(job)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        why = wait(process, limit_s=60 * minutes)
    seconds = time.monotonic() - began
    if not why and answer.is_file():
        values = json.loads(answer.read_text(encoding="utf-8"))
        values["measures"] = [Measure(**measure) for measure in values["measures"]]
        outcome = Outcome(**{**values, "seconds": seconds})
    else:
        why = why or f"ended with exit code {process.returncode}"
        outcome = Outcome(name, title, "failed", seconds, why)
    if outcome.state == "failed":
        tail = log.read_text(errors="replace").splitlines()[-15:]
        print("\n".join(f"    | {line}" for line in tail), flush=True)
    return outcome


def run_job(path: Path) -> int:
    """Run the part of a job file in this process; write its outcome beside the file."""
    job = json.loads(path.read_text(encoding="utf-8"))
    values = job["context"]
    device = DeviceConfig(**values["device"])
    context = Context(**{**values, "root": Path(values["root"]), "device": device})
    place, title, _ = PARTS[job["part"]]
    module, function = place.split(":")
    outcome = Outcome(job["part"], title, "done")
    try:
        run = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        outcome.measures = run(context)
    except NotHere as error:
        outcome.state, outcome.why = "not run", str(error)
    except PartFailed as error:
        outcome.state, outcome.why = "failed", str(error)
    except Exception as error:  # whatever it is, the other parts run all the same
        traceback.print_exc()
        outcome.state = "failed"
        outcome.why = f"{type(error).__name__}: {error}".splitlines()[0]
    write_json(path.with_suffix(".outcome.json"), dataclasses.asdict(outcome))
    return 0


def wait(process: subprocess.Popen[bytes], *, limit_s: float) -> str:
    """Wait for a part; empty, or why it was ended with all that it runs."""
    try:
        process.wait(timeout=limit_s)
        return ""
    except subprocess.TimeoutExpired:
        return f"it did not end within its {limit_s:,.3g} s"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(timeout=END_S)


def mark(measure: Measure) -> str:
    """``ok``, ``MISSED``, or nothing where nothing is expected."""
    return {True: "ok", False: "MISSED", None: ""}[measure.ok]


def show(outcome: Outcome) -> None:
    """Print the measures of one part in columns."""
    if outcome.state != "done":
        print(f"  {outcome.state}: {outcome.why}", flush=True)
    for measure in outcome.measures:
        bound = f"  ({measure.expected})" if measure.expected else ""
        print(f"  {measure.name:<58} {measure.shown():<24}{bound} {mark(measure)}".rstrip())
    print(f"  {outcome.seconds:.0f} s", flush=True)


def write(directory: Path, outcomes: list[Outcome], machine: list[str]) -> None:
    """``gpu-CHIP.md`` for people and ``gpu-CHIP.json`` for programs."""
    title = machine[0].split("; ")[1]
    lines = [f"# What `python -m benchmarks.gpu` measured: {title}", "", *machine, ""]
    for outcome in outcomes:
        lines += [f"## {outcome.title} (`{outcome.part}`)", ""]
        if outcome.state != "done":
            lines += [f"{outcome.state}: {outcome.why}", ""]
        if outcome.measures:
            lines += ["| what | measured | expected | |", "|---|---|---|---|"]
            lines += [
                f"| {m.name} | {m.shown()} | {m.expected} | {mark(m)} |" for m in outcome.measures
            ]
            lines.append("")
    chip = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    write_text(directory / f"gpu-{chip}.md", "\n".join(lines).rstrip() + "\n")
    values = {"machine": machine, "outcomes": [dataclasses.asdict(out) for out in outcomes]}
    write_json(directory / f"gpu-{chip}.json", values)


if __name__ == "__main__":
    sys.exit(main())
