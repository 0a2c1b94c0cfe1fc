"""The benchmark's own arithmetic, its texts, and the end of a part that hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from llmx.bench.__main__ import chosen, wait
from llmx.bench.context import Context
from llmx.bench.kernels import _runs_on
from llmx.bench.material import chats, text, tokenizer, vocab_size
from llmx.bench.measure import Measure, Outcome, at_least, at_most, markdown, must
from llmx.config.schema import DeviceConfig
from tests.cluster.host import wait_until


def small(tmp_path) -> Context:
    return Context(tmp_path, True, DeviceConfig(accelerator="cpu"), "cpu", 0)


def test_measures_say_what_is_expected() -> None:
    assert at_least("x", 788.0, 742.0, "TFLOP/s").ok
    assert at_least("x", 788.0, 742.0, "TFLOP/s").expected == "at least 742 TFLOP/s"
    assert not at_most("x", 2.5, 2.0, "s").ok
    assert must("x", False).shown() == "no"
    assert Measure("x", 1234567.0, "tokens/s").shown() == "1,234,567 tokens/s"
    assert Measure("x", 0.01234).shown() == "0.0123"


def test_an_outcome_is_right_only_if_nothing_is_missed() -> None:
    good = Outcome("a", "A", "done", measures=[at_most("x", 1, 2), Measure("y", 1)])
    assert good.ok
    assert not Outcome("a", "A", "done", measures=[at_most("x", 3, 2)]).ok
    assert not Outcome("a", "A", "failed", why="no").ok
    assert Outcome("a", "A", "not run", why="no GPU").ok
    table = "\n".join(markdown([good, Outcome("b", "B", "failed", why="it broke")], machine=["m"]))
    assert "| x | 1 | at most 2 | ok |" in table
    assert "failed: it broke" in table


def test_parts_run_in_their_order_whatever_was_typed() -> None:
    assert chosen("mfu, versions") == ["versions", "mfu"]
    assert len(chosen(None)) > 10


@pytest.mark.parametrize(
    ("arch", "chip", "runs"),
    [
        ("sm_90", (9, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_75", (7, 0), False),
        ("sm_120", (12, 0), True),
    ],
)
def test_code_for_a_chip_runs_on_its_own_major(arch, chip, runs) -> None:
    assert _runs_on(arch, *chip) is runs


def test_the_words_of_the_text_are_one_token_each(tmp_path) -> None:
    import json

    from transformers import AutoTokenizer

    context = small(tmp_path)
    encoder = AutoTokenizer.from_pretrained(tokenizer(context))
    assert len(encoder) == vocab_size(context)
    assert encoder.convert_ids_to_tokens(encoder.eos_token_id) == "<|im_end|>"
    lines = text(context, tokens=500).read_text().splitlines()
    documents = [json.loads(line)["text"] for line in lines]
    words = sum(len(document.split()) for document in documents)
    assert words >= 500
    # The first word of a document has no space before it, so only that one is cut into letters.
    tokens = sum(len(encoder(" " + document)["input_ids"]) for document in documents)
    assert tokens == words
    rows = [json.loads(line) for line in chats(context, rows=5).read_text().splitlines()]
    assert all(row["prompt"] and row["response"] for row in rows)


def living_of_group(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found


def test_a_part_over_its_time_is_ended_with_what_it_started() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, start_new_session=True
    )
    assert wait(process, limit_s=0.5) == "not over after its 0.5 s"
    assert process.returncode == -signal.SIGTERM
    # Each of the group was told; the last one may end a moment after the first.
    wait_until(lambda: not living_of_group(process.pid), timeout_s=30, what="the group ended")
