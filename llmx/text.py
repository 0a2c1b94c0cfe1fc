"""Words of messages: numbers with their nouns, and text that a terminal may safely be given.

Standard library only; every room may import it.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL, C1: they move the cursor, ring, set titles, clear screens
    "\u2028\u2029"  # line breaks that are none in a file
    "\u202a-\u202e\u2066-\u2069"  # bidirectional overrides: text that reads otherwise than it is
    "\ud800-\udfff]"  # lone surrogates (broken UTF-8): cannot be encoded at all
)


def plural(count: float, noun: str, nouns: str | None = None) -> str:
    """``1 row``, ``1,200 rows``, ``0.5 epochs``; ``nouns`` where ``s`` is not enough."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:,g}"
    return f"{number} {noun if number == '1' else nouns or noun + 's'}"


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""``text`` with control characters but ``keep`` as escapes (``\x1b``, ``\u202e``).

    What a model answers, or data holds, must not steer the terminal that it is shown on.
    """

    def escaped(match: re.Match[str]) -> str:
        letter = match.group()
        if letter in keep:
            return letter
        return f"\\x{ord(letter):02x}" if ord(letter) < 256 else f"\\u{ord(letter):04x}"

    return _UNSAFE.sub(escaped, text)
