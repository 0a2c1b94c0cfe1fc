"""``model.liger_kernel`` with a package in its place: what is right is used, the rest refused.

The kernels themselves need a GPU (``tests/gpu``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from llmx.errors import ConfigError
from llmx.train.attention import Way
from llmx.train.engine import use_liger_kernel
from tests.rundirs import experiment
from tests.small_models import small_model


def engine_of(model: Any) -> Any:
    return SimpleNamespace(
        engine=model,
        module=model,
        way=Way(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[dict[str, Any]]]:
    """A ``liger_kernel`` whose norms are ``factor`` times the right ones."""

    def install(factor: float) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def apply(*, model: Any, **options: Any) -> None:
            calls.append(options)
            norm = model.model.norm
            right = norm.forward
            norm.forward = lambda hidden: right(hidden) * factor

        package = ModuleType("liger_kernel.transformers")
        package._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
        monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
        return calls

    return install


def test_what_computes_the_same_is_used(package: Any, tmp_path: Path) -> None:
    calls = package(1.0001)
    model = small_model("llama")
    use_liger_kernel(experiment(tmp_path), engine_of(model))
    assert calls == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
    assert model.training


def test_what_computes_something_else_is_refused(package: Any, tmp_path: Path) -> None:
    package(30.0)
    with pytest.raises(ConfigError, match=r"changes the loss of LlamaForCausalLM from .* to "):
        use_liger_kernel(experiment(tmp_path), engine_of(small_model("llama")))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        use_liger_kernel(experiment(tmp_path), engine_of(small_model("llama")))
