"""``python -m llmx chat``: the conversation, what it costs, and a real terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.cli.chat import Chat
from llmx.cli.commands import COMMANDS
from llmx.cli.generate import PromptLayout
from llmx.cli.main import run_here
from llmx.data.format.templates import TEMPLATES
from llmx.errors import ConfigError
from llmx.models.generate import decoder_of
from llmx.models.sampling import RANGES, Sampling
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import tokenizer_of
from tests.rundirs import experiment, write_run
from tests.small_models import small_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An SFT run that wrote its model, which babbles until max_new_tokens."""
    exp = experiment(
        tmp_path_factory.mktemp("run") / "talker", ranks=1, data={"system": "Be brief."}
    )
    run_dir, tokenizer = write_run(exp), tokenizer_of(exp)
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=8192)
    model.save_pretrained(run_dir.final_model)
    tokenizer.save_pretrained(run_dir.final_model)
    return run_dir


def a_chat(model: Any, tokenizer: Any, *, template: str | None = "auto", **sampling: Any) -> Chat:
    def decode(tokens: Any) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    layout = PromptLayout(tokenizer, template=template, system=None)
    how = Sampling(**{"max_new_tokens": 8, "stop_ids": layout.stop_ids, **sampling})
    return Chat(decoder_of(model), layout, how, decode=decode, seed=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    exp = experiment(tmp_path_factory.mktemp("tokenizer"))
    return tokenizer_of(exp)


# --- The conversation ------------------------------------------------------------------------


def test_an_interrupted_answer_is_kept_as_far_as_it_was_said(tokenizer: Any) -> None:
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    whole = a_chat(model, tokenizer)
    wanted = whole.answer("Which is a bird?")
    talk, said = a_chat(model, tokenizer), []

    def stop(_index: int, token: int) -> None:
        said.append(token)
        if len(said) == 3:
            raise KeyboardInterrupt

    found = talk.answer("Which is a bird?", stop)
    assert found.ended == "interrupted"
    assert wanted.text.startswith(found.text)
    assert talk.turns == [("Which is a bird?", found.text)]
    again = a_chat(model, tokenizer)
    again.turns = list(talk.turns)
    assert talk.answer("Go on.") == again.answer("Go on.")

    # Nothing said: nothing stays.
    def at_once(_index: int, _token: int) -> None:
        raise KeyboardInterrupt

    silent = a_chat(model, tokenizer)
    silent._decode = lambda tokens: ""
    assert silent.answer("Well?", at_once).text == ""
    assert silent.turns == []


def test_a_forward_that_fails_leaves_no_half_cache(tokenizer: Any) -> None:
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    talk, fresh = a_chat(model, tokenizer), a_chat(model, tokenizer)
    talk.answer("one")
    fresh.turns = list(talk.turns)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        talk.answer("two")
    hook.remove()
    assert talk.turns == fresh.turns
    assert talk.answer("two") == fresh.answer("two")


def test_oldest_turns_are_left_out_where_positions_end(tokenizer: Any) -> None:
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=96)
    talk = a_chat(model, tokenizer)
    for number in range(6):
        talk.answer(f"message number {number}")
    assert 0 < talk.left_out < len(talk.turns) == 6
    assert len(talk.prompt("next")) + 8 <= 96
    assert len(talk.messages()) == 12, "the conversation itself is whole"
    with pytest.raises(ConfigError, match="the model 96 positions. Ask something shorter"):
        talk.answer("word " * 200)
    assert len(talk.turns) == 6


def test_plain_text_goes_on(tokenizer: Any) -> None:
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    talk = a_chat(model, tokenizer, template=None)
    talk.answer("Once upon a time")
    (turn,) = talk.turns
    assert talk._ids(talk.turns, " and") == list(tokenizer("".join(turn) + " and")["input_ids"])
    talk.answer(" and")


# --- Piped -----------------------------------------------------------------------------------


def piped(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, lines: str, *words: Any, code: int = 0
) -> tuple[list[str], str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run_here("chat", [str(word) for word in words]) == code
    found = capsys.readouterr()
    return found.out.splitlines(), found.err


def test_a_line_is_a_message_and_history_counts(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = ("--temperature=1.3", "--seed=4", "--max-new-tokens=6")
    lines = "One?\n\nTwo?\n/save chat.jsonl\n/reset\nOne?\n"
    out, err = piped(monkeypatch, capsys, lines, run.root, *keys)
    one, two, once_more = out
    assert once_more == one
    assert "(written to chat.jsonl: 2 turns)" in err
    saved = json.loads((tmp_path / "chat.jsonl").read_text())["messages"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [message["role"] for message in saved] == roles
    assert saved[0]["content"] == "Be brief."
    assert saved[2]["content"].strip() == one
    alone, _ = piped(monkeypatch, capsys, "Two?\n", run.root, *keys)
    assert alone != [two], "the first turn counts"
    none, _ = piped(monkeypatch, capsys, "One?\n", run.root, *keys, "--system", "")
    assert none != [one]


def test_mistakes_say_what_to_type(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("mine")
    lines = "/sav\n/save\n/save there\nOne?\n/save there\n/save no/such/x\n/exit\nTwo?\n"
    out, err = piped(monkeypatch, capsys, lines, run.root, "--max-new-tokens=4", code=2)
    assert len(out) == 1
    for problem in (
        '/sav: no such command. Did you mean "/save"?',
        "/save needs a file",
        "/save: the conversation is empty.",
        "/save there: exists already",
        "/save no/such/x: cannot be written (No such file or directory).",
    ):
        assert problem in err
    assert (tmp_path / "there").read_text() == "mine"
    for words, problem in (
        ([run.root, "--n=2"], "chat: no such option: --n=2"),
        ([run.root, "--tempreature=1"], 'Did you mean "--temperature"?'),
        ([run.root, "--plain", "--system", "x"], "--plain continues text, which has no turns"),
        ([tmp_path / "none"], "no such directory"),
        (["Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B --local-dir DIR"),
        ([tmp_path], "is neither a run directory (no config.yaml) nor a model (no config.json)"),
        ([run.root.parent], "Runs in it: talker"),
        ([run.root, "--model", tmp_path], "there is no config.json in it. Give the directory"),
    ):
        assert problem in piped(monkeypatch, capsys, "", *words, code=2)[1]


def test_what_cannot_chat_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, tokenizer: Any
) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig
    from transformers import LlamaForSequenceClassification as Classifier

    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
             "num_attention_heads": 4}  # fmt: skip
    for model in (
        Classifier(LlamaConfig(**sizes)),
        BertForMaskedLM(BertConfig(**sizes)),
        BertModel(BertConfig(**sizes)),
    ):
        name = type(model).__name__
        model.save_pretrained(tmp_path / name)
        err = piped(monkeypatch, capsys, "", tmp_path / name, code=2)[1]
        assert f"is a {name}, which generates no text" in err
    base = small_model("llama", vocab_size=len(tokenizer))
    base.save_pretrained(tmp_path / "base")
    assert "has no tokenizer" in piped(monkeypatch, capsys, "", tmp_path / "base", code=2)[1]
    tokenizer.save_pretrained(tmp_path / "base")
    template = tmp_path / "base" / "chat_template.jinja"
    template.unlink(missing_ok=True)
    config = tmp_path / "base" / "tokenizer_config.json"
    config.write_text(json.dumps({**read_json(config), "chat_template": None}))
    words = (tmp_path / "base", "--max-new-tokens=4")
    err = piped(monkeypatch, capsys, "", *words, code=2)[1]
    assert "Add --plain to continue text, or --template chatml" in err
    assert len(piped(monkeypatch, capsys, "Well\n", *words, "--plain")[0]) == 1
    assert len(piped(monkeypatch, capsys, "Well\n", *words, "--template", "chatml")[0]) == 1
    weights = experiment(tmp_path / "empty", ranks=1)
    empty = write_run(weights)
    err = piped(monkeypatch, capsys, "", empty.root, code=2)[1]
    assert "has no model/ yet, and no checkpoint" in err
    (empty.checkpoints / "step-00000004").mkdir(parents=True)
    err = piped(monkeypatch, capsys, "", empty.root, code=2)[1]
    assert "To try a checkpoint: `python -m llmx export" in err
    (empty.checkpoints / "step-00000004" / "state.json").write_text("{}")
    err = piped(monkeypatch, capsys, "", empty.checkpoints / "step-00000004", code=2)[1]
    assert "--step 4`" in err


def test_a_peft_directory_finds_its_base(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, tokenizer: Any
) -> None:
    import peft

    base = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    from transformers import AutoModelForCausalLM

    network = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    network.save_pretrained(tmp_path / "adapter")
    words = ("--max-new-tokens=8", "--template", "chatml")
    plain = piped(monkeypatch, capsys, "One?\n", tmp_path / "base", *words)[0]
    found = piped(monkeypatch, capsys, "One?\n", tmp_path / "adapter", *words)[0]
    assert found != plain
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    err = piped(monkeypatch, capsys, "", tmp_path / "adapter", code=2)[1]
    assert "set base_model_name_or_path in its" in err


# --- A terminal ------------------------------------------------------------------------------


ESCAPE_CODE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]?)?")  # or the first part of one


class Terminal:
    """``python -m llmx chat`` behind a pseudo-terminal."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.controller, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmx", "chat", *words],
            stdin=end, stdout=end, stderr=end, start_new_session=True,
            env={**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1", **environment},
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(end)
        self.seen = ""

    def until(self, text: str, *, timeout_s: float = 120.0) -> str:
        """What was printed up to ``text``, from where the last look ended."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} is not in {self.seen!r}"
            if select.select([self.controller], [], [], left)[0]:
                try:
                    self.seen += os.read(self.controller, 65536).decode(errors="replace")
                except OSError:
                    pytest.fail(f"ended before {text!r}: {self.seen!r}")
        found, _, self.seen = self.seen.partition(text)
        return found

    def some(self) -> str:
        """The next that is printed and can be seen: readline's escape codes around a line, which
        may come by themselves, are no answer."""
        while not ESCAPE_CODE.sub("", self.seen).strip():
            assert select.select([self.controller], [], [], 120.0)[0]
            self.seen += os.read(self.controller, 65536).decode(errors="replace")
        found, self.seen = self.seen, ""
        return found

    def type(self, text: str) -> None:
        os.write(self.controller, text.encode())

    def press_until(self, keys: str, text: str) -> str:
        """Press keys, again where nothing comes of it: Python looks at a Ctrl-C that arrives
        between the prompt and the wait for a key at the next key only."""
        for _ in range(60):
            self.type(keys)
            if select.select([self.controller], [], [], 2.0)[0]:
                break
        return self.until(text)

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        os.close(self.controller)
        return code


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_terminal_streams_and_stops(run: RunDir, tmp_path: Path) -> None:
    terminal = Terminal(str(run.root), "--max-new-tokens", "8000")
    try:
        terminal.until("/help lists commands, Ctrl-D ends.")
        terminal.until("> ")
        # Ctrl-C at an empty line ends nothing.
        terminal.press_until("\x03", "(Ctrl-D or /exit ends the chat)")
        terminal.until("> ")
        terminal.type("first\n")
        terminal.until("\n")
        terminal.some()  # the answer has begun to appear
        terminal.type("\x03")
        terminal.until("(ended)")
        terminal.until("> ")
        terminal.type('"""\nthird\nfourth\n"""\n')
        for _ in range(3):
            terminal.until("... ")
        terminal.until("\n")
        terminal.some()
        terminal.type("\x03")
        terminal.until("(ended)")
        terminal.until("> ")
        terminal.type(f"/save {tmp_path}/chat.jsonl\n")
        terminal.until("2 turns")
        terminal.until("> ")
        terminal.type("/sav\n")
        terminal.until('Did you mean "/save"?')
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)
    messages = json.loads((tmp_path / "chat.jsonl").read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == [
        "first", "third\nfourth",
    ]  # fmt: skip
    assert messages[2]["content"]


def test_the_table_of_commands_knows_templates_and_ranges() -> None:
    words = {word.name: word for word in COMMANDS["chat"].words}
    assert words["--template"].choices == ("auto", *TEMPLATES)
    for name in ("max_new_tokens", "top_p", "top_k"):
        number = words[f"--{name.replace('_', '-')}"].number
        assert number is not None
        assert number.limits == RANGES[name]
