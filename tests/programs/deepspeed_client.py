"""Stands in for the program ``deepspeed`` on one host: a server that has imported everything forks
the ranks (``tests.programs.ranks``). ``python deepspeed_client.py SOCKET [deepspeed's own words]``.

Standard library only: it starts in a moment.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys


def main() -> int:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    asked = {"argv": sys.argv[2:], "env": dict(os.environ), "cwd": os.getcwd()}  # noqa: PTH109
    text = json.dumps(asked).encode()
    socket.send_fds(connection, [struct.pack("!I", len(text))], [1, 2])
    connection.sendall(text)
    answer = connection.recv(1)
    return answer[0] if answer else 1


if __name__ == "__main__":
    sys.exit(main())
