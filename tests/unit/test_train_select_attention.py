"""What a rank decides at the start: the layout of all hosts, the attention of its own device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from llmx.config import Experiment
from llmx.errors import ConfigError
from llmx.models import select_attention
from llmx.models.attention import AttentionMethod
from llmx.models.isolation import TrialResult
from llmx.models.model import CLASSIFICATION
from llmx.models.select_attention import common_layout, log_lines
from llmx.models.tiny import tiny_config
from llmx.models.varlen import SEGMENTS, VARLEN
from tests.architectures import full_config
from tests.rundirs import parity_experiment
from tests.unit.test_train_attention import CPU

GPU = torch.device("cuda", 0)
PACKED = TrialResult(AttentionMethod(), None)
LEAKS = TrialResult(
    None,
    AttentionMethod("sdpa", "position_ids", "padded"),
    why_not_packed="the loss of a row differs",
    leaks=True,
)
NOT_SHOWN = TrialResult(
    None, None, why_not_packed="it could not be shown", unknown="no small model"
)
NOT_TRIED = TrialResult(None, None, unknown="no small model")
"""As one implementation alone says it."""
NEVER = TrialResult(None, None, why_not_packed="it looks ahead", why_not_trained="it looks ahead")


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


def plan_of(*hosts: int, accelerator: str = "cpu", attention: str = "sdpa") -> Any:
    """A plan whose ranks are on these hosts, which are called node-a, node-b, ..."""
    rank = type("Rank", (), {})
    ranks = []
    for number, host in enumerate(hosts):
        one = rank()
        one.rank, one.host, one.device = number, host, f"gpu-{host}"
        ranks.append(one)
    named = [type("Host", (), {"name": f"node-{'abc'[host]}"})() for host in sorted(set(hosts))]
    plan = OnlyPlan(attention)
    plan.ranks, plan.hosts, plan.on_gpus = tuple(ranks), tuple(named), accelerator == "cuda"
    return plan


def test_auto_packs_only_where_every_host_can(tmp_path: Path) -> None:
    exp = experiment(tmp_path, layout="auto")
    assert common_layout(exp.model, exp.data, [PACKED, PACKED]) == "packed"
    assert common_layout(exp.model, exp.data, [PACKED, LEAKS]) == "padded"
    assert common_layout(exp.model, exp.data, [NOT_SHOWN]) == "padded"
    plan = plan_of(0, 1)
    assert log_lines(exp.data, plan, {0: PACKED, 1: PACKED}, "packed") == []
    assert log_lines(exp.data, plan, {0: LEAKS, 1: LEAKS}, "padded") == [
        "Rows are not packed (data.layout=auto): the loss of a row differs."
    ]
    assert log_lines(exp.data, plan, {0: PACKED, 1: LEAKS}, "padded") == [
        "Rows are not packed (data.layout=auto) on host node-b: the loss of a row differs."
    ]


def test_the_log_names_the_attention_of_each_type_of_gpu(tmp_path: Path) -> None:
    exp, plan = experiment(tmp_path, layout="auto"), plan_of(0, 0, 1, accelerator="cuda")
    flash = TrialResult(AttentionMethod(VARLEN, "cu_seq_lens"), None)
    first, second = log_lines(exp.data, plan, {0: flash, 1: PACKED}, "packed")
    assert first == "Attention on gpu-0: varlen."
    assert second.startswith("Attention on gpu-1: sdpa. WARNING: packed rows are isolated by a")


def test_packed_in_words_is_refused_where_isolation_was_not_shown(tmp_path: Path) -> None:
    exp = experiment(tmp_path, layout="packed")
    assert common_layout(exp.model, exp.data, [PACKED]) == "packed"
    for result, why in ((LEAKS, "the loss of a row differs"), (NOT_SHOWN, "it could not be shown")):
        with pytest.raises(ConfigError, match=rf"{why}\. Set data\.layout=auto"):
            common_layout(exp.model, exp.data, [PACKED, result])


def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    for layout in ("auto", "packed", "padded"):
        exp = experiment(tmp_path, layout=layout)
        with pytest.raises(ConfigError, match="cannot be trained here: it looks ahead"):
            common_layout(exp.model, exp.data, [NEVER])


@pytest.mark.parametrize(
    ("model", "layout", "method"),
    [
        ("llama", "auto", AttentionMethod("sdpa", "mask")),
        ("mistral", "auto", AttentionMethod("sdpa", "position_ids")),
        ("llama", "padded", AttentionMethod("sdpa", "position_ids", "padded")),
        ("qwen3_next", "auto", AttentionMethod("sdpa", "position_ids", "padded")),
        ("roberta", "auto", AttentionMethod("sdpa", "padding_mask", "padded")),
    ],
)
def test_the_method_on_a_cpu(
    model: str, layout: str, method: AttentionMethod, tmp_path: Path
) -> None:
    exp = experiment(tmp_path, layout=layout, seq_len=1 << 20)
    found = select_attention.try_on_this_host(
        exp.model, exp.data, OnlyPlan(), full_config(model), device=CPU
    )  # type: ignore[arg-type]
    assert getattr(found, method.layout) == method
    assert bool(found.why_not_packed) == (layout == "auto" and method.layout == "padded")


def test_segments_asked_for_are_taken(tmp_path: Path) -> None:
    exp = experiment(tmp_path, layout="auto")
    exp.model.attention = "segments"
    found = select_attention.try_on_this_host(
        exp.model, exp.data, OnlyPlan(), full_config("llama"), device=CPU
    )  # type: ignore[arg-type]
    assert found.packed == AttentionMethod(SEGMENTS, "cu_seq_lens")


def gpu(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int], packages: tuple[str, ...]):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(select_attention, "_installed", lambda name: name in packages)


def candidates(exp: Experiment, plan: OnlyPlan) -> list[str]:
    return select_attention.candidates(exp.model.attention, plan, GPU)  # type: ignore[arg-type]


def test_the_order_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exp = experiment(tmp_path)
    gpu(monkeypatch, capability=(9, 0), packages=("flash_attention_2",))
    monkeypatch.setattr(select_attention, "has_kernel", lambda: True)
    assert candidates(exp, OnlyPlan("varlen")) == [
        VARLEN, "flash_attention_2", "flex_attention", SEGMENTS, "sdpa", "eager",
    ]  # fmt: skip
    # The plan does not know the torch of the hosts.
    monkeypatch.setattr(select_attention, "has_kernel", lambda: False)
    assert candidates(exp, OnlyPlan("varlen")) == [
        "flash_attention_2", "flex_attention", SEGMENTS, "sdpa", "eager",
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
            select_attention.candidates(exp.model.attention, plan, CPU)  # type: ignore[arg-type]


def test_the_plan_names_the_attention_of_each_device(tmp_path: Path) -> None:
    from llmx.config.schema import DeviceConfig
    from llmx.plan.make import attention_for

    exp = experiment(tmp_path)
    new = DeviceConfig(accelerator="cuda", precisions=["fp32", "fp16", "bf16"])
    old = DeviceConfig(accelerator="cuda", precisions=["fp32", "fp16"])
    assert (
        attention_for(exp.model, exp.data, new, "bf16")
        == attention_for(exp.model, exp.data, new, "fp16")
        == "varlen"
    )
    assert attention_for(exp.model, exp.data, old, "fp16") == "segments"
    assert attention_for(exp.model, exp.data, new, "fp32") == "segments"
    assert attention_for(exp.model, exp.data, DeviceConfig(accelerator="cpu"), "fp32") == "sdpa"
    exp.data.layout = "padded"
    assert attention_for(exp.model, exp.data, new, "bf16") == "sdpa"


def test_every_rank_of_a_host_knows_the_kernels_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of a host tries; the model of the second is built with what it found."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (SEGMENTS, VARLEN):
        monkeypatch.delitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, raising=False)
    found = TrialResult(AttentionMethod(SEGMENTS, "cu_seq_lens"), None)

    def gather(everyone: list[Any], mine: Any, *, group: Any = None) -> None:
        assert mine is None
        everyone[:] = [found.to_dict(), None]

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    plan = plan_of(0, 0)
    config = tiny_config(full_config("llama"))
    exp = experiment(tmp_path)
    method = select_attention.select_attention(exp.model, exp.data, plan, config, device=CPU)  # type: ignore[arg-type]
    assert method == found.packed
    AutoModelForCausalLM.from_config(config, attn_implementation=method.implementation)


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ([NOT_TRIED, PACKED], ""),  # what cannot be tried with heads as wide as the model's
        ([LEAKS, PACKED], ""),
        ([NOT_TRIED, LEAKS], "the loss of a row differs"),
        ([LEAKS, NOT_TRIED], "the loss of a row differs"),
        ([NOT_TRIED, NOT_TRIED], "it could not be shown that rows are then isolated: no small"),
    ],
)
@pytest.mark.parametrize("layout", ["auto", "packed"])
def test_rows_are_packed_only_where_isolation_was_shown(
    results: list[TrialResult],
    why: str,
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial that could not be made does not end the search, and does not outrank a leak."""
    padded = AttentionMethod("sdpa", "position_ids", "padded")
    given = iter([*results, TrialResult(None, padded)])
    monkeypatch.setattr(select_attention, "candidates", lambda *_: [VARLEN, SEGMENTS])
    monkeypatch.setattr(select_attention, "find_methods", lambda *_, **__: next(given))
    exp = experiment(tmp_path, layout=layout)
    found = select_attention.try_on_this_host(
        exp.model,
        exp.data,
        OnlyPlan(),  # type: ignore[arg-type]
        None,
        device=GPU,
    )
    if not why:
        assert found == PACKED
        return
    assert found.packed is None
    assert found.why_not_packed.startswith(why)
    assert found.padded == (padded if layout == "auto" else None)


def test_a_host_that_could_pack_pads_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own trial stopped at packed rows: how to pad them is tried then."""
    plan, config = plan_of(0, 1), full_config("roberta")

    def gather(everyone: list[Any], mine: Any, *, group: Any = None) -> None:
        everyone[:] = [PACKED.to_dict(), LEAKS.to_dict()]

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    exp = experiment(tmp_path, layout="auto")
    method = select_attention.select_attention(exp.model, exp.data, plan, config, device=CPU)
    assert method == AttentionMethod("sdpa", "padding_mask", "padded")


def test_what_one_host_refuses_is_raised_by_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others would wait for its result."""
    exp = experiment(tmp_path)
    exp.model.attention = "flex_attention"
    plan = plan_of(0, 0, 1)
    sent: list[Any] = [PACKED.to_dict(), None, None]

    def gather(everyone: list[Any], mine: Any, *, group: Any = None) -> None:
        sent[rank] = mine
        everyone[:] = sent

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    refuse = select_attention.candidates
    errors = []
    for rank, local in ((2, 0), (0, 0), (1, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        if rank == 2:
            monkeypatch.setattr(
                select_attention,
                "try_on_this_host",
                lambda model, data, plan, config, device, head: refuse(
                    model.attention, plan, device
                ),
            )
        else:
            monkeypatch.setattr(select_attention, "try_on_this_host", lambda *_, **__: PACKED)
        with pytest.raises(ConfigError) as caught:
            select_attention.select_attention(exp.model, exp.data, plan, None, device=CPU)  # type: ignore[arg-type]
        errors.append(str(caught.value))
    assert len(set(errors)) == 1
    assert errors[0].startswith("Host node-b: model.attention=flex_attention trains on CUDA only")


def test_an_encoder_that_pools_a_sequence_itself_gets_one_a_line(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bert", num_labels=3)
    exp = experiment(tmp_path)
    exp.data.layout = "auto"
    found = select_attention.try_layouts(
        exp.model, exp.data, config, packing=("sdpa",), head=CLASSIFICATION
    )
    assert found.packed is None
    assert found.padded is not None
    assert not found.padded.causal
    assert "BertForSequenceClassification pools" in found.why_not_packed
