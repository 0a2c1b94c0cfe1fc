"""Report on a run: tables here, ``loss.png`` and ``report.html`` in its directory.

    python -m llmx report RUN_DIR [--width N]

Reads the run directory only; works for a run that still trains, and for one that failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llmx.cli.flags import Parser, whole_number
from llmx.errors import exit_code
from llmx.observe.report.figure import draw_loss
from llmx.observe.report.page import page
from llmx.observe.report.run_data import RunData, load_run
from llmx.observe.report.tables import draw_table, tables
from llmx.observe.report.terminal import print_report
from llmx.run.rundir import write_text


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code (0 also for a run that failed: it is reported)."""
    parser = Parser(
        prog="python -m llmx report",
        description="Report on a run: tables here, loss.png and report.html in its directory. "
        "Works for a run that is still training, and for one that failed.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run directory")
    parser.add_argument(
        "--width", metavar="N", type=whole_number(20, 1000), help="columns of the tables"
    )
    options = parser.parse_args(argv)
    return exit_code(lambda: _report(options.run_dir, width=options.width))


def _report(run_dir: Path, *, width: int | None) -> int:
    data = load_run(run_dir)
    try:
        write_files(data)
    except OSError as error:
        # A full or read-only disk: what can be printed is printed all the same.
        data.warnings.append(f"{error.filename or data.run.root}: not written ({error.strerror}).")
    print_report(data, stream=sys.stdout, width=width)
    return 0


def write_files(data: RunData) -> None:
    """Write ``loss.png`` and the pictures of an evaluation's tables (where there is something to
    draw), and ``report.html``."""
    draw_loss(data, data.run.loss_curve)
    for table in tables(data):
        draw_table(table, data.run.root / table.file_name)
    write_text(data.run.report, page(data))


if __name__ == "__main__":
    sys.exit(main())
