"""Can W&B be reached from here, and with which key? Answers within seconds, never hangs."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request


def why_offline(base_url: str, *, timeout_s: float) -> str:
    """The reason why ``base_url`` cannot be used now, with the fix; empty when it can."""
    return _why_no_credentials(base_url) or _why_no_answer(base_url, timeout_s=timeout_s)


def _why_no_credentials(base_url: str) -> str:
    from wandb.sdk.lib.wbauth import read_netrc_auth

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return ""
    try:
        if read_netrc_auth(host=base_url):
            return ""
    except Exception as error:
        return f"the key in the netrc file cannot be used ({error}); run `wandb login`"
    return f"no API key for {base_url}; set WANDB_API_KEY or run `wandb login`"


def _why_no_answer(base_url: str, *, timeout_s: float) -> str:
    """Any HTTP answer will do. In a thread, because name resolution knows no time-out."""
    answer: list[str] = []
    silent = f"{base_url} did not answer within {timeout_s:g} s"

    def ask() -> None:
        try:
            with urllib.request.urlopen(base_url, timeout=timeout_s):
                answer.append("")
        except urllib.error.HTTPError:
            answer.append("")
        except (OSError, ValueError) as error:  # URLError is an OSError around the reason
            reason = getattr(error, "reason", error)
            late = isinstance(reason, TimeoutError)
            answer.append(silent if late else f"{base_url} cannot be reached ({reason})")

    thread = threading.Thread(target=ask, name="wandb-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answer[0] if answer else silent
