"""Rollout servers, each a real process on this machine, and the ranks' side of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from llmx.config import RolloutConfig
from llmx.errors import ConfigError
from llmx.models.adapter import Adapter
from llmx.models.generate import Completion
from llmx.models.model import Model
from llmx.models.sampling import Sampling
from llmx.rollout import client
from llmx.rollout.client import Connection, RolloutServers
from llmx.rollout.network import describe, gather, pack
from llmx.rollout.protocol import (
    LISTEN,
    Refused,
    ServerAddress,
    parse_servers,
    password_of,
    render_servers,
)
from tests import forks
from tests.agents import wait_until
from tests.programs.rollout_server import (
    serve,
    serve_and_note_allocator,
    serve_below_an_agent,
)
from tests.small_models import small_model
from tests.unit.test_models_adapter import adapted, experiment, train_a_little
from tests.unit.test_models_model import model_of

TOKEN = "0123456789abcdef"
SAMPLING = Sampling(max_new_tokens=6, temperature=1.0, stop_ids=frozenset({2}))
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12), (13,), (14, 15)]


class ServerProcess:
    """A server, as an agent starts it (but forked); ``start`` once more on the same port."""

    def __init__(self, target: Callable[..., None] = serve, *words: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.place = ServerAddress("here", "127.0.0.1", free.getsockname()[1])
        self.target, self.words = target, words
        self.start()

    def start(self) -> None:
        env = {"LLMX_RUN_TOKEN": TOKEN, LISTEN: render_servers([self.place])}
        with mock.patch.dict(os.environ, env):
            self.process = forks.process(self.target, *self.words)
            self.process.start()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ServerProcess]]:
    started = [ServerProcess(), ServerProcess()]
    yield started
    for process in started:
        process.end()


@pytest.fixture(scope="module")
def places(processes: list[ServerProcess]) -> list[ServerAddress]:
    return [process.place for process in processes]


def tokens_of(completions: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.tokens for completion in of_prompt] for of_prompt in completions]


def policy(adapter: Adapter | None = None, network: Any = None) -> Model:
    model = model_of(network if network is not None else small_model("llama"), "packed")
    model.adapter = adapter
    return model


@contextlib.contextmanager
def ranks(
    model: Model, places: list[ServerAddress], lines: list[str] | None = None, **config: Any
) -> Iterator[RolloutServers]:
    """The one rank of a run, connected."""
    log = ([] if lines is None else lines).append
    servers = RolloutServers(model, places, token=TOKEN, config=RolloutConfig(**config), log=log)
    servers.connect()
    model.sampler = servers.sample
    try:
        yield servers
    finally:
        servers.close()


def seed_of(step: int) -> Any:
    return lambda prompt, sample: 1000 * step + 10 * prompt + sample


def drawn(model: Model, step: int, n: int = 3) -> list[list[Completion]]:
    return model.sample(PROMPTS, SAMPLING, n=n, seeds=seed_of(step))


def by_ranks(model: Model, step: int, n: int = 3) -> list[list[Completion]]:
    """What the ranks draw themselves."""
    sampler, model.sampler = model.sampler, None
    completions = drawn(model, step, n)
    model.sampler = sampler
    return completions


def change(model: Model) -> None:
    """As an update does."""
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.01)


def before_samples(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Connection, bytes], bytes]
) -> None:
    """Do something before samples are asked for; it gives the request."""
    original = Connection.request

    def request(self: Connection, method: str, path: str, body: bytes = b"") -> Any:
        return original(self, method, path, change(self, body) if path == "/sample" else body)

    monkeypatch.setattr(Connection, "request", request)


def test_servers_draw_what_the_ranks_would_have_drawn(places: list[ServerAddress]) -> None:
    """To the bit: tokens, log-probabilities, and how each ended; of each version of the weights."""
    model, lines = policy(), []
    with ranks(model, places[:1], lines) as servers:
        for step in range(3):
            servers.at_step(step)
            assert drawn(model, step) == by_ranks(model, step)
            change(model)
        measures = servers.take_measures()
    assert [line.startswith("rollout server here:") for line in lines] == [True]
    assert measures["rollout_tokens_per_s"] > 0
    assert 0 <= measures["rollout_idle_share/here"] < 1
    assert measures["rollout_dropped"] == measures["rollout_returned"] == 0


def test_it_does_not_matter_which_server_draws(places: list[ServerAddress]) -> None:
    """Several servers make smaller batches: the same draws as of the ranks, up to rounding."""
    model = policy()
    results = []
    for order in (places, places[::-1]):
        with ranks(model, order) as servers:
            servers.at_step(0)
            results.append(drawn(model, 0))
    assert results[0] == results[1]
    for of_servers, of_ranks in zip(results[0], by_ranks(model, 0), strict=True):
        for completion, expected in zip(of_servers, of_ranks, strict=True):
            assert completion.tokens == expected.tokens
            assert completion.logps == pytest.approx(expected.logps, abs=1e-5)


def test_of_an_adapter_only_what_is_trained_travels_again(places: list[ServerAddress]) -> None:
    network = small_model("llama")
    model = policy(adapted(network, experiment()), network)
    train_a_little(network)
    with ranks(model, places[:1]) as servers:
        for step in range(2):
            servers.at_step(step)
            assert drawn(model, step) == by_ranks(model, step)
            change(model)
        assert servers.network is not None
        assert servers.latest is not None
        assert len(servers.latest.data) < len(servers.network.data) / 2


def test_samples_that_are_drawn_ahead_say_how_old_their_weights_are(
    places: list[ServerAddress],
) -> None:
    model = policy()
    with ranks(model, places[:1], max_staleness=1) as servers:
        servers.at_step(0, [(PROMPTS, seed_of(1))])
        assert drawn(model, 0) == by_ranks(model, 0)
        of_old_weights = by_ranks(model, 1)
        wait_until(lambda: all(batch.completions for batch in servers.ahead.values()))
        change(model)
        servers.at_step(1, [(PROMPTS, seed_of(2))])
        completions = drawn(model, 1)
        assert {c.age for group in completions for c in group} == {1}
        assert tokens_of(completions) == tokens_of(of_old_weights)
        wait_until(lambda: all(batch.completions for batch in servers.ahead.values()))
        # Two updates later those of step 2 are too old: they are drawn again.
        change(model)
        for batch in servers.ahead.values():
            batch.weights = -1
        servers.at_step(2)
        assert drawn(model, 2) == by_ranks(model, 2)
        assert servers.take_measures()["rollout_dropped"] == len(PROMPTS) * 3


def test_a_server_that_dies_and_comes_back(processes: list[ServerProcess]) -> None:
    """The ranks draw themselves where none is left; then it is used again, with the right
    weights."""
    model, lines, process = policy(), [], processes[0]
    with ranks(model, [process.place], lines, wait_s=0.5) as servers:
        servers.at_step(0)
        assert drawn(model, 0) == by_ranks(model, 0)
        process.end()
        change(model)
        servers.at_step(1)
        assert drawn(model, 1) == by_ranks(model, 1)
        assert any("the ranks draw 12 samples themselves" in line for line in lines)
        process.start()
        wait_until(lambda: any("answers again" in line for line in lines))
        change(model)
        servers.at_step(2)
        count = len(lines)
        assert drawn(model, 2) == by_ranks(model, 2)
        assert lines[count:] == []
        assert servers.take_measures()["rollout_tokens_per_s"] > 0


def test_a_batch_of_a_server_that_dies_goes_to_another_one(
    processes: list[ServerProcess], places: list[ServerAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "shares", lambda rows, **_: [[at] for at in range(len(rows))])
    model, lines = policy(), []
    with ranks(model, places, lines) as servers:
        servers.at_step(0)
        drawn(model, 0)
        is_dead = threading.Event()

        def dies_first(connection: Connection, body: bytes) -> bytes:
            if connection.place == places[1]:
                processes[1].end()
                is_dead.set()
            else:  # or it would draw everything before the other one begins
                assert is_dead.wait(timeout=120)
            return body

        before_samples(monkeypatch, dies_first)
        servers.at_step(1)
        change(model)
        assert tokens_of(drawn(model, 1)) == tokens_of(by_ranks(model, 1))
        assert servers.take_measures()["rollout_returned"] == 1
    assert any("its batch goes to another one" in line for line in lines)
    processes[1].start()


def test_ranks_draw_what_a_server_has_begun_anew(
    processes: list[ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server, two ranks: it dies between their batches. In a batch of what is missing, other
    rows would be beside each other."""
    monkeypatch.setattr(client, "shares", lambda rows, **_: [[0], [*range(1, len(rows))]])
    model, lines, process = policy(), [], processes[0]
    with ranks(model, [process.place], lines, wait_s=0.5) as servers:
        requests: list[bytes] = []

        def dies_second(_: Connection, body: bytes) -> bytes:
            requests.append(body)
            if len(requests) == 2:
                process.end()
            return body

        before_samples(monkeypatch, dies_second)
        servers.at_step(0)
        assert drawn(model, 0) == by_ranks(model, 0)
    assert any("the ranks draw 12 samples themselves" in line for line in lines)
    process.start()


def test_servers_that_never_draw_end_the_run_with_their_own_reason(
    places: list[ServerAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lines = policy(), []

    def impossible(_: Connection, body: bytes) -> bytes:
        request = json.loads(body)
        request["prompts"] = [[10**6] for _ in request["prompts"]]  # beyond the vocabulary
        return json.dumps(request).encode()

    before_samples(monkeypatch, impossible)
    with ranks(model, places[:1], lines, wait_s=600) as servers:
        servers.at_step(0)
        with pytest.raises(
            ConfigError, match=r"No rollout server draws\. here:\d+: .* token id 1000000"
        ):
            drawn(model, 0)
        assert servers.take_measures()["rollout_returned"] == client.FAILURES
    assert any("is left out: it failed 3 times" in line for line in lines)


def test_servers_that_do_not_start_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "START_S", 0.0)
    (tmp_path / "rollout-002.log").write_text("ImportError: libcudart.so.12: not there\n\n")
    place = ServerAddress("here", "127.0.0.1", 9)  # where nobody listens
    servers = RolloutServers(
        policy(), [place], token=TOKEN, config=RolloutConfig(), log=print, logs=tmp_path
    )
    with pytest.raises(ConfigError, match=r"here:9: .*refused\. Its log ends: ImportError: lib"):
        servers.connect()


def test_places_go_through_a_variable() -> None:
    places = [ServerAddress("node-b", "10.0.0.2", 20123), ServerAddress("c", "fd00::1", 4)]
    assert parse_servers(render_servers(places)) == places


def test_neither_a_body_that_is_cut_short_nor_one_without_the_password_is_taken(
    places: list[ServerAddress],
) -> None:
    server = Connection(places[0], password_of(TOKEN))
    wait_until(lambda: answers(places[0]))
    server.greet()
    before = server.model
    head = f"PUT /model HTTP/1.0\r\nAuthorization: Bearer {password_of(TOKEN)}\r\n"
    # Who has not the password is not answered.
    url = f"http://127.0.0.1:{places[0].port}/version"
    for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(url, headers=headers))
    with socket.create_connection((places[0].address, places[0].port)) as peer:
        peer.sendall(f"{head}Content-Length: 100\r\n\r\nhalf".encode())
        peer.shutdown(socket.SHUT_WR)
        assert peer.makefile("rb").read() == b""
    server.greet()
    assert server.model == before


def test_what_does_not_fit_is_named(
    places: list[ServerAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {**client.versions(), "transformers": "5.17.0"}
    monkeypatch.setattr(client, "versions", lambda: ours)
    with (
        pytest.raises(ConfigError, match=r"here: has transformers .*, and the ranks 5\.17\.0\. "),
        ranks(policy(), places),
    ):
        raise AssertionError


def test_a_server_has_the_allocator_of_a_rank(tmp_path: Path) -> None:
    server = ServerProcess(serve_and_note_allocator, tmp_path / "note")
    server.process.join(timeout=60)
    assert (tmp_path / "note").read_text() == "expandable_segments:True"


def test_a_request_before_its_weights_is_refused(places: list[ServerAddress]) -> None:
    server = Connection(places[0], password_of(TOKEN))
    model = policy()
    network = pack(gather(model, trained=False, keep=True), describe(model))
    server.request("PUT", "/model", network)
    request = {
        "weights": None, "prompts": [[5]], "rows": [0], "seeds": [1], "sampling": {}, "at_once": 1
    }  # fmt: skip
    with pytest.raises(Refused) as refused:
        server.request("POST", "/sample", json.dumps(request).encode())
    assert refused.value.kind == "other_weights"
    half = gather(model, trained=True, keep=True)
    half.popitem()
    with pytest.raises(Refused, match="1 parameters were not sent"):
        server.request("PUT", "/weights/1", pack(half))
    server.greet()
    assert server.weights is None


def test_a_server_ends_with_its_agent(tmp_path: Path) -> None:
    """However the agent ends: the server looks for it."""
    agent = ServerProcess(serve_below_an_agent, tmp_path / "pid")
    wait_until(lambda: answers(agent.place))
    pid = int((tmp_path / "pid").read_text())
    agent.end()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or not answers(agent.place))


def answers(place: ServerAddress) -> bool:
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # it may be ending
        Connection(place, password_of(TOKEN)).greet()
        return True
    return False
