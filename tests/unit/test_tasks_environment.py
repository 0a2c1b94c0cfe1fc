"""Environments: which tokens are trained, what continues a completion, what goes wrong inside."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Mapping
from dataclasses import replace
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
from llmx.data import collate
from llmx.data.examples import Schema
from llmx.data.format.rows import Conversation, Message
from llmx.data.format.templates import TEMPLATES
from llmx.data.source.records import Where
from llmx.data.store.samples import Sample, in_memory
from llmx.data.tokenize.conversations import Renderer
from llmx.errors import ConfigError
from llmx.models.model import CLASSIFICATION, Models
from llmx.models.pooling import give_pooled_forward
from llmx.tasks import Prompt, RolloutKey
from llmx.tasks.environment import Episodes, Observations, Turn, load_environment, tool_calls
from llmx.tasks.grpo import Grpo
from llmx.tasks.ppo import Ppo
from tests.chat_templates import PUBLISHED
from tests.small_models import small_model
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_models_model import model_of
from tests.unit.test_tasks_grpo import of_task, scorer

WHERE = Where(Path("a"), 1, "row")


# What a template writes between two completions


@pytest.mark.parametrize("name", [*PUBLISHED, *(f"named {name}" for name in TEMPLATES)])
@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_chat_is_its_completions_and_the_observations_between(name: str, role: str) -> None:
    named = name.removeprefix("named ") if name.startswith("named ") else "auto"
    tokenizer = PUBLISHED["qwen2.5" if named != "auto" else name].tokenizer()
    observations = Observations(tokenizer, template=named)
    observations.check()
    message = Message(role, "4 <|im_end|> [INST] </s>")  # special tokens in data are text
    renderer = Renderer(tokenizer, template=named)
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
    """Fails in its second turn, in one of several ways."""

    def step(self, completion: str) -> Any:
        self.turns += 1
        if self.turns == 1:
            return Turn([{"role": "tool", "content": "a"}], reward=1)
        match len(completion) % 6:
            case 0:
                raise RuntimeError("no answer")
            case 1:
                time.sleep(600)
            case 2:
                return Turn(reward=math.nan, done=True)
            case 3:
                return "3"
            case 4:
                return Turn([{"role": "assistant", "content": "I"}])
        return Turn(reward=1, done=True)


TOKENIZER = PUBLISHED["qwen2.5"].tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SEQ_LEN, NEW_TOKENS = 320, 10


def task(environment: type, *, kind: type[Grpo] = Grpo, **options: Any) -> Grpo:
    path = f"{__name__}:{environment.__name__}"
    values = {"rewards": [], "group_size": 6, "max_new_tokens": NEW_TOKENS, "environment": path}
    exp = of_task(**{**values, **options})
    exp.data.seq_len = SEQ_LEN
    own = kind(exp, TOKENIZER)
    own.see_data(None, None)  # type: ignore[arg-type]
    return own


def networks(own: Grpo, *, drift: float = 1.0) -> Models:
    """Models that often end a turn."""
    models = {}
    for name, spec in own.models().items():
        if spec.head == CLASSIFICATION:
            models[name] = replace(scorer(len(TOKENIZER), "packed"), name=name, spec=spec)
            give_pooled_forward(models[name].module)
            continue
        network = small_model("llama", vocab_size=len(TOKENIZER), max_position_embeddings=SEQ_LEN)
        with torch.no_grad():
            network.lm_head.weight[STOP] *= 30
            if name == "policy":
                network.lm_head.weight.mul_(drift)
        models[name] = model_of(network, "packed", trained=spec.trained)
    return Models(models)


def prompts(count: int = 4) -> list[Prompt]:
    renderer = Renderer(TOKENIZER)
    made = []
    for number in range(count):
        turns = (Message("user", f"Question {number}?"), Message("assistant", "x" * number))
        tokens, completion = renderer.prompt(Conversation(turns, WHERE))
        made.append(Prompt(tuple(tokens.tolist()), (tuple(completion.tolist()),)))
    return made


def rolled(own: Grpo, models: Models, step: int = 0) -> list[Sample]:
    with torch.no_grad():
        groups = own.rollout(models, prompts(), RolloutKey(1, step))
    schema = Schema(own.rollout_columns)
    return [
        in_memory(example, schema, task="grpo", vocab_size=len(TOKENIZER))
        for group in groups
        for example in group
    ]


def turns_of(sample: Sample) -> list[list[int]]:
    """The tokens of a sample in runs that are not trained and are: prompt, completion, ..."""
    return [
        [int(sample.tokens[at]) for at in run]
        for _, run in groupby(range(len(sample.tokens)), sample.targets.item)
    ]


def means_of(own: Grpo, models: Models, samples: list[Sample]) -> dict[str, float]:
    batch = batch_of_samples(own, samples)
    found = own.loss(models, batch)
    assert {*found.metrics} == {*own.metrics}
    return {name: float(total) / max(weight, 1) for name, (total, weight) in found.metrics.items()}


def batch_of_samples(own: Grpo, samples: list[Sample]) -> dict[str, Any]:
    return collate(samples, seq_len=SEQ_LEN, pad_id=0, layout="packed", columns=own.rollout_columns)


def test_trained_are_exactly_the_tokens_that_were_drawn() -> None:
    own = task(Counts, beta=0.1)
    models = networks(own, drift=1.05)
    samples = rolled(own, models)
    whole = 0
    for number, (sample, shown) in enumerate(zip(samples, own.generated, strict=True)):
        prompt, *turns = turns_of(sample)
        completions, observed = turns[::2], turns[1::2]
        assert tuple(prompt) in {each.tokens for each in prompts()}
        assert all(STOP not in text[:-1] for text in completions)
        assert all(text[-1] in (STOP, TOKENIZER.eos_token_id) for text in completions[:-1])
        for text, tokens in zip(completions, observed, strict=False):
            count = str(len(own.decode(text[:-1])))
            assert tuple(tokens) == own._observations.tokens([Message("tool", count)])
        finished = len(completions) == 3 and completions[-1][-1] == STOP
        whole += finished
        odd = sum(len(own.decode(text[:-1])) % 2 for text in completions[:2]) * 0.25
        if finished:
            reference = own.decode(list(prompts()[number // 6].reference))
            assert shown.rewards["environment"] == odd + len(reference)
    assert whole > 3, "some samples have all their turns"
    means = means_of(own, models, samples)
    drawn = sum(int(sample.targets.sum()) for sample in samples)
    assert means["completion_tokens"] == drawn / len(samples)
    assert 1 < means["turns"] < 3
    assert means["clipped"] == 0
    assert 0 < means["truncated"] < 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_in_the_context(temperature: float) -> None:
    own = task(Counts, beta=0.1, temperature=temperature)
    models = networks(own, drift=1.05)
    samples = rolled(own, models)
    for column, model in (("old_logp", models.main), ("reference_logp", models["reference"])):
        for sample in samples:
            ids = torch.from_numpy(sample.tokens.astype(np.int64))
            with torch.no_grad():
                logits = model.module(input_ids=ids[None]).logits[0, :-1] / temperature
            logps = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            at = sample.targets[1:]
            stored = torch.from_numpy(np.array(sample.columns[column]))[1:]
            torch.testing.assert_close(stored[at], logps[at], atol=1e-5, rtol=0)
            assert not stored[~at].any()


def test_what_the_environment_wrote_has_no_gradient() -> None:
    """Other log-probabilities of its tokens change nothing."""
    own = task(Counts)
    models = networks(own)
    batch = batch_of_samples(own, rolled(own, models))
    first = own.loss(models, batch)
    batch["old_logp"] = torch.where(batch["labels"] == -100, -99.0, batch["old_logp"])
    assert float(own.loss(models, batch).sum) == float(first.sum)
    assert first.weight == int((batch["labels"] != -100).sum())


def test_samples_end_at_the_limits() -> None:
    own = task(Endless, max_turns=2)
    models = networks(own)
    samples = rolled(own, models)
    means = means_of(own, models, samples)
    assert means["truncated"] == 1
    assert max(len(turns_of(sample)) for sample in samples) == 4
    own = task(Endless, max_turns=1000)
    samples = rolled(own, models)
    assert means_of(own, models, samples)["truncated"] == 1
    lengths = [len(sample.tokens) for sample in samples]
    assert max(lengths) <= SEQ_LEN
    assert max(len(turns_of(sample)) for sample in samples) > 6
    # A turn that does not fit is not begun, and one that ends the sample is a completion.
    assert all(sample.targets[-1] for sample in samples)
    assert own.generated[0].rewards["environment"] == len(turns_of(samples[0])) // 2


def test_turns_have_random_numbers_of_their_own() -> None:
    """The same again, and others for another step."""
    own = task(Counts)
    models = networks(own)
    first, again, other = (rolled(own, models, step) for step in (0, 0, 1))
    tokens = [[sample.tokens.tolist() for sample in samples] for samples in (first, again, other)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


def test_an_environment_that_fails_costs_its_sample(capsys: pytest.CaptureFixture[str]) -> None:
    own = task(Broken, reward_timeout_s=0.2)
    models = networks(own)
    samples = rolled(own, models)
    failed = [not bool(sample.columns["measured"][0][0]) for sample in samples]
    seconds = [turns_of(sample)[3] for sample in samples if len(turns_of(sample)) > 3]
    ways = {len(own.decode([token for token in text if token != STOP])) % 6 for text in seconds}
    assert len(ways) > 3, "several ways to fail occurred"
    assert 0 < sum(failed) < len(samples)
    for sample, has_failed in zip(samples, failed, strict=True):
        assert not (has_failed and float(sample.columns["advantage"][0]))
    means = means_of(own, models, samples)
    assert means["reward_failed"] == pytest.approx(sum(failed) / len(samples))
    assert capsys.readouterr().out.count("WARNING: the reward environment failed: it ") == 1


class Wrong(Counts):
    """Wrong in a way of its prompt's choice."""

    def reset(self, prompt: str, reference: str) -> Any:
        return "hello" if prompt == "reset" else setattr(self, "way", prompt)

    def step(self, completion: str) -> Any:
        return {
            "none": None,
            "silent": Turn(),
            "text": Turn(["a"]),  # type: ignore[list-item]
            "role": Turn([{"role": "assistant", "content": "a"}]),
            "nan": Turn(reward=math.nan, done=True),
        }[self.way]


@pytest.mark.parametrize(
    ("way", "problem"),
    [
        ("reset", r"reset\(\) returned 'hello', not None"),
        ("none", r"step\(\) returned None, not a Turn"),
        ("silent", r"no messages, and the sample is not done"),
        ("text", r"the message 'a' is not"),
        ("role", r"the message \{'role': 'assistant'"),
        ("nan", r"the reward nan is not a finite number"),
    ],
)
def test_what_is_no_turn_is_named(way: str, problem: str) -> None:
    observations = Observations(TOKENIZER, template="auto")
    episodes = Episodes(Wrong, [(way, "")], observations, limit_s=60)
    answer = episodes.step({0: "a"})[0]
    assert not answer.tokens
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(answer.problem)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "grpo", "beta": 0.1},
        {"loss": "gspo", "mask_truncated": True},
        {"loss": "rloo", "beta": 0.1, "kl": "k1", "kl_in": "reward"},
        {"loss": "cispo", "updates": 2},
        {"loss": "dr_grpo", "dynamic_sampling": True, "dynamic_sampling_tries": 2},
        {"rewards": ["exact_match", "length"], "reward_weights": [1, -0.1]},
        {"kind": Ppo},
    ],
)
def test_goes_with_the_other_options(options: Mapping[str, Any]) -> None:
    own = task(Counts, **options)
    models = networks(own)
    key = RolloutKey(1, 0, lambda attempt: prompts())
    with torch.no_grad():
        groups = own.rollout(models, prompts(), key)
    schema = Schema(own.rollout_columns)
    samples = [
        in_memory(example, schema, task="grpo", vocab_size=len(TOKENIZER))
        for group in groups
        for example in group
    ]
    found = own.loss(models, batch_of_samples(own, samples))
    found.sum.backward()
    gradients = [p.grad for p in models.main.module.parameters() if p.grad is not None]
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert any(float(gradient.abs().max()) > 0 for gradient in gradients)
    assert {*found.metrics} == {*own.metrics}


class Single(Counts):
    def step(self, completion: str) -> Turn:
        return Turn(reward=random.random(), done=True)


def test_a_single_turn_is_drawn_as_without_an_environment() -> None:
    own = task(Single)
    exp = of_task(rewards=["length"], group_size=6, max_new_tokens=NEW_TOKENS)
    exp.data.seq_len = SEQ_LEN
    plain, models = Grpo(exp, TOKENIZER), networks(own)
    for sample, other in zip(rolled(own, models), rolled(plain, models), strict=True):
        assert sample.tokens.tolist() == other.tokens.tolist()
        assert sample.columns["old_logp"].tolist() == other.columns["old_logp"].tolist()


def test_config() -> None:
    exp = of_task(environment="my_env:Calculator", rewards=[], max_new_tokens=8)
    assert task_problems(exp) == []
    assert user_functions(exp.task) == {
        "task.options.environment: my_env:Calculator": "my_env:Calculator"
    }
    exp.task.eval_generate = 5
    (problem,) = task_problems(exp)
    assert "completed in one turn" in problem
    with pytest.raises(ConfigError, match=r"environment=Calculator: must be package\.module:Class"):
        Grpo(of_task(environment="Calculator"), None)
    with pytest.raises(ConfigError, match="judges the length of one completion"):
        Grpo(of_task(environment="a:B", rewards=["overlong"], overlong_buffer=2), None)
    with pytest.raises(ConfigError, match="has no method reset and step"):
        load_environment(f"{__name__}:prompts")


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
