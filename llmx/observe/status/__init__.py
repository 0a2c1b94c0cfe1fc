"""``python -m llmx status``: what runs are doing, from the files of their directories.

python -m llmx status                     all runs under outputs/, live ones first
python -m llmx status RUN                 one of them
python -m llmx status SWEEP_DIR           a sweep: done, running, failed, left, the best so far
python -m llmx status user@host:RUN       on another machine, over ssh and rsync
"""

from __future__ import annotations

import argparse
import json
import sys

from llmx.errors import ConfigError
from llmx.observe.source import Source, location_of

SHOWN = 20


def run(options: argparse.Namespace) -> int:
    """Print the status of one run or a table of runs; 0, or 1 where the one run failed."""
    from llmx.observe.report.screen import is_plain, open_console
    from llmx.observe.status import show, sweep

    location = location_of(options)
    if sweep.is_here(location):
        return sweep.status(location.path, as_json=options.json)
    with Source(location) as source:
        if source.is_run():
            run = source.run()
            if options.json:
                _print_json(run.facts())
                return 0
            console = open_console(sys.stdout)
            console.print(show.panel(run, is_plain(console)))
            return 1 if run.state in ("failed", "dead") else 0
        runs, num_runs = source.runs(10**6 if options.all else SHOWN)
        if options.json:
            facts = [run.facts() for run in runs]
            _print_json({"base": source.base, "found": num_runs, "runs": facts})
            return 0
        if not runs:
            raise ConfigError(
                f"no runs under {source.base}. Give the directory that holds them, or set "
                "LLMX_OUTPUTS: python -m llmx status DIR"
            )
        for line in show.table(runs, num_runs=num_runs):
            open_console(sys.stdout).print(line, soft_wrap=True)
    return 0


def _print_json(facts: object) -> None:
    print(json.dumps(facts, indent=2, ensure_ascii=False))
