"""A network that damages what the ranks and a rollout server send each other.

    python -m tests.chaos.bit_flips ADDRESS PORT ADDRESS_OF_RANKS SEED COUNT

Run as root on the host of the ranks. Their connections to ADDRESS:PORT end in this process, which
passes them on and flips one bit in each of the first COUNT messages with a body, to the server or
from it. TCP does not notice: both of its connections are whole. Prints a line for each.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path

TABLE, PRIORITY = "78", "50"
ON_THE_WIRE = "lan0"
IP_TRANSPARENT = 19


class Flipper:
    """The next bits to flip; used by all threads."""

    def __init__(self, seed: int, count: int = 0, *, answers: float = 0.3) -> None:
        """``answers``: the share of messages from the server."""
        self.chance, self.left, self.answers = random.Random(seed), count, answers
        self.lock = threading.Lock()

    def take(self, request: str) -> bool:
        """Whether a message is to be damaged."""
        with self.lock:
            if not self.left:
                return False
            self.left -= 1
            print(request, flush=True)
            return True


def relay(flipper: Flipper, client: socket.socket, server: socket.socket) -> None:
    """One connection, which has one request."""
    with contextlib.suppress(OSError), client, server:
        head, body = _head(client)
        request = head.split(b"\r\n")[0].decode()
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        while len(body) < length:
            body += _some(client, length - len(body))
        answers = length and flipper.chance.random() < flipper.answers
        if length and not answers and flipper.take(f"to the server: {request}"):
            body = _flipped(body, flipper.chance)
        server.sendall(head + body)
        head, body = _head(server)
        client.sendall(head)
        while True:
            if body.strip() and answers:
                if flipper.take(f"from the server: {request}"):
                    body = _flipped(body, flipper.chance)
                answers = False
            client.sendall(body)
            if not (body := server.recv(1 << 16)):
                return


def _head(stream: socket.socket) -> tuple[bytes, bytes]:
    """Up to the empty line, and what of the body came with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(stream, 1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", body


def _some(stream: socket.socket, most: int) -> bytes:
    data = stream.recv(most)
    if not data:
        raise ConnectionError("closed")
    return data


def _flipped(body: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(body)
    damaged[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def main() -> None:
    address, port, here, seed, count = sys.argv[1:]
    flipper = Flipper(int(seed), int(count))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)  # it answers as the server
        listener.bind(("0.0.0.0", int(port)))
        listener.listen(16)
        # What is sent to the server, unless over the wire by name, stays on this host.
        rule = ["pref", PRIORITY, "ipproto", "tcp", "dport", port, "lookup", TABLE]
        # Else the kernel drops what the server answers, from an address that seems to be ours.
        Path(f"/proc/sys/net/ipv4/conf/{ON_THE_WIRE}/accept_local").write_text("1")
        route = ["local", address, "dev", "lo", "table", TABLE, "src", here]
        subprocess.run(["ip", "route", "replace", *route], check=True)
        subprocess.run(["ip", "rule", "add", *rule], check=True)
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, ON_THE_WIRE.encode())
            try:
                server.connect((address, int(port)))
            except OSError:  # as the client would see it
                client.close()
                continue
            threading.Thread(target=relay, args=(flipper, client, server), daemon=True).start()


if __name__ == "__main__":
    main()
