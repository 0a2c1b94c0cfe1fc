"""``python -m llmx [command] [overrides]``; the script ``llmx`` is the same (``llmx.cli.main``)."""

from __future__ import annotations

import sys

from llmx.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
