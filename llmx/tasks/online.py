"""Tasks that generate the samples they are trained on, from the prompts of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from llmx.config import Experiment
from llmx.config.fields import AUTO
from llmx.data.examples import Column, Example
from llmx.models.sampling import Sampling, sample_seed
from llmx.tasks.base import Measures, Task

if TYPE_CHECKING:
    from llmx.models.model import Batch, Models


@dataclass(frozen=True)
class Prompt:
    """One example of the data, from which samples are drawn."""

    tokens: tuple[int, ...]
    """The first sequence up to the first target: of a conversation, the cue to answer is the
    last. The whole sequence where it has no target."""
    completions: tuple[tuple[int, ...], ...]
    """Tokens after the prompt, of each sequence of the example; may be empty."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the stored example: an array by sequence, or the value of the example."""

    @property
    def reference(self) -> tuple[int, ...]:
        """The completion of the first sequence: the right answer, or the better of a pair."""
        return self.completions[0]


@dataclass(frozen=True)
class RolloutKey:
    """Key of all that is random in a rollout, never a global state."""

    seed: int
    """Seed of the run."""
    step: int
    further: Callable[[int], Sequence[Prompt]] = lambda _: ()
    """Other prompts of the data in place of those of the step, about as many as it has; other ones
    for each number from 1."""

    def of(self, prompt: int, sample: int) -> int:
        """The seed of one sample: ``prompt`` counts those of the step, over all ranks."""
        return sample_seed(self.seed, step=self.step, prompt=prompt, sample=sample)


@dataclass(frozen=True)
class GeneratedSample:
    """A sample that was generated and trained on, for a reader."""

    prompt: str
    completion: str
    rewards: Mapping[str, float | None]
    """Parts of the reward and their sum; None where one failed."""
    advantage: float


class OnlineTask(Task):
    """A task whose data are prompts, and whose steps are made by ``rollout``."""

    corrects_staleness: ClassVar[bool] = False
    """Whether its loss is right for samples of older weights (``rollout.max_staleness``)."""
    rollout_columns: tuple[Column, ...] = ()
    """Values of generated examples beside their tokens, as ``columns``."""
    generated: Sequence[GeneratedSample] = ()
    """The samples of the newest rollout, for ``rollouts.jsonl`` and the report."""

    @classmethod
    def auto_options(cls, exp: Experiment) -> dict[str, Any]:
        """Completions that leave a prompt half of the sequence, where their length is ``auto``."""
        is_auto = getattr(cls.Options, "max_new_tokens", None) == AUTO
        if exp.task.options.get("max_new_tokens", "auto" if is_auto else None) != "auto":
            return {}
        return {"max_new_tokens": min(256, exp.data.seq_len // 2)}

    @property
    def evaluates_loss(self) -> bool:
        return type(self).evaluate is not OnlineTask.evaluate

    def evaluate(self, models: Models, batches: Iterable[Batch]) -> Measures:
        """Nothing: the data has prompts alone."""
        return {}

    def rollout(
        self, models: Models, prompts: Sequence[Prompt], key: RolloutKey
    ) -> list[list[Example]]:
        """The examples of each prompt of a step, of ``Tokens``. Collective: all ranks give the
        same for the same. Gradients are off, as dropout is."""
        raise NotImplementedError(f"{type(self).__name__}.rollout")


def new_tokens_problems(task: OnlineTask) -> Iterator[str]:
    """Yield a message where completions are longer than a sample."""
    new_tokens, seq_len = task.options.max_new_tokens, task.exp.data.seq_len
    if new_tokens >= seq_len:
        yield (
            f"task.options.max_new_tokens={new_tokens}: prompt and completion are at most "
            f"data.seq_len={seq_len} tokens. Set task.options.max_new_tokens=auto."
        )


def sampling_of(task: OnlineTask, models: Models, **limits: Any) -> Sampling:
    """How the options of a task have completions drawn: each ends with a stop token."""
    from llmx.models.generate import stop_ids

    return Sampling(
        temperature=task.options.temperature,
        max_new_tokens=task.options.max_new_tokens,
        stop_ids=frozenset(stop_ids(models.main.module, task.tokenizer)),
        **limits,
    )
