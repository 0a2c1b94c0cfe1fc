"""The end of a run on every host: nothing is left there, and what was written comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from llmx.errors import LlmxError
from llmx.launch import sync
from llmx.launch.fleet import AgentError, Channel, Message
from llmx.launch.prepare import agent_env, hello_message
from llmx.launch.spec import LaunchSpec
from llmx.text import plural

ANSWER_S = 15.0
"""Beside the grace: for the last processes to be killed and looked for again."""


class Ending:
    """Ends one run. ``asked``: how often the user asked for it; once more means at once."""

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        lost: Collection[str],
        asked: Callable[[], int],
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.spec, self.asked, self.log, self.warn = spec, asked, log, warn
        self.lost = lost
        """Hosts that are not heard of any more: their own agents end the run there."""

    def end(
        self, channels: list[Channel], *, grace_s: float, launched: bool, save: bool = False
    ) -> list[Channel]:
        """Have every agent end the run on its host, and wait for its word that nothing is left.

        ``save``: the ranks may save within the grace; else they leave at once.

        Returns the channels, a new one in the place of each that was lost and found again.
        """
        for channel in channels:
            if channel.name in self.lost:
                channel.post("stop", grace_s=0)  # in case it hears us after all
                channel.lost_at = channel.lost_at or time.time()
                self.log(f"{channel.name}: lost; its own agent ends the run there")
        if launched:
            channels = [self._reached(channel) for channel in channels]
        alive = [channel for channel in channels if channel.lost_at is None]
        pending = [(channel, channel.post("stop", grace_s=grace_s, save=save)) for channel in alive]
        # The first request is why we are here; a second one may have come before we were.
        asked, deadline = min(self.asked(), 1), time.monotonic() + grace_s + ANSWER_S
        for channel, replies in pending:
            counts: Message | None = None
            while counts is None:
                if self.asked() > asked:
                    asked = self.asked()
                    for other in alive:
                        other.post("stop", grace_s=0)  # any word cuts the grace short
                try:
                    counts = channel.wait(replies, timeout_s=0.2)
                except AgentError as error:
                    if channel.lost_at is None and time.monotonic() < deadline:
                        continue
                    self.warn(
                        f"{channel.name}: cannot tell whether the run has ended there: {error}"
                    )
                    break
            if counts is not None:
                self._tell(channel, counts)
        return channels

    def bring_back(self, channels: list[Channel]) -> None:
        """Outputs of hosts with disks of their own come to this machine's run directory."""
        for channel in channels:
            if channel.shared or channel.lost_at is not None:
                continue
            ranks = [rank.rank for rank in self.spec.plan.ranks if rank.host in channel.hosts]
            try:
                received = sync.pull(self.spec, channel.name, ranks)
                self.log(f"{channel.name}: {received} bytes of outputs fetched")
            except LlmxError as error:
                self.warn(
                    f"{channel.name}: its outputs could not be fetched and stay there: {error}"
                )

    def _tell(self, channel: Channel, counts: Message) -> None:
        self.log(
            f"{channel.name}: {plural(counts['ended'], 'process', 'processes')} ended, "
            f"{counts['killed']} killed, "
            f"{counts['left']} left"
        )
        if counts["left"]:
            left = plural(counts["left"], "process", "processes")
            self.warn(
                f"{channel.name}: {left} cannot be killed (state D in `ps`: blocked in the "
                f"kernel); their environment has LLMX_RUN_TOKEN={self.spec.token}"
            )

    def _reached(self, channel: Channel) -> Channel:
        """The channel; where its agent was lost, a new one, if the host answers at all."""
        if channel.lost_at is None or channel.name in self.lost:
            return channel
        again = channel.renewed()
        again.start(agent_env())
        try:
            again.hello = again.ask("hello", timeout_s=15, **hello_message(self.spec, again, ""))
            again.ask("watch", timeout_s=15, stream=False, port=self.spec.port)
        except AgentError as error:
            again.close(timeout_s=0)
            self.warn(
                f"{channel.name}: not reached any more ({error}); its own agent ends the run there "
                "when it notices the lost connection"
            )
            return channel
        return again
