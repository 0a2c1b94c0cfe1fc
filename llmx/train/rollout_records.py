"""The samples of every step that is generated, on disk before they are trained on.

    RUN_DIR/rollouts/step-00000012.safetensors    all samples of step 12, over all ranks

A restart or a resume trains the recorded samples of the steps after its checkpoint instead of
drawing them again. The header of a file has the places of its prompts in the data, the settings
that its weights come from (``course``), and the hash of the record before it: after a record that
is damaged, or of another course, no later one is used. Tried by
``python -m pytest tests/unit/test_train_rollout_records.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from llmx.collectives import from_first
from llmx.config import Experiment, to_dict
from llmx.data.examples import Column, Schema
from llmx.data.store.samples import Sample
from llmx.plan.types import Plan
from llmx.run.provenance.differences import changed_values, short_value
from llmx.run.rundir import RunDir, replacing
from llmx.tasks import GeneratedSample

FORMAT = 1
ENTRY = "rollout"
"""The one entry of the metadata of a file: the hash of header and tensors, and the header, as JSON.
(Of several entries the library would choose the order anew each time.)"""


@dataclass(frozen=True)
class Rollout:
    """What a task has generated for a step."""

    by_prompt: list[list[Sample]]
    generated: Sequence[GeneratedSample] = ()
    """A few of them for a reader."""


def course_of(exp: Experiment, plan: Plan, *, steps: int, identity: Mapping[str, Any]) -> Any:
    """The settings that decide the weights and the samples of each step, as JSON has them.

    Args:
        steps: of the whole run; its schedule ends there.
        identity: as a checkpoint has it (``llmx.train.resume.identity``).
    """
    values = to_dict(exp)
    course = {
        "task": {"kind": exp.task.kind, "options": values["task"]["options"], "steps": steps},
        "precision": plan.precision,
        **{group: values[group] for group in ("optim", "adapter")},
        **identity,
    }
    return json.loads(json.dumps(course))


class RolloutRecords:
    """The records of a run. Rank 0 reads and writes them; all ranks get what it has read."""

    def __init__(
        self,
        run_dir: RunDir,
        course: Any,
        *,
        rank: int,
        start: int,
        keep: int | None = None,
        group: Any = None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``start``: the number of steps that the weights have been trained. ``keep``: records
        of so many steps; None: of all."""
        self._run_dir, self._course, self._keep = run_dir, course, keep
        self._rank, self._group, self._log = rank, group, log
        self._replays = True
        """Until the first step that has no usable record."""
        self._replayed = False
        self._previous: str | None = "" if start == 0 else None
        """The hash of the record of the step before; None: not known."""
        if rank == 0 and start:
            earlier = [
                path for number, path in run_dir.recorded_rollouts().items() if number <= start
            ]
            self._previous = _digest_of(earlier[-1]) if earlier else None

    def read(self, step: int, prompts: Iterable[int], columns: Sequence[Column]) -> Rollout | None:
        """The recorded samples of a step (from 0), or None where they are to be drawn. Collective.

        Args:
            prompts: the places of its prompts in the data.
            columns: what the task's samples have beside their tokens.
        """
        if not self._replays:
            return None
        content: bytes | None = None
        if self._rank == 0:
            content = self._usable(step, prompts, columns)
        content = from_first(content, group=self._group)
        if content is None:
            self._replays = False
            return None
        header, arrays, self._previous = parsed(content)
        if not self._replayed:
            self._replayed = True
            self._log(f"step {step + 1}: its samples are replayed from {self._run_dir.rollouts}")
        examples = [GeneratedSample(**row) for row in header["generated"]]
        return Rollout(list(unpacked(arrays, columns)), examples)

    def write(
        self, step: int, prompts: Iterable[int], columns: Sequence[Column], rollout: Rollout
    ) -> None:
        """Put the samples of a step on the disk, by rank 0. OSError: the disk is full or broken."""
        if self._rank or self._keep == 0:
            return
        header = {
            **self._expected(step, prompts, columns),
            "previous": self._previous,
            "generated": [asdict(sample) for sample in rollout.generated],
        }
        content, self._previous = rendered(header, packed(rollout.by_prompt, columns))
        self._run_dir.rollouts.mkdir(exist_ok=True)
        with replacing(self._run_dir.rollout(step + 1)) as stream:
            stream.write(content)
        for number, path in self._run_dir.recorded_rollouts().items():
            if self._keep is not None and number <= step + 1 - self._keep:
                path.unlink(missing_ok=True)

    def _usable(self, step: int, prompts: Iterable[int], columns: Sequence[Column]) -> bytes | None:
        """The file of a step. None where it cannot be used: it and those of later steps, which
        come from the weights that it led to, are then removed."""
        path, problem = self._run_dir.rollout(step + 1), ""
        try:
            content = path.read_bytes()
            header, _, _ = parsed(content)
        except FileNotFoundError:
            pass
        except (OSError, Damaged) as error:
            problem = f"is damaged ({error})"
        else:
            problem = self._foreign(header, self._expected(step, prompts, columns))
            if not problem:
                return content
        if problem:
            self._log(
                f"WARNING: the record {path} {problem}. The samples of step {step + 1} and of "
                "later steps are drawn anew."
            )
        for number, later in self._run_dir.recorded_rollouts().items():
            if number > step:
                later.unlink(missing_ok=True)
        return None

    def _foreign(self, header: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
        """Why a record is not of this step of this run; empty where it is."""
        if header.get("columns") != expected["columns"]:
            return "has other columns than the samples of the task"
        previous = header.get("previous")
        if None not in (previous, self._previous) and previous != self._previous:
            return "follows other samples of the step before than those that were trained on"
        for key, (then, now) in changed_values(header, expected).items():
            if None not in (then, now):  # a setting of another version of llmx
                name = key.removeprefix("course.")
                return f"has {name}={short_value(then)}, this run has {short_value(now)}"
        return ""

    def _expected(
        self, step: int, prompts: Iterable[int], columns: Sequence[Column]
    ) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": step + 1,
            "prompts": [int(at) for at in prompts],
            "columns": {column.name: column.to_dict() for column in columns},
            "course": self._course,
        }


class Damaged(ValueError):
    """A file that is no record, or was changed."""


def rendered(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[bytes, str]:
    """The content of a file, and its hash."""
    digest = _digest(header, arrays)
    entry = json.dumps({"blake2b": digest, "header": header})
    return save(dict(arrays), metadata={ENTRY: entry}), digest


def parsed(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """The header, the arrays and the hash of a file; Damaged where the hash is another."""
    try:
        entry = _entry(content)
        header, digest = entry["header"], entry["blake2b"]
        arrays = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
    if _digest(header, arrays) != digest:
        raise Damaged("its content does not have the recorded hash")
    return header, arrays, digest


def _entry(content: bytes) -> dict[str, Any]:
    size = int.from_bytes(content[:8], "little")
    entry: dict[str, Any] = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][ENTRY])
    return entry


def _digest_of(path: Path) -> str | None:
    """The hash that a file names; None where it is damaged."""
    try:
        return str(_entry(path.read_bytes())["blake2b"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    text = json.dumps(header, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(arrays):
        values = arrays[name]
        digest.update(f"{name}:{values.dtype}:{values.shape};".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def packed(
    by_prompt: Sequence[Sequence[Sample]], columns: Sequence[Column]
) -> dict[str, np.ndarray]:
    """The samples as arrays: sizes by prompt, sample and sequence, and all values one after
    another."""
    samples = list(chain.from_iterable(by_prompt))
    lengths = [stop - start for sample in samples for start, stop in sample.bounds()]
    arrays = {
        "samples": np.array([len(of_prompt) for of_prompt in by_prompt], np.int64),
        "sequences": np.array([len(sample.sequence_starts) for sample in samples], np.int64),
        "lengths": np.array(lengths, np.int64),
        "tokens": _joined([sample.tokens for sample in samples], np.uint32),
        "targets": _joined([sample.targets for sample in samples], np.bool_),
    }
    schema = Schema(tuple(columns))
    if schema.weighted:
        weights = [sample.weights for sample in samples if sample.weights is not None]
        arrays["weights"] = _joined(weights, np.float32)
    for column in (*schema.per("token"), *schema.per("sequence"), *schema.per("example")):
        values = [sample.columns[column.name] for sample in samples]
        arrays[f"column.{column.name}"] = _joined(values, column.numpy_dtype, column.shape)
    return arrays


def _joined(parts: Sequence[np.ndarray], dtype: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
    return np.concatenate([np.zeros((0, *shape), dtype), *parts]).astype(dtype, copy=False)


def unpacked(arrays: Mapping[str, np.ndarray], columns: Sequence[Column]) -> Iterator[list[Sample]]:
    """The samples of each prompt, of what ``packed`` gives."""
    per = {f"column.{column.name}": column.per for column in columns}
    token = sequence = number = 0
    for count in arrays["samples"].tolist():
        of_prompt = []
        for _ in range(count):
            sequences = int(arrays["sequences"][number])
            lengths = arrays["lengths"][sequence : sequence + sequences]
            spans = {
                "token": slice(token, token + int(lengths.sum())),
                "sequence": slice(sequence, sequence + sequences),
                "example": slice(number, number + 1),
            }
            tokens = spans["token"]
            weights = arrays.get("weights")
            of_prompt.append(
                Sample(
                    tokens=arrays["tokens"][tokens],
                    targets=arrays["targets"][tokens],
                    sequence_starts=np.cumsum([0, *lengths[:-1]]).astype(np.int64),
                    weights=None if weights is None else weights[tokens],
                    example_starts=np.zeros(1, np.int64) if sequences > 1 else None,
                    columns={
                        name.removeprefix("column."): arrays[name][spans[kind]]
                        for name, kind in per.items()
                        if name in arrays
                    },
                )
            )
            token, sequence, number = tokens.stop, sequence + sequences, number + 1
        yield of_prompt
