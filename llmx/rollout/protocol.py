"""The part of rollouts that servers, ranks and supervisor share. Light: no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

PROTOCOL = 4
SERVER_MODULE = "llmx.rollout.server"
SERVERS = "LLMX_ROLLOUT_SERVERS"
"""Variable of the ranks: where the servers listen (``render_servers``)."""
LISTEN = "LLMX_ROLLOUT_LISTEN"
"""Variable of a server: the address and port where it listens."""
VLLM_PYTHON = "LLMX_ROLLOUT_VLLM"
"""Variable of a server: the Python of an environment with vLLM, which draws then."""
HEARTBEAT_S = 3.0
"""A server that works sends a blank this often."""

OTHER_WEIGHTS, FAILED = "other_weights", "failed"


class Refused(Exception):
    """A server's answer to a request that it did not do.

    ``kind``: ``other_weights`` (it holds no model, or not the version that was asked for),
    ``failed``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class ServerAddress:
    """Where a rollout server listens."""

    host: str
    """The name of the host."""
    address: str
    port: int

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


def render_servers(servers: Sequence[ServerAddress]) -> str:
    """``node-b=20123=10.0.0.2,...``: the value of ``LLMX_ROLLOUT_SERVERS``."""
    return ",".join(f"{server.host}={server.port}={server.address}" for server in servers)


def parse_servers(text: str) -> list[ServerAddress]:
    """The servers of a value of ``LLMX_ROLLOUT_SERVERS``."""
    parts = [word.split("=") for word in text.split(",") if word]
    return [ServerAddress(host, address, int(port)) for host, port, address in parts]


def digest(data: bytes) -> str:
    """The hash by which the ranks know which model a server holds."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def password_of(token: str) -> str:
    """The password of the ranks to a server, made from the token, which itself is never sent."""
    return hashlib.blake2b(token.encode(), digest_size=16, person=b"llmx-rollout").hexdigest()
