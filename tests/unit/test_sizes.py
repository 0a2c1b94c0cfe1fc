"""The size table of docs/development/contracts.md names every package.

Its numbers are not compared: a commit need not write the table.
"""

from __future__ import annotations

import re

from scripts.sizes import BEGIN, END, PAGE, ROOT, table


def packages(text: str) -> list[str]:
    return re.findall(r"^\| ([^|]+) \| [\d,]+ \| [\d,]+ \| [\d,]+ \|$", text, re.MULTILINE)


def test_the_size_table_names_every_package() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert packages(written) == packages(table())
    names = {path.parent.name for path in (ROOT / "llmx").glob("*/__init__.py")}
    assert names <= set(packages(written)), "python scripts/sizes.py --write"
