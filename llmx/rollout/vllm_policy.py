"""vLLM as the policy of a rollout server: a child process in an environment of its own.

``rollout.vllm_python=/opt/vllm/bin/python``. vLLM needs other versions of torch and transformers
than llmx, so the server stays in llmx's environment, speaks with the ranks as ever, and hands
bodies and prompts to ``vllm_child.py``, which runs there.
Shown by ``python -m pytest tests/unit/test_rollout_vllm.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("vllm_child.py")
OF_LLMX = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LLMX_RUN_TOKEN")
"""Variables that the child is not to have."""


class VllmPolicy:
    """A policy that vLLM draws, with the methods of ``server.Policy``. Used by one thread."""

    def __init__(self, python: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in OF_LLMX}
        self.problem = ""
        """The reason why it cannot draw; empty where it can."""
        self.info: dict[str, Any] = {}
        self.child: subprocess.Popen[bytes] | None = None
        try:
            self.child = subprocess.Popen(
                [python, "-u", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
        except OSError as error:
            self.problem = str(error)
            return
        assert self.child.stdout is not None
        first = self.child.stdout.readline()
        self.info = json.loads(first) if first else {"error": "it has ended; its log has why"}
        self.problem = self.info.pop("error", "")

    def describe(self) -> dict[str, Any]:
        """The part of ``GET /version`` that describes it."""
        return {"device": "cpu", **self.info, "problem": self.problem}

    def take_model(self, body: bytes) -> None:
        self._ask("take_model", body)

    def take_weights(self, body: bytes) -> None:
        self._ask("take_weights", body)

    def sample(self, rows: list[list[int]], request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A completion of each row."""
        answer = self._ask(
            "sample", rows=rows, seeds=request["seeds"], sampling=request["sampling"]
        )
        completions: list[dict[str, Any]] = answer["completions"]
        return completions

    def _ask(self, method: str, body: bytes = b"", **values: Any) -> dict[str, Any]:
        """Have the child do something. If it has ended, so does this process: the agent starts
        another one."""
        assert self.child is not None
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        line = json.dumps({"do": method, "size": len(body), **values})
        try:
            self.child.stdin.write(line.encode() + b"\n")
            self.child.stdin.write(body)
            self.child.stdin.flush()
            reply = self.child.stdout.readline()
        except OSError:
            reply = b""
        if not reply:
            print("vLLM has ended", file=sys.stderr, flush=True)
            os._exit(1)
        answer: dict[str, Any] = json.loads(reply)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer
