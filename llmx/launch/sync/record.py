"""What earlier launches have found out about a host, so that the next one need not do it again.

``$LLMX_CACHE/hosts/ADDRESS-PORT.json`` on the machine that launches:

    {"synced": {"/path": ["stamp here", "stamp there"]}, "surveys": {"what was asked": {facts}}}

Nothing of it is believed without a look: a path counts as synced while its stamp is the same on
both sides, and a host says itself whether its environment is still that of the earlier survey. So
the trials of a sweep, and runs one after another, survey and sync their hosts once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmx.hardware.remote import survey_source
from llmx.plan.types import HostPlan
from llmx.run.rundir import read_mapping, write_json

MAX_SURVEYS = 8
"""Kept of a host; each of another environment or request."""


class HostRecord:
    """The record of one host. Without a cache that can be written it stays empty."""

    def __init__(self, host: HostPlan) -> None:
        root = Path(os.environ.get("LLMX_CACHE") or "~/.cache/llmx").expanduser() / "hosts"
        user = f"{host.user}@" if host.user else ""
        name = "localhost" if host.is_local else f"{user}{host.address}-{host.ssh_port}"
        self.path = root / f"{re.sub(r'[^A-Za-z0-9._@-]+', '-', name)}.json"

    @contextlib.contextmanager
    def alone(self, *, cancelled: Callable[[], bool]) -> Iterator[None]:
        """Two launches do not sync one host at once: the second finds it done."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(_lock(self.path.with_suffix(".sync"), cancelled))
            yield

    def is_synced(self, path: str, here: str | None, there: str | None) -> bool:
        """Whether the path was verified on the host, and neither side has changed since."""
        known = self._read("synced").get(path)
        return bool(here and there) and known == [here, there]

    def note_synced(self, path: str, here: str | None, there: str | None) -> None:
        """The path was verified; with a stamp missing it will be looked at again."""
        self._note("synced", path, [here, there] if here and there else None)

    def survey(self, request: str) -> dict[str, Any]:
        """The facts of the last survey that was asked the same; empty where there is none."""
        facts = self._read("surveys").get(request)
        return facts if isinstance(facts, dict) else {}

    def note_survey(self, request: str, facts: Mapping[str, Any]) -> None:
        self._note("surveys", request, dict(facts))

    def _read(self, part: str) -> dict[str, Any]:
        found = read_mapping(self.path).get(part)
        return found if isinstance(found, dict) else {}

    def _note(self, part: str, key: str, value: Any) -> None:
        with contextlib.suppress(OSError), _lock(self.path.with_suffix(".lock"), lambda: False):
            values = read_mapping(self.path)
            kept = {name: each for name, each in self._read(part).items() if name != key}
            if value is not None:
                kept[key] = value
            if part == "surveys":
                kept = dict(list(kept.items())[-MAX_SURVEYS:])
            write_json(self.path, {**values, part: kept})


def survey_request(python: str, asked: Mapping[str, Any]) -> str:
    """Names a survey: another program, Python or question has other facts."""
    text = json.dumps([survey_source(), python, asked], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def _lock(path: Path, cancelled: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock, which the kernel releases however its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if cancelled():
                    break
                time.sleep(0.05)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)
