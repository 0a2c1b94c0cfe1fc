"""A rollout server: completes prompts with the weights that the ranks have sent last.

``python -m llmx.rollout.server RUN_DIR``, started by the agent of a rollout host
(``llmx.launch.supervision.rollout_pool``), with where to listen (``LLMX_ROLLOUT_LISTEN``) and the
token of the run in its environment. It reads nothing of the run directory: the model comes from the
ranks. It ends with its agent, and so with the run. The protocol: ``llmx.rollout``.

Shown by ``python -m pytest tests/unit/test_rollout_server.py``.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import llmx
from llmx.rollout.protocol import (
    FAILED,
    HEARTBEAT_S,
    LISTEN,
    OTHER_WEIGHTS,
    PROTOCOL,
    VLLM_PYTHON,
    Refused,
    digest,
    parse_servers,
    password_of,
)

TOKEN = "LLMX_RUN_TOKEN"
CHILD = Path(__file__).with_name("vllm_child.py")
OF_LLMX = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", TOKEN)
"""Variables that the child of vLLM is not to have."""
PARENT_S = 0.5
"""Seconds between two looks at whether the agent that started this process is there."""
BIND_S = 20.0
"""Time for a server before this one to leave the port."""


class Policy:
    """The network of the ranks, as far as it has been sent. Used by one thread."""

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":  # as ``train.engine.build.seed_everything``
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.decoder: Any = None
        self.missing: set[str] = set()
        """Parameters that no body has brought yet."""

    def describe(self) -> dict[str, Any]:
        """The part of ``GET /version`` that describes it."""
        return {"device": self.device.type}

    def take_model(self, body: bytes) -> None:
        from llmx.rollout.network import build, fill, unpack

        self.decoder = None  # room for the new one
        tensors, description = unpack(body)
        self.decoder = build(description, self.device)
        self.missing = {name for name, _ in self.decoder.module.named_parameters()}
        self.missing -= fill(self.decoder.module, tensors)

    def take_weights(self, body: bytes) -> None:
        from llmx.rollout.network import fill, unpack

        self.missing -= fill(self.decoder.module, unpack(body)[0])
        if self.missing:
            raise ValueError(f"{len(self.missing)} parameters were not sent: {min(self.missing)}")

    def sample(self, rows: list[list[int]], request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A completion of each row."""
        from llmx.models.generate import generate
        from llmx.models.sampling import Sampling

        options = dict(request["sampling"])
        sampling = Sampling(**options | {"stop_ids": frozenset(options["stop_ids"])})
        # As a rank completes its share: the same rows in the same order.
        completions = generate(
            self.decoder, rows, sampling, seeds=request["seeds"], batch_size=request["at_once"]
        )
        return [dataclasses.asdict(completion) for completion in completions]


class VllmPolicy:
    """A policy that vLLM draws, in a child process of ``rollout.vllm_python``: vLLM needs other
    versions of torch and transformers than llmx. Bodies and prompts go to ``vllm_child.py``, which
    runs there. Used by one thread."""

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


class Server(ThreadingHTTPServer):
    """Answers in a thread for each connection; one other thread has the model."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, address: tuple[str, int], password: str, policy: Policy | VllmPolicy
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)
        self.password = password
        self.policy = policy
        self.model = ""
        """Digest of the body of ``PUT /model``; empty before it."""
        self.weights: int | None = None
        """Version of the weights; None where the policy has none."""
        self.worker = ThreadPoolExecutor(max_workers=1)

    def take_model(self, body: bytes) -> dict[str, Any]:
        self.model, self.weights = "", None
        self.policy.take_model(body)
        self.model = digest(body)
        return {"model": self.model}

    def take_weights(self, body: bytes, version: int) -> dict[str, Any]:
        if not self.model:
            raise Refused(OTHER_WEIGHTS, "no model has been sent")
        self.weights = None
        self.policy.take_weights(body)
        self.weights = version
        return {"weights": version}

    def sample(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.weights is None or request["weights"] not in (None, self.weights):
            raise Refused(OTHER_WEIGHTS, f"version {self.weights} is held")
        rows = [request["prompts"][at] for at in request["rows"]]
        began = time.perf_counter()
        completions = self.policy.sample(rows, request)
        seconds = time.perf_counter() - began
        return {"weights": self.weights, "completions": completions, "seconds": seconds}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = 60.0
    """Time-out of one send or receive: a client that is lost does not keep its thread."""

    def do_GET(self) -> None:
        if self._is_refused(self.path == "/version"):
            return
        self._start()
        self._write(
            {
                "protocol": PROTOCOL,
                **versions(),
                **self.server.policy.describe(),
                "model": self.server.model or None,
                "weights": self.server.weights,
            }
        )

    def do_PUT(self) -> None:
        kind, _, version = self.path.removeprefix("/").partition("/")
        if self._is_refused(kind == "model" or (kind == "weights" and version.isdecimal())):
            return
        body = self._body()
        if kind == "model":
            self._work(lambda: self.server.take_model(body))
        else:
            self._work(lambda: self.server.take_weights(body, int(version)))

    def do_POST(self) -> None:
        if self._is_refused(self.path == "/sample"):
            return
        request = json.loads(self._body())
        self._work(lambda: self.server.sample(request))

    def _is_refused(self, exists: bool) -> bool:
        """Refuse a request without the password of the run, or for a path that does not exist."""
        given_password = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given_password, f"Bearer {self.server.password}".encode()):
            self.send_error(401)
        elif not exists:
            self.send_error(404)
        else:
            return False
        return True

    def _body(self) -> bytes:
        """The body of the request; ConnectionResetError where less than all of it arrives."""
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionResetError(f"{len(body)} of {size} bytes arrived")
        self._start()
        return body

    def _start(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()

    def _work(self, job: Callable[[], dict[str, Any]]) -> None:
        """Answer with the result of the job, and with blanks until it is there."""
        future: Future[dict[str, Any]] = self.server.worker.submit(job)
        try:
            while not wait([future], timeout=HEARTBEAT_S).done:
                self.wfile.write(b" ")
            self._write(_answer(future))
        except OSError:  # the client has gone
            future.cancel()

    def _write(self, answer: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the ranks log what matters."""


def _answer(future: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return future.result()
    except Refused as refused:
        return {"error": refused.kind, "message": str(refused)}
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return {"error": FAILED, "message": f"{type(error).__name__}: {error}"}


def versions() -> dict[str, str]:
    """Versions of what computes: the ranks and their servers should have the same."""
    of_packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"llmx": llmx.__version__, **of_packages}


def end_with(parent: int) -> None:
    """End this process once its parent, an agent, is another one: it has exited, however that
    happened, and nobody else would end what it has started."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


def choose_threads() -> None:
    """This server's share of the cores of its host. Before torch is imported."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_SIZE", "1"))
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores))


def choose_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch's allocator extend its segments, in a server and on a rank: rows of unequal length
    leave less memory unused between them. A variable that the user has set stays as it is."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:  # the former name
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def main() -> int:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: os._exit(0))
    choose_threads()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    (place,) = parse_servers(os.environ[LISTEN])
    password = password_of(os.environ[TOKEN])
    vllm_python = os.environ.get(VLLM_PYTHON, "")
    if not vllm_python:  # vLLM has its own allocator, and maybe another torch
        choose_allocator(os.environ)
    policy = VllmPolicy(vllm_python) if vllm_python else Policy()
    deadline = time.monotonic() + BIND_S
    while True:
        try:
            server = Server((place.address, place.port), password, policy)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                print(f"{place.address}:{place.port}: {error}", file=sys.stderr)
                return 1
            time.sleep(0.2)
    print(f"rollout server on {place.address}:{place.port}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
