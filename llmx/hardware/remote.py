"""Programs of llmx on a host that has a Python and nothing else: sent there, run there.

``BOOTSTRAP`` is what ``python -c`` gets on the command line; the source follows on its standard
input, which stays open for what the program reads (agents). The survey needs neither: ``python -``
reads it whole.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Reads the source from stdin, and no byte more: what follows is for the program.
BOOTSTRAP = (
    "import os\n"
    "def take(k):\n"
    " d=os.read(0,k)\n"
    " return d or os._exit(1)\n"  # the connection broke
    "n=b''\n"
    "while not n.endswith(b'\\n'): n+=take(1)\n"
    "s=b''\n"
    "while len(s)<int(n): s+=take(int(n)-len(s))\n"
    "exec(compile(s,'llmx-remote','exec'),{'__name__':'__main__'})\n"
)


def framed(source: bytes) -> bytes:
    """The source of a program as ``BOOTSTRAP`` reads it."""
    return f"{len(source)}\n".encode() + source


def survey_source() -> str:
    """The source of the survey (``survey.py``)."""
    return Path(__file__).with_name("survey.py").read_text(encoding="utf-8")


class SurveyError(Exception):
    """A host gave no survey; ``str()`` says why."""


def run_survey(argv: Sequence[str], *, timeout_s: float) -> dict[str, Any]:
    """The survey by ``argv``: a Python that reads its program from stdin, here or over ssh.

    Raises:
        SurveyError: it cannot be started, fails, or does not answer in time.
    """
    try:
        done = subprocess.run(
            argv,
            input=survey_source(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode == 0:
            # The last line: the start of an environment may print something.
            return dict(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise SurveyError(str(error)) from error
    last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise SurveyError(f"{last_line} (tried: {shlex.join(argv[:3])} ...)")
