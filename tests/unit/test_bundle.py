"""A run for a machine without internet: what is collected, and what its installer does.

``pytest tests/unit/test_bundle.py``; wheels of packages are left out, as they take minutes.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from llmx.cli import bundle
from llmx.cli.bundle_install import HERE, problems
from llmx.errors import ConfigError, DataError, DiskFullError, LaunchError

TYPED = [
    "--config-dir", "conf", "optim=slow", "model=tiny", "data=mixture", "task.steps=2",
    "task.eval_metrics=[my_metrics:one]", "task.eval_generate=1", "task.code_path=code",
    "data.sources=[{path: a.jsonl, weight: 2}, {path: 'b*.jsonl'}]", "data.eval_samples=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with rows, a metric and options, and a blank in its name."""
    path = tmp_path_factory.mktemp("bundle") / "my project"
    for name in ("conf/optim", "code"):
        (path / name).mkdir(parents=True)
    (path / "conf/optim/slow.yaml").write_text("# Slow.\nlr: 1.0e-6\n")
    (path / "code/my_metrics.py").write_text("def one(completions, references): return 1.0\n")
    for name in ("a.jsonl", "b.jsonl"):
        (path / name).write_text('{"instruction": "Say it.", "output": "It."}\n')
    return path


@pytest.fixture(scope="module")
def collected(project: Path) -> tuple[Path, str]:
    """The bundle of the project, and what the command printed."""
    here, out = project.parent / "bundle", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert bundle.main([str(here), "--no-wheels", *TYPED], stream=out) == 0
    return here, out.getvalue()


def install(here: Path, environment: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", str(here / "install.py"), str(environment)]
    return subprocess.run(argv, capture_output=True, text=True)


def test_files_and_command(collected: tuple[Path, str], project: Path) -> None:
    here, text = collected
    assert "a.jsonl: 1 file, 44 B" in text
    manifest = json.loads((here / "manifest.json").read_text())
    root = f"files{project}"
    (wheel,) = (here / "wheels").iterdir()
    assert set(manifest["files"]) == {
        "conf/optim/slow.yaml",
        "install.py",
        f"{root}/a.jsonl",
        f"{root}/b.jsonl",
        f"{root}/code/my_metrics.py",
        f"wheels/{wheel.name}",
    }
    assert manifest["command"] == [
        "-m", "llmx", "--config-dir", f"{HERE}/conf", "optim=slow", "model=tiny", "data=mixture",
        "task.steps=2", "task.eval_metrics=[my_metrics:one]", "task.eval_generate=1",
        "data.eval_samples=1",
        f"data.sources=[{{path: '{HERE}/{root}/a.jsonl', form: 'auto', weight: 2.0}}, "
        f"{{path: '{HERE}/{root}/b*.jsonl', form: 'auto', weight: 1.0}}]",
        f"task.code_path='{HERE}/{root}/code'",
    ]  # fmt: skip


def test_an_installed_bundle_composes_elsewhere(
    collected: tuple[Path, str], project: Path, tmp_path: Path
) -> None:
    here = tmp_path / "a stick"
    shutil.copytree(collected[0], here)
    environment = tmp_path / "venv"
    assert install(here, environment).returncode == 1  # no packages, and no environment with them
    assert not environment.exists()
    venv.create(environment)
    site = next(environment.glob("lib/python*/site-packages"))
    packages = metadata.distribution("torch").locate_file("")
    (site / "packages.pth").write_text(f"{packages}\n")
    done = install(here, environment)
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[-1]
    assert command.startswith(f"{environment}/bin/python -m llmx ")
    shown = subprocess.run(
        ["/bin/sh", "-c", f"{command} --cfg job"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    config = yaml.safe_load(shown.stdout)
    assert config["data"]["sources"][0]["path"] == f"{here}/files{project}/a.jsonl"
    assert config["task"]["code_path"] == f"{here}/files{project}/code"
    assert config["optim"]["lr"] == 1e-6
    assert (site / "llmx/conf/optim/adamw.yaml").is_file()


def test_files_that_changed_are_named(collected: tuple[Path, str], project: Path) -> None:
    here = project.parent / "changed"
    shutil.copytree(collected[0], here)
    assert problems(here) == []
    rows = here / f"files{project}"
    (rows / "a.jsonl").write_text('{"instruction": "Say it.", "output": "At."}\n')
    (rows / "b.jsonl").unlink()
    (rows / "c.jsonl").touch()
    (rows / "code/__pycache__").mkdir()
    (rows / "code/__pycache__/my_metrics.pyc").touch()
    expected = [
        f"{rows}/a.jsonl is damaged. Copy it again.",
        f"{rows}/b.jsonl is missing. Copy it again.",
        f"{rows}/c.jsonl does not belong to the bundle. Remove it.",
    ]
    with pytest.raises(DataError) as error:
        bundle.main(["--check", str(here)])
    assert str(error.value).splitlines() == expected
    done = install(here, project.parent / "venv")
    assert (done.returncode, done.stderr.splitlines()[:3]) == (1, expected)


def test_what_is_refused(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    here = tmp_path / "bundle"
    for words, message in (
        (["experiment=demo"], "bundle: needs a directory"),
        ([str(project), *TYPED], "is not empty"),
        (
            [str(here), "model=tiny", "data=hub", "data.path=someone/rows"],
            "data.path=someone/rows: is streamed from the Hub",
        ),
        (
            [str(here), "model=tiny", f"hydra.searchpath=['file://{project}/conf']"],
            "--config-dir DIR experiment=best",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            bundle.main(words)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 0, 9))
        with pytest.raises(DiskFullError, match="takes .* 9 B free. Free some space"):
            bundle.main([str(here), *TYPED])
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(LaunchError, match="PIP_INDEX_URL.*--no-wheels leaves out"):
        bundle.main([str(here), *TYPED])
    assert not here.exists()
