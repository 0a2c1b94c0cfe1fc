"""Before and after a launch: what the ranks would refuse is said (task, first rows, files of the
model); and a run without a terminal: how it is left, shown and ended, and its batch script."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llmx.checkpoint.model_files import check_model_files, damaged_files
from llmx.cli.main import run_here
from llmx.cli.target import find_target
from llmx.compose.complete import Composed, plan_experiment
from llmx.config.tasks import shipped_tasks
from llmx.errors import ConfigError, DataError, LaunchError
from llmx.launch.supervision.journal import supervisor_lock
from llmx.launch.supervision.outcome import Result
from llmx.launch.supervision.signals import ShutdownRequest, sender_of
from llmx.lifecycle import preflight
from llmx.lifecycle.batch import batch_script, requeue_job
from llmx.lifecycle.knowledge import DEMO, informed, tokenizer_rows
from llmx.lifecycle.preflight import check_inputs
from llmx.lifecycle.start import detach
from llmx.run.rundir import RunDir, write_json
from tests.agents import wait_until
from tests.composing import composed as compose
from tests.rundirs import experiment

ROWS: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "Say a.", "input": "", "output": "a"},
    "preference": {"prompt": "Say a.", "chosen": "a", "rejected": "b"},
    "labelled": {"prompt": "a good film", "label": "good"},
    "pair": {"query": "a?", "positive": "a"},
    "text": {"text": "Once upon a time."},
}
TRAINS_ON = {
    "sft": "alpaca", "dpo": "preference", "reward": "preference", "classify": "labelled",
    "embed": "pair", "pretrain": "text", "mlm": "text", "distill": "alpaca",
    "grpo": "alpaca", "ppo": "alpaca",
}  # fmt: skip


def composed(tmp_path: Path, rows: list[Any], kind: str = "sft", **groups: Any) -> Composed:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exp = experiment(tmp_path / "run", ranks=1)
    exp.data.path = str(file)
    exp.task.kind = kind
    if kind == "distill":
        exp.task.options = {"teacher": "somebody/teacher"}
    if kind in ("grpo", "ppo"):
        exp.task.options, exp.data.packing = {"max_new_tokens": 8}, "none"
    for name, values in groups.items():
        for key, value in values.items():
            setattr(getattr(exp, name), key, value)
    return plan_experiment(exp, is_checked=True)


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a process of its own would say is said in this one, which has imported torch."""

    def ask(program: str, request: str, *, timeout_s: float, python_path: Any = ()) -> Any:
        from llmx.tasks.first_rows import main

        file, answer = tmp_path / "request", tmp_path / "answer.json"
        file.write_text(request)
        monkeypatch.setattr(sys, "path", [*python_path, *sys.path])
        main([str(file), str(answer)])
        return json.loads(answer.read_text())

    monkeypatch.setattr(preflight, "ask", ask)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("kind", shipped_tasks())
def test_each_task_takes_its_rows_and_refuses_others(kind: str, tmp_path: Path) -> None:
    data = {"form": "labelled"} if kind == "classify" else {}
    rows = [ROWS[TRAINS_ON[kind]]] * 3
    # The demo tokenizer has no mask token.
    refused = pytest.raises(ConfigError, match="task=mlm: .* has no mask token")
    with refused if kind == "mlm" else contextlib.nullcontext():
        preflight._check_first_rows(composed(tmp_path, rows, kind, data=data).experiment)
    if TRAINS_ON[kind] in ("preference", "labelled", "pair"):
        other = composed(tmp_path, [ROWS["text"]], kind).experiment
        with pytest.raises(ConfigError, match="needs|takes"):
            preflight._check_first_rows(other)


def test_a_wrong_first_row_is_named_and_a_later_one_is_left_to_the_ranks(tmp_path: Path) -> None:
    good, bad = ROWS["alpaca"], {"question": "Say a."}
    with pytest.raises(DataError, match=r"rows\.jsonl.* 1: the columns \(question\) fit no"):
        check_inputs(composed(tmp_path, [bad, good]))
    with pytest.raises(DataError, match=r"rows\.jsonl.* 3: "):
        check_inputs(composed(tmp_path, [good, good, bad]))
    check_inputs(composed(tmp_path, [good, good, bad], data={"on_bad_row": "skip"}))
    wrong_type = {**good, "output": 7}
    with pytest.raises(DataError, match=r"rows\.jsonl.* 900: "):
        check_inputs(composed(tmp_path, [good] * 899 + [wrong_type]))
    check_inputs(composed(tmp_path, [good] * 1000 + [bad]))


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    """Of a pretrained model, which does not grow by itself."""
    small = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1,
        "intermediate_size": 32, "num_attention_heads": 2,
    }  # fmt: skip
    model = {"kind": "hf", "init": "pretrained", "config": small, "tokenizer": "demo"}
    given = composed(tmp_path, [ROWS["alpaca"]], model=model)
    given.experiment.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"demo has ids up to \d+.* an embedding of 64 rows"):
        check_inputs(given)
    # One of which only the last token, an added one, has no row: <image_soft_token> of Gemma 3.
    vocabulary = {"model": {"vocab": {f"t{n}": n for n in range(64)}}, "added_tokens": [{"id": 64}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    given.experiment.model.tokenizer = str(tmp_path)
    assert preflight._vocabulary_problem(given.experiment) == ""


TASK = """
import dataclasses
from llmx.tasks import Task

@dataclasses.dataclass(frozen=True)
class Options:
    gamma: float = 1.0

class Focal(Task):
    Options = Options
"""


def test_a_task_of_ones_own_is_asked_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "TIME_LIMIT_S", 600.0)
    (tmp_path / "focal.py").write_text(TASK)
    task = {"code_path": str(tmp_path), "options": {"gamma": 2.0}}
    for kind, problem in (
        ("focal:Foca", r'focal has no class Foca .*Did you mean "Focal"'),
        ("focal:Focal", "takes conversations; .*format text"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_inputs(composed(tmp_path, [ROWS["text"]], kind, task=task))


REWARDS = """
def two(prompt, completion): return 1.0
def three(prompt, completion, reference): return 1.0
"""


@pytest.mark.usefixtures("asked_here")
def test_what_only_the_tokenizer_tells_is_checked_before_the_launch(tmp_path: Path) -> None:
    """The length of rows, and functions of the user's."""
    (tmp_path / "early_rewards.py").write_text(REWARDS)
    long = {**ROWS["alpaca"], "output": "a word " * 400}
    given = composed(tmp_path, [ROWS["alpaca"], *[long] * 20], data={"seq_len": 64})
    with pytest.raises(DataError, match=r"(?s)20 of 21 rows .*task\.max_lost=") as caught:
        check_inputs(given)
    assert "first 21 rows of the train data" in str(caught.value)
    # More rows than were looked at: the ranks know, and the plan says what may come.
    given = composed(tmp_path, [long] * 1200, data={"seq_len": 64, "max_rows": None})
    assert any("1,000 of 1,000 rows" in note for note in check_inputs(given))
    # Rows that no reward can judge, of which single ones may be skipped.
    bare = composed(tmp_path, [{"prompt": "a"}] * 20, "grpo", data={"on_bad_row": "skip"})
    with pytest.raises(DataError, match=r"20 of 20 rows .* no reference answer"):
        check_inputs(bare)
    own = composed(tmp_path, [ROWS["alpaca"]], "grpo", task={"code_path": str(tmp_path)})
    options = own.experiment.task.options
    options["rewards"] = ["early_rewards:three"]
    assert check_inputs(own) == []
    options["rewards"] = ["early_rewards:two"]
    with pytest.raises(ConfigError, match=r"early_rewards:two\(prompt, completion\) is"):
        check_inputs(own)
    (tmp_path / "focal.py").write_text(TASK)
    task = {"code_path": str(tmp_path), "options": {"gama": 1}}
    with pytest.raises(ConfigError, match=r'options\.gama: unknown key\. Did you mean "gamma"'):
        check_inputs(composed(tmp_path, [ROWS["text"]], "focal:Focal", task=task))
    task = {"code_path": str(tmp_path), "eval_metrics": ["early_rewards:four"]}
    with pytest.raises(ConfigError, match="early_rewards:four cannot be imported"):
        check_inputs(composed(tmp_path, [ROWS["alpaca"]], task=task))


def test_a_model_that_only_the_network_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is refused; a plan, which may be for later, has a warning."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    given = composed(tmp_path, [ROWS["alpaca"]], model={"tokenizer": "somebody/model"})
    with pytest.raises(ConfigError, match=r"tokenizer=somebody/model: no such directory and not"):
        check_inputs(given)
    given.experiment.dry_run = True
    assert "hf download somebody/model" in check_inputs(given)[-1]
    commit = tmp_path / "hub" / "models--somebody--model" / "refs" / "main"
    commit.parent.mkdir(parents=True)
    commit.write_text("1" * 40)
    assert check_inputs(given) == []


def model_directory(path: Path) -> Path:
    path.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 8)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    return path


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def test_real_models_are_whole(tmp_path: Path) -> None:
    """Of torch's and safetensors' own writers."""
    import torch
    from safetensors.torch import save_file

    directory = model_directory(tmp_path / "model")
    save_file({"a": torch.ones(3), "b": torch.ones(0)}, directory / "model.safetensors", {"x": "y"})
    torch.save({"a": torch.ones(3)}, directory / "pytorch_model.bin")
    assert damaged_files(directory) == []
    cut(directory / "pytorch_model.bin")
    assert len(damaged_files(directory)) == 1


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("model.safetensors", pointer, "is a git-lfs pointer.*Run `git lfs pull` in "),
        ("model.safetensors", cut, "cut off .*its header says.*Download it again"),
        ("model.safetensors", lambda file: file.write_bytes(b""), "not a safetensors file"),
        ("model.safetensors", lambda file: file.write_bytes(b"\xff" * 40), "not a safetensors"),
        ("model.safetensors", lambda file: file.write_bytes(b"\x09" + b"\0" * 7 + b"{"), "cut off"),
        ("tokenizer.json", pointer, "git-lfs pointer"),
        ("tokenizer.json", cut, "is not valid JSON"),
        ("chat_template.jinja", pointer, "git-lfs pointer"),
        (
            "model.safetensors.index.json",
            lambda file: file.write_text('{"weight_map": {"w": "model-2.safetensors"}}'),
            "1 file of the 1 that it names missing, e.g. model-2.safetensors",
        ),
    ],
)
def test_a_damaged_file_is_named_with_the_fix(
    name: str, damage: Any, problem: str, tmp_path: Path
) -> None:
    directory = model_directory(tmp_path / "model")
    check_model_files(directory)
    damage(directory / name)
    with pytest.raises(ConfigError, match=problem) as refused:
        find_target(directory, command="eval")
    assert str(refused.value).startswith(f"{directory / name}: ")
    assert len(str(refused.value).splitlines()) == 1
    given = composed(tmp_path, [ROWS["alpaca"]])
    model = given.experiment.model
    model.path, model.kind, model.init = str(directory), "hf", "pretrained"
    with pytest.raises(ConfigError, match=problem):
        check_inputs(given)


def test_weights_that_are_not_read_may_be_pointers(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    pointer(directory / "model.safetensors")
    model = {"path": str(directory), "init": "scratch"}
    check_inputs(composed(tmp_path, [ROWS["alpaca"]], model=model))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path=.*: no tokenizer there"):
        check_inputs(composed(tmp_path, [ROWS["alpaca"]], model={**model, "tokenizer": None}))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "config.yaml").write_text("")
    return RunDir(tmp_path)


def supervise(run: RunDir) -> int:
    """Hold the run until a signal asks for the end."""
    shutdown = ShutdownRequest()
    with (
        supervisor_lock(run, secrets.token_hex(8)),
        shutdown.handle_signals(print, stop_file=run.stop),
    ):
        report_supervisor(run, pid=os.getpid())
        print("step 1", flush=True)
        shutdown.event.wait(60)
        result = {"outcome": "interrupted", "cause": shutdown.source, "exit_code": 130}
        write_json(run.result, result)
    return 130


def report_supervisor(run: RunDir, **values: Any) -> None:
    """Write ``supervisor.json`` as a supervisor that trains."""
    now = {"host": socket.gethostname(), "state": "training", "time": time.time(), **values}
    write_json(run.supervisor, now)


def test_a_detached_run_is_shown_and_stopped(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    assert detach(run, lambda: supervise(run)) == 0
    printed = capfd.readouterr().out
    assert f"python -m llmx stop {run.root}" in printed
    pid = int(re.search(r"process (\d+)", printed)[1])  # type: ignore[index]
    assert os.getsid(pid) == pid, "a session of its own"
    wait_until(run.supervisor.exists)
    codes: list[int] = []
    shown = threading.Thread(target=lambda: codes.append(run_here("attach", [str(run.root)])))
    shown.start()
    assert run_here("stop", [str(run.root)]) == 0
    shown.join(timeout=20)
    assert codes == [130], "the code of the run"
    printed = capfd.readouterr().out
    assert "step 1\n" in printed
    assert "interrupted: SIGTERM\n" in printed
    os.waitpid(pid, 0)
    assert run_here("stop", [str(run.root)]) == 2
    assert "it has ended (interrupted)" in capfd.readouterr().err


def test_a_run_that_cannot_be_left(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """What it said before it held the run is said here, with its exit code."""

    def refused() -> int:
        raise LaunchError("somebody else has it")

    assert detach(run, refused) == LaunchError.exit_code
    assert "somebody else has it" in capfd.readouterr().err


def test_a_run_whose_supervisor_is_on_another_host(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """It sees the file on the disk that the hosts share."""
    report_supervisor(run, host="login-1", pid=1)

    def obey() -> None:
        wait_until(run.stop.exists)
        write_json(run.result, {"outcome": "interrupted", "cause": "SIGTERM", "exit_code": 143})
        report_supervisor(run, host="login-1", pid=1, state="finished")

    supervisor = threading.Thread(target=obey)
    supervisor.start()
    assert run_here("stop", [str(run.root)]) == 0
    supervisor.join()
    assert "interrupted: SIGTERM" in capfd.readouterr().out
    assert run_here("attach", [str(run.root / "no-such")]) == 2


def test_a_number_that_is_another_process_now(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """The supervisor was killed, and the kernel has given its number away."""
    with subprocess.Popen(["sleep", "60"]) as other:
        run.supervisor_lock.write_text("{}")
        report_supervisor(run, pid=other.pid, time=time.time() - 3600)
        assert run_here("stop", [str(run.root)]) == 2
        assert "no supervisor of it is running" in capfd.readouterr().err
        with supervisor_lock(run, secrets.token_hex(8)):
            report_supervisor(run, pid=os.getpid(), time=time.time() - 3600)
            assert run_here("attach", [str(run.root)]) == 2
            assert "prints into the terminal" in capfd.readouterr().err
        assert other.poll() is None
        other.kill()


JOB, END = {"SLURM_JOB_ID": "7"}, "SLURM_JOB_END_TIME"


@pytest.mark.parametrize(
    ("number", "environ", "kind", "words"),
    [
        (signal.SIGTERM, {}, "user", "SIGTERM"),
        (signal.SIGINT, JOB, "user", "Ctrl-C"),
        (signal.SIGHUP, {}, "user", "hang-up"),
        (signal.SIGUSR1, JOB, "scheduler", "Slurm job 7"),
        (signal.SIGUSR1, {**JOB, END: "1120"}, "time_limit", "job 7, 2:00 left"),
        (signal.SIGTERM, {**JOB, END: "8200"}, "scheduler", "2:00:00 before its limit"),
    ],
)  # fmt: skip
def test_who_ended_the_run(number: int, environ: dict[str, str], kind: str, words: str) -> None:
    sender, text = sender_of(number, environ, now=1000.0)
    assert sender == kind
    assert words in text


REQUEST = ("hardware=slurm", "hardware.nodes=2", "hardware.slots=4", "hardware.device=a100_80g")


def script(tmp_path: Path, *more: str, config_dir: str | None = None) -> str:
    words = [*REQUEST, "launch.slurm.submit=true", *more]
    done = compose(words, run_dir=str(tmp_path / "a run"))
    return batch_script(done.experiment, done.plan, words=words, config_dir=config_dir)


def options(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]


def test_a_job_asks_for_what_the_plan_has(tmp_path: Path) -> None:
    more = ["partition=gpu", "time_limit=12:00:00", "sbatch_args=['--mail-type=END']"]
    words = [f"launch.slurm.{word}" for word in more]
    asked = options(script(tmp_path, *words, "launch.stop_grace_s=300"))
    expected = ["--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--requeue",
                "--signal=B:USR1@360", "--partition=gpu", "--time=12:00:00", "--mail-type=END",
                f"--output={tmp_path / 'a run'}/logs/console.log"]  # fmt: skip
    assert set(expected) <= set(asked)
    assert not any(option.startswith("--nodelist") for option in asked)
    assert "--gres=gpu:a100:4" in options(script(tmp_path, "launch.slurm.gres=gpu:a100:4"))


def test_the_script_starts_the_run_and_then_continues_it(tmp_path: Path) -> None:
    """The words reach python as they were typed, in both cases."""
    text = script(tmp_path, "name='two words'", config_dir="/conf dir")
    before, _, _ = text.rpartition("exec ")
    shown = f'{before}printf "%s\\n" "$@"'

    def words() -> list[str]:
        argv = ["bash", "-c", shown]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()

    run = RunDir(tmp_path / "a run")
    first = words()
    assert first[: len(REQUEST)] == list(REQUEST)
    assert {"name='two words'", f"run_dir={run.root}", "launch.slurm.requeue=true"} <= set(first)
    assert "launch.slurm.submit=true" not in first
    assert first[-2:] == ["--config-dir", "/conf dir"]
    run.root.mkdir()
    run.identity.touch()
    again = ["resume", str(run.root), "hardware=slurm", "hardware.device=a100_80g"]
    assert words()[: len(again)] == again


def test_only_the_signal_of_the_script_and_a_new_checkpoint_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmx.lifecycle.batch.ask", lambda argv: pytest.fail(f"ran {argv}"))
    refused = "not requeued: job 7 saved no checkpoint after step 20"
    for name, job, first_step, said in (
        ("SIGTERM", "7", 0, ""), ("SIGUSR1", "", 0, ""), ("", "7", 0, ""),
        ("SIGUSR1", "7", 20, refused),
    ):  # fmt: skip
        monkeypatch.setenv("SLURM_JOB_ID", job)
        result, out = Result(stopped_by="time_limit", signal=name), io.StringIO()
        requeue_job(RunDir(tmp_path), result, first_step=first_step, stream=out)
        assert said in out.getvalue()
        assert bool(said) == bool(out.getvalue())


def test_the_rows_of_a_small_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert tokenizer_rows("demo") == len(AutoTokenizer.from_pretrained(DEMO))
    bpe = {f"t{number}": number for number in range(500)}
    for vocab, added, rows in (
        (bpe, (500, 777), (778, 500)),
        (bpe, (0, 499), (500, 499)),  # also in the vocabulary
        ([[f"t{number}", -1.0] for number in range(300)], (), (300, 300)),
    ):
        values = {"model": {"vocab": vocab}, "added_tokens": [{"id": each} for each in added]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(values))
        found = [tokenizer_rows(str(tmp_path), with_added=each) for each in (True, False)]
        assert found == [*rows]
    assert tokenizer_rows("owner/name") is None
    (tmp_path / "tokenizer.json").write_text("not json")
    assert tokenizer_rows(str(tmp_path)) is None


def test_a_pretrained_model_keeps_its_own() -> None:
    done = compose(["model=llama3_8b", "hardware=a100x8"])
    assert informed(done).plan == done.plan
