"""Saves checkpoints in forked children, so that a test can put a fault into each by ``strace``.

Reads one line a save from stdin, ``CHECKPOINTS STEP``; prints the pid of a child that has stopped
itself before its first system call of the save, and how it ended: ``0`` committed, ``1`` given up,
``2`` another error, negative: killed by a signal.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.checkpoint_saves import save


def main() -> None:
    for line in sys.stdin:
        checkpoints, step = line.split()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            code = 2  # an error that nobody expects
            try:
                code = 0 if save([Path(checkpoints)], int(step)) else 1
            finally:
                os._exit(code)
        os.waitpid(child, os.WUNTRACED)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
