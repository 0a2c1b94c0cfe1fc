"""Keeps the client of the Hugging Face Hub offline without a network: it would retry for a minute.

Imported before transformers, so it uses the standard library only. Tried by
``python -m pytest tests/unit/test_offline.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from llmx.config import ModelConfig
from llmx.redact import redact

PROBE_TIMEOUT_S = 10.0


def stay_offline_if_unreachable(
    model: ModelConfig,
    environment: MutableMapping[str, str],
    *,
    more_models: Iterable[str] = (),
    timeout_s: float = PROBE_TIMEOUT_S,
) -> str:
    """Set HF_HUB_OFFLINE when a Hub id is wanted and the Hub gives no answer; returns why.

    Offline, the client takes what its cache has, and else fails at once. Must come before
    ``huggingface_hub`` is imported, which reads the variable once.

    ``more_models``: those beside that of the ``model`` group (``Plan.beside``).
    """
    names = {model.path, model.tokenizer, *more_models} - {None, "", "demo"}
    hub_ids = [name for name in names if name and not Path(name).expanduser().is_dir()]
    if not hub_ids or environment.get("HF_HUB_OFFLINE"):
        return ""
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    if why := why_no_answer(endpoint, timeout_s=timeout_s):
        environment["HF_HUB_OFFLINE"] = "1"
        return f"{redact(endpoint)} cannot be reached ({why}): only the cache of the Hub is used"
    return ""


def why_no_answer(url: str, *, timeout_s: float) -> str:
    """The reason why a server gives no answer; empty where it does, and any HTTP answer will do."""
    import urllib.request  # with http and ssl, which a run of local files does without

    answer: list[str] = []
    silent = f"no answer within {timeout_s:g} s"

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s):
                answer.append("")
        except urllib.error.HTTPError:
            answer.append("")
        except (OSError, ValueError) as error:  # URLError is an OSError around the reason
            reason = getattr(error, "reason", error)
            late = isinstance(reason, TimeoutError)
            answer.append(silent if late else str(reason) or type(error).__name__)

    # In a thread, because name resolution has no time-out.
    thread = threading.Thread(target=ask, name="http-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answer[0] if answer else silent
