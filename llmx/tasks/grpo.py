"""``task=grpo``: a model learns from rewards of its own completions (GRPO, DAPO, RLOO and others).

    python -m llmx task=grpo data=file data.path=questions.jsonl \\
        model=hf model.path=Qwen/Qwen3-0.6B task.options.rewards=[exact_match]

Each step draws ``group_size`` completions of each prompt, scores them, and makes those more likely
that are better than the others of their group. The ranks that train also generate. Tried by
``python -m pytest tests/unit/test_tasks_grpo.py`` (losses, gradients and advantages against TRL's).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmx.config import Experiment
from llmx.config.fields import choice, number
from llmx.config.tasks import TaskDefaults
from llmx.data import EvalPrompt, Sample, SampleStore, collate
from llmx.data.examples import Column, Example, Tokens
from llmx.data.format.rows import Conversation, Prompted
from llmx.data.source.records import Rejected
from llmx.errors import ConfigError
from llmx.models.spec import CLASSIFICATION, ModelSpec
from llmx.run.metrics import Metric
from llmx.tasks.base import Loss, Normaliser, unused_dropout
from llmx.tasks.collapse import CollapseWatch
from llmx.tasks.environment import Environment, Episodes, Observations, load_environment
from llmx.tasks.online import (
    GeneratedSample,
    OnlineTask,
    Prompt,
    RolloutKey,
    new_tokens_problems,
    sampling_of,
)
from llmx.tasks.policy_loss import (
    group_advantages,
    importance_weights,
    kl_estimate,
    policy_loss,
)
from llmx.tasks.rewards import (
    ENVIRONMENT,
    MATH,
    REWARD_MODEL,
    Reward,
    Scored,
    all_outcomes,
    reward_functions,
    short_names,
)
from llmx.tasks.rollout_options import RolloutOptions
from llmx.text import one_line, plural
from llmx.tolerance import rule, too_much

if TYPE_CHECKING:
    import torch

    from llmx.models.generate import Completion
    from llmx.models.model import Batch, Model, Models

BY_TOKEN = ("dapo", "cispo")
"""Losses that are means over the target tokens of a step; the others over its completions."""


@dataclass
class Options(RolloutOptions):
    """``task.options`` of ``task=grpo``; ``task=rloo`` sets some of them otherwise."""

    group_size: int = number(8, minimum=2, maximum=4096)
    """Completions of each prompt."""
    loss: str = choice("dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo")
    """``dapo`` is the mean over the target tokens of a step, ``grpo`` over completions of the means
    over their tokens, ``dr_grpo`` of their sums divided by ``max_new_tokens``. ``gspo`` has one
    ratio for a completion, ``cispo`` clips the weight of a token and not its gradient, ``rloo`` is
    REINFORCE of whole completions."""
    advantage: str = choice("normalised", "centred", "leave_one_out")
    """The reward without the mean of its group, ``normalised`` by their standard deviation or not
    (``centred``), or without the mean of the others of its group (``leave_one_out``)."""
    clip_low: float = number(0.2, minimum=0, maximum=1)
    clip_high: float = number(0.28, minimum=0, maximum=1000)
    """Ratios of the trained and the sampling policy are clipped to 1 - clip_low, 1 + clip_high."""
    updates: int = number(1, minimum=1, maximum=1000, example=2)
    """Optimizer updates with the samples of a step. From the second one on the trained policy is
    another than the sampling one, so that ratios differ from 1 and are clipped."""
    beta: float = number(0.0, minimum=0, maximum=1000, example=0.04)
    """Weight of the KL divergence from the model that training begins with; 0 needs no reference.
    """
    kl: str = choice("k3", "k1", "k2")
    """Its estimate (Schulman 2020): k1 = log p/q, k2 = k1^2 / 2, k3 = q/p - 1 + k1."""
    kl_in: str = choice("loss", "reward")
    """``loss`` adds it to the loss of each token, ``reward`` takes its sum from the reward."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal, which train nothing, are replaced by groups of other
    prompts (DAPO)."""
    dynamic_sampling_tries: int = number(4, minimum=1, maximum=1000)
    """How often, at most, as many other prompts are drawn as groups are to be replaced. Groups
    that are then left stay."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.kl == "k1" and self.kl_in == "loss" and self.beta:
            yield (
                "task.options.kl=k1 in the loss has a gradient of mean 0, so it holds nothing. Set "
                "task.options.kl=k3, or task.options.kl_in=reward."
            )
        if self.dynamic_sampling and self.beta and self.kl_in == "reward":
            yield (
                "task.options.dynamic_sampling=true: with the KL divergence in the reward no two "
                "rewards are equal. Set task.options.kl_in=loss task.options.kl=k3, or "
                "task.options.dynamic_sampling=false."
            )


Columns = dict[str, Sequence[float] | np.ndarray]
"""Values of each drawn token of a sample, by the name of their column."""


@dataclass(frozen=True)
class Drawn:
    """A sample of a prompt: a completion, or several and what an environment has written between
    them, with its rewards and what it is trained with. Cut where it would exceed
    ``data.seq_len``."""

    prompt: Prompt
    tokens: tuple[int, ...] = ()
    """After the prompt."""
    is_drawn: tuple[bool, ...] = ()
    """Whether the policy has drawn each of the tokens. The others are not trained."""
    logps: tuple[float, ...] = ()
    """Log-probability of each drawn token under the policy, at ``temperature``."""
    text: str = ""
    """Text of the last completion."""
    truncated: bool = False
    turns: int = 0
    age: int = 0
    """Updates that the weights which drew it are behind (``rollout.max_staleness``)."""
    of_environment: float = 0.0
    """Reward of the environment; NaN where it failed."""
    rewards: Sequence[float] = ()
    """All rewards; NaN where there is none."""
    total: float = np.nan
    """Their weighted sum, and what the KL divergence takes from it; NaN where one failed."""
    columns: Columns = field(default_factory=dict)
    """Values that its tokens are trained with."""
    advantage: float = 0.0
    """Mean advantage of its tokens, for a reader; where all have the same, also for the loss."""
    is_trained: bool = True
    """False: none of its tokens is a target."""

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens."""
        return (*self.prompt.tokens, *self.tokens)

    def sample(self) -> Sample:
        """The whole sample, for a forward pass; targets are the drawn tokens."""
        ids = np.array(self.context, np.uint32)
        targets = np.array([*[False] * len(self.prompt.tokens), *self.is_drawn], np.bool_)
        return Sample(ids, targets, np.zeros(1, np.int64))


Group = list[Drawn]
"""The samples of a prompt."""


class Grpo(OnlineTask):
    """Targets are the tokens that the policy has drawn."""

    defaults = TaskDefaults(full=1e-6, adapter=1e-5)
    takes: ClassVar[tuple[type, ...]] = (Prompted, Conversation)
    Options: ClassVar[type | None] = Options
    loss_on = "last"
    completes = True
    corrects_staleness = True

    def __init__(self, exp: Experiment, tokenizer: Any) -> None:
        super().__init__(exp, tokenizer)
        self.updates = self.options.updates
        self.normaliser = self._normaliser
        self._measures = [*map(_metric, self._rewards), "reward", *self._measured_beside]
        self._measures += [TURNS] if self.options.environment else []
        measured = (len(self._measures),)
        self.rollout_columns = (
            Column("old_logp", per="token"),
            *([Column("reference_logp", per="token")] if self.options.beta else []),
            *(Column(name, per="token") for name in self.token_columns),
            Column("advantage", per="example"),
            Column("measures", per="example", shape=measured),
            Column("measured", per="example", shape=measured),
        )
        self._failed, self._seen = Counter[str](), Counter[str]()
        """Completions by reward: those for which it failed, and all of them."""
        self._collapse = CollapseWatch(
            may_stop=exp.task.max_lost < 1 and "no_signal" in self._measures
        )

    def problems(self) -> Iterator[str]:
        """Options that no rollout can be made with, and rewards that are not there."""
        exp = self.exp
        if dropout := unused_dropout(exp):
            yield (
                f"{dropout}: task={exp.task.kind} trains without dropout, as it draws its samples. "
                "Set it to 0."
            )
        if exp.data.packing != "none":
            yield (
                f"data.packing={exp.data.packing}: for task={exp.task.kind} a sample is one "
                "prompt. Set data.packing=none."
            )
        yield from new_tokens_problems(self)
        if self.options.environment and exp.task.eval_generate:
            yield (
                f"task.eval_generate={exp.task.eval_generate}: held-out prompts are completed in "
                "one turn, without task.options.environment. Set task.eval_generate=0."
            )
        if self.corrects_staleness and exp.rollout.weights_samples:
            yield from _staleness_problems(exp, self.options)
        yield from self.options.problems()

    def encoding_identity(self) -> dict[str, Any]:
        """No option changes the stored prompts: a sweep over them prepares nothing anew."""
        return {"kind": "prompts", "version": 2, "compared": bool(self._compared)}

    def encode(self, row: Conversation) -> Example | None:
        """A conversation whose last answer is the reference, which only some rewards need; never
        cut."""
        if self._compared and not row.messages[-1].content.strip():
            raise Rejected(
                "no reference answer",
                f"has no answer that the reward {self._compared[0]} could compare with. Put it "
                'into the column "answer" (text or a number), or set task.options.rewards.',
            )
        return Example.of(row, cut="none")

    @property
    def _compared(self) -> list[str]:
        """The rewards that compare with the reference of the data."""
        return [name for name in self.options.rewards if name in ("exact_match", MATH)]

    def see_data(self, train: SampleStore, evaluation: SampleStore | None) -> list[str]:
        return [f"rewards: {', '.join(self._rewards)}"]

    def load(self) -> None:
        """Import the rewards, the environment and the metrics."""
        super().load()
        _ = self._functions
        if self.options.environment:
            self._observations.check()
            _ = self._environment

    @cached_property
    def _functions(self) -> dict[str, Reward]:
        return reward_functions(self.options)

    @cached_property
    def _environment(self) -> Callable[[], Environment]:
        return load_environment(self.options.environment)

    @cached_property
    def _observations(self) -> Observations:
        return Observations(self.tokenizer, template=self.exp.data.template)

    @cached_property
    def _rewards(self) -> dict[str, float]:
        """The weight of each reward in the sum, by the name of its metric: functions, environment,
        reward model."""
        options = self.options
        weights = options.reward_weights or [1.0] * len(options.rewards)
        rewards = dict(zip(short_names(options.rewards), weights, strict=False))
        if options.environment:
            rewards[ENVIRONMENT] = 1.0
        if options.reward_model:
            rewards[REWARD_MODEL] = options.reward_model_weight
        return rewards

    token_columns: ClassVar[tuple[str, ...]] = ()
    """Further columns by token of a sample."""

    @property
    def _normaliser(self) -> Normaliser:
        return "tokens" if self.options.loss in BY_TOKEN else "examples"

    @property
    def _measured_beside(self) -> tuple[str, ...]:
        """Measures of every generated sample beside its rewards."""
        return (
            *("reward_std", *_MEASURED),
            *([GROUPS_DRAWN] if self.options.dynamic_sampling else []),
            *([STALENESS] if self.exp.rollout.max_staleness else []),
        )

    @property
    def metrics(self) -> Mapping[str, Metric]:
        is_scored = self.exp.task.eval_generate and self.options.rewards
        both = (*TRAIN, "eval") if is_scored else TRAIN
        train = {name: _MEASURES[name] for name in self._measures if name in _MEASURES}
        if self.options.beta:
            train["kl"] = Metric("KL", kinds=TRAIN)
        if self.exp.rollout.weights_samples:
            train |= _STALE
        return {
            "reward": Metric("reward", higher_is_better=True, kinds=both),
            **{
                _metric(name): Metric(
                    _metric(name), kinds=TRAIN if name in (ENVIRONMENT, REWARD_MODEL) else both
                )
                for name in self._rewards
            },
            **train,
            "entropy": Metric("entropy", kinds=TRAIN),
            "clipped": Metric("clipped", "percent", kinds=TRAIN),
            **super().metrics,
        }

    @property
    def judged_by(self) -> str:
        """The reward: of held-out prompts where they are completed."""
        is_evaluated = self.exp.task.evaluate and self.exp.data.has_eval
        is_evaluated = is_evaluated and "eval" in self.metrics["reward"].kinds
        return "eval/reward" if is_evaluated else "train/reward"

    def models(self) -> dict[str, ModelSpec]:
        specs = {"policy": ModelSpec(dropout=False)}
        if self.options.beta:
            specs["reference"] = ModelSpec(trained=False)
        if source := self.options.reward_model:
            specs[REWARD_MODEL] = ModelSpec(
                trained=False, source=source, head=CLASSIFICATION, num_labels=1
            )
        return specs

    def rollout(
        self, models: Models, prompts: Sequence[Prompt], key: RolloutKey
    ) -> list[list[Example]]:
        """The samples of each prompt: one group, with its advantages."""
        size = self.options.group_size
        groups = self._groups(models, prompts, key.of)
        left_out = self._replace(models, groups, key)
        drawn = self._with_signals(models, [sample for group in groups for sample in group])
        if key.step % (self.exp.task.log_every_steps or 10) == 0:
            self._log_sample(drawn[0], step=key.step)
        prompt_texts = [self.decode(list(group[0].prompt.tokens)) for group in groups]
        self.generated = [
            self._generated(prompt_texts[at // size], sample) for at, sample in enumerate(drawn)
        ]
        measures, measured = self._measures_with(left_out, drawn)
        means = dict(zip(self._measures, measures.sum(0) / measured.sum(0).clip(1), strict=True))
        for warning in self._collapse.see(
            no_signal=means.get("no_signal", float(_are_equal(_spread(_totals_of(drawn))))),
            reward=means["reward"],
            tokens=means["completion_tokens"],
        ):
            _log(f"WARNING: step {key.step + 1}: {warning}")
        examples = list(map(self._example, drawn, measures, measured))
        return [examples[at : at + size] for at in range(0, len(examples), size)]

    def _with_signals(self, models: Models, drawn: Sequence[Drawn]) -> list[Drawn]:
        """The samples with what they are trained with; their totals with what the KL divergence
        takes from them. Collective."""
        import torch

        options, columns, totals = self.options, self._logps(models, drawn), _totals_of(drawn)
        if options.beta and options.kl_in == "reward":
            differences = (
                torch.tensor(column["old_logp"]) - torch.tensor(column["reference_logp"])
                for column in columns
            )
            kl = [float(kl_estimate(options.kl, values).sum()) for values in differences]
            totals = totals - options.beta * np.array(kl)
        advantages, _ = group_advantages(options.advantage, totals.reshape(-1, options.group_size))
        return [
            replace(
                sample,
                total=float(total),
                columns=column,
                advantage=float(advantage),
                is_trained=self._is_trained(sample),
            )
            for sample, total, column, advantage in zip(
                drawn, totals, columns, advantages.ravel(), strict=True
            )
        ]

    def _logps(self, models: Models, drawn: Sequence[Drawn]) -> list[Columns]:
        """The columns with the log-probabilities of each completion: under the policy, and under
        the reference where there is one. Collective."""
        columns: list[Columns] = [{"old_logp": sample.logps} for sample in drawn]
        if self.options.beta:
            references = self._over_ranks(models["reference"], drawn, self._reference_logps)
            for column, logps in zip(columns, references, strict=True):
                column["reference_logp"] = logps
        return columns

    def _is_trained(self, sample: Drawn) -> bool:
        return not (sample.truncated and self.options.mask_truncated)

    def _groups(
        self, models: Models, prompts: Sequence[Prompt], seeds: Callable[[int, int], int]
    ) -> list[Group]:
        """A group of each prompt. Collective."""
        size = self.options.group_size
        completions = self._sample(
            models, [prompt.tokens for prompt in prompts], n=size, seeds=seeds
        )
        drawn = [
            self._extended(Drawn(prompt), completion)
            for prompt, group in zip(prompts, completions, strict=True)
            for completion in group
        ]
        if self.options.environment:
            drawn = self._play(models, drawn, seeds)
        drawn = self._rewarded(models, drawn)
        return [drawn[at : at + size] for at in range(0, len(drawn), size)]

    def _sample(
        self,
        models: Models,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        seeds: Callable[[int, int], int],
    ) -> list[list[Completion]]:
        """``n`` completions of each prompt. Whatever is trained is drawn here. Collective."""
        sampling = sampling_of(self, models, top_p=self.options.top_p, top_k=self.options.top_k)
        return models.main.sample(prompts, sampling, n=n, seeds=seeds)

    def _play(
        self, models: Models, drawn: Sequence[Drawn], seeds: Callable[[int, int], int]
    ) -> list[Drawn]:
        """The samples with all their turns, after the first. All that go on make each turn
        together. Collective."""
        from llmx.models.sampling import turn_seed

        options, size = self.options, self.options.group_size
        samples, unfinished = list(drawn), list(range(len(drawn)))
        problems = [""] * len(drawn)
        episodes = Episodes(
            self._environment,
            [(row.prompt, row.reference) for row in self._scored(drawn)],
            self._observations,
            limit_s=options.reward_timeout_s,
        )
        for turn in range(1, options.max_turns + 1):
            answers = episodes.step({place: samples[place].text for place in unfinished})
            before, unfinished = unfinished, []
            for place in before:
                sample, answer = samples[place], answers[place]
                problems[place] = answer.problem
                room = self.exp.data.seq_len - len(sample.context) - len(answer.tokens)
                cut = sample.truncated or turn == options.max_turns or room < 1
                ended = not answer.tokens
                samples[place] = replace(
                    sample,
                    of_environment=(
                        np.nan if answer.problem else sample.of_environment + answer.reward
                    ),
                    truncated=sample.truncated or (cut and not ended),
                )
                if not (cut or ended):
                    unfinished.append(place)
            if not unfinished:
                break

            def seed(at: int, _: int, of: Sequence[int] = unfinished, turn: int = turn) -> int:
                return turn_seed(seeds(*divmod(of[at], size)), turn)

            contexts = [(*samples[at].context, *answers[at].tokens) for at in unfinished]
            completions = self._sample(models, contexts, n=1, seeds=seed)
            for place, (completion,) in zip(unfinished, completions, strict=True):
                samples[place] = self._extended(
                    samples[place], completion, observed=answers[place].tokens
                )
        self._report(ENVIRONMENT, problems)
        return samples

    def _replace(self, models: Models, groups: list[Group], key: RolloutKey) -> list[Group]:
        """Put groups of further prompts in the place of those without a signal, as often as the
        options allow. Returns the groups without one that are left out. Collective."""
        left_out: list[Group] = []
        if not self.options.dynamic_sampling:
            return left_out
        for attempt in range(1, self.options.dynamic_sampling_tries + 1):
            places = [at for at, group in enumerate(groups) if not self._has_signal(group)]
            prompts = key.further(attempt)[: len(places)]
            if not prompts:
                break

            def seeds(prompt: int, sample: int, first: int = attempt * len(groups)) -> int:
                return key.of(first + prompt, sample)

            drawn = self._groups(models, prompts, seeds)
            left_out += [group for group in drawn if not self._has_signal(group)]
            for place, group in zip(places, filter(self._has_signal, drawn), strict=False):
                left_out.append(groups[place])
                groups[place] = group
        return left_out

    def _has_signal(self, group: Group) -> bool:
        return not _are_equal(_spread(_totals_of(group)))

    def _extended(
        self, sample: Drawn, completion: Completion, *, observed: Sequence[int] = ()
    ) -> Drawn:
        """The sample with one more completion, after tokens of the environment."""
        room = self.exp.data.seq_len - len(sample.context) - len(observed)
        # Those of the policy that is trained: nothing removed (top_p, top_k).
        logps = completion.logps if self.options.temperature == 1 else completion.sampled_logps
        fits = len(completion.tokens) <= room
        tokens = completion.tokens[:room]
        return replace(
            sample,
            tokens=(*sample.tokens, *observed, *tokens),
            is_drawn=(*sample.is_drawn, *[False] * len(observed), *[True] * len(tokens)),
            logps=(*sample.logps, *logps[:room]),
            text=self.decode(list(completion.text_tokens if fits else tokens)),
            truncated=not fits or completion.ended != "stop",
            turns=sample.turns + 1,
            age=max(sample.age, completion.age),
        )

    def _scored(self, drawn: Sequence[Drawn]) -> list[Scored]:
        """The arguments of reward functions."""
        references = {id(sample.prompt): sample.prompt for sample in drawn}
        texts = {
            number: (self.decode(list(prompt.tokens)), self.decode(list(prompt.reference)))
            for number, prompt in references.items()
        }
        return [
            Scored(prompt, sample.text, reference, sum(sample.is_drawn))
            for sample in drawn
            for prompt, reference in (texts[id(sample.prompt)],)
        ]

    def _rewarded(self, models: Models, drawn: Sequence[Drawn]) -> list[Drawn]:
        """The samples with their rewards. Collective."""
        scores, failed = self._values(self._scored(drawn))
        if self.options.environment:
            of_environment = np.array([sample.of_environment for sample in drawn])
            scores = np.column_stack([scores, of_environment])
            failed |= np.isnan(of_environment)
        if self.options.reward_model:
            model_scores = self._over_ranks(models[REWARD_MODEL], drawn, _sequence_scores)
            scores = np.column_stack([scores, np.array(model_scores)])
        totals = _totals(scores, [*self._rewards.values()], failed)
        return [
            replace(sample, rewards=rewards, total=float(total))
            for sample, rewards, total in zip(drawn, scores.tolist(), totals, strict=True)
        ]

    def _values(self, rows: Sequence[Scored]) -> tuple[np.ndarray, np.ndarray]:
        """fp64 [rows, functions], NaN where there is no value; and bool [rows], where one
        failed."""
        outcomes = all_outcomes(
            self._functions,
            rows,
            limit_s=self.options.reward_timeout_s,
            may_abstain=len(self._rewards) > len(self._functions),
        )
        for at, name in enumerate(self._functions):
            self._report(name, [row[at].problem for row in outcomes])
        values = [[outcome.value for outcome in row] for row in outcomes]  # NaN for None
        failed = np.array([any(outcome.problem for outcome in row) for row in outcomes], np.bool_)
        return np.array(values, np.float64).reshape(len(rows), len(self._functions)), failed

    def _report(self, reward: str, problems: Sequence[str]) -> None:
        """Log the first failure of a reward. Raises ConfigError where it has failed too often."""
        failures = list(filter(None, problems))
        if failures and not self._failed[reward]:
            _log(
                f"WARNING: the reward {reward} failed: {failures[0]} Such completions train "
                "nothing; reward_failed is their share."
            )
        self._failed[reward] += len(failures)
        self._seen[reward] += len(problems)
        count, total, max_lost = self._failed[reward], self._seen[reward], self.exp.task.max_lost
        if failures and too_much(count / total, count, max_lost=max_lost):
            raise ConfigError(
                f"the reward {reward} failed for {count} of {plural(total, 'completion')}: "
                f"{failures[0]} Correct it. {rule(count / total, max_lost=max_lost)}"
            )

    def _over_ranks(
        self,
        model: Model,
        drawn: Sequence[Drawn],
        function: Callable[[Model, Batch], list[Any]],
    ) -> list[Any]:
        """``function`` of a frozen model for every sample: one value each. The ranks share the
        samples, and make as many forwards as each other. Collective."""
        from llmx.collectives import shared, world

        def values(part: Sequence[Drawn]) -> list[Any]:
            batch = collate(
                [sample.sample() for sample in part],
                seq_len=self.exp.data.seq_len,
                pad_id=self.pad_id,
                layout=model.attention.layout,
            )
            return function(model, batch)

        size, num_ranks = max(1, self.exp.batch.micro_batch), world()[0]
        batches = [drawn[at : at + size] for at in range(0, len(drawn), size)]
        batches += [[]] * (-len(batches) % num_ranks)
        return [value for part in shared(batches, values) for value in part]

    def _reference_logps(self, model: Model, batch: Batch) -> list[np.ndarray]:
        logps, _ = self._token_values(model, batch)
        return by_sequence(model, batch, logps)

    def _token_values(self, model: Model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each target token at ``temperature``, with a graph, and the entropy of
        the distribution that it is of; fp32 [n] each."""
        import torch

        def function(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scaled = logits / self.options.temperature
            normaliser = scaled.logsumexp(-1)
            with torch.no_grad():
                mean_logit = (scaled.softmax(-1) * scaled).sum(-1)
            picked = scaled.gather(1, targets[:, None]).squeeze(1)
            return picked - normaliser, normaliser.detach() - mean_logit

        logps, entropy = model.of_logits(batch, function)
        return logps, entropy

    def _measures_with(
        self, left_out: Sequence[Group], drawn: Sequence[Drawn]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Summands of each sample in the step's measures, and in their weights; the first
        one also what the groups add that are left out."""
        values = self._measured(drawn)
        measures, measured = np.nan_to_num(values), (~np.isnan(values)).astype(np.float64)
        for group in left_out:
            values = self._measured(group)
            counts = (~np.isnan(values)).sum(0)
            counts[self._measures.index(GROUPS_DRAWN)] = 0  # a ratio to those that are trained
            measures[0] += np.nan_to_num(values).sum(0)
            measured[0] += counts
        return measures, measured

    def _measured(self, drawn: Sequence[Drawn]) -> np.ndarray:
        """fp64 [samples, measures], of whole groups; NaN where there is no value."""
        size, totals = self.options.group_size, _totals_of(drawn)
        rewards = zip(*(sample.rewards for sample in drawn), strict=True)
        spread = np.repeat([_spread(group) for group in totals.reshape(-1, size)], size)
        values = {
            **dict(zip(map(_metric, self._rewards), rewards, strict=True)),
            "reward": totals,
            "reward_std": spread,
            "reward_failed": np.isnan(totals),
            "no_signal": _are_equal(spread),
            "truncated": [sample.truncated for sample in drawn],
            "completion_tokens": [sum(sample.is_drawn) for sample in drawn],
            TURNS: [sample.turns for sample in drawn],
            STALENESS: [sample.age for sample in drawn],
            GROUPS_DRAWN: np.ones(len(drawn)),
        }
        columns = [np.asarray(values[name], np.float64) for name in self._measures]
        return np.stack(columns, axis=1)

    def _example(self, drawn: Drawn, measures: np.ndarray, measured: np.ndarray) -> Example:
        sample = drawn.sample()

        def by_token(values: Sequence[float] | np.ndarray) -> np.ndarray:
            column = np.zeros(len(sample.tokens), np.float32)
            column[sample.targets] = values
            return column

        return Example.of(
            Tokens(
                sample.tokens.tolist(),
                weight=by_token([float(drawn.is_trained)] * len(drawn.logps)),
                columns={name: by_token(values) for name, values in drawn.columns.items()},
            ),
            advantage=drawn.advantage,
            measures=measures,
            measured=measured,
        )

    def _generated(self, prompt: str, drawn: Drawn) -> GeneratedSample:
        values = {**dict(zip(self._rewards, drawn.rewards, strict=True)), "reward": drawn.total}
        # Turns are told apart by their special tokens.
        text = drawn.text if drawn.turns == 1 else str(self.tokenizer.decode(drawn.tokens))
        return GeneratedSample(
            prompt,
            text,
            {name: None if np.isnan(value) else value for name, value in values.items()},
            drawn.advantage,
        )

    def _log_sample(self, drawn: Drawn, *, step: int) -> None:
        rewards = zip(self._rewards, drawn.rewards, strict=True)
        parts = ", ".join(f"{name} {reward:.3g}" for name, reward in rewards)
        text = one_line(drawn.text, limit=SHOWN)
        _log(f"a sample of step {step + 1}: reward {drawn.total:.3g} ({parts}): {text}")

    def loss(self, models: Models, batch: Batch) -> Loss:
        from llmx.models.loss import to_device

        options, policy = self.options, models.main
        logps, entropy = self._token_values(policy, batch)
        advantages = to_device(batch["advantage"], policy.device)
        sequences = to_device(policy.sequences_of_targets(batch)[0], policy.device)
        old_logps = policy.by_target(batch, "old_logp")
        reference = policy.by_target(batch, "reference_logp") if options.beta else None
        num_targets = float(len(logps))
        importance, of_staleness = None, {}
        if self.exp.rollout.weights_samples:
            # There is one update a step: the trained policy of the ratio is that of now.
            sampler_logps, old_logps = old_logps, logps.detach()
            importance, was_truncated = importance_weights(
                self.exp.rollout.importance,
                old_logps - sampler_logps,
                sequences,
                count=len(advantages),
                cap=self.exp.rollout.importance_cap,
            )
            of_staleness = {
                "sampler_kl": ((sampler_logps - old_logps).sum(), num_targets),
                "importance_truncated": (was_truncated.sum(), float(len(was_truncated))),
            }
        total, clipped, kl = policy_loss(
            options, logps, old_logps, advantages, sequences, reference, importance
        )
        metrics = self._rollout_metrics(batch) | of_staleness
        if kl is not None:
            metrics["kl"] = (kl.detach().sum(), num_targets)
        metrics["entropy"] = (entropy.sum(), num_targets)
        metrics["clipped"] = (clipped.sum(), float(len(clipped)))
        weight = num_targets if options.loss in BY_TOKEN else float(len(advantages))
        return Loss(total, weight, metrics)

    def _rollout_metrics(self, batch: Batch) -> dict[str, Any]:
        """(Sum, weight) of what was measured of the generated samples."""
        values, counts = (batch[name].double().sum(0).tolist() for name in ("measures", "measured"))
        return {name: (values[at], counts[at]) for at, name in enumerate(self._measures)}

    def score(self, prompts: Sequence[EvalPrompt], completions: Sequence[str]) -> dict[str, float]:
        """The metrics of the completions whose prompts have a reference, and the rewards of all
        without that of a reward model."""
        pairs = zip(prompts, completions, strict=True)
        answered = [(prompt, completion) for prompt, completion in pairs if prompt.expected]
        scores = super().score([prompt for prompt, _ in answered], [text for _, text in answered])
        rows = [
            Scored(
                self.decode(list(prompt.tokens)),
                completion,
                prompt.expected,
                len(self.tokenizer(completion, add_special_tokens=False)["input_ids"]),
            )
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if not rows or not self._functions:
            return scores
        values, failed = self._values(rows)
        means = {
            _metric(name): float(np.nanmean(values[:, at]))
            for at, name in enumerate(self._functions)
            if not np.isnan(values[:, at]).all()
        }
        totals = _totals(values, [self._rewards[name] for name in self._functions], failed)
        if not np.isnan(totals).all():
            means["reward"] = float(np.nanmean(totals))
        return {**scores, **means}


GROUPS_DRAWN = "groups_drawn"
"""Groups of a step in proportion to those that it trains on, with dynamic sampling."""
STALENESS = "staleness"
TURNS = "turns"
"""Completions of a sample with an environment."""
TRAIN = ("train",)
_MEASURED = ("reward_failed", "no_signal", "truncated", "completion_tokens")
_MEASURES = {
    "reward_std": Metric("reward std", kinds=TRAIN),
    "reward_failed": Metric("without reward", "percent", higher_is_better=False, kinds=TRAIN),
    "no_signal": Metric("groups of one reward", "percent", kinds=TRAIN),
    "truncated": Metric("truncated", "percent", kinds=TRAIN),
    "completion_tokens": Metric("completion tokens", kinds=TRAIN),
    GROUPS_DRAWN: Metric("groups drawn per group trained", kinds=TRAIN),
    TURNS: Metric("turns", kinds=TRAIN),
    STALENESS: Metric("staleness", kinds=TRAIN),
}
"""Metrics of every generated sample beside its rewards."""
_STALE = {
    "sampler_kl": Metric("KL of the sampler", kinds=TRAIN),
    "importance_truncated": Metric("truncated weights", "percent", kinds=TRAIN),
}
"""Metrics with ``rollout.max_staleness`` or vLLM: distance of the policies that drew and train; the
share of importance weights over ``importance_cap``."""
SAME_REWARD = 1e-8
"""Standard deviation of the rewards of a group below which they are equal."""
SHOWN = 200
"""Characters of a sample in the log."""


def _staleness_problems(exp: Experiment, options: Options) -> Iterator[str]:
    """Yield a message for each option that samples weighted by importance do not take."""
    rollout = exp.rollout
    if options.updates != 1:
        vllm = rollout.vllm_python is not None
        why = "rollout.vllm_python" if vllm else f"rollout.max_staleness={rollout.max_staleness}"
        yield (
            f"task.options.updates={options.updates}, {why}: the ratio of these samples is taken "
            "against the policy of their one update. Set task.options.updates=1, or "
            f"{'leave rollout.vllm_python out' if vllm else 'rollout.max_staleness=0'}."
        )
    if options.loss in ("gspo", "rloo") and rollout.importance == "token":
        yield (
            f"task.options.loss={options.loss} has one ratio for a completion, and "
            "rollout.importance=token one weight for each token. Set rollout.importance=sequence."
        )


def by_sequence(model: Model, batch: Batch, values: torch.Tensor) -> list[np.ndarray]:
    """``values`` of the target tokens of a batch, by its sequences."""
    sequences, count = model.sequences_of_targets(batch)
    array = values.cpu().numpy()
    return [array[sequences.numpy() == number] for number in range(count)]


def _metric(reward: str) -> str:
    """The metric of one reward."""
    return f"reward/{reward}"


def _totals(rewards: np.ndarray, weights: Sequence[float], failed: np.ndarray) -> np.ndarray:
    """fp64 [rows], the weighted sums of fp64 [rows, rewards] without those that are NaN; NaN for
    rows that ``failed``, or of which nothing is left."""
    totals: np.ndarray = np.nansum(rewards * np.array(weights), axis=1)
    totals[failed | np.isnan(rewards).all(axis=1)] = np.nan
    return totals


def _totals_of(drawn: Sequence[Drawn]) -> np.ndarray:
    return np.array([sample.total for sample in drawn])


def _spread(totals: np.ndarray) -> float:
    """The standard deviation of the rewards of completions; NaN without two rewards."""
    return float(group_advantages("centred", totals[None])[1][0])


def _are_equal(spread: Any) -> Any:
    """Whether rewards with this standard deviation (also an array of them) train nothing."""
    return np.isnan(spread) | (spread < SAME_REWARD)


def _sequence_scores(model: Model, batch: Batch) -> list[float]:
    scores: list[float] = model.logits(batch)[:, 0].tolist()
    return scores


def _log(text: str) -> None:
    """One line in the log of the run, by rank 0."""
    from llmx.collectives import world

    if world()[1] == 0:
        print(f"{text}\n", end="", flush=True)
