"""Predicted against real RAM of a host: ``python benchmarks/ram_validation.py``.

Each configuration is planned, and then run with two CPU ranks on this machine. Ten times a second
the proportional set size (PSS) of all processes of the run is read: what they share counts once,
and mapped files (libraries, data) with the pages that are there. The highest sum stands beside
``RAM at most`` of the plan. Memory is counted, so a busy machine disturbs it little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

EVERY_S = 0.1
KINDS = ("Pss_Anon", "Pss_File", "Pss_Shmem")
BASE = [
    "hardware=cpu2", "hardware.devices.cpu.memory_gib=16", "task.steps=4", "task.eval_generate=0",
    "checkpoint.every_steps=2", "checkpoint.background=never",
    "batch.global_batch=8", "batch.micro_batch=4",
]  # fmt: skip
SIZES = {256: 704, 768: 2048, 1024: 2816}


def width(hidden: int, layers: int = 8) -> list[str]:
    """A Llama of this width."""
    return [
        f"model.config.hidden_size={hidden}", f"model.config.intermediate_size={SIZES[hidden]}",
        f"model.config.num_hidden_layers={layers}",
    ]  # fmt: skip


GRID = {
    "demo's model": ["zero=stage2"],
    "768, stage 0": ["zero=stage0", *width(768)],
    "768, stage 2": ["zero=stage2", *width(768)],
    "768, stage 3": ["zero=stage3", *width(768)],
    "768, stage 2, rows of 1024": ["zero=stage2", "data.seq_len=1024", *width(768)],
    "768, stage 2, offload": ["zero=stage2_offload", *width(768)],
    "768, stage 3, all offloaded": ["zero=stage3_offload", *width(768)],
    "768, stage 2, saves behind": ["zero=stage2", "checkpoint.background=always", *width(768)],
    "768, stage 2, checkpointing": [
        "zero=stage2", "model.activation_checkpointing=full", *width(768),
    ],
    "1024, 12 layers, stage 3": ["zero=stage3", *width(1024, 12)],
}  # fmt: skip


def pss(root: psutil.Process) -> dict[str, int]:
    """Bytes of a process and all below it, by kind; and how much of it is no rank's."""
    found = dict.fromkeys((*KINDS, "other"), 0)
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
                sizes = {
                    kind: int(match.group(1)) * 1024
                    for kind in KINDS
                    if (match := re.search(rf"^{kind}: +(\d+) kB", text, re.MULTILINE))
                }
                for kind, size in sizes.items():
                    found[kind] += size
                if "llmx.worker" not in " ".join(process.cmdline()):
                    found["other"] += sum(sizes.values())
    return found


def total(sample: dict[str, Any]) -> int:
    return sum(sample[kind] for kind in KINDS)


def watched(words: list[str], log: Path) -> list[dict[str, Any]]:
    """Samples of a whole run."""
    samples, began = [], time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmx", *words], stdout=stream, stderr=subprocess.STDOUT
        )
        root = psutil.Process(process.pid)
        while process.poll() is None:
            samples.append({"s": round(time.monotonic() - began, 1), **pss(root)})
            time.sleep(EVERY_S)  # the period of the measurement
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{log.read_text()[-3000:]}")
    return samples


def one(name: str, words: list[str], root: Path, number: int) -> dict[str, Any]:
    planned, run, log = (root / f"{kind}-{number}" for kind in ("plan", "run", "log"))
    typed = [*BASE, *words]
    with log.open("w", encoding="utf-8") as stream:
        command = [sys.executable, "-m", "llmx", "plan", *typed, f"run_dir={planned}"]
        subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=True)
    (host,) = json.loads((planned / "plan.json").read_text())["storage"]["hosts"]
    samples = watched([*typed, f"run_dir={run}"], log)
    return {"name": name, "host": host, "most": max(samples, key=total), "samples": samples}


def predicted(host: dict[str, Any]) -> int:
    """``HostStorage.ram_bytes``."""
    from llmx.plan.types import HostStorage

    found = HostStorage(**{**host, "hosts": tuple(host["hosts"])}).ram_bytes
    assert found is not None
    return found


def write_table(found: list[dict[str, Any]]) -> None:
    from machine import write_result

    rows, errors = [], []
    for each in found:
        real, mine = total(each["most"]), predicted(each["host"])
        errors.append(mine / real - 1)
        rows.append(
            f"| {each['name']} | {real / 2**20:,.0f} | {mine / 2**20:,.0f} | {errors[-1]:+.0%} | "
            + " | ".join(f"{each['most'][kind] / 2**20:,.0f}" for kind in (*KINDS, "other"))
            + " |"
        )
    lines = [
        "| | real | predicted | error | anonymous | files | shared | no rank's |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"MiB at the highest moment, both ranks and the process that starts them. Error: "
        f"{min(errors):+.0%} to {max(errors):+.0%}, median {statistics.median(errors):+.0%}.",
    ]
    write_result("ram_validation", "Predicted against real RAM of a host", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON lines")
    parser.add_argument("--table", type=Path, help="only write the results of such JSON lines")
    options = parser.parse_args()
    if options.table:
        write_table([json.loads(line) for line in options.table.read_text().splitlines()])
        return
    with tempfile.TemporaryDirectory(prefix="llmx-ram-") as name:
        os.environ.update(LLMX_CACHE=f"{name}/cache", LLMX_LEARNED="off")
        for number, (title, words) in enumerate(GRID.items()):
            if options.only not in title:
                continue
            found = one(title, words, Path(name), number)
            real, mine = total(found["most"]), predicted(found["host"])
            parts = {kind: found["most"][kind] // 2**20 for kind in (*KINDS, "other")}
            print(
                f"{title:32} {real / 2**20:8.0f} MiB {mine / 2**20:8.0f} {mine / real - 1:+7.1%} "
                f"at {found['most']['s']} of {found['samples'][-1]['s']} s {parts}",
                flush=True,
            )
            if options.out:
                with options.out.open("a") as stream:
                    stream.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
