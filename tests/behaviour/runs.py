"""Carries out one case with ``python -m llmx`` and reads what it left.

What a case leaves are *facts*: name -> a JSON value. A list is a value per step, or per sample.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmx.run.rundir import RunDir
from tests.behaviour import samples
from tests.behaviour.cases import CASES, Case, Prepared, Run, training_words
from tests.command_runs import Finished, llmx

Facts = dict[str, Any]

START = ("total_steps", "tokens_per_step", "num_parameters", "num_samples", "world_size")
TRAIN = (
    "step", "loss", "loss_mean", "grad_norm", "lr", "loss_scale", "samples", "tokens",
    "target_tokens", "epoch", "aux_loss", "expert_load_max", "experts_idle",
)  # fmt: skip
EVAL = ("step", "loss", "target_tokens", "exact_match")
"""Values of the lines of ``metrics.jsonl`` that follow from the config alone."""


class Failed(Exception):
    """A command ended with another exit code than 0; the message has what it printed."""


class Workshop:
    """The directory in which cases run."""

    def __init__(self, root: Path, *, timeout_s: float = 1800.0) -> None:
        self.root = root
        self.timeout_s = timeout_s
        self._done: dict[str, Facts] = {}

    @property
    def material(self) -> Path:
        return self.root / "material"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def facts(self, name: str) -> Facts:
        """The facts of a case, which is carried out once, after the run that it needs."""
        if name not in self._done:
            case = CASES[name]
            if case.of is not None:
                self.facts(f"run/{case.of}")
            self._done[name] = self._carry_out(case)
        return self._done[name]

    def _carry_out(self, case: Case) -> Facts:
        if isinstance(case, Prepared):
            return samples.of_prepared(self._filled(case.words), self.root / "data" / case.name)
        directory = self.runs / case.name
        if case.command == "export":
            self._llmx("export", str(self._before(case)), *case.words, "--out", str(directory))
            return model_facts(directory)
        if case.command == "train":
            self._llmx(
                *self._filled(training_words(case)), f"data.cache_dir={self.root / 'cache'}",
                f"run_dir={directory}",
            )  # fmt: skip
        elif case.command == "resume":
            shutil.copytree(self._before(case), directory)
            self._llmx("resume", str(directory), *case.words)
        else:
            self._llmx("reproduce", str(self._before(case)), f"run_dir={directory}")
        facts = run_facts(directory)
        if case.same:
            other = self.facts(f"run/{case.of}")
            numbers = [name for name in other if not name.endswith("loss_mean")]
            facts[f"as_{case.of}"] = all(facts.get(name) == other[name] for name in numbers)
        return facts

    def _before(self, case: Run) -> Path:
        assert case.of is not None
        return self.runs / case.of

    def _filled(self, words: Iterable[str]) -> list[str]:
        """With the directories of this workshop in their places."""
        return [
            word.replace("{material}", str(self.material)).replace("{runs}", str(self.runs))
            for word in words
        ]

    def _llmx(self, *words: str) -> None:
        self.runs.mkdir(parents=True, exist_ok=True)
        done = llmx(self.root, *words, timeout_s=self.timeout_s)
        if done.returncode != 0:
            last = "\n".join(done.stdout.splitlines()[-40:])
            raise Failed(f"python -m llmx {' '.join(words)}: exit {done.returncode}\n{last}")


def run_facts(directory: Path) -> Facts:
    """Everything of a finished run that must not depend on time, place or machine load."""
    run = Finished(RunDir(directory), 0, "")
    facts: Facts = {}
    (start,) = run.lines("start")
    facts["start"] = {name: start[name] for name in START}
    facts |= _columns("train", run.lines("train"), TRAIN)
    facts |= _columns("eval", run.lines("eval"), EVAL)
    facts["weights_hash"] = run.lines("end")[-1]["weights_hash"]
    if run.dir.samples.is_file():
        rows = json.loads(run.dir.samples.read_text(encoding="utf-8"))["rows"]
        for name in ("prompt", "expected", "before", "after"):
            facts[f"generated.{name}"] = [row[name] for row in rows]
    facts |= samples.of_run(directory)
    facts |= model_facts(run.dir.final_model)
    return facts


def _columns(kind: str, lines: list[dict[str, Any]], names: tuple[str, ...]) -> Facts:
    """A list for each name that any of the lines has."""
    return {
        f"{kind}.{name}": [line.get(name) for line in lines]
        for name in names
        if any(line.get(name) is not None for line in lines)
    }


def model_facts(directory: Path) -> Facts:
    """An exported model: its files, its tensors, the values of its config."""
    tensors: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= tensor_hashes(path)
    whole = "\n".join(f"{name} {found}" for name, found in sorted(tensors.items()))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("transformers_version", None)  # recorded once, with the versions
    return {
        "model.weights": hashlib.sha256(whole.encode()).hexdigest(),
        "model.tensors": _short("\n".join(sorted(tensors))),
        "model.tensor_count": len(tensors),
        "model.config": config,
        "model.files": {
            path.name: "" if path.suffix == ".safetensors" else _short(path.read_bytes())
            for path in sorted(directory.iterdir())
            # The card names versions.
            if path.name not in ("config.json", "README.md")
        },
    }


def tensor_hashes(path: Path) -> dict[str, str]:
    """``name dtype shape`` -> sha256 of the bytes, for each tensor of a safetensors file, whatever
    their order in it."""
    content = memoryview(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8 : 8 + length]))
    values = content[8 + length :]
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            key = f"{name} {entry['dtype']} {entry['shape']}"
            found[key] = hashlib.sha256(values[start:stop]).hexdigest()
    return found


def _short(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:16]
