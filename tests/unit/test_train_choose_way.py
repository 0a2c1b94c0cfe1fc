"""What a rank decides at the start: the layout of all hosts, the attention of its own device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.config import Experiment
from llmx.errors import ConfigError
from llmx.models import choose_way
from llmx.models.attention import Way
from llmx.models.choose_way import common_layout, told
from llmx.models.isolation import Answer
from llmx.models.tiny import tiny_config
from llmx.models.varlen import SEGMENTS, VARLEN
from llmx.plan.types import Plan
from tests.architectures import full_config
from tests.rundirs import parity_experiment
from tests.unit.test_train_attention import CPU

GPU = torch.device("cuda", 0)
PACKED = Answer(Way(), None)
LEAKS = Answer(None, Way("sdpa", "positions", "padded"), why_not_packed="the loss of a row differs")
NOT_TRIED = Answer(None, None, unknown="no small model")
NEVER = Answer(None, None, why_not_packed="it looks ahead", why_not_trained="it looks ahead")


class OnlyPlan:
    """What is asked of a plan here."""

    precision = "bf16"
    ranks = (type("Rank", (), {"device": "gpu"})(),)

    def __init__(self, attention: str = "sdpa") -> None:
        self.attention = attention

    def attention_on(self, device: str) -> str:
        return self.attention


def experiment(tmp_path: Path, **data: Any) -> Experiment:
    exp = parity_experiment(tmp_path, attention="auto")
    for name, value in data.items():
        setattr(exp.data, name, value)
    return exp


def test_auto_packs_only_where_every_host_can(tmp_path: Path) -> None:
    exp = experiment(tmp_path, layout="auto")
    assert common_layout(exp, [PACKED, PACKED]) == "packed"
    assert common_layout(exp, [PACKED, LEAKS]) == "padded"
    assert common_layout(exp, [NOT_TRIED]) == "padded"
    assert told(exp, PACKED, "packed") == []
    assert told(exp, LEAKS, "padded") == [
        "Rows are not packed (data.layout=auto): the loss of a row differs."
    ]
    assert "is not known: no small model" in told(exp, NOT_TRIED, "padded")[0]


def test_packed_in_words_is_refused_where_rows_would_mix(tmp_path: Path) -> None:
    exp = experiment(tmp_path, layout="packed")
    assert common_layout(exp, [PACKED]) == "packed"
    assert common_layout(exp, [NOT_TRIED]) == "packed"
    with pytest.raises(ConfigError, match=r"the loss of a row differs\. Set data\.layout=auto"):
        common_layout(exp, [PACKED, LEAKS])


def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    for layout in ("auto", "packed", "padded"):
        with pytest.raises(ConfigError, match="cannot be trained here: it looks ahead"):
            common_layout(experiment(tmp_path, layout=layout), [NEVER])


@pytest.mark.parametrize(
    ("model", "layout", "way"),
    [
        ("llama", "auto", Way("sdpa", "mask")),
        ("mistral", "auto", Way("sdpa", "positions")),
        ("llama", "padded", Way("sdpa", "positions", "padded")),
        ("qwen3_next", "auto", Way("sdpa", "positions", "padded")),
        ("roberta", "auto", Way("sdpa", "padding", "padded")),
    ],
)
def test_the_way_on_a_cpu(model: str, layout: str, way: Way, tmp_path: Path) -> None:
    exp = experiment(tmp_path, layout=layout, seq_len=1 << 20)
    found = choose_way.answer(exp, OnlyPlan(), full_config(model), device=CPU)  # type: ignore[arg-type]
    assert getattr(found, way.layout) == way
    assert bool(found.why_not_packed) == (layout == "auto" and way.layout == "padded")


def test_segments_asked_for_are_taken(tmp_path: Path) -> None:
    exp = experiment(tmp_path, layout="auto")
    exp.model.attention = "segments"
    found = choose_way.answer(exp, OnlyPlan(), full_config("llama"), device=CPU)  # type: ignore[arg-type]
    assert found.packed == Way(SEGMENTS, "bounds")


def gpu(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int], packages: tuple[str, ...]):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choose_way, "_installed", lambda name: name in packages)


def candidates(exp: Experiment, plan: OnlyPlan) -> list[str]:
    return choose_way.candidates(exp, plan, GPU)  # type: ignore[arg-type]


def test_the_order_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exp = experiment(tmp_path)
    gpu(monkeypatch, capability=(9, 0), packages=("flash_attention_2",))
    assert candidates(exp, OnlyPlan("varlen")) == [
        VARLEN, "flash_attention_2", "flex_attention", SEGMENTS, "sdpa", "eager",
    ]  # fmt: skip
    # A V100, or fp32: no flash kernel; row by row, without a mask that is kept.
    gpu(monkeypatch, capability=(7, 0), packages=())
    assert candidates(exp, OnlyPlan("segments")) == [SEGMENTS, "sdpa", "eager"]


def test_attention_that_this_device_has_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability=(7, 0), packages=())
    exp, plan = experiment(tmp_path), OnlyPlan("varlen")
    for chosen, message in (
        ("varlen", "compute capability 8.0"),
        ("flash_attention_2", "needs the package flash-attn"),
    ):
        exp.model.attention = chosen
        with pytest.raises(ConfigError, match=message):
            candidates(exp, plan)
    for chosen in ("varlen", "flash_attention_2", "flex_attention"):
        exp.model.attention = chosen
        with pytest.raises(ConfigError, match=f"{chosen} trains on CUDA only.*auto"):
            choose_way.candidates(exp, plan, CPU)  # type: ignore[arg-type]


def test_the_plan_names_the_attention_of_each_device(tmp_path: Path) -> None:
    from llmx.config.schema import DeviceConfig
    from llmx.plan.make import attention_for

    exp = experiment(tmp_path)
    new = DeviceConfig(accelerator="cuda", precisions=["fp32", "fp16", "bf16"])
    old = DeviceConfig(accelerator="cuda", precisions=["fp32", "fp16"])
    assert attention_for(exp, new, "bf16") == attention_for(exp, new, "fp16") == "varlen"
    assert attention_for(exp, old, "fp16") == "segments"
    assert attention_for(exp, new, "fp32") == "segments"
    assert attention_for(exp, DeviceConfig(accelerator="cpu"), "fp32") == "sdpa"
    exp.data.layout = "padded"
    assert attention_for(exp, new, "bf16") == "sdpa"
    assert Plan.attention_on is not None


def test_every_rank_of_a_host_knows_the_kernels_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of a host tries; the model of the second is built with what it found."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (SEGMENTS, VARLEN):
        monkeypatch.delitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, raising=False)
    found = Answer(Way(SEGMENTS, "bounds"), None)

    def gather(everyone: list[Any], mine: Any) -> None:
        assert mine is None
        everyone[:] = [found.to_dict(), None]

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    plan = type("TwoRanks", (OnlyPlan,), {"ranks": (type("Rank", (), {"host": 0})(),) * 2})()
    config = tiny_config(full_config("llama"))
    way = choose_way.choose_way(experiment(tmp_path), plan, config, device=CPU)  # type: ignore[arg-type]
    assert way == found.packed
    AutoModelForCausalLM.from_config(config, attn_implementation=way.implementation)


@pytest.mark.parametrize(
    ("answers", "packed"),
    [
        ([NOT_TRIED, NOT_TRIED, PACKED], True),  # what cannot be tried with the model's heads
        ([NOT_TRIED, LEAKS, PACKED], True),
        ([NOT_TRIED, LEAKS, LEAKS], False),
        ([LEAKS, NOT_TRIED, LEAKS], False),
    ],
)
def test_what_could_not_be_tried_does_not_end_the_search(
    answers: list[Answer], packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter(answers)
    monkeypatch.setattr(choose_way, "candidates", lambda *_: [VARLEN, "flex_attention", SEGMENTS])
    monkeypatch.setattr(choose_way, "find_ways", lambda *_, **__: next(given))
    found = choose_way.answer(experiment(tmp_path, layout="auto"), OnlyPlan(), None, device=GPU)  # type: ignore[arg-type]
    assert found == (PACKED if packed else NOT_TRIED)


def test_what_one_host_refuses_is_raised_by_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others would wait for its answer."""
    exp = experiment(tmp_path)
    exp.model.attention = "flex_attention"
    ranks = tuple(type("Rank", (), {"host": host, "device": "cpu"})() for host in (0, 0, 1))
    hosts = tuple(type("Host", (), {"name": name})() for name in ("node-a", "node-b"))
    plan = type("TwoHosts", (OnlyPlan,), {"ranks": ranks, "hosts": hosts})()
    sent: list[Any] = [PACKED.to_dict(), None, None]

    def gather(everyone: list[Any], mine: Any) -> None:
        sent[rank] = mine
        everyone[:] = sent

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    refuse = choose_way.candidates
    errors = []
    for rank, local in ((2, 0), (0, 0), (1, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        if rank == 2:
            monkeypatch.setattr(
                choose_way, "answer", lambda exp, plan, config, device: refuse(exp, plan, device)
            )
        else:
            monkeypatch.setattr(choose_way, "answer", lambda *_, **__: PACKED)
        with pytest.raises(ConfigError) as caught:
            choose_way.choose_way(exp, plan, None, device=CPU)  # type: ignore[arg-type]
        errors.append(str(caught.value))
    assert len(set(errors)) == 1
    assert errors[0].startswith("Host node-b: model.attention=flex_attention trains on CUDA only")
