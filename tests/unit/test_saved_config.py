"""A run starts from a saved ``config.yaml``: ``python -m llmx config.yaml [words]``."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llmx.cli.arguments import as_meant
from llmx.cli.plan import composed_line
from llmx.cli.words import parse
from llmx.compose.complete import Composed, complete
from llmx.compose.effects import check_effects
from llmx.compose.overrides import check_overrides
from llmx.config import Experiment, experiment_from_dict, to_dict
from llmx.errors import ConfigError
from llmx.run.provenance.differences import changed_values
from llmx.run.snapshot import dump_config
from tests.composing import composed, values

CLUSTER = "hardware.hosts=[{name: n1, slots: 4, device: mine}, {name: n2, slots: 2, device: mine}]"
MINE = "hardware.devices.mine={accelerator: cuda, memory_gib: 80, compute_capability: 8.0}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1 + 1?", "completion": "2"}\n' * 8)
    return tmp_path


def saved(*words: str, run_dir: str = "/runs/theirs", **changed: object) -> Experiment:
    """``theirs.yaml``: the config of a run of these words; returns its experiment."""
    exp, problems = complete(experiment_from_dict(values([*words], run_dir=run_dir)))
    assert not problems
    text = dump_config(exp)
    Path("theirs.yaml").write_text(yaml.safe_dump({**yaml.safe_load(text), **changed}))
    return exp


def again(*words: str) -> Composed:
    """The run of ``python -m llmx theirs.yaml``, with these words, in a directory of its own."""
    return composed_line(parse("train", ["theirs.yaml", *words, "run_dir=/runs/mine"]))


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=demo"],
        ["model=tiny", "data.path=rows.jsonl", "optim=sgd", "batch.global_batch=4"],
        ["model=llama3_8b", "data.path=rows.jsonl", "adapter=qlora", "zero=stage1", CLUSTER, MINE],
        ["model=llama_1_7b", "model.tokenizer=demo", "data.path=rows.jsonl", "zero=stage3_zeropp"],
        ["data=mixture", "data.sources=[{path: rows.jsonl, weight: 2}]", "optim=adafactor"],
        ["task=grpo", "model=llama3_8b", CLUSTER, MINE, "rollout.hosts=[n2]", "launch=rsync"],
        ["data.path=rows.jsonl", "data.system='it\\'s \\${so}, {really}: a\nb\\\\'",
         "data.label_names={0: no, 1: 'yes, so'}", "optim.lr_scale={*.layers.\\[0-3\\].*: 0.5}"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_the_config_of_a_run_composes_that_run(words: list[str]) -> None:
    exp = saved(*words)
    overrides = as_meant(["theirs.yaml"])
    mine = experiment_from_dict(values(["theirs.yaml"], run_dir="/runs/theirs"))
    check_effects(mine, overrides)
    assert changed_values(to_dict(exp), to_dict(complete(mine)[0])) == {}


def test_what_belongs_to_the_other_run_stays_there() -> None:
    exp = saved("dry_run=true", "launch.detach=true", "hardware=cpu2")
    mine = again().experiment
    assert (exp.name, mine.name) == ("demo", "demo"), "the experiment's name"
    assert (mine.run_dir, mine.dry_run, mine.launch.detach) == ("/runs/mine", False, False)
    saved("data.path=rows.jsonl")
    assert again().experiment.name == "mine"
    saved("data.path=rows.jsonl", "name=theirs-too")
    assert again().experiment.name == "theirs-too"


def test_a_local_run_is_local_on_this_machine() -> None:
    theirs = saved("hardware=local", "hardware.price_per_hour={cpu: 2}")
    config = yaml.safe_load(Path("theirs.yaml").read_text())
    config["hardware"]["hosts"][0] |= {"slots": 8, "device": "a100_80g"}
    Path("theirs.yaml").write_text(yaml.safe_dump(config))
    assert again().experiment.hardware == theirs.hardware
    assert again("hardware.slots=1").plan.world_size == 1


def test_named_hosts_stay_and_a_chosen_group_replaces_its_section() -> None:
    exp = saved("model=tiny", CLUSTER, MINE, "zero=stage1", "optim=muon", "precision=fp32")
    assert again().experiment.hardware == exp.hardware
    mine = again("hardware=cpu2", "zero=3", "optim=adamw", "task.steps=7").experiment
    assert [host.name for host in mine.hardware.hosts] == ["localhost"]
    assert (mine.zero.stage, mine.optim.kind, mine.task.steps) == (3, "adamw", 7)
    assert composed(["zero=3", "theirs.yaml"]).experiment.zero.stage == 3, "wherever it stands"


def test_values_that_nothing_reads_are_no_mistake_and_typed_words_are() -> None:
    """Completing fills in optim.lr beside the rate of an adapter."""
    words = ["model=llama3_8b", "adapter=lora", "data.path=rows.jsonl", "hardware=a100x8"]
    rates = saved(*words)
    mine = again().experiment
    assert (mine.adapter.lr, mine.optim.lr) == (rates.adapter.lr, rates.optim.lr)
    assert again("adapter.lr=null").experiment.optim.lr == rates.optim.lr
    with pytest.raises(ConfigError, match=r"^optim.muon_lr=0.1: has no effect"):
        again("optim.muon_lr=0.1")
    assert saved().task.epochs
    assert again("task.steps=5").experiment.task.steps == 5


def test_a_wrong_key_is_refused_with_its_line() -> None:
    saved("data.path=rows.jsonl", hardware=to_dict(saved(CLUSTER, MINE))["hardware"])
    text = Path("theirs.yaml").read_text()
    for key, wrong in (("seq_len", "seqlen"), ("fingerprint", "fingerprnt")):
        line = next(n for n, row in enumerate(text.split("\n"), 1) if f" {key}:" in row)
        Path("theirs.yaml").write_text(text.replace(f" {key}:", f" {wrong}:", 1))
        with pytest.raises(ConfigError, match=rf"^theirs\.yaml, line {line}: .*{wrong}: no such"):
            again()
    Path("mine.yaml").write_text("adapter: lora\noptim: {lr: 1e-4, lrr: 1}\n")
    with pytest.raises(ConfigError, match=r"^mine\.yaml, line 2: optim\.lrr: no such key"):
        as_meant(["mine.yaml"])


def test_what_a_saved_config_cannot_take() -> None:
    saved("data.path=rows.jsonl")
    Path("other.yaml").write_text(Path("theirs.yaml").read_text())
    for word, message in (
        ("experiment=lora", "a run keeps its experiment"),
        ("other.yaml", "theirs.yaml and other.yaml: each is the whole config"),
        ("data.path=gone.jsonl", "^data.path=gone.jsonl: no such file or directory"),
        ("hardware.hosts=[{name: a}]", "has no effect with the chosen hardware"),
    ):
        with pytest.raises(ConfigError, match=message):
            again(word)


def test_data_that_is_not_here_names_the_word_to_type() -> None:
    theirs = "/home/theirs/rows.jsonl"
    data = to_dict(saved("data.path=rows.jsonl"))["data"]
    saved("data.path=rows.jsonl", data={**data, "path": theirs})
    message = f"^data.path={theirs}: no such file or directory on this machine. Set data.path=PATH"
    with pytest.raises(ConfigError, match=message):
        again()
    assert again("data.path=rows.jsonl").experiment.data.path == str(Path("rows.jsonl").absolute())
    source = {"path": theirs, "weight": 2}
    saved("data.path=rows.jsonl", data={**data, "path": "", "sources": [source]})
    with pytest.raises(ConfigError, match=r"Set data\.sources\.0\.path=PATH"):
        again()
    assert again("data.sources.0.path=rows.jsonl").experiment.data.sources[0].weight == 2
    # A mapping that no word can hold.
    saved("data.path=rows.jsonl", data={**data, "label_names": {"真": "yes"}})
    with pytest.raises(ConfigError, match=r"^data\.label_names=.*--config-dir DIR data=NAME\.$"):
        again()


def test_the_words_of_a_run_are_typed_again() -> None:
    """``overrides.yaml``: all but where that one run was."""
    words = ["experiment=demo", "run_dir=mine", "dry_run=true", "optim.lr=0.002", "~batch"]
    Path("overrides.yaml").write_text(yaml.safe_dump(words))
    assert as_meant(["overrides.yaml"]) == ["experiment=demo", "optim.lr=0.002", "~batch"]
    mine = composed(["overrides.yaml", "optim.lr=0.003"]).experiment
    assert (mine.optim.lr, mine.run_dir) == (0.003, "/runs/test")
    Path("overrides.yaml").write_text("- reproduce=/runs/a\n- zero=stage1\n")
    with pytest.raises(ConfigError, match=r"words of a reproduction.* Give config\.yaml"):
        as_meant(["overrides.yaml"])
    Path("overrides.yaml").write_text("- {zero: stage1}\n")
    with pytest.raises(ConfigError, match="a list has words"):
        as_meant(["overrides.yaml"])


def test_the_best_trial_of_a_saved_config_keeps_it() -> None:
    """Groups that are left out stay left out in ``SWEEP_DIR/best.yaml``."""
    exp = saved("model=llama_1_7b", "model.tokenizer=demo", "data.path=rows.jsonl", "optim=muon")
    Path("best.yaml").write_text(yaml.safe_dump(as_meant(["theirs.yaml"])))
    mine = composed_line(parse("train", ["best.yaml", "run_dir=/runs/theirs"])).experiment
    assert changed_values(to_dict(exp), to_dict(mine)) == {}
    with pytest.raises(ConfigError, match=r"experiment=./best: is a file. .* llmx ./best.yaml"):
        check_overrides(["experiment=./best"])
