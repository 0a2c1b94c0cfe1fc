"""``task=dpo``: a model learns to prefer the better of two answers, held near a frozen reference.

    python -m llmx task=dpo data=file data.path=pairs.jsonl model=hf model.path=Qwen/Qwen3-8B

Rows are preference pairs, or for ``loss=kto`` answers with a verdict each. The reference is the
model that training begins with. Its log-probabilities are computed once, before training, and
stored beside the data, so that no second model is in memory. Reports the loss, the rewards of both
answers, their margin, and how often the better one has the larger reward. Tried by ``python -m
pytest tests/unit/test_task_dpo.py`` (losses against TRL's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llmx.config.fields import choice, number
from llmx.data import UnpairedPreference
from llmx.data.examples import Column, Example
from llmx.data.format.formats import Preference
from llmx.data.source.split import DatasetSplit
from llmx.errors import ConfigError
from llmx.run.metrics import Metric
from llmx.tasks.base import Loss, Task

if TYPE_CHECKING:
    import torch

    from llmx.models.model import Batch, Models, ModelSpec

REFERENCE = "reference_logp"
WITHOUT_REFERENCE = ("orpo", "simpo")
"""Losses that have no reference at all."""
BY_TOKEN = ("ipo", "orpo", "simpo")
"""Losses of log-probabilities that are means over the tokens of an answer."""
SMOOTHED = ("sigmoid", "robust", "simpo")


@dataclass
class Options:
    """Of ``task.options``."""

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

    def check(self) -> None:
        """Raise ConfigError for values that do not go together."""
        if self.loss == "robust" and not self.label_smoothing:
            raise ConfigError(
                "task.options.loss=robust corrects for swapped pairs, and "
                "task.options.label_smoothing=0 says that there are none. Set e.g. "
                "task.options.label_smoothing=0.1, or task.options.loss=sigmoid."
            )
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ConfigError(
                f"task.options.label_smoothing={self.label_smoothing:g} has no place in "
                f"task.options.loss={self.loss}. It belongs to {', '.join(SMOOTHED)}."
            )


class Dpo(Task):
    """Targets are the last answers, those that differ."""

    Options = Options
    logits = "whole"
    takes: ClassVar[tuple[type, ...]] = (Preference, UnpairedPreference)
    columns = (Column("desirable", per="sequence", dtype="int8"),)
    loss_on = "last"
    normaliser = "examples"

    def encoding_identity(self) -> dict[str, Any]:
        """No option changes the examples: a sweep over them prepares nothing anew."""
        return {"kind": "preference examples", "version": 1}

    def check_source(self, source: DatasetSplit) -> None:
        if self.options.loss == "kto":
            return
        unpaired = [one.path for one in source.sources if one.record_type is UnpairedPreference]
        if unpaired:
            raise ConfigError(
                f"task.options.loss={self.options.loss} needs pairs: a `chosen` and a `rejected` "
                f"answer in each row. {', '.join(unpaired)} has one answer a row; with a verdict "
                "(`label`: true or false) it trains with task.options.loss=kto."
            )

    @property
    def metrics(self) -> Mapping[str, Metric]:
        both = ("train", "eval")
        found = {
            "accuracy": Metric("accuracy", "percent", higher_is_better=True, kinds=both),
            "rewards_chosen": Metric("reward of the better", "number", kinds=both),
            "rewards_rejected": Metric("reward of the worse", "number", kinds=both),
        }
        if self.options.loss == "kto":
            return {**found, "kl": Metric("KL", "number", kinds=both)}
        return {
            **found,
            "margin": Metric("margin", "number", higher_is_better=True, kinds=both),
        }

    @property
    def _reference(self) -> str:
        """``stored``, ``live`` or ``free``, as the loss has it."""
        return "free" if self.options.loss in WITHOUT_REFERENCE else self.options.reference

    def models(self) -> dict[str, ModelSpec]:
        from llmx.models.spec import ModelSpec

        policy = {"policy": ModelSpec()}
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

    def loss(self, models: Models, batch: Batch) -> Loss:
        live = None
        if self._reference == "live":
            # Before the policy's pass: nothing lies between that and its backward pass, for which
            # activations wait, and at ZeRO-3 gathered parameters.
            live = models["reference"].log_probabilities(batch).sums()
        found = models["policy"].log_probabilities(batch)
        logp, counts = found.sums(), found.counts().clamp(min=1)
        reference = self._reference_logp(batch, logp) if live is None else live
        per_token = logp / counts
        options = self.options
        if options.length_normalised or options.loss in BY_TOKEN:
            logp, reference = per_token, reference / counts
        device = logp.device
        desirable = batch["desirable"].to(device, non_blocking=True).bool()
        examples = float(batch["example_ids"].max() + 1) if len(batch["example_ids"]) else 0.0
        if options.loss == "kto":
            return self._kto(logp - reference, per_token, desirable, batch, examples)
        losses = pair_losses(options, logp.view(-1, 2), reference.view(-1, 2))
        sft = options.sft_weight + (options.loss == "orpo")
        if sft:
            losses = losses - sft * per_token.view(-1, 2)[:, 0]
        rewards = options.beta * (logp - reference).detach().view(-1, 2)
        chosen, rejected = rewards.unbind(dim=1)
        return Loss(
            losses.sum(),
            weight=examples,
            metrics={
                "accuracy": (chosen > rejected).sum(),
                "rewards_chosen": chosen.sum(),
                "rewards_rejected": rejected.sum(),
                "margin": (chosen - rejected).sum(),
            },
        )

    def _reference_logp(self, batch: Batch, like: torch.Tensor) -> torch.Tensor:
        """fp32 [sequences]: sums over the tokens of an answer, stored or none."""
        if self._reference == "stored":
            return batch[REFERENCE].to(like.device, non_blocking=True)
        return like.detach() * 0.0

    def _kto(
        self,
        ratios: torch.Tensor,
        per_token: torch.Tensor,
        desirable: torch.Tensor,
        batch: Batch,
        examples: float,
    ) -> Loss:
        """Every answer by itself; a pair is the mean of its two."""
        import torch

        options = self.options
        kl = reference_point(ratios.detach())
        losses = kto_losses(options, ratios, desirable, kl)
        if options.sft_weight:
            losses = losses - options.sft_weight * per_token * desirable
        of_example = batch["example_ids"].to(ratios.device)
        sizes = torch.zeros(int(examples), device=ratios.device)
        sizes = sizes.index_add(0, of_example, torch.ones_like(ratios.detach()))
        rewards = options.beta * ratios.detach()
        count, good = float(len(rewards)), float(desirable.sum())
        return Loss(
            (losses / sizes[of_example]).sum(),
            weight=examples,
            metrics={
                "accuracy": (((rewards > options.beta * kl) == desirable).sum(), count),
                "rewards_chosen": (rewards[desirable].sum(), good),
                "rewards_rejected": (rewards[~desirable].sum(), count - good),
                "kl": (kl * count, count),
            },
        )


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
            right, wrong = logsigmoid(beta * margin), logsigmoid(-beta * margin)
            return (-right * (1 - swapped) + wrong * swapped) / (1 - 2 * swapped)
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


def reference_point(ratios: torch.Tensor) -> torch.Tensor:
    """KTO's reference point: the mean log-ratio of the answers of the micro batches of all ranks,
    at least 0. Collective.

    The paper estimates it with answers to other prompts, which takes two more forward passes; this
    is the estimate of TRL's former ``kto_pair``. It is a number without a gradient, the only one
    of a loss that depends on how a step is split into micro batches.
    """
    import torch

    both = torch.stack([ratios.sum(), ratios.new_tensor(float(len(ratios)))])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(both)
    return (both[0] / both[1].clamp(min=1)).clamp(min=0)
