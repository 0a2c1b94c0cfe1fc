"""What Hydra says of an override, in words that help: the nearest key, the options of a group."""

from __future__ import annotations

import re

from llmx.catalogue import GROUPS, options
from llmx.config import known_keys
from llmx.errors import did_you_mean


def explain_hydra(error: Exception) -> str:
    """Hydra's message with the nearest known key or option, and without its advice to add a +."""
    text = str(error).strip()
    if "override_grammar" in text:
        return (
            f"an override cannot be read: {text.splitlines()[0]}. It is key=value; brackets and "
            "quotes must be closed, and a value with spaces or commas is quoted: 'key=\"a, b\"'; "
            "in brackets also one with letters beyond ASCII: 'key={0: \"é\"}'."
        )
    missing = re.search(r"Could not override '([^']+)'", text)
    if missing:
        key = missing.group(1)
        homes = [known for known in known_keys() if known.split(".")[-1] == key.split(".")[-1]]
        words = f" It exists as {', '.join(homes)}." if homes else ""
        words = words or did_you_mean(key, [*known_keys(), *GROUPS])
        return f"{key}: no such key.{words} See python -m llmx --help and --cfg job."
    option = re.search(r"Could not find '([a-z_]+)/([^']+)'", text)
    if option and option.group(1) in GROUPS:
        group, name = option.group(1), option.group(2)
        known = list(options(group))
        return (
            f"{group}={name}: no such option.{did_you_mean(name, known)} "
            f"Options of {group}: {', '.join(known)}; your own: --config-dir DIR."
        )
    wanted = re.search(r"Missing mandatory value: .*full_key: ([\w.]+)", text, re.DOTALL)
    if wanted:
        key = wanted.group(1)
        return f"{key} has no value yet, and this choice needs one: set {key}=..."
    return text
