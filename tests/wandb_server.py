"""A stand-in for the W&B server on 127.0.0.1, for tests of online runs and of outages.

It answers what wandb-core asks (Viewer, UpsertBucket, CreateRunFiles, file_stream, PUT) and
keeps what it got. ``hang()`` makes it accept and never answer; ``die()`` closes its port.
"""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from typing import Any


class WandbServer:
    """``with WandbServer() as server``: ``server.url``, ``server.history``, ``server.config``."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.exit_codes: list[int] = []
        self._answers = threading.Event()
        self._answers.set()
        self._closed = threading.Event()
        stand_in = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                stand_in._answers.wait()
                if stand_in._closed.is_set():
                    self.close_connection = True
                    return
                reply = json.dumps(stand_in._handle(self.path, body, self.headers)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST = do_PUT = answer

            def do_HEAD(self) -> None:
                """What llmx asks before it starts the client: whether anybody answers."""
                stand_in._answers.wait()
                if stand_in._closed.is_set():
                    self.close_connection = True
                    return
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Silent: pytest's output is for results."""

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that hangs up is no news in a test of outages."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> WandbServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.die()

    def hang(self) -> None:
        """From now on accept connections and requests, and never answer."""
        self._answers.clear()

    def die(self) -> None:
        """Close the port; nothing more is taken."""
        if not self._closed.is_set():
            self._closed.set()
            self._answers.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _handle(self, path: str, body: bytes, headers: Any) -> dict[str, Any]:
        if path == "/graphql":
            return {"data": self._graphql(json.loads(body), headers["Host"])}
        if path.endswith("/file_stream"):
            self._file_stream(json.loads(body))
        elif path.startswith("/put/"):
            self.files[path.removeprefix("/put/")] = body
        return {}

    def _graphql(self, request: dict[str, Any], host: str) -> dict[str, Any]:
        query, variables = request["query"], request.get("variables") or {}
        if "upsertBucket" in query:
            return {"upsertBucket": self._upsert(variables)}
        if "createRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"http://{host}/put/{name}"}
                for name in variables["files"]
            ]
            return {"createRunFiles": {"runID": "bid", "uploadHeaders": [], "files": files}}
        if "RunResumeStatus" in query:
            return {"model": {"entity": {"name": "me"}, "bucket": self._resume_status(variables)}}
        if "viewer" in query:
            viewer = {"id": "u", "entity": "me", "username": "me", "flags": "{}"}
            return {"viewer": {**viewer, "teams": {"edges": []}}}
        return {}

    def _resume_status(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        """What a client asks before it goes on with a run: how much of it is here."""
        if variables.get("name") not in self.runs:
            return None
        return {
            "name": variables["name"],
            "displayName": None,
            "summaryMetrics": "{}",
            "config": json.dumps(self.config),
            "logLineCount": 0,
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in self.history[-1:]]),
            "eventsTail": "[]",
            "tags": [],
            "wandbConfig": json.dumps({"t": 1}),
        }

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        inserted = (variables.get("name") or "") not in self.runs
        run = self.runs.setdefault(variables.get("name") or "", {})
        run.update({key: value for key, value in variables.items() if value is not None})
        if variables.get("config"):
            self.config = json.loads(variables["config"])
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "me"}}
        bucket = {
            "id": "bid",
            "name": variables.get("name"),
            "displayName": variables.get("displayName"),
            "description": "",
            "config": json.dumps(self.config),
            "sweepName": None,
            "historyLineCount": 0,
            "project": project,
        }
        return {"bucket": bucket, "inserted": inserted}

    def _file_stream(self, request: dict[str, Any]) -> None:
        part = (request.get("files") or {}).get("wandb-history.jsonl")
        if part:
            lines = [json.loads(line) for line in part["content"]]
            self.history[part["offset"] :] = lines
        if request.get("complete"):
            self.exit_codes.append(request.get("exitcode"))
