"""Faults of a training whose samples are drawn on another host (``rollout.hosts``).

    python -m tests.chaos --setup rollouts --faults 30
    python -m tests.chaos --setup rollouts-ahead

One rank and the supervisor on node-a, one rollout server on node-b. ``rollouts`` (synchronous) must
have the bits of the same training without servers. ``rollouts-ahead`` (``max_staleness=1``) must
train the samples of every prompt once, which ``rollouts.jsonl`` shows.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

from llmx.rollout.protocol import SERVER_MODULE
from llmx.run.tail import read_records
from tests.chaos import faults
from tests.chaos.campaign import Setup
from tests.chaos.kinds import Kind
from tests.chaos.site import Site
from tests.chaos.training import GaveUp
from tests.cluster.launching import SMALL

PROMPTS, SAMPLES = 4, 4
"""Of a step, and of each prompt."""


class RolloutSite(Site):
    """node-a trains, node-b draws."""

    HANG_S = 120
    """Longer than ranks wait for a server that is lost."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.trainers = (self.near,)

    @classmethod
    def words(cls, steps: int) -> list[str]:
        return [
            *SMALL,
            *("task=grpo", "data.seq_len=64", "optim.lr=1e-3", f"batch.global_batch={PROMPTS}"),
            *(f"task.options.group_size={SAMPLES}", "task.options.max_new_tokens=12"),
            *("task.options.rewards=[tests.chaos.slow_reward:slow]",),
            # Long enough that a busy machine does not cost a reward that does not hang.
            "task.options.reward_timeout_s=5",
            *(f"task.steps={steps}", "task.log_every_steps=1", "task.save_model=false"),
        ]

    @classmethod
    def undisturbed_words(cls, steps: int) -> list[str]:
        return [*cls.words(steps), "hardware=cpu2", "hardware.hosts.0.slots=1"]

    def start_words(self) -> list[str]:
        return ["rollout.hosts=[node-b]", "rollout.wait_s=5"]

    def goes_on(self) -> bool:
        """Whether the server draws again. What is logged in the step after the fault may have been
        drawn before it."""
        return any(
            line.get("rollout_tokens_per_s", 0) > 0
            for step, line in self.lines.items()
            if self.seen_step + 1 < step <= self.step
        )

    def check_samples(self) -> None:
        """Every step has all its samples, and no prompt is trained twice in an epoch."""
        by_step: dict[int, list[dict[str, Any]]] = {}
        for line in read_records(self.run_dir(self.near).rollouts):
            lines = by_step.setdefault(line["step"], [])
            if lines and lines[0]["attempt"] < line["attempt"]:  # drawn again after a restart
                lines.clear()
            lines.append(line)
        prompts: list[str] = []
        for step in range(1, self.steps + 1):
            texts = [line["prompt"] for line in by_step.get(step, [])]
            groups = [text for text in texts[::SAMPLES] for _ in range(SAMPLES)]
            if len(texts) != PROMPTS * SAMPLES or texts != groups:
                raise GaveUp(f"step {step} does not have {SAMPLES} samples by prompt: {texts}")
            prompts += texts[::SAMPLES]
        rows = len(set(prompts))
        for first in range(0, len(prompts), rows):
            epoch = prompts[first : first + rows]
            if len(set(epoch)) < len(epoch):
                raise GaveUp(f"a prompt was trained twice in epoch {first // rows}: {epoch}")
        stale = [step for step, line in self.lines.items() if line.get("staleness", 0) > 1]
        if stale:
            raise GaveUp(f"samples older than rollout.max_staleness were trained: steps {stale}")

    def servers(self) -> list[int]:
        """The rollout servers on node-b."""
        if not self.far.is_up:
            return []
        return [pid for pid, argv in self.far.processes().items() if SERVER_MODULE in argv]

    def server(self) -> int:
        """The process of the server, which may be starting."""
        self.until(self.servers, what="a rollout server")
        return self.servers()[0]

    def losses_noticed(self) -> int:
        """How often rank 0 has lost the server."""
        log = self.run_dir(self.near).logs / "rank-000.log"
        return log.read_text(errors="replace").count(" is lost (")

    def until_lost(self, strike: Callable[[], None]) -> None:
        """Do it, and wait until rank 0 does without the server."""
        before = self.losses_noticed()
        strike()
        self.until(lambda: self.losses_noticed() > before, what="the loss of the server")


class AheadSite(RolloutSite):
    """The server draws one step ahead, so a resume draws the samples after its checkpoint anew."""

    draws_anew = True

    def start_words(self) -> list[str]:
        return [*super().start_words(), "rollout.max_staleness=1"]


def server_killed(site: RolloutSite, chance: random.Random) -> str:
    """As by the kernel's OOM killer: the supervisor starts another one."""
    site.signal(site.far, site.server(), signal.SIGKILL)
    return "node-b"


def server_killed_meanwhile(site: RolloutSite, chance: random.Random) -> str:
    """The server dies as the ranks start."""
    faults.until_ranks_start(site)
    return f"{server_killed(site, chance)}, as the ranks started"


def server_suspended(site: RolloutSite, chance: random.Random) -> str:
    """SIGSTOP until rank 0 does without it."""
    pid = site.server()
    try:
        site.until_lost(lambda: site.signal(site.far, pid, signal.SIGSTOP))
    finally:
        site.signal(site.far, pid, signal.SIGCONT)
    return "node-b"


def host_lost(site: RolloutSite, chance: random.Random) -> str:
    """The rollout host loses its power, and comes back with its disk."""
    silent = chance.random() < 0.7
    site.until_lost(lambda: site.far.kill(silent=silent))
    site.boot(site.far)
    return "node-b" + (", silently" if silent else "")


def host_replaced(site: RolloutSite, chance: random.Random) -> str:
    """The rollout host burns down; an empty one takes its place."""
    site.until_lost(site.far.kill)
    site.disks["node-b"].wipe()
    site.boot(site.far)
    return "node-b, its disk too"


def link_cut(site: RolloutSite, chance: random.Random) -> str:
    """Packets vanish until rank 0 does without the server."""
    site.until_lost(site.far.cut)
    site.far.restore()
    return "node-b"


def reward_hung(site: RolloutSite, chance: random.Random) -> str:
    """The reward never returns for a completion, which costs that one."""
    start = site.step

    def hung() -> list[int]:
        return [s for s, line in site.lines.items() if s > start and line["reward_failed"] > 0]

    site.until(hung, what="a reward that hangs")
    return f"at step {hung()[0]}"


KINDS = (
    Kind("server", "SIGKILL of the rollout server", 4, server_killed, 1,
         restarts=False, steps=20, follow=server_killed_meanwhile),
    Kind("stopped", "rollout server suspended", 2, server_suspended, 1,
         restarts=False, steps=60),
    Kind("host", "power loss of the rollout host", 2, host_lost, 1, restarts=False, steps=80),
    Kind("replaced", "the rollout host lost with its disk", 1, host_replaced, 1,
         restarts=False, steps=80),
    Kind("link", "link to the rollout host cut for more than 30 s", 2, link_cut, 1,
         restarts=False, steps=80),
    Kind("drop", "link cut for 0.2 to 1.5 s", 2, faults.link_dropped, 1,
         restarts=False),
    Kind("reward", "a reward that hangs", 2, reward_hung, 1, restarts=False, steps=60),
    Kind("agent", "SIGKILL of the agent of the rollout host", 2, faults.agent_killed, 1,
         restarts=False, steps=30),
    Kind("cut", "control connection cut: SIGKILL of sshd and its sessions", 1,
         faults.control_cut, 1, restarts=False, steps=30),
    Kind("rank", "SIGKILL of the training rank", 4, faults.rank_killed, 2, leads=True),
    Kind("supervisor", "SIGKILL of the supervisor, `resume`", 2, faults.supervisor_killed, 2,
         follow=faults.supervisor_killed_meanwhile),
    Kind("preempted", "SIGTERM to the supervisor, `resume`", 1, faults.supervisor_asked, 1,
         follow=faults.supervisor_asked_meanwhile),
)  # fmt: skip

SYNCHRONOUS = Setup("rollouts", KINDS, RolloutSite, stride=15)
AHEAD = Setup("rollouts-ahead", KINDS, AheadSite, is_repeatable=False, stride=15)
