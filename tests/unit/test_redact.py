"""What looks like a credential, and that no writer shows one."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest
import yaml

from llmx.cli.main import main
from llmx.config.validate import validate
from llmx.errors import ConfigError
from llmx.failures.diagnose import Failure
from llmx.launch.environment import rank_env
from llmx.launch.files import check_launch, write_rendered
from llmx.launch.supervision.console import Console, RunLog
from llmx.observe.run import load_run
from llmx.plan import make_plan
from llmx.redact import is_secret, redact, redacted
from llmx.run.rundir import RunDir
from llmx.tracking.base import Status
from llmx.tracking.process import TrackerStatuses, run_meta
from llmx.train.status import describe
from tests.launches import experiment, spec_of

TEXTS = {
    "https://s3cr3tw0rd@host/x": "https://***@host/x",
    "https://ada:s3cr3tw0rd@host": "https://***@host",
    "redis://:s3cr3tw0rd@cache:6379/0": "redis://***@cache:6379/0",
    "postgresql+psycopg2://ada:s3cr3tw0rd@db/x": "postgresql+psycopg2://***@db/x",
    "http://h/x?token=s3cr3tw0rd&a=1&api_key=s3cr3tw0rd": "http://h/x?token=***&a=1&api_key=***",
    "https://:s3cr3tw0rd@host": "https://***@host",
    "TORCH_DB_PASS=s3cr3tw0rd": "TORCH_DB_PASS=***",
    "export DB_PASS='s3cr3tw0rd'": "export DB_PASS='***'",
    '{"PGPASSWORD": "s3cr3tw0rd"}': '{"PGPASSWORD": "***"}',
    "password=s3cr3tw0rd": "password=***",
    "glpat-s3cr3tw0rds3cr3tw0rd": "***",
    "xoxb-1234-s3cr3tw0rd": "***",
    "AIza" + "s3cr3tw0rd" * 4: "***",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.s3cr3tw0rd": "***",
    "hf_s3cr3tw0rds3cr3tw0rd": "***",
    "-----BEGIN RSA PRIVATE KEY-----\ns3cr3tw0rd\n-----END RSA PRIVATE KEY-----": "***",
}
HARMLESS = [
    "https://huggingface.co/a/b", "ssh://git@github.com/a", "sqlite:////a@b/mlflow.db",
    "WANDB_MODE=offline is set in the environment",
    "data.columns={key: id}", "eos_token=</s> tokens_per_s=12", "task.eval_max_new_tokens=5",
    "model.tokenizer=/a/b", "12:30:01 step 1/2", "TOKENIZERS_PARALLELISM=false",
]  # fmt: skip


@pytest.mark.parametrize("text", [*TEXTS, *HARMLESS])
def test_a_credential_is_hidden_and_nothing_else(text: str) -> None:
    hidden = TEXTS.get(text, text)
    assert redact(f"see {text} now") == f"see {hidden} now"
    assert redact(redact(text)) == redact(text) == hidden


def test_nested_values_and_names_that_are_harmless() -> None:
    names = (
        "TOKENIZERS_PARALLELISM NCCL_IB_PKEY_X MONKEY KEYBOARD PWD OLDPWD CUDA_COMPASS eos_token"
    )
    assert [name for name in names.split() if is_secret(name, "1")] == []
    values = {"env": {"DB_PASS": "x", "NCCL_DEBUG": "INFO"}, "list": ["redis://:pw@h", 1, None]}
    assert redacted(values) == {
        "env": {"DB_PASS": "***", "NCCL_DEBUG": "INFO"}, "list": ["redis://***@h", 1, None],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("tracking", "uri", "https://s3cr3tw0rd@mlflow.lan"),
        ("data", "path", "https://ada:s3cr3tw0rd@host/rows.jsonl"),
        ("task", "options", {"api_key": "s3cr3tw0rd"}),
        ("launch", "env", {"DB_PASS": "s3cr3tw0rd"}),
        ("launch", "env", {"https_proxy": "http://ada:s3cr3tw0rd@proxy"}),
    ],
)
def test_a_config_with_a_credential_is_refused(group: str, key: str, value: object) -> None:
    exp = experiment("ssh", (1, 1))
    setattr(getattr(exp, group), key, value)
    with pytest.raises(ConfigError) as caught:
        validate(exp)
    assert f"{group}.{key}" in str(caught.value)
    assert "Leave it out" in str(caught.value)
    assert "s3cr3tw0rd" not in str(caught.value)


def test_ranks_and_launch_files_have_no_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = experiment("local", (1,))
    spec = spec_of(
        exp,
        run_dir=RunDir(tmp_path),
        environ={"TORCH_DB_PASS": "s3cr3tw0rd", "NCCL_X": "redis://:s3cr3tw0rd@h", "DS_A": "1"},
    )
    assert "DS_A" in rank_env(spec)
    write_rendered(spec)
    for path in tmp_path.iterdir():
        assert "s3cr3tw0rd" not in path.read_text()
    for name in ("ds_env", "command.txt"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    # One in an endpoint is refused, not dropped.
    monkeypatch.setenv("HF_ENDPOINT", "https://s3cr3tw0rd@mirror.lan")
    with pytest.raises(ConfigError, match="HF_ENDPOINT holds a password or a token") as caught:
        check_launch(exp, make_plan(exp))
    assert "s3cr3tw0rd" not in str(caught.value)


def test_a_plan_shows_the_command_without_its_secret(tmp_path: Path, capsys) -> None:
    words = ["experiment=demo", "hardware=cpu2", "dry_run=true", f"run_dir={tmp_path}/run"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "export LLMX_RUN_TOKEN=***" in shown
    (secret,) = (tmp_path / "run").glob(".token-*")
    assert secret.read_text() not in shown
    assert secret.read_text() in (tmp_path / "run/command.txt").read_text()


def test_what_is_written_and_shown_of_a_run_has_no_credential(tmp_path: Path) -> None:
    """The run is of a version that let one into its files."""
    secret = "https://ada:s3cr3tw0rd@host/x?token=s3cr3tw0rd"
    run, screen = RunDir(tmp_path), io.StringIO()
    run.logs.mkdir()
    log = RunLog(run.logs / "supervisor.log", Console(screen))
    log.warning(f"cannot reach {secret}")
    log.console.rank_line(f"ValueError: DB_PASS=s3cr3tw0rd {secret}")
    outcome = Failure("crash", secret, secret, traceback=secret)
    statuses = TrackerStatuses(run)
    statuses(Status("mlflow", "offline", f"{secret} cannot be reached", fix=secret))
    config = {"name": "x", "launch": {"env": {"DB_PASS": "s3cr3tw0rd"}}, "data": {"path": secret}}
    run.config.write_text(yaml.safe_dump(config))
    run.result.write_text(json.dumps({"cause": secret}))
    run.provenance.write_text(json.dumps({"overrides": [f"data.path={secret}"]}))
    exp = experiment("local", (1,))
    shown = [
        screen.getvalue(), log.warnings, outcome, describe(ValueError(secret), Path("/runs/x")),
        run_meta(run, "", exp.tracking, config), vars(load_run(tmp_path)),
        *(path.read_text() for path in (*run.logs.iterdir(), tmp_path / "tracking.json")),
    ]  # fmt: skip
    for text in shown:
        assert "s3cr3tw0rd" not in str(text)
    assert "https://***@host" in screen.getvalue()
