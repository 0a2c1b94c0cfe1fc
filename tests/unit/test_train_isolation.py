"""The trial on a tiny model: what it says of every causal architecture that transformers has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.models import isolation
from llmx.models.attention import AttentionMethod, methods
from llmx.models.isolation import TrialResult, find_methods
from llmx.models.liger import NOT_INSTALLED, apply_liger, liger_problem, wants_liger
from llmx.models.model import BACKBONE, MASKED_LM
from tests.architectures import each_family, full_config, small_config
from tests.small_models import small_model

PADDED = (
    # State or convolution along the sequence, and a forward that has no way of cutting it.
    "qwen3_next", "qwen3_5_text", "granitemoehybrid", "jamba", "nemotron_h", "lfm3", "mamba2",
    "rwkv", "xlstm", "minimax", "olmo_hybrid", "kimi_linear", "deepseek_v4", "mamba", "zamba2",
    # Windows in some layers alone, with attention that no kernel for packed rows computes.
    "gpt_oss", "afmoe",
    # Positions that are swallowed, or shifted by the padding's id, or counted from a mask.
    "bart", "mbart", "marian", "pegasus", "roberta", "bloom", "openai-gpt",
)  # fmt: skip


@pytest.mark.parametrize("name", each_family())
def test_packed_equals_alone_or_packing_is_off(name: str) -> None:
    if name == "qwen4_exp_text":
        try:
            torch.zeros(1).scatter(0, torch.zeros(1, dtype=torch.int32), 1.0)
        except RuntimeError:
            pytest.skip("this torch scatters by int64 alone (int32: 2.8), which qwen4_exp needs")
    full, small = full_config(name), small_config(name)
    if name in ("llama", "qwen3_next", "gemma3_text", "mixtral", "jamba"):
        assert type(small) is type(full)
        assert small.num_hidden_layers < full.num_hidden_layers
        kinds = getattr(full, "layer_types", None)
        assert kinds is None or set(small.layer_types) == set(kinds), "every kind of layer is kept"
    found = find_methods(full)
    assert not found.unknown, f"{name}: {found.unknown}"
    assert found.packed or found.why_not_packed
    assert found.packed or found.padded or found.why_not_trained
    method = found.packed or found.padded
    if method is not None:  # what was switched to is what a model can be built with
        AutoModelForCausalLM.from_config(small, attn_implementation=method.implementation)
    if name in ("mistral", "llama4_text"):  # a mask of ours would replace the window
        assert found.packed is not None
        assert found.packed.isolation == "position_ids"
    if name in PADDED:
        assert found.packed is None
        assert found.padded is not None


def test_a_window_that_no_row_reaches_changes_nothing() -> None:
    config = full_config("mistral")
    for more, told in ((0, "mask"), (1, "position_ids")):
        found = find_methods(config, seq_len=config.sliding_window + more)
        assert found.packed == AttentionMethod("sdpa", told)


def test_an_encoder_that_looks_ahead_is_told_so() -> None:
    config = full_config("bert")
    config.is_decoder = False
    found = find_methods(config)
    assert found.packed is found.padded is None
    assert "changes with the tokens after it" in found.why_not_trained
    assert "Set it to true" in found.why_not_trained


@pytest.fixture
def changed_llama(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], TrialResult]:
    """What the trial finds of a tiny llama after a change."""
    made = isolation.tiny_model

    def find(change: Any) -> TrialResult:
        def tiny_model(config: Any, **options: Any) -> Any:
            model = made(config, **options)
            change(model)
            return model

        monkeypatch.setattr(isolation, "tiny_model", tiny_model)
        return find_methods(full_config("llama"))

    return find


class _Leaky(nn.Module):
    """Adds a little of the token before, whatever row it is of."""

    def __init__(self, inner: nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, hidden, *args, **kwargs):
        shifted = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return self.inner(hidden + self.share * shifted, *args, **kwargs)


@pytest.mark.parametrize("share", [0.0, 0.02])
def test_a_small_leak_is_found(share: float, changed_llama: Any) -> None:
    def leak(model: Any) -> None:
        layer = model.model.layers[1].mlp
        layer.up_proj = _Leaky(layer.up_proj, share)

    found = changed_llama(leak)
    assert (found.packed is None) == (share > 0)
    assert found.packed or found.padded


class _Shifted(nn.Embedding):
    """Positions one further, as a model may do that counts from another start when padded."""

    def forward(self, ids):
        return super().forward(ids) * (1.0 if ids.shape[-1] < 14 else 1.1)


def test_a_model_that_padding_changes_is_not_trained(changed_llama: Any) -> None:
    found = changed_llama(lambda model: setattr(model.model.embed_tokens, "__class__", _Shifted))
    assert found.packed is found.padded is None
    assert "when it is padded" in found.why_not_trained


def test_what_cannot_be_made_small_has_no_answer() -> None:
    config = full_config("llama")
    config.hidden_act = "no such activation"
    found = find_methods(config)
    assert found.packed is found.padded is None
    assert "KeyError" in found.unknown


ENCODERS = {
    # Masks of ours; else each row in a line of its own.
    "bert": "packed", "electra": "packed", "ernie": "packed", "nomic_bert": "packed",
    "megatron-bert": "packed",
    # Positions that are shifted by the padding's id, a mask of 2 dimensions only, or windows.
    "xlm-roberta": "padded", "deberta-v2": "padded", "modernbert": "padded",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "head"), [*((n, MASKED_LM) for n in sorted(ENCODERS)), ("bert", BACKBONE)]
)
def test_encoders_are_isolated_where_their_head_may_see_ahead(name: str, head: str) -> None:
    found = find_methods(AutoConfig.for_model(name), head=head)
    method = found.packed or found.padded
    assert method is not None
    assert (method.layout, method.causal) == (ENCODERS[name], False)


def test_the_backbone_of_a_causal_model_stays_causal() -> None:
    """And the trial leaves random numbers as they were."""
    before = torch.get_rng_state()
    found = find_methods(full_config("gpt2"), head=BACKBONE)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.packed == find_methods(full_config("gpt2")).packed
    assert found.packed is not None
    assert found.packed.causal


def test_a_masked_model_without_a_mask_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The causal mask of packed rows would hide what follows: the trial sees it."""
    monkeypatch.setattr(
        isolation,
        "methods",
        lambda name, layout, causal: methods(name, layout) if layout == "packed" else (),
    )
    found = find_methods(AutoConfig.for_model("bert"), head=MASKED_LM, layouts=["packed"])
    assert found.packed is None
    assert "when it is packed with others" in found.why_not_packed


# --- Liger-Kernel, with a package in its place: its kernels need a GPU ---------------------------

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


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        del sys.modules[name]


@pytest.fixture
def install(
    group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[float], None]]:
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


def test_what_computes_the_same_is_used(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install(1.0)
    rotate = modeling_llama.rotate_half
    assert liger_problem(LLAMA, **CPU) is None
    assert modeling_llama.rotate_half is rotate, "the trial leaves the modelling file as it was"
    wanted, unasked, off = (replace(ModelConfig(), liger_kernel=is_) for is_ in (True, None, False))
    assert wants_liger(wanted, LLAMA, **CPU)
    assert "Liger-Kernel computes norms" in capsys.readouterr().out
    assert not wants_liger(unasked, LLAMA, **CPU), "a CPU does without"
    assert not wants_liger(off, LLAMA, **CPU)
    other = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=128)
    assert liger_problem(other, **CPU) == "it has no kernels for the architecture gpt2"
    model = small_model("llama")
    try:
        apply_liger(model)
        assert isinstance(vars(model.model.norm)["forward"], MethodType)
        assert modeling_llama.rotate_half is not rotate
    finally:
        modeling_llama.rotate_half = rotate


def test_what_computes_something_else_is_refused_where_it_was_asked_for(install: Any) -> None:
    wanted = replace(ModelConfig(), liger_kernel=True)
    if liger_problem(LLAMA, **CPU) == NOT_INSTALLED:
        with pytest.raises(ConfigError, match="pip install liger-kernel"):
            wants_liger(wanted, LLAMA, **CPU)
    install(1.01)
    with pytest.raises(ConfigError, match=r"rank 0: LlamaForCausalLM has another loss \(.* off"):
        wants_liger(wanted, LLAMA, **CPU)
