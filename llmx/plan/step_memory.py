"""Peak memory of one rank: a traced micro step, simulated by DeepSpeed's own rules. Pure.

What DeepSpeed 0.19.8 allocates and frees while it builds an engine, while gradients come in and
while it updates is done here on numbers, event by event: partitions with their padding by group of
the optimizer, the bucket for reductions, what stage 3 gathers, fetches ahead and keeps. Places in
DeepSpeed stand beside the rules (``deepspeed/runtime/zero``). Held against what ranks really
allocate by ``benchmarks/plan_validation.py`` (docs/development/predictions.md) and
``tests/unit/test_plan_step_memory.py``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from llmx.plan.trace import (
    FETCH,
    FETCH_BACKWARD,
    GRADIENT,
    RELEASE,
    RELEASE_BACKWARD,
    Event,
    StepTrace,
)

ALIGNMENT = 2
"""Elements by rank that a partition of stages 1 and 2 is padded to (nccl_start_alignment_factor).
"""
ALL_REDUCED_ELEMENTS = 500_000_000
"""Elements that DeepSpeed reduces at a time where it does not shard gradients (stage 0, and stage 1
with fp32 sums of bf16 gradients); it has no setting."""
MOMENTUM_WIDTH = 4
NORM_WIDTH = 8
"""Bytes of an element whose norm is computed: gradients are copied to fp64 for it."""
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "update")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, UPDATE = PARTS


@dataclass(frozen=True)
class StepRules:
    """The settings that a peak depends on, beside the network and its micro batch."""

    stage: int
    world: int
    width: int
    """Bytes of a parameter."""
    sums: int
    """Bytes of a gradient that is summed over micro steps."""
    accumulation: int
    reduce_bucket: int
    overlap: bool
    prefetch_bucket: int
    persistence: int
    max_live: int
    max_reuse_distance: int
    sub_group: int
    state_width: int
    """Bytes an element of the optimizer's state has, beside the master weights; a matrix of Muon's
    has its momentum."""
    temporary_width: int
    """Bytes an element takes while it is updated."""
    offload_optimizer: bool = False
    offload_param: bool = False
    hpz: int = 1
    bf16: bool = False
    sent: int = 0
    """Bytes of a gradient while it is reduced; 0: as of a parameter."""


@dataclass
class Peaks:
    """The highest that was seen, by part; and what lies in host memory."""

    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    """Now."""
    current: int = 0
    """Their sum; at the end, what a rank has between two steps."""
    total: int = 0
    at: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    """Bytes of each part when the total was highest."""
    host: int = 0
    moment: str = ""
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    """The highest of each part, whenever that was."""

    gathered: int = 0
    """The most that stage 3 has gathered. It comes and goes in pieces of all sizes and leaves
    holes: in processes it was measured to take up to twice its size."""

    @property
    def freed(self) -> int:
        """Bytes that are free in all parts when their sum is highest: the C library keeps them."""
        return sum(self.most.values()) + self.gathered - self.total

    def add(self, part: str, size: float) -> None:
        """Count ``size`` bytes more of a part from now on."""
        num_bytes = int(size)
        self.parts[part] += num_bytes
        self.current += num_bytes
        self.most[part] = max(self.most[part], self.parts[part])
        if self.current > self.total:
            self.total, self.at = self.current, dict(self.parts)

    def drop(self, part: str, size: float) -> None:
        """Count ``size`` bytes less of a part from now on."""
        self.parts[part] -= int(size)
        self.current -= int(size)

    def add_once(self, moment: str, part: str, size: float) -> None:
        """Count ``size`` bytes more of a part for this moment alone."""
        before = self.total
        self.add(part, size)
        if self.total > before:
            self.moment = moment
        self.drop(part, size)


@functools.lru_cache(maxsize=256)
def peak_of(trace: StepTrace, rules: StepRules) -> Peaks:
    """The peaks of the rank that needs most: the first, the last and one between them are
    simulated. Cached, since a search for what fits plans the same more than once."""
    ranks = sorted({0, rules.world // 2, rules.world - 1})
    if rules.stage in (0, 3):
        ranks = ranks[:1]
    peaks_by_rank = [_play(trace, rules, rank) for rank in ranks]
    return max(peaks_by_rank, key=lambda peaks: peaks.total)


def _play(trace: StepTrace, rules: StepRules, rank: int) -> Peaks:
    if rules.stage == 0:
        return _Unsharded(trace, rules).play()
    if rules.stage == 3:
        steps = [_Sharded(trace, rules)]
        if rules.hpz > 1:
            steps.append(_Sharded(trace, rules, first=True))
        return max((step.play() for step in steps), key=lambda peaks: peaks.total)
    if rules.stage == 1 and rules.bf16 and rules.sums == 4 and not rules.offload_optimizer:
        return _WholeSums(trace, rules, rank).play()
    return _Partitioned(trace, rules, rank).play()


@functools.lru_cache(maxsize=64)
def _of_gradients(trace: StepTrace) -> tuple[tuple[Event, ...], int]:
    """The gradients of a trace, each with the highest peak since the one before; and that after the
    last one."""
    gradients, peak = [], 0
    for event in trace.events:
        peak = max(peak, event.peak)
        if event.kind == GRADIENT:
            gradients.append(Event(GRADIENT, event.index, peak, event.live))
            peak = event.live
    return tuple(gradients), max(peak, trace.last_peak)


class _Engine:
    """The events of the micro step, which all stages have in common."""

    def __init__(self, trace: StepTrace, rules: StepRules) -> None:
        self.trace, self.rules, self.peaks = trace, rules, Peaks()
        self.trained = [i for i, parameter in enumerate(trace.parameters) if parameter.trained]
        self.groups: dict[int, list[int]] = {}
        for index in self.trained:
            self.groups.setdefault(trace.parameters[index].group, []).append(index)
        self.largest = max(map(self.numel, self.trained), default=0)
        """Elements of the largest parameter that is trained."""

    def numel(self, index: int) -> int:
        return self.trace.parameters[index].numel

    def states(self, sizes: dict[int, int]) -> int:
        """Bytes of the optimizer's states of so many elements, by a parameter of theirs."""
        parameters, width = self.trace.parameters, self.rules.state_width
        return sum(
            size * (MOMENTUM_WIDTH if parameters[index].matrix else width)
            for index, size in sizes.items()
        )

    def total(self, indices: Iterable[int]) -> int:
        return sum(map(self.numel, indices))

    def add_parameters(self) -> None:
        """Count the whole network from now on."""
        num_parameters = self.total(range(len(self.trace.parameters)))
        self.peaks.add(PARAMETERS, self.rules.width * num_parameters + self.trace.buffers)

    def events(self) -> tuple[Sequence[Event], int]:
        """Events at which a gradient is handled, and the peak after the last of them."""
        return _of_gradients(self.trace)

    def run_micro_step(self) -> None:
        """The last one of a step."""
        peaks, activations = self.peaks, 0
        events, last_peak = self.events()
        for event in events:
            peaks.add_once("activations", ACTIVATIONS, event.peak - activations)
            peaks.drop(ACTIVATIONS, activations - event.live)
            activations = event.live
            if event.kind == GRADIENT:
                self.gradient(event.index)
            else:
                self.module(event.kind, event.index)
        peaks.add_once("activations", ACTIVATIONS, last_peak - activations)
        peaks.drop(ACTIVATIONS, activations)

    def gradient(self, index: int) -> None:
        """One is there: on its own, or in the place of that of the micro step before."""
        if self.rules.accumulation == 1:
            self.peaks.add(GRADIENTS, self.rules.width * self.numel(index))

    def module(self, kind: int, index: int) -> None:
        """A module begins or ends; where ``events`` has that."""


class _Unsharded(_Engine):
    """Simulates stage 0 (engine.py)."""

    def play(self) -> Peaks:
        rules, peaks = self.rules, self.peaks
        trained = self.total(self.trained)
        master = 4 if rules.width < 4 else 0
        self.add_parameters()
        states = self.states({index: self.numel(index) for index in self.trained})
        peaks.add(OPTIMIZER, master * trained + states)
        if rules.accumulation > 1:
            peaks.add(GRADIENTS, rules.width * trained)
        self.run_micro_step()
        if rules.world > 1:
            # engine.buffered_allreduce_fallback: a flat copy of 500 million elements at a time.
            sent = rules.sent if rules.sent not in (0, rules.width) else 0
            at_a_time = min(trained, ALL_REDUCED_ELEMENTS)
            peaks.add_once("all-reduce", BUFFERS, (rules.width + sent) * at_a_time)
        # In half precision whole fp32 gradients, beside the others.
        peaks.add_once("update", UPDATE, master * trained + self._temporaries())
        peaks.drop(GRADIENTS, peaks.parts[GRADIENTS])
        return peaks

    def _temporaries(self) -> int:
        """Tensors are updated one after the other; a variable holds the last result of the one
        before until the next one is there."""
        width = self.rules.temporary_width
        last = min(width, 4)
        sizes = [self.numel(i) for _, indices in sorted(self.groups.items()) for i in indices]
        at_once = (width * size + last * before for before, size in pairwise([0, *sizes]))
        return max(at_once, default=0)


class _Partitioned(_Engine):
    """Simulates stages 1 and 2 (stage_1_and_2.py)."""

    def __init__(self, trace: StepTrace, rules: StepRules, rank: int) -> None:
        super().__init__(trace, rules)
        self.rank = rank
        self.partition: dict[int, int] = {}
        """Group -> elements of a partition."""
        self.slices: dict[int, list[tuple[int, int]]] = {}
        """Parameter -> (partition, elements), in order."""
        step = ALIGNMENT * rules.world
        for group, indices in sorted(self.groups.items()):
            size = -(-self.total(indices) // step) * step // rules.world
            self.partition[group] = size
            start = 0
            for index in indices:
                self.slices[index] = list(_cut(start, self.numel(index), size))
                start += self.numel(index)
        self.mine = {
            index
            for index, parts in self.slices.items()
            if any(partition == rank for partition, _ in parts)
        }
        self.whole_mine = self.total(self.mine)
        self.compact = rules.width < 4 and rules.sums == 4
        """Sums of half-precision gradients in fp32."""
        self.bucket: list[int] = []
        self.bucket_elements = 0
        self.held: dict[int, int] = {}
        """Parameter -> bytes of its gradient where it is not in the bucket."""
        self.taken = False
        """There is a buffer for the gradients of this partition."""

    def play(self) -> Peaks:
        rules, peaks = self.rules, self.peaks
        self._initialise()
        boundary_only, several = rules.stage == 1, rules.accumulation > 1
        summed_apart = several and not (boundary_only or self.compact or rules.offload_optimizer)
        buffer_width = 4 if self.compact and rules.stage == 1 else rules.width
        bucket = buffer_width * rules.reduce_bucket * (2 if rules.overlap else 1)
        if several:
            if boundary_only:  # all gradients, whole
                width = 4 if self.compact else rules.width
                for index in self.trained:
                    self._hold(index, width)
            elif self.compact:
                self._take_buffer()
            elif summed_apart:
                # Sums of the micro steps before; this one's are gathered beside them.
                peaks.add(GRADIENTS, rules.width * self.whole_mine)
        # setup_buckets: at the first gradient; at stage 1 that of the first micro step.
        any_gradient = any(event.kind == GRADIENT for event in self.trace.events)
        self._bucket_bytes = bucket if any_gradient else 0
        self._bucket_there = boundary_only and several
        if self._bucket_there:
            peaks.add(BUFFERS, self._bucket_bytes)
        self.run_micro_step()
        if boundary_only and not rules.overlap:
            for group in self.partition:
                for index in self.groups[group]:
                    self._put(index)
        self._reduce()
        peaks.drop(GRADIENTS, sum(self.held.values()))
        self.held.clear()
        if self._bucket_there:
            peaks.drop(BUFFERS, self._bucket_bytes)
        if summed_apart and self.taken:  # this micro step's are in the sums
            peaks.drop(GRADIENTS, rules.width * self.whole_mine)
        self._update()
        return peaks

    def _initialise(self, *, sums: int = 0) -> None:
        """``sums``: bytes of the sums that each rank has of a whole gradient, by element."""
        rules, peaks = self.rules, self.peaks
        self.add_parameters()
        for group, size in self.partition.items():
            padded = size * rules.world
            # Flattened beside the parameters, which then are views of it.
            peaks.add_once("initialisation", PARAMETERS, rules.width * padded)
            peaks.add(PARAMETERS, rules.width * (padded - self.total(self.groups[group])))
            if rules.width < 4:  # clone().to(fp32)
                peaks.add_once("initialisation", OPTIMIZER, (rules.width + 4) * size)
            if rules.offload_optimizer:
                # Master weights and their gradient, and what goes back to the device.
                peaks.host += (4 + 4 + rules.width) * size
            else:
                peaks.add(OPTIMIZER, 4 * size)
            peaks.add(GRADIENTS, sums * padded)
        states = self.states({self.groups[g][0]: size for g, size in self.partition.items()})
        if rules.offload_optimizer:
            peaks.host += states + rules.width * self.largest
            peaks.add(BUFFERS, rules.width * self.largest)  # temp_grad_buffer_for_gpu_offload
            if rules.accumulation > 1 and not self.compact:
                peaks.host += rules.width * self.whole_mine  # accumulated_grads_in_cpu
        else:
            peaks.add(OPTIMIZER, states)

    def gradient(self, index: int) -> None:
        rules, peaks = self.rules, self.peaks
        if not self._bucket_there:
            self._bucket_there = True
            peaks.add(BUFFERS, self._bucket_bytes)
        width = rules.width
        if rules.stage == 1:
            if self.compact:  # _fill_param_grad_accum_attribute
                peaks.add_once("gradients", GRADIENTS, (width + 4) * self.numel(index))
                width = 4
            if index not in self.held:  # not one that is summed over micro steps
                self._hold(index, width)
            if rules.overlap:
                self._put(index)
            return
        self._hold(index, width)
        self._put(index)

    def _hold(self, index: int, width: int) -> None:
        size = width * self.numel(index)
        self.held[index] = size
        self.peaks.add(GRADIENTS, size)

    def _put(self, index: int) -> None:
        """Put a gradient into its bucket (``reduce_independent_p_g_buckets_and_remove_grads``)."""
        numel = self.numel(index)
        if self.bucket_elements + numel > self.rules.reduce_bucket:
            self._reduce()
        if numel <= self.rules.reduce_bucket and index in self.held:
            # Copied into the bucket, and now a view of it.
            self.peaks.drop(GRADIENTS, self.held.pop(index))
        elif self.rules.offload_optimizer:  # grad_reduc.data = clone
            self.peaks.add_once("gradients", GRADIENTS, self.held.get(index, 0))
        self.bucket.append(index)
        self.bucket_elements += numel

    def _reduce(self) -> None:
        """Reduce as ``reduce_ipg_grads``, ``average_tensor`` and ``copy_grads_in_partition`` do."""
        rules, peaks = self.rules, self.peaks
        if not self.bucket:
            return
        width = 4 if self.compact and rules.stage == 1 else rules.width
        slices = [self.slices[index] for index in self.bucket]
        copied = _largest_copy(slices, rules.reduce_bucket, merge=not self.compact)
        pieces = [size for parts in slices for rank, size in parts if rank == self.rank]
        if self.compact and pieces:
            self._take_buffer()
        size, sent = width * copied, rules.sent or rules.width
        if width != sent:
            size += sent * (copied or max((n for parts in slices for _, n in parts), default=0))
        if self.compact:  # source.to(output.dtype)
            size += 4 * max(pieces, default=0)
        peaks.add_once("reduction", BUFFERS, size)
        for index in self.bucket:
            is_mine = index in self.mine
            if is_mine and not self.compact:
                self._take_buffer()
            if is_mine and rules.offload_optimizer:
                piece = max(size for rank, size in self.slices[index] if rank == self.rank)
                peaks.add_once("norm", UPDATE, NORM_WIDTH * piece)
            # Sums that are in their buffer: a gradient of stage 2 stays until the pass has ended.
            stays = self.compact and rules.stage == 2 and is_mine and not rules.offload_optimizer
            if index in self.held and (is_mine or rules.stage == 2) and not stays:
                peaks.drop(GRADIENTS, self.held.pop(index))
        self.bucket, self.bucket_elements = [], 0

    def _take_buffer(self) -> None:
        if self.taken or (self.rules.offload_optimizer and not self.compact):
            return
        self.taken = True
        # grads_in_partition has the dtype of the parameters, and those at its ends whole.
        whole = self.rules.width * self.whole_mine
        self.peaks.add(GRADIENTS, 4 * sum(self.partition.values()) if self.compact else whole)

    def _update(self) -> None:
        """step: norms in fp64, gradients flattened group by group, the optimizer."""
        rules, peaks = self.rules, self.peaks
        if rules.offload_optimizer:
            return
        pieces = (n for parts in self.slices.values() for rank, n in parts if rank == self.rank)
        peaks.add_once("norm", UPDATE, NORM_WIDTH * max(pieces, default=0))
        for group, size in self.partition.items():
            if self.compact:  # flat already
                peaks.add_once("update", UPDATE, rules.temporary_width * size)
                peaks.drop(GRADIENTS, 4 * size)
                continue
            flat = rules.width * size
            peaks.add_once("update", UPDATE, flat + (4 * size if rules.width < 4 else 0))
            if group == max(self.partition):
                # What was gathered is freed with the last view of it.
                peaks.drop(GRADIENTS, peaks.parts[GRADIENTS])
            peaks.add_once("update", UPDATE, (4 + rules.temporary_width) * size)


class _WholeSums(_Partitioned):
    """Stage 1 in bf16 with fp32 sums over micro steps (bf16_optimizer.py): each rank has all sums,
    beside the gradients."""

    gradient = _Engine.gradient

    def play(self) -> Peaks:
        rules, peaks = self.rules, self.peaks
        self._initialise(sums=4)
        gradients = rules.width * self.total(self.trained)
        if rules.accumulation > 1:  # those of the micro step before, zeroed
            peaks.add(GRADIENTS, gradients)
        self.run_micro_step()
        peaks.add_once("sum", GRADIENTS, 4 * self.largest)  # _update_hp_grad
        sizes = self.partition.values()
        if rules.world > 1:
            flat = [size * rules.world for size in sizes]
            peaks.add_once("all-reduce", BUFFERS, _all_reduced(flat, rules.sent or rules.width))
        peaks.add_once("update", UPDATE, rules.temporary_width * max(sizes, default=0))
        peaks.drop(GRADIENTS, gradients)
        return peaks


class _Sharded(_Engine):
    """Stage 3 (stage3.py, partitioned_param_coordinator.py).

    ``first``: the first step, which counts with hpZ: the second copy is whole since the network was
    partitioned. Nothing is fetched ahead in it, nothing kept, and moments are made by its update.
    In later steps that copy comes parameter by parameter, as they are released.
    """

    def __init__(self, trace: StepTrace, rules: StepRules, *, first: bool = False) -> None:
        super().__init__(trace, rules)
        self.first = first
        self.part = [-(-parameter.numel // rules.world) for parameter in trace.parameters]
        self.persistent = {
            index
            for index, parameter in enumerate(trace.parameters)
            if parameter.numel <= rules.persistence
        }
        self.second: set[int] = set()
        """The parameters that have a second copy."""
        self.coordinator = _Coordinator(self)
        self.bucket: list[int] = []
        self.bucket_elements = 0
        self.held: dict[int, int] = {}

    def events(self) -> tuple[Sequence[Event], int]:
        return self.trace.events, self.trace.last_peak

    def play(self) -> Peaks:
        rules, peaks = self.rules, self.peaks
        shard = sum(self.part[index] for index in self.trained)
        num_elements = sum(self.part)
        if rules.offload_param:
            peaks.host += rules.width * num_elements
        else:
            peaks.add(PARAMETERS, rules.width * num_elements)
        for index, parameter in enumerate(self.trace.parameters):
            # invalidate_secondary_tensor leaves those that are not trained.
            second_copy_kept = rules.accumulation > 1 and index not in self.persistent
            if self.first or second_copy_kept or not parameter.trained:
                self.partitioned(index)
        peaks.add(PARAMETERS, self.trace.buffers)
        # Whole on every rank, beside their parts.
        if rules.world > 1:
            peaks.add(PARAMETERS, rules.width * self.total(self.persistent))
        # In fp32 too: _create_fp32_partitions compares a device with its name.
        states = self.states({index: self.part[index] for index in self.trained})
        state_bytes = 4 * shard + (0 if self.first else states)
        if rules.offload_optimizer:
            # And a gradient for the optimizer, and the sums over micro steps.
            peaks.host += state_bytes + (4 + rules.sums) * shard
        else:
            peaks.add(OPTIMIZER, state_bytes)
            peaks.add(GRADIENTS, rules.sums * shard)
        peaks.add(BUFFERS, rules.width * rules.reduce_bucket)
        sharded = peaks.parts[PARAMETERS]
        self.run_micro_step()
        self._reduce()
        self.coordinator.release_all()
        peaks.gathered = peaks.most[PARAMETERS] - sharded
        if self.first:
            peaks.add(OPTIMIZER, states)
        if not rules.offload_optimizer:
            # has_overflow: |gradients|, and what is infinite.
            peaks.add_once("overflow", UPDATE, (rules.sums + 1) * shard)
            for group in self._sub_groups():
                flat = rules.sums * group if len(self.trained) > 1 else 0
                if rules.sums < 4:
                    peaks.add_once("update", UPDATE, (rules.sums + 4) * group)
                    flat = 4 * group
                peaks.add_once("update", UPDATE, flat + rules.temporary_width * group)
        return peaks

    def partitioned(self, index: int) -> None:
        """_partition_param_sec: the second copy of hpZ, made where there is none."""
        if self.rules.hpz > 1 and index not in self.second:
            self.second.add(index)
            padded = self.part[index] * self.rules.world
            group = min(self.rules.hpz, self.rules.world)
            self.peaks.add(PARAMETERS, self.rules.width * (padded // group))

    def _sub_groups(self) -> list[int]:
        """The elements of each group of ``_create_fp16_sub_groups``."""
        sizes = []
        for indices in self.groups.values():
            size = 0
            for index in indices:
                size += self.part[index]
                if size >= self.rules.sub_group:
                    sizes.append(size)
                    size = 0
            sizes.append(size)
        return sizes

    def module(self, kind: int, index: int) -> None:
        if self.rules.world == 1:
            return
        if kind in (FETCH, FETCH_BACKWARD):
            self.coordinator.fetch(index)
        elif kind in (RELEASE, RELEASE_BACKWARD):
            self.coordinator.release(index)

    def gradient(self, index: int) -> None:
        rules, numel = self.rules, self.numel(index)
        size = rules.width * numel
        if self.bucket and self.bucket_elements + numel > rules.reduce_bucket:
            self.peaks.add(GRADIENTS, size)  # it waits
            self._reduce()
            self.peaks.drop(GRADIENTS, size)
        if self.bucket_elements + numel > rules.reduce_bucket:
            self.held[index] = size
            self.peaks.add(GRADIENTS, size)
        self.bucket.append(index)
        self.bucket_elements += numel

    def _reduce(self) -> None:
        """Reduce as ``__avg_scatter_grads`` does (reduce_scatter_coalesced, partition_grads)."""
        rules, peaks = self.rules, self.peaks
        if not self.bucket:
            return
        alone = len(self.bucket) == 1 and self.numel(self.bucket[0]) % rules.world == 0
        padded = sum(self.part[index] for index in self.bucket) * rules.world
        sent = rules.sent or rules.width
        copied = 0 if alone else padded * sent
        cast = self.total(self.bucket) * sent if sent != rules.width else 0
        parts = padded // rules.world * rules.sums if rules.sums != sent else 0
        peaks.add_once("reduction", BUFFERS, cast + copied + parts)
        if rules.offload_optimizer:  # _constant_buffered_norm2, of each part
            largest = max(self.part[index] for index in self.bucket)
            peaks.add_once("norm", BUFFERS, copied + parts + NORM_WIDTH * largest)
        for index in self.bucket:
            peaks.drop(GRADIENTS, self.held.pop(index, 0))
        self.bucket, self.bucket_elements = [], 0


class _Coordinator:
    """The parameters that stage 3 has gathered: fetched for a module, ahead of it, or kept for its
    next use; from the third micro step on, when it knows the order of modules."""

    def __init__(self, engine: _Sharded) -> None:
        self.engine, trace = engine, engine.trace
        self.modules = trace.modules
        self.order = [
            event.index for event in trace.events if event.kind in (FETCH, FETCH_BACKWARD)
        ]
        self.queue = deque(
            (index, step)
            for step, module in enumerate(self.order)
            for index in sorted(set(self.modules[module]))
        )
        self.step = 0
        self.available: set[int] = set(engine.persistent)
        self.elements = 0
        self.fetched_for: dict[int, int] = {}
        self.active: dict[int, int] = {}
        self.in_flight: dict[int, _Gathering] = {}
        self.before = [0]
        """Elements of the modules before each step."""
        self.uses: dict[int, list[int]] = {}
        """Parameter -> the steps at which a module needs it."""
        for step, module in enumerate(self.order):
            for index in set(self.modules[module]):
                self.uses.setdefault(index, []).append(step)
            self.before.append(self.before[-1] + engine.total(set(self.modules[module])))

    def fetch(self, module: int) -> None:
        rules, needed = self.engine.rules, set(self.modules[module])
        self._gather(index for index in sorted(needed) if not self._there(index))
        for index in needed:
            self.active[index] = self.active.get(index, 0) + 1
            if index in self.in_flight:
                self._wait(index)
        fresh = {index for index in needed if self.fetched_for.get(index, -1) < self.step}
        popped: set[int] = set()
        while self.queue and len(popped) < len(fresh):
            index, step = self.queue.popleft()
            self.fetched_for[index] = step
            popped.add(index)
        room = min(rules.max_live - self.elements, rules.prefetch_bucket)
        room = 0 if self.engine.first else room
        ahead: list[int] = []
        elements = 0
        while self.queue and elements < room:
            index, step = self.queue.popleft()
            if not self._there(index) and index not in ahead:
                ahead.append(index)
                elements += self.engine.numel(index)
            self.fetched_for[index] = max(self.fetched_for.get(index, -1), step)
        self._gather(sorted(ahead))
        self.step += 1

    def release(self, module: int) -> None:
        for index in set(self.modules[module]):
            self.active[index] = max(0, self.active.get(index, 0) - 1)
            if index in self.engine.persistent or index not in self.available:
                continue
            # The first step does not know what is used again.
            if self.active[index] or (not self.engine.first and self._is_used_soon(index)):
                continue
            self._free(index)

    def _is_used_soon(self, index: int) -> bool:
        """Whether it was fetched for a later module, or is needed within ``max_reuse_distance``."""
        if self.fetched_for.get(index, -1) > self.step:
            return True
        later = next((use for use in self.uses.get(index, ()) if use >= self.step), None)
        start = self.before[min(self.step, len(self.before) - 1)]
        distance = self.engine.rules.max_reuse_distance
        return later is not None and self.before[later] - start < distance

    def release_all(self) -> None:
        for index in list(self.in_flight):
            self._wait(index)
        for index in sorted(self.available - self.engine.persistent):
            self._free(index)

    def _there(self, index: int) -> bool:
        return index in self.available or index in self.in_flight

    def _gather(self, indices: Iterable[int]) -> None:
        missing = list(indices)
        if not missing:
            return
        engine = self.engine
        self.elements += engine.total(missing)
        size = sum(engine.part[index] for index in missing) * engine.rules.world
        gathering = _Gathering(tuple(missing), size * engine.rules.width, len(missing))
        engine.peaks.add(PARAMETERS, gathering.size)
        self.in_flight |= dict.fromkeys(missing, gathering)

    def _wait(self, index: int) -> None:
        """Several are gathered in one buffer, and then copied out of it, all when the first of them
        is needed; the buffer goes when the last one is. A single one is a view of it."""
        engine, gathering = self.engine, self.in_flight.pop(index)
        if not gathering.arrived:
            gathering.arrived = True
            size = engine.rules.width * engine.total(gathering.parameters)
            in_one_buffer = len(gathering.parameters) > 1
            engine.peaks.add(PARAMETERS, size if in_one_buffer else size - gathering.size)
            self.available.update(gathering.parameters)
        gathering.waiting -= 1
        if not gathering.waiting and len(gathering.parameters) > 1:
            engine.peaks.drop(PARAMETERS, gathering.size)

    def _free(self, index: int) -> None:
        self.engine.partitioned(index)
        self.available.discard(index)
        self.elements -= self.engine.numel(index)
        self.engine.peaks.drop(PARAMETERS, self.engine.rules.width * self.engine.numel(index))


@dataclass(eq=False)
class _Gathering:
    parameters: tuple[int, ...]
    size: int
    waiting: int
    """Parameters that no module has waited for yet."""
    arrived: bool = False


def _cut(start: int, numel: int, size: int) -> Iterable[tuple[int, int]]:
    """(partition, elements) of a parameter that lies at ``start``."""
    stop = start + numel
    while start < stop:
        partition = start // size
        end = min(stop, (partition + 1) * size)
        yield partition, end - start
        start = end


def _largest_copy(
    parameters: Iterable[Sequence[tuple[int, int]]], bucket: int, *, merge: bool
) -> int:
    """Elements that allreduce_and_scatter copies at a time: slices of the bucket, those of one
    partition that lie side by side as one (``merge``); a single one is reduced where it lies."""
    pieces: list[tuple[int, int]] = []
    for slices in parameters:
        for partition, size in slices:
            if merge and pieces and pieces[-1][0] == partition:
                pieces[-1] = partition, pieces[-1][1] + size
            else:
                pieces.append((partition, size))
    largest = count = elements = 0
    for _, size in pieces:
        count, elements = count + 1, elements + size
        if elements > bucket:
            largest = max(largest, elements if count > 1 else 0)
            count = elements = 0
    return max(largest, elements if count > 1 else 0)


def _all_reduced(sums: Iterable[int], sent: int) -> int:
    """Bytes that allreduce_no_retain takes at most for fp32 sums of so many elements, one tensor a
    group: several flat beside each other, a single one as it is; and that in the dtype in which
    they are ``sent``."""
    width = sent if sent != 4 else 0
    largest = count = elements = 0
    for size in [*sums, 0]:
        count, elements = count + (size > 0), elements + size
        if elements > ALL_REDUCED_ELEMENTS or not size:
            largest = max(largest, ((4 if count > 1 else 0) + width) * elements)
            count = elements = 0
    return largest
