"""``model.liger_kernel`` with a package in its place: what is right is used, the rest is not.

The kernels themselves need a GPU.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama import modeling_llama

from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.models.liger import NOT_INSTALLED, apply_liger, liger_problem, wants_liger
from tests.rundirs import experiment
from tests.small_models import small_model

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
LLAMA = AutoConfig.for_model(
    "llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
)
STAND_IN = """
from types import MethodType
from transformers.models.llama import modeling_llama

def _apply_liger_kernel_to_instance(model, *, cross_entropy, fused_linear_cross_entropy):
    assert not cross_entropy and not fused_linear_cross_entropy
    modeling_llama.rotate_half = lambda x: modeling_llama.torch.cat(
        (-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)
    norm = model.model.norm
    right = norm.forward
    norm.forward = MethodType(lambda self, x: right(x) * FACTOR, norm)
"""


pytestmark = pytest.mark.usefixtures("group")


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        del sys.modules[name]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[float], None]]:
    """Installs a ``liger_kernel`` whose norms are so many times the right ones; as the real one
    does, it replaces a function of the modelling file for the whole process."""

    def write(factor: float) -> None:
        package = tmp_path / "liger_kernel" / "transformers"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "monkey_patch.py").write_text("MODEL_TYPE_TO_APPLY_LIGER_FN = {'llama': None}")
        (package / "__init__.py").write_text(STAND_IN.replace("FACTOR", str(factor)))
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()

    rotate = modeling_llama.rotate_half
    yield write
    assert modeling_llama.rotate_half is rotate
    forget()


def wanting(liger: bool | None) -> ModelConfig:
    return dataclasses.replace(experiment(Path("run")).model, liger_kernel=liger)


def test_what_computes_the_same_is_used(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install(1.0)
    rotate = modeling_llama.rotate_half
    assert liger_problem(LLAMA, **CPU) is None
    assert modeling_llama.rotate_half is rotate, "the trial leaves the modelling file as it was"
    assert wants_liger(wanting(True), LLAMA, **CPU)
    assert "Liger-Kernel computes norms" in capsys.readouterr().out
    model = small_model("llama")
    try:
        apply_liger(model)
        assert isinstance(vars(model.model.norm)["forward"], MethodType)
        assert modeling_llama.rotate_half is not rotate
    finally:
        modeling_llama.rotate_half = rotate


def test_what_computes_something_else_is_refused_where_it_was_asked_for(install: Any) -> None:
    install(1.01)
    with pytest.raises(ConfigError, match=r"rank 0: LlamaForCausalLM has another loss \(.* off"):
        wants_liger(wanting(True), LLAMA, **CPU)


def test_an_architecture_without_kernels_is_named(install: Any) -> None:
    install(1.0)
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=128)
    assert liger_problem(config, **CPU) == "it has no kernels for the architecture gpt2"


def test_a_missing_package_is_named_where_it_was_asked_for() -> None:
    if liger_problem(LLAMA, **CPU) != NOT_INSTALLED:
        pytest.skip("liger-kernel is installed")
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        wants_liger(wanting(True), LLAMA, **CPU)


@pytest.mark.parametrize("liger", [None, False])
def test_a_cpu_does_without_unasked(install: Any, liger: bool | None) -> None:
    install(1.0)
    assert not wants_liger(wanting(liger), LLAMA, **CPU)
