"""``auto``: the fastest that fits, as plain values with the reason; and what is said where nothing
does; clusters side by side. With made-up traces; of real ones: tests/unit/test_plan_trace.py."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmx.cli.plan import compared
from llmx.cli.plan import run as plan
from llmx.cli.words import parse
from llmx.compose.complete import Composed, check, complete, plan_experiment, refusal
from llmx.config import experiment_from_dict, to_dict
from llmx.config.fields import AUTO
from llmx.errors import ConfigError
from llmx.lifecycle.knowledge import informed
from llmx.lifecycle.learned import learned_file
from llmx.lifecycle.resume.changes import keep_choice
from llmx.lifecycle.resume.command import run as resume
from llmx.lifecycle.start import prepare, run_composed
from llmx.plan.choices import MICRO_BATCH, auto_keys, choices
from llmx.plan.learned import Observation
from llmx.plan.types import Plan
from llmx.run import snapshot
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.text import TIMES
from tests.composing import composed, planned, values

ALL = ["zero=auto", "batch.micro_batch=auto", "model.activation_checkpointing=auto"]
LLAMA = ["model=llama3_8b", "hardware=a100x8", "batch.global_batch=64", "data.seq_len=4096"]
SMALL = ["hardware=cpu2", "batch.global_batch=16", "data.seq_len=128"]


pytestmark = pytest.mark.usefixtures("made_up_traces", "here")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values_of(found: Composed) -> dict[str, str]:
    exp = found.experiment
    return {
        "zero": f"stage{exp.zero.stage}",
        "model.activation_checkpointing": exp.model.activation_checkpointing,
        "batch.micro_batch": str(exp.batch.micro_batch),
    }


def test_auto_is_written_and_read_as_a_word() -> None:
    exp, problems = complete(experiment_from_dict(values([*ALL, *LLAMA])))
    assert not problems
    assert (exp.zero.stage, exp.batch.micro_batch) == (AUTO, AUTO)
    assert to_dict(exp)["zero"]["stage"] == to_dict(exp)["batch"]["micro_batch"] == "auto"
    assert experiment_from_dict(to_dict(exp)) == exp
    assert auto_keys(exp) == ("zero", "model.activation_checkpointing", "batch.micro_batch")
    check(exp)  # as a command that plans nothing does


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("batch.micro_batch=0", "must be a whole number from 1 to 1048576, or auto"),
        ("batch.micro_batch=atuo", "must be a whole number from 1 to 1048576, or auto"),
        ("zero.stage=4", "must be a whole number from 0 to 3, or auto"),
        ("batch.accumulation=auto", "must be a whole number from 1 to 1048576, or null"),
    ],
)
def test_what_is_no_auto(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned([word])


def test_a_step_must_have_a_size() -> None:
    words = ["batch.micro_batch=auto", "model=gpt2", "model.init=scratch", "hardware=h100x8"]
    for more in ([], ["batch.accumulation=4"]):
        with pytest.raises(ConfigError, match=r"Set batch\.global_batch=64 \(samples\), or batch"):
            planned([*words, *more])
    assert planned(["batch.micro_batch=auto", "batch.tokens_per_step=5e5", *LLAMA[:2]])


def test_the_fastest_that_fits_as_plain_values() -> None:
    found = planned([*ALL, *LLAMA])
    chosen = found.plan.chosen
    assert chosen.keys == ("zero", "model.activation_checkpointing", "batch.micro_batch")
    said = dict(word.split("=") for word in chosen.words)
    assert said == values_of(found)
    assert not auto_keys(found.experiment)
    assert all(part.fits for part in found.plan.memory)
    # Typed, the choice is the same run.
    again = planned([*chosen.words, *LLAMA])
    assert again.experiment == found.experiment
    assert again.plan == dataclasses.replace(found.plan, chosen=None)
    assert Plan.from_dict(json.loads(json.dumps(found.plan.to_dict()))) == found.plan
    # None that fits is clearly faster.
    every = choices(found.experiment, found.knowledge, allows=refusal)
    own = next(one for one in every if one.chosen)
    exact = [one for one in every if one.fits and one.plan.grad_accum_dtype == "fp32"]
    assert own.cost <= 1.05 * min(one.cost for one in exact)


def test_what_is_set_stays_and_decides_with_it() -> None:
    found = planned(["zero=auto", "batch.micro_batch=1", *LLAMA])
    assert found.experiment.batch.micro_batch == 1
    assert found.plan.chosen.keys == ("zero",)
    # No stage whose sums over micro steps have 16 bits only, where another fits.
    assert found.plan.batch.accumulation == 8
    assert found.plan.grad_accum_dtype == "fp32"
    assert found.experiment.zero.stage > 0
    found = planned(["zero=auto", "zero.offload_optimizer=cpu", "zero.pin_memory=false", *LLAMA])
    zero = found.experiment.zero
    assert (zero.offload_optimizer, zero.pin_memory) == ("cpu", False)
    only = planned(["model.activation_checkpointing=auto", "zero=stage3", *LLAMA])
    assert only.experiment.zero.stage == 3


def test_rules_leave_out_what_they_refuse() -> None:
    """Stage 0 alone, where the optimizer keeps parts of matrices; not stage 3 with 4 bits."""
    found = planned(["zero=auto", "optim=adafactor", "model=gpt2", "hardware=a100x8"])
    assert found.experiment.zero.stage == 0
    quantized = planned([*ALL, *LLAMA, "adapter=qlora"])
    assert quantized.experiment.zero.stage < 3
    with pytest.raises(ConfigError, match="optim.kind=adafactor"):
        planned(["zero=auto", "zero.offload_optimizer=cpu", "optim=adafactor", "hardware=a100x8"])
    with pytest.raises(ConfigError, match=r"optim\.lr=0: must be"):
        planned(["zero=auto", "optim.lr=0"])


def test_unknown_memory_takes_the_defaults_and_says_so() -> None:
    found = planned([*ALL, *SMALL])
    plain = planned([*SMALL, "batch.micro_batch=1"])
    assert found.experiment == plain.experiment
    assert "hardware.devices.cpu.memory_gib" in found.plan.chosen.reason
    assert "defaults" in found.plan.chosen.reason
    unknown = planned([*ALL, "model=hf", "model.path=owner/name", *LLAMA[1:]])
    assert "the memory of a step is not known (not made up)" in unknown.plan.chosen.reason


def test_declared_memory_of_cpu_ranks_is_held() -> None:
    long = [*ALL, *SMALL, "data.seq_len=1024"]
    least = planned([*long, "hardware.devices.cpu.memory_gib=0.672"])
    most = planned([*ALL, *SMALL, "hardware.devices.cpu.memory_gib=64"])
    assert least.plan.memory[0].fits
    assert values_of(least)["model.activation_checkpointing"] == "full"
    assert values_of(most)["model.activation_checkpointing"] == "none"
    assert most.experiment.batch.micro_batch > least.experiment.batch.micro_batch == 1
    assert "offload" not in str(most.plan.chosen)


TOO_LARGE = ["model=llama3_8b", "hardware=a100x2_v100x2", "model.config.num_hidden_layers=100"]


def test_nothing_fits_one_message(tmp_path: Path) -> None:
    words = [*ALL, *TOO_LARGE, "batch.global_batch=64", "data.seq_len=4096", "dry_run=true"]
    found = composed(words, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        run_composed(found, overrides=words, stream=io.StringIO())
    said = str(error.value)
    assert "nothing fits" in said
    assert "zero=stage3_offload model.activation_checkpointing=full batch.micro_batch=1" in said
    assert "which has 32.0" in said
    assert not (tmp_path / "run" / "config.yaml").exists()


def problem_of(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        planned([*words])
    return str(error.value)


def test_the_next_step_is_planned() -> None:
    """Here the RAM of the hosts is what lacks."""
    words = ["zero=auto", "batch.micro_batch=1", *TOO_LARGE, "data.seq_len=512"]
    said = problem_of(*words, "model.config.num_hidden_layers=120")
    assert "of a host's RAM, which has 256" in said
    assert "4 such hosts instead of 2 (zero=stage3_offload)" in said
    # Another training, where nothing else is left.
    host = "hardware.hosts=[{name: localhost, slots: 8, device: a100_80g, memory_gib: 40}]"
    words = [*ALL[::2], *LLAMA[:2], host, "hardware.devices.a100_80g.memory_gib=16"]
    assert "adapter=lora trains little, and takes less (it was not planned)" in problem_of(*words)


def test_what_was_set_may_be_what_does_not_fit() -> None:
    said = problem_of(ALL[2], *LLAMA[:2], "zero=stage0", "precision=fp32")
    assert "The least memory has zero=stage0 model.activation_checkpointing=" in said
    assert "These fit by the plan, the fastest first: zero=stage" in said


def test_a_launch_and_a_resume_say_what_was_planned_and_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*LLAMA, "zero=stage1", "batch.micro_batch=8"]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    commit = tmp_path / "models--meta-llama--Llama-3.1-8B" / "refs" / "main"
    commit.parent.mkdir(parents=True)
    commit.write_text("1" * 40)
    ended = SimpleNamespace(exit_code=1)
    monkeypatch.setattr("llmx.launch.supervise", lambda *_args, **_known: ended)
    stream = io.StringIO()
    run = tmp_path / "run"
    run_composed(planned([*words, "dry_run=false"], run_dir=run), overrides=words, stream=stream)
    lines = [line[2:] for line in stream.getvalue().splitlines() if line.startswith("! ")]
    assert "expect it to run out of memory" in lines[0]
    assert "These fit by the plan, the fastest first: " in lines[1]
    assert Plan.from_dict(read_json(RunDir(run).plan)).warnings[:2] == tuple(lines)
    resume(parse("resume", [str(run)]))
    said = capsys.readouterr().out
    assert "  !         These fit by the plan, the fastest first: " in said


def learned(*rates: tuple[int, float]) -> None:
    """``learned.json`` with TFLOP/s of two CPU ranks by ZeRO stage."""
    one = Observation("cpu", "fp32", "sft", "llama", 19.6, "sdpa", 2, 1024, 1.0)
    found = [dataclasses.replace(one, stage=n, tflops=rate).to_dict() for n, rate in rates]
    learned_file().parent.mkdir(parents=True, exist_ok=True)
    write_json(learned_file(), {"format": 1, "observations": found})


def test_what_runs_have_shown_decides_and_the_reason_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMX_LEARNED", "on")
    words = ["zero=auto", *SMALL, "batch.micro_batch=2", "hardware.devices.cpu.memory_gib=8"]
    found = planned(words, run_dir=tmp_path / "run")
    assert found.plan.chosen is not None
    assert informed(found, choose=True).experiment == found.experiment  # no run yet
    # ZeRO 3 has been seen to be ten times as fast.
    learned((1, 0.01), (3, 0.1))
    chosen = informed(found, choose=True)
    assert chosen.experiment.zero.stage == 3 != found.experiment.zero.stage
    assert f"; speeds learned from 1 run in {learned_file()}" in chosen.plan.chosen.reason
    # A trial of a sweep chooses as those beside it, whatever trials before it have shown.
    assert prepare(found, overrides=words).exp.zero.stage == found.experiment.zero.stage
    assert f"auto: {' '.join(found.plan.chosen.words)}" in capsys.readouterr().out
    learned((1, 0.1), (3, 0.01))
    assert informed(found, choose=True).experiment.zero.stage < 3
    monkeypatch.setenv("LLMX_LEARNED", "off")
    assert informed(found, choose=True).experiment == found.experiment
    assert "learned" not in found.plan.chosen.reason


def test_a_launch_shows_and_keeps_the_choice_and_its_reason(tmp_path: Path) -> None:
    words = [*ALL, *SMALL, "hardware.devices.cpu.memory_gib=8", "dry_run=true"]
    found = planned(words, run_dir=tmp_path / "run")
    stream = io.StringIO()
    run_composed(found, overrides=words, stream=stream)
    text = stream.getvalue()
    assert all(words in text for words in ("chosen", *found.plan.chosen.words))
    assert "by the plan of" in " ".join(text.split())
    (row,) = [line for line in text.splitlines() if "* " in line and "stage" in line]
    assert "none" in row
    assert MICRO_BATCH in text
    run = RunDir(tmp_path / "run")
    kept = snapshot.load(run)
    assert not auto_keys(kept)
    assert kept == found.experiment
    assert read_json(run.plan)["chosen"]["words"] == list(found.plan.chosen.words)
    assert "auto" not in (tmp_path / "run" / "ds_config.json").read_text()
    # Planned again, as a resume does, it is not chosen again.
    assert plan_experiment(kept).plan.chosen is None


def test_a_resume_keeps_what_was_chosen_until_it_changes() -> None:
    found = planned([*ALL, *LLAMA])
    again = plan_experiment(found.experiment, knowledge=found.knowledge)
    assert keep_choice(again, found.plan, {"task.steps"}).plan == found.plan
    for key in ("zero.stage", "batch.micro_batch", "hardware.hosts"):
        assert keep_choice(again, found.plan, {key}).plan.chosen is None


# --- ``plan hardware=A,B``: clusters side by side, and nothing written ----------------------------

DEMO = ["experiment=demo", "batch.global_batch=64", "task.steps=100"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hardware=a100x8,h100x8", "zero=stage2"], ["a100x8", "h100x8"]),
        (["hardware=a100x8, h100x8", "--config-dir", "."], ["a100x8", "h100x8"]),
        (["-m", "hardware=a100x8,h100x8"], []),
        (["--cfg", "job", "hardware=a100x8,h100x8"], []),
        (["hardware=a100x8,h100x8", "hardware=cpu2"], ["cpu2"]),
    ],
)
def test_which_clusters_are_compared(words: list[str], expected: list[str]) -> None:
    assert compared(parse("plan", words)) == expected


class Watched(io.StringIO):
    """A plan that is ended while it is printed leaves nothing."""

    def write(self, text: str) -> int:
        assert list(Path.cwd().iterdir()) == []
        return super().write(text)


def shown(words: list[str]) -> str:
    stream = Watched()
    assert plan(parse("plan", words), stream=stream) == 0
    return stream.getvalue()


def test_one_table_and_no_run_directory() -> None:
    prices = "hardware.price_per_hour={a100_80g: 2, h100_80g: 3}"
    text = shown([*DEMO, "hardware=a100x8,h100x8,cpu2", prices])
    rows = {line[1:12].strip(): line[12:] for line in text.splitlines() if line.startswith(" ")}
    assert f"8{TIMES}a100_80g" in rows["devices"]
    assert f"2{TIMES}cpu" in rows["devices"]
    assert rows["fits"].split() == ["fits", "fits", "not", "checked"]
    assert rows["step"].split()[-1] == "unknown"
    assert len(rows["cost"].split()) == 2
    assert "cpu2: the time is not known: hardware.devices.cpu.peak_tflops.fp32" in text
    assert "cpu2: no price for cpu (hardware.price_per_hour)." in text


def test_one_plan_leaves_a_run_directory_only_where_it_is_asked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMX_OUTPUTS", str(here / "outputs"))
    assert "Nothing was started or written." in shown(["hardware=cpu2"])
    assert list(here.iterdir()) == []
    for words, directory in (("run_dir=mine", "mine"), ("dry_run=true", "outputs")):
        assert plan(parse("plan", ["hardware=cpu2", words])) == 0
        assert "deepspeed --hostfile" in capsys.readouterr().out
        assert len(list((here / directory).rglob("config.yaml"))) == 1


def test_a_mistake_in_the_experiment_is_an_error_said_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(parse("plan", [*DEMO, "hardware=a100x8,h100x8", "zero=stage7"]), stream=io.StringIO())
    assert str(caught.value).count("stage7") == 1


def test_different_batches_a_refusal_and_what_auto_has_chosen_are_shown() -> None:
    text = shown(["experiment=demo", "batch.global_batch=null", "hardware=a100x8,cpu2"])
    assert "Set batch.global_batch to compare the same training." in " ".join(text.split())
    clusters = "hardware=a100x8,h100x8,a100x2_v100x2"
    text = shown([*DEMO, clusters, "zero=auto", "precision=bf16"])
    assert text.count("zero=stage") == 2
    assert "a100x2_v100x2: precision=bf16" in text, "one that refuses hides no other"
    assert "tokens/s" in text
