"""``reproduce``: a wrong command line, and two runs compared value by value, where nothing that
differs may pass as identical."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmx.cli.words import parse
from llmx.compose.complete import plan_experiment
from llmx.errors import ConfigError
from llmx.lifecycle.reproduce import (
    _record_of,
    next_experiment,
    other_inputs,
    print_outcome,
)
from llmx.lifecycle.reproduce import (
    run as reproduce,
)
from llmx.run import snapshot
from llmx.run.metrics.equality import DIFFER, EQUAL, UNKNOWN, Outcome, compare, weight_hashes
from llmx.run.provenance.differences import BREAKS, MAY, Difference
from llmx.run.rundir import RunDir, write_json
from tests.composing import composed


def test_a_config_alone_starts_and_says_what_is_not_compared(tmp_path: Path, capsys) -> None:
    """On this machine, whatever the other one had; its global batch stays."""
    done = composed(["hardware=local", "batch.global_batch=null"], run_dir=tmp_path / "theirs")
    hardware = done.experiment.hardware
    hosts = [dataclasses.replace(hardware.hosts[0], slots=8, device="a100_80g")]
    exp = dataclasses.replace(done.experiment, hardware=dataclasses.replace(hardware, hosts=hosts))
    run = RunDir(tmp_path / "theirs")
    run.root.mkdir()
    run.config.write_text(snapshot.dump_config(exp))
    words = parse("reproduce", [str(run.root), "dry_run=true"])
    assert reproduce(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not compared: code, packages, devices and inputs (there is no provenance.json)" in said
    assert "nothing differs" not in said
    assert list(run.root.iterdir()) == [run.config]
    plan = plan_experiment(exp).plan
    mine, _ = next_experiment(exp, plan, words, target=tmp_path / "mine", to_step=None)
    assert (mine.hardware, mine.batch.global_batch) == (hardware, plan.batch.global_batch)


def test_a_wrong_command_line_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, said in ((["nowhere"], "no such directory"), ([], "takes one run directory")):
        with pytest.raises(ConfigError, match=said):
            reproduce(parse("reproduce", words))


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    for text, damage in (
        ('{"git": {"untracked": "NaN"}}', "git.untracked is 'NaN'"),
        ('{"fingerprints": {"data": "x"}}', "fingerprints.data is 'x'"),
        ("{", "cannot be read"),
    ):
        (tmp_path / "provenance.json").write_text(text)
        with pytest.raises(ConfigError, match=f"nothing can be compared .*: .*{damage}"):
            _record_of(RunDir(tmp_path))


def test_inputs_that_the_ranks_read_otherwise_are_named(tmp_path) -> None:
    one, two = RunDir(tmp_path / "one"), RunDir(tmp_path / "two")
    write_json(one.inputs, {"data": "a", "eval_data": None, "tokenizer": "t"})
    assert other_inputs(one, two) == []
    write_json(two.inputs, {"data": "b", "eval_data": None, "tokenizer": "t"})
    assert other_inputs(one, two) == ["data"]


def test_hashes_of_weights_are_of_the_end_and_of_checkpoints(tmp_path) -> None:
    run = RunDir(tmp_path)
    assert weight_hashes(run) == {}
    write_json(run.checkpoint(4) / "state.json", {"step": 4, "weights_hash": "a"})
    write_json(run.checkpoint(8) / "state.json", {"step": 8})
    run.metrics.write_text('{"kind": "end", "step": 9, "weights_hash": "b"}\n')
    assert weight_hashes(run) == {4: "a", 9: "b"}


# --- Two runs compared -----------------------------------------------------------------------


def lines(**more: object) -> list[dict]:
    """Of 40 steps, of which the first and each tenth are logged."""
    found: list[dict] = [{"kind": "start", "total_steps": 40, "time": 1.0}]
    for step in (1, 10, 20, 30, 40):
        found.append(
            {"kind": "train", "step": step, "time": float(step), "loss": 3.0 / step,
             "grad_norm": 0.5, "lr": 1e-3, "loss_scale": 1.0, "samples": step * 8, "tokens": 99,
             "target_tokens": 9, "tokens_per_s": 1e4, "memory_gib": [1.0], **more}
        )  # fmt: skip
    found.append({"kind": "eval", "step": 40, "loss": 1.25, "exact_match": None})
    return [*found, {"kind": "end", "step": 40}]


SHORT = [line for line in lines() if line.get("step", 0) <= 20]
WEIGHTS = {40: "a"}


def with_weights(then: list[dict], now: list[dict], hashes: dict[int, str] = WEIGHTS) -> Outcome:
    return compare(then, now, hashes_then=hashes, hashes_now=hashes)


def test_identical_up_to_times_and_speeds() -> None:
    other = lines(tokens_per_s=2.0, memory_gib=[9.0])
    outcome = compare(lines(), other)
    assert (outcome.identical, outcome.is_proven) == (True, False)
    assert (outcome.lines, outcome.last_step, outcome.weights) == (6, 40, UNKNOWN)
    assert outcome.summary().startswith("equal over the 6 logged lines up to step 40. The weights")
    assert "no proof that they are equal" in outcome.summary()
    outcome = with_weights(lines(), other)
    assert (outcome.weights, outcome.is_proven) == (EQUAL, True)
    assert outcome.summary().startswith("bitwise identical: 6 logged lines up to step 40, and")


def test_the_summary_says_over_how_much_of_the_first_run_it_holds() -> None:
    assert compare(lines(), SHORT).summary().startswith(
        "equal over the 3 of 6 logged lines up to step 20 of 40. The weights were not compared"
    )  # fmt: skip
    assert with_weights(lines(), SHORT, {10: "a"}).summary() == (
        "bitwise identical: 3 of 6 logged lines up to step 20 of 40, and the hash of the weights "
        "at step 10. Later weights were not compared."
    )


def test_one_value_that_differs_is_the_first_difference() -> None:
    for name in ("loss", "grad_norm", "lr", "loss_scale", "samples", "tokens"):
        other = lines()
        other[3][name] = math.nextafter(float(other[3][name]), 1e9)
        outcome = compare(lines(), other)
        assert not outcome.identical
        assert outcome.first_difference is not None
        assert (outcome.first_difference.step, outcome.first_difference.name) == (20, name)
        assert f"differs first at step 20: {name}" in outcome.summary()


def test_the_largest_is_of_a_loss_and_said_with_its_step() -> None:
    other = lines()
    other[2]["grad_norm"] *= 3
    other[4]["loss"] *= 1.01
    other[5]["loss"] *= 1.5
    outcome = compare(lines(), other)
    assert outcome.first_difference is not None
    assert outcome.largest_difference is not None
    assert (outcome.first_difference.step, outcome.first_difference.name) == (10, "grad_norm")
    assert (outcome.largest_difference.step, outcome.largest_difference.name) == (40, "loss")
    assert outcome.largest_difference.relative == pytest.approx(1 / 3)
    assert "Largest difference, at step 40" in outcome.summary()
    assert outcome.values_that_differ == 3


def test_a_run_cut_short_is_compared_as_far_as_it_went() -> None:
    """Its own last step was not logged then."""
    short = [*SHORT, {**lines()[2], "step": 25, "loss": 9.0}]
    outcome = compare(lines(), short, hashes_then={40: "a", 25: "b"}, hashes_now={25: "b"})
    assert (outcome.identical, outcome.last_step, outcome.weights) == (True, 20, EQUAL)


def test_a_step_without_a_line_is_missing_and_one_trained_again_counts_as_it_was_last() -> None:
    other = lines()
    other.insert(3, {**other[3], "loss": 99.0})
    assert compare(lines(), other).identical
    other = [line for line in lines() if not (line["kind"] == "train" and line["step"] == 20)]
    outcome = compare(lines(), other)
    assert (outcome.missing, outcome.identical) == ([20], False)
    assert "The second run logged nothing at step 20." in outcome.summary()


def test_weights_that_differ_count_although_all_losses_agree() -> None:
    outcome = compare(lines(), lines(), hashes_then=WEIGHTS, hashes_now={40: "b"})
    assert (outcome.weights, outcome.identical) == (DIFFER, False)
    assert "the weights at step 40 are not" in outcome.summary()


def test_a_loss_that_is_no_number_is_only_equal_to_another() -> None:
    nan = lines(loss=None, nonfinite=True)
    assert compare(nan, copy.deepcopy(nan)).identical
    outcome = compare(lines(), nan)
    assert outcome.first_difference is not None
    assert outcome.first_difference.relative is None
    assert "no number now" in outcome.summary()
    assert outcome.to_dict()["first_difference"]["relative"] is None


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(then=FINITE, now=FINITE)
def test_identical_means_bit_for_bit(then: float, now: float) -> None:
    one, other = ([{"kind": "train", "step": 1, "loss": loss}] for loss in (then, now))
    assert compare(one, other).identical is (then.hex() == now.hex())


def said(outcome: Outcome, *found: Difference, other: tuple[str, ...] = ()) -> str:
    stream = io.StringIO()
    print_outcome(outcome, [*other], [*found], stream=stream, where="/runs/b/reproduction.json")
    return stream.getvalue()


def test_what_breaks_equality_is_repeated_beside_the_result() -> None:
    """The table of what differs is hours up by then."""
    outcome = with_weights(lines(), lines())
    assert said(outcome).startswith("\n✓ reproduction: bitwise identical")
    model = Difference(BREAKS, "model", "1111", "2222", "restore /m")
    text = said(outcome, model, Difference(MAY, "Python", "3.10", "3.11"))
    assert text.startswith("\n= reproduction: bitwise identical")
    assert "break bitwise equality:\n    model: 1111 then, 2222 now\n" in text
    assert "no effect on what was compared" in text
    assert "Python" not in text


def test_marks() -> None:
    equal = compare(lines(), lines())
    assert said(equal).startswith("\n= ")
    assert said(compare(lines(), lines(loss=1.0))).startswith("\n≠ ")
    for nothing in (compare([], lines()), compare(lines(), [])):
        assert not nothing.identical
        assert said(nothing).startswith("\n? reproduction: nothing to compare")
    other = said(equal, other=("data",))
    assert "read other inputs than those of the first run: data" in other
