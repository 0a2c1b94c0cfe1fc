"""Before a launch: packing is settled, and what cannot be trained is refused, in seconds."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from llmx import packing
from llmx.compose import Composed, plan_experiment
from llmx.errors import ConfigError
from llmx.models.trial import stand_ins, try_model
from llmx.models.varlen import SEGMENTS
from llmx.packing import known_answer, settle_layout
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
    after = settle_layout(before, stream=out)
    assert after.experiment.data.layout == "padded"
    assert before.experiment.data.layout == "auto"
    assert (
        "rows are not packed (data.layout=auto): the loss of a row of Qwen3Next" in out.getvalue()
    )
    assert known_answer(before.experiment) is not None
    monkeypatch.setattr(packing, "_ask", lambda *_, **__: pytest.fail("asked twice"))
    assert settle_layout(before, stream=out).experiment == after.experiment


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial in this process, which has transformers loaded already."""
    monkeypatch.setattr(
        packing, "_ask", lambda exp, accelerator: try_model(exp, accelerator=accelerator)
    )


@pytest.mark.parametrize("model", ["llama", "mistral", "gpt_oss"])
def test_rows_are_packed_where_they_are_isolated(model: str, tmp_path: Path, here: None) -> None:
    out = io.StringIO()
    after = settle_layout(composed(tmp_path, model), stream=out)
    assert after.experiment.data.layout == "packed"
    assert out.getvalue() == ""


def test_packed_in_words_is_refused(tmp_path: Path, here: None) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.layout=packed is not right for .*Set data\.layou"
    ):
        settle_layout(composed(tmp_path, "bart", layout="packed"), stream=io.StringIO())


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_what_is_no_causal_model_is_refused(layout: str, tmp_path: Path, here: None) -> None:
    with pytest.raises(ConfigError, match="xlnet cannot be trained.*no causal language model"):
        settle_layout(composed(tmp_path, "xlnet", layout=layout), stream=io.StringIO())


def test_where_nothing_can_be_asked_the_ranks_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = composed(tmp_path, "llama")
    monkeypatch.setattr(packing, "PROGRAM", "llmx.no_such_module")
    assert settle_layout(before, stream=io.StringIO()) is before
    before.experiment.model.trust_remote_code = True
    monkeypatch.setattr(packing.subprocess, "run", lambda *_, **__: pytest.fail("code of the Hub"))
    assert settle_layout(before, stream=io.StringIO()) is before


def test_a_plan_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = composed(tmp_path, "llama")
    before.experiment.dry_run = True
    monkeypatch.setattr(packing, "_ask", lambda *_, **__: pytest.fail("asked"))
    assert settle_layout(before, stream=io.StringIO()) is before


def test_another_config_is_another_question(tmp_path: Path) -> None:
    one = composed(tmp_path, "llama").experiment
    key = packing._key(one)
    one.data.seq_len += 1
    assert packing._key(one) != key
    one.data.seq_len -= 1
    assert packing._key(one) == key
    # Another model in the same directory: the answer for the old one says nothing of it.
    small_config("qwen3_next").save_pretrained(str(one.model.path))
    assert packing._key(one) != key


def test_kernels_of_cuda_are_stood_in_for() -> None:
    assert stand_ins("auto", "cpu") == ("sdpa", "eager")
    assert stand_ins("auto", "cuda")[0] == stand_ins("varlen", "cuda")[0] == SEGMENTS
    assert stand_ins("segments", "cpu") == (SEGMENTS,)
    assert stand_ins("sdpa", "cuda") == ("sdpa",)


def test_a_kind_of_ones_own_starts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks try it; the launch waits for nothing."""
    monkeypatch.setattr(packing, "_ask", lambda *_, **__: pytest.fail("asked before the launch"))
    exp = parity_experiment(tmp_path / "run")
    exp.data.layout = "auto"
    assert exp.model.kind == "llama"
    before = plan_experiment(exp)
    assert settle_layout(before, stream=io.StringIO()) is before
