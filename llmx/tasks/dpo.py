"""``task=dpo``: a model learns to prefer the better of two answers, held near a frozen reference.

    python -m llmx task=dpo data=file data.path=pairs.jsonl model=hf model.path=Qwen/Qwen3-8B

Rows are preference pairs, or for ``loss=kto`` answers with a verdict each. The reference is the
model that training begins with. Its log-probabilities are computed once, before training, and
stored beside the data, so that no second model is in memory. Reports the loss, the rewards of both
answers, their margin, and how often the better one has the larger reward. Tried by ``python -m
pytest tests/unit/test_tasks_dpo.py`` (losses against TRL's).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmx.config.fields import choice, number
from llmx.config.tasks import TaskDefaults
from llmx.data import UnpairedPreference
from llmx.data.examples import Column, Example
from llmx.data.format.rows import Preference
from llmx.data.split import DatasetSplit
from llmx.errors import ConfigError
from llmx.models.spec import ModelSpec
from llmx.run.metrics import Metric
from llmx.tasks.base import BOTH, Loss, Normaliser, Task, unused_dropout
from llmx.tasks.joint import EXAMPLES, JointLoss, JointTask

if TYPE_CHECKING:
    import torch

    from llmx.models.model import Batch, Models

REFERENCE = "reference_logp"
DESIRABLE = "desirable"
WITHOUT_REFERENCE = ("orpo", "simpo")
"""Losses that have no reference at all."""
BY_TOKEN = ("ipo", "orpo", "simpo")
"""Losses of log-probabilities that are means over the tokens of an answer."""
SMOOTHED = ("sigmoid", "robust", "simpo")


@dataclass
class Options:
    """``task.options`` of ``task=dpo``."""

    loss: str = choice(
        *("sigmoid", "robust", "hinge", "ipo", "orpo", "simpo", "sppo_hard", "nca_pair", "kto")
    )
    """``sigmoid`` is DPO. ``kto`` also takes rows of one answer with a verdict (``label``)."""
    beta: float = number(0.1, above=0, maximum=1000, example=0.1)
    """How strongly the reference holds the model; of ``ipo`` tau, of ``orpo`` the weight of the
    odds ratio (lambda)."""
    label_smoothing: float = number(0.0, minimum=0, below=0.5, example=0.1)
    """The part of pairs that are thought to be swapped (``sigmoid``, ``robust``, ``simpo``)."""
    reference: str = choice("stored", "live", "free")
    """``stored`` computes the reference's log-probabilities once, before training; ``live`` keeps
    the frozen model in memory (with an adapter it is the trained one without it, which takes none)
    and computes them at every step; ``free`` has no reference: its
    log-probabilities count as 0."""
    length_normalised: bool = False
    """Log-probabilities are means over the tokens of an answer, not sums (``ipo``, ``orpo`` and
    ``simpo`` always do so)."""
    sft_weight: float = number(0.0, minimum=0, maximum=1000, example=1)
    """Adds so many times the loss of the better answer, the mean over its tokens. ``orpo`` has it
    once in any case."""
    gamma: float = number(0.5, minimum=0, maximum=1000, example=0.5)
    """Margin that the reward of the better answer is to have (``simpo``)."""
    desirable_weight: float = number(1.0, minimum=0, maximum=1000, example=1)
    """Weight of good answers (``kto``)."""
    undesirable_weight: float = number(1.0, minimum=0, maximum=1000, example=1)
    """Weight of bad answers (``kto``)."""
    dropout: bool = False
    """Train with the dropout of the model and of the adapter. The reference has none, so with it
    the first log-ratios are noise around 0."""


class Dpo(Task):
    """Targets are the last answers, those that differ."""

    defaults = TaskDefaults(full=1e-6, adapter=1e-5)
    Options = Options
    takes: ClassVar[tuple[type, ...]] = (Preference, UnpairedPreference)
    columns = (Column(DESIRABLE, per="sequence", dtype="int8"),)
    loss_on = "last"
    normaliser: Normaliser = "examples"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric("accuracy", "percent", higher_is_better=True, kinds=BOTH),
        "rewards_chosen": Metric("rewards/chosen", "number", kinds=BOTH),
        "rewards_rejected": Metric("rewards/rejected", "number", kinds=BOTH),
        "margin": Metric("margin", "number", higher_is_better=True, kinds=BOTH),
    }

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Task]:
        return Kto if options.get("loss") == "kto" else cls

    def problems(self) -> Iterator[str]:
        """Dropout that is asked for and would not be used, and options without an effect."""
        options, dropout = self.options, unused_dropout(self.exp)
        if dropout and not options.dropout:
            yield (
                f"{dropout}: task=dpo trains without dropout, since its reference has none. Set it "
                "to 0, or task.options.dropout=true."
            )
        if options.loss == "robust" and not options.label_smoothing:
            yield (
                "task.options.loss=robust corrects for swapped pairs and needs their share as "
                "task.options.label_smoothing, which is 0. Set e.g. "
                "task.options.label_smoothing=0.1, or task.options.loss=sigmoid."
            )
        if options.label_smoothing and options.loss not in SMOOTHED:
            yield (
                f"task.options.label_smoothing={options.label_smoothing:g} has no effect with "
                f"task.options.loss={options.loss}. Remove it, or set task.options.loss to one of "
                f"{', '.join(SMOOTHED)}."
            )

    def encoding_identity(self) -> dict[str, Any]:
        """No option changes the examples: a sweep over them prepares nothing anew."""
        return {"kind": "preference examples", "version": 1}

    def check_source(self, split: DatasetSplit) -> None:
        unpaired = [
            source.path for source in split.sources if source.row_type is UnpairedPreference
        ]
        if unpaired:
            raise ConfigError(
                f"task.options.loss={self.options.loss} needs pairs: a `chosen` and a `rejected` "
                f"answer in each row. {', '.join(unpaired)} has one answer per row. If each row "
                "has a `label` (true or false), set task.options.loss=kto."
            )

    @property
    def _reference(self) -> str:
        """``stored``, ``live`` or ``free``, as the loss has it."""
        return "free" if self.options.loss in WITHOUT_REFERENCE else self.options.reference

    def models(self) -> dict[str, ModelSpec]:
        policy = {"policy": ModelSpec(dropout=self.options.dropout)}
        if self._reference == "free":
            return policy
        stored = self._reference == "stored"
        return {**policy, "reference": ModelSpec(trained=False, precomputes=stored)}

    def encode(self, row: Preference | UnpairedPreference) -> Example:
        """Both answers of a pair together, or the one with its verdict."""
        if isinstance(row, UnpairedPreference):
            return Example.of(row.conversation, cut="prompt", desirable=[row.desirable])
        return Example.of(row.chosen, row.rejected, desirable=[1, 0])

    @property
    def precomputed(self) -> tuple[Column, ...]:
        """The reference's log-probability of each answer, where it is stored."""
        return (Column(REFERENCE, per="sequence"),) if self._reference == "stored" else ()

    def precompute_identity(self) -> dict[str, Any]:
        """Sums over the tokens of an answer, whatever the options."""
        return {"column": REFERENCE, "version": 1}

    def precompute(self, models: Models, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {REFERENCE: models["reference"].log_probabilities(batch).sums()}

    def _log_probabilities(
        self, models: Models, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """fp32 [sequences] each: of the policy and of the reference, as the loss takes them; and
        the policy's means over tokens."""
        reference = None
        if self._reference == "live":
            # Before the policy's pass: nothing lies between that and its backward pass, for which
            # activations wait, and at ZeRO-3 gathered parameters.
            reference = models["reference"].log_probabilities(batch).sums()
        logps = models["policy"].log_probabilities(batch)
        logp, counts = logps.sums(), logps.counts().clamp(min=1)
        if self._reference == "stored":
            reference = batch[REFERENCE].to(logp.device, non_blocking=True)
        elif reference is None:
            reference = logp.detach() * 0.0
        per_token = logp / counts
        if self.options.length_normalised or self.options.loss in BY_TOKEN:
            return per_token, reference / counts, per_token
        return logp, reference, per_token

    def loss(self, models: Models, batch: Batch) -> Loss:
        logp, reference, per_token = self._log_probabilities(models, batch)
        options = self.options
        losses = pair_losses(options, logp.view(-1, 2), reference.view(-1, 2))
        sft = options.sft_weight + (options.loss == "orpo")
        if sft:
            losses = losses - sft * per_token.view(-1, 2)[:, 0]
        rewards = options.beta * (logp - reference).detach().view(-1, 2)
        chosen, rejected = rewards.unbind(dim=1)
        return Loss(
            losses.sum(),
            weight=float(len(losses)),
            metrics={
                "accuracy": shares_right(chosen - rejected, options.beta).sum(),
                "rewards_chosen": chosen.sum(),
                "rewards_rejected": rejected.sum(),
                "margin": (chosen - rejected).sum(),
            },
        )


class Kto(Dpo, JointTask):
    """``task.options.loss=kto``: answers with a verdict each, compared with the whole step."""

    def check_source(self, split: DatasetSplit) -> None:
        """Both answers of a pair have a verdict, too."""

    metrics: ClassVar[Mapping[str, Metric]] = {
        **{name: metric for name, metric in Dpo.metrics.items() if name != "margin"},
        "kl": Metric("KL", "number", kinds=BOTH),
    }
    """A KL divergence in place of the margin, which only a pair has."""

    def outputs(self, models: Models, batch: Batch) -> torch.Tensor:
        """The log-ratio and the mean log-probability of each answer, [sequences, 2]."""
        import torch

        logp, reference, per_token = self._log_probabilities(models, batch)
        return torch.stack([logp - reference, per_token], dim=1)

    def joint_loss(self, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> JointLoss:
        """Every answer by itself; an example of two is the mean of both.

        The reference point is the mean log-ratio of all answers of the step, at least 0, a number
        without a gradient. The paper estimates it with answers to other prompts, which takes two
        more forward passes; this is the estimate of TRL's former ``kto_pair``.
        """
        import torch

        ratios, per_token = outputs.unbind(dim=1)
        of_example = columns[EXAMPLES]
        desirable = columns[DESIRABLE].bool()
        examples = int(of_example[-1]) + 1 if len(of_example) else 0

        def by_example(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(examples).index_add(0, of_example, values)

        kl = (ratios.detach().sum() / max(1, len(ratios))).clamp(min=0)
        losses = kto_losses(self.options, ratios, desirable, kl)
        if self.options.sft_weight:
            losses = losses - self.options.sft_weight * per_token * desirable
        rewards, good = self.options.beta * ratios.detach(), desirable.to(ratios.dtype)
        sizes, unit = by_example(torch.ones_like(good)), good.new_ones(examples)
        above = shares_right(rewards - self.options.beta * kl, self.options.beta)
        right = torch.where(desirable, above, 1 - above)
        return JointLoss(
            by_example(losses) / sizes,
            {
                "accuracy": (by_example(right), sizes),
                "rewards_chosen": (by_example(rewards * good), by_example(good)),
                "rewards_rejected": (by_example(rewards * (1 - good)), by_example(1 - good)),
                "kl": (kl * unit, unit),
            },
        )


TIE = 1e-4
"""Nats by which two log-ratios differ that are equal but for rounding, as before training."""


def shares_right(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """1 where a reward is higher by this ``margin``, 0 where it is lower; 0.5 where they tie."""
    import torch

    half = margin.new_full((), 0.5)
    return torch.heaviside(margin * (margin.abs() > TIE * beta), half)


def pair_losses(options: Options, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """fp32 [pairs]: of ``options.loss``.

    Args:
        logp: [pairs, 2], of the better and of the worse answer.
        reference: the same of the reference; 0 without one.
    """
    import torch
    from torch.nn.functional import logsigmoid

    beta, swapped = options.beta, options.label_smoothing
    ratios = logp - reference
    chosen, rejected = ratios.unbind(dim=1)
    margin = chosen - rejected
    match options.loss:
        case "sigmoid":  # Rafailov et al. 2023; with label smoothing Mitchell's cDPO
            return -logsigmoid(beta * margin) * (1 - swapped) - logsigmoid(-beta * margin) * swapped
        case "robust":  # Chowdhury et al. 2024, eq. 10
            right, reverse = logsigmoid(beta * margin), logsigmoid(-beta * margin)
            return (-right * (1 - swapped) + reverse * swapped) / (1 - 2 * swapped)
        case "hinge":  # SLiC, Zhao et al. 2023
            return torch.relu(1 - beta * margin)
        case "ipo":  # Azar et al. 2023, eq. 17, of means over tokens as the authors confirmed
            return (margin - 1 / (2 * beta)) ** 2
        case "orpo":  # Hong et al. 2024, eq. 6 and 7, without its SFT term
            odds = margin - (log1mexp(logp[:, 0]) - log1mexp(logp[:, 1]))
            return -beta * logsigmoid(odds)
        case "simpo":  # Meng et al. 2024, eq. 6
            above = beta * margin - options.gamma
            return -logsigmoid(above) * (1 - swapped) - logsigmoid(-above) * swapped
        case "sppo_hard":  # Wu et al. 2024, eq. 4.7 with probabilities 1 and 0
            return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
        case "nca_pair":  # Chen et al. 2024, eq. 11 with two answers
            good, bad = beta * chosen, beta * rejected
            return -logsigmoid(good) - 0.5 * logsigmoid(-good) - 0.5 * logsigmoid(-bad)
    raise ValueError(options.loss)


def log1mexp(values: torch.Tensor) -> torch.Tensor:
    """``log(1 - exp(x))`` of x < 0, without loss of digits near 0 and far from it."""
    import torch

    values = values.clamp(max=-torch.finfo(values.dtype).eps)
    near = values > -0.6931472
    far = torch.log1p(-torch.exp(torch.where(near, torch.full_like(values, -1.0), values)))
    close = torch.log(-torch.expm1(torch.where(near, values, torch.full_like(values, -0.5))))
    return torch.where(near, close, far)


def kto_losses(
    options: Options, ratios: torch.Tensor, desirable: torch.Tensor, kl: torch.Tensor
) -> torch.Tensor:
    """fp32 [answers]: Ethayarajh et al. 2024, eq. 7 and 8; ``ratios``: log-probabilities without
    those of the reference."""
    import torch

    good = options.desirable_weight * (1 - torch.sigmoid(options.beta * (ratios - kl)))
    bad = options.undesirable_weight * (1 - torch.sigmoid(options.beta * (kl - ratios)))
    return torch.where(desirable, good, bad)
