"""A few blocks that are traced, and the others like them, against all of them traced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaModel

from llmx.plan.trace import FETCH, FETCH_BACKWARD, GRADIENT, RELEASE, Event, StepTrace
from llmx.train import memory_trace
from llmx.train.memory_trace import Numbers, Run, trace_step, with_all_blocks
from tests.rundirs import EXPERT_MODELS, PARITY_MODELS, experiment

BLOCKS = 8
LORA = {"kind": "lora", "rank": 4, "targets": ["all-linear"], "dropout": 0.1}


def traced(root: Path, kind: str, *, run: dict[str, Any] | None = None, **groups: Any) -> StepTrace:
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    model = {"kind": kind, "config": {**PARITY_MODELS.get(kind, {}), layers: BLOCKS}}
    groups["model"] = {**model, **groups.get("model", {})}
    groups["data"] = {"seq_len": 32, **groups.get("data", {})}
    exp = experiment(root / "run", task={"kind": "pretrain"}, **groups)
    how = {"precision": "fp32", "accelerator": "cpu", "attention": "sdpa", **(run or {})}
    return trace_step(exp, micro_batch=2, **how)


ON_GPUS = {"precision": "bf16", "accelerator": "cuda", "attention": "varlen"}
FROZEN = {"freeze": ["*.embed_tokens.*", "*.layers.0.*", "*.layers.1.*"]}


@pytest.mark.parametrize(
    ("kind", "how", "groups"),
    [
        ("llama", "selective", {}),
        ("opt", "none", {}),
        ("qwen3", "full", {"run": ON_GPUS}),
        ("llama", "none", {"adapter": LORA, "run": ON_GPUS}),
    ],
)
def test_the_trace_is_that_of_all_blocks(
    kind: str, how: str, groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {**groups, "model": {"activation_checkpointing": how}}
    found, held = both(monkeypatch, lambda: traced(tmp_path, kind, **groups))
    assert held == [True]
    assert found == whole(monkeypatch, lambda: traced(tmp_path, kind, **groups))
    gradients = {event.index for event in found.events if event.kind == GRADIENT}
    assert gradients == {i for i, one in enumerate(found.parameters) if one.trained}


def test_frozen_blocks_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are run, and are not what is repeated."""
    found, held = both(monkeypatch, lambda: traced(tmp_path, "llama", model=FROZEN))
    assert held == [True]
    assert found == whole(monkeypatch, lambda: traced(tmp_path, "llama", model=FROZEN))


def test_experts_are_all_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of their routers is of all blocks together: nothing is left out."""
    config = {**EXPERT_MODELS["mixtral"], "model_type": "mixtral", "num_hidden_layers": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 96}))
    experts = {"model": {"kind": "hf", "path": str(tmp_path), "config": {}}}
    _, held = both(monkeypatch, lambda: traced(tmp_path, "mixtral", **experts))
    assert held == []


def test_few_blocks_are_traced_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"model": {"config": {**PARITY_MODELS["llama"], "num_hidden_layers": 5}}}
    _, held = both(monkeypatch, lambda: traced(tmp_path, "llama", **few))
    assert held == []


def test_blocks_that_do_not_agree_are_all_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a try that is given up nothing of it is left."""
    expected = whole(monkeypatch, lambda: traced(tmp_path, "llama"))
    monkeypatch.setattr(memory_trace, "with_all_blocks", lambda *_given: None)
    assert traced(tmp_path, "llama") == expected


def test_a_network_that_counts_on_all_of_its_blocks_is_traced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some take them by their numbers."""
    expected = whole(monkeypatch, lambda: traced(tmp_path, "llama"))
    forward = LlamaModel.forward

    def by_number(self: Any, *args: Any, **keywords: Any) -> Any:
        assert self.layers[self.config.num_hidden_layers - 1] is not None
        return forward(self, *args, **keywords)

    monkeypatch.setattr(LlamaModel, "forward", by_number)
    assert traced(tmp_path, "llama") == expected


# Four blocks of one module and one parameter each, between another two.
NUMBERS = [Numbers(range(n + 1, n + 2), range(n + 1, n + 2)) for n in range(9)]
RUN = [
    *(Event(FETCH, 0, 0, 0), Event(RELEASE, 0, 5, 5)),
    *(
        Event(kind, n, 5 + 10 * n + peak, 5 + 10 * n + live)
        for n in range(1, 5)
        for kind, peak, live in ((FETCH, 0, -10), (RELEASE, 3, 0))
    ),
    *(
        Event(kind, n, 5 + 10 * n + 1, 5 + 10 * n - live)
        for n in range(4, 0, -1)
        for kind, live in ((FETCH_BACKWARD, 0), (GRADIENT, 10))
    ),
    Event(GRADIENT, 0, 5, 0),
]


@pytest.mark.parametrize("place", [4, 5, 12, 13])
@pytest.mark.parametrize("key", ["kind", "index", "peak", "live"])
def test_one_difference_between_the_blocks_is_enough(place: int, key: str) -> None:
    run = [*RUN]
    run[place] = replace(run[place], **{key: getattr(run[place], key) + 1})
    assert with_all_blocks(Run(run, [0.0] * len(run), 0, 0.0), NUMBERS, 4) is None


def both(monkeypatch: pytest.MonkeyPatch, trace: Any) -> tuple[StepTrace, list[bool]]:
    """A trace, and for each try to leave blocks out whether it held."""
    tries: list[bool] = []

    def seen(*given: Any) -> Run | None:
        tries.append((found := with_all_blocks(*given)) is not None)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(memory_trace, "with_all_blocks", seen)
        return trace(), tries


def whole(monkeypatch: pytest.MonkeyPatch, trace: Any) -> StepTrace:
    """All blocks are run."""
    with monkeypatch.context() as patch:
        patch.setattr(memory_trace, "stack_of", lambda _network: None)
        found: StepTrace = trace()
    return found
