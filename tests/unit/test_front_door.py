# ruff: noqa: E501 - tables of words
"""Mistakes at the command line, in process: one line each, in our words, nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmx.__main__ import main
from llmx.checkpoint.manifest import CheckpointError
from llmx.errors import EXIT_CODES, LlmxError
from llmx.launch.supervision.outcome import OUTCOME_EXIT_CODES
from tests.fuzz.check import FOREIGN

LONG = "x" * 300
OPTIM = "# Mine.\nlr: 1e-3\nbetas: [0.9, 0.95]\n"


@pytest.fixture
def llmx(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_OUTPUTS", "outputs")

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out, err

    return run


def refused(llmx, *words: str, code: int = 2) -> str:
    before = sorted(Path().iterdir())
    found, _, err = llmx(*words)
    assert found == code, err
    assert err.startswith("llmx: ")
    assert err.count("\n") == 1, err
    assert not FOREIGN.search(err), err
    assert sorted(Path().iterdir()) == before, "a mistake leaves nothing behind"
    return err.removeprefix("llmx: ").rstrip("\n")


# Of words alone: tests/unit/test_messages.py.
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.seq_len=2"], "data.seq_len=2: too short for a question with its answer"),
        (["data=file"], "data.path has no value yet, and this choice needs one: set data.path=..."),
        (["-m", "seed=1,2,"], "seed=1,2,: cannot be read. Nothing follows the comma at its end"),
        (["data", "task.options.dtf=true"], 'Did you mean "dft"?'),
        (["plan", "--package", "all", "--cfg"], "--package all: the config has no such part"),
        (["optim.lr", "=", "1e-4"], "optim.lr: is not key=value. Write optim.lr=VALUE, without spaces."),
        (["help", "zero=" + LONG], "...: the name is too long for a file. Use a shorter one."),
        (["status", LONG], "...: the name is too long for a file. Use a shorter one."),
        (["model=hf", f"model.path=./{LONG}"], "...: no such file or directory"),
        ([f"run_dir={LONG}"], ": cannot be written (File name too long). Set"),
        (["model.name=${oc.env:NOT_SET}", "seed=${oc.env:NOR_THAT}"], "seed: asks for"),
        (["sweep", "zero_x"], 'Did you mean "zero_x_micro_batch"?'),
        (["reproduce", "nowhere"], "no such directory"),
        (["name=${nope}"], "name: ${nope} names no key of the config."),
        (["name=${oc.env:NOT_SET_ANYWHERE}"], "environment variable NOT_SET_ANYWHERE, which is not set"),
        (["name=${a:b}"], "there is no ${a:...}"),
        (["name=${name}"], "leads back to the key itself"),
        (["run_dir=/dev/null/x"], "run_dir=/dev/null/x: cannot be written (Not a directory)."),
        (["data", "-m", "seed=1,2"], "data: takes one config"),
        (["data", "data.packing=concat"], "data.packing=concat: would cut completions"),
        (["reproduce", "~nobody.x"], "a path begins with ~ and a name that no user"),
        (["model=tiny", "model.path=a/b"], "has no effect with the chosen model, which starts from random weights. Set model=hf;"),
        (["model.path=./nowhere"], "no such file or directory"),
        (["hardware=local", "hardware.hosts=[{name: a}]"], "Set hardware=static; or leave it out."),
        (["tokenizer.vocab_size=900"], "has no effect on a training."),
        (["model.resolved.vocab_size=900"], "has no effect as a word: llmx fills it in"),
        (["launch.slurm.partition=a"], "Set launch=slurm;"),
        (["++model.name=../../../a"], "must not contain a slash"),
        (["hydra/sweeper=gird"], 'Did you mean "grid"? Options of hydra/sweeper: basic, grid'),
        (["task.kind=${oc.env:NOT_SET_ANYWHERE}", "seed=3"], "or set task.kind=..."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(llmx, words, message) -> None:
    hardware = [] if any("hardware" in word for word in words) else ["hardware=cpu2"]
    plan = [] if words[0] in ("sweep", "reproduce", "data", "plan", "help", "status") else ["plan"]
    assert message in refused(llmx, *plan, *words, *(hardware if plan else []))


@pytest.mark.parametrize(
    "words",
    [["experiment=null"], ["~experiment"], ["+optim.lr=1e-3", "optim.betas.0=0.5"],
     ["~optim.lr", "++launch.env.NCCL_DEBUG=INFO"], ["zero=1", "zero=2"]],
)  # fmt: skip
def test_what_is_meant_is_done(llmx, words) -> None:
    code, out, err = llmx("plan", "hardware=cpu2", *words)
    assert (code, err) == (0, "")
    if words[0].startswith("zero"):
        assert f"stage {words[-1][-1]}" in out


def test_a_tilde_needs_no_quotes(llmx, monkeypatch) -> None:
    """No shell expands it behind ``model.path=``, and Hydra's grammar does not take it."""
    home = Path.cwd() / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert llmx("plan", "hardware=cpu2", "run_dir=~/mine")[0] == 0
    assert (home / "mine" / "config.yaml").is_file()
    said = refused(llmx, "plan", "model=hf", "model.path=~/nothing")
    assert said.startswith("model.path=~/nothing: no such file or directory")


def test_all_wrong_keys_are_listed(llmx) -> None:
    code, _, err = llmx("plan", "optim.lrr=1", "zero.stagee=2", "seed=1")
    assert code == 2
    assert re.findall(r"(\S+): no such key", err) == ["optim.lrr", "zero.stagee"]


def test_a_working_directory_that_is_gone(llmx, tmp_path, monkeypatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, _, err = llmx("plan")
    assert (code, err) == (2, "llmx: The working directory was deleted. Go to another one: cd.\n")


def test_what_hydra_prints(llmx) -> None:
    for words, text in (
        (["experiment=null", "--cfg", "job"], "steps: null"),
        (["zero_stage=stage3", "--cfg", "job"], "stage: 3"),
        (["--hydra-help"], "--config-dir DIR"),
        (["--version"], "llmx "),
    ):
        code, out, _ = llmx(*words)
        assert (code, text in out) == (0, True), words
    # Hydra logs it, to the standard output that the process had when it first composed.
    argv = [sys.executable, "-m", "llmx", "--info", "defaults"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert "hardware/local" in done.stdout, done.stderr


def write(name: str, content: bytes | str) -> Path:
    path = Path("own") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path.absolute()


def test_a_file_of_ones_own_is_named_with_its_line(llmx) -> None:
    path = write("optim/mine.yaml", OPTIM + "lr: 1\n")
    write("experiment/mine.yaml", "# @package _global_\ndefaults:\n  - override /optim: mine\n")
    said = refused(llmx, "plan", "hardware=cpu2", "--config-dir", "own", "experiment=mine")
    assert said == f"{path}, line 4: lr is set twice (first in line 2). Leave one."


def test_aliases_of_aliases_do_not_hang(llmx) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    path = write("optim/mine.yaml", "\n".join(lines))
    said = refused(llmx, "plan", "--config-dir", "own", "optim=mine")
    assert said == f"{path}: has more than 100000 values. Use fewer aliases (*)."


def test_a_file_chooses_one_option(llmx) -> None:
    for choice, message in (
        ("override /data: [demo, file]", "data takes one option; of several, Hydra keeps the"),
        (
            "/zero: []",
            "a group of the config is chosen by override. Write - override /zero: OPTION",
        ),
    ):
        path = write("experiment/mine.yaml", f"# @package _global_\ndefaults:\n  - {choice}\n")
        said = refused(llmx, "plan", "--config-dir", "own", "experiment=mine")
        assert said.startswith(f"{path}, line 3: {message}")


def test_files_that_nobody_chose_do_not_matter_and_no_other_directory_is_left(llmx) -> None:
    write("optim/broken.yaml", "a: [\n")
    write("optim/mine.yaml", OPTIM)
    lab = "{name: gpu-1, address: 10.9.0.1, slots: 2, device: a100_80g, ssh_port: 2222}"
    write("hardware/lab.yaml", f"# Lab.\nname: lab\nhosts: [{lab}]\n")
    words = ("--config-dir", "own", "optim=mine", "hardware=lab", "run_dir=mine")
    code, out, _ = llmx("plan", *words)
    assert (code, "10.9.0.1:2222" in out) == (0, True)
    assert {path.name for path in Path().iterdir()} == {"mine", "own"}


def test_exit_codes_are_documented(llmx) -> None:
    documented = (Path(__file__).resolve().parents[2] / "docs" / "reliability.md").read_text()
    assert CheckpointError.exit_code == 5
    assert {error.exit_code for error in errors(LlmxError)} <= set(EXIT_CODES)
    assert set(OUTCOME_EXIT_CODES.values()) <= set(EXIT_CODES)
    for code, when in EXIT_CODES.items():
        assert f"| {code} | {when} |" in documented
    code, out, _ = llmx("help", "exit-codes")
    assert code == 0
    assert "130" in out


def errors(cls: type[LlmxError]) -> set[type[LlmxError]]:
    return {cls}.union(*(errors(each) for each in cls.__subclasses__()))


def test_a_mistake_removes_the_directories_that_it_made_and_no_other(
    llmx, tmp_path, monkeypatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for outputs in ("..", "../new/outputs", "outputs"):
        monkeypatch.setenv("LLMX_OUTPUTS", outputs)
        assert "zero.stage" in refused(llmx, "plan", "zero.stage=9")
        # Found when the run has its directory.
        assert "too short" in refused(llmx, "hardware=cpu2", "data.seq_len=2")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("LLMX_OUTPUTS", str(tmp_path / "empty"))
    assert "zero.stage" in refused(llmx, "plan", "zero.stage=9")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "here"]


def test_a_plan_in_a_directory_of_the_users_removes_nothing(llmx, tmp_path) -> None:
    (tmp_path / "cfg" / "experiment").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "cfg" / "experiment" / "e.yaml").write_text(
        f"# @package _global_\nhydra: {{run: {{dir: {tmp_path}/mine}}}}\n"
    )
    said = refused(llmx, "plan", "hardware=cpu2", "--config-dir", "cfg", "experiment=e")
    assert "e.yaml, line 2: hydra.run.dir: llmx sets this key of Hydra." in said
    assert llmx("plan", "hardware=cpu2", "run_dir=mine")[0] == 0
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_names_are_not_looked_up_in_a_network_that_cannot_be_built(llmx) -> None:
    words = (
        ("vocab_size=many", "lora"),
        ("hidden_size=0", "qlora"),
        ("num_attention_heads=0", "lora"),
    )
    for word, adapter in words:
        code, _, said = llmx("plan", "hardware=cpu2", f"model.config.{word}", f"adapter={adapter}")
        assert code == 2
        assert f"model.config.{word}: must be a whole number" in said
