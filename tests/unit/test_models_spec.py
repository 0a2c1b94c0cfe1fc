"""What a task says of its networks: a source and a precision of their own, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.errors import ConfigError
from llmx.models.model import ModelSpec
from llmx.plan import ds_config, make_plan
from llmx.train.engine.build import build_networks, check_spec, check_tokenizer, with_source
from tests.reference import VOCABULARY, word_tokenizer, write_pretrained
from tests.rundirs import experiment


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precision": "bf16"}, "precision='bf16' of a trained network"),
        ({"revision": "main"}, "revision='main' is of a source, and there is none"),
        ({"head": "tail"}, "head='tail' is none of"),
    ],
)
def test_what_is_no_network(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec(**values)


def test_a_frozen_network_has_fewer_bits_than_the_run_only_in_fp32() -> None:
    check_spec(ModelSpec(trained=False, precision="bf16"), precision="fp32")
    check_spec(ModelSpec(trained=False, precision="bf16"), precision="bf16")
    with pytest.raises(ConfigError, match="DeepSpeed casts all networks of an engine to precision"):
        check_spec(ModelSpec(trained=False, precision="fp32"), precision="bf16")
    with pytest.raises(ConfigError, match="precision=fp8 is not one of fp32, bf16, fp16"):
        check_spec(ModelSpec(trained=False, precision="fp8"), precision="fp32")


def test_a_source_brings_its_own_config_and_no_trust(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", model={"trust_remote_code": True, "path": "owner/main"})
    assert with_source(exp, ModelSpec()) is exp
    own = with_source(exp, ModelSpec(trained=False, source="owner/other", revision="v2")).model
    assert (own.path, own.revision, own.init, own.config) == ("owner/other", "v2", "pretrained", {})
    assert own.kind == "hf"
    assert not own.trust_remote_code
    assert with_source(exp, ModelSpec(source="owner/main")).model.trust_remote_code


def build(exp: Any, spec: ModelSpec) -> Any:
    plan = make_plan(exp)
    config = ds_config(exp.model, exp.zero, exp.optim, plan)
    networks = build_networks(
        exp,
        plan,
        config,
        specs={"judge": spec},
        tokenizer=word_tokenizer(),
        device=torch.device("cpu"),
    )
    return networks["judge"]


def test_a_frozen_network_of_another_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmx.train.engine.build.select_attention", sdpa)
    write_pretrained(tmp_path / "judge")
    exp = experiment(tmp_path / "run", ranks=1, data={"seq_len": 48})
    spec = ModelSpec(trained=False, source=str(tmp_path / "judge"), precision="bf16")
    made = build(exp, spec)
    assert made.config.model_type == "gpt2"
    assert made.config.vocab_size == VOCABULARY
    assert {parameter.dtype for parameter in made.network.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in made.network.parameters())


def sdpa(*arguments: Any, **more: Any) -> Any:
    from llmx.models.attention import AttentionMethod

    return AttentionMethod("sdpa", "mask", "packed")


def test_a_wrong_source_is_named(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", ranks=1, data={"seq_len": 48})
    with pytest.raises(ConfigError) as found:
        build(exp, ModelSpec(trained=False, source=str(tmp_path / "nothing")))
    said = str(found.value)
    assert said.startswith(f"The model 'judge' of the task, ModelSpec(source={tmp_path}/nothing")
    write_pretrained(tmp_path / "short")
    exp = experiment(tmp_path / "run", ranks=1, data={"seq_len": 128})
    with pytest.raises(ConfigError, match=r"The model 'judge'.* is over the 64 positions"):
        build(exp, ModelSpec(trained=False, source=str(tmp_path / "short")))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_pretrained(tmp_path / "judge")
    own = with_source(experiment(tmp_path / "run"), ModelSpec(source=str(tmp_path / "judge")))
    check_tokenizer(own.model, word_tokenizer())
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["more"])
    check_tokenizer(own.model, tokenizer)  # whether its embedding has the row is another question
    vocabulary = {**tokenizer.get_vocab(), "w3": 4, "w4": 3}

    class Other:
        def get_vocab(self) -> dict[str, int]:
            return vocabulary

    with pytest.raises(ConfigError, match=r"2 of 91 tokens have different ids, e\.g\. 'w4'"):
        check_tokenizer(own.model, Other())
    (tmp_path / "none").mkdir()
    check_tokenizer(
        with_source(experiment(tmp_path / "run"), ModelSpec(source=str(tmp_path / "none"))).model,
        tokenizer,
    )


def test_a_network_from_scratch_says_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmx.train.engine.build.select_attention", sdpa)
    made = build(experiment(tmp_path / "run", ranks=1, data={"seq_len": 48}), ModelSpec())
    assert made.config.architectures == ["LlamaForCausalLM"]
