"""Rollout servers, forked (``tests.forks``): alone, and as the child of an agent."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from llmx.rollout import server


def serve() -> None:
    torch.set_num_threads(1)  # as the tests that draw the same
    sys.exit(server.main())


def serve_and_note_allocator(note: Path) -> None:
    """What the server has set for torch's allocator goes into a file, in the place of serving."""
    variable = "PYTORCH_ALLOC_CONF"
    server.Server.serve_forever = lambda *_: note.write_text(os.environ[variable])  # type: ignore
    serve()


def serve_below_an_agent(note: Path) -> None:
    """The number of the server's process goes into a file."""
    if (pid := os.fork()) == 0:
        serve()
    note.write_text(str(pid))
    signal.pause()
