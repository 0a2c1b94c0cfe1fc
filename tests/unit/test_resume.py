"""``resume`` before the start: what may change, what is refused, what is rewritten and kept."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmx.checkpoint.manifest import CheckpointError, Manifest, digest_bytes, read_manifest
from llmx.checkpoint.pointers import read_pointer, set_pointer
from llmx.cli.help import command_help
from llmx.cli.words import parse
from llmx.compose.apply_overrides import apply
from llmx.compose.complete import Composed, with_moved_paths
from llmx.config import Experiment, known_keys
from llmx.errors import ConfigError, LlmxError
from llmx.launch.supervision.journal import read_rollbacks, supervisor_lock, write_resume
from llmx.lifecycle.reproduce import all_differences, next_experiment
from llmx.lifecycle.resume.changes import (
    RULES,
    edited_config,
    next_run,
    rule_of,
    schedule_note,
)
from llmx.lifecycle.resume.command import _rewrite as rewrite
from llmx.lifecycle.resume.command import run as resume
from llmx.lifecycle.resume.run_state import (
    archive_run,
    committed,
    history,
    newest_usable,
    problems_of,
    read_state,
    roll_back,
    set_aside,
)
from llmx.run import snapshot
from llmx.run.provenance.differences import (
    BREAKS,
    HARMLESS,
    MAY,
    Difference,
    differences,
    not_recorded,
)
from llmx.run.rundir import RunDir, read_json, write_json
from tests.composing import composed


def main(words: list[str]) -> int:
    return resume(parse("resume", words))


@pytest.fixture(scope="module")
def planned() -> Composed:
    words = ["hardware=cpu2", "task.steps=100", "batch.global_batch=16", "batch.micro_batch=4"]
    return composed(words, run_dir="/runs/planned")


@pytest.fixture
def run(planned, tmp_path) -> RunDir:
    """A run of 100 steps on two CPU ranks, global batch 16, as its snapshot left it."""
    exp = dataclasses.replace(planned.experiment, run_dir=str(tmp_path / "run"))
    return written(dataclasses.replace(planned, experiment=exp))


def written(done: Composed) -> RunDir:
    parts = (done.experiment, done.plan, done.ds_config)
    return snapshot.write(*parts, overrides=["hardware=cpu2"], environment={})


def trained(run: RunDir, step: int, *, outcome: str | None = None, ended: bool = False) -> None:
    lines = [{"kind": "start", "total_steps": 100, "num_samples": 1600, "world_size": 2}]
    lines += [{"kind": "train", "step": step, "loss": 1.0}] if step else []
    lines += [{"kind": "end", "step": step}] if ended else []
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if outcome:
        write_json(run.result, {"outcome": outcome, "cause": "Ctrl-C"})


def checkpoint(run: RunDir, step: int, *, hosts: tuple[str, ...] = ("a",)) -> Path:
    """A committed one: a file a host, with a manifest of the right sizes."""
    directory = run.checkpoint(step)
    directory.mkdir(parents=True)
    files, owners = {}, {}
    for rank, host in enumerate(hosts):
        name = f"rank-{rank:05d}.safetensors"
        (directory / name).write_bytes(b"x" * 10)
        files[name], owners[name] = digest_bytes(b"x" * 10), host
    manifest = Manifest(step, files, hosts=owners, run_id="r")
    (directory / "manifest.json").write_text(manifest.to_text())
    return directory


def going_on(run: RunDir, *overrides: str):
    words = parse("resume", [str(run.root), *overrides])
    return next_run(run, snapshot.load(run), words, read_state(run))


def said(run: RunDir, capsys, *words: str) -> str:
    """What a dry run prints."""
    assert main([str(run.root), "dry_run=true", *words]) == 0
    return capsys.readouterr().out


def test_every_key_of_the_schema_has_a_row_of_the_table() -> None:
    keys = known_keys()
    for key in keys:
        if not any(other.startswith(f"{key}.") for other in keys):
            assert rule_of(key) in RULES, f"{key} has no row in llmx/lifecycle/resume/changes.py"


def test_values_and_whole_groups_are_applied_and_reported(run, tmp_path) -> None:
    upcoming = going_on(run, "zero=stage3", "launch.max_restarts=7", "tracking=wandb")
    new = upcoming.composed
    assert new.experiment.zero.stage == new.ds_config["zero_optimization"]["stage"] == 3
    changes = [(change.key, change.old, change.new) for change in upcoming.changes]
    assert changes[:2] == [("zero.stage", 2, 3), ("launch.max_restarts", 3, 7)]
    assert changes[2:] == [("tracking.kinds", [], ["wandb"])]
    # A group of the user's own replaces the section.
    (tmp_path / "hardware").mkdir()
    four = "name: big\nkind: static\nhosts: [{name: localhost, slots: 4, device: cpu}]\n"
    (tmp_path / "hardware" / "big.yaml").write_text(four)
    batch = going_on(run, "hardware=big", "--config-dir", str(tmp_path)).composed.plan.batch
    assert (batch.global_batch, batch.micro_batches) == (16, (4, 4, 4, 4))


def test_the_global_batch_stays_on_other_hardware_and_micro_batches(run) -> None:
    for words in (["hardware=a100x2_v100x2"], ["batch.micro_batch=2"], ["hardware.slots=1"]):
        assert going_on(run, *words).composed.plan.batch.global_batch == 16
    # Said again with the value it has, it is no change.
    assert going_on(run, "batch.global_batch=16").changes == []
    with pytest.raises(ConfigError, match="cannot be cut into equal micro steps|disagree"):
        going_on(run, "batch.micro_batch=3", "batch.accumulation=1")


def test_every_refusal_is_said_at_once_with_its_reason(run) -> None:
    with pytest.raises(ConfigError) as caught:
        going_on(run, "seed=1", "optim.kind=sgd", "data.seq_len=64", "optim.lr=1e-3")
    for words in (
        "seed: cannot change 0 -> 1: it determines the order of the samples",
        "optim.kind: cannot change adamw -> sgd", "data.seq_len: cannot change 128 -> 64",
    ):  # fmt: skip
        assert words in str(caught.value)
    assert "optim.lr" not in str(caught.value)


def test_a_wrong_word_is_said(run) -> None:
    for word, message in (
        ("zero=stage9", 'Did you mean "stage'),
        ("launch.max_restart=1", 'Did you mean "launch.max_restarts"'),
        ("checkpoint.every_steps=0", "must be a whole number from 1"),
        ("launch.max_restarts=many", "must be a whole number from 0"),
        ("zero.offload_param=cpu", "needs stage 3"),
        ("optim.cycles=3", "optim.cycles=3: has no effect"),
        ("experiment=demo", "makes it another run"),
        ("model=gpt2", "makes it another run"),
        ("data=alpaca", "makes it another run"),
        ("batch.global_batch=32", "a step would have different samples"),
    ):
        with pytest.raises(ConfigError, match=message):
            going_on(run, word)


def test_steps_and_epochs_replace_each_other(run) -> None:
    longer = going_on(run, "task.steps=150")
    assert (longer.composed.experiment.task.steps, longer.total) == (150, 150)
    trained(run, 100)
    epochs = going_on(run, "task.epochs=2")
    assert epochs.composed.experiment.task.steps is None
    assert epochs.total == 200  # 1600 samples, 16 a step


def changed_ns(run: RunDir) -> dict[Path, int]:
    """When each file was last written or replaced. (Reading changes the time of access.)"""
    return {file: file.stat().st_ctime_ns for file in run.root.rglob("*")}


def test_a_finished_run_is_left_as_it_is(run, capsys) -> None:
    trained(run, 100, outcome="ok", ended=True)
    run.supervisor_lock.write_text('{"host": "there", "pid": 1, "time": 1.0}')
    before = changed_ns(run)
    assert main([str(run.root)]) == 0
    assert main([str(run.root), "task.steps=80"]) == 0
    # Not the lock either, by whose time `status` knows when the run began.
    assert changed_ns(run) == before
    trained(run, 60, outcome="ok", ended=True)
    assert main([str(run.root), "task.stop_at_step=60"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "finished at step 100: nothing to resume", "task.steps=200", "finished at step 60 of 100",
        "task.stop_at_step=null",
    ):  # fmt: skip
        assert words in printed


def test_a_finished_run_is_made_longer(run, capsys) -> None:
    trained(run, 100, outcome="ok", ended=True)
    before = run.config.read_bytes()
    words = said(run, capsys, "task.steps=150")
    assert "task.steps  100 -> 150  (trains differently from here on)" in words
    assert "it ends at step 150 instead of 100" in words
    assert "there is no usable checkpoint, all steps are trained again" in words
    longer, state = going_on(run, "task.steps=150"), read_state(run)
    note = schedule_note(longer, state, 100)  # there never was a step 101
    assert note.startswith("the learning rate goes from 0.000602 (step 100) to 0.00223")
    assert note.endswith("it ends at step 150 instead of 100")
    assert run.config.read_bytes() == before
    assert history(run) == []


def test_where_it_goes_on_is_said_before_the_start(run, tmp_path, capsys, monkeypatch) -> None:
    trained(run, 57, outcome="interrupted")
    run.root.rename(tmp_path / "elsewhere")
    run = RunDir(tmp_path / "elsewhere")
    assert "run_dir" in said(run, capsys), "a moved run is resumed where it is"
    checkpoint(run, 40)
    file = checkpoint(run, 50) / "rank-00000.safetensors"
    words = said(run, capsys)
    assert "interrupted at step 57: Ctrl-C" in words
    assert "from      the checkpoint of step 50; 7 steps are trained again" in words
    assert "sizes are right" not in words
    with monkeypatch.context() as patch:  # a large one is left to the ranks
        patch.setattr("llmx.lifecycle.resume.run_state.HASHED_BYTES", 9)
        assert "its sizes are right; the ranks verify every byte" in said(run, capsys)
    file.write_bytes(b"x")
    words = said(run, capsys)
    assert "damaged   checkpoint of step 50: rank-00000.safetensors: damaged, it has 1" in words
    assert "from      the checkpoint of step 40" in words
    # As large, with one bit flipped: a small checkpoint is read before the start.
    file.write_bytes(b"x" * 9 + b"y")
    assert "damaged, it has hash" in problems_of(run, 50)[0]
    with pytest.raises(ConfigError, match="step=50: that checkpoint is damaged"):
        main([str(run.root), "step=50"])
    with pytest.raises(ConfigError, match="There are: 40, 50"):
        main([str(run.root), "step=45"])


def test_with_damaged_checkpoints_alone_nothing_is_begun_anew(run, capsys) -> None:
    trained(run, 57, outcome="interrupted")
    with run.metrics.open("a") as lines:
        for step in (40, 50):
            lines.write(json.dumps({"kind": "event", "event": "saved", "step": step}) + "\n")
    (checkpoint(run, 50) / "rank-00000.safetensors").unlink()  # and 40 was pruned
    with pytest.raises(CheckpointError) as caught:
        main([str(run.root), "dry_run=true"])
    for words in ("step 50: rank-00000.safetensors: is missing", "good copy", "step=0"):
        assert words in str(caught.value)
    assert "step 0, as asked for" in said(run, capsys, "step=0")


def test_newer_checkpoints_are_set_aside_and_the_pointer_follows(run, tmp_path) -> None:
    for step in (10, 20, 30):
        checkpoint(run, step)
    set_pointer(run.checkpoints, "latest", 30)
    set_pointer(run.checkpoints, "best", 20)
    for step, latest, best in (
        (30, 20, 20),
        (20, 10, None),  # the newest left need not be the best left
        (10, None, None),
    ):
        set_aside(run, [step], tmp_path / "aside")
        assert committed(run.checkpoints) == [kept for kept in (10, 20) if kept < step]
        assert read_pointer(run.checkpoints, "latest") == latest
        assert read_pointer(run.checkpoints, "best") == best
    assert committed(tmp_path / "aside" / "checkpoints") == [10, 20, 30]


def test_going_back_is_noted_for_good_and_may_be_taken_back(run) -> None:
    for step in (10, 20, 30):
        checkpoint(run, step)
    back = roll_back(run, [], 20)
    assert (back, roll_back(run, back, 0)) == ([20], [20, 0])
    write_resume(run, step=20, skip_steps=[], attempt=2, rollbacks=back)
    write_resume(run, step=None, skip_steps=[25], attempt=3)  # the supervisor, later on
    assert read_rollbacks(run) == [20]
    assert read_json(run.resume)["step"] is None
    # 30 was set aside and is asked for again, by name.
    again = roll_back(run, back, 30)
    assert again == [30, 30]
    known = read_manifest(run.checkpoint(30))
    assert known.is_abandoned(back)
    assert not known.is_abandoned(again)


def test_what_a_run_was_before_is_kept_and_a_reproduction_says_so(run) -> None:
    trained(run, 5)
    upcoming = going_on(run, "zero=stage3", "launch.max_restarts=9")
    differs = [Difference(MAY, "torch", "1", "2")]
    kept = archive_run(run, edits=upcoming.changes, differs=differs, words=["w"], step=4)
    assert kept == run.root / "history" / "001"
    assert {path.name for path in kept.iterdir()} == {
        "changes.json", "config.yaml", "ds_config.json", "metrics.jsonl", "overrides.yaml",
        "plan.json", "provenance.json",
    }  # fmt: skip
    change = read_json(kept / "changes.json")
    assert change["changes"] == {"zero.stage": [2, 3], "launch.max_restarts": [3, 9]}
    record = read_json(run.provenance)
    new = upcoming.composed
    rows = all_differences(run, new.experiment, new, then=record, now=record)
    (row,) = [row for row in rows if row.what == "resumed at step 4"]
    assert (row.severity, row.then) == (BREAKS, "other zero.stage, torch")
    assert archive_run(run, edits=[], differs=[], words=[], step=5).name == "002"


def test_files_of_other_hosts_need_not_be_here(run) -> None:
    directory = checkpoint(run, 10, hosts=("a", "b", "b"))
    assert problems_of(run, 10) == []
    for rank in (1, 2):
        (directory / f"rank-{rank:05d}.safetensors").unlink()
    assert problems_of(run, 10) == []
    (directory / "rank-00001.safetensors").write_bytes(b"x" * 10)
    assert problems_of(run, 10) == ["rank-00002.safetensors: is missing, expected 10 bytes"]
    assert newest_usable(run, read_state(run).checkpoints)[0] is None
    (directory / "manifest.json").write_text("{}")
    assert "manifest.json" in problems_of(run, 10)[0]


def test_a_run_that_is_alive_is_refused(run) -> None:
    with (
        supervisor_lock(run, "0123456789abcdef"),
        pytest.raises(LlmxError, match="already running, supervised by process"),
    ):
        main([str(run.root), "dry_run=true"])
    assert main([str(run.root), "dry_run=true"]) == 0


def test_inputs_may_lie_elsewhere_with_the_same_content(tmp_path) -> None:
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
        text = "b" if name == "other" else "a"
        (tmp_path / name / "t.jsonl").write_text(json.dumps({"text": text}) + "\n")
    words = ["hardware=cpu2", "data=file", "task=pretrain", "model=tiny", "task.steps=9"]
    words.append(f"data.path={tmp_path}/one/t.jsonl")
    run = written(composed(words, run_dir=tmp_path / "run"))
    words = [str(run.root), "dry_run=true"]
    assert main([*words, f"data.path={tmp_path}/two/t.jsonl"]) == 0
    with pytest.raises(ConfigError, match="its content differs"):
        main([*words, f"data.path={tmp_path}/other/t.jsonl"])
    with pytest.raises(ConfigError, match="not on this machine|no such file"):
        main([*words, f"data.path={tmp_path}/none/t.jsonl"])

    # Of a config that came alone, nothing is continued and nothing was recorded.
    alone = RunDir(tmp_path / "alone")
    alone.root.mkdir()
    alone.config.write_text(run.config.read_text())
    assert main([str(alone.root), "dry_run=true", f"data.path={tmp_path}/other/t.jsonl"]) == 0


def test_a_data_set_of_the_hub_is_not_the_directory_of_its_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "t.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    monkeypatch.chdir(tmp_path)
    exp = Experiment()
    exp.data.path = "squad"
    assert with_moved_paths(exp, Experiment()).data.path == f"{tmp_path}/squad", "typed here"
    assert with_moved_paths(exp, exp).data.path == "squad"


def test_a_relative_path_starts_where_it_is_typed(tmp_path, monkeypatch, capsys) -> None:
    """Not in the run directory; and the advice is the word."""
    (tmp_path / "new" / "gpt2").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    monkeypatch.chdir(tmp_path)
    words = ["hardware=cpu2", "task=pretrain", "model=tiny", "model.tokenizer=gpt2", "task.steps=9"]
    sources = "data.sources=[{path: a.jsonl}, {path: b.jsonl, weight: 2}]"
    done = composed([*words, sources], run_dir=tmp_path / "run")
    run = written(done)
    (tmp_path / "b.jsonl").rename(tmp_path / "new" / "b.jsonl")
    with pytest.raises(ConfigError, match=r"no such file.* Set data\.sources\.1\.path=PATH\."):
        main([str(run.root), "dry_run=true"])
    then, now = read_json(run.provenance), {"fingerprints": {}}
    (row,) = (row for row in differences(then, now) if row.what == "data")
    assert row.advice == "its new place: data.sources.N.path=PATH"

    monkeypatch.chdir(tmp_path / "new")
    moved = ["data.sources.1.path=b.jsonl", "tracking=mlflow", "tracking.uri=runs.db"]
    assert "changed   data.sources.1.path" in said(run, capsys, moved[0])
    exp = snapshot.load(run)
    new = next_run(run, exp, parse("resume", [str(run.root), *moved]),
                   read_state(run)).composed.experiment  # fmt: skip
    assert [source.path for source in new.data.sources] == [
        f"{tmp_path}/a.jsonl", f"{tmp_path}/new/b.jsonl",
    ]  # fmt: skip
    assert new.tracking.uri == f"{tmp_path}/new/runs.db"
    assert new.model.tokenizer == "gpt2", "of the Hub, though a directory here has that name"
    target = tmp_path / "repeated"
    words = parse("reproduce", [str(run.root), moved[0]])
    repeated, _ = next_experiment(exp, done.plan, words, target=target, to_step=None)
    assert repeated.data == new.data
    with pytest.raises(ConfigError, match="data.sources.1.weight: cannot change"):
        main([str(run.root), "data.sources.1.weight=3"])


def test_a_planned_run_is_started_by_resume(run, capsys) -> None:
    assert "was planned and never started" in said(run, capsys)
    exp = snapshot.load(run)
    run.config.write_text(snapshot.dump_config(dataclasses.replace(exp, dry_run=True)))
    rewrite(run, going_on(run), read_state(run), [], origin=0, step=None, then={}, now={}, typed=[])
    assert snapshot.load(run) == exp
    assert "dry_run: false" in run.config.read_text()
    assert history(run) == []


def test_a_wrong_command_line_is_told(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in (
        ([], "takes one run directory"),
        (["a", "b"], "takes one run directory"),
        (["nowhere"], "no such directory"),
        ([".", "--force"], "no such option"),
        ([".", "--config-dir", "nowhere"], "no such directory"),
        *(([str(run.root), word], "a whole number") for word in ("step=-1", "step=ten")),
    ):
        with pytest.raises(ConfigError, match=message):
            main(words)


def test_the_help_has_the_whole_table() -> None:
    text = command_help("resume")
    for rule in RULES:
        if "run_dir" not in rule.keys:
            assert rule.why in text
    assert max(map(len, text.splitlines())) <= 100


@settings(max_examples=6, deadline=None)
@given(text=st.text(st.sampled_from("$ { } \\ a . : ' \" # [ ? \n é".split(" ")), max_size=8))
def test_values_of_the_snapshot_pass_through_hydra_as_they_are(text: str) -> None:
    assume(text != "???")  # OmegaConf's word for no value: no snapshot has it
    exp = Experiment()
    exp.data.system, exp.data.label_names = text, {"0": text}
    exp.model.config = {"a": text, "b": [text, {"c": text}]}
    applied = apply(exp, ["seed=5"])
    assert applied.model.config == exp.model.config
    assert applied.data == exp.data
    assert applied.seed == 5


# --- A config.yaml that was edited by hand ---------------------------------------------------


def edit(run: RunDir, group: str, key: str, value: object) -> None:
    values = yaml.safe_load(run.config.read_text())
    values[group][key] = value
    run.config.write_text(yaml.safe_dump(values))


def test_each_edited_key_is_named_with_what_it_does_to_the_numbers(run) -> None:
    """Where a checkpoint has a copy. Comments and order are no values."""
    record = read_json(run.provenance)
    run.checkpoint(20).mkdir(parents=True)
    shutil.copy(run.config, run.checkpoint(20) / "config.yaml")
    values = yaml.safe_load(run.config.read_text())
    run.config.write_text("# mine\n" + yaml.safe_dump(values, sort_keys=True))
    assert edited_config(run, record) == []
    edit(run, "optim", "lr", 0.5)
    edit(run, "tracking", "project", "mine")
    rows = edited_config(run, record)
    assert [(row.severity, row.what, row.now) for row in rows] == [
        (BREAKS, "config.yaml was edited: optim.lr", "0.5"),
        (HARMLESS, "config.yaml was edited: tracking.project", "mine"),
    ]
    assert rows[0].advice == "checkpoints/step-00000020/config.yaml has it as it was"


def test_without_a_copy_that_it_was_edited_is_said(run) -> None:
    """Of a run of an older llmx not even that is known."""
    record = read_json(run.provenance)
    edit(run, "optim", "lr", 0.5)
    (row,) = edited_config(run, record)
    assert (row.severity, row.what) == (BREAKS, "config.yaml was edited by hand")
    assert edited_config(run, {"git": None}) == []
    assert "whether config.yaml was edited since" in not_recorded({"git": None})
    assert "whether config.yaml was edited since" not in not_recorded(record)
