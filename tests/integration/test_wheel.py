"""The distributions: built, installed outside of the repository, and used there.

Nothing is downloaded: the fresh environment sees the site-packages of this one through a
``.pth`` file, which does not pull in this one's editable llmx.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
Installed = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [pytest.mark.wheel, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist of the repository, and the wheel that is built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    checked(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(REPOSITORY)]
    )
    (sdist,) = out.glob("llmx-*.tar.gz")
    (wheel,) = out.glob("llmx-*-py3-none-any.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def installed(
    distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """Runs the Python of a fresh environment, in an empty directory, with llmx installed."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv", with_pip=False)
    python = home / "venv" / "bin" / "python"
    site = Path(
        checked([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        .stdout.strip()
    )  # fmt: skip
    (site / "from_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    checked([*pip, *offline, str(distributions["wheel"])])
    work = home / "work"
    work.mkdir()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        """``python WORDS``; ``llmx WORDS`` runs the console script."""
        program = [str(python)] if words[0] != "llmx" else [str(python.with_name("llmx"))]
        return checked([*program, *(words if words[0] != "llmx" else words[1:])], cwd=work)

    return run


def checked(words: list[str], *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run without anything of this process's Python; a failure shows what was said."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=env, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def tracked_files(*folders: str) -> set[str]:
    """Files of the repository under ``folders`` that git knows."""
    done = checked(["git", "ls-files", *folders], cwd=REPOSITORY)
    return set(done.stdout.splitlines())


def test_wheel_holds_everything_that_is_tracked(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = tracked_files("llmx")
    expected |= {f"llmx/{name}" for name in tracked_files("conf", "sweeps")}
    expected |= {
        name.removeprefix("launchers/") for name in tracked_files("launchers/hydra_plugins")
    }
    assert expected <= held
    # An __init__.py there would hide every other plugin of the user's environment.
    assert "hydra_plugins/__init__.py" not in held
    assert {name.split("/")[0] for name in held} == {"llmx", "hydra_plugins"}
    assert any(name.startswith("llmx/assets/demo/tokenizer/") for name in held)


def test_sdist_builds_and_tells(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names
    assert tracked_files("llmx", "conf", "sweeps", "launchers") <= names
    assert not any(name.startswith(("outputs/", ".venv/", "wandb/")) for name in names)


def test_it_is_not_the_repository_and_hydra_finds_the_launcher(installed: Installed) -> None:
    code = (
        "import llmx, hydra_plugins.llmx_deepspeed as plugin, json;"
        "print(json.dumps([llmx.__file__, plugin.__file__]))"
    )
    for place in json.loads(installed("-c", code).stdout):
        assert not Path(place).is_relative_to(REPOSITORY), place
    text = installed("-m", "llmx", "--info", "plugins").stdout
    assert "DeepSpeedLauncher" in text.split("Launcher", 1)[1]


def test_help_is_the_same_by_both_doors(installed: Installed) -> None:
    by_module = installed("-m", "llmx", "--help").stdout
    assert by_module == installed("llmx", "--help").stdout
    for group in ("model", "hardware", "experiment", "a100x2_v100x2", "stage3_zeropp"):
        assert group in by_module
    # What keys mean is read from the source of the schema, wherever that lies.
    said = installed("llmx", "help", "optim.lr").stdout
    assert "The peak learning rate" in said
    assert "experiment=opt_1_3b_sft" in said
    assert "_llmx" in installed("llmx", "completion", "bash").stdout


def test_the_demo_plans(installed: Installed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = installed("llmx", "hardware=cpu2", "dry_run=true", f"run_dir={run}").stdout
    assert "samples" in text
    assert "Nothing was started" in text
    assert {path.name for path in run.iterdir()} >= {
        "config.yaml", "overrides.yaml", "provenance.json", "plan.json", "ds_config.json",
        "hostfile", "ds_env", "command.txt",
    }  # fmt: skip
    assert str(REPOSITORY / "llmx") not in (run / "command.txt").read_text()


@pytest.mark.deepspeed
def test_the_demo_trains(installed: Installed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    installed(
        "llmx", "experiment=demo", "hardware=cpu2", "task.steps=2", "task.log_every_steps=1",
        "task.eval_generate=2", f"data.cache_dir={tmp_path / 'cache'}", f"run_dir={run}",
    )  # fmt: skip
    assert json.loads((run / "result.json").read_text())["outcome"] == "ok"
    assert (run / "model" / "config.json").is_file()
    assert (run / "report.html").is_file()
