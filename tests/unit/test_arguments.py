"""What the user typed: aliases, commands, the demo default, sweep files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from llmx.cli.arguments import as_meant, checked, read_words, sweep_overrides
from llmx.cli.words import parse, split_command
from llmx.compose.overrides import resolve_alias
from llmx.compose.words import Words
from llmx.config.yaml_files import dump_yaml, read_values
from llmx.errors import ConfigError
from tests.composing import composed


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("zero_stage=0", "zero=stage0"),
        ("-m zero=1,2,infinity", "-m zero=1,2,infinity"),
        ("zero=1,2,infinity", "zero=stage1,stage2,infinity"),
        ("zero=4", "zero=4"),
        ("~zero_stage", "~zero"),
        ("model.path=zero_stage=x", "model.path=zero_stage=x"),
        ("data.path=/数据/a b.jsonl", "data.path='/数据/a b.jsonl'"),
        ("zero_stage=großer,b", "zero='großer',b"),
        ("data.path='数据.jsonl'", "data.path='数据.jsonl'"),
        ("++launch.env.A=1_000,7,1e5", "++launch.env.A='1_000',7,'1e5'"),
        ("name=nan", "name='nan'"),
        ("task.steps=1_000", "task.steps=1_000"),
    ],
)
def test_alias(typed: str, meant: str) -> None:
    assert resolve_alias(typed) == meant


def test_a_text_is_what_was_typed() -> None:
    words = ["1_000", "1e5", "1.50", "7", "007", "012", "1:30:00", "0x10", "-3", "+5", "2024-01-01",
             "/数据/a b=1.jsonl", "内容"]  # fmt: skip
    typed = [f"launch.env.X{index}={word}" for index, word in enumerate(words)]
    exp = composed(
        [*typed, "name=7e10", "tracking.tags=['1.10',7]", "sweep.retry=[oom,nan]"]
    ).experiment
    assert exp.sweep.retry == ["oom", "nan"]
    assert list(exp.launch.env.values()) == words
    assert (exp.name, exp.tracking.tags) == ("7e10", ["1.10", "7"])


@pytest.mark.parametrize(
    "word",
    ["launch.env={A: 1_000}", "tracking.tags=[1.10]", "tracking.tags=[1.1,1.10]",
     "data.label_names={1_0: a}", "hardware.hosts=[{name: 1_00, slots: 100}]",
     "name=choice(1.10,2)", "sweep.retry=[NaN]"],
)  # fmt: skip
def test_a_number_in_brackets_that_would_be_another_text_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"takes text, and a number in it would become "):
        checked(Words(overrides=(word,), multirun=True))


def test_a_sweep_file(tmp_path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "grid: {zero: [stage1, stage2], a.b: [1e-3, null, true]}\noverrides: [seed=1]\n"
    )
    assert sweep_overrides(path) == ["seed=1", "zero=stage1,stage2", "a.b=0.001,null,true"]
    path.write_text("grid:\n  optim.lr: [1e-4, 1.0]\n  model.revision: [7, 1.10]\n")
    with pytest.raises(
        ConfigError, match=r"s\.yaml, line 3: this takes text, and YAML reads 1\.10"
    ):
        sweep_overrides(path)
    path.write_text(path.read_text().replace("1.10", "'1.10'"))
    words = checked(Words(overrides=sweep_overrides(path), multirun=True))
    assert words[-1] == "model.revision=7,'1.10'"
    # A comma in a value is no other value.
    path.write_text("""grid: {data.path: ["a, b.txt", 'c"d,e', plain], zero: [3, stage1]}\n""")
    words = sweep_overrides(path)
    assert words == ['data.path="a, b.txt","c\\"d,e",plain', "zero=3,stage1"]
    override = OverridesParser.create().parse_override(words[0])
    values = [str(value.text) for value in list(override.sweep_iterator())[:2]]
    assert values == ["a, b.txt", 'c"d,e']


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--config-dir . a=1 -m b=2", (("a=1", "b=2"), True, ".", {})),
        ("--config-dir=. a=1", (("a=1",), False, ".", {})),
        ("--cfg job --package zero", ((), False, None, {"--cfg": "job", "--package": "zero"})),
        ("--cfg job --resolve", ((), False, None, {"--cfg": "job", "--resolve": ""})),
        ("--info plugins a=1", (("a=1",), False, None, {"--info": "plugins"})),
        ("--info a=1", (("a=1",), False, None, {"--info": "all"})),
    ],
)  # fmt: skip
def test_options_and_overrides_in_any_order(typed: str, line: tuple[object, ...]) -> None:
    words = parse("train", typed.split())
    assert (words.overrides, words.multirun, words.config_dir, words.show) == line


def test_the_words_of_a_command_are_sorted(tmp_path) -> None:
    words = parse("resume", ["zero=3", str(tmp_path), "step=4", "--config-dir", "."])
    assert (words.bare, words.overrides) == ([str(tmp_path)], ("zero=stage3",))
    assert (words.step("step"), words.flag("trust")) == (4, False)
    assert words.config_dirs == ["."]
    assert parse("export", ["x"]).step is None
    words = parse("doctor", ["--json", "hardware=cpu2"])
    assert (words.json, words.fix, words.overrides) == (True, False, ("hardware=cpu2",))


def test_an_experiment_file(tmp_path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "defaults:\n  - override /model: tiny\n  - _self_\ntask: sft\noptim: {lr: 1e-4}\n"
        'data:\n  columns: {instruction: question}\n  system: It\'s "so", {really}\n'
        "model.config: {hidden_size: 64}\ntask.evaluate: false\n"
    )
    assert read_words(file) == [
        "model=tiny",
        "task=sft",
        "optim.lr=0.0001",
        "data.columns={instruction: 'question'}",
        "data.system='It\\'s \"so\", {really}'",
        "model.config={hidden_size: 64}",
        "task.evaluate=false",
    ]
    exp = composed([str(file), "optim.lr=1e-3"]).experiment
    assert exp.data.system == 'It\'s "so", {really}'
    assert exp.model.config["hidden_size"] == 64
    assert exp.optim.lr == 1e-3
    assert split_command([str(file)], ("plan",)) == ("train", [str(file)])


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("launch: {slurm: {time_limit: 1:30:00}}", "1:30:00"),
        ("name: a\nlaunch.slurm.partition: 007", "007"),
        ("model: {revision: 1.10}", "1.10"),
        ("model: {revision: 7e10}", "7e10"),
        ("tracking: {tags: [a, 1_000]}", "1_000"),
        ("data: {label_names: {0x10: a}}", "0x10"),
    ],
)
def test_a_text_that_yaml_reads_as_a_number_is_quoted(content, written, tmp_path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(content)
    line = content.count("\n") + 1
    where = f"{file}, line {line}: this takes text, and YAML reads {written} as a number. Quote it"
    with pytest.raises(ConfigError, match=re.escape(where)):
        checked(Words(overrides=(str(file),)))
    file.write_text(content.replace(written, f"'{written}'"))
    assert any(written in word for word in checked(Words(overrides=(str(file),))))


@pytest.mark.parametrize(
    ("group", "content"),
    [("experiment", "# @package _global_\nlaunch: {env: {A: 012}}"),
     ("hardware", "# @package launch.slurm\npartition: 012\n")],
)  # fmt: skip
def test_so_it_is_in_an_option_of_ones_own(group: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / group / "mine.yaml"
    path.parent.mkdir()
    path.write_text(content)
    words = Words(overrides=(f"{group}=mine",), config_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(f"{path}, line 2: this takes text, and YAML")):
        checked(words)


@pytest.mark.parametrize(
    ("content", "number"),
    [("data: 2024.10\n", "2024.10"), ("zero: 0x2\n", "0x2"), ("hardware/devices: 1e3\n", "1e3")],
)
def test_an_option_that_yaml_reads_as_a_number_is_quoted(content, number, tmp_path) -> None:
    file, sweep = tmp_path / "my.yaml", tmp_path / "grid.yaml"
    file.write_text(content)
    message = f"YAML reads {number} as a number. Quote it: '{number}'"
    with pytest.raises(ConfigError, match=re.escape(message)):
        checked(Words(overrides=(str(file),)))
    group = content.partition(":")[0]
    sweep.write_text(f"grid: {{{group}: [{number}, other]}}\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        sweep_overrides(sweep)


def test_whole_numbers_and_dates_may_be_text(tmp_path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "launch: {env: {A: 7, B: -3, C: 2024-1-1}}\ndata: {label_names: {0: negative}}\n"
        "model: {config: {rms_norm_eps: 1e-5}}\n"
    )
    exp = composed([str(file)]).experiment
    assert exp.launch.env == {"A": "7", "B": "-3", "C": "2024-1-1"}
    assert exp.model.config["rms_norm_eps"] == 1e-5
    assert exp.data.label_names == {"0": "negative"}


def test_yaml_is_read_as_omegaconf_reads_it(tmp_path) -> None:
    texts = ["1e5", "1.5e5", "1e-4", ".5e5", "1_0e5", "2024-01-01", "1_000", "012", "1:30", "0x1f",
             "yes", "08", "1.", ".5", "~", "1e", "e5", "1.2.3", ".inf", "nan"]  # fmt: skip
    file = tmp_path / "a.yaml"
    file.write_text("".join(f"k{index}: {text}\n" for index, text in enumerate(texts)))
    assert read_values(file) == OmegaConf.to_container(OmegaConf.load(file))
    file.write_text(dump_yaml(texts))
    assert read_values(file) == yaml.safe_load(file.read_text()) == texts
    assert OmegaConf.to_container(OmegaConf.load(file)) == texts


def test_the_experiment_file_of_the_readme(tmp_path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    file = tmp_path / "my.yaml"
    file.write_text(readme.split("```yaml\n# my.yaml")[1].split("```")[0].partition("\n")[2])
    assert read_words(file) == [
        "adapter=lora",
        "model.path='Qwen/Qwen3-8B'",
        "data.path='chats.jsonl'",
        "data.seq_len=2048",
        "batch.global_batch=64",
    ]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("data.path=a.jsonl", ["data=file", "data.path=a.jsonl"]),
        ("model.path=m data.path=a", ["model=hf", "data=file", "model.path=m", "data.path=a"]),
        ("data=hub data.path=a", ["data=hub", "data.path=a"]),
        ("hardware.hosts=[a]", ["experiment=demo", "hardware=static", "hardware.hosts=[a]"]),
        ("data.path=null", ["experiment=demo", "data.path=null"]),
        ("experiment=demo data.path=a", ["experiment=demo", "data.path=a"]),
        ("experiment=null model.path=m", ["model=hf", "experiment=null", "model.path=m"]),
        ("model=llama3_8b model.path=m", ["model=llama3_8b", "model.path=m"]),
        ("data.path=demo", ["experiment=demo", "data.path=demo"]),
        ("zero=stage3", ["experiment=demo", "zero=stage3"]),
        ("model.init=scratch", ["experiment=demo", "model.init=scratch"]),
        ("model=gpt2", ["model=gpt2"]),
        ("+data=file", ["+data=file"]),
    ],
)
def test_what_is_chosen_beside_what_is_typed(typed: str, meant: list[str]) -> None:
    assert as_meant(typed.split()) == meant


@pytest.mark.parametrize(
    ("defaults", "line"),
    [("\n  - model: tiny\n  - base", 3), ("\n  - data: [a, b]", 2), ("\n  - task:", 2),
     ("\n  - {model: tiny, zero: stage1}", 2), (" tiny", 1), ("\n  model: tiny", 2)],
)  # fmt: skip
def test_an_entry_of_defaults_that_is_not_read_is_named(defaults, line, tmp_path) -> None:
    file = tmp_path / "my.yaml"
    with pytest.raises(ConfigError, match=r"my\.yaml: no such file"):
        read_words(file)
    file.write_text(f"defaults:{defaults}\n")
    with pytest.raises(ConfigError, match=rf"my\.yaml, line {line}: write - GROUP: OPTION"):
        read_words(file)
