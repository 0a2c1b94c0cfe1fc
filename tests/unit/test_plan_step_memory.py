"""DeepSpeed's rules on numbers, each case worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmx.plan.step_memory import StepRules, peak_of
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


RULES = StepRules(
    stage=2,
    world=2,
    width=4,
    sums=4,
    accumulation=1,
    reduce_bucket=1500,
    overlap=False,
    prefetch_bucket=0,
    persistence=0,
    max_live=10**9,
    max_reuse_distance=10**9,
    sub_group=10**9,
    state_width=8,
    temporary_width=8,
)
N = LAYERS * NUMEL


def test_stage_0_has_all_and_a_copy_of_the_gradients() -> None:
    found = peak_of(trace(), replace(RULES, stage=0))
    # Parameters, gradients, two moments; the copy that is reduced.
    assert found.total == 4 * N + 4 * N + 8 * N + 4 * N
    assert found.moment == "all-reduce"
    alone = peak_of(trace(), replace(RULES, stage=0, world=1))
    # The update makes two temporaries of one tensor at a time, beside one of the tensor before.
    assert alone.total == 16 * N + (8 + 4) * NUMEL


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("place", "gradients"), [(-4, LAYERS - 1), (-1, LAYERS)])
def test_a_peak_between_gradients_and_after_the_last(
    stage: int, place: int, gradients: int
) -> None:
    """At stages 0 to 2 modules do nothing; what is allocated while they run counts."""
    high, made = 10**7, trace()
    events = [*made.events]
    assert events[place].kind == RELEASE_BACKWARD
    assert sum(event.kind == GRADIENT for event in events[: place % len(events)]) == gradients
    events[place] = replace(events[place], peak=high)
    rules = replace(RULES, stage=stage, world=1, reduce_bucket=10**6)
    found = peak_of(replace(made, events=tuple(events)), rules)
    assert found.moment == "activations"
    assert found.at["activations"] == high
    if stage == 0:
        assert found.total == 4 * N + 8 * N + 4 * NUMEL * gradients + high


def test_stage_0_in_half_precision_has_whole_gradients_in_fp32_too() -> None:
    found = peak_of(trace(), replace(RULES, stage=0, width=2, sums=2, bf16=True))
    # Parameters and gradients twice; two moments; the temporaries of one tensor after the other.
    assert found.total == (2 + 4) * N + (2 + 4) * N + 8 * N + (8 + 4) * NUMEL
    assert found.moment == "update"


def test_stage_2_updates_a_partition() -> None:
    found = peak_of(trace(), RULES)
    half = N // 2
    # Parameters; master weights and moments; the gradients, copied flat; temporaries.
    assert found.parts["parameters"] == 4 * N
    assert found.parts["optimizer"] == 12 * half
    assert found.total == 4 * N + 12 * half + (4 + 8) * half
    assert found.moment == "update"


def test_groups_are_padded_to_two_elements_a_rank() -> None:
    odd = trace()
    parameters = (TracedParameter(1001, True, 1), *odd.parameters[1:])
    found = peak_of(replace(odd, parameters=parameters), replace(RULES, world=4))
    # 1001 elements of a group of their own become 1008, and the other 3000 stay.
    assert found.parts["parameters"] == 4 * (1008 + 3000)
    assert found.parts["optimizer"] == 12 * (252 + 750)


def test_large_activations_are_beside_what_waits_for_its_reduction() -> None:
    big = trace(activations=100_000)
    found = peak_of(big, RULES)
    # At the first gradient: no bucket yet.
    assert found.moment == "activations"
    assert found.total == 4 * N + 12 * N // 2 + 4 * 100_000 + 4 * NUMEL


def test_sums_over_micro_steps_take_more() -> None:
    big = trace(activations=100_000)
    once, twice = peak_of(big, RULES), peak_of(big, replace(RULES, accumulation=2))
    assert twice.total == once.total + 4 * N // 2
    stage_1 = replace(RULES, stage=1, accumulation=2)
    # The bucket for reductions is there from the first micro step on.
    assert peak_of(big, stage_1).total == once.total + 4 * N + 4 * 1500


def test_stage_3_keeps_what_it_needs_again_soon() -> None:
    big = trace(activations=100_000)
    near = peak_of(big, replace(RULES, stage=3))
    far = peak_of(big, replace(RULES, stage=3, max_reuse_distance=0))
    half = N // 2
    # Parts, master weights and moments, gradients, the bucket; all layers, or the last one.
    kept = 4 * half + 12 * half + 4 * half + 4 * 1500
    assert near.total == kept + 4 * N + 4 * 100_000 + 4 * NUMEL
    assert far.total == kept + 4 * NUMEL + 4 * 100_000 + 4 * NUMEL


def test_small_parameters_stay_whole_at_stage_3() -> None:
    small = replace(RULES, stage=3, persistence=NUMEL)
    found = peak_of(trace(), small)
    assert found.parts["parameters"] == 4 * N // 2 + 4 * N


def test_offloaded_states_are_in_host_memory() -> None:
    for stage in (2, 3):
        on = peak_of(trace(), replace(RULES, stage=stage))
        off = peak_of(trace(), replace(RULES, stage=stage, offload_optimizer=True))
        assert off.parts["optimizer"] == 0
        assert off.host >= 12 * N // 2
        assert off.total < on.total
    params = replace(RULES, stage=3, offload_optimizer=True, offload_param=True)
    assert peak_of(trace(), params).parts["parameters"] == 0


def test_frozen_weights_have_neither_gradient_nor_state() -> None:
    every = trace()
    parameters = tuple(
        replace(one, trained=index == 0) for index, one in enumerate(every.parameters)
    )
    events = tuple(e for e in every.events if e.kind != GRADIENT or e.index == 0)
    for stage in range(4):
        lora = replace(every, parameters=parameters, events=events)
        found = peak_of(lora, replace(RULES, stage=stage))
        share = NUMEL if stage == 0 else NUMEL // 2
        assert found.parts["optimizer"] == (8 if stage == 0 else 12) * share


def forward(*modules: tuple[int, ...]) -> StepTrace:
    """A forward pass through modules, without activations."""
    kinds = [(kind, number) for number in range(len(modules)) for kind in (FETCH, RELEASE)]
    return StepTrace(
        tuple(TracedParameter(NUMEL, True) for _ in range(LAYERS)),
        modules,
        tuple(Event(kind, number, 0, 0) for kind, number in kinds),
    )


SHARDED = replace(RULES, stage=3, max_reuse_distance=0, offload_optimizer=True)
HELD = 4 * N // 2 + 4 * 1500
"""Parts of the parameters, the bucket for reductions."""


def test_what_is_gathered_together_stays_until_the_last_of_it_is_needed() -> None:
    layers = forward((0,), (1,), (2,), (3,))
    found = peak_of(layers, replace(SHARDED, prefetch_bucket=3 * NUMEL))
    # Ahead of the second layer three in one buffer, copied out of it when that layer begins.
    assert found.total == HELD + 2 * 4 * 3 * NUMEL


def test_the_common_buffer_is_there_while_more_is_fetched() -> None:
    layers = forward((0,), (1,), (2,), (3,))
    found = peak_of(layers, replace(SHARDED, prefetch_bucket=2 * NUMEL))
    # At the second layer it and the third are copied out of their buffer, which waits for the
    # third; the fourth is fetched beside them.
    assert found.total == HELD + 4 * (2 + 2 + 1) * NUMEL


def test_what_fetching_ahead_has_passed_over_is_kept_for_its_next_use() -> None:
    again = forward((0,), (1,), (2,), (0,))
    found = peak_of(again, replace(SHARDED, prefetch_bucket=3 * NUMEL))
    # The first layer, and two in one buffer, copied out of it.
    assert found.total == HELD + 4 * (1 + 2 + 2) * NUMEL


def test_more_is_fetched_ahead_at_a_module_without_parameters() -> None:
    rules = replace(SHARDED, prefetch_bucket=1)
    plain = peak_of(forward((0,), (1,), (2,), (3,)), rules)
    nested = peak_of(forward((0,), (), (1,), (2,), (3,)), rules)
    assert plain.total == HELD + 2 * 4 * NUMEL
    assert nested.total == plain.total + 4 * NUMEL


def test_bf16_with_fp32_sums_at_stage_1_has_all_sums_on_every_rank() -> None:
    bf16 = replace(RULES, stage=1, width=2, bf16=True, accumulation=2)
    found = peak_of(trace(), bf16)
    half = N // 2
    # Parameters, master weights and moments, sums, gradients; temporaries of the update.
    assert found.total == 2 * N + 12 * half + 4 * N + 2 * N + 8 * half
    assert found.moment == "update"
    # What is reduced is sent in bf16; the sums of several groups are copied flat before.
    small = replace(bf16, temporary_width=0)
    assert peak_of(trace(), small).total == 10 * N - 2 * N + 12 * half + 2 * N
    parameters = (TracedParameter(NUMEL, True, 1), *trace().parameters[1:])
    grouped = peak_of(replace(trace(), parameters=parameters), small)
    assert grouped.total == 8 * N + 12 * half + (4 + 2) * N
    assert grouped.moment == "all-reduce"


def test_an_offload_at_stage_1_leaves_the_gradients_on_the_device() -> None:
    found = peak_of(trace(), replace(RULES, stage=1, offload_optimizer=True))
    # Parameters, two buffers; the first gradient is in the bucket, and its norm is taken in fp64.
    assert found.total == 4 * N + 4 * NUMEL + 4 * 1500 + 3 * 4 * NUMEL + 8 * NUMEL
    # Master weights, gradients and what goes back; moments; a buffer.
    assert found.host == (4 + 4 + 4) * N // 2 + 8 * N // 2 + 4 * NUMEL
    at_2 = peak_of(trace(), replace(RULES, stage=2, offload_optimizer=True))
    assert at_2.total < found.total


@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_sums_beside_an_offload_are_on_the_device(stage: int) -> None:
    half = replace(RULES, stage=stage, width=2, offload_optimizer=True, accumulation=2)
    exact, rough = peak_of(trace(), half), peak_of(trace(), replace(half, sums=2))
    assert exact.total >= rough.total + 4 * N // 2
    # Their sums in 16 bits are in host memory.
    assert rough.host == exact.host + 2 * N // 2


def test_hpz_copies_what_is_released() -> None:
    big = trace(activations=100_000)
    plain = replace(RULES, stage=3)
    hpz = replace(plain, hpz=2)
    second = 4 * N // 2
    # All layers are kept whole for the backward pass: none is released before the peak.
    assert peak_of(big, hpz).total == peak_of(big, plain).total
    # But in the micro steps before.
    twice = {"accumulation": 2}
    assert peak_of(big, replace(hpz, **twice)).total == (
        peak_of(big, replace(plain, **twice)).total + second
    )
    nothing = {"max_reuse_distance": 0}
    assert peak_of(big, replace(hpz, **nothing)).total == (
        peak_of(big, replace(plain, **nothing)).total + second
    )
    # Of four ranks two have a copy each.
    four = {"max_reuse_distance": 0, "world": 4}
    assert peak_of(big, replace(hpz, **four)).total == (
        peak_of(big, replace(plain, **four)).total + second
    )


def test_with_hpz_frozen_weights_keep_their_copies() -> None:
    big = trace(activations=100_000)
    parameters = tuple(replace(one, trained=at < 2) for at, one in enumerate(big.parameters))
    events = tuple(e for e in big.events if e.kind != GRADIENT or e.index < 2)
    half_frozen = replace(big, parameters=parameters, events=events)
    plain = replace(RULES, stage=3)
    # Two of the four layers, half of each on a rank; those of trained ones go with each step.
    assert peak_of(half_frozen, replace(plain, hpz=2)).total == (
        peak_of(half_frozen, plain).total + 4 * 2 * NUMEL // 2
    )


def test_with_hpz_the_first_step_has_copies_of_all() -> None:
    rules = replace(RULES, stage=3, hpz=2, persistence=NUMEL, temporary_width=0)
    half = N // 2
    # Parts, all whole, and copies of them; master weights and moments; gradients, the bucket, and
    # what is looked at for an overflow.
    expected = 4 * half + 4 * N + 4 * half + 12 * half + 4 * half + 4 * 1500 + (4 + 1) * half
    assert peak_of(trace(), rules).total == expected
    # Its moments are made by the update: a backward pass of it has none.
    big = trace(activations=100_000)
    backward = expected - 4 * half - (4 + 1) * half + 4 * 100_000 + 4 * NUMEL
    assert peak_of(big, rules).total == backward, "of a later step, without the copies"


def test_an_offload_at_stage_3_takes_the_norm_of_each_part() -> None:
    rules = replace(RULES, stage=3, offload_optimizer=True, reduce_bucket=0)
    found = peak_of(trace(activations=0), rules)
    # Parts and three whole layers; a gradient, reduced where it lies; its part in fp64; and the
    # next one, which waits.
    assert found.total == 4 * N // 2 + 4 * 3 * NUMEL + 4 * NUMEL + 8 * NUMEL // 2 + 4 * NUMEL
    assert found.moment == "norm"
    assert found.parts["gradients"] == 0, "each goes when it is reduced"
    # Master weights, moments, a gradient for the optimizer, and the sums.
    assert found.host == (4 + 8 + 4 + 4) * N // 2


def test_what_a_part_has_freed_when_the_sum_is_highest() -> None:
    found = peak_of(trace(activations=2000), replace(RULES, stage=0))
    # When the gradients are copied flat for the all-reduce, the activations are gone (at most four
    # layers' and a gradient), and the temporaries of the update are still to come.
    assert found.moment == "all-reduce"
    assert found.freed == 4 * 2000 + 4 * NUMEL + (8 + 4) * NUMEL


def test_what_stage_3_gathers_leaves_holes() -> None:
    big = trace(activations=100_000)
    kept = peak_of(big, replace(RULES, stage=3))
    assert kept.moment == "activations"
    # All layers were gathered; a gradient that waits, and what the update takes, come later.
    assert kept.gathered == 4 * N
    assert kept.freed == 4 * N + 4 * NUMEL + kept.most["update"]
    assert peak_of(big, RULES).gathered == 0
