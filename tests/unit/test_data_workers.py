"""As many cores as are wanted and there; what is less is said."""

from __future__ import annotations

import os

import pytest

from llmx.data.tokenize.documents import worker_count


def test_what_is_there_is_used(capsys: pytest.CaptureFixture[str]):
    cores = len(os.sched_getaffinity(0))
    assert (worker_count(0), worker_count(1)) == (cores, 1)
    assert not capsys.readouterr().err


def test_more_than_there_are_cores(capsys: pytest.CaptureFixture[str]):
    cores = len(os.sched_getaffinity(0))
    assert worker_count(cores + 1) == cores
    message = f"data.num_workers={cores + 1}, but this process may use {cores} cores: {cores} are"
    assert capsys.readouterr().err.startswith(message)
