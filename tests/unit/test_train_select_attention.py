"""What a rank decides at the start: the layout of all hosts, the attention of its own device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmx.config import Experiment
from llmx.config.schema import DeviceConfig
from llmx.errors import ConfigError
from llmx.models import select_attention as module
from llmx.models.attention import AttentionMethod
from llmx.models.isolation import TrialResult
from llmx.models.model import CLASSIFICATION
from llmx.models.select_attention import common_layout, log_lines, select_attention
from llmx.models.tiny import tiny_config
from llmx.models.varlen import SEGMENTS, VARLEN
from llmx.plan.make import attention_for
from tests.architectures import full_config
from tests.rundirs import parity_experiment
from tests.unit.test_train_attention import CPU

GPU = torch.device("cuda", 0)
PADDED = AttentionMethod("sdpa", "position_ids", "padded")
PACKED = TrialResult(AttentionMethod(), None)
LEAKS = TrialResult(None, PADDED, why_not_packed="the loss of a row differs", leaks=True)
NOT_SHOWN = TrialResult(
    None, None, why_not_packed="it could not be shown", unknown="no small model"
)
NOT_TRIED = TrialResult(None, None, unknown="no small model")
"""As one implementation alone says it."""
NEVER = TrialResult(None, None, why_not_packed="it looks ahead", why_not_trained="it looks ahead")


def experiment(*, attention: str = "auto", **data: Any) -> Experiment:
    exp = parity_experiment(Path("run"), attention=attention)
    for name, value in data.items():
        setattr(exp.data, name, value)
    return exp


def plan_of(*hosts: int, accelerator: str = "cpu", attention: str = "sdpa") -> Any:
    """What is asked of a plan here: its ranks are on these hosts, called node-a, node-b, ..."""
    return SimpleNamespace(
        precision="bf16",
        on_gpus=accelerator == "cuda",
        attention_on=lambda device: attention,
        ranks=[
            SimpleNamespace(rank=number, host=host, device=f"gpu-{host}")
            for number, host in enumerate(hosts)
        ],
        hosts=[SimpleNamespace(name=f"node-{'abc'[host]}") for host in sorted(set(hosts))],
    )


def tried(exp: Experiment, config: Any, device: torch.device = CPU) -> TrialResult:
    return module.try_on_this_host(exp.model, exp.data, plan_of(0), config, device=device)


def test_auto_packs_only_where_every_host_can() -> None:
    exp = experiment(layout="auto")
    assert common_layout(exp.model, exp.data, [PACKED, PACKED]) == "packed"
    assert common_layout(exp.model, exp.data, [PACKED, LEAKS]) == "padded"
    assert common_layout(exp.model, exp.data, [NOT_SHOWN]) == "padded"
    for results, layout, lines in (
        ({0: PACKED, 1: PACKED}, "packed", []),
        ({0: LEAKS, 1: LEAKS}, "padded", [": the loss of a row differs."]),
        ({0: PACKED, 1: LEAKS}, "padded", [" on host node-b: the loss of a row differs."]),
    ):
        wanted = [f"Rows are not packed (data.layout=auto){line}" for line in lines]
        assert log_lines(exp.data, plan_of(0, 1), results, layout) == wanted
    flash = TrialResult(AttentionMethod(VARLEN, "cu_seq_lens"), None)
    plan = plan_of(0, 0, 1, accelerator="cuda")
    first, second = log_lines(exp.data, plan, {0: flash, 1: PACKED}, "packed")
    assert first == "Attention on gpu-0: varlen."
    assert second.startswith("Attention on gpu-1: sdpa. WARNING: packed rows are isolated by a")


@pytest.mark.parametrize(
    ("layout", "results", "why"),
    [
        ("packed", [PACKED, LEAKS], r"the loss of a row differs\. Set data\.layout=auto"),
        ("packed", [PACKED, NOT_SHOWN], r"it could not be shown\. Set data\.layout=auto"),
        ("auto", [NEVER], "cannot be trained here: it looks ahead"),
        ("padded", [NEVER], "cannot be trained here: it looks ahead"),
    ],
)
def test_a_layout_that_isolates_no_rows_is_refused(layout, results, why) -> None:
    exp = experiment(layout=layout)
    with pytest.raises(ConfigError, match=why):
        common_layout(exp.model, exp.data, results)


@pytest.mark.parametrize(
    ("model", "attention", "layout", "method"),
    [
        ("llama", "auto", "auto", AttentionMethod("sdpa", "mask")),
        ("llama", "segments", "auto", AttentionMethod(SEGMENTS, "cu_seq_lens")),
        ("mistral", "auto", "auto", AttentionMethod("sdpa", "position_ids")),
        ("llama", "auto", "padded", PADDED),
        ("qwen3_next", "auto", "auto", PADDED),
        ("roberta", "auto", "auto", AttentionMethod("sdpa", "padding_mask", "padded")),
    ],
)
def test_the_method_on_a_cpu(model, attention, layout, method) -> None:
    exp = experiment(attention=attention, layout=layout, seq_len=1 << 20)
    found = tried(exp, full_config(model))
    assert getattr(found, method.layout) == method
    assert bool(found.why_not_packed) == (layout == "auto" and method.layout == "padded")


@pytest.mark.parametrize(
    ("planned", "capability", "kernel", "order"),
    [
        ("varlen", (9, 0), True, [VARLEN, "flash_attention_2", "flex_attention"]),
        # The plan does not know the torch of the hosts.
        ("varlen", (9, 0), False, ["flash_attention_2", "flex_attention"]),
        # A V100, or fp32: no flash kernel; row by row, without a mask that is kept.
        ("segments", (7, 0), False, []),
    ],
)
def test_the_order_on_cuda(planned, capability, kernel, order, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(module, "_installed", lambda name: name == "flash_attention_2")
    monkeypatch.setattr(module, "has_kernel", lambda: kernel)
    found = module.candidates("auto", plan_of(0, attention=planned), GPU)
    assert found == [*order, SEGMENTS, "sdpa", "eager"]


@pytest.mark.parametrize(
    ("device", "chosen", "message"),
    [
        (GPU, "varlen", "compute capability 8.0"),
        (GPU, "flash_attention_2", "needs the package flash-attn"),
        (CPU, "varlen", "varlen trains on CUDA only.*auto"),
        (CPU, "flex_attention", "flex_attention trains on CUDA only.*auto"),
    ],
)
def test_attention_that_this_device_has_not_is_refused(
    device, chosen, message, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(module, "_installed", lambda name: False)
    with pytest.raises(ConfigError, match=message):
        module.candidates(chosen, plan_of(0, attention="varlen"), device)


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ([NOT_TRIED, PACKED], ""),  # what cannot be tried with heads as wide as the model's
        ([LEAKS, PACKED], ""),
        ([NOT_TRIED, LEAKS], "the loss of a row differs"),
        ([NOT_SHOWN, LEAKS], "the loss of a row differs"),
        ([NOT_TRIED, NOT_TRIED], "it could not be shown that rows are then isolated: no small"),
    ],
)
@pytest.mark.parametrize("layout", ["auto", "packed"])
def test_rows_are_packed_only_where_isolation_was_shown(results, why, layout, monkeypatch) -> None:
    """A trial that could not be made does not end the search, and does not outrank a leak."""
    given = iter([*results, TrialResult(None, PADDED)])
    monkeypatch.setattr(module, "candidates", lambda *_: [VARLEN, SEGMENTS])
    monkeypatch.setattr(module, "find_methods", lambda *_, **__: next(given))
    found = tried(experiment(layout=layout), None, GPU)
    if not why:
        assert found == PACKED
        return
    assert found.packed is None
    assert found.why_not_packed.startswith(why)
    assert found.padded == (PADDED if layout == "auto" else None)


class Others:
    """All-gathers of the ranks: ``sent`` is what each of them says; this one's is put in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> None:
        self.sent, self._patch = [(trial, None) for trial in sent], monkeypatch

    def rank(self, rank: int, *, local: int) -> None:
        def gather(everyone: list[Any], mine: Any, *, group: Any = None) -> None:
            self.sent[rank] = mine if any(mine) else self.sent[rank]
            everyone[:] = self.sent

        self._patch.setenv("LOCAL_RANK", str(local))
        self._patch.setattr(torch.distributed, "get_world_size", lambda: len(self.sent))
        self._patch.setattr(torch.distributed, "get_rank", lambda: rank)
        self._patch.setattr(torch.distributed, "all_gather_object", gather)


def test_every_rank_of_a_host_knows_the_kernels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of a host tries; the model of the second is built with what it found."""
    for name in (SEGMENTS, VARLEN):
        monkeypatch.delitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, raising=False)
    found = TrialResult(AttentionMethod(SEGMENTS, "cu_seq_lens"), None)
    others = Others(monkeypatch, [found, None])
    others.rank(1, local=1)
    exp, config = experiment(), tiny_config(full_config("llama"))
    method = select_attention(exp.model, exp.data, plan_of(0, 0), config, device=CPU)
    assert others.sent[1] == (None, None)
    assert method == found.packed
    AutoModelForCausalLM.from_config(config, attn_implementation=method.implementation)


def test_a_host_that_could_pack_pads_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own trial stopped at packed rows: how to pad them is tried then."""
    Others(monkeypatch, [PACKED, LEAKS]).rank(0, local=1)
    exp, config = experiment(layout="auto"), full_config("roberta")
    method = select_attention(exp.model, exp.data, plan_of(0, 1), config, device=CPU)
    assert method == AttentionMethod("sdpa", "padding_mask", "padded")


def test_what_one_host_refuses_is_raised_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would wait for its result."""
    exp, errors = experiment(attention="flex_attention"), set()
    others, tries = Others(monkeypatch, [PACKED, None, None]), module.try_on_this_host
    for rank, local in ((2, 0), (0, 0), (1, 1)):
        others.rank(rank, local=local)
        on_host = tries if rank == 2 else lambda *_, **__: PACKED
        monkeypatch.setattr(module, "try_on_this_host", on_host)
        with pytest.raises(ConfigError) as caught:
            select_attention(exp.model, exp.data, plan_of(0, 0, 1), None, device=CPU)
        errors.add(str(caught.value))
    (error,) = errors
    assert error.startswith("Host node-b: model.attention=flex_attention trains on CUDA only")


def test_an_encoder_that_pools_a_sequence_itself_gets_one_a_line() -> None:
    config, exp = AutoConfig.for_model("bert", num_labels=3), experiment(layout="auto")
    found = module.try_layouts(exp.model, exp.data, config, packing=("sdpa",), head=CLASSIFICATION)
    assert found.packed is None
    assert found.padded is not None
    assert not found.padded.causal
    assert "BertForSequenceClassification pools" in found.why_not_packed


@pytest.mark.parametrize(
    ("accelerator", "precision", "layout", "attention"),
    [
        ("cuda", "fp16", "packed", "varlen"),
        ("cuda without bf16", "fp16", "packed", "segments"),
        ("cuda", "fp32", "packed", "segments"),
        ("cpu", "fp32", "packed", "sdpa"),
        ("cuda", "bf16", "padded", "sdpa"),
    ],
)
def test_the_plan_names_the_attention(accelerator, precision, layout, attention) -> None:
    accelerator, _, without = accelerator.partition(" without ")
    precisions = [one for one in ("fp32", "fp16", "bf16") if one != without]
    device = DeviceConfig(accelerator=accelerator, precisions=precisions)
    exp = experiment(layout=layout)
    assert attention_for(exp.model, exp.data, device, precision) == attention
