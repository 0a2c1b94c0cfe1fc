"""``scripts/durations.py``: the times of tests, as pytest writes them, by directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "durations.py"
TIMES = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_b[1]" time="1.5"/>
<testcase classname="tests.unit.test_a" name="test_c" time="40"/>
<testcase classname="tests.unit.test_a" name="test_d" time="9"><skipped/></testcase>
<testcase classname="tests.chaos.test_e" name="test_f" time="60.4"/>
</testsuite></testsuites>"""


def test_seconds_by_directory_and_the_longest_test(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--times", str(tmp_path)]
    none = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (none.returncode, "Run `make test` first." in none.stderr) == (1, True)
    (tmp_path / "slow.xml").write_text(TIMES)
    assert subprocess.check_output(words, text=True).splitlines()[2:] == [
        "| tests/chaos | 1 | 60 | `test_e::test_f`, 60 s |",
        "| tests/unit | 2 | 42 | `test_a::test_c`, 40 s |",
        "| **all** | 3 | 102 | `test_e::test_f`, 60 s |",
    ]
