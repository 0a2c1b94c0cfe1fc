"""Tab completion: what may stand at the cursor, and real bash, zsh and fish that ask for it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmx.__main__ import main
from llmx.cli.commands import COMMANDS
from llmx.cli.completion import SHELLS, candidates, run, split_line
from llmx.cli.words import parse
from llmx.config.groups import GROUPS, options
from llmx.config.plugins import TRACKERS
from llmx.config.reference import keys
from llmx.errors import ConfigError
from tests.terminals import Terminal

BREAKS = " \t\n\"'@><=;|&(:"


def offered(line: str) -> list[str]:
    words, typed = split_line(line)
    return [candidate.value for candidate in candidates(words[1:], typed.text)]


def test_first_word_is_a_command_or_an_override() -> None:
    assert {*COMMANDS, *(f"{group}=" for group in GROUPS)} <= set(offered("llmx "))
    assert "resume" not in offered("llmx zero=stage3 ")


def test_every_key_is_reached_a_dot_at_a_time_and_every_closed_set_offered() -> None:
    for key in [key for key in keys() if not key.is_list_item]:
        part = key.name[: key.name.rfind(".") + 1] or key.name[:2]
        assert f"{key.name}=" in offered(f"llmx {part}"), key.name
        if not key.type.startswith("list"):
            values = {f"{key.name}={value}" for value in key.values}
            assert values <= set(offered(f"llmx {key.name}=")), key.name


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("llmx optim", ["optim=", "optim."]),
        ("llmx zero_stage=stage3_z", ["zero_stage=stage3_zeropp"]),
        ("llmx zero_", ["zero_stage="]),
        ("llmx dry_run=", ["dry_run=true", "dry_run=false"]),
        ("llmx deterministic=", [f"deterministic={v}" for v in ("true", "false", "null")]),
        ("llmx tracking.kinds=[wandb,c", ["tracking.kinds=[wandb,csv]"]),
        ("llmx -m zero=stage1,stage3_z", ["zero=stage1,stage3_zeropp"]),
        ("llmx +optim.sch", ["+optim.schedule="]),
        ("llmx launch.e", ["launch.env.", "launch.env=", "launch.elastic="]),
        ("llmx optim.lr=", []),
        ("llmx export RUN --dtype b", ["bf16"]),
        ("llmx --cfg ", ["job", "hydra", "all"]),
        ("llmx data split=", ["split=train", "split=eval"]),
        ("llmx completion ", list(SHELLS)),
        *((f"llmx {group}=", [f"{group}={name}" for name in options(group)]) for group in GROUPS),
    ],
)
def test_what_is_offered(line: str, values: list[str]) -> None:
    assert offered(line) == values


def test_what_is_offered_among_others() -> None:
    for line, value in (
        ("plan zero_stage=st", "zero_stage=stage3"), ("status --", "--json"), ("sweep ", "lr"),
        ("hardware.device=a1", "hardware.device=a100_80g"), ("help optim.", "optim.lr"),
    ):  # fmt: skip
        assert value in offered(f"llmx {line}"), line


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to be in, with one of data."""
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a b.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (chats / ".hidden").touch()
    assert offered("llmx data.path=cha") == ["data.path=chats/"]
    assert offered("llmx data.path=chats/") == ["data.path=chats/a b.jsonl"]
    assert offered(f"llmx model.path={chats}/") == [f"model.path={chats}/chats/"]
    monkeypatch.setenv("HOME", str(chats))
    assert offered("llmx data.eval_path=~/ch") == ["data.eval_path=~/chats/"]
    assert offered("llmx --config-dir ") == ["chats/"]
    (chats / "hardware").mkdir()
    (chats / "hardware" / "lab.yaml").write_text("# Two hosts in the lab.\n")
    assert "hardware=lab" in offered(f"llmx --config-dir {chats} hardware=")
    assert "hardware=lab" in offered(f"llmx plan --config-dir={chats} hardware=l")
    assert "hardware=lab" not in offered("llmx hardware=")


def test_runs_and_their_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "outputs" / "first"
    (run / "checkpoints" / "step-00000040").mkdir(parents=True)
    (run / "checkpoints" / "step-00000080").mkdir()
    (run / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMX_OUTPUTS", raising=False)
    commands = "resume status watch export report reproduce generate chat eval serve"
    for command in commands.split():
        assert offered(f"llmx {command} out")[0] == "outputs/first", command
    assert offered("llmx compare outputs/first out") == ["outputs/first"]
    sweep = tmp_path / "outputs" / "sweeps" / "one"
    sweep.mkdir(parents=True)
    (sweep / "multirun.yaml").touch()
    for command in ("report", "status", "watch"):
        assert "outputs/sweeps/one" in offered(f"llmx {command} out"), command
    assert "outputs/sweeps/one" not in offered("llmx export out")
    assert offered("llmx resume outputs/first step=") == ["step=80", "step=40"]
    assert offered("llmx export outputs/first --step ") == ["80", "40"]
    assert "launch=rsync" in offered("llmx resume outputs/first launch=")
    monkeypatch.setenv("LLMX_OUTPUTS", str(tmp_path / "outputs"))
    assert offered("llmx status ") == [str(sweep), str(run)]


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("llmx zero=stage2_", ["stage2_offload "]),
        ("llmx 'zero=stage2_", ["zero=stage2_offload' "]),
        ("llmx data.path='cha", ["chats/"]),
        ("llmx data.path=chats/a", ["chats/a\\ b.jsonl "]),
        ("llmx data.path=chats/a\\ ", ["chats/a\\ b.jsonl "]),
        ('llmx "data.path=chats/a b', ['data.path=chats/a b.jsonl" ']),
        ("llmx tracking.kinds=", [f"\\[{kind}\\] " for kind in TRACKERS.shipped]),
        ("python -m llmx optim.sch", ["optim.schedule="]),
        (".venv/bin/python -m llmx repo", ["report "]),
    ],
)
def test_bash_gets_the_part_that_it_replaces(
    line: str, answer: list[str], chats: Path, capsys
) -> None:
    assert main(["completion", "--answer", "bash", BREAKS, line]) == 0
    assert capsys.readouterr().out.splitlines() == answer


def test_no_line_is_too_odd() -> None:
    for junk in ("", "'", '"', "\\", "=", "=[,", "a=b=c", "~", "++", "--", "-x=", "."):
        for line in (f"llmx {junk}", f"llmx export {junk}", f"llmx zero={junk}", f"llmx {junk} x"):
            assert main(["completion", "--answer", "bash", BREAKS, line]) == 0, line


def test_unknown_shell() -> None:
    with pytest.raises(ConfigError, match='bash, zsh, fish.* Did you mean "zsh"'):
        run(parse("completion", ["zshh"]))
    with pytest.raises(ConfigError, match="name one shell"):
        run(parse("completion", []))


def test_an_answer_waits_for_no_heavy_library() -> None:
    """A person waits for it at each Tab."""
    code = (
        "import sys; from llmx.__main__ import main; "
        f"main(['completion', '--answer', 'bash', {BREAKS!r}, 'llmx optim.']); "
        "print(len(sys.modules), *{name.partition('.')[0] for name in sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, _, imported = said.stdout.splitlines()[-1].partition(" ")
    heavy = {"hydra", "omegaconf", "antlr4", "numpy", "torch", "transformers", "wandb", "rich"}
    assert "llmx" in imported.split()
    assert heavy.isdisjoint(imported.split())
    assert int(count) < 180  # 130 when this was written


# --- The shells themselves -------------------------------------------------------------------


@pytest.fixture
def with_program(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``llmx`` and ``python`` are these, and a home that is empty."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("llmx", "-m llmx "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (programs / name).chmod(0o755)
    root = Path(__file__).resolve().parents[2]
    return {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": f"{root}:{root / 'launchers'}",
    }


def _needs(shell: str) -> None:
    if shutil.which(shell, path="/usr/bin:/bin") is None:
        pytest.skip(f"{shell} is not installed (scripts/install-system-packages.sh)")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_person_presses_tab(shell: str, with_program, tmp_path: Path) -> None:
    _needs(shell)
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "one.jsonl").touch()
    argv = ["bash", "--norc", "--noprofile", "-i"] if shell == "bash" else ["zsh", "-f", "-i"]
    screen = Terminal(argv, env=with_program, cwd=tmp_path)
    # The mark is put together, so that the echo of the line is not taken for its output.
    screen.type(f'PS1="> "; eval "$(llmx completion {shell})"; echo "re""ady"\n')
    screen.wait_for(r"\bready\b")
    for begun, completed in (
        ("llmx optim.sch\tco\t", "llmx optim.schedule=co"),
        ("llmx zero_stage=stage3_z\t", "llmx zero_stage=stage3_zeropp"),
        ("python -m llmx data.path=cha\to\t", "python -m llmx data.path=chats/one.jsonl"),
    ):
        # Between control-A and control-E: the line becomes an argument of echo, which shows it as
        # the shell has it, whatever was drawn meanwhile (zsh takes the space at its end back).
        screen.type(begun)
        screen.type("\x01echo '<<\x05>>'\n")
        shown = screen.wait_for(r"^<<.*>>")
        assert re.search(f"^<<{completed} ?>>", shown, re.MULTILINE), shown
    screen.kill()


def test_fish_lists_what_is_possible(with_program, tmp_path: Path) -> None:
    _needs("fish")
    for line, expected in (
        ("llmx zero=stage3_z", ["zero=stage3_zeropp"]),
        ("python -m llmx optim.sch", ["optim.schedule="]),
    ):
        said = subprocess.run(
            ["fish", "--no-config", "-c", f"llmx completion fish | source; complete -C '{line}'"],
            env=with_program,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        found = [row.split("\t")[0] for row in said.stdout.splitlines()]
        assert [value for value in found if value in expected] == expected, said
        assert "optim.lr=" not in found
