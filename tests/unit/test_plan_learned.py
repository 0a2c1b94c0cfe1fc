"""What finished runs teach: taken apart and put together again, a run predicts itself."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmx.cli.words import parse
from llmx.compose.complete import Composed
from llmx.config import Experiment
from llmx.lifecycle.knowledge import informed
from llmx.lifecycle.learned import learn, learned_file, measured_of, read_observations
from llmx.lifecycle.reproduce import run as reproduce
from llmx.lifecycle.resume.command import run as resume
from llmx.plan.learned import Measured, Observation, contexts_gib, known_of, observe
from llmx.plan.step_time import LAYER_S, LearnedSpeeds, flops_by_device, step_time
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.rundir import RunDir, write_json
from tests.composing import planned
from tests.composing import sized as composed

TRUTH = LearnedSpeeds(tflops={"cpu": 0.02}, at_stage_3=frozenset({"cpu"}))


def measured(
    done: Composed, truth: LearnedSpeeds, *, fill: float = 1.0, timed: bool = True
) -> Measured:
    """Of a cluster on which the truth holds."""
    found = step_time(done.experiment, done.plan, learned=truth)
    flops = next(iter(flops_by_device(done.experiment, done.plan).values()))
    forward = [
        (found.computing_s - share * found.step_s) * flops.forward / flops.run
        for share in found.idle
    ]
    tokens = done.plan.batch.tokens_per_step * fill
    return Measured(found.step_s, tokens, tuple(forward) if timed else ())


def observed(done: Composed, truth: LearnedSpeeds, **how: Any) -> list[Observation]:
    return observe(done.experiment, done.plan, measured(done, truth, **how))


def predicted_s(done: Composed, found: list[Observation]) -> float:
    """A step, by what runs have shown."""
    known = known_of(found, done.experiment, done.plan)
    return step_time(done.experiment, done.plan, learned=known).step_s


@pytest.mark.parametrize("words", [["zero=stage2", "batch.global_batch=64"], ["zero=stage3"]])
def test_a_run_predicts_itself(words: list[str]) -> None:
    done = composed(["hardware=cpu2", *words])
    for timed in (True, False):
        found = observed(done, TRUTH, timed=timed)
        wanted = measured(done, TRUTH).step_s
        assert predicted_s(done, found) == pytest.approx(wanted, rel=0.01)
        assert found[0].tflops == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(
    "words", ["zero=stage3", "batch.micro_batch=2", "model.activation_checkpointing=full"]
)
def test_and_another_configuration_on_the_same_cluster(words: str) -> None:
    """As far as FLOP/s are those of the cluster, and not of the configuration."""
    found = observed(composed(["hardware=cpu2", "zero=stage1"]), TRUTH)
    other = composed(["hardware=cpu2", "zero=stage1", words])
    truth = step_time(other.experiment, other.plan, learned=TRUTH)
    assert predicted_s(other, found) == pytest.approx(truth.step_s, rel=0.05)


UNEQUAL = ["hardware=a100x2_v100x2", "zero=stage1", "model=llama3_8b", "batch.balance=off",
           "batch.global_batch=64"]  # fmt: skip


def test_unequal_devices_are_told_apart_by_their_forward_passes() -> None:
    done = composed(UNEQUAL)
    truth = LearnedSpeeds(tflops={"a100_40g": 150.0, "v100_32g": 30.0})
    rates = {one.device: one.tflops for one in observed(done, truth)}
    assert rates == pytest.approx(truth.tflops, rel=0.05)
    # Without them the slowest device alone would decide, and which it is is not known.
    assert observed(done, truth, timed=False) == []


def test_a_type_of_device_that_computes_again_is_no_slower_for_it() -> None:
    done = composed([*UNEQUAL, "hardware.devices.v100_32g.activation_checkpointing=full"])
    assert done.plan.checkpointing
    # Forward passes at four times the speed; what is computed again is not in them.
    flops = flops_by_device(done.experiment, done.plan)
    rates = {"a100_40g": 120.0, "v100_32g": 30.0}
    forward = [flops[r.device].forward / rates[r.device] for r in done.plan.ranks]
    tokens = done.plan.batch.tokens_per_step
    seen = Measured(2 * sum(forward), tokens, tuple(forward))
    found = {one.device: one.tflops for one in observe(done.experiment, done.plan, seen)}
    assert found["a100_40g"] / found["v100_32g"] == pytest.approx(4.0, rel=0.01)


def test_padding_counts_for_other_data_alone() -> None:
    done = composed(["hardware=cpu2", "zero=stage1"])
    found = observed(done, TRUTH, fill=0.5)
    assert found[0].fill == pytest.approx(0.5)
    assert predicted_s(done, found) == pytest.approx(measured(done, TRUTH).step_s, rel=0.01)
    other = replace(done.experiment, data=replace(done.experiment.data, name="others"))
    assert known_of(found, other, done.plan).tflops["cpu"] == pytest.approx(found[0].tflops)


def an_observation(**values: object) -> Observation:
    base = Observation("cpu", "fp32", "sft", "llama", 20.0, "sdpa", 2, 1024, 1.0)
    return replace(base, **values)


def test_the_most_alike_run_counts() -> None:
    done = composed(["hardware=cpu2"])
    found = [
        an_observation(tflops=1.0, slots=8),
        an_observation(tflops=1.5, stage=3),
        an_observation(tflops=2.0, task="pretrain"),
        an_observation(tflops=3.0, precision="bf16"),
        an_observation(tflops=4.0, device="a100_80g"),
        an_observation(tflops=4.5, quantized=True),
        an_observation(tflops=5.0, size=30.0),
        an_observation(tflops=6.0),
        an_observation(tflops=7.0, tokens=2**20),
    ]
    known = known_of(found, done.experiment, done.plan)
    assert known.tflops == {"cpu": 6.0}
    assert known.source == "learned from 1 run"
    assert known_of(found[3:5], done.experiment, done.plan) == LearnedSpeeds()


def test_unpacking_is_added_to_the_speed_of_runs_without_it() -> None:
    words = [*UNEQUAL, "batch.global_batch=null", "zero=stage2"]
    lora, qlora = composed([*words, "adapter=lora"]), composed([*words, "adapter=qlora"])

    def seconds(done: Composed, seen: Composed) -> float:
        truth = LearnedSpeeds(
            tflops=dict.fromkeys(seen.plan.devices, 50.0),
            with_unpacking=frozenset(seen.plan.devices if seen is qlora else ()),
        )
        return predicted_s(done, observed(seen, truth))

    assert seconds(qlora, seen=lora) > 1.1 * seconds(lora, seen=lora)
    assert seconds(qlora, seen=qlora) == pytest.approx(seconds(lora, seen=lora), rel=0.05)


def records(count: int, **values: object) -> list[dict[str, object]]:
    line = {"kind": "train", "step_time_s": 0.5, "tokens_per_s": 4000.0, "data_wait_s": 0.2}
    first = {**line, "step": 1, "step_time_s": 9.0, "forward_s": [5.0, 5.0]}
    rest = [
        {**line, "step": 1 + 2 * n, "forward_s": [0.1, 0.12], **values} for n in range(1, count)
    ]
    return [{"kind": "start"}, first, *rest, {"kind": "eval", "step": 1}]


def test_medians_of_a_run_without_its_warm_up_and_waiting_for_data() -> None:
    medians = (pytest.approx(0.4), pytest.approx(2000.0))
    assert measured_of(records(6)) == Measured(*medians, (0.1, 0.12))
    assert measured_of(records(3)) is None  # too few steps
    assert measured_of(records(6, forward_s=None)) == Measured(*medians, (), ())  # at stage 3


def test_the_least_context_of_each_rank_counts() -> None:
    """What another process held at the first line of step 3 is not a run's own."""
    lines = [*records(6, context_gib=[0.6, 0.7])]
    lines[2] = {**lines[2], "context_gib": [9.0, 0.5]}
    lines[1] = {**lines[1], "context_gib": [0.1, 0.1]}  # before NCCL had its buffers
    found = measured_of(lines)
    assert found.context_gib == (0.6, 0.5)
    done = composed(["hardware=cpu2"])
    (shown,) = observe(done.experiment, done.plan, found)
    assert shown.context_gib == 0.5
    # Of a type of device it is the largest of the newest runs.
    sizes = [9.0, 0.5, 0.7, 0.6, 0.5, 0.5]
    runs = [an_observation(device="a100_80g", context_gib=size) for size in sizes]
    assert contexts_gib([*runs, an_observation(context_gib=None)]) == {"a100_80g": 0.7}
    # Also as an earlier version has written it.
    stored = {**json.loads(json.dumps(shown.to_dict())), "link_gb_per_s": 2.0, "time": 3}
    assert Observation.from_dict(stored) == shown


@pytest.fixture
def run(tmp_path: Path, made_up_traces: None, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMX_LEARNED", "on")
    directory = RunDir(tmp_path / "run")
    directory.root.mkdir()
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in records(6)))
    return directory


def learned_from(run: RunDir, done: Composed) -> list[Observation]:
    write_json(run.plan, done.plan.to_dict())
    return learn(run, done.experiment)


def test_a_run_teaches_the_next_plan_and_forgetting_is_deleting(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = planned(["hardware=cpu2", "zero=stage1"])
    assert informed(done).plan.time == done.plan.time
    assert learned_from(run, done)
    taught = informed(done)
    assert taught.plan.time.step_s == pytest.approx(0.4, rel=0.01)
    assert f"learned from 1 run in {learned_file()}" in taught.plan.time.sources[0]
    assert taught.plan == replace(done.plan, time=taught.plan.time)
    assert taught.ds_config == done.ds_config
    learned_from(run, done)
    assert len(read_observations(learned_file())) == 2
    monkeypatch.setenv("LLMX_LEARNED", "off")  # neither reads nor writes
    assert informed(done).plan.time == done.plan.time
    learned_file().unlink()
    assert learned_from(run, done) == []
    assert not learned_file().exists()
    monkeypatch.setenv("LLMX_LEARNED", "on")
    assert informed(done).plan.time == done.plan.time


def test_runs_that_end_together_lose_no_line(run: RunDir) -> None:
    done = composed(["hardware=cpu2", "zero=stage2"])
    (line,) = learned_from(run, done)
    with ThreadPoolExecutor(8) as pool:
        taught = list(pool.map(lambda _: learn(run, done.experiment), range(40)))
    assert taught == [[line]] * 40
    assert read_observations(learned_file()) == [line] * 41


def test_a_damaged_file_is_no_file_and_the_next_run_writes_a_good_one(run: RunDir) -> None:
    done = planned(["hardware=cpu2", "zero=stage1"])
    learned_file().parent.mkdir(parents=True, exist_ok=True)
    for text in ("", "[]", '{"format": 99, "observations": [{}]}',
                 '{"format": 1, "observations": [3, {}, {"device": "cpu"}]}'):  # fmt: skip
        learned_file().write_text(text)
        assert informed(done).plan.time == done.plan.time
        assert learned_from(run, done)
        assert informed(done).plan.time != done.plan.time
    # A run that is cut short, or cannot write, teaches nothing and fails nothing.
    learned_file().unlink()
    learned_file().mkdir()
    assert learned_from(run, done) == []
    run.metrics.unlink()
    assert learned_from(run, done) == []


def test_the_plan_of_the_last_attempt_counts(run: RunDir) -> None:
    """Its split was measured, or it ran on fewer hosts: ``plan.json`` is written again."""
    done = composed(["hardware=cpu2", "batch.balance=measured", "batch.global_batch=32"])
    assert done.plan.balance.pending
    assert learned_from(run, done) == []  # nobody has measured the split
    for size, tokens in (4, 512), (8, 1024):
        found = composed(["hardware=cpu2", f"batch.micro_batch={size}", "data.seq_len=128"])
        (shown,) = learned_from(run, found)
        assert shown.tokens == tokens


def test_what_has_run_otherwise_before_does_not_count() -> None:
    """A resumed run, on other hosts maybe, has a warm-up again; so has one with another split."""
    slow = records(6, step_time_s=3.0, tokens_per_s=700.0)
    for event in ({"event": "resumed", "step": 11}, {"event": "rebalanced", "step": 11}):
        later = [{**line, "step": 11 + line["step"]} for line in records(6) if "step" in line]
        lines = [*slow, {"kind": "event", **event}, *later]
        assert measured_of(lines) == measured_of(records(6))
        assert measured_of(lines[:-4]) is None  # too few since then
    saved = {"kind": "event", "event": "saved", "step": 11}
    assert measured_of([*slow, saved, *later]) != measured_of(records(6))


def test_what_is_resumed_and_reproduced_teaches(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the place of its ranks, lines of ranks."""
    done = composed(["hardware=cpu2", "zero=stage1", "task.steps=11"], run_dir=tmp_path / "first")
    first = snapshot.write(done.experiment, done.plan, done.ds_config, overrides=[], environment={})

    def trained(exp: Experiment, plan: Plan, directory: RunDir, **_: object) -> SimpleNamespace:
        directory.metrics.write_text(run.metrics.read_text())
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr("llmx.launch.supervise", trained)
    assert read_observations(learned_file()) == []
    for count, (command, start) in enumerate({"resume": resume, "reproduce": reproduce}.items(), 1):
        assert start(parse(command, [str(first.root)])) == 0
        assert [one.stage for one in read_observations(learned_file())] == [1] * count


def test_a_smaller_micro_batch_than_was_seen_still_takes_its_launches() -> None:
    words = ["hardware=a100x8", "zero=stage1", "data.seq_len=128", "batch.global_batch=64"]

    def seconds(size: int, known: LearnedSpeeds) -> float:
        done = composed([*words, f"batch.micro_batch={size}"])
        found = step_time(done.experiment, done.plan, learned=known)
        return found.computing_s / done.plan.batch.accumulation

    at_least = seconds(1, LearnedSpeeds())  # as assumed, of a model so small
    layers = 3
    assert at_least == pytest.approx(layers * LAYER_S)
    # Seen at 8 rows, which took twice that: so does no smaller one take less than that.
    work = seconds(8, LearnedSpeeds(tflops={"a100_80g": 1.0}))
    seen = LearnedSpeeds(tokens={"a100_80g": 8 * 128})
    slow = replace(seen, tflops={"a100_80g": work / (2 * at_least)})
    assert seconds(8, slow) == pytest.approx(2 * at_least)
    assert seconds(4, slow) == pytest.approx(at_least)
    assert seconds(1, slow) == pytest.approx(at_least)
    # It took half of that: less than was assumed, and nothing is said of larger ones.
    fast = replace(seen, tflops={"a100_80g": work / (0.5 * at_least)})
    assert seconds(8, fast) == seconds(1, fast) == pytest.approx(0.5 * at_least)
