"""``model.liger_kernel`` with a package in its place: what is right is used, the rest is not.

The kernels themselves need a GPU.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama import modeling_llama

from llmx.errors import ConfigError
from llmx.models.liger import NOT_INSTALLED, apply_liger, liger_problem, wants_liger
from tests.rundirs import experiment
from tests.small_models import small_model

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
LLAMA = AutoConfig.for_model(
    "llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
)


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, factor: float) -> None:
    """A ``liger_kernel`` whose norms are ``factor`` times the right ones; as the real one does, it
    replaces a function of the modelling file for the whole process."""
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "monkey_patch.py").write_text("MODEL_TYPE_TO_APPLY_LIGER_FN = {'llama': None}\n")
    (package / "__init__.py").write_text(
        "from types import MethodType\n"
        "from transformers.models.llama import modeling_llama\n"
        "def _apply_liger_kernel_to_instance(\n"
        "    model, *, cross_entropy, fused_linear_cross_entropy\n"
        "):\n"
        "    assert not cross_entropy and not fused_linear_cross_entropy\n"
        "    modeling_llama.rotate_half = lambda x: modeling_llama.torch.cat(\n"
        "        (-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)\n"
        "    norm = model.model.norm\n"
        "    right = norm.forward\n"
        f"    norm.forward = MethodType(lambda self, x: right(x) * {factor}, norm)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One rank, without a process group; afterwards no stand-in is left."""

    def gather(everyone: list[Any], mine: Any, *, group: Any = None) -> None:
        everyone[0] = mine

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    yield
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        del sys.modules[name]


def wanting(tmp_path: Path, liger: bool | None) -> Any:
    exp = experiment(tmp_path)
    return dataclasses.replace(exp, model=dataclasses.replace(exp.model, liger_kernel=liger))


def test_what_computes_the_same_is_used(monkeypatch, tmp_path, capsys) -> None:
    install(monkeypatch, tmp_path, factor=1.0)
    rotate = modeling_llama.rotate_half
    assert liger_problem(LLAMA, **CPU) is None
    # The trial leaves the modelling file as it was.
    assert modeling_llama.rotate_half is rotate
    assert wants_liger(wanting(tmp_path, True).model, LLAMA, **CPU)
    assert "Liger-Kernel computes norms" in capsys.readouterr().out
    model = small_model("llama")
    try:
        apply_liger(model)
        assert isinstance(vars(model.model.norm)["forward"], MethodType)
        assert modeling_llama.rotate_half is not rotate
    finally:
        modeling_llama.rotate_half = rotate


def test_what_computes_something_else_is_refused_where_it_was_asked_for(
    monkeypatch, tmp_path
) -> None:
    install(monkeypatch, tmp_path, factor=1.01)
    rotate = modeling_llama.rotate_half
    with pytest.raises(ConfigError, match=r"rank 0: LlamaForCausalLM has another loss \(.* off"):
        wants_liger(wanting(tmp_path, True).model, LLAMA, **CPU)
    assert modeling_llama.rotate_half is rotate


def test_an_architecture_without_kernels_is_named(monkeypatch, tmp_path) -> None:
    install(monkeypatch, tmp_path, factor=1.0)
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=128)
    assert liger_problem(config, **CPU) == "it has no kernels for the architecture gpt2"


def test_a_missing_package_is_named_where_it_was_asked_for(tmp_path) -> None:
    if liger_problem(LLAMA, **CPU) != NOT_INSTALLED:
        pytest.skip("liger-kernel is installed")
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        wants_liger(wanting(tmp_path, True).model, LLAMA, **CPU)


def test_a_cpu_does_without_unasked(monkeypatch, tmp_path) -> None:
    install(monkeypatch, tmp_path, factor=1.0)
    assert not wants_liger(wanting(tmp_path, None).model, LLAMA, **CPU)
    assert not wants_liger(wanting(tmp_path, False).model, LLAMA, **CPU)
