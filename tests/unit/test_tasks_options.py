"""What a task chooses and refuses while a config is composed: the learning rate and the batch (the
table of docs/training.md), options and settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmx.compose.complete import check, complete, objective_of
from llmx.compose.task_rules import (
    defaults_of,
    origin_of_batch,
    origin_of_lr,
    rollout_line,
    task_problems,
    task_warnings,
)
from llmx.config import Experiment, experiment_from_dict
from llmx.config.groups import CONF
from llmx.config.schema import TaskConfig
from llmx.config.tasks import shipped_tasks
from llmx.errors import ConfigError
from tests.composing import composed, values
from tests.rollouts import of_task

# Learning rate and batch

MODEL = ["model=llama3_8b", "hardware=a100x8"]
LORA = [*MODEL, "adapter=lora"]
SCRATCH = ["model=tiny", "hardware=a100x8"]
STEP = "default of task=sft, pretrained"
ROUND = "one micro step of all ranks, since batch.global_batch is not set"


def test_the_docs_have_the_table() -> None:
    page = Path(__file__).parents[2].joinpath("docs/training.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \| (\d+) \| (\S+) \| (\d+) \|", page, re.M
    )
    written = {
        name: tuple(None if number == "-" else float(number) for number in numbers)
        for name, *numbers in rows
    }
    epochs = {
        path.stem: yaml.safe_load(path.read_text())["epochs"]
        for path in (CONF / "task").glob("*.yaml")
    }
    assert written == {
        name: (row.full, row.adapter, row.scratch, row.batch, row.scratch_batch, epochs[name])
        for name, row in ((name, defaults_of(name)) for name in shipped_tasks())
    }


@pytest.mark.parametrize(
    ("words", "rate", "adapter_rate", "origin"),
    [
        (MODEL, 2e-5, None, "default of task=sft, pretrained"),
        ([*MODEL, "task=dpo"], 1e-6, None, "default of task=dpo, pretrained"),
        (LORA, 2e-5, 2e-4, "default of task=sft, adapter"),
        ([*LORA, "optim.lr=5e-7"], 5e-7, None, "typed: optim.lr=5e-7"),
        ([*LORA, "adapter.lr=3e-4"], 2e-5, 3e-4, "typed: adapter.lr=3e-4"),
        ([*MODEL, "optim=lion"], 5e-6, None, "default of task=sft, pretrained"),
        (["model=tiny"], 3e-4, None, "default of task=sft, from scratch"),
        ([*MODEL, "optim=muon"], 3e-4, None, "set by optim=muon"),
        (["experiment=demo"], 6e-3, None, "set by experiment=demo"),
    ],
)
def test_the_learning_rate_and_what_set_it(words, rate, adapter_rate, origin) -> None:
    exp = composed(words).experiment
    assert exp.optim.lr == pytest.approx(rate)
    assert exp.adapter.lr == adapter_rate
    assert origin_of_lr(exp, words) == origin


@pytest.mark.parametrize(
    ("base", "words", "samples", "step", "micro_batch"),
    [
        (MODEL, "", 32, STEP, "default"),
        (MODEL, "batch.micro_batch=16", 128, STEP, "typed: batch.micro_batch=16"),
        (MODEL, "batch.global_batch=16", 16, "typed: batch.global_batch=16", "default"),
        (MODEL, "batch.micro_batch=auto", 32, STEP, "chosen by the plan"),
        (
            *(MODEL, "batch=tokens_2m data.seq_len=2048", 1024),
            *("set by batch=tokens_2m", "set by batch=tokens_2m"),
        ),
        (SCRATCH, "", 8, ROUND, "default"),
        (
            *(SCRATCH, "task=pretrain batch.micro_batch=3", 264),
            *("default of task=pretrain, from scratch", "typed: batch.micro_batch=3"),
        ),
    ],
)
def test_the_batch_and_what_set_it(base, words, samples, step, micro_batch) -> None:
    words = [*base, *words.split()]
    done = composed(words)
    assert done.plan.batch.global_batch == samples
    assert origin_of_batch(done.experiment, words) == f"{step}; micro batch: {micro_batch}"


# Options


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pretrain", {"beta": 0.2}, "this task has no options"),
        ("sft", {"neftune_alpha": -1}, "task.options.neftune_alpha=-1: must be … from 0"),
        ("dpo", {"loss": "dpo"}, "task.options.loss=dpo: must be one of sigmoid, robust, hinge"),
        ("dpo", {"bta": 0.2}, 'task.options.bta: unknown key…Did you mean "beta"?'),
        ("dpo", {"beta": 0}, "task.options.beta=0: must be a …number above 0"),
        ("dpo", {"reference": "none"}, "must be one of stored, live, free"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing=0.5: must be a number from 0"),
        ("dpo", {"loss": "robust"}, "Set e.g. task.options.label_smoothing=0.1"),
        ("dpo", {"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1 has no effect"),
        (
            "distill",
            {"teacher": ""},
            "task.options.teacher is empty…e.g. task.options.teacher=Qwen",
        ),
        ("distill", {"loss": "kl"}, "must be one of forward_kl, reverse_kl, jsd"),
        ("distill", {"temperature": 0}, "task.options.temperature=0: must be a number above 0"),
        ("distill", {"top_k": 0}, "task.options.top_k=0: must be"),
        ("distill", {"teacher_logits": "cached"}, "must be one of stored, live"),
        ("distill", {"alpha": 1}, "task.options.alpha=1: must be a number from 0 to below 1"),
        (
            "distill",
            {"teacher_revision": "v1", "teacher": "/x"},
            "local directory has no revisions",
        ),
        ("distill", {"on_policy": True, "teacher_logits": "stored"}, "Set …teacher_logits=live"),
        (
            "distill",
            {"on_policy": True, "alpha": 0.5},
            "alpha=0.5 with on_policy=true: …Set…alpha=0",
        ),
        ("distill", {"max_new_tokens": 9}, "max_new_tokens=9 has no effect: …Set…on_policy=true"),
        ("grpo", {"max_new_tokens": -1}, "max_new_tokens=-1: must be a whole number from 1"),
        ("grpo", {"loss": "ppo"}, "must be one of dapo, grpo, dr_grpo, gspo, cispo, rloo"),
        ("grpo", {"rewards": ["exactmatch"]}, "rewards[0]=exactmatch: must be exact_match, format"),
        ("grpo", {"rewards": []}, "rewards is empty"),
        ("grpo", {"rewards": ["format"]}, "task.options.format is not set"),
        ("grpo", {"rewards": ["overlong"]}, "overlong_buffer is 0"),
        ("grpo", {"format": "a"}, "format=a has no effect without the reward format"),
        ("grpo", {"rewards": ["format"], "format": "("}, "is not a regular expression"),
        ("grpo", {"rewards": ["my:reward_model"]}, "two are called reward_model"),
        ("grpo", {"rewards": ["a:b", "c:b"]}, "two are called b"),
        ("grpo", {"rewards": ["a:b", "a:c"], "reward_weights": [1.0]}, "1 values for 2 rewards"),
        ("grpo", {"environment": "Calculator"}, "environment=Calculator: must be package.module:"),
        (
            *("grpo", {"environment": "a:B", "rewards": ["overlong"], "overlong_buffer": 2}),
            "judges the length of one completion",
        ),
        ("grpo", {"kl": "k1", "beta": 0.1}, "gradient of mean 0"),
        (
            *("grpo", {"dynamic_sampling": True, "beta": 0.1, "kl_in": "reward"}),
            "no two rewards are equal",
        ),
        ("grpo", {"temperature": 0.5, "top_p": 0.9}, "temperature=0.5 with top_k or top_p"),
        ("grpo", {"group_size": 1}, "group_size=1: must be a whole number from 2"),
        ("ppo", {"clip": 0}, "task.options.clip=0: must be a number above 0"),
        ("ppo", {"gae_lambda": 2}, "task.options.gae_lambda=2: must be a number from 0 to 1"),
        ("ppo", {"advantage": "centred"}, "unknown key"),
        ("mlm", {"mask_probability": 0.0}, "mask_probability=0: must be a number above 0"),
        ("mlm", {"mask_token_part": 1.5}, "mask_token_part=1.5: must be a number from 0 to 1"),
        ("mlm", {"random_token_part": 0.3}, "=0.3: the sum with mask_token_part=0.8 is over"),
        ("embed", {"matryoshka_dims": [0]}, "matryoshka_dims=[0]: must be different"),
        ("embed", {"matryoshka_dims": [8, 8]}, "matryoshka_dims=[8, 8]: must be different"),
        ("classify", {"problem": "regression", "balance": "inverse"}, "has no classes"),
        (
            *("classify", {"balance": "inverse", "class_weights": {"a": 2.0}}),
            "both weight the classes",
        ),
        (
            *("classify", {"problem": "multi_label", "label_smoothing": 0.1}),
            "applies to problem=single_label",
        ),
        ("classify", {"class_weights": {"bad": -2.0}}, "weights must be 0 or more"),
    ],
)
def test_wrong_options_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    """``…``: anything."""
    given = {"teacher": "owner/teacher", **options} if kind == "distill" else options
    problems = task_problems(Experiment(task=TaskConfig(kind=kind, options=given)))
    pattern = ".*".join(map(re.escape, message.split("…")))
    assert re.search(pattern, "\n".join(problems)), problems


# What a task that generates takes


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_settings_that_a_rollout_does_not_take_are_refused(kind: str) -> None:
    exp = of_task(kind, max_new_tokens=8)
    assert task_problems(exp) == []
    (warning,) = task_warnings(exp)
    assert f"task={kind} generates its samples. The plan counts completions" in warning
    exp.data.packing, exp.data.seq_len = "best_fit", 8
    exp.model.config["resid_pdrop"] = 0.1
    dropout, packing, length = task_problems(exp)
    assert f"model.config.resid_pdrop=0.1: task={kind} trains without dropout" in dropout
    assert f"data.packing=best_fit: for task={kind} a sample is one prompt" in packing
    assert "Set data.packing=none" in packing
    assert length.startswith("task.options.max_new_tokens=8: prompt and completion are at most")
    assert length.endswith("Set task.options.max_new_tokens=auto.")


LONG = "data.seq_len=600 model.config.max_position_embeddings=600"


@pytest.mark.parametrize(
    ("words", "packing", "max_new_tokens"),
    [
        ("task=grpo", "none", 64),  # of the demo: data.seq_len=128
        (f"task=rloo {LONG}", "none", 256),
        ("task=grpo task.options.max_new_tokens=9", "none", 9),
        ("task=ppo optim=adamw", "none", 64),
        ("task=sft", "best_fit", None),
    ],
)
def test_packing_and_the_length_of_completions_follow_from_the_task(
    words: str, packing: str, max_new_tokens: int | None
) -> None:
    exp = composed(["experiment=demo", *words.split()]).experiment
    assert exp.data.packing == packing
    assert exp.task.options.get("max_new_tokens") == max_new_tokens
    line = f"(data.packing=none); at most {max_new_tokens} new tokens"
    assert (line in rollout_line(exp)) == (packing == "none")


FILES = ["data=file", "data.path=/data/q.jsonl", "model=tiny", "data.seq_len=128"]
HELD_OUT = [*FILES, "data.eval_samples=8"]
SCORED = ["task=grpo", "task.eval_generate=8"]


@pytest.mark.parametrize(
    ("words", "metric"),
    [
        ([*HELD_OUT], "eval/loss"),
        ([*FILES], "train/loss"),
        ([*HELD_OUT, "task.evaluate=false"], "train/loss"),
        ([*HELD_OUT, *SCORED], "eval/reward"),
        ([*HELD_OUT, *SCORED, "task=ppo"], "eval/reward"),
        ([*FILES, *SCORED], "train/reward"),
        ([*HELD_OUT, "task=grpo"], "train/reward"),
        ([*HELD_OUT, *SCORED, "task.options.rewards=[]", "task.options.reward_model=a/b"],
         "train/reward"),
        ([*HELD_OUT, "task=distill", "task.options.teacher=a/b", "task.options.on_policy=true"],
         "eval/loss"),
        ([*HELD_OUT, "task.kind=llmx.tasks.sft:Sft"], "auto"),
    ],
)  # fmt: skip
def test_each_task_names_the_metric_it_is_judged_by(words: list[str], metric: str) -> None:
    exp, _ = complete(experiment_from_dict(values(words)))
    assert exp.checkpoint.metric == metric
    assert objective_of(exp) == metric.replace("auto", "eval/loss")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("checkpoint.metric=eval/loss", "eval/loss: task grpo does not measure it here. It"),
        ("checkpoint.metric=eval/reward", "checkpoint.metric=eval/reward: task grpo does not"),
        ("sweep.objective=eval/loss", "sweep.objective=eval/loss: task grpo does not measure"),
        (
            "task.eval_every_steps=2",
            "task.eval_every_steps=2: evaluations of task=grpo measure the",
        ),
        (
            "task.early_stopping.patience=2 task.eval_every_steps=2",
            "looks at checkpoint.metric=train/reward, which no evaluation measures",
        ),
        ("task=sft sweep.objective=eval/f1", "sweep.objective=eval/f1: task sft does not measure"),
        (
            "task=sft data.eval_samples=0 task.eval_every_steps=2 sweep.objective=eval/loss",
            "task.eval_every_steps=2, sweep.objective=eval/loss: needs evaluation data",
        ),
        (
            "task=sft data.eval_samples=0 checkpoint.metric=eval/loss checkpoint.keep.best=1",
            "checkpoint.keep.best=1 by eval/loss: needs evaluation data",
        ),
    ],
)
def test_a_metric_that_will_not_be_measured_is_refused(words: str, message: str) -> None:
    exp, _ = complete(experiment_from_dict(values([*HELD_OUT, "task=grpo", *words.split()])))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(exp)


@pytest.mark.parametrize(
    ("objective", "metric"), [("tokens_per_s", "train/reward"), ("eval/reward", "eval/reward")]
)
def test_a_short_trial_is_judged_by_what_it_measures_itself(objective: str, metric: str) -> None:
    short = ["sweep.trial_steps=4", f"sweep.objective={objective}", "checkpoint.metric=eval/reward"]
    exp, _ = complete(experiment_from_dict(values([*HELD_OUT, *SCORED, *short])))
    check(exp)
    assert (exp.checkpoint.metric, objective_of(exp)) == (metric, objective)
    assert complete(exp)[0] == exp


def test_a_sweep_of_an_own_task_without_held_out_data_has_an_objective() -> None:
    exp, _ = complete(experiment_from_dict(values([*FILES, "task.kind=llmx.tasks.sft:Sft"])))
    assert objective_of(exp) == "train/loss"


def test_packing_that_was_typed_is_not_replaced() -> None:
    with pytest.raises(ConfigError, match=r"packing=best_fit: .* Set data\.packing=none"):
        composed(["experiment=demo", "task=grpo", "data.packing=best_fit"])
