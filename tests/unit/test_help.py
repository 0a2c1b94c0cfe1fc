"""``--help`` and ``help TOPIC`` are worth reading, complete, and true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from llmx.__main__ import main
from llmx.cli.commands import COMMANDS
from llmx.cli.help import ENVIRONMENT, EXAMPLES, help_text, markdown, shell_word, topic
from llmx.config import experiment_from_dict, known_keys
from llmx.config.groups import GROUPS, options
from llmx.config.reference import keys, sections
from tests.composing import composed

ROOT = Path(__file__).resolve().parents[2]


def test_help_is_the_golden_one(golden) -> None:
    golden("help.txt", help_text() + "\n")


def test_help_names_everything() -> None:
    text = help_text()
    assert all(f"  {name} " in text for name in COMMANDS)
    for group in GROUPS:
        for option, line in options(group).items():
            assert f"  {option} " in text
            assert line, f"{group}={option} has no line"
    assert max(len(line) for line in text.splitlines()) <= 100


@pytest.mark.parametrize("command", [command for command, _ in EXAMPLES])
def test_examples_compose(command: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").touch()
    words = command.removeprefix("python -m llmx").split()
    sweep = "-m" in words
    words = [word.split(",")[0] if sweep else word for word in words if word != "-m"]
    if "--config-dir" in words:  # the reader's own cluster: any other stands for it
        at = words.index("--config-dir")
        words = [*words[:at], *words[at + 2 :]]
        words = [word.replace("hardware=mine", "hardware=a100x8") for word in words]
    assert composed(words).plan.world_size >= 1


# --- Keys ------------------------------------------------------------------------------------


def test_the_reference_and_its_page_have_every_key_of_the_schema() -> None:
    names = {key.name for key in keys()}
    assert set(known_keys()) <= names | set(sections()) | {"schema_version"}
    shown = set(re.findall(r"^\| `([^`]+)`", markdown(), re.M))
    assert {each.replace("rollout.servers", "hardware.hosts") for each in names - shown} <= shown


def test_every_key_says_what_it_means_and_takes_its_example() -> None:
    last_of_each = {key.name.rpartition(".")[0]: key.name for key in keys()}
    for key in keys():
        assert len(key.doc) > 10, f"{key.name}: write what it means under the field in the schema"
        assert key.doc.count("`") % 2 == 0, key.name
        assert key.takes(), key.name
        assert key.example, f"{key.name}: an example beside the field in the schema"
        if "." not in key.name or key.name in last_of_each.values():
            assert topic(key.name).startswith(f"{key.name}\n") or key.name in COMMANDS
        if key.is_list_item:
            value = yaml.safe_load(f"x: {key.example}")["x"]
        else:  # as typed behind the equal sign on a command line
            value = OverridesParser.create().parse_override(f"{key.name}={key.example}").value()
        experiment_from_dict(_nested(key.name, value))


def _nested(name: str, value: Any) -> dict[str, Any]:
    """``hardware.hosts[].slots`` and 8 as the mapping that sets it."""
    for part in reversed(name.split(".")):
        value = {part.removesuffix("[]"): [value] if part.endswith("[]") else value}
    return value


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("optim.lr", ["number, above 0", "default", "auto", "python -m llmx optim.lr=0.0001",
                      "optim=pretrain (0.0003)"]),
        ("path", ["model.path", "data.path", "hardware.path"]),
        ("warmup", ["optim.warmup_fraction"]),
        ("to the same path on every host", ["launch.sync"]),  # found in the text of a key
        ("rsync", ["sync: rsync"]),  # an option of one group only
        ("zero", ["stage3_offload", "zero.hpz_partition_size (whole number"]),
        ("stage3", ["stage: 3"]),
        ("checkpoint.keep", ["checkpoint.keep.best"]),
        ("grpo", ["Rows: prompt (text or turns), and answer where a reward compares with it."]),
    ],
)  # fmt: skip
def test_what_a_topic_says(word: str, parts: list[str]) -> None:
    text = " ".join(topic(word).split())
    assert [part for part in parts if part not in text] == []


def test_a_part_of_a_name_is_enough() -> None:
    assert topic("seq_len").startswith("data.seq_len\n")
    assert topic("data.seq_len=4096") == topic("+data.seq_len") == topic("seq_len")
    assert topic("hosts.slots").startswith("hardware.hosts[].slots\n")
    assert topic("launch.env.NCCL_DEBUG").startswith("launch.env\n")
    assert topic("zero_stage") == topic("zero")
    assert topic("zero=stage3").startswith("zero=stage3  ")
    assert topic("experiment=null").startswith("experiment=null: none.")


def test_options_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "lab.yaml").write_text("# Two hosts in the lab.\nname: lab\n")
    assert "Two hosts in the lab." in topic("hardware", config_dirs=[tmp_path])
    assert "name: lab" in topic("hardware=lab", config_dirs=[tmp_path])


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("seq_lem", 'Did you mean "data.seq_len"?'),
        ("zero=4", 'Did you mean "stage'),
        ("experiment=none", "or null for none"),
        ("repprt", 'Did you mean "report"?'),
        ("qqqqqq", "no key, group, option or command has this name"),
    ],
)
def test_an_unknown_topic(word: str, says: str, capsys) -> None:
    assert main(["help", word]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_several_topics_at_once(capsys) -> None:
    assert main(["help", "optim.lr", "optim.eps"]) == 0
    said = capsys.readouterr().out
    assert said.index("optim.lr\n") < said.index("optim.eps\n")


def test_values_are_quoted_for_the_shell_only_where_they_must() -> None:
    assert shell_word("optim.lr=1e-4") == "optim.lr=1e-4"
    assert shell_word("optim.betas=[0.9, 0.95]") == "'optim.betas=[0.9, 0.95]'"
    assert shell_word("hardware.env={A: '1'}") == "\"hardware.env={A: '1'}\""


# --- Commands --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_own_help(command: str, capsys) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"python -m llmx {command} ")
    for word in COMMANDS[command].words:
        assert f"  {word.name}" in said
        assert all(choice in said or choice == "false" for choice in word.choices)
    for key in {"data": ["data.packing"], "tokenizer": ["tokenizer.vocab_size"]}.get(command, []):
        assert key in said
    assert max(len(line) for line in said.splitlines()) <= 100
    assert main(["help", command]) == 0
    assert capsys.readouterr().out.startswith(said.rstrip("\n").partition("\n\nKeys")[0])


# --- Environment variables -------------------------------------------------------------------


def test_every_variable_is_documented() -> None:
    known = {name for table in ENVIRONMENT.values() for name in table}
    places = [ROOT / "Makefile", *ROOT.glob("scripts/*"), *ROOT.glob("conf/**/*.yaml")]
    for folder in ("llmx", "launchers", "benchmarks"):
        places += (ROOT / folder).rglob("*.py")
    places.append(ROOT / "tests" / "conftest.py")
    used: dict[str, set[str]] = {}
    for path in places:
        if path.is_file() and path.name != "help.py":
            for name in re.findall(r"\bLLMX_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")):
                used.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    missing = {name: where for name, where in used.items() if name not in known}
    assert not missing, "describe them in llmx.cli.help.ENVIRONMENT"
    assert {name for name in known if name.startswith("LLMX_")} <= set(used)
    page = markdown()
    assert all(f"`{name}`" in page for name in known)
