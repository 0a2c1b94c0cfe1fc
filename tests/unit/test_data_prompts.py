"""Labelled rows over seq_len: the label is whole, the prompt is cut between characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmx.config import Experiment
from llmx.data import held_out_prompts
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.records import Where
from llmx.data.store.summary import summary
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.truncation import PromptCutter
from llmx.tasks import prepare
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_data_render import CHATML, learned
from tests.unit.test_data_tools import WITHOUT

WHERE = Where(Path("rows.tsv"), 2, "line")
TEXT = "这本书 😀e\u0301 👩\u200d🚀 very 好看。" * 6


def cutter(side: str, limit: int) -> tuple[PromptCutter, Renderer]:
    tokenizer = byte_tokenizer(*CHATML, chat_template=WITHOUT)
    renderer = Renderer(tokenizer)
    return PromptCutter(renderer, limit=limit, side=side), renderer


def labelled(*contents: str, system: str = "") -> Conversation:
    roles = ["user", "assistant"] * (len(contents) // 2)
    turns = [Message(role, text) for role, text in zip(roles, contents, strict=True)]
    if system:
        turns.insert(0, Message("system", system))
    return Conversation(tuple(turns), WHERE, keeps_completion=True)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", range(40, 200, 7))
def test_the_prompt_is_cut_between_characters(side: str, limit: int):
    cut, renderer = cutter(side, limit)
    ((found,), _) = cut.shortened(labelled(TEXT, "好评"))
    prompt, answer = found.messages
    assert answer.content == "好评"
    assert TEXT.endswith(prompt.content) if side == "left" else TEXT.startswith(prompt.content)
    # Neither half an accent nor half of a joined emoji begins it, or is left behind.
    rest = TEXT.removesuffix(prompt.content) if side == "left" else TEXT[len(prompt.content) :]
    begins = prompt.content if side == "left" else rest
    assert begins[:1] not in ("\u0301", "\u200d")
    (row,) = renderer.conversations([found])
    assert len(row.tokens) <= limit
    assert len(row.tokens) > limit - 12  # and no more is cut than there must be
    assert learned(renderer.tokenizer, row) == ["好评<|im_end|>"]


def test_the_oldest_turns_go_first():
    cut, renderer = cutter("left", 90)
    row = labelled("old " * 5, "answer", "new " * 5, "answer", "question", "bad", system="S")
    ((found,), _) = cut.shortened(row)
    assert [m.content for m in found.messages] == ["S", "question", "bad"] or [
        m.content for m in found.messages
    ] == ["S", "new " * 5, "answer", "question", "bad"]
    (short,) = renderer.conversations([found])
    assert len(short.tokens) <= 90
    same = labelled("a", "b", "a", "b", "a", "b")
    roomy, _ = cutter("left", 400)
    assert roomy.shortened(same)[0] == (same,)
    tight, renderer = cutter("left", len(renderer.conversations([same])[0].tokens) - 1)
    ((fitting,), _) = tight.shortened(same)
    assert [m.content for m in fitting.messages] == ["a", "b", "a", "b"]


def test_a_label_that_does_not_fit_is_no_row():
    cut, _ = cutter("right", 30)
    assert cut.shortened(labelled("q", "label " * 10)) is None


def experiment(tmp_path: Path, rows: list[tuple[str, str]], **data) -> Experiment:
    exp = Experiment()
    path = tmp_path / "rows.tsv"
    path.write_text("label\ttext_a\n" + "".join(f"{a}\t{b}\n" for a, b in rows))
    exp.data.path, exp.data.cache_dir = str(path), str(tmp_path / "cache")
    exp.data.data_map = {"prompt": "text_a", "label": "label"}
    exp.data.seq_len = 64
    for key, value in data.items():
        setattr(exp.data, key, value)
    return exp


def test_no_label_is_lost(tmp_path: Path):
    tokenizer = byte_tokenizer(*CHATML, chat_template=WITHOUT)
    rows = [("good", "short"), ("bad", "长" * 100), ("x" * 100, "label too long")]
    exp = experiment(tmp_path, rows)
    store = prepare(exp, tokenizer)
    found = [learned(tokenizer, row) for i in range(len(store)) for row in _rows(store[i])]
    assert sorted(found) == [["bad<|im_end|>"], ["good<|im_end|>"]]
    assert store.meta["dropped"] == {"answer longer than seq_len": 1}
    assert store.meta["truncated"] == 1
    assert store.meta["truncated_tokens"] > 200
    assert "answer longer than seq_len (1); 1 row truncated to 64 tokens" in summary(store)
    other = prepare(experiment(tmp_path, rows, truncate_prompt="right"), tokenizer)
    assert other.path != store.path
    dropped = prepare(experiment(tmp_path, rows, over_long="drop"), tokenizer)
    assert dropped.num_sequences == 1


def _rows(sample):
    class Row:
        def __init__(self, tokens, targets):
            self.tokens, self.targets = tokens, targets

    return [Row(*pair) for pair in sample.sequences()]


def test_an_eval_prompt_is_cut_as_it_is_trained(tmp_path: Path):
    tokenizer = byte_tokenizer(*CHATML, chat_template=WITHOUT)
    exp = experiment(tmp_path, [("good", "short"), ("bad", "x" * 200)])
    exp.data.eval_path = exp.data.path
    prompts = held_out_prompts(exp.data, exp.seed, tokenizer, limit=9, decode=tokenizer.decode)
    assert [prompt.expected for prompt in prompts] == ["good<|im_end|>", "bad<|im_end|>"]
    store = prepare(exp, tokenizer)
    rows = [row.tokens.tolist() for i in range(len(store)) for row in _rows(store[i])]
    longest = max(rows, key=len)
    assert longest[: len(prompts[1].tokens)] == list(prompts[1].tokens)
