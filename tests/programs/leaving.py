"""How a rank of a test program ends, as ``llmx.worker`` does."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_and_leave(main: Callable[[], None]) -> NoReturn:
    """Without taking the interpreter down: threads of the communication libraries sometimes abort
    it ("terminate called without an active exception")."""
    code = 0
    try:
        main()
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
