"""Environments: which tokens are trained, what continues a completion, what goes wrong inside."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import llmx
from llmx.compose.task_rules import task_problems
from llmx.config.user_code import user_functions
from llmx.data.format.rows import Conversation, Message
from llmx.data.format.templates import TEMPLATES
from llmx.data.source.records import Where
from llmx.data.store.samples import Sample
from llmx.data.tokenize.conversations import Renderer
from llmx.errors import ConfigError
from llmx.models.model import CLASSIFICATION, Models
from llmx.tasks import GeneratedSample, Prompt
from llmx.tasks.environment import Episodes, Observations, Turn, load_environment, tool_calls
from llmx.tasks.grpo import Grpo
from llmx.tasks.ppo import Ppo
from tests.chat_templates import PUBLISHED
from tests.rollouts import (
    batch_of,
    means_of,
    models_for,
    of_task,
    plain_logps,
    rolled,
    text_of,
)
from tests.small_tokenizers import byte_tokenizer

WHERE = Where(Path("a"), 1, "row")


# What a template writes between two completions


@pytest.mark.parametrize(
    ("name", "template"),
    [*((name, "auto") for name in PUBLISHED), *(("qwen2.5", name) for name in TEMPLATES)],
)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_chat_is_its_completions_and_the_observations_between(name, template, role) -> None:
    tokenizer = PUBLISHED[name].tokenizer()
    observations = Observations(tokenizer, template=template)
    observations.check()
    message = Message(role, "4 <|im_end|> [INST] </s>")  # special tokens in data are text
    renderer = Renderer(tokenizer, template=template)
    question = (Message("user", "How many?"), Message("assistant", "I look."))
    chat = Conversation((*question, message, Message("assistant", "Four.")), WHERE)
    (whole,) = renderer.conversations([chat])
    prompt, _ = renderer.prompt(Conversation(question, WHERE))
    runs = [(at, list(part)) for at, part in groupby(range(len(whole.tokens)), whole.targets.item)]
    (_, before), (_, first), (_, between), (_, last) = runs
    assert whole.tokens[before].tolist() == prompt.tolist()
    assert observations.tokens([message]) == tuple(whole.tokens[between].tolist())
    assert int(whole.tokens[first[-1]]) in renderer.stop_token_ids
    assert int(whole.tokens[last[-1]]) in renderer.stop_token_ids


@pytest.mark.parametrize(
    ("jinja", "problem"),
    [
        (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            r"does not end an assistant's turn with a token of its own",
        ),
        (
            "{% for m in messages %}{{ m['role'] + loop.index|string + m['content'] + '</s>' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}",
            r"writes messages of the role tool differently after other turns",
        ),
    ],
)
def test_templates_that_cannot_go_on_are_refused(jinja: str, problem: str) -> None:
    tokenizer = byte_tokenizer(begin="<s>", end="</s>", chat_template=jinja)
    with pytest.raises(ConfigError, match=problem):
        Observations(tokenizer, template="auto").check()


def test_calls_of_tools() -> None:
    call = {"name": "add", "arguments": {"a": 1, "b": [2]}}
    text = f"I add.<tool_call>\n{json.dumps(call)}\n</tool_call><tool_call>{{1}}</tool_call>"
    assert tool_calls(text + '<tool_call>{"name": "add"}</tool_call>') == [call]
    assert tool_calls("3") == []


# Rollouts with a small network


class Counts:
    """Three turns of the model, each of which is told how many letters it wrote."""

    def reset(self, prompt: str, reference: str) -> None:
        self.reference, self.turns = reference, 0

    def step(self, completion: str) -> Turn:
        self.turns += 1
        if self.turns == 3:
            return Turn(reward=len(self.reference), done=True)
        messages = [{"role": "tool", "content": str(len(completion))}]
        return Turn(messages, reward=0.25 if len(completion) % 2 else 0.0)


class Endless(Counts):
    """Never done."""

    def step(self, completion: str) -> Turn:
        return Turn([{"role": "user", "content": "On"}], reward=1)


class Broken(Counts):
    """Fails in its second turn where it is told an odd number of letters."""

    def step(self, completion: str) -> Turn:
        self.turns += 1
        if self.turns == 1:
            return Turn([{"role": "tool", "content": "a"}], reward=1)
        if len(completion) % 2:
            raise RuntimeError("no answer")
        return Turn(reward=1, done=True)


class Single(Counts):
    def step(self, completion: str) -> Turn:
        return Turn(reward=random.random(), done=True)


TOKENIZER = PUBLISHED["qwen2.5"].tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SEQ_LEN = 320


def task(environment: type | None, *, kind: type[Grpo] = Grpo, **options: Any) -> Grpo:
    path = f"{__name__}:{environment.__name__}" if environment else None
    values = {"rewards": [], "group_size": 6, "max_new_tokens": 10, "environment": path}
    exp = of_task(**{**values, **options})
    exp.data.seq_len = SEQ_LEN
    own = kind(exp, TOKENIZER)
    own.see_data(None, None)
    return own


def networks(own: Grpo, *, drift: float = 1.0) -> Models:
    """Models that often end a turn."""
    models = models_for(own, drift=drift, max_position_embeddings=SEQ_LEN)
    for model in models.values():
        if model.spec.head != CLASSIFICATION:
            with torch.no_grad():
                model.module.lm_head.weight[STOP] *= 30
    return models


def prompt(number: int) -> Prompt:
    turns = (Message("user", f"Question {number}?"), Message("assistant", "x" * number))
    tokens, completion = Renderer(TOKENIZER).prompt(Conversation(turns, WHERE))
    return Prompt(tuple(tokens.tolist()), (tuple(completion.tolist()),))


PROMPTS = [prompt(number) for number in range(4)]


def turns_of(sample: Sample) -> list[list[int]]:
    """The tokens of a sample in runs that are not trained and are: prompt, completion, ..."""
    return [
        [int(sample.tokens[at]) for at in run]
        for _, run in groupby(range(len(sample.tokens)), sample.targets.item)
    ]


@pytest.fixture(scope="module")
def counted() -> tuple[Grpo, Models, list[Sample], list[GeneratedSample]]:
    """A task, its models, the samples of a rollout, and what was said of them."""
    own = task(Counts, beta=0.1)
    models = networks(own, drift=1.05)
    return own, models, rolled(own, models, PROMPTS), list(own.generated)


def test_trained_are_exactly_the_tokens_that_were_drawn(counted: Any) -> None:
    own, models, samples, generated = counted
    whole = 0
    for number, (sample, shown) in enumerate(zip(samples, generated, strict=True)):
        beginning, *turns = turns_of(sample)
        completions, observed = turns[::2], turns[1::2]
        assert tuple(beginning) in {each.tokens for each in PROMPTS}
        assert all(STOP not in text[:-1] for text in completions)
        assert all(text[-1] in (STOP, TOKENIZER.eos_token_id) for text in completions[:-1])
        for text, tokens in zip(completions, observed, strict=False):
            count = str(len(own.decode(text[:-1])))
            assert tuple(tokens) == own._observations.tokens([Message("tool", count)])
        finished = len(completions) == 3 and completions[-1][-1] == STOP
        whole += finished
        odd = sum(len(own.decode(text[:-1])) % 2 for text in completions[:2]) * 0.25
        if finished:
            reference = own.decode(list(PROMPTS[number // 6].reference))
            assert shown.rewards["environment"] == odd + len(reference)
    assert whole > 3, "some samples have all their turns"
    means = means_of(own, own.loss(models, batch_of(own, samples)))
    drawn = sum(int(sample.targets.sum()) for sample in samples)
    assert means["completion_tokens"] == drawn / len(samples)
    assert 1 < means["turns"] < 3
    assert means["clipped"] == 0
    assert 0 < means["truncated"] < 1


def test_log_probabilities_are_those_in_the_context() -> None:
    own = task(Counts, beta=0.1, temperature=0.7, group_size=2)
    models = networks(own, drift=1.05)
    samples = rolled(own, models, PROMPTS)
    for column, model in (("old_logp", models.main), ("reference_logp", models["reference"])):
        for sample in samples:
            ids, at = text_of(sample)
            with torch.no_grad():
                logps = plain_logps(model.module, ids, at, temperature=0.7)
            stored = np.array(sample.columns[column])
            torch.testing.assert_close(torch.from_numpy(stored[at]), logps, atol=1e-5, rtol=0)
            assert not np.delete(stored, at).any()


def test_what_the_environment_wrote_has_no_gradient(counted: Any) -> None:
    """Other log-probabilities of its tokens change nothing."""
    own, models, samples, _ = counted
    batch = batch_of(own, samples)
    first = own.loss(models, batch)
    batch["old_logp"] = torch.where(batch["labels"] == -100, -99.0, batch["old_logp"])
    assert float(own.loss(models, batch).sum) == float(first.sum)
    assert first.weight == int((batch["labels"] != -100).sum())


def test_samples_end_at_the_limits() -> None:
    own = task(Endless, max_turns=2, group_size=2)
    models = networks(own)
    samples = rolled(own, models, PROMPTS)
    means = means_of(own, own.loss(models, batch_of(own, samples)))
    assert means["truncated"] == 1
    assert max(len(turns_of(sample)) for sample in samples) == 4
    own = task(Endless, max_turns=1000, group_size=2)
    samples = rolled(own, models, PROMPTS)
    assert means_of(own, own.loss(models, batch_of(own, samples)))["truncated"] == 1
    lengths = [len(sample.tokens) for sample in samples]
    assert max(lengths) <= SEQ_LEN
    assert max(len(turns_of(sample)) for sample in samples) > 6
    # A turn that does not fit is not begun, and one that ends the sample is a completion.
    assert all(sample.targets[-1] for sample in samples)
    assert own.generated[0].rewards["environment"] == len(turns_of(samples[0])) // 2


def test_turns_have_random_numbers_of_their_own(counted: Any) -> None:
    """The same again, and others for another step."""
    own, models, *_ = counted
    again, other = (rolled(own, models, PROMPTS, step=step) for step in (0, 1))
    tokens = [
        [sample.tokens.tolist() for sample in samples] for samples in (counted[2], again, other)
    ]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


def test_an_environment_that_fails_costs_its_sample(capsys: pytest.CaptureFixture[str]) -> None:
    own = task(Broken)
    models = networks(own)
    samples = rolled(own, models, PROMPTS)
    failed = [not bool(sample.columns["measured"][0][0]) for sample in samples]
    assert 0 < sum(failed) < len(samples)
    for sample, has_failed in zip(samples, failed, strict=True):
        assert not (has_failed and float(sample.columns["advantage"][0]))
    means = means_of(own, own.loss(models, batch_of(own, samples)))
    assert means["reward_failed"] == pytest.approx(sum(failed) / len(samples))
    said = "WARNING: the reward environment failed: it raised RuntimeError: no answer"
    assert capsys.readouterr().out.count(said) == 1


class Wrong(Counts):
    """Wrong in a way of its prompt's choice."""

    def reset(self, prompt: str, reference: str) -> Any:
        return "hello" if prompt == "reset" else setattr(self, "way", prompt)

    def step(self, completion: str) -> Any:
        if self.way == "sleeps":
            time.sleep(600)
        return {
            "none": None,
            "silent": Turn(),
            "text": Turn(["a"]),
            "role": Turn([{"role": "assistant", "content": "a"}]),
            "nan": Turn(reward=math.nan, done=True),
        }[self.way]


@pytest.mark.parametrize(
    ("way", "problem"),
    [
        ("reset", "reset() returned 'hello', not None"),
        ("none", "step() returned None, not a Turn"),
        ("silent", "no messages, and the sample is not done"),
        ("text", "the message 'a' is not"),
        ("role", "the message {'role': 'assistant'"),
        ("nan", "the reward nan is not a finite number"),
        ("raises", "it raised KeyError: 'raises'"),
        ("sleeps", "it took more than 0.2 s (task.options.reward_timeout_s)"),
    ],
)
def test_what_is_no_turn_is_named(way: str, problem: str) -> None:
    observations, limit_s = Observations(TOKENIZER, template="auto"), 0.2 if way == "sleeps" else 60
    answer = Episodes(Wrong, [(way, "")], observations, limit_s=limit_s).step({0: "a"})[0]
    assert not answer.tokens
    assert problem in answer.problem


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "rloo", "beta": 0.1, "kl": "k1", "kl_in": "reward"},
        {"loss": "dr_grpo", "dynamic_sampling": True, "dynamic_sampling_tries": 2},
        {"rewards": ["exact_match", "length"], "reward_weights": [1, -0.1]},
        {"kind": Ppo},
    ],
)
def test_goes_with_the_other_options(options: Mapping[str, Any]) -> None:
    own = task(Counts, group_size=3, **options)
    models = networks(own)
    found = own.loss(models, batch_of(own, rolled(own, models, PROMPTS)))
    found.sum.backward()
    gradients = [p.grad for p in models.main.module.parameters() if p.grad is not None]
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert any(float(gradient.abs().max()) > 0 for gradient in gradients)
    assert {*found.metrics} == {*own.metrics}


def test_a_single_turn_is_drawn_as_without_an_environment() -> None:
    own, plain = task(Single, group_size=2), task(None, rewards=["length"], group_size=2)
    models = networks(own)
    for sample, other in zip(
        rolled(own, models, PROMPTS), rolled(plain, models, PROMPTS), strict=True
    ):
        assert sample.tokens.tolist() == other.tokens.tolist()
        assert sample.columns["old_logp"].tolist() == other.columns["old_logp"].tolist()


def test_an_environment_is_a_class_with_both_methods() -> None:
    exp = of_task(environment="my_env:Calculator", rewards=[], max_new_tokens=8)
    assert task_problems(exp) == []
    assert user_functions(exp.task) == {
        "task.options.environment: my_env:Calculator": "my_env:Calculator"
    }
    exp.task.eval_generate = 5
    (problem,) = task_problems(exp)
    assert "completed in one turn" in problem
    with pytest.raises(ConfigError, match="has no method reset and step"):
        load_environment(f"{__name__}:prompt")


def test_the_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/tasks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_env\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "my_docs_env.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(Path(llmx.__file__).parent / "assets/demo/tokenizer")
    observations = Observations(tokenizer, template="auto")
    observations.check()
    make = load_environment("my_docs_env:Calculator")
    episodes = Episodes(make, [("1 + 2?", "3"), ("", "")], observations, limit_s=60)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    answers = episodes.step({0: call, 1: call.replace('"b"', '"c"')})
    assert tokenizer.decode(answers[0].tokens) == "<|tool|> 3<|end|><|assistant|>"
    assert "KeyError: 'b'" in answers[1].problem
    last = episodes.step({0: "3"})[0]
    assert (last.tokens, last.reward) == ((), 1.0)
