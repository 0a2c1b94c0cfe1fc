"""Writes the page of all known failures for the site: ``python -m llmx.failures.page``."""

# ruff: noqa: E501
from __future__ import annotations

from llmx.failures import cluster, machine, training
from llmx.failures.diagnose import fill
from llmx.failures.row import Row

_HEAD = """\
# Known failures

Written by `make site` from `llmx/failures`. Search this page for the words of your error, or let llmx read the log:

```sh
python -m llmx explain LOG
```

`LOG` is a file of any program (torchrun, accelerate, LLaMA-Factory, `deepspeed`), `-` for standard input, or a run
directory. The cause is the first error that explains the others; warnings never decide. `--json` is for scripts. The
exit code is 0 if the failure is known, else 1: then the line of the error is shown.

After a failure, a run finds its cause in the same catalogue. How well it does is at the [end](#how-well).
"""
_HOW_WELL = """\
## How well

Measured on 85 real failures, reconstructed from public threads (`benchmarks/explain.py`). The 32 held-out texts were
read for the first time after the rows were written. "Right" means that the row agrees with the cause that the thread
found.

| texts | right | partly | wrong | unknown |
|---|---:|---:|---:|---:|
| 53 that rows were written from | 100 % | 0 % | 0 % | 0 % |
| 32 held out | 84 % | 9 % | 3 % | 3 % |

Five harmless lines before each text (warnings, retries, notes of other programs) change none of them.
"""


def markdown() -> str:
    """The page: of each row its messages, cause and fix."""
    parts = [_HEAD]
    for title, module in (("Machine", machine), ("Training", training), ("Cluster", cluster)):
        parts.append(f"## {title}\n")
        parts += [_entry(row) for row in module.ROWS]
    return "\n".join([*parts, _HOW_WELL])


def _entry(row: Row) -> str:
    messages = "\n".join(row.messages)
    lines = [f"### {row.name}", "", "```text", messages, "```", ""]
    lines += [f"- cause ({row.outcome}): {fill(row.cause)}", f"- fix: {fill(row.fix)}"]
    if row.llmx:
        lines.append(f"- in llmx: {fill(row.llmx)}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(markdown(), end="")
