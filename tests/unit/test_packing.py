"""Before a launch: packing is settled, and what cannot be trained is refused, in seconds."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest

from llmx.compose.complete import Composed, plan_experiment
from llmx.errors import ConfigError
from llmx.lifecycle import aside, packing
from llmx.lifecycle.packing import cached_result, resolve_layout
from llmx.models.trial import cpu_substitutes
from llmx.models.varlen import SEGMENTS
from llmx.tasks.trial import try_task
from tests.architectures import small_config
from tests.rundirs import parity_experiment


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))


def composed(tmp_path: Path, model: str, **data: Any) -> Composed:
    exp = parity_experiment(tmp_path / "run")
    directory = tmp_path / model
    small_config(model).save_pretrained(directory)
    exp.model.kind, exp.model.path, exp.model.config = "hf", str(directory), {}
    for name, value in {"layout": "auto", **data}.items():
        setattr(exp.data, name, value)
    return plan_experiment(exp)


def test_a_model_whose_rows_would_mix_is_padded_and_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as a launch does it."""
    before, out = composed(tmp_path, "qwen3_next"), io.StringIO()
    after = resolve_layout(before, stream=out)
    assert after.experiment.data.layout == "padded"
    assert before.experiment.data.layout == "auto"
    assert (
        "rows are not packed (data.layout=auto): the loss of a row of Qwen3Next" in out.getvalue()
    )
    assert (
        cached_result(
            before.experiment.model,
            before.experiment.data,
            before.experiment.task,
            accelerator="cpu",
        )
        is not None
    )
    monkeypatch.setattr(packing, "_run_trial", lambda *_, **__: pytest.fail("asked twice"))
    assert resolve_layout(before, stream=out).experiment == after.experiment


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial in this process, which has transformers loaded already."""
    monkeypatch.setattr(
        packing, "_run_trial", lambda exp, accelerator: try_task(exp, accelerator=accelerator)
    )


@pytest.mark.parametrize("model", ["llama", "mistral", "gpt_oss"])
def test_rows_are_packed_where_they_are_isolated(model: str, tmp_path: Path, here: None) -> None:
    out = io.StringIO()
    after = resolve_layout(composed(tmp_path, model), stream=out)
    # Not settled: the ranks try their own devices, at a resume on other ones, too.
    assert after.experiment.data.layout == "auto"
    assert out.getvalue() == ""


def test_packed_in_words_is_refused(tmp_path: Path, here: None) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.layout=packed cannot be used with .*Set data\.layou"
    ):
        resolve_layout(composed(tmp_path, "bart", layout="packed"), stream=io.StringIO())


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_what_is_no_causal_model_is_refused(layout: str, tmp_path: Path, here: None) -> None:
    with pytest.raises(ConfigError, match="xlnet cannot be trained.*no causal language model"):
        resolve_layout(composed(tmp_path, "xlnet", layout=layout), stream=io.StringIO())


def test_where_nothing_can_be_asked_the_ranks_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = composed(tmp_path, "llama")
    monkeypatch.setattr(packing, "PROGRAM", "llmx.no_such_module")
    assert resolve_layout(before, stream=io.StringIO()) is before
    before.experiment.model.trust_remote_code = True
    monkeypatch.setattr(aside.subprocess, "run", lambda *_, **__: pytest.fail("code of the Hub"))
    assert resolve_layout(before, stream=io.StringIO()) is before


def test_a_plan_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = composed(tmp_path, "llama")
    before.experiment.dry_run = True
    monkeypatch.setattr(packing, "_run_trial", lambda *_, **__: pytest.fail("asked"))
    assert resolve_layout(before, stream=io.StringIO()) is before


def test_another_config_is_another_question(tmp_path: Path) -> None:
    one = composed(tmp_path, "llama").experiment
    key = packing._cached(one.model, one.data, one.task, "cpu")
    one.data.seq_len += 1
    assert packing._cached(one.model, one.data, one.task, "cpu") != key
    one.data.seq_len -= 1
    assert packing._cached(one.model, one.data, one.task, "cpu") == key
    # Another model in the same directory: the answer for the old one says nothing of it.
    small_config("qwen3_next").save_pretrained(str(one.model.path))
    assert packing._cached(one.model, one.data, one.task, "cpu") != key

    assert packing._cached(one.model, one.data, one.task, "cuda") != packing._cached(
        one.model, one.data, one.task, "cpu"
    )


def test_a_branch_of_the_hub_that_moved_is_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial reads what the cache of the Hub holds of it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    one = composed(tmp_path, "llama").experiment
    one.model.path = "somebody/model"
    reference = tmp_path / "hub" / "models--somebody--model" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    keys = set()
    for commit in ("1" * 40, "2" * 40):
        reference.write_text(commit)
        keys.add(packing._cached(one.model, one.data, one.task, "cpu"))
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("model", "attention", "warned"),
    [
        ("gpt_oss", "segments", "gpu: packed rows are isolated with a mask of 64 x 64, kept"),
        ("gpt_oss", "varlen", "unless flex_attention fits it"),
        ("llama", "segments", None),
    ],
)
def test_a_dense_mask_that_auto_leads_to_is_in_the_plan(
    model: str, attention: str, warned: str | None, tmp_path: Path, here: None
) -> None:
    from llmx.config.schema import DeviceConfig

    before = composed(tmp_path, model, seq_len=64)
    before.experiment.model.attention = "auto"
    before.experiment.hardware.devices["gpu"] = DeviceConfig(accelerator="cuda")
    plan = dataclasses.replace(
        before.plan, accelerator="cuda", attention=(("gpu", attention),), warnings=()
    )
    after = resolve_layout(dataclasses.replace(before, plan=plan), stream=io.StringIO())
    assert len(after.plan.warnings) == (warned is not None)
    assert warned is None or warned in after.plan.warnings[0]


def test_kernels_of_cuda_have_substitutes_on_a_cpu() -> None:
    assert cpu_substitutes("auto", "cpu") == ("sdpa", "eager")
    assert cpu_substitutes("auto", "cuda")[0] == cpu_substitutes("varlen", "cuda")[0] == SEGMENTS
    assert cpu_substitutes("segments", "cpu") == (SEGMENTS,)
    assert cpu_substitutes("sdpa", "cuda") == ("sdpa",)


def test_a_kind_of_ones_own_starts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks try it; the launch waits for nothing."""
    monkeypatch.setattr(
        packing, "_run_trial", lambda *_, **__: pytest.fail("asked before the launch")
    )
    exp = parity_experiment(tmp_path / "run")
    exp.data.layout = "auto"
    assert exp.model.kind == "llama"
    before = plan_experiment(exp)
    assert resolve_layout(before, stream=io.StringIO()) is before
