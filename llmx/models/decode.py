"""The rows that a rank completes together: forwards over one key-value cache, which a row leaves as
soon as it has ended, and which prompts of the queue join.

The newest token of every row is in the last column of the cache, and a row begins at its prompt:
what is left of that is masked. So a prompt can join rows that are far ahead. Keys and values are in
buffers with room to the right, so that a token is written and nothing is copied. Models whose
layers keep something else (states along the sequence, sliding windows), and such as take no mask of
padding, complete prompts of equal length, and take the next ones when all have ended.

Shown by ``python -m pytest tests/unit/test_models_generate.py``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from llmx.models.attention import additive
from llmx.models.generate import (
    LENGTH,
    POSITIONS,
    STOP,
    Completion,
    Decoder,
    OnToken,
    cache_argument,
    takes_left_padding,
)
from llmx.models.loss import head_at, takes, to_device
from llmx.models.sampling import Sampling, draw, truncated, uniforms

ROOM = 64
"""Columns by which buffers grow at once, and tokens whose random numbers are made at once."""


@dataclass(eq=False)
class Row:
    """A completion that is being made."""

    index: int
    """The number of its prompt."""
    prompt: tuple[int, ...]
    seed: int
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None
    first_column: int = 0
    """The column of the cache that its prompt begins in."""
    logps: list[float] = field(default_factory=list)
    sampled_logps: list[float] = field(default_factory=list)

    def add(self, token: int, sampling: Sampling, *, last_position: float) -> None:
        """Take a token that was drawn, and end with it if it is the last."""
        fed = len(self.prompt) + len(self.tokens)
        self.tokens.append(token)
        if token in sampling.stop_ids:
            self.ended = STOP
        elif len(self.tokens) >= sampling.max_new_tokens:
            self.ended = LENGTH
        elif fed >= last_position:  # no place to feed the token back
            self.ended = POSITIONS

    def completion(self) -> Completion:
        """The completion as far as it is drawn."""
        assert self.ended is not None
        return Completion(
            tokens=tuple(self.tokens),
            logps=tuple(self.logps),
            sampled_logps=tuple(self.sampled_logps),
            ended=self.ended,
        )


class Slots(DynamicLayer):
    """Keys and values of one layer in buffers [slots, heads, columns, width]. The first ``count``
    slots are used, from column ``start`` to column ``end``; ``batch`` says which these are."""

    def __init__(self, batch: Decoding, layer: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch, self.is_initialized = batch, True
        self.buffers = [states[:0] for states in (layer.keys, layer.values)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of the newest tokens; all that the tokens see."""
        batch, count = self.batch, len(key_states)
        end = batch.end + key_states.shape[-2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:count, :, batch.end : end] = states
        self.keys, self.values = (buffer[:count, :, batch.start : end] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.batch.end - self.batch.start

    def lay_out(self, count: int, *, slots: int, end: int, columns: int) -> None:
        """Make buffers of ``columns``, in which the columns in use end at ``end``."""
        width = self.get_seq_length()
        self.keys = self.values = None  # views, which would keep the old buffers of all layers
        for at, old in enumerate(self.buffers):
            new = old.new_zeros(slots, old.shape[1], columns, old.shape[3])
            if count:
                used = slice(self.batch.start, self.batch.end)
                new[:count, :, end - width : end] = old[:count, :, used]
            self.buffers[at] = new

    def put(self, layer: Any, *, source: torch.Tensor, slot: int) -> None:
        """Write rows ``source`` of a layer into the slots from ``slot`` on, at the right."""
        end = self.batch.end
        for buffer, states in zip(self.buffers, (layer.keys, layer.values), strict=True):
            buffer[slot : slot + len(source), :, end - states.shape[-2] : end] = states[source]

    def move(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy rows from slot to slot."""
        for buffer in self.buffers:
            used = buffer[:, :, self.batch.start : self.batch.end]
            used[slots] = used[sources]


class Decoding:
    """The rows of one rank that are being completed."""

    def __init__(
        self, model: Decoder, sampling: Sampling, *, slots: int, on_token: OnToken | None
    ) -> None:
        self.model, self.sampling, self.slots, self.on_token = model, sampling, slots, on_token
        self.cache_name = cache_argument(model)
        self.takes_padding = takes_left_padding(model.config, model.attention)
        self.takes_positions = model.attention.isolation not in ("padding_mask", "none") and takes(
            type(model.module), "position_ids"
        )
        last = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.last_position = last or math.inf
        self.rows: list[Row] = []
        """A list that is replaced, and never changed."""
        self.described: list[Row] | None = None
        """The rows that ``newest``, ``first_columns`` and ``uniforms`` describe, in their order.
        These stay on the device, so that no token copies them."""
        self.newest = self.first_columns = self.uniforms = torch.zeros(0)
        self.num_drawn = 0
        """Columns of ``uniforms`` [rows, ROOM] that are used."""
        self.start = self.end = 0
        """The columns of the cache that count."""
        self.columns = 0
        self.cache: Any = None
        self.joins = False
        """Whether prompts join rows that are ahead of them; known with the first cache."""
        self.steps: list[tuple[list[Row], torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def run(self, groups: Sequence[list[Row]], *, lockstep: bool) -> None:
        """Complete all rows. Those of a group have one prompt, and are ``slots`` at most.

        Args:
            lockstep: every rank makes as many forwards as the others. Collective.
        """
        queue = deque(groups)
        while True:
            is_busy = bool(self.rows or queue)
            if not (_any_rank(is_busy, self.model.device) if lockstep else is_busy):
                break
            if joining := self._joining(queue):
                self._prefill(joining)
            elif self.rows:
                self._decode()
            else:  # for the others, whose layers are gathered from all ranks
                self._forward(torch.zeros(1, 1, dtype=torch.long), None, length=1, cache=None)
        self.cache = None  # its layers refer to this object: the cycle would keep them for long
        self._keep_log_probabilities()

    def _joining(self, queue: deque[list[Row]]) -> list[list[Row]]:
        """The next groups, if a part of the slots is free: a forward of few is not worth it."""
        groups: list[list[Row]] = []
        free = self.slots - len(self.rows)
        if self.rows:
            enough = min(self.slots // 4, sum(map(len, queue)))
            if not self.joins or free < enough:
                return groups
        while queue and len(queue[0]) <= free:
            lengths = {len(group[0].prompt) for group in (queue[0], *groups[:1])}
            if len(lengths) > 1 and not self.takes_padding:
                break
            groups.append(queue.popleft())
            free -= len(groups[-1])
        return groups

    def _prefill(self, groups: list[list[Row]]) -> None:
        """The first tokens of rows; a prompt goes through the model once for all of its group."""
        rows = [row for group in groups for row in group]
        if self.cache_name is None:
            self.rows = rows
            self._decode()
            return
        source = [number for number, group in enumerate(groups) for _ in group]
        tokens, padding = left_padded([group[0].prompt for group in groups])
        length = tokens.shape[1]
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(tokens, padding, length=length, cache=cache)
        if len(rows) > len(groups):
            logits = logits[self._index(source)]
        self._draw(rows, logits, self._uniforms(rows, count=1)[:, 0])
        alive = [at for at, row in enumerate(rows) if row.ended is None]
        rows = [rows[at] for at in alive]
        if not rows:
            return
        sources = self._index([source[at] for at in alive])
        if self.cache is None:
            self.joins = (
                self.takes_padding
                and self.takes_positions
                and all(
                    type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers
                )
            )
        if self.joins:
            self._put(cache, rows, sources, length=length)
        else:
            cache.reorder_cache(cast(torch.LongTensor, sources))
            self.rows, self.cache, self.start, self.end = rows, cache, 0, length
            for row in rows:
                row.first_column = length - len(row.prompt)

    def _put(self, cache: Any, rows: list[Row], source: torch.Tensor, *, length: int) -> None:
        """Let rows join: rows ``source`` of their cache go into slots behind those in use."""
        if self.cache is None:
            self.cache = DynamicCache(config=self.model.config)
            self.cache.layers = [Slots(self, layer) for layer in cache.layers]
        if not self.rows:
            self.start = self.end = min(length, self.columns)
        if length > self.end:
            self._lay_out(length)
        for slots, layer in zip(self.cache.layers, cache.layers, strict=True):
            slots.put(layer, source=source, slot=len(self.rows))
        self.rows = [*self.rows, *rows]
        for row in rows:
            row.first_column = self.end - len(row.prompt)
        self.start = min(row.first_column for row in self.rows)

    def _lay_out(self, end: int) -> None:
        """Make room to the right, or to the left, of the columns in use, which then end at ``end``.
        What no row uses any more is dropped."""
        self.columns = end + ROOM
        for layer in self.cache.layers:
            layer.lay_out(len(self.rows), slots=self.slots, end=end, columns=self.columns)
        shift = end - self.end
        for row in self.rows:
            row.first_column += shift
        self.first_columns = self.first_columns + shift
        self.start, self.end = self.start + shift, end

    def _decode(self) -> None:
        """One more token of every row."""
        rows = self.rows
        if self.joins and self.end >= self.columns:
            self._lay_out(self.end - self.start)
        if self.described is not rows or self.num_drawn == ROOM:
            self.newest = self._index([(row.tokens or row.prompt)[-1] for row in rows])
            self.first_columns = self._index([row.first_column for row in rows])
            self.uniforms = self._uniforms(rows, count=ROOM)
            self.described, self.num_drawn = rows, 0
        if self.cache_name is None:  # all goes through the model again
            tokens, padding = left_padded([(*row.prompt, *row.tokens) for row in rows])
            logits = self._forward(tokens, padding, length=tokens.shape[1], cache=None)
        else:
            is_padded = any(row.first_column > self.start for row in rows)
            logits = self._forward(
                self.newest[:, None],
                self.first_columns - self.start if is_padded else None,
                length=self.end + 1 - self.start,
                cache=self.cache,
            )
            self.end += 1
        self.newest = self._draw(rows, logits, self.uniforms[:, self.num_drawn])
        self.num_drawn += 1
        self._drop_ended()

    def _uniforms(self, rows: list[Row], *, count: int) -> torch.Tensor:
        """fp64 [rows, count]: the random numbers of their next tokens, each a function of the seed
        and the token's position."""
        numbers = [
            uniforms(row.seed, first=len(row.prompt) + len(row.tokens), count=count) for row in rows
        ]
        return to_device(torch.from_numpy(np.stack(numbers)), self.model.device)

    def _drop_ended(self) -> None:
        """The last rows take the slots of those that have ended."""
        num_alive = sum(row.ended is None for row in self.rows)
        if num_alive == len(self.rows):
            return
        holes = [slot for slot in range(num_alive) if self.rows[slot].ended]
        last = [slot for slot in range(num_alive, len(self.rows)) if self.rows[slot].ended is None]
        order = list(range(num_alive))
        for hole, slot in zip(holes, last, strict=True):
            order[hole] = slot
        self.rows = self.described = [self.rows[slot] for slot in order]
        if not self.rows:
            return
        alive = self._index(order)
        self.newest, self.first_columns = self.newest[alive], self.first_columns[alive]
        self.uniforms = self.uniforms[alive]
        if self.joins:
            if holes:
                sources, slots = self._index(last), self._index(holes)
                for layer in self.cache.layers:
                    layer.move(sources, slots)
            self.start = min(row.first_column for row in self.rows)
        elif self.cache is not None:
            self.cache.reorder_cache(alive)

    def _forward(
        self, tokens: torch.Tensor, padding: torch.Tensor | None, *, length: int, cache: Any
    ) -> torch.Tensor:
        """Logits [n, vocabulary] (fp32) behind the last of ``tokens`` [n, new].

        Args:
            padding: int64 [n], tokens at the left of each row that are none; None: no row has any.
            length: tokens of a row that are seen, padding and new ones included.
        """
        model, (count, new) = self.model, tokens.shape
        place = torch.arange(length - new, length, device=model.device)
        arguments: dict[str, Any] = {}
        positions = place.expand(count, -1)
        if padding is not None:
            padding = to_device(padding, model.device)
            positions = (positions - padding[:, None]).clamp(min=0)
            arguments["attention_mask"] = mask(model, place, length, padding)
        if self.takes_positions:
            arguments["position_ids"] = positions
        if cache is not None and self.cache_name:
            arguments.update({self.cache_name: cache, "use_cache": True})
        every_row = torch.arange(count, device=model.device)
        with head_at(model.module, every_row, torch.full_like(every_row, new - 1)):
            outputs = model.module(input_ids=to_device(tokens, model.device), **arguments)
        logits: torch.Tensor = outputs.logits[0, :, : model.vocab_size].float()
        return logits

    def _draw(self, rows: list[Row], logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The next token of each of ``rows``, drawn with its random number; waits for it."""
        sampling = self.sampling
        if sampling.greedy:
            chosen = logits.argmax(dim=-1)
            logps = _log_probabilities(logits, chosen)
            sampled_logps = torch.zeros_like(logps)
        else:
            drawn_from = logits if sampling.is_model else truncated(logits, sampling)
            chosen = draw(drawn_from, numbers)
            logps = _log_probabilities(logits, chosen)
            sampled_logps = logps if sampling.is_model else _log_probabilities(drawn_from, chosen)
        self.steps.append((rows, logps, sampled_logps))
        for row, token in zip(rows, chosen.tolist(), strict=True):
            row.add(token, sampling, last_position=self.last_position)
            if self.on_token is not None:
                self.on_token(row.index, token)
        return chosen

    def _keep_log_probabilities(self) -> None:
        """Give every row its own: they were left on the device until now, which then need not be
        waited for."""
        if not self.steps:
            return
        logps = torch.cat([step[1] for step in self.steps]).tolist()
        sampled_logps = torch.cat([step[2] for step in self.steps]).tolist()
        for at, row in enumerate(row for rows, _, _ in self.steps for row in rows):
            row.logps.append(logps[at])
            row.sampled_logps.append(sampled_logps[at])
        self.steps.clear()

    def _index(self, numbers: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.long), self.model.device)


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(tokens [n, longest], how many at the left of each row are padding; None: nowhere any)."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * pads + list(prompt) for pads, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(rows), torch.tensor(padding) if any(padding) else None


def mask(model: Decoder, place: torch.Tensor, length: int, padding: torch.Tensor) -> torch.Tensor:
    """[B, 1, new, length]: causal, and blind to the padding at the left."""
    keys = torch.arange(length, device=place.device)
    causal = keys[None, None, :] <= place[None, :, None]
    # A query that is itself padding sees itself: a row of nothing would be NaN in softmax.
    real = (keys[None, None, :] >= padding[:, None, None]) | (
        keys[None, None, :] == place[None, :, None]
    )
    visible = (causal & real).unsqueeze(1)
    if model.attention.implementation == "eager":
        return additive(visible, dtype=model.dtype)
    return visible


def _log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(dim=-1)


def _any_rank(condition: bool, device: torch.device) -> bool:
    """Whether ``condition`` is true on any rank. Collective."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return condition
    flag = torch.full((), int(condition), dtype=torch.int32, device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag)
