"""The command: runs the parts one after another, prints a table, writes it as Markdown and JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from llmx import __version__
from llmx.bench.context import Context
from llmx.bench.measure import Measure, Outcome, mark, markdown
from llmx.bench.part import PARTS
from llmx.cli.flags import Parser
from llmx.errors import ConfigError, did_you_mean, exit_code
from llmx.run.rundir import write_json, write_text
from llmx.run.scratch import scratch_directory

END_S = 45.0
"""What a part that is told to end is given for ending its own ranks."""


def main(argv: list[str] | None = None) -> int:
    """Parse, run, report; 0 when nothing failed and every number is as expected."""
    parser = Parser(
        prog="python -m llmx bench",
        description="What this machine does: kernels, training runs, memory against the plan, "
        "against peers. Each part is a process of its own; one that fails never stops the next.",
        epilog="parts: " + ", ".join(PARTS),
    )
    parser.add_argument("--parts", metavar="A,B", help="only these (default: all)")
    parser.add_argument("--tiny", action="store_true", help="shrunken sizes: does it run at all?")
    parser.add_argument("--minutes", type=float, default=60, help="begin no part after so long")
    parser.add_argument("--out", type=Path, help="write gpu-CHIP.md and .json into this directory")
    parser.add_argument(
        "--work-dir", type=Path, help="for runs and data (default: a temporary one)"
    )
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    outcomes, machine = run_all(options, chosen(options.parts))
    failed = [outcome.part for outcome in outcomes if not outcome.ok]
    if options.out:
        write(options.out, outcomes, machine)
    done = sum(outcome.state == "done" for outcome in outcomes)
    print(f"\n{done} of {len(outcomes)} parts ran", end="")
    print(f"; not as expected: {', '.join(failed)}" if failed else "; all as expected")
    return 1 if failed else 0


def chosen(words: str | None) -> list[str]:
    """The parts that were asked for, in their order. Raises ConfigError for an unknown one."""
    wanted = [word.strip() for word in words.split(",") if word.strip()] if words else list(PARTS)
    for word in wanted:
        if word not in PARTS:
            raise ConfigError(
                f"--parts: there is no part {word!r}.{did_you_mean(word, PARTS)} "
                f"Parts: {', '.join(PARTS)}."
            )
    return [name for name in PARTS if name in wanted]


def run_all(options: argparse.Namespace, names: list[str]) -> tuple[list[Outcome], list[str]]:
    """Every part in turn; its measures are printed as they come."""
    with contextlib.ExitStack() as stack:
        root = options.work_dir
        if root is None:
            root = stack.enter_context(scratch_directory())
        root = root.absolute()
        (root / "logs").mkdir(parents=True, exist_ok=True)
        context = find_context(root, tiny=options.tiny)
        machine = describe(context)
        print("\n".join(machine), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
        outcomes: list[Outcome] = []
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
        return outcomes, machine


def find_context(root: Path, *, tiny: bool) -> Context:
    """The GPUs of this machine as the catalogue of devices knows them, else its CPU."""
    import yaml

    from llmx.config.groups import conf_dir
    from llmx.config.schema import DeviceConfig
    from llmx.hardware.detect import detect_gpus, match_device, visible_gpus

    gpus = visible_gpus(detect_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        if not tiny:
            raise ConfigError(
                "bench measures GPUs, and this process sees none (nvidia-smi, "
                "CUDA_VISIBLE_DEVICES). --tiny runs every part shrunken on the CPU."
            )
        device = DeviceConfig(accelerator="cpu", precisions=["fp32"])
        return Context(root, tiny, device, "cpu", 0)
    catalogue = (conf_dir() / "hardware" / "devices" / "catalogue.yaml").read_text(encoding="utf-8")
    known = {name: DeviceConfig(**values) for name, values in yaml.safe_load(catalogue).items()}
    name, device = match_device(gpus[0], known)
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
            [sys.executable, "-m", "llmx.bench.part", str(job)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        why = wait(process, limit_s=60 * minutes)
    seconds = time.monotonic() - began
    if not why and answer.is_file():
        read = json.loads(answer.read_text(encoding="utf-8"))
        read["measures"] = [Measure(**measure) for measure in read["measures"]]
        outcome = Outcome(**read)
        outcome.seconds = seconds
    else:
        why = why or f"ended with exit code {process.returncode}"
        outcome = Outcome(name, title, "failed", seconds, why)
    if outcome.state == "failed":
        tail = log.read_text(errors="replace").splitlines()[-15:]
        print("\n".join(f"    | {line}" for line in tail), flush=True)
    return outcome


def wait(process: subprocess.Popen[bytes], *, limit_s: float) -> str:
    """Wait for a part; empty, or why it was ended. Its runs end their ranks when asked to."""
    try:
        process.wait(timeout=limit_s)
        return ""
    except subprocess.TimeoutExpired:
        pass
    except KeyboardInterrupt:
        end(process)
        raise
    end(process)
    return f"it did not end within its {limit_s:,.3g} s"


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the part and what it runs, and SIGKILL to what does not end."""
    for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_s)
            return


def show(outcome: Outcome) -> None:
    """The measures of one part, in columns."""
    if outcome.state != "done":
        print(f"  {outcome.state}: {outcome.why}", flush=True)
    for measure in outcome.measures:
        wanted = f"  ({measure.expected})" if measure.expected else ""
        print(f"  {measure.name:<58} {measure.shown():<24}{wanted} {mark(measure)}".rstrip())
    print(f"  {outcome.seconds:.0f} s", flush=True)


def write(directory: Path, outcomes: list[Outcome], machine: list[str]) -> None:
    """``gpu-CHIP.md`` for people and ``gpu-CHIP.json`` for programs."""
    chip = re.sub(r"[^a-z0-9]+", "-", machine[0].split("; ")[1].lower()).strip("-")
    lines = [f"# What `python -m llmx bench` measured: {machine[0].split('; ')[1]}", ""]
    lines += markdown(outcomes, machine=machine)
    text = "\n".join(lines).rstrip() + "\n"
    write_text(directory / f"gpu-{chip}.md", text)
    values = {"machine": machine, "outcomes": [outcome.to_dict() for outcome in outcomes]}
    write_json(directory / f"gpu-{chip}.json", values)


if __name__ == "__main__":
    sys.exit(main())
