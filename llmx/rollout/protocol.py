"""What a rollout server, the ranks and the supervisor know of each other. Light: no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from llmx.config.addresses import bare, ipv6

PROTOCOL = 3
SERVER_MODULE = "llmx.rollout.server"
SERVERS = "LLMX_ROLLOUT_SERVERS"
"""Variable of the ranks: where the servers listen (``render_servers``)."""
LISTEN = "LLMX_ROLLOUT_LISTEN"
"""Variable of a server: the address and port where it listens."""
VLLM_PYTHON = "LLMX_ROLLOUT_VLLM"
"""Variable of a server: the Python of an environment with vLLM, which draws then."""
DIGEST = "X-LLMX-Digest"
"""Header: ``digest`` of the body of a request."""
HEARTBEAT_S = 3.0
"""A server that works sends a blank this often."""

DAMAGED, NO_MODEL, OTHER_WEIGHTS, FAILED = "damaged", "no_model", "other_weights", "failed"


class Refused(Exception):
    """A server's answer to a request that it did not do.

    ``kind``: ``damaged`` (the body has another digest than its header), ``no_model`` (it holds no
    model), ``other_weights`` (of another version than the one that was asked for), ``failed``.
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
    """``node-b=10.0.0.2:20123,...``: the value of ``LLMX_ROLLOUT_SERVERS``."""
    return ",".join(
        f"{server.host}={server.address}:{server.port}"
        if ipv6(server.address) is None
        else f"{server.host}=[{server.address}]:{server.port}"
        for server in servers
    )


def parse_servers(text: str) -> list[ServerAddress]:
    """The servers of a value of ``LLMX_ROLLOUT_SERVERS``."""
    servers = []
    for word in filter(None, text.split(",")):
        host, _, where = word.partition("=")
        address, _, port = where.rpartition(":")
        servers.append(ServerAddress(host, bare(address), int(port)))
    return servers


def digest(data: bytes) -> str:
    """The hash by which a receiver knows that it has what was sent."""
    return hasher(data).hexdigest()


def hasher(data: bytes = b"") -> hashlib.blake2b:
    """``digest``, for data that come in pieces."""
    return hashlib.blake2b(data, digest_size=16)


def sealed(text: str) -> bytes:
    """The body of an answer: its hash, and the text."""
    data = text.encode()
    return f"{digest(data)} ".encode() + data


def opened(answer: bytes) -> bytes:
    """The text of an answer, of which blanks came first.

    Raises:
        ValueError: it is damaged or cut short, or none of ours.
    """
    given_digest, _, data = answer.strip().partition(b" ")
    if digest(data).encode() != given_digest:
        raise ValueError(f"an answer of {len(answer)} bytes is damaged or cut short")
    return data


def password_of(token: str) -> str:
    """What the ranks show to a server, from the token of the run, which itself is never sent."""
    return hashlib.blake2b(token.encode(), digest_size=16, person=b"llmx-rollout").hexdigest()
