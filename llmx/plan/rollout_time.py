"""Predicted time and memory of drawing the samples of a step. Pure arithmetic; nothing is run.

A decoding step reads all weights and the key-value cache of its rows, and computes one token of
each row. It takes as long as the slowest of three: memory, arithmetic, and launching the kernels of
the layers. A prompt goes through the model once, limited by arithmetic. All completions are assumed
to have ``max_new_tokens`` tokens, and prompt and completion together ``data.seq_len``.

``python -m pytest tests/unit/test_plan_rollout_time.py``
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from llmx.plan.network import Network
from llmx.plan.types import USABLE, DrawnSamples

ROWS = DrawnSamples.rows
"""Completions that a device with room for them draws at once (``llmx.models.generate.BATCH``)."""
ROOM = 64
"""Tokens by which buffers of the key-value cache grow at once (``llmx.models.decode``)."""
SAMPLING_BYTES = 20
"""Bytes of each entry of the vocabulary and row: fp32 logits, and their mass in whole numbers."""
BATCHES_EACH = 4
"""Batches of a step for each of several rollout servers (``llmx.rollout.client``)."""


@dataclass(frozen=True)
class SamplerSpeed:
    """What a device reaches while it draws."""

    flops_per_s: float
    bytes_per_s: float
    layer_s: float = 0.0
    """The least time of each layer of a decoding step: launching its kernels."""


@dataclass(frozen=True)
class Samples:
    """The samples of a step, and the network that draws them."""

    network: Network
    width: int
    """Bytes of a weight, and of an element of the key-value cache."""
    num_prompts: int
    drawn: DrawnSamples
    seq_len: int

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.drawn.group_size

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt: they fill ``data.seq_len``."""
        return max(1, self.seq_len - self.drawn.new_tokens)

    @property
    def num_weights(self) -> int:
        """Parameters that a decoding step multiplies with."""
        return self.network.num_parameters - self.network.num_looked_up

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of all layers."""
        return 2 * self.network.num_layers * self.network.kv_size * self.width

    def forward_flops(self, context: float) -> float:
        """FLOPs of one token behind ``context`` others; in a full row these are half of it."""
        attention = self.network.attention_flops
        return self.network.forward_flops - attention + attention * context / (self.seq_len / 2)

    def decoding_step_s(self, rows: float, speed: SamplerSpeed) -> float:
        """Seconds of one token for each of ``rows`` completions, in the middle of them."""
        context = self.prompt_tokens + self.drawn.new_tokens / 2
        num_bytes = self.num_weights * self.width + rows * context * self.cache_bytes_per_token
        return max(
            num_bytes / speed.bytes_per_s,
            rows * self.forward_flops(context) / speed.flops_per_s,
            self.network.num_layers * speed.layer_s,
        )

    def drawing_s(self, completions: int, speed: SamplerSpeed) -> float:
        """Seconds in which one device draws so many completions, at most ``drawn.rows`` at once."""
        if not completions:
            return 0.0
        rounds = -(-completions // self.drawn.rows)
        prompts = -(-completions // self.drawn.group_size)
        prefill = prompts * self.prompt_tokens * self.forward_flops(self.prompt_tokens / 2)
        steps = rounds * self.drawn.new_tokens
        decoding = steps * self.decoding_step_s(completions / rounds, speed)
        return prefill / speed.flops_per_s + decoding

    def by_ranks_s(self, speeds: Sequence[SamplerSpeed]) -> list[float]:
        """Seconds of each rank: they draw equal parts."""
        count, world = self.num_completions, len(speeds)
        parts = [count * (at + 1) // world - count * at // world for at in range(world)]
        return [self.drawing_s(part, speed) for part, speed in zip(parts, speeds, strict=True)]

    def by_servers_s(self, speeds: Sequence[SamplerSpeed], *, world: int) -> list[float]:
        """Seconds in which each rollout server draws: the next batch goes to the one that is free
        first. ``world``: ranks."""
        count = max(world, BATCHES_EACH * len(speeds)) if len(speeds) > 1 else world
        count = min(count, self.num_completions)
        total = self.num_completions
        sizes = [total * (at + 1) // count - total * at // count for at in range(count)]
        free = [(0.0, number) for number in range(len(speeds))]
        for size in sizes:
            seconds, number = heapq.heappop(free)
            heapq.heappush(free, (seconds + self.drawing_s(size, speeds[number]), number))
        return [seconds for seconds, _ in sorted(free, key=lambda entry: entry[1])]

    def drawing_bytes(self, completions: int) -> float:
        """The most bytes beside the weights while one device draws so many completions."""
        network, rows = self.network, min(self.drawn.rows, completions)
        column = rows * self.cache_bytes_per_token
        at_a_time = 2 * network.num_layers  # keys or values of one layer are copied at a time
        first = column * (self.prompt_tokens + ROOM)
        grown = column * ROOM * max(0, -(-(self.drawn.new_tokens - 1) // ROOM) - 1)
        # A prompt goes through the model once for all completions of its group.
        layer = self.width * (3 * network.intermediate_size + 4 * network.hidden_size)
        of_prompts, of_next = (
            -(-count // self.drawn.group_size) * self.prompt_tokens
            for count in (rows, min(rows, completions - rows))
        )
        beside = max(
            grown and (first + grown - column * ROOM) / at_a_time,
            SAMPLING_BYTES * rows * network.vocab_size,
            of_next * (self.cache_bytes_per_token + layer),
        )
        prompts = of_prompts * self.cache_bytes_per_token
        put = first + column * self.prompt_tokens / at_a_time
        return max(prompts + max(of_prompts * layer, put), first + grown + beside)

    def server_gib(self, *, context_gib: float) -> float:
        """Memory of a rollout server: weights, and what drawing a step's completions takes."""
        weights = self.network.num_parameters * self.width
        return (weights + self.drawing_bytes(self.num_completions)) / 2**30 + context_gib


def server_problem(device: str, needed_gib: float, capacity_gib: float) -> str:
    """A sentence where a rollout server does not fit on a device; else empty."""
    if not capacity_gib or needed_gib <= USABLE * capacity_gib:
        return ""
    return (
        f"{device}: a rollout server takes {needed_gib:.1f} GiB, {capacity_gib:.3g} GiB available: "
        "expect it to run out of memory."
    )
