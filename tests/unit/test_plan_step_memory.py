"""DeepSpeed's rules on numbers, each case worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmx.plan.step_memory import Peaks, StepRules, peak_of
from llmx.plan.trace import (
    FETCH,
    FETCH_BACKWARD,
    GRADIENT,
    RELEASE,
    RELEASE_BACKWARD,
    Event,
    StepTrace,
    TracedParameter,
)

LAYERS = 4
NUMEL = 1000


def trace(numel: int = NUMEL, *, activations: int = 10) -> StepTrace:
    """Layers with a parameter each, which leave ``activations`` bytes each."""
    forward, backward = [], []
    for number in range(LAYERS):
        before, after = number * activations, (number + 1) * activations
        forward += [Event(FETCH, number, before, before), Event(RELEASE, number, after, after)]
        backward += [
            Event(RELEASE_BACKWARD, number, before, before),
            Event(GRADIENT, number, after + 4 * numel, before),
            Event(FETCH_BACKWARD, number, after, after),
        ]
    return StepTrace(
        tuple(TracedParameter(numel, True) for _ in range(LAYERS)),
        tuple((number,) for number in range(LAYERS)),
        (*forward, *reversed(backward)),
    )


_OFF: dict[str, Any] = {
    "overlap": False,
    "prefetch_bucket": 0,
    "persistence": 0,
    "reduce_bucket": 1500,
}
_NO_LIMIT: dict[str, Any] = dict.fromkeys(("max_live", "max_reuse_distance", "sub_group"), 10**9)
_WIDTHS: dict[str, Any] = {"width": 4, "sums": 4, "state_width": 8, "temporary_width": 8}
RULES = StepRules(stage=2, world=2, accumulation=1, **_OFF, **_NO_LIMIT, **_WIDTHS)
N = LAYERS * NUMEL

PLAIN, BIG = trace(), trace(activations=100_000)


def peak(made: StepTrace = PLAIN, **rules: Any) -> Peaks:
    return peak_of(made, replace(RULES, **rules))


def test_stage_0_has_all_and_a_copy_of_the_gradients() -> None:
    found = peak(stage=0)
    # Parameters, gradients, two moments; the copy that is reduced.
    assert found.total == 4 * N + 4 * N + 8 * N + 4 * N
    assert found.moment == "all-reduce"
    # The update makes two temporaries of one tensor at a time, beside one of the tensor before.
    assert peak(stage=0, world=1).total == 16 * N + (8 + 4) * NUMEL
    # In half precision there are whole gradients in fp32, too: the temporaries of one tensor after
    # the other.
    found = peak(stage=0, width=2, sums=2, bf16=True)
    assert found.total == (2 + 4) * N + (2 + 4) * N + 8 * N + (8 + 4) * NUMEL
    assert found.moment == "update"


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("place", "gradients"), [(-4, LAYERS - 1), (-1, LAYERS)])
def test_a_peak_between_gradients_and_after_the_last(
    stage: int, place: int, gradients: int
) -> None:
    """At stages 0 to 2 modules do nothing; what is allocated while they run counts."""
    high, events = 10**7, [*PLAIN.events]
    assert events[place].kind == RELEASE_BACKWARD
    assert sum(event.kind == GRADIENT for event in events[: place % len(events)]) == gradients
    events[place] = replace(events[place], peak=high)
    made = replace(PLAIN, events=tuple(events))
    found = peak(made, stage=stage, world=1, reduce_bucket=10**6)
    assert found.moment == "activations"
    assert found.at["activations"] == high
    if stage == 0:
        assert found.total == 4 * N + 8 * N + 4 * NUMEL * gradients + high


def test_stage_2_updates_a_partition() -> None:
    found, half = peak(), N // 2
    # Parameters; master weights and moments; the gradients, copied flat; temporaries.
    assert found.parts["parameters"] == 4 * N
    assert found.parts["optimizer"] == 12 * half
    assert found.total == 4 * N + 12 * half + (4 + 8) * half
    assert found.moment == "update"


def test_groups_are_padded_to_two_elements_a_rank() -> None:
    parameters = (TracedParameter(1001, True, 1), *PLAIN.parameters[1:])
    found = peak(replace(PLAIN, parameters=parameters), world=4)
    # 1001 elements of a group of their own become 1008, and the other 3000 stay.
    assert found.parts["parameters"] == 4 * (1008 + 3000)
    assert found.parts["optimizer"] == 12 * (252 + 750)


def test_large_activations_are_beside_what_waits_for_its_reduction_and_sums_take_more() -> None:
    once = peak(BIG)
    # At the first gradient: no bucket yet.
    assert once.moment == "activations"
    assert once.total == 4 * N + 12 * N // 2 + 4 * 100_000 + 4 * NUMEL
    assert peak(BIG, accumulation=2).total == once.total + 4 * N // 2
    # The bucket for reductions is there from the first micro step on.
    assert peak(BIG, stage=1, accumulation=2).total == once.total + 4 * N + 4 * 1500


def test_stage_3_keeps_what_it_needs_again_soon() -> None:
    near, far, half = peak(BIG, stage=3), peak(BIG, stage=3, max_reuse_distance=0), N // 2
    # Parts, master weights and moments, gradients, the bucket; all layers, or the last one.
    kept = 4 * half + 12 * half + 4 * half + 4 * 1500
    assert near.total == kept + 4 * N + 4 * 100_000 + 4 * NUMEL
    assert far.total == kept + 4 * NUMEL + 4 * 100_000 + 4 * NUMEL
    # What it gathers leaves holes: all layers; a gradient that waits, and what the update takes,
    # come later.
    assert near.moment == "activations"
    assert near.gathered == 4 * N
    assert near.freed == 4 * N + 4 * NUMEL + near.most["update"]
    assert peak(BIG).gathered == 0
    # Small parameters stay whole.
    assert peak(stage=3, persistence=NUMEL).parts["parameters"] == 4 * N // 2 + 4 * N


def test_offloaded_states_are_in_host_memory() -> None:
    for stage in (2, 3):
        on, off = (peak(stage=stage, offload_optimizer=offload) for offload in (False, True))
        assert off.parts["optimizer"] == 0
        assert off.host >= 12 * N // 2
        assert off.total < on.total
    assert peak(stage=3, offload_optimizer=True, offload_param=True).parts["parameters"] == 0


def partly_frozen(made: StepTrace, trained: int) -> StepTrace:
    """Its first layers alone are trained."""
    parameters = tuple(replace(one, trained=n < trained) for n, one in enumerate(made.parameters))
    events = tuple(e for e in made.events if e.kind != GRADIENT or e.index < trained)
    return replace(made, parameters=parameters, events=events)


@pytest.mark.parametrize("stage", range(4))
def test_frozen_weights_have_neither_gradient_nor_state(stage: int) -> None:
    found = peak(partly_frozen(PLAIN, 1), stage=stage)
    assert found.parts["optimizer"] == (8 * NUMEL if stage == 0 else 12 * NUMEL // 2)


def forward(*modules: tuple[int, ...]) -> StepTrace:
    """A forward pass through modules, without activations."""
    kinds = [(kind, number) for number in range(len(modules)) for kind in (FETCH, RELEASE)]
    return StepTrace(
        tuple(TracedParameter(NUMEL, True) for _ in range(LAYERS)),
        modules,
        tuple(Event(kind, number, 0, 0) for kind, number in kinds),
    )


def gathered(*modules: tuple[int, ...], prefetch: int) -> float:
    """Beside parts of the parameters and the bucket for reductions, in layers."""
    rules = {"stage": 3, "max_reuse_distance": 0, "prefetch_bucket": prefetch}
    found = peak(forward(*modules), offload_optimizer=True, **rules)
    return (found.total - 4 * N // 2 - 4 * 1500) / (4 * NUMEL)


def test_what_is_gathered_together_stays_until_the_last_of_it_is_needed() -> None:
    layers = ((0,), (1,), (2,), (3,))
    # Ahead of the second layer three in one buffer, copied out of it when that layer begins.
    assert gathered(*layers, prefetch=3 * NUMEL) == 2 * 3
    # At the second layer it and the third are copied out of their buffer, which waits for the
    # third; the fourth is fetched beside them.
    assert gathered(*layers, prefetch=2 * NUMEL) == 2 + 2 + 1
    # What fetching ahead has passed over is kept for its next use: the first layer, and two in one
    # buffer, copied out of it.
    assert gathered((0,), (1,), (2,), (0,), prefetch=3 * NUMEL) == 1 + 2 + 2
    # More is fetched ahead at a module without parameters.
    assert gathered(*layers, prefetch=1) == 2
    assert gathered((0,), (), (1,), (2,), (3,), prefetch=1) == 3


def test_bf16_with_fp32_sums_at_stage_1_has_all_sums_on_every_rank() -> None:
    bf16 = {"stage": 1, "width": 2, "bf16": True, "accumulation": 2}
    found, half = peak(**bf16), N // 2
    # Parameters, master weights and moments, sums, gradients; temporaries of the update.
    assert found.total == 2 * N + 12 * half + 4 * N + 2 * N + 8 * half
    assert found.moment == "update"
    # What is reduced is sent in bf16; the sums of several groups are copied flat before.
    small = {**bf16, "temporary_width": 0}
    assert peak(**small).total == 10 * N - 2 * N + 12 * half + 2 * N
    parameters = (TracedParameter(NUMEL, True, 1), *PLAIN.parameters[1:])
    grouped = peak(replace(PLAIN, parameters=parameters), **small)
    assert grouped.total == 8 * N + 12 * half + (4 + 2) * N
    assert grouped.moment == "all-reduce"


def test_an_offload_at_stage_1_leaves_the_gradients_on_the_device() -> None:
    found = peak(stage=1, offload_optimizer=True)
    # Parameters, two buffers; the first gradient is in the bucket, and its norm is taken in fp64.
    assert found.total == 4 * N + 4 * NUMEL + 4 * 1500 + 3 * 4 * NUMEL + 8 * NUMEL
    # Master weights, gradients and what goes back; moments; a buffer.
    assert found.host == (4 + 4 + 4) * N // 2 + 8 * N // 2 + 4 * NUMEL
    assert peak(stage=2, offload_optimizer=True).total < found.total


@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_sums_beside_an_offload_are_on_the_device(stage: int) -> None:
    half = {"stage": stage, "width": 2, "offload_optimizer": True, "accumulation": 2}
    exact, rough = peak(**half), peak(**half, sums=2)
    assert exact.total >= rough.total + 4 * N // 2
    # Their sums in 16 bits are in host memory.
    assert rough.host == exact.host + 2 * N // 2


def test_hpz_copies_what_is_released() -> None:
    def second(**rules: Any) -> int:
        with_it, without = (peak(BIG, stage=3, hpz=hpz, **rules).total for hpz in (2, 1))
        return with_it - without

    # All layers are kept whole for the backward pass: none is released before the peak.
    assert second() == 0
    # But in the micro steps before; of four ranks two have a copy each.
    assert second(accumulation=2) == second(max_reuse_distance=0) == 4 * N // 2
    assert second(max_reuse_distance=0, world=4) == 4 * N // 2


def test_with_hpz_frozen_weights_keep_their_copies() -> None:
    half_frozen = partly_frozen(BIG, 2)
    # Two of the four layers, half of each on a rank; those of trained ones go with each step.
    copies = peak(half_frozen, stage=3, hpz=2).total - peak(half_frozen, stage=3).total
    assert copies == 4 * 2 * NUMEL // 2


def test_with_hpz_the_first_step_has_copies_of_all() -> None:
    rules = {"stage": 3, "hpz": 2, "persistence": NUMEL, "temporary_width": 0}
    half = N // 2
    # Parts, all whole, and copies of them; master weights and moments; gradients, the bucket, and
    # what is looked at for an overflow.
    expected = 4 * half + 4 * N + 4 * half + 12 * half + 4 * half + 4 * 1500 + (4 + 1) * half
    assert peak(**rules).total == expected
    # Its moments are made by the update: a backward pass of it has none.
    backward = expected - 4 * half - (4 + 1) * half + 4 * 100_000 + 4 * NUMEL
    assert peak(BIG, **rules).total == backward, "of a later step, without the copies"


def test_an_offload_at_stage_3_takes_the_norm_of_each_part() -> None:
    found = peak(trace(activations=0), stage=3, offload_optimizer=True, reduce_bucket=0)
    # Parts and three whole layers; a gradient, reduced where it lies; its part in fp64; and the
    # next one, which waits.
    assert found.total == 4 * N // 2 + 4 * 3 * NUMEL + 4 * NUMEL + 8 * NUMEL // 2 + 4 * NUMEL
    assert found.moment == "norm"
    assert found.parts["gradients"] == 0, "each goes when it is reduced"
    # Master weights, moments, a gradient for the optimizer, and the sums.
    assert found.host == (4 + 8 + 4 + 4) * N // 2


def test_what_a_part_has_freed_when_the_sum_is_highest() -> None:
    found = peak(trace(activations=2000), stage=0)
    # When the gradients are copied flat for the all-reduce, the activations are gone (at most four
    # layers' and a gradient), and the temporaries of the update are still to come.
    assert found.moment == "all-reduce"
    assert found.freed == 4 * 2000 + 4 * NUMEL + (8 + 4) * NUMEL
