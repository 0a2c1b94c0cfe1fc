"""``python -m llmx chat``: the conversation, what it costs, and a real terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmx.cli.chat import Chat
from llmx.cli.commands import COMMANDS
from llmx.cli.generate import LoadedModel, PromptLayout
from llmx.cli.main import run_here
from llmx.data.format.templates import TEMPLATES
from llmx.errors import ConfigError
from llmx.models.generate import decoder_of
from llmx.models.sampling import RANGES, Sampling
from llmx.run.rundir import RunDir, read_json
from llmx.tasks import tokenizer_of
from tests.rundirs import experiment, write_run
from tests.small_models import small_model
from tests.terminals import Terminal


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """An SFT run that wrote its model, which babbles until max_new_tokens."""
    place = tmp_path_factory.mktemp("run") / "talker"
    run_dir = write_run(experiment(place, ranks=1, data={"system": "Be brief."}))
    a_model(run_dir.final_model, positions=8192)
    return run_dir


TOKENIZER = tokenizer_of(experiment(Path("unused")))


def a_model(directory: Path | None = None, *, positions: int = 512) -> Any:
    """A model with the vocabulary of the demo; ``directory``: saved there with its tokenizer."""
    model = small_model("llama", vocab_size=len(TOKENIZER), max_position_embeddings=positions)
    if directory is not None:
        model.save_pretrained(directory)
        TOKENIZER.save_pretrained(directory)
    return model


def a_chat(model: Any, *, template: str | None = "auto") -> Chat:
    layout = PromptLayout(TOKENIZER, template=template, system=None)
    loaded = LoadedModel(decoder_of(model), TOKENIZER, layout, layout.stop_ids)
    how = Sampling(max_new_tokens=8, stop_ids=layout.stop_ids)
    return Chat(loaded, how, seed=3)


# --- The conversation ------------------------------------------------------------------------


def test_an_interrupted_answer_is_kept_as_far_as_it_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = a_model()
    whole = a_chat(model)
    wanted = whole.answer("Which is a bird?")
    talk, said = a_chat(model), []

    def stop(_index: int, token: int) -> None:
        said.append(token)
        if len(said) == 3:
            raise KeyboardInterrupt

    found = talk.answer("Which is a bird?", stop)
    assert found.ended == "interrupted"
    assert wanted.text.startswith(found.text)
    assert talk.turns == [("Which is a bird?", found.text)]
    again = a_chat(model)
    again.turns = list(talk.turns)
    assert talk.answer("Go on.") == again.answer("Go on.")

    # Nothing said: nothing stays.
    def at_once(_index: int, _token: int) -> None:
        raise KeyboardInterrupt

    silent = a_chat(model)
    monkeypatch.setattr(LoadedModel, "decode", lambda model, tokens: "")
    assert silent.answer("Well?", at_once).text == ""
    assert silent.turns == []


def test_a_forward_that_fails_leaves_no_half_cache() -> None:
    model = a_model()
    talk, fresh = a_chat(model), a_chat(model)
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


def test_oldest_turns_are_left_out_where_positions_end() -> None:
    talk = a_chat(a_model(positions=96))
    for number in range(6):
        talk.answer(f"message number {number}")
    assert 0 < talk.left_out < len(talk.turns) == 6
    assert len(talk.prompt("next")) + 8 <= 96
    assert len(talk.messages()) == 12, "the conversation itself is whole"
    with pytest.raises(ConfigError, match="the model 96 positions. Ask something shorter"):
        talk.answer("word " * 200)
    assert len(talk.turns) == 6


def test_plain_text_goes_on() -> None:
    talk = a_chat(a_model(), template=None)
    talk.answer("Once upon a time")
    (turn,) = talk.turns
    assert talk._ids(talk.turns, " and") == list(TOKENIZER("".join(turn) + " and")["input_ids"])
    talk.answer(" and")


# --- Piped -----------------------------------------------------------------------------------


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> Any:
    """The command with these lines as its input: what it answered, and what it said on stderr."""
    monkeypatch.chdir(tmp_path)

    def run_it(lines: str, *words: Any, code: int = 0) -> tuple[list[str], str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert run_here("chat", [str(word) for word in words]) == code
        found = capsys.readouterr()
        return found.out.splitlines(), found.err

    return run_it


def test_a_line_is_a_message_and_history_counts(run: RunDir, piped: Any) -> None:
    keys = ("--temperature=1.3", "--seed=4", "--max-new-tokens=6")
    lines = "One?\n\nTwo?\n/save chat.jsonl\n/reset\nOne?\n"
    (one, two, once_more), err = piped(lines, run.root, *keys)
    assert once_more == one
    assert "(written to chat.jsonl: 2 turns)" in err
    saved = json.loads(Path("chat.jsonl").read_text())["messages"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [message["role"] for message in saved] == roles
    assert saved[0]["content"] == "Be brief."
    assert saved[2]["content"].strip() == one
    assert piped("Two?\n", run.root, *keys)[0] != [two], "the first turn counts"
    assert piped("One?\n", run.root, *keys, "--system", "")[0] != [one]


def test_mistakes_say_what_to_type(run: RunDir, piped: Any, tmp_path: Path) -> None:
    Path("there").write_text("mine")
    lines = "/sav\n/save\n/save there\nOne?\n/save there\n/save no/such/x\n/exit\nTwo?\n"
    out, err = piped(lines, run.root, "--max-new-tokens=4", code=2)
    assert len(out) == 1
    for problem in (
        '/sav: no such command. Did you mean "/save"?',
        "/save needs a file",
        "/save: the conversation is empty.",
        "/save there: exists already",
        "/save no/such/x: cannot be written (No such file or directory).",
    ):
        assert problem in err
    assert Path("there").read_text() == "mine"
    for words, problem in (
        ([run.root, "--n=2"], "chat: no such option: --n=2"),
        ([run.root, "--plain", "--system", "x"], "--plain continues text, which has no turns"),
        ([tmp_path / "none"], "no such directory"),
        (["Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B --local-dir DIR"),
        ([run.root.parent], "Runs in it: talker"),
        ([run.root, "--model", tmp_path], "there is no config.json in it. Give the directory"),
    ):
        assert problem in piped("", *words, code=2)[1]


SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
         "num_attention_heads": 4}  # fmt: skip


def test_a_model_that_writes_no_text_is_refused(piped: Any, tmp_path: Path) -> None:
    for network in (
        transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES)),
        transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
        transformers.BertModel(transformers.BertConfig(**SIZES)),
    ):
        name = type(network).__name__
        network.save_pretrained(tmp_path / name)
        err = piped("", tmp_path / name, code=2)[1]
        assert f"is a {name}, which generates no text" in err


def test_a_model_without_tokenizer_or_template_is_said(piped: Any, tmp_path: Path) -> None:
    base = tmp_path / "base"
    a_model().save_pretrained(base)
    assert "has no tokenizer" in piped("", base, code=2)[1]
    TOKENIZER.save_pretrained(base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    config = base / "tokenizer_config.json"
    config.write_text(json.dumps({**read_json(config), "chat_template": None}))
    words = (base, "--max-new-tokens=4")
    err = piped("", *words, code=2)[1]
    assert "Add --plain to continue text, or --template chatml" in err
    assert len(piped("Well\n", *words, "--plain")[0]) == 1
    assert len(piped("Well\n", *words, "--template", "chatml")[0]) == 1


def test_a_run_without_a_model_says_what_it_has(piped: Any, tmp_path: Path) -> None:
    empty = write_run(experiment(tmp_path / "empty", ranks=1))
    assert "has no model/ yet, and no checkpoint" in piped("", empty.root, code=2)[1]
    checkpoint = empty.checkpoints / "step-00000004"
    checkpoint.mkdir(parents=True)
    err = piped("", empty.root, code=2)[1]
    assert "To try a checkpoint: `python -m llmx export" in err
    (checkpoint / "state.json").write_text("{}")
    assert "--step 4`" in piped("", checkpoint, code=2)[1]


def test_a_peft_directory_finds_its_base(piped: Any, tmp_path: Path) -> None:
    import peft

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    a_model(base)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    network = peft.get_peft_model(whole, config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    network.save_pretrained(adapter)
    words = ("--max-new-tokens=8", "--template", "chatml")
    assert piped("One?\n", adapter, *words)[0] != piped("One?\n", base, *words)[0]
    base.rename(tmp_path / "elsewhere")
    assert "set base_model_name_or_path in its" in piped("", adapter, code=2)[1]


# --- A terminal ------------------------------------------------------------------------------


def press(terminal: Terminal, keys: str) -> None:
    """Press keys, again where nothing comes of it: Python looks at a Ctrl-C that arrives between
    the prompt and the wait for a key at the next key only."""
    for _ in range(60):
        terminal.type(keys)
        if terminal.shows(2.0):
            return


def test_a_terminal_streams_and_stops(run: RunDir, tmp_path: Path) -> None:
    words = ["-m", "llmx", "chat", str(run.root), "--max-new-tokens", "8000"]
    environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    terminal = Terminal([sys.executable, *words], env=environment)
    try:
        terminal.wait_for("/help lists commands, Ctrl-D ends.")
        terminal.wait_for("> ")
        # Ctrl-C at an empty line ends nothing.
        press(terminal, "\x03")
        terminal.wait_for(r"\(Ctrl-D or /exit ends the chat\)")
        terminal.wait_for("> ")
        for message, line_breaks in (("first\n", 0), ('"""\nthird\nfourth\n"""\n', 3)):
            terminal.type(message)
            for _ in range(line_breaks):
                terminal.wait_for(r"\.\.\. ")
            terminal.wait_for("\n")
            # The answer has begun to appear: readline's escape codes around a line are none.
            terminal.wait_for(r"\A(\x1b\[[0-?]*[ -/]*[@-~]|\s)*[^\x1b\s]")
            terminal.type("\x03")
            terminal.wait_for(r"\(ended\)")
            terminal.wait_for("> ")
        terminal.type(f"/save {tmp_path}/chat.jsonl\n")
        terminal.wait_for("2 turns")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.kill()
    messages = json.loads((tmp_path / "chat.jsonl").read_text())["messages"]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    assert asked == ["first", "third\nfourth"]
    assert messages[2]["content"]


def test_the_table_of_commands_knows_templates_and_ranges() -> None:
    words = {word.name: word for word in COMMANDS["chat"].words}
    assert words["--template"].choices == ("auto", *TEMPLATES)
    for name in ("max_new_tokens", "top_p", "top_k"):
        number = words[f"--{name.replace('_', '-')}"].number
        assert number is not None
        assert number.limits == RANGES[name]
