"""What is typed takes effect, or is refused."""

from __future__ import annotations

import functools

import pytest

from llmx.compose.effects import RULES, check_effects
from llmx.config import Experiment, experiment_from_dict, known_keys
from llmx.errors import ConfigError
from tests.composing import composed, values


def test_a_model_path_or_hosts_alone_are_the_model_and_the_hardware() -> None:
    model = composed(["model.path=Qwen/Qwen3-8B", "hardware=a100x8"]).experiment.model
    assert (model.kind, model.init, model.path) == ("hf", "pretrained", "Qwen/Qwen3-8B")
    plan = composed(["hardware.hosts=[{name: g1, slots: 2, device: a100_80g}]"]).plan
    assert [(host.name, host.slots) for host in plan.hosts] == [("g1", 2)]


@functools.cache
def with_fix(*words: str) -> Experiment:
    return experiment_from_dict(values(["task=sft", *words]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.keys.split()[0])
def test_no_rule_refuses_what_its_own_fix_reads(rule) -> None:
    """The fix that a message gives makes the key one that is read."""
    assert {*rule.keys.split()} <= {*known_keys()}
    fix = rule.fix.split(", or ")[0].split("; ")[0]
    beside = {
        "model=hf": "model.path=a/b", "data=file": "data.path=a.jsonl",
        "data=text": "data.path=a.txt", "data=labelled": "data.path=a.csv",
    }  # fmt: skip
    fix = {"model.path=...": "model=hf", "adapter.quantize=nf4": "adapter=qlora"}.get(fix, fix)
    if "hardware" in fix or "..." in fix:
        return  # needs hosts, or a file
    words = [fix, *([beside[fix]] if fix in beside else [])]
    assert rule.is_read(with_fix(*words)), words


@pytest.mark.parametrize(
    "words",
    [["task.steps=5", "task.epochs=2"], ["adapter=lora", "adapter.lr=1e-4", "optim.lr=1e-5"],
     ["zero=stage2", "zero.prefetch_bucket_size=100"], ["optim=sgd", "optim.betas=[0.9, 0.9]"],
     ["tracking=none", "tracking.project=mine"], ["sweep.slots_per_trial=1"],
     ["optim.muon_lr=0.02"],
     ["adapter=lora", "adapter.double_quant=false"], ["data=demo", "data.eval_fraction=0.1"]],
)  # fmt: skip
def test_a_word_that_nothing_reads_is_refused(words) -> None:
    exp = experiment_from_dict(values(["hardware=cpu2", *words]))
    with pytest.raises(ConfigError, match="has no effect"):
        check_effects(exp, words)


def test_the_head_of_a_classifier_learns_at_optim_lr() -> None:
    """It is new and trained whole, so both rates are read beside an adapter."""
    words = ["model=hf", "model.path=a/b", "adapter=lora", "adapter.lr=1e-4", "optim.lr=1e-5"]
    with pytest.raises(ConfigError, match=r"beside adapter\.lr"):
        check_effects(experiment_from_dict(values(words)), words)
    words += ["task=classify", "data=labelled", "data.path=a.csv"]
    check_effects(experiment_from_dict(values(words)), words)


def test_what_turns_something_off_is_never_refused() -> None:
    words = ["task.steps=5", "task.epochs=null", "model.path=null", "data.eval_samples=0"]
    check_effects(experiment_from_dict(values(["hardware=cpu2", "model=tiny", *words])), words)
