"""As many cores as are wanted, there and allowed; what is less is said."""

from __future__ import annotations

import resource

import pytest

from llmx.data.tokenize.documents import core_count, fitted, worker_count

FREE = {"open files (ulimit -n)": 1024, "processes and threads (ulimit -u)": -1}


def test_what_is_there_is_used():
    assert fitted(0, cores=8, limits=FREE) == (8, "")
    assert fitted(3, cores=8, limits=FREE) == (3, "")


def test_more_than_there_are_cores():
    count, remark = fitted(64, cores=2, limits=FREE)
    assert count == 2
    assert remark.startswith("data.num_workers=64, but this process may use 2 cores: 2 are used.")


def test_a_small_limit():
    count, remark = fitted(0, cores=64, limits={**FREE, "open files (ulimit -n)": 128})
    assert count == 16
    assert remark.startswith("Only 128 open files (ulimit -n) are allowed: 16 of 64 cores tokenize")
    assert fitted(0, cores=64, limits={"open files (ulimit -n)": 10})[0] == 1


def test_this_process(capsys: pytest.CaptureFixture[str]):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        assert worker_count(0) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    said = capsys.readouterr().err
    assert ("Only 64 open files" in said) == (core_count() > 1)
