"""``task=distill``: a student learns what a frozen teacher says of every next token.

    python -m llmx task=distill task.options.teacher=Qwen/Qwen3-8B model=hf \\
        model.path=Qwen/Qwen3-0.6B data=file data.path=chats.jsonl

Target tokens are those of conversations (``data.loss_on``) and all of documents. The loss is
``alpha`` times the cross entropy of the data plus ``1 - alpha`` times the divergence of the two
distributions. The teacher's most likely tokens are computed once, before training, and stored
beside the data, or all its logits at every step. With ``task.options.on_policy=true`` the data are
prompts: the student draws the completions of each step, and the loss is the divergence at its own
tokens. Reports the divergence and how often both find the same token most likely. Tried by
``python -m pytest tests/unit/test_tasks_distill.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from llmx.config import Experiment
from llmx.config.fields import AUTO, choice, model_source, number
from llmx.data import IGNORE
from llmx.data.examples import Column, Example, Tokens
from llmx.data.format.rows import Conversation
from llmx.data.source.records import Document
from llmx.data.split import DatasetSplit
from llmx.errors import ConfigError
from llmx.models.spec import ModelSpec
from llmx.run.metrics import Metric
from llmx.tasks.base import BOTH, NATS, Loss, Measures, Task
from llmx.tasks.online import (
    OnlineTask,
    Prompt,
    RolloutKey,
    new_tokens_problems,
    sampling_of,
)

if TYPE_CHECKING:
    import torch

    from llmx.models.model import Batch, Models

IDS, LOGPS = "teacher_ids", "teacher_logps"


@dataclass
class Options:
    """``task.options`` of ``task=distill``."""

    teacher: str = model_source()
    """The model to learn from: a directory or a Hub id, with the tokenizer of the run. Its
    architecture and size are its own."""
    teacher_revision: str | None = None
    """A commit, tag or branch of the teacher on the Hub."""
    on_policy: bool = False
    """The student draws the completions of each step, and learns at its own tokens (GKD with
    ``lmbda=1``). Then ``teacher_logits`` is live, ``loss`` is by default ``reverse_kl``, and there
    is no hard loss."""
    max_new_tokens: int = number(AUTO, auto=True, minimum=1, maximum=2**24, example=256)
    """On-policy, the most tokens of a completion; fewer where ``data.seq_len`` leaves less room.
    ``auto`` is 256, or half of ``data.seq_len`` where that is less."""
    teacher_logits: str = choice("stored", "live")
    """``stored`` computes the teacher's ``top_k`` most likely tokens once, before training;
    ``live`` keeps the teacher in memory and computes all its logits at every step."""
    top_k: int = number(64, minimum=1, maximum=2**16, example=64)
    """Tokens that are stored of each distribution; all others count as one more outcome. 8 bytes
    each, for every target token of the data."""
    loss: str = choice("forward_kl", "reverse_kl", "jsd")
    """``forward_kl``: KL(teacher || student), Hinton's; ``reverse_kl``: KL(student || teacher);
    ``jsd``: the generalized Jensen-Shannon divergence of GKD."""
    beta: float = number(0.5, above=0, below=1, example=0.5)
    """The teacher's part of the mixture (``jsd``): near 0 as ``forward_kl``, near 1 as
    ``reverse_kl``."""
    temperature: float = number(1.0, above=0, maximum=100, example=2)
    """Both are softened by it, and the divergence is multiplied by its square. On-policy,
    completions are drawn at it, too."""
    alpha: float = number(0.5, minimum=0, below=1, example=0.5)
    """The part of the hard loss, the cross entropy of the data."""


class Distill(Task):
    """One student is trained; the teacher has weights of its own."""

    Options = Options
    loss_unit = NATS
    takes: ClassVar[tuple[type, ...]] = (Conversation, Document)
    splits_documents = True
    metrics: ClassVar[Mapping[str, Metric]] = {
        "divergence": Metric("divergence", "number", kinds=BOTH),
        "agreement": Metric("same top token", "percent", higher_is_better=True, kinds=BOTH),
        "hard_loss": Metric("hard loss", "number", kinds=("train",)),
    }

    @classmethod
    def learns_chats(cls) -> bool:
        """A student of chats answers in them: its tokenizer keeps the template."""
        return True

    @classmethod
    def variant(cls, options: Mapping[str, Any]) -> type[Task]:
        return OnPolicyDistill if options.get("on_policy") else cls

    def problems(self) -> Iterator[str]:
        options = self.options
        if not options.teacher:
            yield (
                "task=distill needs a teacher, and task.options.teacher is empty. Set it to a "
                "directory or a Hub id, e.g. task.options.teacher=Qwen/Qwen3-8B."
            )
        if options.teacher_revision is not None and options.teacher.startswith("/"):
            yield (
                f"task.options.teacher_revision={options.teacher_revision}: a local directory has "
                "no revisions. Remove it, or set task.options.teacher to a Hub id."
            )
        if not options.on_policy and options.max_new_tokens != AUTO:
            yield (
                f"task.options.max_new_tokens={options.max_new_tokens} has no effect: only the "
                "student's own completions have a limit. Set task.options.on_policy=true, or "
                "remove it."
            )

    def encoding_identity(self) -> dict[str, Any]:
        """No option: a sweep over them prepares nothing anew."""
        return {}

    def check_source(self, split: DatasetSplit) -> None:
        if split.has_conversations and split.data.packing == "concat":
            raise ConfigError(
                "data.packing=concat cuts rows at seq_len, and answers without their questions "
                "teach nothing. Use data.packing=best_fit."
            )

    def models(self) -> dict[str, ModelSpec]:
        options = self.options
        teacher = ModelSpec(
            trained=False,
            source=options.teacher,
            revision=options.teacher_revision,
            precomputes=options.teacher_logits == "stored",
        )
        return {"student": ModelSpec(), "teacher": teacher}

    @cached_property
    def _vocabulary(self) -> int:
        """Ids of the tokenizer that the student has rows for: what both distributions are over.
        Further rows of either network are padding, which they may have in different numbers."""
        from llmx.models.factory import true_vocab

        return self.num_embeddings or true_vocab(self.tokenizer)

    @property
    def precomputed(self) -> tuple[Column, ...]:
        """The teacher's most likely tokens, the first one first, with their log-probabilities and
        that of all others together, unless there are none."""
        if self.options.teacher_logits != "stored":
            return ()
        num_stored = min(self.options.top_k, self._vocabulary)
        outcomes = num_stored + (num_stored < self._vocabulary)
        return (
            Column(IDS, per="token", dtype="int32", shape=(num_stored,)),
            Column(LOGPS, per="token", shape=(outcomes,)),
        )

    def precompute_identity(self) -> dict[str, Any]:
        """The temperature; the columns say how many tokens are stored."""
        return {"columns": "top", "version": 1, "temperature": self.options.temperature}

    def precompute(self, models: Models, batch: Batch) -> Mapping[str, torch.Tensor]:
        num_stored, size = self.precomputed[0].shape[0], self._vocabulary

        def top(logits: torch.Tensor, _targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scaled = logits[:, :size] / self.options.temperature
            ids = scaled.topk(num_stored).indices
            return ids, outcomes(scaled, ids)

        ids, logps = models["teacher"].of_logits(batch, top)
        return {IDS: ids, LOGPS: logps}

    def loss(self, models: Models, batch: Batch) -> Loss:
        """The mixture in training; plain cross entropy in an evaluation, so that runs compare."""
        options, student = self.options, models["student"]
        targets = batch["labels"] != IGNORE
        if options.teacher_logits == "stored":
            stored = batch[IDS][targets].long(), batch[LOGPS][targets]
            apart, hard, agrees = student.of_logits(batch, self._stored_terms, *stored)
        else:
            teacher_logits = models["teacher"].target_logits(batch)
            apart, hard, agrees = student.of_logits(batch, self._live_terms, teacher_logits)
        mixed = options.alpha * hard + (1 - options.alpha) * options.temperature**2 * apart
        metrics: dict[str, Any] = {
            "divergence": apart.detach().sum(),
            "agreement": agrees.sum(),
        }
        if student.is_training:
            metrics["hard_loss"] = hard.detach().sum()
        return Loss(
            (mixed if student.is_training else hard).sum(),
            weight=float(targets.sum()),
            metrics=metrics,
        )

    def _stored_terms(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        ids: torch.Tensor,
        teacher_logps: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Terms of the loss with the stored outcomes of the teacher."""
        size = self._vocabulary
        student_logps = outcomes(logits[:, :size] / self.options.temperature, ids)
        apart = divergence(student_logps, teacher_logps, self.options)
        return apart, *hard_terms(logits, targets, ids[:, 0], size=size)

    def _live_terms(
        self, logits: torch.Tensor, targets: torch.Tensor, teacher_logits: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Terms of the loss with all logits of the teacher."""
        size = min(self._vocabulary, teacher_logits.shape[1])
        scaled = teacher_logits[:, :size].float() / self.options.temperature
        student_logps = (logits[:, :size] / self.options.temperature).log_softmax(-1)
        apart = divergence(student_logps, scaled.log_softmax(-1), self.options)
        return apart, *hard_terms(logits, targets, scaled.argmax(-1), size=size)


class OnPolicyDistill(Distill, OnlineTask):
    """``task.options.on_policy=true``: the student answers the prompts of each step, and learns at
    its own tokens."""

    loss_on = "last"
    rollout_columns = (Column("truncated", per="example"),)
    metrics: ClassVar[Mapping[str, Metric]] = {
        **{name: metric for name, metric in Distill.metrics.items() if name != "hard_loss"},
        "truncated": Metric("truncated", "percent", kinds=("train",)),
        "completion_tokens": Metric("completion tokens", kinds=("train",)),
    }

    @classmethod
    def auto_options(cls, exp: Experiment) -> dict[str, Any]:
        chosen = {"teacher_logits": "live", "loss": "reverse_kl", "alpha": 0.0}
        options = exp.task.options
        chosen = {name: value for name, value in chosen.items() if name not in options}
        return {**chosen, **super().auto_options(exp)}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from new_tokens_problems(self)
        if self.options.teacher_logits == "stored":
            yield (
                "task.options.teacher_logits=stored with on_policy=true: completions are drawn at "
                "every step, so nothing of them can be stored. Set "
                "task.options.teacher_logits=live."
            )
        if self.options.alpha:
            yield (
                f"task.options.alpha={self.options.alpha:g} with on_policy=true: the student draws "
                "its own completions, so there is no hard loss. Set task.options.alpha=0."
            )

    def encode(self, row: Any) -> Example | None:
        """A prompt, never cut, with the last answer."""
        return Example.of(row, cut="none")

    def encoding_identity(self) -> dict[str, Any]:
        """No option: a sweep over them prepares nothing anew."""
        return {"kind": "prompts with a reference", "version": 1}

    def check_source(self, split: DatasetSplit) -> None:
        if split.has_text:
            raise ConfigError(
                "task.options.on_policy=true needs conversations, whose prompts the student "
                "answers, and the data contains text. Map the columns with data.form and "
                "data.columns, or set task.options.on_policy=false."
            )
        super().check_source(split)

    def rollout(
        self, models: Models, prompts: Sequence[Prompt], key: RolloutKey
    ) -> list[list[Example]]:
        """A completion of each prompt, by the student."""
        tokens_of_prompts = [prompt.tokens for prompt in prompts]
        sampling = sampling_of(self, models)
        completions = models.main.sample(tokens_of_prompts, sampling, n=1, seeds=key.of)
        examples = []
        for prompt, (completion,) in zip(prompts, completions, strict=True):
            room = self.exp.data.seq_len - len(prompt.tokens)
            tokens = completion.tokens[:room]
            is_whole = completion.ended == "stop" and len(tokens) == len(completion.tokens)
            weight = [0.0] * len(prompt.tokens) + [1.0] * len(tokens)
            sequence = Tokens([*prompt.tokens, *tokens], weight=weight)
            examples.append([Example.of(sequence, truncated=float(not is_whole))])
        return examples

    def evaluate(self, models: Models, batches: Iterable[Batch]) -> Measures:
        """The loss of the answers in the data."""
        return Task.evaluate(self, models, batches)

    def loss(self, models: Models, batch: Batch) -> Loss:
        loss = super().loss(models, batch)
        if "hard_loss" not in loss.metrics:
            return loss
        num_completions = float(len(batch["truncated"]))
        metrics = {name: loss.metrics[name] for name in ("divergence", "agreement")}
        metrics["truncated"] = (batch["truncated"].sum(), num_completions)
        metrics["completion_tokens"] = (loss.weight, num_completions)
        return replace(loss, metrics=metrics)


def hard_terms(
    logits: torch.Tensor, targets: torch.Tensor, best: torch.Tensor, *, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [rows]: the cross entropy of the targets; and whether the student's most likely token
    of the first ``size`` is the ``best`` of the teacher."""
    hard = logits.logsumexp(-1) - logits.gather(1, targets[:, None]).squeeze(1)
    return hard, logits[:, :size].argmax(-1) == best


def outcomes(scaled: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, k + 1]: log-probabilities of ``ids``, and of all other tokens together, which is
    left out where there are none.

    Args:
        scaled: logits [rows, V] divided by the temperature.
        ids: [rows, k].
    """
    import torch

    normaliser = scaled.logsumexp(-1, keepdim=True)
    picked = scaled.gather(1, ids) - normaliser
    if ids.shape[1] == scaled.shape[1]:
        return picked
    # Not 1 minus the others, which has no digits left where they are nearly everything.
    remainder = scaled.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True) - normaliser
    return torch.cat([picked, remainder], dim=1)


def divergence(student: torch.Tensor, teacher: torch.Tensor, options: Options) -> torch.Tensor:
    """fp32 [rows]: ``options.loss`` of distributions over the same outcomes, log-probabilities
    [rows, outcomes]."""
    import torch

    def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    beta = options.beta
    match options.loss:
        case "forward_kl":  # Hinton et al. 2015
            return kl(teacher, student)
        case "reverse_kl":  # MiniLLM, Gu et al. 2024
            return kl(student, teacher)
        case "jsd":  # GKD, Agarwal et al. 2024, eq. 1
            mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
            return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
    raise ValueError(options.loss)
