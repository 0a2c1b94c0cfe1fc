"""What finished runs teach: taken apart and put together again, a run predicts itself."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmx.compose.complete import Composed
from llmx.config import Experiment
from llmx.lifecycle import learned
from llmx.lifecycle.learned import (
    learn,
    learned_file,
    measured_of,
    read_observations,
    with_learned_time,
)
from llmx.lifecycle.reproduce import main as reproduce
from llmx.lifecycle.resume.command import main as resume
from llmx.plan.geometry import model_geometry
from llmx.plan.learned import Measured, Observation, contexts_gib, known_of, observe
from llmx.plan.step_time import LAYER_S, LearnedSpeeds, flops_by_device, step_time, token_flops
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.rundir import RunDir, write_json
from tests.composing import composed

TRUTH = LearnedSpeeds(tflops={"cpu": 0.02}, link_gb_per_s=0.02, at_stage_3=frozenset({"cpu"}))
"""Communication is a part of a step that can be told from noise."""


def measured(
    done: Composed, truth: LearnedSpeeds, *, fill: float = 1.0, timed: bool = True
) -> Measured:
    """Of a cluster on which the truth holds."""
    shape = model_geometry(done.experiment.model)
    assert shape is not None
    found = step_time(done.experiment, done.plan, learned=truth)
    flops = token_flops(done.experiment, done.plan, shape)
    forward = [
        (found.computing_s - share * found.step_s) * flops.forward / flops.run
        for share in found.idle
    ]
    tokens = done.plan.batch.tokens_per_step * fill
    return Measured(found.step_s, tokens, tuple(forward) if timed else ())


@pytest.mark.parametrize("words", [
    ["zero=stage2", "batch.global_batch=64"], ["zero=stage3"],
])  # fmt: skip
@pytest.mark.parametrize("timed", [True, False])
def test_a_run_predicts_itself(words: list[str], timed: bool) -> None:
    done = composed(["hardware=cpu2", *words])
    truth = measured(done, TRUTH, timed=timed)
    found = observe(done.experiment, done.plan, truth)
    again = step_time(
        done.experiment, done.plan, learned=known_of(found, done.experiment, done.plan)
    )
    assert again.step_s == pytest.approx(truth.step_s, rel=0.01)
    if timed:
        assert found[0].tflops == pytest.approx(0.02, rel=0.01)
        assert found[0].link_gb_per_s == pytest.approx(0.02, rel=0.05)
    else:
        assert found[0].link_gb_per_s is None


@pytest.mark.parametrize("words", [
    ["zero=stage3"], ["batch.micro_batch=2"], ["model.activation_checkpointing=full"],
])  # fmt: skip
def test_and_another_configuration_on_the_same_cluster(words: list[str]) -> None:
    """As far as FLOP/s and link are those of the cluster, and not of the configuration."""
    seen = composed(["hardware=cpu2", "zero=stage1"])
    found = observe(seen.experiment, seen.plan, measured(seen, TRUTH))
    other = composed(["hardware=cpu2", "zero=stage1", *words])
    known = known_of(found, other.experiment, other.plan)
    predicted = step_time(other.experiment, other.plan, learned=known)
    truth = step_time(other.experiment, other.plan, learned=TRUTH)
    assert predicted.step_s == pytest.approx(truth.step_s, rel=0.05)


def test_unequal_devices_are_told_apart_by_their_forward_passes() -> None:
    words = ["hardware=a100x2_v100x2", "zero=stage1", "model=llama3_8b", "batch.global_batch=64"]
    done = composed([*words, "batch.balance=off"])
    truth = LearnedSpeeds(tflops={"a100_40g": 150.0, "v100_32g": 30.0}, link_gb_per_s=1.0)
    found = observe(done.experiment, done.plan, measured(done, truth))
    assert {one.device: round(one.tflops, 1) for one in found} == pytest.approx(
        truth.tflops, rel=0.05
    )
    # Without them the slowest device alone would decide, and which it is is not known.
    assert observe(done.experiment, done.plan, measured(done, truth, timed=False)) == []


def test_a_type_of_device_that_computes_again_is_no_slower_for_it() -> None:
    words = ["hardware=a100x2_v100x2", "zero=stage1", "model=llama3_8b", "batch.global_batch=64"]
    done = composed(
        [*words, "batch.balance=off", "hardware.devices.v100_32g.activation_checkpointing=full"]
    )
    assert done.plan.checkpointing
    # Forward passes at four times the speed; what is computed again is not in them.
    flops = flops_by_device(done.experiment, done.plan, model_geometry(done.experiment.model))
    rates = {"a100_40g": 120.0, "v100_32g": 30.0}
    forward = [flops[r.device].forward / rates[r.device] for r in done.plan.ranks]
    tokens = done.plan.batch.tokens_per_step
    seen = Measured(2 * sum(forward), tokens, tuple(forward))
    found = {one.device: one.tflops for one in observe(done.experiment, done.plan, seen)}
    assert found["a100_40g"] / found["v100_32g"] == pytest.approx(4.0, rel=0.01)


def test_links_are_those_of_the_same_hosts() -> None:
    done = composed(["hardware=cpu2"])
    hosts = tuple(host.name for host in done.plan.hosts)
    found = [
        an_observation(hosts=hosts, link_gb_per_s=2.0),
        an_observation(hosts=("node-a", "node-b"), link_gb_per_s=9.0),
    ]
    assert known_of(found, done.experiment, done.plan).link_gb_per_s == 2.0


def test_padding_counts_for_other_data_alone() -> None:
    done = composed(["hardware=cpu2", "zero=stage1"])
    truth = measured(done, TRUTH, fill=0.5)
    found = observe(done.experiment, done.plan, truth)
    assert found[0].fill == pytest.approx(0.5)
    exp = done.experiment
    same = step_time(exp, done.plan, learned=known_of(found, exp, done.plan))
    assert same.step_s == pytest.approx(truth.step_s, rel=0.01)
    other = replace(exp, data=replace(exp.data, name="others"))
    full = known_of(found, other, done.plan)
    assert full.tflops["cpu"] == pytest.approx(same.computing_s and found[0].tflops)


def an_observation(**values: object) -> Observation:
    base = Observation("cpu", "fp32", "sft", "llama", 20.0, "sdpa", 2, 1024, 1.0)
    return replace(base, **values)  # type: ignore[arg-type]


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
    words = ["hardware=a100x2_v100x2", "model=llama3_8b", "zero=stage2", "batch.balance=off"]
    lora, qlora = composed([*words, "adapter=lora"]), composed([*words, "adapter=qlora"])

    def seconds(done: Composed, seen: Composed) -> float:
        truth = LearnedSpeeds(
            tflops=dict.fromkeys(seen.plan.devices, 50.0),
            link_gb_per_s=10.0,
            with_unpacking=frozenset(seen.plan.devices if seen is qlora else ()),
        )
        runs = observe(seen.experiment, seen.plan, measured(seen, truth))
        speeds = known_of(runs, done.experiment, done.plan)
        return step_time(done.experiment, done.plan, learned=speeds).step_s

    assert seconds(qlora, seen=lora) > 1.1 * seconds(lora, seen=lora)
    assert seconds(qlora, seen=qlora) == pytest.approx(seconds(lora, seen=lora), rel=0.05)


def test_the_context_of_a_type_of_device_is_the_largest_of_the_newest_runs() -> None:
    shown = [9.0, 0.5, 0.7, 0.6, 0.5, 0.5]
    found = [an_observation(device="a100_80g", context_gib=size) for size in shown]
    assert contexts_gib([*found, an_observation(context_gib=None)]) == {"a100_80g": 0.7}


def records(count: int, **values: object) -> list[dict[str, object]]:
    line = {"kind": "train", "step_time_s": 0.5, "tokens_per_s": 4000.0, "data_wait_s": 0.2}
    first = {**line, "step": 1, "step_time_s": 9.0, "forward_s": [5.0, 5.0]}
    rest = [
        {**line, "step": 1 + 2 * n, "forward_s": [0.1, 0.12], **values} for n in range(1, count)
    ]
    return [{"kind": "start"}, first, *rest, {"kind": "eval", "step": 1}]


def test_medians_of_a_run_without_its_warm_up_and_waiting_for_data() -> None:
    found = measured_of(records(6))
    assert found == Measured(pytest.approx(0.4), pytest.approx(2000.0), (0.1, 0.12))
    assert measured_of(records(3)) is None  # too few steps
    stage_3 = measured_of(records(6, forward_s=None))
    assert stage_3 is not None
    assert stage_3.forward_s == ()
    assert stage_3.context_gib == ()


def test_the_least_context_of_each_rank_counts() -> None:
    """What another process held at the first line of step 3 is not a run's own."""
    lines = [*records(6, context_gib=[0.6, 0.7])]
    lines[2] = {**lines[2], "context_gib": [9.0, 0.5]}
    lines[1] = {**lines[1], "context_gib": [0.1, 0.1]}  # before NCCL had its buffers
    found = measured_of(lines)
    assert found is not None
    assert found.context_gib == (0.6, 0.5)
    done = composed(["hardware=cpu2"])
    (shown,) = observe(done.experiment, done.plan, found)
    assert shown.context_gib == 0.5
    assert Observation.from_dict(json.loads(json.dumps(shown.to_dict()))) == shown


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMX_LEARNED", "on")
    directory = RunDir(tmp_path / "run")
    directory.root.mkdir()
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in records(6)))
    return directory


def learned_from(run: RunDir, done: Composed) -> list[Observation]:
    write_json(run.plan, done.plan.to_dict())
    return learn(run, done.experiment)


def test_a_run_teaches_the_next_plan_and_forgetting_is_deleting(run: RunDir) -> None:
    done = composed(["hardware=cpu2", "zero=stage1"])
    assert with_learned_time(done) is done
    assert learned_from(run, done)
    taught = with_learned_time(done)
    assert taught.plan.time is not None
    assert taught.plan.time.step_s == pytest.approx(0.4, rel=0.01)
    assert f"learned from 1 run in {learned_file()}" in taught.plan.time.sources[0]
    assert replace(taught.plan, time=None) == replace(done.plan, time=None)
    assert taught.ds_config == done.ds_config
    learned_from(run, done)
    assert len(read_observations(learned_file())) == 2
    learned_file().unlink()
    assert with_learned_time(done) is done


def test_runs_that_end_together_lose_no_line(run: RunDir) -> None:
    done = composed(["hardware=cpu2", "zero=stage2"])
    (line,) = learned_from(run, done)
    with ThreadPoolExecutor(8) as pool:
        taught = list(pool.map(lambda _: learn(run, done.experiment), range(40)))
    assert taught == [[line]] * 40
    assert read_observations(learned_file()) == [line] * 41


def test_a_lock_that_is_not_given_up_is_not_waited_for(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "LOCK_S", 0.1)
    done = composed(["hardware=cpu2", "zero=stage2"])
    learned_from(run, done)
    with learned._alone(learned_file().parent):
        assert learn(run, done.experiment)
    assert len(read_observations(learned_file())) == 2


def test_off_neither_reads_nor_writes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    done = composed(["hardware=cpu2", "zero=stage1"])
    learned_from(run, done)
    monkeypatch.setenv("LLMX_LEARNED", "off")
    assert with_learned_time(done) is done
    learned_file().unlink()
    assert learned_from(run, done) == []
    assert not learned_file().exists()


@pytest.mark.parametrize("text", [
    "", "[]", '{"format": 99, "observations": [{}]}',
    '{"format": 1, "observations": [3, {}, {"device": "cpu"}]}',
])  # fmt: skip
def test_a_damaged_file_is_no_file_and_the_next_run_writes_a_good_one(
    run: RunDir, text: str
) -> None:
    done = composed(["hardware=cpu2", "zero=stage1"])
    learned_file().parent.mkdir(parents=True)
    learned_file().write_text(text)
    assert with_learned_time(done) is done
    assert learned_from(run, done)
    assert with_learned_time(done) is not done


def test_a_run_that_is_cut_short_or_unwritable_teaches_nothing_and_fails_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = composed(["hardware=cpu2", "zero=stage1"])
    (tmp_path / "cache").write_text("a file, no directory")
    assert learned_from(run, done) == []
    run.metrics.unlink()
    assert learned_from(run, done) == []


def test_the_plan_of_the_last_attempt_counts(run: RunDir) -> None:
    """Its split was measured, or it ran on fewer hosts: ``plan.json`` is written again."""
    done = composed(["hardware=cpu2", "batch.balance=measured", "batch.global_batch=32"])
    assert done.plan.balance is not None
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
        later = [{**line, "step": 11 + line["step"]} for line in records(6) if "step" in line]  # type: ignore[operator]
        lines = [*slow, {"kind": "event", **event}, *later]
        assert measured_of(lines) == measured_of(records(6))
        assert measured_of(lines[:-4]) is None  # too few since then
    later[1]["event"] = "saved"
    assert measured_of([*slow, {"kind": "event", "event": "saved", "step": 11}, *later]) != (
        measured_of(records(6))
    )


@pytest.mark.parametrize("command", ["resume", "reproduce"])
def test_what_is_resumed_or_reproduced_teaches(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """In the place of its ranks, lines of ranks."""
    done = composed(["hardware=cpu2", "zero=stage1", "task.steps=11"], run_dir=tmp_path / "first")
    first = snapshot.write(done.experiment, done.plan, done.ds_config, overrides=[], environment={})

    def trained(exp: Experiment, plan: Plan, directory: RunDir, **_: object) -> SimpleNamespace:
        directory.metrics.write_text(run.metrics.read_text())
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr("llmx.launch.supervise", trained)
    assert read_observations(learned_file()) == []
    assert {"resume": resume, "reproduce": reproduce}[command]([str(first.root)]) == 0
    (shown,) = read_observations(learned_file())
    assert shown.stage == 1


def on_a_gpu(rate: float, tokens: int) -> LearnedSpeeds:
    return LearnedSpeeds(tflops={"a100_80g": rate}, tokens={"a100_80g": tokens})


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
    slow = on_a_gpu(work / (2 * at_least), 8 * 128)
    assert seconds(8, slow) == pytest.approx(2 * at_least)
    assert seconds(4, slow) == pytest.approx(at_least)
    assert seconds(1, slow) == pytest.approx(at_least)
    # It took half of that: less than was assumed, and nothing is said of larger ones.
    fast = on_a_gpu(work / (0.5 * at_least), 8 * 128)
    assert seconds(8, fast) == seconds(1, fast) == pytest.approx(0.5 * at_least)
