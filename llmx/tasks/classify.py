"""``task=classify``: the label of a text: one of several, any number of them, or a number.

    python -m llmx task=classify data=labelled data.path=train.tsv data.eval_path=dev.tsv \\
        data.data_map.prompt=text_a

Labels are found in the training data; ``data.label_names`` renames them, and gives their order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmx.config import Experiment
from llmx.config.fields import choice, number
from llmx.data import Column, Document, Example, Labelled, Rejected, SampleStore
from llmx.errors import ConfigError, DataError
from llmx.models.spec import CLASSIFICATION, ModelSpec
from llmx.run.metrics import Metric
from llmx.tasks.base import BOTH, Gathered, Loss, Mean, Measures, Task, add_loss, finite
from llmx.tasks.class_metrics import Classes, Labels, Numbers
from llmx.text import plural

if TYPE_CHECKING:
    import torch

    from llmx.models.model import Batch, Models

SINGLE, MULTI, REGRESSION = "single_label", "multi_label", "regression"
PROBLEMS = {
    SINGLE: "single_label_classification",
    MULTI: "multi_label_classification",
    REGRESSION: "regression",
}
"""Ours -> ``problem_type`` of transformers."""
LABEL_BYTES = {SINGLE: 64, MULTI: 512}
"""Room for the label of an example: its name, or the JSON list of its names, in UTF-8."""
CLASSES_NAMED = 20
"""The most classes that a line of the log names."""


@dataclass
class Options:
    """``task.options`` of ``task=classify``."""

    problem: str = choice(SINGLE, MULTI, REGRESSION)
    """``single_label``: one of several classes; ``multi_label``: any number of labels, as a list or
    a text with ``separator``; ``regression``: a number."""
    separator: str = ","
    """Between the labels of a text (``multi_label``)."""
    loss: str = choice("cross_entropy", "focal")
    """``focal`` counts examples that are already right less (Lin et al. 2017)."""
    gamma: float = number(2.0, minimum=0, maximum=100)
    """Exponent of ``focal``: how much less right examples count."""
    label_smoothing: float = number(0.0, minimum=0, below=1)
    """Part of the target that is shared out over all classes (``single_label``)."""
    balance: str = choice("none", "inverse", "class_balanced")
    """Weights of classes by how many examples they have: ``inverse`` to their number, or
    ``class_balanced`` by their effective number (Cui et al. 2019). Their mean over the training
    data is 1."""
    beta: float = number(0.999, minimum=0, below=1)
    """Parameter of ``class_balanced``: the nearer to 1, the nearer to ``inverse``."""
    class_weights: dict[str, float] = field(default_factory=dict)
    """Weights by the name of a label, taken as they are; those that are not named have 1."""
    threshold: float = number(0.5, above=0, below=1)
    """Least probability with which a label counts as predicted (``multi_label``)."""
    cut: str = choice("end", "start")
    """The side on which a text over ``data.seq_len`` is cut."""


class Classify(Task):
    """A classification head over a causal backbone, or over an encoder such as BERT."""

    takes: ClassVar[tuple[type, ...]] = (Labelled,)
    verbatim = True
    normaliser = "examples"
    Options = Options

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        super().__init__(exp, tokenizer)
        self.problem: str = self.options.problem
        self.columns = (
            Column("label", per="example")
            if self.problem == REGRESSION
            else Column("label", per="example", dtype="uint8", shape=(LABEL_BYTES[self.problem],)),
        )
        self._set_labels((), [])

    def problems(self) -> Iterator[str]:
        balance, by_name = self.options.balance, self.options.class_weights
        weighs = balance != "none" or by_name
        if self.problem == REGRESSION and (weighs or self.options.loss != "cross_entropy"):
            yield (
                "task.options.problem=regression has no classes: remove balance, class_weights and "
                "loss from task.options."
            )
        if balance != "none" and by_name:
            yield (
                f"task.options: balance={balance} and class_weights both weight the classes. Set "
                "only one of them."
            )
        if negative := {name: weight for name, weight in by_name.items() if not weight >= 0}:
            yield f"task.options.class_weights={negative}: weights must be 0 or more."
        if self.options.label_smoothing and self.problem != SINGLE:
            yield (
                f"task.options.label_smoothing applies to problem=single_label, not {self.problem}."
            )

    # Data

    def encoding_identity(self) -> dict[str, Any]:
        """The options that decide the examples; weights of classes do not."""
        options = self.options
        also = {"separator": options.separator} if self.problem == MULTI else {}
        return {
            "kind": "classify",
            "version": 1,
            "problem": self.problem,
            "cut": options.cut,
            **also,
        }

    def encode(self, row: Labelled) -> Example:
        """The text, with the label as it is named: which labels there are is known at the end."""
        text = "\n".join([*(turn.content for turn in row.history), row.text])
        if not text.strip():
            raise Rejected("an empty text", "the row has no text.")
        return Example.of(Document(text, row.where), cut=self.options.cut, label=self._label(row))

    def _label(self, row: Labelled) -> Any:
        if self.problem == REGRESSION:
            problem = (
                f"the label is {str(row.label)[:60]!r}; task.options.problem=regression needs a "
                "finite number."
            )
            return finite(row.label, Rejected("a label that is not a number", problem))
        if self.problem == SINGLE:
            if isinstance(row.label, list | dict):
                raise Rejected(
                    "several labels",
                    f"the label is {str(row.label)[:60]}; several labels need "
                    "task.options.problem=multi_label.",
                )
            text = _name(row.label) if isinstance(row.label, bool) else row.name.strip()
            if not text:
                raise Rejected("a missing label", "the label is empty.")
        else:
            text = json.dumps(self._several(row.label), ensure_ascii=False)
        return _as_bytes(text, LABEL_BYTES[self.problem])

    def _several(self, label: Any) -> list[str]:
        label_names = self.exp.data.label_names
        if isinstance(label, str):
            label = label.split(self.options.separator)
        parts = label if isinstance(label, list) else [label]
        if not all(isinstance(part, str | int | bool) for part in parts):
            raise Rejected(
                "labels that are not names",
                f"the labels are {str(label)[:60]}; each label must be a name.",
            )
        names = [_name(part) for part in parts]
        if label_names and (
            missing := [name for name in names if name and name not in label_names]
        ):
            raise Rejected(
                "a label without a name",
                f"the label {missing[0]!r} has no name; data.label_names names "
                f"{', '.join(label_names)}.",
            )
        return sorted({label_names.get(name, name) for name in names if name})

    def see_data(self, train: SampleStore, evaluation: SampleStore | None) -> list[str]:
        """Labels are those of the training data, in the order of ``data.label_names``, then of
        their numbers or letters."""
        if self.problem == REGRESSION:
            values = np.asarray(train.values_of("label"), np.float64)
            return [f"Labels: numbers from {values.min():g} to {values.max():g}, mean "
                    f"{values.mean():.4g}"]  # fmt: skip
        counts = self._counts(train)
        renamed = dict.fromkeys(name.strip() for name in self.exp.data.label_names.values())
        names = (*renamed, *sorted(counts.keys() - renamed.keys(), key=_order))
        if self.problem == SINGLE and len(names) < 2:
            raise DataError(
                f"{self.exp.data.path}: every row has the label {names[0]!r}, so there is nothing "
                "to learn. Check data.data_map.label."
            )
        if not names:
            raise DataError(
                f"{self.exp.data.path}: no row has a label. Check data.data_map.label and "
                "task.options.separator."
            )
        weights = self._class_weights(names, counts)
        self._set_labels(names, weights)
        sizes = [f"{name} ({counts[name]:,})" for name in names]
        lines = [f"Labels: {_listed(sizes)}"]
        if absent := [name for name in names if not counts[name]]:
            lines.append(f"WARNING: no row of the training data has the label {_quoted(absent)}.")
        if any(weight != 1 for weight in weights):
            by_name = ", ".join(f"{n} {w:.4g}" for n, w in zip(names, weights, strict=True))
            lines.append(f"Class weights: {by_name[:400]}")
        return lines + (self._check_evaluation(evaluation) if evaluation is not None else [])

    def see_model(self, config: Any, evaluation: SampleStore) -> list[str]:
        """Labels are those of the model; classes weigh alike, since their sizes are not known."""
        if self.problem == REGRESSION:
            return []
        names = tuple(str(config.id2label[number]) for number in sorted(config.id2label))
        if all(name == f"LABEL_{number}" for number, name in enumerate(names)):
            return self.see_data(evaluation, None)  # it names none: those of the data, in order
        self._set_labels(names, [1.0] * len(names))
        return self._check_evaluation(evaluation)

    def _set_labels(self, names: tuple[str, ...], weights: list[float]) -> None:
        self.labels = names
        """Names of the classes, in the order of the head's outputs."""
        self._index = {name: number for number, name in enumerate(names)}
        self._weights = weights

    def _check_evaluation(self, store: SampleStore) -> list[str]:
        counts = self._counts(store)
        unknown = {name: count for name, count in counts.items() if name not in self._index}
        lines = []
        if unknown:
            problem = (
                f"The evaluation data has {plural(sum(unknown.values()), 'row')} with "
                f"labels that were not trained: {_quoted(sorted(unknown))} (trained: "
                f"{_quoted(self.labels)})"
            )
            if self.exp.data.on_bad_row != "skip":
                raise DataError(
                    f"{problem}. Correct them, or exclude these rows from the evaluation with "
                    "data.on_bad_row=skip."
                )
            lines.append(f"WARNING: {problem}. These rows are excluded from the evaluation.")
        if absent := [name for name in self.labels if not counts[name]]:
            lines.append(f"No row of the evaluation data has the label {_quoted(absent)}.")
        return lines

    def _counts(self, store: SampleStore) -> Counter[str]:
        """The number of examples with each label."""
        raw = np.ascontiguousarray(store.values_of("label"))
        rows, repeated = np.unique(raw.view(f"S{raw.shape[1]}"), return_counts=True)
        counts: Counter[str] = Counter()
        for value, count in zip(rows.tolist(), repeated.tolist(), strict=True):
            for name in self._names(value):
                counts[name] += count
        return counts

    def _names(self, value: bytes) -> list[str]:
        text = value.rstrip(b"\0").decode("utf-8")
        return [text] if self.problem == SINGLE else json.loads(text)

    def _class_weights(self, names: tuple[str, ...], counts: Counter[str]) -> list[float]:
        options = self.options
        if options.class_weights:
            if unknown := sorted(options.class_weights.keys() - set(names)):
                raise ConfigError(
                    f"task.options.class_weights names {_quoted(unknown)}, which is not a label; "
                    f"the labels are {_quoted(names)}."
                )
            return [float(options.class_weights.get(name, 1.0)) for name in names]
        if options.balance == "none":
            return [1.0] * len(names)
        sizes = np.array([counts[name] for name in names], np.float64)
        weights = class_weights(sizes, beta=options.beta if options.balance != "inverse" else None)
        return [float(weight) for weight in weights]

    # Model, loss, metrics

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Metrics of held-out rows; the accuracy of training steps, too."""
        if self.problem == REGRESSION:
            return {
                "mae": Metric("mean absolute error", "number", higher_is_better=False),
                "r2": Metric("R²", "number", higher_is_better=True),
                "pearson": Metric("Pearson correlation", "number", higher_is_better=True),
            }
        metrics = {"accuracy": Metric("accuracy", "percent", higher_is_better=True, kinds=BOTH)}
        if self.problem == MULTI:
            metrics["micro_f1"] = Metric("micro F1", "percent", higher_is_better=True)
        return {
            **metrics,
            "macro_f1": Metric("macro F1", "percent", higher_is_better=True),
            "plain_loss": Metric("cross entropy without weights", "number", higher_is_better=False),
            "auc": Metric("ROC AUC", "percent", higher_is_better=True),
        }

    def models(self) -> dict[str, ModelSpec]:
        """One network with an output for each label. Before the data is seen, how many is open."""
        count = 1 if self.problem == REGRESSION else len(self.labels) or 2
        return {
            "policy": ModelSpec(
                head=CLASSIFICATION,
                num_labels=count,
                labels=self.labels,
                problem=PROBLEMS[self.problem],
            )
        }

    def loss(self, models: Models, batch: Batch) -> Loss:
        """Summed over examples; each times the weight of its class."""
        loss, _ = self._computed(models, batch)
        return loss

    def evaluate(self, models: Models, batches: Iterable[Batch]) -> Measures:
        """The loss, and what is measured over all examples together."""
        means = {"loss": Mean()}
        measured: Gathered = (
            Numbers()
            if self.problem == REGRESSION
            else Labels(self.labels, self.options.threshold)
            if self.problem == MULTI
            else Classes(self.labels)
        )
        for batch in batches:
            loss, (predicted, actual) = self._computed(models, batch)
            plain = {k: v for k, v in loss.metrics.items() if k == "plain_loss"}
            add_loss(means, Loss(loss.sum, loss.weight, plain))
            if len(predicted):
                measured.add(predicted, actual)
        return {**means, "measured": measured}

    def _computed(self, models: Models, batch: Batch) -> tuple[Loss, tuple[np.ndarray, np.ndarray]]:
        """The loss; and of examples whose label is known what the model says and the label, for an
        evaluation (nothing where gradients are on)."""
        import torch

        from llmx.models.loss import to_device

        logits = models.main.logits(batch)
        if self.problem == REGRESSION:
            actual = batch["label"].to(logits.device, non_blocking=True)
            losses = (logits[:, 0] - actual) ** 2
            loss = Loss(losses.sum(), float(len(losses)))
            if torch.is_grad_enabled():
                return loss, _NOTHING
            return loss, (logits[:, 0].cpu().numpy(), actual.cpu().numpy())
        numbers = [
            [self._index.get(name, -1) for name in self._names(row.numpy().tobytes())]
            for row in batch["label"]
        ]
        are_known = [-1 not in row for row in numbers]
        is_known = to_device(torch.tensor(are_known, dtype=torch.bool), logits.device)
        weights = to_device(torch.tensor(self._weights, dtype=logits.dtype), logits.device)
        options = self.options
        more = {"gamma": options.gamma if options.loss == "focal" else 0.0}
        losses_of: Callable[..., torch.Tensor]
        if self.problem == MULTI:
            rows = [[float(label in row) for label in range(logits.shape[1])] for row in numbers]
            target = to_device(torch.tensor(rows, dtype=logits.dtype), logits.device)
            target, losses_of = target.view_as(logits), multi_label_losses
            scores, actual = logits.detach().sigmoid(), target > 0
            right = ((scores >= options.threshold) == actual).all(dim=-1)
        else:
            first = torch.tensor([indices[0] for indices in numbers], dtype=torch.long)
            target, losses_of = to_device(first.clamp(min=0), logits.device), single_label_losses
            scores, actual = logits.detach().softmax(dim=-1), target
            right = logits.detach().argmax(dim=-1) == target
            more["label_smoothing"] = options.label_smoothing
        losses = losses_of(logits, target, weights=weights, **more)
        metrics = {"accuracy": (right & is_known).sum()}
        loss = Loss((losses * is_known).sum(), float(sum(are_known)), metrics)
        if torch.is_grad_enabled():
            return loss, _NOTHING
        plain = losses_of(logits, target, weights=torch.ones_like(weights))
        loss = replace(loss, metrics={**metrics, "plain_loss": (plain * is_known).sum()})
        return loss, (scores[is_known].cpu().numpy(), actual[is_known].cpu().numpy())


_NOTHING = (np.zeros(0), np.zeros(0))


def single_label_losses(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weights: torch.Tensor,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """fp32 [n]: cross entropy of each example times the weight of its class; with ``gamma`` times
    ``(1 - p) ** gamma`` for the probability p of its class (focal loss).

    Args:
        logits: [n, classes].
        target: int64 [n].
        weights: [classes].
    """
    import torch

    losses = torch.nn.functional.cross_entropy(
        logits, target, reduction="none", label_smoothing=label_smoothing
    )
    if gamma:
        log_probabilities = logits.log_softmax(dim=-1).gather(1, target[:, None]).squeeze(1)
        losses = losses * (1 - log_probabilities.exp()) ** gamma
    return losses * weights[target]


def multi_label_losses(
    logits: torch.Tensor, target: torch.Tensor, *, weights: torch.Tensor, gamma: float = 0.0
) -> torch.Tensor:
    """fp32 [n]: mean over labels of the binary cross entropy, that of the examples which have a
    label times its weight; with ``gamma`` focal, as ``single_label_losses``.

    Args:
        logits, target: [n, labels], the target 0 or 1.
    """
    import torch

    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, target, reduction="none", pos_weight=weights
    )
    if gamma:
        probability = logits.sigmoid()
        confidence = torch.where(target > 0, probability, 1 - probability)
        losses = losses * (1 - confidence) ** gamma
    return losses.mean(dim=-1)


def class_weights(sizes: np.ndarray, *, beta: float | None) -> np.ndarray:
    """Weights of classes with so many examples each, whose mean over the examples is 1.

    ``beta``: of the effective number of examples, ``(1 - beta ** n) / (1 - beta)`` (Cui et al.
    2019, arXiv 1901.05555); None: of their number. 0 for a class without examples.
    """
    effective = sizes if beta is None else (1 - beta**sizes) / (1 - beta)
    weights = np.divide(1.0, effective, out=np.zeros_like(sizes), where=sizes > 0)
    scaled: np.ndarray = weights * sizes.sum() / (weights * sizes).sum()
    return scaled


def _as_bytes(text: str, room: int) -> np.ndarray:
    raw = text.encode("utf-8")
    if len(raw) > room or b"\0" in raw:
        raise Rejected(
            "a label that is too long",
            f"the label {text[:60]!r} has {len(raw)} bytes, over the limit of {room}. Shorten it, "
            "or check data.data_map.label.",
        )
    padded = np.zeros(room, np.uint8)
    padded[: len(raw)] = np.frombuffer(raw, np.uint8)
    return padded


def _name(label: Any) -> str:
    return str(label).lower() if isinstance(label, bool) else str(label).strip()


def _order(name: str) -> tuple[bool, float, str]:
    """Numbers by their size, before names by their letters."""
    try:
        return (False, float(name), name)
    except ValueError:
        return (True, 0.0, name)


def _quoted(names: Iterable[str]) -> str:
    return _listed([repr(name) for name in names])


def _listed(texts: list[str]) -> str:
    num_hidden = len(texts) - CLASSES_NAMED
    more = f" and {num_hidden} more" if num_hidden > 0 else ""
    return ", ".join(texts[:CLASSES_NAMED]) + more
