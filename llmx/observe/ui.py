"""``python -m llmx ui``: runs and sweeps in a browser, live. It reads, and needs no package.

    python -m llmx ui                         all runs under outputs/
    python -m llmx ui DIR --port 8080         those under DIR

The page asks for ``events?run=ID``, ``events?sweep=ID`` or ``events``, and gets server-sent events:
first the whole (``llmx/observe/page``), then what has changed since. ``ID`` is a path below DIR.
"""

from __future__ import annotations

import argparse
import hmac
import itertools
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from llmx import text as human
from llmx.errors import ConfigError, LlmxError
from llmx.observe.compare import difference_of
from llmx.observe.page import Json, block, changes, document, page, plain, table, thinned
from llmx.observe.page.run import MAX_POINTS, curves, has_steps, run_page
from llmx.observe.page.sweep import sweep_page
from llmx.observe.report.sweep_data import SweepReader
from llmx.observe.run import LIVE, Run, find_runs, load_run, modified
from llmx.observe.source import outputs, parse_location
from llmx.observe.status.show import activity_rows, cells_of, progress_rows
from llmx.observe.status.sweep import look
from llmx.redact import redact
from llmx.run.metrics import measured, metric_of
from llmx.run.rundir import RunDir
from llmx.run.sweepdir import Trial, is_sweep

LOCAL = "127.0.0.1"
EVERY_S = 1.0
READ_S = 1.0
MANY = 8
POINTS_OF_MANY = 500
"""Lines of the curves of each run, where more than MANY are drawn over each other."""
POINTS_OF_ROW = 48
"""Losses of the small curve of a run in the table."""
LOG_BYTES = 32_768
"""Bytes of the end of a log that are shown."""
Query = Mapping[str, list[str]]


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    word = options.location or outputs()
    location = parse_location(word)
    if location.host:
        port = options.port
        raise ConfigError(
            f"{word}: ui shows runs of the machine that it runs on. Start it there through ssh, "
            f"and open the address that it prints: ssh -t -L {port}:localhost:{port} "
            f"{location.host} python -m llmx ui {location.path} --port {port}"
        )
    base = Path(word).expanduser()
    if not base.is_dir():
        raise ConfigError(
            f"no such directory: {word}. Give a directory that contains runs; the default is "
            "outputs/."
        )
    try:
        server = Server(base, host=options.host or LOCAL, port=options.port)
    except OSError as error:
        address = f"{options.host or LOCAL}:{options.port}"
        raise ConfigError(
            f"{address}: cannot listen there ({error.strerror}). Choose another port, e.g. "
            "--port 8171, or --port 0 for a free one."
        ) from error
    print(
        f"{server.url}\nOpen this address; it shows the runs in {base}. Ctrl-C ends it.", flush=True
    )
    server.serve_forever()
    return 0


class Server(ThreadingHTTPServer):
    """Serves the page and its events to those who know the token."""

    daemon_threads = True

    def __init__(self, base: Path, *, host: str = LOCAL, port: int = 0) -> None:
        super().__init__((host, port), Handler)
        self.views = Views(base)
        self.token = secrets.token_urlsafe(16)
        self.stopping = threading.Event()

    @property
    def url(self) -> str:
        """The address to open, with the token."""
        host, port = self.server_address[:2]
        name = "localhost" if host == LOCAL else host
        return f"http://{name!s}:{port}/?{urlencode({'token': self.token})}"

    def shutdown(self) -> None:
        """Stop serving, and end the streams."""
        self.stopping.set()
        super().shutdown()


class Handler(BaseHTTPRequestHandler):
    """``/`` is the page, ``/events`` the stream of what it shows."""

    server: Server

    def do_GET(self) -> None:
        """Answer, if the token is the server's; a browser that goes away ends it."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        token = query.get("token", [""])[0].encode()
        if not hmac.compare_digest(token, self.server.token.encode()):
            self._send(403, "text/plain", "Open the address that python -m llmx ui has printed.\n")
        elif url.path == "/":
            self._send(200, "text/html", document("llmx", {"live": True}))
        elif url.path == "/events":
            self._stream(query)
        else:
            self._send(404, "text/plain", "no such page\n")

    def _send(self, status: int, kind: str, text: str = "", *, is_stream: bool = False) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        if not is_stream:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, query: Query) -> None:
        """Send the view whenever it changes, until the browser has gone."""
        sent_view: Json = {}
        try:
            self._send(200, "text/event-stream", is_stream=True)
            while True:
                begun = time.monotonic()
                view = self.server.views.view(query)
                patch = changes(sent_view, view)
                text = json.dumps(patch, ensure_ascii=False, separators=(",", ":"))
                # A comment finds out whether anybody still listens.
                self.wfile.write(b":\n\n" if patch is None else f"data: {text}\n\n".encode())
                self.wfile.flush()
                sent_view = view
                # A slow disk is not read all the time.
                pause_s = max(EVERY_S, 3 * (time.monotonic() - begun))
                if self.server.stopping.wait(0 if view.get("unread") else pause_s):
                    return
        except (BrokenPipeError, ConnectionResetError):
            pass

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address has the token."""


class Views:
    """The pages of the runs under a directory; what did not change on disk is not read again."""

    def __init__(self, base: Path) -> None:
        self.base = base.resolve()
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[Any, Json]] = {}
        self._pages: dict[tuple[str, str], tuple[Any, Json]] = {}
        self._runs: dict[str, Run] = {}
        self._sweeps: dict[str, SweepReader] = {}

    def view(self, query: Query) -> Json:
        """The page of a query, as JSON has it."""
        ids, sweep = query.get("run", []), query.get("sweep", [""])[0]
        with self._lock:
            try:
                if sweep:
                    content = self._sweep(sweep)
                elif len(ids) > 1:
                    content = self._several(ids)
                else:
                    log = query.get("log", [""])[0]
                    content = self._run(ids[0], log) if ids else self._table()
            except (LlmxError, OSError) as error:
                content = page(str(error), "failed", {})
            return dict(plain(content))

    def _inside(self, name: str) -> Path:
        """The directory of an ID; ConfigError where it is none under the base."""
        path = _real(self.base / name)
        is_shown = RunDir(path).config.is_file() or is_sweep(path)
        if not path.is_relative_to(self.base) or not is_shown:
            raise ConfigError(f"{name}: there is no such run or sweep in {self.base}.")
        if problem := self._link_out(path):
            raise ConfigError(problem)
        return path

    def _link_out(self, root: Path) -> str:
        """Names a link in a run to a file elsewhere, which everybody who sees the page would see;
        empty where there is none."""
        unread = (RunDir(root).checkpoints, RunDir(root).final_model)
        read = ("*", "logs/*", "ranks/*", "history/*", "history/*/*")
        for path in itertools.chain.from_iterable(map(root.glob, read)):
            outside = path.is_symlink() and not _real(path).is_relative_to(self.base)
            if outside and path not in unread:
                return f"{path} is a link that leads out of {self.base}. Remove the link."
        return ""

    def _id(self, path: Path) -> str:
        return str(path.relative_to(self.base))

    # --- All runs --------------------------------------------------------------------------------

    def _table(self) -> Json:
        rows: dict[str, Json] = {}
        hidden = []
        for root in find_runs(self.base):
            name, stamp = self._id(root), _stamp(root)
            cached = self._rows.get(name)
            if cached is None or cached[0] != stamp or cached[1]["state"] in LIVE:
                if problem := self._link_out(root):
                    hidden.append(problem)
                    continue
                row = self._row(Run(root, is_brief=True))
                cached = self._rows[name] = (stamp, plain(row))
            rows[name] = cached[1]
        live = sum(row["state"] in LIVE for row in rows.values())
        title = f"{human.plural(len(rows), 'run')} in {self.base.name}, {live} running"
        order = sorted(rows, key=lambda name: rows[name]["state"] not in LIVE)
        content = page(title, "", {"Not shown": [block("list", hidden)]})
        return {**content, "runs": rows, "order_of_runs": order}

    def _row(self, run: Run) -> Json:
        """The cells of a run; a list has the text of a cell and the value that sorts it."""
        started = ""
        if run.started is not None:
            started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
        state, step, loss, speed, took = cells_of(run)
        hosts, parent = ", ".join(name for name, _ in run.hosts[:3]), run.dir.root.parent
        if len(run.hosts) > 3:
            hosts += f" and {len(run.hosts) - 3} more"
        return {
            "name": run.name,
            "state": state,
            "step": [step, run.step],
            "loss": [loss, run.last.get("loss")],
            "curve": thinned(run.losses, lambda point: point[1], POINTS_OF_ROW),
            "evaluation": _evaluation(run),
            "started": [started, run.started],
            "time": [took, run.took_s if run.left_s is None else run.left_s],
            "speed": [speed, run.last.get("tokens_per_s")],
            "hosts": hosts,
            "sweep": self._id(parent) if is_sweep(parent) else "",
            "tags": ", ".join(map(str, run.settings.get("tags") or [])),
            "why": run.standing.why,
        }

    # --- Runs ------------------------------------------------------------------------------------

    def _run(self, name: str, log: str) -> Json:
        root = self._inside(name)
        # The lines of a run that was shown a moment ago are not read again.
        run = self._runs[name] = Run(root, before=self._runs.pop(name, None))
        if len(self._runs) > MANY:
            del self._runs[next(iter(self._runs))]
        content = self._cached("run", name, lambda: run_page(run))
        activity = {"Checkpoints, hosts and events": [table(activity_rows(run))]}
        sections = {**content["sections"], **activity}
        order, folded = [*content["order"]], [*content["folded"]]
        if run.result and not run.is_live:
            folded += activity
            order += activity
        else:
            sections["Now"] = [table(progress_rows(run))]
            order = ["Now", *order[: len(order) - len(folded)], *activity, *folded]
        content = {**content, "sections": sections, "order": order, "folded": folded}
        if run.is_live:
            content |= {"title": f"{content['name']}: {run.state}", "state": run.state}
        # That of the launcher has the environment of the ranks.
        logs = run.dir.logs.glob("*.log")
        content["logs"] = sorted(path.name for path in logs if path != run.dir.launcher_log)
        if log in content["logs"]:
            content["log"] = _end_of(run.dir.logs / log)
        return content

    def _several(self, names: list[str]) -> Json:
        """Curves over each other; of two runs what differs, too."""
        roots = {name: self._inside(name) for name in names}
        drawn: dict[str, Json] = {}
        limit = MAX_POINTS if len(roots) <= MANY else POINTS_OF_MANY
        kind = f"curves of {limit} lines"
        begun = time.monotonic()
        for name, root in roots.items():
            # Many long runs take seconds to read: the first ones are drawn meanwhile.
            if time.monotonic() - begun < READ_S or (kind, name) in self._pages:
                drawn[name] = self._cached(kind, name, partial(_curves, root, limit))
        sections: dict[str, Any] = {"Curves": []}
        title = human.plural(len(roots), "run")
        if len(roots) == 2:
            a, b = roots.values()
            difference = self._cached("difference", "\n".join(roots), lambda: _difference(a, b))
            sections |= difference["sections"]
            title = "A: {}, B: {}".format(*roots)
        unread = len(roots) - len(drawn)
        title += f" ({unread} not yet read)" if unread else ""
        empty = [name for name, columns in drawn.items() if not has_steps(columns)]
        text = f"No step is logged yet, so no curve is drawn: {', '.join(empty)}" if empty else ""
        sections = {"Not drawn": [block("text", text)], **sections}
        curves_of = drawn if len(empty) < len(drawn) else {}
        return {**page(title, "", sections, curves=curves_of), "unread": unread}

    def _cached(self, kind: str, name: str, make: Any) -> Json:
        stamp = [_stamp(self._inside(part)) for part in name.split("\n")]
        cached = self._pages.get((kind, name))
        if cached is None or cached[0] != stamp:
            cached = self._pages[kind, name] = (stamp, plain(make()))
        return cached[1]

    # --- Sweeps ----------------------------------------------------------------------------------

    def _sweep(self, name: str) -> Json:
        root = self._inside(name)

        def link(trial: Trial) -> str:
            path = _real(trial.run_dir)
            is_shown = RunDir(path).config.is_file() and path.is_relative_to(self.base)
            return f"#{urlencode({'run': self._id(path)})}" if is_shown else ""

        snapshot = look(self._sweeps.setdefault(name, SweepReader(root)))
        return sweep_page(snapshot.sweep, link=link, note=snapshot.note)


def _real(path: Path) -> Path:
    """The end of all links; before Python 3.13, ``Path.resolve`` raises for a link to itself."""
    return Path(os.path.realpath(path))


def _curves(root: Path, limit: int) -> Json:
    return curves(Run(root).records, limit=limit)


def _difference(a: Path, b: Path) -> Json:
    """What ``compare`` prints."""
    tables, notes = difference_of(load_run(a), load_run(b))
    sections = {
        f"Difference of {title}": [content or block("text", "no difference")]
        for title, content in tables.items()
    }
    return page("", "", {**sections, "Notes": [block("list", notes)]})


def _evaluation(run: Run) -> list[Any]:
    """The newest value of ``checkpoint.metric``, else of the first metric that the task measures,
    else of the loss: its text, and the value. Without an evaluation, of what is measured in
    training."""
    line = run.evals[-1] if run.evals else {}
    values = measured(line or run.last, run.declared)
    if values:
        name = str(run.settings.get("metric")).removeprefix("eval/")
        name = name if name in values else next(iter(values))
        metric = metric_of(name, run.declared)
        return [f"{metric.title} {metric.shown(values[name])}", values[name]]
    loss = line.get("loss")
    return ["", None] if loss is None else [f"loss {human.number(loss)}", loss]


def _stamp(root: Path) -> list[float | None]:
    """Changes whenever the run does: most files are replaced, which changes their directory, and
    to two lines are appended."""
    places = (root, root / "history", root / "metrics.jsonl", root / "attempts.jsonl")
    return [modified(path) for path in places]


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - LOG_BYTES))
            return redact(stream.read().decode("utf-8", "replace"))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
