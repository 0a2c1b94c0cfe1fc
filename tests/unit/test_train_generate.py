"""Our greedy completions are those of Transformers' ``generate``, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmx.data import EvalPrompt
from llmx.models.attention import AttentionMethod
from llmx.models.experts import Routing
from llmx.models.isolation import find_methods
from llmx.train import generate as generate_module
from llmx.train.engine import Engine
from llmx.train.generate import generate, group
from tests.architectures import full_config, small_config
from tests.small_models import KINDS, small_model

NEW_TOKENS = 12
EOS = 2


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process: generation is collective."""
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Wrapped:
    """What the loop asks of an engine in evaluation, around a bare model."""

    def __init__(self, model: Any) -> None:
        self.module = model

    def eval(self) -> None:
        self.module.eval()

    def train(self) -> None:
        self.module.train()


def engine_of(model: Any, attention: str, vocab_size: int | None = None) -> Engine:
    return Engine(
        engine=Wrapped(model),
        config=model.config,
        vocab_size=model.config.vocab_size if vocab_size is None else vocab_size,
        attention=AttentionMethod(attention),
        dtype=torch.float32,
        device=torch.device("cpu"),
        stage=0,
        precision="fp32",
        routing=Routing(model),
    )


def prompts() -> list[tuple[int, ...]]:
    draw = np.random.Generator(np.random.Philox(key=1))
    return [
        tuple(int(token) for token in draw.integers(3, 90, size=length))
        for length in (7, 1, 13, 7, 4, 22)
    ]


def reference(model: Any, prompt: tuple[int, ...], stops: list[int]) -> list[int]:
    """Transformers' greedy search for a prompt alone, without the stop token."""
    model.eval()
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=stops,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    return found[:-1] if found and found[-1] in stops else found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers(kind: str, attention: str) -> None:
    model = small_model(kind, attention=attention)
    engine = engine_of(model, attention)
    without_stop = generate(
        engine, prompts(), max_new_tokens=NEW_TOKENS, stop_ids=frozenset({10**6})
    )
    assert all(len(answer) == NEW_TOKENS for answer in without_stop)
    # Tokens that some answers come to, at different lengths, end them.
    stops = [without_stop[0][4], without_stop[2][0], EOS]
    answers = generate(engine, prompts(), max_new_tokens=NEW_TOKENS, stop_ids=frozenset(stops))
    assert answers[2] == []
    assert len(answers[0]) <= 4
    for prompt, answer, longest in zip(prompts(), answers, without_stop, strict=True):
        assert answer == reference(model, prompt, stops)
        assert longest == reference(model, prompt, [10**6])


def test_batches_by_size_do_not_change_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(small_model("llama"), "sdpa")
    wanted = generate(engine, prompts(), max_new_tokens=NEW_TOKENS, stop_ids=frozenset({EOS}))
    monkeypatch.setattr(generate_module, "BATCH", 2)
    found = generate(engine, prompts(), max_new_tokens=NEW_TOKENS, stop_ids=frozenset({EOS}))
    assert found == wanted


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_answer_ends_at_the_last_position_of_the_model(kind: str) -> None:
    """A long prompt beside a short one: the short one is answered to its end all the same."""
    length = {"gpt2": {"n_positions": 16}, "llama": {"max_position_embeddings": 16}}[kind]
    model = small_model(kind, **length)
    long, short = tuple(range(3, 16)), (5, 6)
    answers = generate(
        engine_of(model, "sdpa"),
        [long, short],
        max_new_tokens=NEW_TOKENS,
        stop_ids=frozenset({10**6}),
    )
    assert answers[1] == reference(model, short, [10**6])
    with torch.no_grad():
        chosen = model(input_ids=torch.tensor([long])).logits[0, -1].argmax()
    assert answers[0][0] == int(chosen)
    assert 3 <= len(answers[0]) <= 4


def test_padding_of_the_vocabulary_is_never_an_answer() -> None:
    model = small_model("llama")
    free = engine_of(model, "sdpa")
    stops = frozenset({10**6})
    first = [a[0] for a in generate(free, prompts(), max_new_tokens=1, stop_ids=stops)]
    size = max(first)
    cut = engine_of(model, "sdpa", vocab_size=size)
    answers = generate(cut, prompts(), max_new_tokens=NEW_TOKENS, stop_ids=stops)
    assert all(token < size for answer in answers for token in answer)
    assert [a[0] for a, old in zip(answers, first, strict=True) if old < size] == [
        old for old in first if old < size
    ]


def test_the_mode_is_training_again_afterwards() -> None:
    model = small_model("llama")
    generate(engine_of(model, "sdpa"), [(3, 4)], max_new_tokens=1, stop_ids=frozenset({EOS}))
    assert model.training


def test_groups_hold_every_prompt_once_by_length() -> None:
    lengths = [5, 3, 9, 3, 5, 5, 3]
    batches = group(lengths, world=2, equal=False)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert [len(batch) for batch in batches] == [4, 3]
    assert [lengths[i] for batch in batches for i in batch] == sorted(lengths)
    equal = group(lengths, world=2, equal=True)
    assert all(len({lengths[i] for i in batch}) == 1 for batch in equal)
    assert sorted(i for batch in equal for i in batch) == list(range(7))
    assert max(map(len, group([1] * 100, world=1, equal=True))) == generate_module.BATCH


@pytest.mark.parametrize("when", ["before", "after"])
def test_samples_keep_the_completions_from_before(when: str, tmp_path: Path) -> None:
    from llmx.rundir import RunDir, read_json
    from llmx.train.completions import write_samples

    run_dir = RunDir(tmp_path)
    prompts = [EvalPrompt(tokens=(), prompt=f"q{n}", expected=f"a{n}") for n in range(2)]
    write_samples(run_dir, prompts, ["x", "a1"], {"exact_match": 0.5}, when="before")
    if when == "after":
        write_samples(run_dir, prompts, ["a0", "a1"], {"exact_match": 1.0}, when="after")
    after = when == "after"
    assert read_json(run_dir.samples) == {
        "rows": [
            {"prompt": "q0", "expected": "a0", "before": "x", "after": "a0" if after else None},
            {"prompt": "q1", "expected": "a1", "before": "a1", "after": "a1" if after else None},
        ],
        "exact_match_before": 0.5,
        "exact_match_after": 1.0 if after else None,
    }


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "roberta", "bart", "bloom", "gpt_oss"])
def test_models_that_are_fed_otherwise_answer_as_their_plain_forward(name: str) -> None:
    """Padded layouts, masks by kind of layer, no positions: greedy search without a cache."""
    config = small_config(name)
    config.use_cache = False
    found = find_methods(full_config(name))
    method = found.packed or found.padded
    assert method is not None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=method.implementation
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    engine = engine_of(model, method.implementation)
    engine.attention = method
    answers = generate(engine, prompts()[:3], max_new_tokens=5, stop_ids=frozenset([EOS]))
    model.eval()  # it trains on after an evaluation, with its dropout
    for prompt, answer in zip(prompts(), answers, strict=False):
        ids = list(prompt)
        for token in [*answer, EOS][:5]:
            with torch.no_grad():
                assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
