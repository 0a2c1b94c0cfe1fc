"""Packed SFT of llmx against TRL's trainer, as well as it can be set."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from benchmarks.gpu import material
from benchmarks.gpu.part import Context, Measure, NotHere, PartFailed, failed
from benchmarks.gpu.runs import Run, train
from benchmarks.gpu.training import QUICK, llama_1_7b

TARGET = 1.3
"""Times the useful tokens/s of TRL at its best configuration."""


def peers(context: Context) -> Iterator[Measure]:
    """Useful tokens/s on the same rows and network, one GPU, bf16, run in turn."""
    for package in ("trl", "datasets"):
        if importlib.util.find_spec(package) is None:
            raise NotHere(f"{package} is not installed")
    steps = 4 if context.pretend else 24
    data = material.chats(context, rows=64 if context.pretend else 3000)
    # Row batches of the peer are larger: a packed sample holds about ten rows.
    words = ["data=file", f"data.path={data}", "task=sft", f"task.steps={steps}", *QUICK]
    words += [f"task.log_every_steps={max(1, steps // 6)}", "zero=stage1"]
    words += ["batch.micro_batch=4", "batch.global_batch=4"]
    ours = train(context, "peers-llmx", *llama_1_7b(context), *words)
    speed = ours.steady("tokens_per_s")
    yield Measure("llmx", speed, "useful tokens/s")
    best = (0.0, "")
    # Its speed depends on it: the best of three counts, what does not fit is left out.
    for micro_batch in (4,) if context.pretend else (4, 16, 32):
        try:
            result = _trl(context, ours, data=str(data), micro_batch=micro_batch, steps=steps)
        except PartFailed as error:
            yield failed(f"TRL, micro batch {micro_batch}", error)
            continue
        begin, end = result["points"][steps // 3], result["points"][-1]
        rate = (end[1] - begin[1]) / (end[0] - begin[0])
        how = f"micro batch {micro_batch}"
        how += ", FlashAttention" if result["flash"] else ""
        how += ", Liger" if result["liger"] else ""
        yield Measure(f"TRL, {how}", rate, "useful tokens/s")
        best = max(best, (rate, how))
    if best[0]:
        yield context.at_least(f"llmx over TRL ({best[1]})", speed / best[0], TARGET)


def _trl(context: Context, ours: Run, *, data: str, micro_batch: int, steps: int) -> dict[str, Any]:
    """What TRL's process has measured on the network of our run."""
    config = yaml.safe_load((ours.directory / "config.yaml").read_text())["model"]["config"]
    out = context.root / f"peer-{micro_batch}.json"
    job = {
        "tokenizer": str(material.tokenizer(context)),
        "model": {**config, "vocab_size": -(-material.vocab_size(context) // 64) * 64},
        "data": data,
        "seq_len": 128 if context.pretend else 4096,
        "micro_batch": micro_batch,
        "steps": steps,
        "out": str(out),
    }
    path = out.with_suffix(".job.json")
    path.write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.gpu.peer_trainer", str(path)]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode != 0 or not out.is_file():
        raise PartFailed(f"exit code {done.returncode}; its log has the cause")
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result
