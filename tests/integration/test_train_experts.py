"""ZeRO-3 and experts that only some ranks need.

``python -m pytest -m deepspeed tests/integration/test_train_experts.py``
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_ranks import launch

pytestmark = pytest.mark.deepspeed


def test_ranks_whose_tokens_need_other_experts_do_not_wait_for_each_other(tmp_path: Path) -> None:
    done = launch("tests.programs.experts", str(tmp_path), ranks=2)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    first, second = (rank["3"]["experts"] for rank in ranks)
    assert first != second, "the ranks needed the same experts: nothing was tried"
    for rank in ranks:
        sharded, whole = rank["3"], rank["0"]
        assert sharded["experts"] == whole["experts"]
        for what in ("losses", "norms"):
            assert sharded[what] == pytest.approx(whole[what], rel=1e-5)
