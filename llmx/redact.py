"""Recognises credentials in variables and texts, and hides them.

``is_secret`` decides what ranks get and what a config may hold; ``redact`` is used by everything
that writes or shows text. Standard library only; every package may import it.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_NOT_SECRET = frozenset({"SSH_AUTH_SOCK"})
_OF_TEXT = re.compile(r"TOKENS|TOKENI[SZ]\w*|(BOS|EOS|PAD|UNK|SEP|CLS|MASK)_TOKEN")
"""Tokens of a text."""
_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|(^|[_.])PASS($|_)|PGPASS|(^|[_.])PW($|_)|_PWD$|CREDENTIAL"
    r"|PRIVATE|(^|[_.])(API_?)?KEYS?($|_)|APIKEY|(^|[_.])AUTH($|_)|(^|[_.])DSN($|_)"
)
_LOUD_NAME = re.compile(r"[A-Z][A-Z0-9_]*|\w*(passw|secret|api_?key|access_token)\w*")
"""Names that are credentials in any text: there a ``key`` may be of a mapping."""
_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[a-z]-[\w-]{10,}|\bAIza[\w-]{30,}"
    r"|\b(AKIA|ASIA)[A-Z0-9]{12,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # the last: a JWT
    r"|-----BEGIN[ \w]*PRIVATE KEY-----(.|\n)*?(-----END[ \w]*-----|$)"
    # user:password@, :password@, and of http also what stands alone before an @.
    r"|(?<=://)[^/\s:@'\"<>]*:[^/\s'\"<>]+(?=@)"
    r"|(?<=http://)[^/\s'\"<>]+(?=@)|(?<=https://)[^/\s'\"<>]+(?=@)"
)
_QUERY = re.compile(r"([?&][\w.-]*(?:token|key|passw\w*|secret|sig|signature)=)([^\s&#'\"]+)", re.I)
_ASSIGNED = re.compile(
    # First that the name may be one at all: "WARNING: DB_PASS=x" has two.
    r"\b(?=\w*(?i:token|secret|pass|pw|credential|private|key|auth|dsn))(\w+)"
    r"(=['\"]?|: |\": ?\"|': ?')([^\s'\",;]+)"
)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable looks like a credential, by its name or by its value."""
    if name in _NOT_SECRET:
        return False
    upper = _OF_TEXT.sub("", name.upper())
    if _NAME.search(upper) or upper.startswith("WANDB_"):
        return True
    return bool(_VALUE.search(value) or _QUERY.search(value))


def redact(text: str) -> str:
    """``text`` with ``***`` for each credential: ``https://***@host``, ``DB_PASS=***``."""

    def assigned(match: re.Match[str]) -> str:
        hide = _is_loud(match[1])
        return f"{match[1]}{match[2]}{HIDDEN}" if hide else match[0]

    return _ASSIGNED.sub(assigned, _QUERY.sub(rf"\1{HIDDEN}", _VALUE.sub(HIDDEN, text)))


def redacted(value: Any) -> Any:
    """Nested values, as of JSON, with each text redacted."""
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(item, str) and _is_loud(str(key)) else redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _is_loud(name: str) -> bool:
    if name in _NOT_SECRET or not _LOUD_NAME.fullmatch(name):
        return False
    return _NAME.search(_OF_TEXT.sub("", name.upper())) is not None
