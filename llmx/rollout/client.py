"""The ranks' side of rollout servers: weights go out, prompts are shared out, samples come back.

    servers = RolloutServers(model, addresses, token=token, config=exp.rollout, log=log)
    servers.connect()                      # names what does not fit
    servers.at_step(step, ahead=prompts)   # then ``model.sample`` draws on the servers
    servers.close()

Rank 0 has a thread for each server. Each takes the next batch when its server is free, so a fast
server takes more of them. A batch whose server is lost goes back to the queue; where no server
is left for ``rollout.wait_s`` the ranks complete it themselves. What is in a batch follows from the
prompts and the number of servers, so that it does not matter who draws it.
Shown by ``python -m pytest tests/unit/test_rollout_server.py``.
"""

from __future__ import annotations

import dataclasses
import http.client
import io
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.collectives import all_gather, world
from llmx.config import RolloutConfig
from llmx.config.rollout_rules import SILENT_S
from llmx.errors import ConfigError
from llmx.models.generate import Completion, generate, shares
from llmx.models.model import Model
from llmx.models.sampling import Sampling
from llmx.rollout.network import describe, gather, pack
from llmx.rollout.protocol import (
    FAILED,
    OTHER_WEIGHTS,
    PROTOCOL,
    Refused,
    ServerAddress,
    digest,
    password_of,
)
from llmx.rollout.server import versions
from llmx.text import plural

RETRY_S = 1.0
"""Seconds between two tries to reach a server."""
FAILURES = 3
"""Requests in a row that a server cannot do, before it is left out: out of memory, mostly."""
START_S = 180.0
"""Time for servers to answer at the start: they import torch, as the ranks have done already."""

BATCHES_EACH = 4
"""Batches of a step for each server, where there are several."""

IDLE_SHARE = "rollout_idle_share"
"""Metric, followed by ``/HOST``: share of time in which the servers of a host draw nothing."""

Key = tuple[tuple[int, ...], int]
"""A sample: the tokens of its prompt, and its seed."""


@dataclass
class Body:
    """A body that every server gets, packed once."""

    path: str
    data: bytes
    version: int | str
    """The digest of a model; of weights the updates before them."""


@dataclass(eq=False)
class Batch:
    """Samples that are drawn together, and what came of them."""

    keys: list[Key]
    sampling: Sampling
    completions: list[Completion] | None = None
    weights: int = -1
    """The version that drew them."""


@dataclass
class Connection:
    """One server, as rank 0 sees it."""

    place: ServerAddress
    password: str
    info: dict[str, Any] = field(default_factory=dict)
    model: int | str | None = None
    weights: int | str | None = None
    lost_since: float | None = field(default_factory=time.monotonic)
    """None while it answers."""
    failures: int = 0
    """Requests in a row that it could not do."""
    reason: str = "it has not answered"
    """Why it draws nothing."""
    tokens: int = 0
    """Drawn since the last ``take_measures``, as ``busy_s``."""
    busy_s: float = 0.0

    def request(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """The answer to a request, on a connection of its own.

        Raises:
            OSError, HTTPException, ValueError: the server is lost, or is none of ours.
            Refused: it answers that it did not do it.
        """
        connection = http.client.HTTPConnection(
            self.place.address, self.place.port, timeout=SILENT_S, blocksize=1 << 20
        )
        try:
            headers = {
                "Authorization": f"Bearer {self.password}",
                "Content-Length": str(len(body)),
            }
            # From a file, in pieces: a time-out is of all that is sent at once.
            connection.request(method, path, io.BytesIO(body), headers)
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        if "error" in answer:
            raise Refused(answer["error"], answer["message"])
        return answer

    def greet(self) -> None:
        """Ask what it is and holds."""
        self.info = self.request("GET", "/version")
        self.model, self.weights = self.info["model"], self.info["weights"]

    def problem(self) -> str:
        """Why it cannot be a server of these ranks; empty where it can."""
        if self.info.get("problem"):
            return (
                f"{self.place.host}: rollout.vllm_python cannot draw: {self.info['problem']}. "
                "Set it to the Python of an environment whose vLLM runs there, or leave it out: "
                "llmx then draws itself."
            )
        of_ranks: dict[str, Any] = {"protocol": PROTOCOL, **versions()}
        for name in ("protocol", "llmx", "transformers"):
            if self.info[name] != of_ranks[name]:
                return (
                    f"{self.place.host}: has {name} {self.info[name]}, and the ranks "
                    f"{of_ranks[name]}. Install the same environment there, or set its python."
                )
        return ""


class RolloutServers:
    """The rollout servers of a run, on every rank; only rank 0 talks to them."""

    def __init__(
        self,
        model: Model,
        places: Sequence[ServerAddress],
        *,
        token: str,
        config: RolloutConfig,
        log: Callable[[str], None],
        logs: Path | None = None,
        before_gather: Callable[[], None] = lambda: None,
    ) -> None:
        """``before_gather``: called by all ranks before weights are gathered. ``logs``: the
        directory with the logs of the servers, where it is on this host."""
        self.model, self.config, self.log = model, config, log
        self.before_gather, self.logs = before_gather, logs
        self.world, self.rank = world()
        password = password_of(token)
        self.servers = [Connection(place, password) for place in places] if self.rank == 0 else []
        self.step = -1
        self.network: Body | None = None
        """The body of ``PUT /model``, made once a run."""
        self.latest: Body | None = None
        """The newest weights."""
        self.queue: deque[Batch] = deque()
        self.ahead: dict[Key, Batch] = {}
        """Sample -> its batch, where it is drawn for a later step."""
        self.coming: list[tuple[list[tuple[int, ...]], Callable[[int, int], int]]] = []
        """Prompts of each later step, and the seeds of their samples."""
        self.changed = threading.Condition()
        """Guards all of these, and the connections."""
        self.closed = self.has_drawn = False
        self.threads: list[threading.Thread] = []
        self.wait_s, self.dropped, self.returned, self.measured_at = 0.0, 0, 0, time.perf_counter()

    def connect(self) -> None:
        """Wait for the servers and look at them. Collective.

        Raises:
            ConfigError: one of them does not fit, or none answers.
        """
        problems: list[str] = []
        deadline = time.monotonic() + START_S
        for server in self.servers:
            while not self._try_greet(server) and time.monotonic() < deadline:
                time.sleep(RETRY_S)
            if server.lost_since is not None:
                self.log(
                    f"WARNING: rollout server {server.place.name} does not answer at "
                    f"{server.place.address}:{server.place.port}; the others go on without it"
                )
            elif problem := server.problem() or self._other_names(server):
                problems.append(problem + self._log_end(server))
            else:
                torch_version, vllm = server.info["torch"], server.info.get("vllm")
                alike = torch_version == versions()["torch"]
                note = "" if alike else ", another one than the ranks': samples may differ in bits"
                engine = f"vLLM {vllm}" if vllm else f"torch {torch_version}{note}"
                self.log(f"rollout server {server.place.name}: {server.info['device']}, {engine}")
        if self.servers and all(server.lost_since is not None for server in self.servers):
            problems.append(self._why_none())
        problems = all_gather(problems)[0] if self.world > 1 else problems
        if problems:
            raise ConfigError("\n".join(problems))
        for server in self.servers:
            thread = threading.Thread(target=self._serve, args=(server,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _why_none(self) -> str:
        """Why no server draws: what each has answered, and where its log ends."""
        reasons = [
            f"{server.place.name}: {server.reason.rstrip('.')}.{self._log_end(server)}"
            for server in self.servers
        ]
        return (
            f"No rollout server draws. {' '.join(reasons)} Correct it (logs/rollout-*.log have "
            "more), or leave out rollout.hosts: the ranks then draw."
        )

    def _log_end(self, server: Connection) -> str:
        """The last line of the log of a server, where it is on this host."""
        files = sorted(self.logs.glob("rollout-*.log")) if self.logs is not None else []
        for file in files[self.servers.index(server) :][:1]:
            lines = file.read_text(errors="replace").splitlines()
            if last := next((line.strip() for line in reversed(lines) if line.strip()), ""):
                return f" Its log ends: {last}."
        return ""

    def _other_names(self, server: Connection) -> str:
        """Why vLLM cannot take the weights under the names that they have here; empty if it can."""
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        model_type = self.model.config.model_type
        if "vllm" not in server.info or not get_checkpoint_conversion_mapping(model_type):
            return ""
        return (
            f"rollout.vllm_python: {model_type} has other weights in Transformers than in its "
            "files, which vLLM reads. Leave rollout.vllm_python out."
        )

    def _try_greet(self, server: Connection) -> bool:
        try:
            server.greet()
        except (OSError, ValueError, KeyError, http.client.HTTPException, Refused) as error:
            if not server.failures:
                server.reason = f"{type(error).__name__}: {error}"
            return False
        server.lost_since = None
        return True

    def close(self) -> None:
        """Let the threads end."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def at_step(
        self,
        step: int,
        coming: Sequence[tuple[Sequence[Sequence[int]], Callable[[int, int], int]]] = (),
    ) -> None:
        """The model is that of ``step`` from now on. ``coming``: prompts and seeds of the steps
        after it, of which samples may be drawn ahead."""
        self.step = step
        self.coming = [([tuple(map(int, p)) for p in prompts], of) for prompts, of in coming]

    def sample(
        self, prompts: list[Sequence[int]], sampling: Sampling, seeds: list[int]
    ) -> list[Completion]:
        """``Model.sampler``: completions drawn on the servers. Collective.

        Raises:
            ConfigError: none has ever drawn any.
        """
        keys: list[Key] = [
            (tuple(map(int, prompt)), int(seed))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        self._send_weights()
        began = time.perf_counter()
        drawn = self._draw_all(keys, sampling) if self.rank == 0 else {}
        self.wait_s += time.perf_counter() - began
        problem = self._why_none() if self.rank == 0 and not self.has_drawn else ""
        if self.world > 1:
            drawn, problem = all_gather((drawn, problem))[0]
        if any(key not in drawn for key in keys):
            if problem:
                raise ConfigError(problem)
            self.log(
                f"WARNING: step {self.step + 1}: no rollout server answers; the ranks draw "
                f"{plural(len(keys), 'sample')} themselves"
            )
            # All: a batch of those that are missing would have other rows, so other last bits.
            rows = self.model.rows
            return generate(self.model, prompts, sampling, seeds=seeds, batch_size=rows)
        return [drawn[key] for key in keys]

    def _draw_all(self, keys: list[Key], sampling: Sampling) -> dict[Key, Completion]:
        """The completions that servers have drawn: all, unless none of them answers. By rank 0."""
        drawn: dict[Key, Completion] = {}
        oldest, missing = self.step - self.config.max_staleness, keys
        while missing:
            batches = self._batches_of(missing, sampling)
            self._draw_ahead(sampling, per_prompt=_samples_of_each(keys))
            if not self._wait_for(set(batches.values())):
                missing = []
            for key, batch in batches.items():
                if batch.completions is None:
                    continue
                if batch.weights < oldest:
                    self.dropped += 1
                    continue
                completion = batch.completions[batch.keys.index(key)]
                drawn[key] = dataclasses.replace(completion, age=self.step - batch.weights)
            missing = [key for key in missing if key not in drawn]
        return drawn

    def _parts(self, rows: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """The batches of these rows: for one server the shares of the ranks, for several a few
        each, of which a faster server takes more. A function of the rows alone."""
        count = self.world
        if len(self.servers) > 1:
            count = max(count, BATCHES_EACH * len(self.servers))
        return [part for part in shares(rows, world=count) if part]

    def _send_weights(self) -> None:
        """Gather the weights of this step, unless it is done, for the servers. Collective."""
        if self.latest is not None and self.latest.version == self.step:
            return
        writes = self.rank == 0
        self.before_gather()
        if self.network is None:
            fixed = gather(self.model, trained=False, keep=writes)
            data = pack(fixed, describe(self.model)) if writes else b""
            self.network = Body("/model", data, digest(data))
        trained = gather(self.model, trained=True, keep=writes)
        data = pack(trained) if writes else b""
        with self.changed:
            self.latest = Body(f"/weights/{self.step}", data, self.step)
            self.changed.notify_all()

    def _batches_of(self, keys: list[Key], sampling: Sampling) -> dict[Key, Batch]:
        """The batch of each sample: one that is drawn ahead, else a new one. By rank 0."""
        with self.changed:
            batches: dict[Key, Batch] = {}
            for key in keys:
                batch = self.ahead.pop(key, None)
                if batch is not None and batch.sampling == sampling:
                    batches[key] = batch
            fresh = [key for key in keys if key not in batches]
            new = [
                Batch([fresh[at] for at in places], sampling)
                for places in self._parts([key[0] for key in fresh])
            ]
            # Before what is drawn ahead: this step waits for it.
            self.queue.extendleft(reversed(new))
            self.changed.notify_all()
        return batches | {key: batch for batch in new for key in batch.keys}

    def _draw_ahead(self, sampling: Sampling, *, per_prompt: int) -> None:
        """Put samples of coming steps into the queue, which are not there yet. By rank 0."""
        with self.changed:
            for prompts, seed_of in self.coming[: self.config.max_staleness]:
                keys: list[Key] = [
                    (prompt, seed_of(number, sample))
                    for number, prompt in enumerate(prompts)
                    for sample in range(per_prompt)
                ]
                keys = [key for key in keys if key not in self.ahead]
                for places in self._parts([key[0] for key in keys]):
                    batch = Batch([keys[at] for at in places], sampling)
                    self.ahead.update((key, batch) for key in batch.keys)
                    self.queue.append(batch)
            self.coming = []
            self.changed.notify_all()

    def _wait_for(self, batches: set[Batch]) -> bool:
        """Wait until the batches are drawn. False where all servers are left out, or none has
        answered for ``rollout.wait_s``: the batches are taken out of the queue. By rank 0."""
        with self.changed:
            while any(batch.completions is None for batch in batches):
                lost = [server.lost_since for server in self.servers]
                alive = [since for since in lost if since is None]
                last = max((since for since in lost if since is not None), default=0.0)
                are_out = all(server.failures == FAILURES for server in self.servers)
                if are_out or (not alive and time.monotonic() - last > self.config.wait_s):
                    self.queue = deque(batch for batch in self.queue if batch not in batches)
                    return False
                self.changed.wait(timeout=RETRY_S)
        return True

    def _serve(self, server: Connection) -> None:
        """The thread of one server."""
        while True:
            with self.changed:
                if self.closed:
                    return
            if server.failures == FAILURES:
                self.log(
                    f"WARNING: rollout server {server.place.name} is left out: it failed "
                    f"{FAILURES} times. Its log has why"
                )
                return
            if server.lost_since is not None:
                if not self._try_greet(server) or server.problem():
                    server.lost_since = server.lost_since or time.monotonic()
                    time.sleep(RETRY_S)
                    continue
                self.log(f"rollout server {server.place.name} answers again")
            batch: Batch | None = None
            try:
                self._bring_up_to_date(server)
                batch = self._next(server)
                if batch is not None:
                    self._draw(server, batch)
            except (OSError, ValueError, KeyError, http.client.HTTPException, Refused) as error:
                self._give_back(server, batch, error)

    def _bring_up_to_date(self, server: Connection) -> None:
        """Send what it lacks."""
        with self.changed:
            network, latest = self.network, self.latest
        if network is None or latest is None:
            return
        if server.model != network.version:
            server.weights = None
            server.request("PUT", network.path, network.data)
            server.model = network.version
        if server.weights != latest.version:
            server.request("PUT", latest.path, latest.data)
            server.weights = latest.version

    def _next(self, server: Connection) -> Batch | None:
        """The next batch for a server that is free; None where it is to look again first."""
        with self.changed:
            is_current = self.latest is not None and server.weights == self.latest.version
            if is_current and self.queue:
                return self.queue.popleft()
            self.changed.wait(timeout=RETRY_S)
            return None

    def _draw(self, server: Connection, batch: Batch) -> None:
        """Have the server draw a batch."""
        prompts = list(dict.fromkeys(prompt for prompt, _ in batch.keys))
        request = {
            "weights": server.weights,
            "prompts": prompts,
            "rows": [prompts.index(prompt) for prompt, _ in batch.keys],
            "at_once": self.model.rows,
            "seeds": [seed for _, seed in batch.keys],
            "sampling": {
                **dataclasses.asdict(batch.sampling),
                "stop_ids": sorted(batch.sampling.stop_ids),
            },
        }
        answer = server.request("POST", "/sample", json.dumps(request).encode())
        completions = [
            Completion(
                tokens=tuple(values["tokens"]),
                logps=tuple(values["logps"]),
                sampled_logps=tuple(values["sampled_logps"]),
                ended=values["ended"],
            )
            for values in answer["completions"]
        ]
        if len(completions) != len(batch.keys):
            raise ValueError(f"{len(completions)} completions of {len(batch.keys)} prompts")
        server.failures = 0
        with self.changed:
            self.has_drawn = True
            batch.weights, batch.completions = answer["weights"], completions
            server.tokens += sum(len(completion.tokens) for completion in completions)
            server.busy_s += answer["seconds"]
            self.changed.notify_all()

    def _give_back(self, server: Connection, batch: Batch | None, error: Exception) -> None:
        """A server did not do what it was asked: its batch is for others."""
        with self.changed:
            if batch is not None:
                self.queue.appendleft(batch)
                self.returned += 1
            forgot = isinstance(error, Refused) and error.kind == OTHER_WEIGHTS
            server.model = server.weights = None
            server.failures += isinstance(error, Refused) and error.kind == FAILED
            server.reason = str(error) if isinstance(error, Refused) else repr(error)
            if not forgot:
                server.lost_since = time.monotonic()
            self.changed.notify_all()
        if not forgot and not self.closed:
            consequence = "" if batch is None else "; its batch goes to another one"
            self.log(
                f"WARNING: rollout server {server.place.name} is lost "
                f"({type(error).__name__}: {error}){consequence}"
            )

    def take_measures(self) -> dict[str, Any]:
        """Measures for a ``train`` line, since the last one; empty on other ranks than 0."""
        if self.rank:
            return {}
        with self.changed:
            seconds = max(time.perf_counter() - self.measured_at, 1e-9)
            idle: dict[str, list[float]] = {}
            for server in self.servers:
                part = max(0.0, 1 - server.busy_s / seconds)
                idle.setdefault(server.place.host, []).append(part)
            measures: dict[str, Any] = {
                "rollout_tokens_per_s": sum(server.tokens for server in self.servers) / seconds,
                "rollout_wait_share": min(1.0, self.wait_s / seconds),
                **{
                    f"{IDLE_SHARE}/{host}": round(sum(parts) / len(parts), 4)
                    for host, parts in idle.items()
                },
                "rollout_returned": self.returned,
                "rollout_dropped": self.dropped,
            }
            for server in self.servers:
                server.tokens, server.busy_s = 0, 0.0
            self.wait_s, self.dropped, self.returned = 0.0, 0, 0
            self.measured_at = time.perf_counter()
        return measures


def _samples_of_each(keys: Sequence[Key]) -> int:
    """How many samples of a prompt were asked for at once: as many as of the first one."""
    return sum(prompt == keys[0][0] for prompt, _ in keys) if keys else 0
