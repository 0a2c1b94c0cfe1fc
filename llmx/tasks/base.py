"""What a task is: its examples, its models, its loss, and what it measures (docs/adr/0008).

A task is one subclass in a file of its own. Nothing in the house names it: the loop, checkpoints,
the console and the report drive and show whatever it declares.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmx.config import Experiment
from llmx.config.build import dataclass_from
from llmx.config.tasks import TaskDefaults
from llmx.data.examples import IGNORE, Column, Example
from llmx.data.format.rows import Conversation, Preference, Prompted, UnpairedPreference
from llmx.data.source.records import Rejected
from llmx.data.split import DatasetSplit
from llmx.errors import ConfigError
from llmx.models.spec import ModelSpec
from llmx.run.metrics import Metric
from llmx.run.metrics.completions import DEFAULT_METRICS, METRICS, declare, load_metric, score

if TYPE_CHECKING:
    import numpy as np
    import torch

    from llmx.data import EvalPrompt, SampleStore
    from llmx.data.store.samples import Sample
    from llmx.models.model import Batch, Model, Models

Normaliser = Literal["tokens", "examples", "batch"]


@dataclass(frozen=True)
class Loss:
    """The loss of one micro batch. A step's gradient is that of ``sum`` over the step divided by
    ``weight`` over the step, whatever the split over ranks, micro batches and packing."""

    sum: torch.Tensor
    """fp32 scalar with a graph."""
    weight: float
    """Divisor of the sum, for this micro batch: its target tokens, its examples, ..."""
    metrics: Mapping[str, torch.Tensor | tuple[torch.Tensor | float, torch.Tensor | float]] = field(
        default_factory=dict
    )
    """Sums (scalars without a graph) that have ``weight``, or (sum, weight). The same names for
    every micro batch, also an empty one."""


@dataclass
class Mean:
    """Sum and weight of a number, added up over micro batches and ranks."""

    sum: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        self.sum += value
        self.weight += weight

    @property
    def value(self) -> float:
        """The mean; 0 where nothing was added."""
        return self.sum / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class Table:
    """Numbers that an evaluation leaves for the report: a confusion matrix, say."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    """The values of each row."""


class Accumulator:
    """Collects what is measured over held-out samples and is no mean: F1, an area, a matrix.

    Each rank fills its own; they are brought together in the order of the ranks. It is pickled, so
    it keeps numpy arrays and plain values.
    """

    def merge(self, other: Any) -> None:
        """Take in what another rank has gathered."""
        raise NotImplementedError(f"{type(self).__name__}.merge")

    def values(self) -> dict[str, float | None]:
        """Metrics by name; None for one that cannot be told from these samples. ``loss`` with
        ``weight`` (what it is a mean over) is the loss of the evaluation."""
        raise NotImplementedError(f"{type(self).__name__}.values")

    def tables(self) -> list[Table]:
        """Tables that the report shows beside the metrics."""
        return []


@dataclass
class Gathered(Accumulator):
    """Arrays of held-out samples that are measured together, as [samples, ...] each."""

    _parts: list[tuple[np.ndarray, ...]] = field(default_factory=list, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """The arrays alone, which another rank takes in."""
        return {"_parts": self._parts}

    def add(self, *arrays: np.ndarray) -> None:
        """Add those of a micro batch, always in the same order."""
        self._parts.append(arrays)

    def merge(self, other: Gathered) -> None:
        self._parts += other._parts

    def arrays(self) -> list[np.ndarray]:
        """Each of them as a whole; none where there is no sample."""
        import numpy as np

        return [np.concatenate(parts) for parts in zip(*self._parts, strict=True)]


Measures = Mapping[str, Mean | Accumulator]
"""What an evaluation has measured, by name."""
BOTH = ("train", "eval")
"""Kinds of a metric of training steps and of evaluations."""
NATS = "nats per target token"
"""The unit of cross entropy."""

EVALUATION = -1
"""The step of the keys of held-out samples."""


@dataclass(frozen=True)
class SampleKey:
    """Key of all that is random in a sample as it is trained: the same on every rank, for every
    split of the step, and after a resume."""

    seed: int
    """Seed of the run."""
    step: int
    """Step from 0; -1 for held-out samples, whose key is the same at every evaluation."""
    sample: int
    """Place among the samples of the step, over all ranks."""

    def uniform(self, count: int, stream: str = "") -> np.ndarray:
        """float64 [count] in [0, 1). ``stream``: another name gives independent numbers."""
        import numpy as np

        text = f"{self.seed}:step:{self.step}:sample:{self.sample}:{stream}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        # Raw draws of a counter-based generator: the same on every platform and NumPy version.
        draws = np.random.Philox(key=np.frombuffer(digest, np.uint64)).random_raw(count)
        values: np.ndarray = (np.asarray(draws, np.uint64) >> np.uint64(11)) * 2.0**-53
        return values


class Task:
    """Base of the tasks: what most of them keep.

    It is an ``llmx.data.Encoding``: what it makes of a row of the data is said by ``takes``,
    ``columns``, ``loss_on`` and ``encode``.
    """

    takes: ClassVar[tuple[type, ...]] = (Conversation,)
    """The rows that ``encode`` gets: of ``Conversation``, ``Document``, ``Preference``,
    ``UnpairedPreference``, ``Labelled`` and ``Record``; each row is the most particular that is
    named. Data of another kind is refused."""
    turn_weights: bool = False
    """Whether the "weight" of an assistant's turn in the data is that of its tokens; such a task
    has ``Column("weight", per="token")``, too. Without it, rows with such weights are rejected."""
    columns: tuple[Column, ...] = ()
    """Values of examples beside their tokens: ``Column("label", per="example", dtype="int64")``.
    ``Column("weight", per="token")`` gives targets a weight each."""

    verbatim: ClassVar[bool] = False
    """A document is what ``tokenizer(text)`` gives and a conversation what
    ``tokenizer.apply_chat_template(messages)`` gives, so that a head which looks at one token, or
    at all of them, is used as it was trained. Else a document ends with the EOS token, and a
    conversation with the end of its last learned turn."""

    splits_documents: ClassVar[bool] = False
    """Whether a document of more than ``data.seq_len`` tokens may become several sequences
    (``data.over_long=split``). Its example has no columns then."""

    asks_tokenizer: ClassVar[bool] = False
    """Whether the task may refuse a tokenizer: before a launch it is then made with the tokenizer,
    and ``load`` is called, in a process of its own, as it is where it runs code of the user's."""

    normaliser: Normaliser = "tokens"
    """Where the weight of a step is known from: the target tokens or the examples of the data's
    index, or ``weight`` of its micro batches (one reduction a step)."""

    loss_unit: ClassVar[str] = ""
    """The unit of the loss, for readers; empty where it has none."""

    defaults: ClassVar[TaskDefaults] = TaskDefaults()
    """Learning rates and batch where the config leaves them open."""
    Options: ClassVar[type | None] = None
    """A dataclass of what ``task.options`` may hold, with a default for each field."""

    @classmethod
    def learns_chats(cls) -> bool:
        """Whether all that it takes are conversations. The tokenizer is then exported with the chat
        template that renders them, and ``python -m llmx generate`` renders a prompt as a user's
        turn; else a prompt is plain text. Override it where ``Record`` is made a conversation."""
        return set(cls.takes) <= {Conversation, Preference, Prompted, UnpairedPreference}

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Task]:
        """The class for these ``task.options``: a subclass, where they make it an ``OnlineTask`` or
        a ``JointTask``."""
        return cls

    @classmethod
    def auto_options(cls, exp: Experiment) -> dict[str, Any]:
        """The values of options that are left ``auto``, chosen by the rest of the config."""
        return {}

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        self.exp = exp
        self.tokenizer = tokenizer
        self.options: Any = None
        """``task.options``, as an instance of ``Options``."""
        options = {**exp.task.options, **self.auto_options(exp)}
        if self.Options is not None:
            self.options = dataclass_from(self.Options, options, path="task.options")
        elif options:
            raise ConfigError(f"task.options={options}: this task has no options. Remove them.")

    def problems(self) -> Iterable[str]:
        """One message for each value of the config that this task cannot be trained with: said
        where the config is composed (of a task of your own, by the ranks)."""
        return []

    @property
    def name(self) -> str:
        """The value of ``task.kind``."""
        return self.exp.task.kind

    @property
    def loss_on(self) -> str:
        """Which tokens of a conversation are targets: ``data.loss_on``."""
        return self.exp.data.loss_on

    @cached_property
    def num_embeddings(self) -> int | None:
        """Rows of the embedding of the model, where its tokenizer has tokens beyond them: data
        with such a token is refused. None: each token has a row."""
        from llmx.models.factory import num_embeddings

        return num_embeddings(self.exp.model, self.tokenizer)

    @property
    def pad_id(self) -> int:
        """The token that fills the lines of a batch. Any does that has a row, since padding is
        known by its position."""
        pad_id: int = self.tokenizer.pad_token_id or 0
        return pad_id if self.num_embeddings is None or pad_id < self.num_embeddings else 0

    def encode(self, row: Any) -> Example | None:
        """The example of a row: its sequences, and the columns by sequence and by example.

        None leaves the row out (counted); ``Rejected(reason)`` says that it is wrong. Must be a
        function of the row and the options alone: what it gives is stored, and found again.
        """
        return Example.of(row)

    def encoding_identity(self) -> dict[str, Any]:
        """Values that decide the examples besides the data and its options: others are another
        store. By default the file of the task, and its options."""
        file = sys.modules[type(self).__module__].__file__
        source = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
        return {"kind": self.name, "source": source, "options": dict(self.exp.task.options)}

    @property
    def precomputed(self) -> tuple[Column, ...]:
        """Columns that ``precompute`` gives: computed once, before training, by models with
        ``precomputes=True``, and stored beside the examples. Batches have them as they have
        ``columns``. Of a column by token the values of target tokens are stored."""
        return ()

    def precompute(self, models: Models, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The ``precomputed`` columns of a batch by name: [sequences, ...], [examples, ...], or by
        token [targets, ...] in the order of the batch's labels, as models give them. Called as
        ``loss``, but without gradients and dropout; a batch without a sequence gives empty
        tensors."""
        raise NotImplementedError(f"{type(self).__name__}.precompute")

    def precompute_identity(self) -> dict[str, Any]:
        """Values that decide the precomputed columns besides the examples, the model and the
        precision: others are computed anew. By default the file of the task, and its options."""
        return Task.encoding_identity(self)

    def check_source(self, split: DatasetSplit) -> None:
        """Raise ConfigError for data, or options of it, that this task cannot be trained on."""

    def load(self) -> None:
        """Import the functions that the config names, before data are read.

        Raises ConfigError for what cannot be used.
        """
        for name in self.exp.task.eval_metrics:
            if name not in METRICS:
                load_metric(name)

    def see_data(self, train: SampleStore, evaluation: SampleStore | None) -> list[str]:
        """Called once on every rank, when the data is prepared and before the models are built:
        what follows from it, such as the labels that occur. Returns lines for the log.

        Raises ConfigError or DataError for data that does not go together.
        """
        return []

    def see_model(self, config: Any, evaluation: SampleStore) -> list[str]:
        """Replaces ``see_data`` where a trained model is measured by itself (``python -m
        llmx eval``): what its Hugging Face config says, such as its labels. Returns lines."""
        return []

    def transform(self, sample: Sample, key: SampleKey) -> Sample:
        """A stored sample as it is trained: anew at each step, in the thread that reads ahead. What
        is random in it is a function of ``key``. Sequences keep their places and lengths; where
        targets change (``Sample.labels``), ``normaliser`` is ``batch``."""
        return sample

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Name -> what is measured besides the loss; every value that is written is declared. Of a
        task that ``completes`` prompts, by default what ``score`` measures."""
        task = self.exp.task
        is_scored = self.completes and task.eval_generate
        return declare(task.eval_metrics or DEFAULT_METRICS) if is_scored else {}

    @property
    def evaluates_loss(self) -> bool:
        """Whether evaluations measure a loss."""
        return True

    @property
    def judged_by(self) -> str:
        """The metric that ``checkpoint.metric=auto`` stands for: ``eval/NAME``, or ``train/NAME``
        where no evaluation measures it."""
        is_evaluated = self.exp.task.evaluate and self.exp.data.has_eval and self.evaluates_loss
        return "eval/loss" if is_evaluated else "train/loss"

    def models(self) -> dict[str, ModelSpec]:
        """The models it needs, by name; the first trained one is exported. All are of the
        ``model`` group. By default one causal language model, which is trained. Those with
        ``precomputes=True`` are given to ``precompute`` alone."""
        return {"policy": ModelSpec()}

    draws: bool = False
    """Whether the loss draws random numbers for each sequence: training batches then have
    ``draw_seeds``, int64 [sequences], a function of the seed, the step and the sample alone.
    (What the network itself draws, dropout, follows from the seed, the step and the rank.)"""

    updates: int = 1
    """Optimizer updates with the samples of a step. Steps begin and end (in
    checkpoints, the schedule, the metrics) with their samples."""

    def loss(self, models: Models, batch: Batch) -> Loss:
        """The loss of a micro batch. Called on every rank equally often, also for micro batches
        without a sequence, which have sum 0 and weight 0 and still run the same forwards."""
        raise NotImplementedError(f"{type(self).__name__}.loss")

    def weight(self, batch: Batch) -> float:
        """For ``normaliser = "batch"``: what a micro batch weighs, known before any forward."""
        raise NotImplementedError(f"{type(self).__name__}.weight")

    def evaluate(self, models: Models, batches: Iterable[Batch]) -> Measures:
        """Measures of the held-out samples of this rank, by name; by default ``loss`` and its
        metrics. Brought together over ranks afterwards; an ``Accumulator`` has names of its own.
        Gradients are off, as dropout is."""
        means = {"loss": Mean()}
        for batch in batches:
            add_loss(means, self.loss(models, batch))
        return means

    completes: ClassVar[bool] = False
    """Whether prompts are completed before and after training."""

    def eval_prompts(self) -> list[EvalPrompt]:
        """Prompts to complete before and after training: those of the first ``task.eval_generate``
        held-out conversations; none of a task that does not complete."""
        return self._held_out_prompts if self.completes else []

    @cached_property
    def _held_out_prompts(self) -> list[EvalPrompt]:
        from llmx.data import held_out_prompts

        return held_out_prompts(
            self.exp.data,
            self.exp.seed,
            self.tokenizer,
            limit=self.exp.task.eval_generate,
            decode=self.decode,
            takes=self.takes,
            turn_weights=self.turn_weights,
            num_embeddings=self.num_embeddings,
        )

    def score(self, prompts: Sequence[EvalPrompt], completions: Sequence[str]) -> dict[str, float]:
        """Metrics of the ``completions`` of ``prompts``, by name: by default those of
        ``task.eval_metrics``; none without prompts.

        Raises:
            ConfigError: a function of the user's own fails, or gives no number.
        """
        if not (prompts and self.completes):
            return {}
        expected = [prompt.expected for prompt in prompts]
        scores: dict[str, float] = {}
        for name in self.exp.task.eval_metrics or DEFAULT_METRICS:
            (metric,) = declare([name])
            values = score([name], completions, expected)
            if values.keys() != {metric}:
                raise ConfigError(
                    f"task.eval_metrics: {name} returned several numbers "
                    f"({', '.join(sorted(values))}). During training each metric is one number: "
                    "list one function for each."
                )
            scores.update(values)
        return scores

    def export_files(self, model: Model) -> Mapping[str, str]:
        """Text files that lie beside the exported ``model``, by their relative path: what others
        need to use it. They are in checkpoints, and so in every export of one."""
        return {}

    def decode(self, tokens: list[int]) -> str:
        """The completion for a reader."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def add_loss(means: dict[str, Mean], loss: Loss) -> None:
    """Add the loss of a micro batch and what it measures."""
    means["loss"].add(float(loss.sum), loss.weight)
    for name, value in loss.metrics.items():
        total, weight = value if isinstance(value, tuple) else (value, loss.weight)
        means.setdefault(name, Mean()).add(float(total), float(weight))


def unused_dropout(exp: Experiment) -> str:
    """The settings that ask for dropout, for a task that trains without; empty if none does."""
    rates = {"adapter.dropout": exp.adapter.dropout if exp.adapter.kind != "none" else 0.0}
    rates |= {
        f"model.config.{key}": rate for key, rate in exp.model.config.items() if "drop" in key
    }
    return ", ".join(f"{key}={rate}" for key, rate in rates.items() if rate)


def finite(value: Any, otherwise: Rejected) -> float:
    """``value`` as a number. Raises ``otherwise`` where it is none, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise otherwise
    return number


def next_token_loss(model: Model, batch: Batch, **terms: Any) -> Loss:
    """Cross entropy of the target tokens, each times its weight where the batch has weights.
    ``terms``: as of ``Model.cross_entropy``."""
    weights = batch.get("weights")
    targets = batch["labels"] != IGNORE
    weight = float(targets.sum()) if weights is None else float(weights[targets].double().sum())
    return Loss(model.cross_entropy(batch, **terms), weight)


def held_out(task: Task, store: SampleStore, numbers: Iterable[int]) -> list[Sample]:
    """Held-out samples as they are evaluated: the same at every evaluation of every run, so that
    losses can be compared."""
    return [task.transform(store[number], SampleKey(0, EVALUATION, number)) for number in numbers]
