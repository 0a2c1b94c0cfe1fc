"""The Hub is asked only where it answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from llmx.config import ModelConfig
from llmx.offline import stay_offline_if_unreachable
from tests.rundirs import free_port

HUB = ModelConfig(path="owner/name")


class Refusing(BaseHTTPRequestHandler):
    """Answers, if only with 404: it is there."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the console."""


def test_a_hub_that_answers_is_asked() -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        before = dict(environment)
        assert stay_offline_if_unreachable(HUB, environment) == ""
        assert environment == before
        server.shutdown()


def test_a_hub_that_is_not_there_is_not_and_local_names_need_none(tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    here, demo = ModelConfig(path=str(tmp_path)), ModelConfig(tokenizer="demo")
    for model, beside, is_asked_for in (
        (HUB, [], True),
        (here, [], False),
        (demo, [], False),
        (here, [str(tmp_path)], False),
        (here, ["owner/teacher"], True),
    ):
        environment = {"HF_ENDPOINT": endpoint}
        why = stay_offline_if_unreachable(model, environment, more_models=beside)
        assert (endpoint in why, "refused" in why) == (is_asked_for, is_asked_for)
        assert environment.get("HF_HUB_OFFLINE") == ("1" if is_asked_for else None)
