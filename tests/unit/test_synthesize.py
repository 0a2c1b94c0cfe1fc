"""``llmx synthesize``: new rows of a served and of a local model, filtered, continued."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmx.cli import synthesize
from llmx.cli.main import run_here
from tests.data_rows import write_rows
from tests.reference import word_tokenizer
from tests.small_models import small_model

pytest.importorskip("rensa")

SEEDS = [
    {"instruction": "Name three rivers of Europe.", "output": "Danube, Rhine, Volga."},
    {"instruction": "Translate 'good morning' into French.", "output": "Bonjour."},
]
SUBJECTS = "oak wren iron copper basil thyme cello harp lynx otter quartz topaz".split()


class Served(ThreadingHTTPServer):
    """A server with OpenAI's interface whose answers are written here."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.failures = 1
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Served

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(body)
            self.server.keys.add(self.headers["Authorization"])
            busy, self.server.failures = self.server.failures > 0, self.server.failures - 1
        if busy or self.path != "/v1/chat/completions" or body["model"] != "teacher":
            self.send_error(503 if busy else 404, "no such model: only teacher")
            return
        subject = SUBJECTS[number % len(SUBJECTS)]
        answers = {
            f"Describe how a {subject} number {number} looks.": "Small.",
            f"Which {subject} did Ada see near harbour {number}?": "One.",
            "Now name three rivers of Europe.": "Ob, Lena, Amur.",
            f"Draw an image of {subject}s {number}.": "Done.",
            f"How old is the {subject} {number} of Rome?": "I'm sorry, no.",
        }
        rows: list[Any] = [{"instruction": a, "output": b} for a, b in answers.items()]
        # In a fence, with a number for a text, and cut off, as small models answer.
        rows.append({"instruction": 1, "output": "c"})
        content = f'<think>{{hm}}</think>```json\n{json.dumps(rows)[:-1]}, {{"instruction": "Cu'
        answer = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(synthesize, "FIRST_WAIT_S", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = Served()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "seeds.jsonl", SEEDS)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_of_a_server_are_filtered_and_continued(
    served: Served, seeds: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "new.jsonl"
    words = ["teacher", "--url", served.url, "--seeds", str(seeds), "--out", str(out)]
    words += ["--temperature=0.9"]
    assert run_here("synthesize", [*words, "--rows", "5"]) == 0, capsys.readouterr().err
    first = rows_of(out)
    assert len(first) == 5
    assert all(row["instruction"].startswith(("Describe", "Which")) for row in first)
    assert {row["source"]["model"] for row in first} == {"teacher"}
    assert first[0]["source"]["request"] == 0
    assert served.keys == {"Bearer sk-secret"}
    assert served.requests[0]["temperature"] == 0.9
    assert SEEDS[0]["instruction"] in served.requests[0]["messages"][0]["content"]
    said = capsys.readouterr().out
    for reason in ("similar to a seed or an earlier", "about a picture or a sound", "a refusal"):
        assert reason in said
    # An interrupted write: the line that was not finished is cut off.
    with out.open("a") as stream:
        stream.write('{"instruction": "Cut')
    assert run_here("synthesize", [*words, "--rows", "9"]) == 0, capsys.readouterr().err
    rows = rows_of(out)
    assert rows[:5] == first
    assert len({row["instruction"] for row in rows}) == 9
    assert min(row["source"]["request"] for row in rows[5:]) > first[-1]["source"]["request"]
    assert first[0]["instruction"] in "".join(
        request["messages"][0]["content"] for request in served.requests[8:]
    )
    assert "sk-secret" not in out.read_text()


def test_what_cannot_be_is_said(served: Served, seeds: Path, tmp_path: Path, capsys: Any) -> None:
    served.failures, out = 0, tmp_path / "new.jsonl"
    of_m = '{"instruction": "a", "output": "b", "source": {"model": "m", "request": 1}}\n'

    def refused(model: str, url: str = served.url, shown: Path = seeds) -> str:
        words = ["--url", url, "--seeds", str(shown), "--out", str(out), "--rows", "1"]
        assert run_here("synthesize", [model, *words]) == 2
        return str(capsys.readouterr().err)

    assert "404 no such model: only teacher" in refused("other")
    for there, problem in (
        (of_m, "has rows of m. Set --out to another name."),
        ('{"instruction": "a"}\n', "has rows of another program."),
    ):
        out.write_text(there)
        assert problem in refused("teacher")
    out.unlink()
    assert "--seeds none.jsonl: no such file" in refused("teacher", shown=Path("none.jsonl"))
    error = refused("teacher", "http://me:hunter2@gpu-1/v1")
    assert "without a password" in error
    assert "hunter2" not in error
    assert run_here("synthesize", ["teacher", "--url", served.url]) == 2
    assert "--seeds FILE" in capsys.readouterr().err


def test_a_local_model_without_a_usable_row_ends(
    seeds: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesize, "IN_VAIN", 3)
    small_model("llama").save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(synthesize, "PROMPT", "w5 {examples}")
    monkeypatch.setattr(synthesize, "PARALLEL", 2)
    words = [str(tmp_path / "model"), "--seeds", str(seeds), "--out", str(tmp_path / "new.jsonl")]
    words += ["--max-new-tokens=4"]
    assert run_here("synthesize", words) == 3
    assert "it has 0 rows, 4 requests; rejected: no row in the answer (4)." in (
        capsys.readouterr().err
    )
