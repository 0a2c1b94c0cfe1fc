"""Predicted time of one optimizer step of a plan. Pure arithmetic, milliseconds; nothing is run.

``step_time(exp, plan)`` is computing on the slowest rank, what of the communication it does not
hide, the update, and copies to host memory. What each part takes is its work over a peak of the
data sheet times the part of it that is reached: ``REACHED``, ``MOVED`` and ``*_REACHED`` are
assumptions, which finished runs replace (``LearnedSpeeds``). See docs/development/predictions.md.

What is sent, M bytes of gradients or of parameters, P ranks, ring collectives (an all-gather or a
reduce-scatter sends M (P-1)/P by rank, an all-reduce twice that):

- stages as in "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
  (arXiv:1910.02054, section 7), but as DeepSpeed 0.19.8 runs them: stages 1 and 2 *all-reduce*
  their buckets (``use_multi_rank_bucket_allreduce``, ``stage_1_and_2.py: average_tensor``), so
  that they send 3 M where the paper has 2 M; stage 1 once a step (``engine.py:
  allreduce_gradients``), stage 2 in every micro step; both gather the parameters after the update.
  Stage 3 gathers them in every forward and backward pass, but for those that it keeps between the
  two (``max_reuse_distance``).
- ZeRO++ (arXiv:2306.10209): qwZ gathers 8 bits; with hpZ a step's first forward pass gathers over
  all ranks, and everything after it within a group of ``hpz_partition_size`` (the second copy is
  given up after the update alone, ``stage3.py: invalidate_secondary_tensor``); qgZ sends 4 bits in
  two all-to-alls, within a host and then between hosts.

``python -m pytest tests/unit/test_plan_step_time.py``
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from itertools import zip_longest

from llmx import text as human
from llmx.config.accelerators import ACCELERATORS
from llmx.config.schema import DeviceConfig, Experiment
from llmx.plan.balance import NOT_HIDDEN, even_batch
from llmx.plan.by_device import checkpointing_on, on_device
from llmx.plan.ds_config import bucket_sizes
from llmx.plan.memory import BYTES, optimizer_bytes, samples_of
from llmx.plan.network import Network
from llmx.plan.rollout_time import SamplerSpeed, Samples
from llmx.plan.types import BatchPlan, DrawnSamples, Exchange, Plan, RolloutTime, TimePlan

REACHED = {7.0: (0.4, 0.2), 7.5: (0.4, 0.2), 8.0: (0.75, 0.35), 9.0: (0.62, 0.17)}
"""Parts of the 16-bit peak that matrix products and attention (its causal half) reach, by compute
capability. Of 8.0 and 9.0 they are fitted to llm-foundry's tables (benchmarks/plan_published.py),
of the others guessed."""
REACHED_ELSEWHERE = (0.6, 0.25)
MOVED = {"rms_norm": 70.0, "liger": 30.0, "other": 21.0, "lora": 50.0}
"""How often a forward pass moves the hidden states of a layer through memory beside products:
norms, rotary embedding, activation, residuals, each an operation of its own; a LoRA adapter's sums
come on top. Counted by hand from the operations of transformers and peft. A backward pass moves
twice as much."""
LOGIT_BYTES = 40.0
"""Moved for each token and entry of the vocabulary, by the loss."""
UNPACKED_REACHED = 0.27
"""The part of the memory's GB/s that is reached while 4-bit weights are unpacked: half a byte is
read and two are written (fitted to Qwen-7B in rows of 1,024 tokens, QLoRA against LoRA)."""
MEMORY_REACHED = 0.7
LINK_REACHED = 0.75
"""Parts of a data sheet's GB/s that are reached."""
LAYER_S = 0.5e-3
"""Launching the kernels of a layer, forward and backward, takes a CPU so long: a GPU cannot be
faster, however small the micro batch."""
STAGE_3_LAYER_S = 3e-3
"""The work of DeepSpeed at ZeRO-3 before and after each module of a layer, forward and backward: 2
ms where the weights are kept, 4 where they are gathered (Llama's 13 modules, DeepSpeed 0.19.8,
against stage 1, one core of an AMD EPYC). A GPU has it done while it computes, if that takes
longer."""
SELECTIVE = 0.1
"""The part of a forward pass that selective checkpointing computes again: it moves memory only."""
NOMINAL = Network(
    10**9, 10**9, *(0,) * 7, forward_flops=2e9, backward_flops=4e9, attention_flops=0.0,
    head_flops=0.0, rms_norm=False,
)  # fmt: skip
NOMINAL_LAYER_S = 1e-4
"""A network, and a layer's own time, for an order of candidates alone, where nothing is known."""
NETWORK_GBIT_PER_S = 10.0
"""The speed of the network where the config does not say."""
HOST_MEMORY_GB_PER_S = 100.0
"""The speed of a host's RAM during an update there, which all ranks of a host share. A guess."""
PUSHED_GB_PER_S = 0.6
"""The speed at which one core of rank 0's host and one of a server's copy, save, hash (0.96 GB/s
alone) and load the weights of a push."""
NVME_GB_PER_S = 3.0
GB = 1e9


@dataclass(frozen=True)
class LearnedSpeeds:
    """The speeds that finished runs have shown, in place of assumptions."""

    tflops: Mapping[str, float] = field(default_factory=dict)
    """TFLOP/s that a device reaches, by type; recomputed activations are counted."""
    with_unpacking: frozenset[str] = frozenset()
    """Devices whose speed is from runs that unpacked weights of 4 bits."""
    at_stage_3: frozenset[str] = frozenset()
    """Types of devices whose speed is of runs at ZeRO-3: what that adds to each layer is in it."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the smallest micro batch of those runs, by type of device."""
    source: str = ""
    """The source in words: ``learned from 3 runs``."""


NOTHING = LearnedSpeeds()


def step_time(
    exp: Experiment,
    plan: Plan,
    *,
    learned: LearnedSpeeds = NOTHING,
    nominal: bool = False,
) -> TimePlan:
    """The predicted time of an optimizer step, and what follows from it; ``step_s`` is 0, and
    ``unknown`` says why, where it cannot be told. ``nominal``: with nominal numbers for what is not
    known."""
    if nominal and plan.network is None:
        plan = replace(plan, network=NOMINAL, num_parameters=NOMINAL.num_parameters)
    samples = samples_of(exp, plan)
    if plan.drawn is not None:
        plan = replace(plan, batch=_generated_batch(plan.batch, plan.drawn))
    return _Prediction(exp, plan, learned, nominal=nominal).predict(samples)


def _generated_batch(batch: BatchPlan, drawn: DrawnSamples) -> BatchPlan:
    """The batch as it is trained: every prompt has become a group of completions."""
    size = drawn.group_size
    return replace(
        batch,
        global_batch=batch.global_batch * size,
        accumulation=batch.accumulation * size,
        sizes=tuple(sizes * size for sizes in batch.sizes),
    )


def tokens_per_s(exp: Experiment, plan: Plan) -> float:
    """The speed that puts candidates in an order (``tune``, ``auto``, advice). Where nothing is
    known it follows from nominal numbers, and promises nothing."""
    time = plan.time
    if time is None or not time.tokens_per_s:
        time = step_time(exp, plan, nominal=True)
    # Of buckets the plan knows no better than llmx's own choice.
    return time.tokens_per_s / (1.0 if exp.zero.reduce_bucket_size is None else 1.001)


@dataclass(frozen=True)
class TokenFlops:
    """Floating point operations of one token."""

    forward: float
    backward: float
    """The backward pass, without what is computed again."""
    again: float = 0.0
    """What activation checkpointing computes again."""
    attention: float = 0.0
    """The part of all of them that attention computes."""
    moved: float = 0.0
    """Bytes that go through memory beside them."""

    @property
    def model(self) -> float:
        """The operations that MFU counts."""
        return self.forward + self.backward

    @property
    def run(self) -> float:
        """All operations, also what is computed again."""
        return self.model + self.again


def flops_by_device(exp: Experiment, plan: Plan) -> dict[str, TokenFlops]:
    """The FLOPs of a token by type of device, in the model as it is trained and in the networks
    beside it; empty where the model is not known."""
    if plan.network is None:
        return {}
    networks = [plan.network]
    networks += [b.network for b in plan.beside if b.network and not b.before_training]
    flops = {}
    for name in plan.devices:
        parts = [astuple(_flops_of(on_device(exp, name), plan, network)) for network in networks]
        flops[name] = TokenFlops(*map(sum, zip(*parts, strict=True)))
    return flops


def _flops_of(exp: Experiment, plan: Plan, network: Network) -> TokenFlops:
    """The FLOPs of a token in one network."""
    forward, attention = network.forward_flops, network.attention_flops
    if not network.num_trained:
        return TokenFlops(forward, 0.0, attention=attention)
    checkpointing = exp.model.activation_checkpointing
    again, passes = 0.0, 3
    if checkpointing == "full":
        again, passes = forward - network.head_flops, 4
    elif checkpointing == "selective":
        again = SELECTIVE * forward
    times = MOVED["other"]
    if network.rms_norm:
        times = MOVED["liger" if exp.model.liger_kernel else "rms_norm"]
    times += MOVED["lora"] if exp.adapter.kind == "lora" else 0.0
    moved = BYTES[plan.precision] * network.hidden_size * network.num_layers * times * passes
    logits = LOGIT_BYTES * network.vocab_size if network.head_flops else 0.0
    return TokenFlops(
        forward, network.backward_flops, again, attention=attention * passes, moved=moved + logits
    )


def computing_parts(exp: Experiment, plan: Plan) -> dict[str, float]:
    """FLOPs of a step of the busiest rank on each type of device, as they are run."""
    per_token = flops_by_device(exp, plan)
    flops: dict[str, float] = {}
    for rank in plan.ranks:
        tokens = sum(plan.batch.sizes_of(rank.rank)) * plan.batch.seq_len
        flops[rank.device] = max(flops.get(rank.device, 0.0), per_token[rank.device].run * tokens)
    return flops


@dataclass(frozen=True)
class _Sent:
    """One kind of communication of a step."""

    name: str
    size: float
    """Bytes that a rank sends."""
    hidden_by: str = ""
    """``forward``, ``backward`` or ``last backward``; empty: nothing is computed meanwhile."""
    link: str = "all"
    """``all`` ranks, those ``inside`` a host, or a ring ``between`` hosts."""


class _Prediction:
    def __init__(
        self,
        exp: Experiment,
        plan: Plan,
        learned: LearnedSpeeds,
        *,
        nominal: bool = False,
    ) -> None:
        self.exp, self.plan, self.learned, self.nominal = exp, plan, learned, nominal
        self.devices = {rank.device: exp.hardware.devices[rank.device] for rank in plan.ranks}
        self.by_device = flops_by_device(exp, plan)
        self.flops = next(iter(self.by_device.values()), None)
        """The FLOPs for what does not depend on what is computed again."""
        self.width = BYTES[plan.precision]
        self.elements, self.trained = plan.num_parameters, plan.trained
        self.sources: list[str] = []

    def predict(self, samples: Samples | None) -> TimePlan:
        """The time of a step. ``samples``: what the step draws before it trains on them; None where
        it reads them, or the time of drawing is not known."""
        plan, flops = self.plan, self.flops
        if flops is None or not self.elements:
            return TimePlan(unknown="the size of the model is not known on this machine")
        for name, device in self.devices.items():
            if not self._tflops(name, device):
                return self._without_speed(name)
        busy_s, computed = self._computing(plan.batch)
        sent = [exchange for exchange in self._sent() if exchange.size]
        seconds = [self._seconds(exchange) for exchange in sent]
        slowest = plan.ranks[max(range(len(busy_s)), key=busy_s.__getitem__)].device
        exposed = self._exposed(sent, seconds, computed, self.by_device[slowest])
        update, host = self._update(), self._offload()
        update_s = computed + exposed + update + host  # of one optimizer update
        even = self._even()
        step_s, updates = update_s, 1
        rollout: RolloutTime | None = None
        bottleneck = self._bottleneck(busy_s, computed, sum(seconds), exposed, update, host)
        if samples is not None and not self.nominal:
            updates = samples.drawn.updates
            drawing = self._drawing(samples, trains_s=update_s * updates)
            if isinstance(drawing, TimePlan):
                return drawing
            rollout, step_s = drawing, drawing.step_s
            if rollout.draws_s > rollout.trains_s:
                bottleneck = "drawing samples"
        tokens = plan.batch.tokens_per_step
        hours = step_s * (plan.total_steps or 0) / 3600
        servers = sum(host.slots for host in plan.rollout_hosts) if rollout else 0
        return TimePlan(
            step_s=step_s,
            computing_s=computed * updates,
            communication_s=sum(seconds) * updates,
            exposed_s=exposed * updates,
            update_s=update * updates,
            host_s=host * updates,
            flops=flops.model * tokens * updates,
            tokens_per_s=tokens / step_s,
            mfu=tuple(self._mfu(flops.model * updates, step_s)),
            idle=tuple((computed - rank_s) * updates / step_s for rank_s in busy_s),
            even_step_s=step_s + (even - update_s) * updates if even else 0.0,
            bottleneck=bottleneck,
            exchanges=tuple(
                Exchange(exchange.name, exchange.size * updates / GB, exchange_s)
                for exchange, exchange_s in zip(sent, seconds, strict=True)
            ),
            hours=hours,
            device_hours=hours * (plan.world_size + servers),
            cost=self._cost(hours),
            sources=tuple(dict.fromkeys(self.sources)),
            rollout=rollout,
        )

    def _without_speed(self, name: str) -> TimePlan:
        key = f"hardware.devices.{name}.peak_tflops.{self.plan.precision}"
        return TimePlan(unknown=f"{key} is not set, and no run on it has been seen")

    # Drawing.

    def _drawing(self, samples: Samples, *, trains_s: float) -> RolloutTime | TimePlan:
        """The parts of a step that draws its samples; what is unknown, where a device that draws
        has no known speed. ``trains_s``: all updates of a step."""
        plan, drawn = self.plan, samples.drawn
        servers = [host for host in plan.rollout_hosts for _ in range(host.slots)]
        speeds = []
        for name in [host.device for host in servers] or [rank.device for rank in plan.ranks]:
            speed = self._sampler_speed(name)
            if speed is None:
                return self._without_speed(name)
            speeds.append(speed)
        if servers:
            by_device = samples.by_servers_s(speeds, world=plan.world_size)
        else:
            by_device = samples.by_ranks_s(speeds)
        busy_s: dict[str, list[float]] = {}
        for host, seconds in zip(servers, by_device, strict=False):
            busy_s.setdefault(host.name, []).append(seconds)
        rollout = RolloutTime(
            draws_s=max(by_device),
            trains_s=trains_s,
            weights_s=self._weights(len(servers)),
            overlaps=bool(servers) and self.exp.rollout.max_staleness > 0,
        )
        self.sources.append(
            f"{samples.num_prompts:,} prompts{human.TIMES}"
            f"{human.plural(drawn.group_size, 'completion')} of {drawn.new_tokens:,} tokens "
            "(assumed: all of full length)"
        )
        return replace(
            rollout,
            training_idle=1 - trains_s / rollout.step_s if servers else 0.0,
            drawing_idle=tuple(
                (name, 1 - sum(seconds) / len(seconds) / rollout.step_s)
                for name, seconds in busy_s.items()
            ),
        )

    def _sampler_speed(self, name: str) -> SamplerSpeed | None:
        """The speed of a device that draws; None where neither a run nor a data sheet tells it."""
        device = self.exp.hardware.devices[name]
        products, _ = REACHED.get(device.compute_capability, REACHED_ELSEWHERE)
        tflops = self.learned.tflops.get(name) or self._peak(device) * products
        if not tflops:
            return None
        self._gb_per_s(name, "memory_gb_per_s", to="its memory")
        layer_s = LAYER_S / 3 if ACCELERATORS[device.accelerator].is_gpu else 0.0
        return SamplerSpeed(tflops * 1e12, self._memory_speed(device), layer_s)

    def _weights(self, servers: int) -> float:
        """Seconds until the weights of a step are where samples are drawn: ZeRO-3 gathers them, and
        rank 0 packs what is trained and sends it to each server over its network."""
        seconds, world = 0.0, self.plan.world_size
        if self.exp.zero.stage == 3 and world > 1:
            size = self.width * self.elements * (world - 1) / world
            seconds += self._seconds(_Sent("all-gather for drawing", size))
        if servers:
            assert self.plan.network is not None
            policy = self.plan.network.num_trained
            sending_s = servers / (self._network() * LINK_REACHED)
            seconds += self.width * policy / GB * (sending_s + 1 / PUSHED_GB_PER_S)
        return seconds

    # Computing.

    def _tflops(self, name: str, device: DeviceConfig) -> float:
        """TFLOP/s that a device reaches; 0 where neither a run nor a data sheet tells."""
        precision = self.plan.precision
        if name in self.learned.tflops:
            reached = self.learned.tflops[name]
            self.sources.append(f"{name}: {reached:.3g} TFLOP/s, {self.learned.source}")
            return reached
        peak, reached = self._peak(device), self._assumed_tflops(name, device)
        if peak:
            part = reached / peak
            self.sources.append(f"{name}: {part:.0%} of {peak:g} TFLOP/s in {precision} (assumed)")
        return reached

    def _assumed_tflops(self, name: str, device: DeviceConfig) -> float:
        """Products and attention at their parts of the peak, and what moves through memory."""
        peak, flops = self._peak(device), self.by_device[name]
        products, attention = REACHED.get(device.compute_capability, REACHED_ELSEWHERE)
        if not peak or not ACCELERATORS[device.accelerator].is_gpu:
            return peak * products
        moving = flops.moved / self._memory_speed(device)
        seconds = (flops.run - flops.attention) / products + flops.attention / attention
        return flops.run / 1e12 / (seconds / (peak * 1e12) + moving)

    def _peak(self, device: DeviceConfig) -> float:
        """TFLOP/s of the data sheet; 0: not known."""
        nominal = ACCELERATORS[device.accelerator].nominal_tflops if self.nominal else 0.0
        return device.peak_tflops.get(self.plan.precision, 0.0) or nominal

    def _unpacking(self, name: str) -> float:
        """Seconds that a micro batch unpacks weights of 4 bits: in each pass all of them. The speed
        of a run that did so contains it."""
        network = self.plan.network
        if network is None or not network.num_packed or name in self.learned.with_unpacking:
            return 0.0
        passes = 3 if checkpointing_on(self.exp, name) == "full" else 2
        speed = self._memory_speed(self.devices[name]) / MEMORY_REACHED * UNPACKED_REACHED
        return passes * network.num_packed * (0.5 + 2.0) / speed

    def _limits(self, name: str, samples: int) -> dict[str, float]:
        """Seconds of the forward and backward pass of a micro batch by each of its limits, the
        largest of which counts."""
        device, flops = self.devices[name], self.by_device[name]
        work = flops.run * self.plan.batch.seq_len * samples / 1e12
        rate = self._tflops(name, device)
        layers = self.plan.network.num_layers if self.plan.network else 0
        layers_run = layers * flops.run / flops.model
        hooks = 0.0
        if self.exp.zero.stage == 3 and name not in self.learned.at_stage_3:
            hooks = STAGE_3_LAYER_S * layers_run
        if not ACCELERATORS[device.accelerator].is_gpu:
            if self.nominal:
                hooks += NOMINAL_LAYER_S * layers_run
            return {"computing": work / rate + hooks}  # by the same cores
        # Weights are read forward and backward, and their gradients written.
        reading = 3 * self.width * self.elements / self._memory_speed(device)
        at_least = {"launching kernels": LAYER_S * layers_run, "reading weights": reading}
        if name in self.learned.tflops:
            # No more than the micro batch took that was seen.
            seen_s = flops.run * self.learned.tokens.get(name, 0) / 1e12 / rate
            if 0 < seen_s <= max(at_least.values()):  # it did not show how fast it computes
                rate = max(rate, self._assumed_tflops(name, device))
            at_least = {limit: min(seen_s, seconds) for limit, seconds in at_least.items()}
        at_least["launching kernels"] += hooks
        return {"computing": work / rate + self._unpacking(name), **at_least}

    def _memory_speed(self, device: DeviceConfig) -> float:
        """Bytes a second that are reached."""
        gb_per_s = device.memory_gb_per_s or ACCELERATORS[device.accelerator].memory_gb_per_s
        return gb_per_s * GB * MEMORY_REACHED

    def _computing(self, batch: BatchPlan) -> tuple[list[float], float]:
        """Seconds of each rank, and of the step: those who wait for each other in every micro step
        (ZeRO 2 and 3) take the slowest of each."""
        time_of = functools.cache(lambda name, size: max(self._limits(name, size).values()))
        kinds = [(rank.device, batch.sizes_of(rank.rank)) for rank in self.plan.ranks]
        times = {
            (name, sizes): [time_of(name, size) for size in sizes]
            for name, sizes in dict.fromkeys(kinds)
        }
        busy_s = [sum(times[kind]) for kind in kinds]
        if self.exp.zero.stage < 2:
            return busy_s, max(busy_s)
        return busy_s, sum(map(max, zip_longest(*times.values(), fillvalue=0.0)))

    def _even(self) -> float:
        """The step of the even split, where the plan's is another one; 0: there is none."""
        plan = self.plan
        batch = None if plan.balance is None else even_batch(plan)
        if batch is None:
            return 0.0
        even = replace(plan, batch=batch, balance=None, drawn=None)
        return step_time(self.exp, even, learned=self.learned, nominal=self.nominal).step_s

    def _mfu(self, per_token: float, step: float) -> list[tuple[str, float]]:
        fractions = []
        for name, device in self.devices.items():
            ranks = [rank.rank for rank in self.plan.ranks if rank.device == name]
            peak = 1e12 * device.peak_tflops.get(self.plan.precision, 0.0) * len(ranks)
            samples = sum(sum(self.plan.batch.sizes_of(rank)) for rank in ranks)
            if peak:
                done = per_token * samples * self.plan.batch.seq_len
                fractions.append((name, done / (peak * step)))
        return fractions

    # Communication.

    def _sent(self) -> list[_Sent]:
        plan, zero = self.plan, self.exp.zero
        world = plan.world_size
        if world == 1:
            return []
        micro_steps, part = plan.batch.accumulation, (world - 1) / world
        width = self.width
        if zero.extra.get("communication_data_type") == "fp32":
            width = 4
        if zero.stage == 1 and plan.precision == "bf16":
            # DeepSpeed's BF16_Optimizer reduces the sums.
            width = max(width, BYTES[plan.grad_accum_dtype or plan.precision])
        gradients = width * self.trained * part
        parameters = self.width * self.trained * part
        if zero.stage == 0:
            return [_Sent("all-reduce of gradients", 2 * gradients)]
        if zero.stage < 3:
            times = micro_steps if zero.stage == 2 else 1
            by = "backward" if zero.stage == 2 else "last backward"
            return [
                _Sent("all-reduce of gradients", 2 * gradients * times, by),
                _Sent("all-gather of parameters", parameters),
            ]
        return self._sent_by_stage_3(micro_steps, gradients)

    def _sent_by_stage_3(self, micro_steps: int, gradients: float) -> list[_Sent]:
        zero, world = self.exp.zero, self.plan.world_size
        width = 1 if zero.quantized_weights else self.width
        kept_fraction = min(1.0, zero.max_reuse_distance / 2 / self.elements)
        forward, backward = micro_steps, micro_steps * (1 - kept_fraction)
        num_bytes = width * self.elements

        def gathered(times: float, group: int) -> float:
            return times * num_bytes * (group - 1) / group

        if zero.hpz_partition_size > 1:
            group = min(zero.hpz_partition_size, world)
            inside = all(group <= host.slots for host in self.plan.hosts)
            link = "inside" if inside else "all"
            gathers = [
                _Sent("all-gather, first forward", gathered(1, world), "forward"),
                _Sent("all-gather, hpZ", gathered(forward - 1 + backward, group), "backward", link),
            ]
        else:
            gathers = [
                _Sent("all-gather, forward", gathered(forward, world), "forward"),
                _Sent("all-gather, backward", gathered(backward, world), "backward"),
            ]
        if zero.quantized_gradients and len(self.plan.hosts) > 1:
            slots, hosts = max(host.slots for host in self.plan.hosts), len(self.plan.hosts)
            size = 0.5 * self.trained * micro_steps
            # All ranks of a host share its network, and each sends its part.
            return [
                *gathers,
                _Sent("qgZ in a host", size * (slots - 1) / slots, "backward", "inside"),
                _Sent("qgZ between hosts", size * (hosts - 1) / hosts, "backward", "between"),
            ]
        reduced = _Sent("reduce-scatter of gradients", gradients * micro_steps, "backward")
        return [*gathers, reduced]

    def _seconds(self, exchange: _Sent) -> float:
        speeds = []
        if exchange.link in ("all", "inside"):
            devices = [host.device for host in self.plan.hosts if host.slots > 1]
            to = "the others of its host"
            speeds += [self._gb_per_s(name, "link_gb_per_s", to=to) for name in devices]
        if exchange.link in ("all", "between") and len(self.plan.hosts) > 1:
            speeds.append(self._network())
        return exchange.size / (min(speeds) * GB * LINK_REACHED) if speeds else 0.0

    def _gb_per_s(self, name: str, key: str, *, to: str) -> float:
        """A speed of a type of device; where it has none an assumed one, which the plan names."""
        device = self.exp.hardware.devices[name]
        speed: float = getattr(device, key)
        if not speed:
            speed = getattr(ACCELERATORS[device.accelerator], key)
            self.sources.append(
                f"{name}: {speed:g} GB/s to {to} (assumed: hardware.devices.{name}.{key})"
            )
        return speed

    def _network(self) -> float:
        """GB/s of the network of a host."""
        gbit_per_s = self.exp.hardware.network_gbit_per_s
        if not gbit_per_s:
            gbit_per_s, key = NETWORK_GBIT_PER_S, "hardware.network_gbit_per_s"
            self.sources.append(f"network: {gbit_per_s:g} Gbit/s by host (assumed: {key})")
        return gbit_per_s / 8

    def _exposed(
        self, sent: list[_Sent], seconds: list[float], computed: float, flops: TokenFlops
    ) -> float:
        """Seconds of communication that no computing hides. ``flops``: of the slowest ranks."""
        sizes = bucket_sizes(self.exp.model, self.exp.zero, self.plan.accelerator)
        forward = flops.forward / flops.run
        room = {
            "forward": computed * forward,
            "backward": computed * (1 - forward),
            "last backward": computed * (1 - forward) / self.plan.batch.accumulation,
        }
        hidden_s: dict[str, float] = {}
        exposed = 0.0
        for exchange, time in zip(sent, seconds, strict=True):
            if not exchange.hidden_by or not sizes["overlap"]:
                exposed += time
            else:
                hidden_s[exchange.hidden_by] = hidden_s.get(exchange.hidden_by, 0.0) + time
        return exposed + sum(
            max(time / NOT_HIDDEN, time - room[phase]) for phase, time in hidden_s.items()
        )

    # The update, and host memory.

    def _shard(self) -> float:
        """The elements that a rank updates."""
        sharded = self.exp.zero.stage >= 1
        return self.trained / self.plan.world_size if sharded else self.trained

    def _update_bytes(self) -> float:
        """Bytes that the update of an element moves: its states and master weight are read and
        written, its gradient is read for the norm and for the update, its weight is written."""
        plan = self.plan
        sums = BYTES[plan.grad_accum_dtype or plan.precision]
        states = optimizer_bytes(self.exp.optim.kind, plan.precision)
        return 2 * states + 2 * sums + self.width

    def _update(self) -> float:
        if self.exp.zero.offload_optimizer != "none":
            return 0.0
        size = self._update_bytes() * self._shard()
        return max(size / self._memory_speed(device) for device in self.devices.values())

    def _offload(self) -> float:
        """Copies to and from host memory, and the update there. Not overlapped."""
        zero, plan = self.exp.zero, self.plan
        if zero.offload_optimizer == "none" and zero.offload_param == "none":
            return 0.0
        slots = max(host.slots for host in plan.hosts)
        micro_steps, copied, seconds = plan.batch.accumulation, 0.0, 0.0
        if zero.offload_optimizer != "none":
            # Sums of gradients go to and fro between micro steps; the weights come back.
            copied += self.width * self._shard() * 2 * micro_steps
            size = self._update_bytes() * self._shard() * slots
            seconds += size / (HOST_MEMORY_GB_PER_S * GB)
            self.sources.append(
                f"update on hosts: {HOST_MEMORY_GB_PER_S:g} GB/s of each one's RAM (assumed)"
            )
        if zero.offload_param != "none":
            copied += self.width * self.elements / plan.world_size * 2 * micro_steps
        if "nvme" in (zero.offload_optimizer, zero.offload_param):
            states = optimizer_bytes(self.exp.optim.kind, plan.precision)
            read = 2 * states * self._shard() if zero.offload_optimizer == "nvme" else 0.0
            if zero.offload_param == "nvme":
                read += self.width * self.elements / plan.world_size * (2 * micro_steps + 1)
            seconds += read * slots / (NVME_GB_PER_S * GB)
            self.sources.append(f"NVMe: {NVME_GB_PER_S:g} GB/s by host (assumed)")
        links = [self._gb_per_s(n, "host_link_gb_per_s", to="host memory") for n in self.devices]
        return seconds + copied / (min(links) * GB * LINK_REACHED)

    # What follows.

    def _bottleneck(
        self,
        busy_s: list[float],
        computed: float,
        communication: float,
        exposed: float,
        update: float,
        host: float,
    ) -> str:
        """The part that takes most of the step's device time, to be looked at first. Communication
        that takes longer than computing decides, even where computing hides most of it."""
        waiting = sum(computed - rank_s for rank_s in busy_s) / len(busy_s)
        slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
        rank = self.plan.ranks[slowest]
        limits = self._limits(rank.device, max(self.plan.batch.sizes_of(slowest)))
        parts = {
            max(limits, key=limits.__getitem__): computed - waiting,
            "waiting for slower devices": waiting,
            "communication": communication if communication > computed else exposed,
            "update": update,
            "host memory (offload)": host,
        }
        return max(parts, key=parts.__getitem__)

    def _cost(self, hours: float) -> float | None:
        """The cost of the run, where each device's price and the number of steps are known."""
        prices = self.exp.hardware.price_per_hour
        devices = [rank.device for rank in self.plan.ranks]
        devices += [host.device for host in self.plan.rollout_hosts for _ in range(host.slots)]
        if not hours or any(name not in prices for name in devices):
            return None
        return hours * sum(prices[name] for name in devices)


def micro_step_exchange_s(exp: Experiment, plan: Plan) -> float:
    """Seconds that ranks exchange in one micro step more, over links as configured or assumed; 0
    below ZeRO-2, and where the model is not known."""
    if exp.zero.stage < 2 or not plan.num_parameters:
        return 0.0
    seconds = []
    for count in (1, 2):
        batch = replace(plan.batch, accumulation=count)
        prediction = _Prediction(exp, replace(plan, batch=batch), NOTHING)
        seconds.append(sum(prediction._seconds(sent) for sent in prediction._sent()))
    return seconds[1] - seconds[0]
