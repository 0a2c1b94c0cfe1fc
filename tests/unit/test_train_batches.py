"""The parts that ranks take of a step cover it once, and errors of the thread come out."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from llmx.config import RolloutConfig
from llmx.data import Column, Conversation, Example, Sample, Tokens
from llmx.data.order import samples_of_step
from llmx.data.store.samples import SampleStore
from llmx.errors import ConfigError
from llmx.models.loss import IGNORE
from llmx.plan.types import BatchPlan
from llmx.run.rundir import RunDir
from llmx.run.tail import LAST_BYTES, newest_samples, read_records
from llmx.tasks import GeneratedSample, OnlineTask, Prompt, Task
from llmx.train import rollout
from llmx.train.batches import Layout, Step, make_step, prefetched
from llmx.train.evaluation import slices
from llmx.train.loop import write_beginning
from llmx.train.resume import ResumePoint
from llmx.train.rollout import prompts_of, rollout_step
from tests.programs.state import job_experiment, task_of
from tests.reference import SEQ_LEN, naive_gradient, paired_store, synthetic_store, word_tokenizer

LAYOUT = Layout(seq_len=SEQ_LEN, pad_id=0, layout="packed")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    return synthetic_store(tmp_path_factory.mktemp("batches") / "store")


@pytest.mark.parametrize(("micro", "accumulation"), [((6, 6), 1), ((3, 1), 3), ((1, 1, 2), 3)])
@pytest.mark.parametrize("left", [1, 7, 11, 12, None])
def test_ranks_share_a_step_without_gap_or_overlap(store, micro, accumulation, left) -> None:
    """Also one that is short, the last one; it goes on into the next epoch."""
    batch, number = BatchPlan(12, accumulation, micro, SEQ_LEN), 3
    stop, known = 36 + left if left else None, {"seed": 5, "layout": LAYOUT}
    steps = [
        make_step(store, number, batch=batch, rank=rank, stop=stop, draws=True, **known)
        for rank in range(len(micro))
    ]
    samples = samples_of_step(number, global_batch=12, num_samples=len(store), seed=5)[:left]
    # As many micro batches as ever, on every rank: the collectives of ZeRO match.
    assert {len(step.micro_batches) for step in steps} == {accumulation}
    if left in (12, None):
        seen = [[len(m["input_ids"]) for m in step.micro_batches] for step in steps]
        assert seen == [[size] * accumulation for size in micro]
    lines = [
        line[segments > 0].tolist()
        for parts in zip(*(step.micro_batches for step in steps), strict=True)
        for part in parts
        for line, segments in zip(part["input_ids"], part["segment_ids"], strict=True)
        if segments.any()
    ]
    assert lines == [store[int(index)].tokens.tolist() for index in samples]
    # A seed for each sequence, the same for every split, and others in the next step.
    parts = chain.from_iterable(zip(*(step.micro_batches for step in steps), strict=True))
    seeds = [seed for part in parts for seed in part["draw_seeds"].tolist()]
    whole = BatchPlan(12, 1, (12,), SEQ_LEN)
    one, later = (
        make_step(store, at, batch=whole, rank=0, stop=stop if at == number else None, draws=True,
                  **known).micro_batches[0]["draw_seeds"].tolist()
        for at in (number, number + 1)
    )  # fmt: skip
    assert seeds == one
    assert len(set(seeds)) == len(seeds)
    assert not set(seeds) & set(later)
    plain = make_step(store, number, batch=whole, rank=0, **known)
    assert "draw_seeds" not in plain.micro_batches[0]
    targets = [(m["labels"] != IGNORE).sum() for step in steps for m in step.micro_batches]
    assert {step.target_tokens for step in steps} == {int(sum(targets))}
    assert {step.tokens for step in steps} == {sum(map(len, lines))}
    rows = [tokens for index in samples for tokens, _ in store[int(index)].sequences()]
    assert sum(step.square_tokens for step in steps) == sum(len(tokens) ** 2 for tokens in rows)


@pytest.mark.parametrize("num_samples", [1, 5, 8, 13])
def test_evaluation_takes_every_sample_once_in_as_many_forwards(num_samples: int) -> None:
    micro = (3, 1)
    parts = [slices(num_samples, micro_batches=micro, rank=rank) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == -(-num_samples // 4)
    assert sorted(i for part in parts for s in part for i in s) == list(range(num_samples))
    assert all(len(s) <= micro[rank] for rank, part in enumerate(parts) for s in part)


@pytest.mark.parametrize("count", [7, 10**9])
def test_prefetch_keeps_the_order_and_does_not_run_far_ahead(count: int) -> None:
    """Its error comes out where it happened; and it may be closed in the middle."""
    made: list[int] = []

    def failing() -> Iterator[Step]:
        for number in range(count):
            made.append(number)
            yield Step(number, (), weight=0, target_tokens=0, tokens=0, square_tokens=0)
        raise OSError("the disk is gone")

    found = prefetched(failing())
    assert [next(found).step for _ in range(7)] == list(range(7))
    if count == 7:
        with pytest.raises(OSError, match="the disk is gone"):
            next(found)
    found.close()
    assert len(made) < 18
    assert not [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]


def test_batches_for_a_gpu_are_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[torch.Tensor] = []

    def pin_memory(values: torch.Tensor) -> torch.Tensor:
        locked.append(values.clone())
        return locked[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    batch = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    step = Step(0, (batch, batch), weight=8, target_tokens=8, tokens=8, square_tokens=32)
    (found,) = list(prefetched([step], pin=True))
    assert len(locked) == 4
    assert all(values is locked[n] for n, values in enumerate(found.micro_batches[0].values()))


# --- What a task generates: prompts, examples, errors ---------------------------------------------

LABEL = Column("label", per="example", dtype="int64")
SCORE = Column("score", per="sequence")


def sample() -> Sample:
    """A pair [1 2 | 3], [1 2 | 4 5] and a sequence without a target."""
    return Sample(
        tokens=np.array([1, 2, 3, 1, 2, 4, 5, 6, 7], np.uint32),
        targets=np.array([0, 0, 1, 0, 0, 1, 1, 0, 0], np.bool_),
        sequence_starts=np.array([0, 3, 7]),
        example_starts=np.array([0, 2]),
        columns={"label": np.array([8, 9]), "score": np.array([0.5, 1.5, 2.5], np.float32)},
    )


def test_each_example_of_the_data_is_a_prompt() -> None:
    pair, alone = prompts_of(sample(), (LABEL, SCORE))
    assert (pair.tokens, pair.completions) == ((1, 2), ((3,), (4, 5)))
    assert (pair.reference, pair.columns["label"]) == ((3,), 8)
    assert pair.columns["score"].tolist() == [0.5, 1.5]
    assert (alone.tokens, alone.reference, alone.columns["label"]) == ((6, 7), (), 9)


class Store(list[Sample]):
    columns = (LABEL, SCORE)


class Pairs(OnlineTask):
    """Two sequences for each prompt; those of an example that has no completion are left out."""

    rollout_columns: ClassVar[tuple[Column, ...]] = (
        Column("weight", per="token"), Column("old", per="token"), LABEL, SCORE,
    )  # fmt: skip
    normaliser = "tokens"
    name = "pairs"

    def __init__(self) -> None:
        pass

    def rollout(self, models: Any, prompts: Any, key: Any) -> list[list[Example]]:
        return [self.of(number, prompt) for number, prompt in enumerate(prompts)]

    def of(self, number: int, prompt: Prompt) -> list[Example]:
        if not prompt.reference:
            return []
        ids = [*prompt.tokens, 10 + number]
        tokens = Tokens(ids, weight=[0, 0, 0.5], columns={"old": [0, 0, -number]})
        return [Example.of(tokens, tokens, label=number, score=[1, 2])]


class Drawing(Pairs):
    draws = True


def step_of(
    task: Task, *, rank: int = 0, micro: tuple[int, ...] = (2, 1), store: Any = None
) -> Any:
    engine: Any = SimpleNamespace(
        engine=SimpleNamespace(eval=lambda: None, train=lambda: None),
        models={},
        vocab_size=50,
        stage=2,
    )
    batch, layout = BatchPlan(3, 1, micro, 16), Layout(seq_len=16, pad_id=0, layout="packed")
    store = store or Store([sample()] * 4)
    return rollout_step(engine, task, store, 0, batch=batch, rank=rank, seed=1, layout=layout)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "all_gather", lambda value: [value])


def test_every_rank_trains_what_its_prompts_gave() -> None:
    first, second = step_of(Pairs()), step_of(Pairs(), rank=1)
    assert first.weight == second.weight == 3 * 2 * 0.5
    assert first.target_tokens == second.target_tokens == 6
    assert first.tokens == 18
    assert [one.work for one in (first, second)] == [16, 8]  # lines of 6, padded to 8
    (batch,), (other,) = first.micro_batches, second.micro_batches
    # The second example of each sample gave nothing: prompts 0, 2 and 4 of the step.
    assert batch["label"].tolist() == [0, 2]
    assert other["label"].tolist() == [4]
    assert batch["example_ids"].tolist() == [0, 0, 1, 1], "a pair lies in one line"
    assert batch["score"].tolist() == [1, 2, 1, 2]
    assert batch["input_ids"][1, :6].tolist() == [1, 2, 12, 1, 2, 12]
    assert batch["labels"][1, :6].tolist() == [-100, 12, -100, -100, 12, -100]
    assert batch["weights"][1, :6].tolist() == [0, 0.5, 0, 0, 0.5, 0]
    assert batch["old"][1, :6].tolist() == [0, -2, 0, 0, -2, 0]
    assert "draw_seeds" not in batch


@pytest.mark.parametrize(
    ("many", "labels"),
    [(1, [[[0, 2]], [[4]]]), (4, [[[0, 0], [0, 0], [2, 2], [2, 2]], [[4]] * 4])],
)
def test_a_micro_batch_has_no_more_samples_than_the_plan_foresees(many, labels) -> None:
    """So many examples of each prompt: as many parts on every rank, in the order of the step; and
    a seed for each sequence, the same whichever rank has its prompt."""

    class Many(Drawing):
        def of(self, number: int, prompt: Prompt) -> list[Example]:
            return super().of(number, prompt) * many

    ranks = [step_of(Many(), rank=rank).micro_batches for rank in (0, 1)]
    assert [[batch["label"].tolist() for batch in batches] for batches in ranks] == labels
    whole = step_of(Many(), micro=(3 * many, 0)).micro_batches
    seeds = torch.cat([batch["draw_seeds"] for batches in ranks for batch in batches])
    assert torch.equal(seeds, torch.cat([batch["draw_seeds"] for batch in whole]))
    assert len(set(seeds.tolist())) == 3 * many * 2


def test_without_weights_targets_are_whole() -> None:
    class Plain(Pairs):
        rollout_columns = ()
        normaliser = "examples"

        def of(self, number: int, prompt: Prompt) -> list[Example]:
            return [Example.of(Tokens([1, 2, 3], weight=[1, 0, 1]))] * 2

    step = step_of(Plain())
    assert step.weight == 3 * 2 * 2
    assert step.micro_batches[0]["labels"][0, :3].tolist() == [-100, 3, -100]
    assert "weights" not in step.micro_batches[0]


def old(*ids: int) -> Tokens:
    return Tokens([*ids], columns={"old": [0] * len(ids)})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([[]], "gave 1 lists of examples for 6 prompts"),
        ([["x"]] * 6, "rollout() gave str; it gives lists of Examples"),
        ([[Example.of(Tokens([1]))]] * 6,
         "and the task declares label, score by sequence and by example. Declare them in "
         "`rollout_columns`"),
        ([[Example.of(Conversation((), ""), label=1, score=[1])]] * 6,
         "the sequences of generated examples are Tokens; rollout() gave Conversation"),
        ([[Example.of(Tokens([1]), label=1, score=[1])]] * 6,
         "Tokens have the columns none, and the task declares old by token in `rollout_columns`"),
        ([[Example.of(old(50), label=1, score=[1])]] * 6,
         "each from 0 to 49 (the last of the vocabulary); rollout() gave"),
        ([[Example.of(old(*[1] * 9), old(*[1] * 9), label=1, score=[1, 1])]] * 6,
         "an example of 18 tokens (of all its sequences together), data.seq_len is 16"),
    ],
)  # fmt: skip
def test_what_a_task_generates_is_checked(made: Any, message: str) -> None:
    class Wrong(Pairs):
        def rollout(self, models: Any, prompts: Any, key: Any) -> list[list[Example]]:
            return made  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match=re.escape(message)):
        step_of(Wrong())


def test_ranks_that_generate_other_tokens_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "all_gather", lambda value: [value, "another"])
    with pytest.raises(ConfigError, match=r"other examples on rank 1 than on rank 0"):
        step_of(Pairs())


def test_further_prompts_are_the_same_for_every_split() -> None:
    """As many as the step has of each number, others for each, and again the same; and gradients
    are off meanwhile."""

    class Asking(Pairs):
        def rollout(self, models: Any, prompts: Any, key: Any) -> list[list[Example]]:
            assert not torch.is_grad_enabled()
            asked.append([[prompt.tokens for prompt in key.further(n)] for n in range(1, 9)])
            return super().rollout(models, prompts, key)

    store = Store(replace(sample(), tokens=np.arange(9) + at) for at in range(30))
    asked: list[Any] = []
    for rank, micro in ((0, (2, 1)), (1, (2, 1)), (0, (3, 0))):
        step_of(Asking(), rank=rank, micro=micro, store=store)
    assert torch.is_grad_enabled()
    assert asked[0] == asked[1] == asked[2]
    assert all(len(prompts) == 6 for prompts in asked[0]), "two of each of three samples"
    assert len({*chain.from_iterable(asked[0])}) > 20


def test_the_rollout_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO on a small model without an engine: a gradient for the policy, none for the reference;
    and log-probabilities of generation and of training are the same, so that KL is 0 at first."""
    page = (Path(__file__).parents[2] / "docs" / "custom-tasks.md").read_text(encoding="utf-8")
    every = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    (tmp_path / "grpo_of_docs.py").write_text(next(code for code in every if "class Grpo" in code))
    monkeypatch.syspath_prepend(tmp_path)
    job = {"world": 1, "stage": 0, "micro_batches": [4], "task": "grpo_of_docs:Grpo"}
    options = {"max_new_tokens": 5}
    exp, _ = job_experiment({**job, "accumulation": 1, "options": options}, tmp_path)
    task, losses = task_of(exp), []
    loss = task.loss

    def kept(models: Any, batch: Any) -> Any:
        losses.append(loss(models, batch))
        return losses[-1]

    monkeypatch.setattr(task, "loss", kept)
    _, gradient = naive_gradient(
        exp, task, paired_store(tmp_path / "pairs"), word_tokenizer(), global_batch=4
    )
    assert {name.split(".")[0] for name in gradient} == {"policy"}
    assert any(values.any() for values in gradient.values())
    assert len(losses) % task.options.group == 0
    for one in losses:
        assert float(one.metrics["kl"]) == pytest.approx(0.0, abs=1e-6)
    # At a ratio of 1 the loss of a sequence is its advantage times its tokens; those of a group
    # add up to nothing.
    advantages = [float(one.sum.detach()) / one.weight for one in losses[: task.options.group]]
    assert sum(advantages) == pytest.approx(0.0, abs=1e-4)


def test_samples_are_appended_and_those_of_the_newest_step_are_shown(tmp_path: Path) -> None:
    run, long = RunDir(tmp_path), "é" * 40_000
    for step, attempt in ((1, 1), (2, 1), (2, 2)):
        samples = [
            GeneratedSample(f"{step}?", f"{attempt}.{number}{long}", {"reward": None}, 0.5)
            for number in range(18)
        ]
        rollout.write_rollouts(run, samples, step=step, attempt=attempt)
    lines = read_records(run.rollouts)
    assert [(line["step"], line["attempt"]) for line in lines[::18]] == [(1, 1), (2, 1), (2, 2)]
    assert long in run.rollouts.read_text(), "as a person reads it"
    shown = newest_samples(run.rollouts)
    assert shown == lines[-len(shown) :], "of the end of a large file"
    assert LAST_BYTES // 90_000 < len(shown) <= LAST_BYTES // 80_000
    with run.rollouts.open("a") as stream:
        stream.write(json.dumps(dict(lines[0], step=3, prompt="new", completion="")) + "\n")
    assert [line["prompt"] for line in newest_samples(run.rollouts)] == ["new"]
    assert newest_samples(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (RolloutConfig(), ""),
        (RolloutConfig(max_staleness=1), "rollout.max_staleness=1"),
        (RolloutConfig(vllm_python="/opt/vllm/bin/python"), "rollout.vllm_python"),
    ],
)
def test_a_resume_that_cannot_repeat_its_samples_says_so(config: RolloutConfig, why: str) -> None:
    lines: list[str] = []
    session: Any = SimpleNamespace(
        resume_point=ResumePoint(step=4, attempt=2, is_first=False),
        engine=SimpleNamespace(module=torch.nn.Linear(1, 1)),
        exp=SimpleNamespace(rollout=config, adapter=SimpleNamespace(kind="none")),
        servers=object(),
        length=SimpleNamespace(steps=9),
        plan=SimpleNamespace(world_size=1),
        metrics=SimpleNamespace(event=lambda *_, **__: None),
        declared_metrics={},
        log=lines.append,
    )
    write_beginning(session)
    assert lines[1] == "resuming from step 4 of 9 (attempt 2)"
    ahead = "the samples of the steps after it are drawn anew, and are others than before"
    assert lines[2:] == ([f"{why}: {ahead}"] if why else [])
