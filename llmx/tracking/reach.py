"""Can W&B be reached from here, and with which key? Answers within seconds, never hangs."""

from __future__ import annotations

import os

from llmx.offline import why_no_answer


def why_offline(base_url: str, *, timeout_s: float) -> str:
    """The reason why ``base_url`` cannot be used now, with the fix; empty when it can."""
    if why := _why_no_credentials(base_url):
        return why
    why = why_no_answer(base_url, timeout_s=timeout_s)
    return f"{base_url} cannot be reached ({why})" if why else ""


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
