"""Labelled rows over seq_len: the label is whole, the prompt is cut between characters."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from llmx.config import Experiment
from llmx.data import held_out_prompts
from llmx.data.store.summary import summary
from llmx.data.tokenize.conversations import Renderer
from llmx.data.tokenize.truncation import PromptCutter
from llmx.tasks import prepare
from tests.data_rows import CHATML, chat, learned, of_rows, sequences
from tests.small_tokenizers import byte_tokenizer
from tests.unit.test_data_tools import WITHOUT

TEXT = "这本书 😀e\u0301 👩\u200d🚀 very 好看。" * 6
TOKENIZER = byte_tokenizer(*CHATML, chat_template=WITHOUT)
RENDERER = Renderer(TOKENIZER)


def cutter(limit: int, side: str = "left") -> PromptCutter:
    return PromptCutter(RENDERER, limit=limit, side=side)


labelled = functools.partial(chat, keeps_completion=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_prompt_is_cut_between_characters(side: str):
    for limit in range(40, 200, 7):
        ((found,), _) = cutter(limit, side).shortened(labelled(TEXT, "好评"))
        prompt, answer = found.messages
        assert answer.content == "好评"
        # Neither half an accent nor half of a joined emoji begins it, or is left behind.
        if side == "left":
            assert TEXT.endswith(prompt.content)
            begins = prompt.content
        else:
            assert TEXT.startswith(prompt.content)
            begins = TEXT[len(prompt.content) :]
        assert begins[:1] not in ("\u0301", "\u200d")
        (row,) = RENDERER.conversations([found])
        assert limit - 12 < len(row.tokens) <= limit, "no more is cut than there must be"
        assert learned(TOKENIZER, row) == ["好评<|im_end|>"]


def test_the_oldest_turns_go_first():
    row = labelled("old " * 5, "answer", "new " * 5, "answer", "question", "bad", system="S")
    ((found,), (short,)) = cutter(90).shortened(row)
    assert [m.content for m in found.messages] == ["S", "new " * 5, "answer", "question", "bad"]
    assert len(short.tokens) <= 90
    same = labelled("a", "b", "a", "b", "a", "b")
    assert cutter(400).shortened(same)[0] == (same,)
    size = len(RENDERER.conversations([same])[0].tokens)
    ((fitting,), _) = cutter(size - 1).shortened(same)
    assert [m.content for m in fitting.messages] == ["a", "b", "a", "b"]


def test_a_label_that_does_not_fit_is_no_row():
    assert cutter(30, "right").shortened(labelled("q", "label " * 10)) is None


def experiment(directory: Path, rows: list[tuple[str, str]], **data: object) -> Experiment:
    content = "label\ttext_a\n" + "".join(f"{label}\t{text}\n" for label, text in rows)
    data_map = {"prompt": "text_a", "label": "label"}
    return of_rows(directory, content, "rows.tsv", data_map=data_map, **data)


def test_no_label_is_lost(tmp_path: Path):
    rows = [("good", "short"), ("bad", "长" * 100), ("x" * 100, "label too long")]
    store = prepare(experiment(tmp_path, rows), TOKENIZER)
    found = [learned(TOKENIZER, row) for row in sequences(store)]
    assert sorted(found) == [["bad<|im_end|>"], ["good<|im_end|>"]]
    assert store.meta["dropped"] == {"answer longer than seq_len": 1}
    assert store.meta["truncated"] == 1
    assert store.meta["truncated_tokens"] > 200
    left_out = "left out: answer longer than seq_len (1); truncated: 1 row to 64 tokens"
    assert left_out in summary(store)
    other = prepare(experiment(tmp_path, rows, truncate_prompt="right"), TOKENIZER)
    assert other.path != store.path
    dropped = prepare(experiment(tmp_path, rows, over_long="drop"), TOKENIZER)
    assert dropped.num_sequences == 1


def test_an_eval_prompt_is_cut_as_it_is_trained(tmp_path: Path):
    exp = experiment(tmp_path, [("good", "short"), ("bad", "x" * 200)])
    exp.data.eval_path = exp.data.path
    prompts = held_out_prompts(exp.data, exp.seed, TOKENIZER, limit=9, decode=TOKENIZER.decode)
    assert [prompt.expected for prompt in prompts] == ["good<|im_end|>", "bad<|im_end|>"]
    rows = [row.tokens.tolist() for row in sequences(prepare(exp, TOKENIZER))]
    assert max(rows, key=len)[: len(prompts[1].tokens)] == list(prompts[1].tokens)
