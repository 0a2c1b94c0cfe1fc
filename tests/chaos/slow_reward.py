"""A reward function of the user's own: it takes its time, and for a few completions for ever."""

import time
import zlib

SECONDS = 0.01
"""So that a step takes about as long on every machine, however fast it is."""
HANGS_IN = 512
"""The reward hangs for about one of so many completions."""


def slow(prompt: str, completion: str, reference: str) -> float:
    """A number that depends on every byte of the completion."""
    number = zlib.crc32(f"{prompt}{completion}".encode())
    if number % HANGS_IN == 0:
        time.sleep(1e6)
    time.sleep(SECONDS)
    return number % 1000 / 1000
