"""The Hub is asked only where it answers.

``python -m pytest tests/unit/test_offline.py``
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from llmx.config import ModelConfig
from llmx.offline import stay_offline_if_unreachable
from tests.rundirs import free_port


class Refusing(BaseHTTPRequestHandler):
    """Answers, if only with 404: it is there."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the console."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_hub_that_answers_is_asked(hub: str) -> None:
    environment = {"HF_ENDPOINT": hub}
    assert stay_offline_if_unreachable(ModelConfig(path="owner/name"), environment) == ""
    assert environment == {"HF_ENDPOINT": hub}


def test_a_hub_that_is_not_there_is_not() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    environment = {"HF_ENDPOINT": endpoint}
    why = stay_offline_if_unreachable(ModelConfig(path="owner/name"), environment)
    assert endpoint in why
    assert "refused" in why
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_local_names_need_no_hub(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    for model in (ModelConfig(path=str(tmp_path)), ModelConfig(tokenizer="demo")):
        assert stay_offline_if_unreachable(model, environment) == ""
    assert "HF_HUB_OFFLINE" not in environment


def test_models_of_the_task_are_asked_for_too(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    model = ModelConfig(path=str(tmp_path))
    assert stay_offline_if_unreachable(model, environment, more_models=[str(tmp_path)]) == ""
    why = stay_offline_if_unreachable(model, environment, more_models=["owner/teacher"])
    assert "refused" in why
    assert environment["HF_HUB_OFFLINE"] == "1"
