"""``benchmarks/gpu``: its measures, its texts, and the end of a part that hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.gpu.__main__ import find_context, wait
from benchmarks.gpu.material import chats, text, tokenizer, vocab_size
from benchmarks.gpu.part import Context, Measure, Outcome, at_least, at_most
from llmx.config.schema import DeviceConfig
from llmx.errors import ConfigError
from tests.cluster.host import wait_until


def small(tmp_path) -> Context:
    return Context(tmp_path, True, DeviceConfig(accelerator="cpu"), "cpu", 0)


def test_an_outcome_is_right_only_if_nothing_is_missed() -> None:
    assert at_least("x", 788.0, 742.0, "TFLOP/s").expected == "at least 742 TFLOP/s"
    assert Measure("x", 1234567.0, "tokens/s").shown() == "1,234,567 tokens/s"
    assert Outcome("a", "A", "done", measures=[at_most("x", 1, 2), Measure("y", 1)]).ok
    assert not Outcome("a", "A", "done", measures=[at_most("x", 3, 2)]).ok
    assert not Outcome("a", "A", "failed", why="no").ok
    assert Outcome("a", "A", "not run", why="no GPU").ok


def test_the_gpus_are_those_that_this_process_sees(tmp_path, monkeypatch) -> None:
    from llmx.hardware import detect

    gpus = [
        detect.Gpu("Tesla V100-PCIE-32GB", 32.0, 7.0, 0, "GPU-a"),
        detect.Gpu("NVIDIA H200", 140.0, 9.0, 1, "GPU-b"),
    ]
    monkeypatch.setattr(detect, "detect_gpus", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    context = find_context(tmp_path, tiny=False)
    assert (context.device_name, context.num_gpus) == ("h200_141g", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not find_context(tmp_path, tiny=True).cuda
    with pytest.raises(ConfigError, match="this process sees none"):
        find_context(tmp_path, tiny=False)


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
    assert wait(process, limit_s=0.5) == "it did not end within its 0.5 s"
    assert process.returncode == -signal.SIGTERM
    # Each of the group was told; the last one may end a moment after the first.
    wait_until(lambda: not living_of_group(process.pid), timeout_s=30, what="the group ended")
