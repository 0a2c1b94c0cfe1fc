"""Settings that must not change the training, and those that must: precision, clipping, offload, no
compiler; and a run that diverges."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmx.checkpoint.selection import list_steps
from llmx.config import OptimConfig
from llmx.errors import ConfigError
from llmx.train.engine.optimizer import build_optimizer
from tests.command_runs import SMALL, Finished, train

pytestmark = pytest.mark.deepspeed

STEPS = 6
RUN = ("experiment=demo", *SMALL, f"task.steps={STEPS}")

COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang", "ninja", "nvcc")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """fp32, ZeRO-2: what the others are compared with."""
    run = train(tmp_path_factory.mktemp("precision"), "plain", *RUN)
    assert run.exit_code == 0, run.said
    assert len(run.losses) == STEPS
    assert run.losses[-1] < run.losses[0] - 1.0, run.losses
    return run


def beside(plain: Finished, name: str, *overrides: str, **environment: str) -> Finished:
    """Another run of the same, in a directory beside it (and with its prepared data)."""
    run = train(plain.dir.root.parent, name, *RUN, *overrides, **environment)
    assert run.exit_code == 0, f"{run.said}\n{run.logs[-4000:]}"
    return run


def without_compilers(directory: Path) -> str:
    """A PATH with all programs of this machine but compilers and ninja.

    The launcher puts Python's own folder in front, which may have a ninja from pip.
    """
    directory.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in folder.iterdir() if folder.is_dir() else ():
            link = directory / program.name
            if program.name.split("-")[0] not in COMPILERS and not os.path.lexists(link):
                link.symlink_to(program)
    return str(directory)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_bf16(plain: Finished, stage: int) -> None:
    run = beside(plain, f"bf16-{stage}", "precision=bf16", f"zero=stage{stage}")
    # Eight bits of mantissa: near the fp32 curve, and not on it.
    assert run.losses == pytest.approx(plain.losses, rel=0.03)
    assert run.losses != pytest.approx(plain.losses, rel=1e-6)
    assert run.losses[-1] < run.losses[0] - 1.0


@pytest.mark.parametrize(
    "zero", [pytest.param("stage2_offload", marks=pytest.mark.nightly), "stage3_offload"]
)
def test_offload_is_the_same_training(plain: Finished, zero: str, tmp_path: Path) -> None:
    """With PyTorch's AdamW, so no compiler is needed, and none is there."""
    run = beside(plain, zero, f"zero={zero}", PATH=without_compilers(tmp_path / "bin"))
    assert run.losses == pytest.approx(plain.losses, rel=1e-4)


def test_an_optimizer_that_must_be_compiled_says_so(plain: Finished, tmp_path: Path) -> None:
    words = ("optim.kind=cpu_adam", "hardware.slots=1")
    path = without_compilers(tmp_path / "bin")
    run = train(plain.dir.root.parent, "cpu-adam", *RUN, *words, by_deepspeed=True, PATH=path)
    assert run.exit_code != 0
    assert run.result["outcome"] == "config"
    for word in ("apt-get install g++", "optim.kind=adamw"):
        assert word in run.said, run.said
    assert "Traceback" not in run.said


def test_each_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as raised:
        build_optimizer(torch.nn.Linear(2, 2), OptimConfig(kind="cpu_adam"), accelerator="cpu")
    for word in ("apt-get install g++", "pip install ninja", "optim.kind=adamw"):
        assert word in str(raised.value)


def test_clipping_bounds_the_update(plain: Finished) -> None:
    """One step of SGD from the same weights, clipped to ``limit`` and not.

    The update is ``lr * gradient``, scaled to the norm ``lr * limit``; so the two results lie
    ``lr * (norm - limit)`` apart, where ``norm`` is the one reported before clipping.
    """
    lr, limit = 0.5, 0.25
    one = ("optim=sgd", f"optim.lr={lr}", "task.steps=1", "task.save_model=true")
    clipped = beside(plain, "clipped", *one, f"optim.clip_norm={limit}")
    free = beside(plain, "free", *one, "optim.clip_norm=0")
    norm = free.series("grad_norm")[0]
    assert norm > 4 * limit
    assert clipped.series("grad_norm")[0] == pytest.approx(norm, rel=1e-5)
    a, b = (load_file(run.dir.final_model / "model.safetensors") for run in (clipped, free))
    assert a.keys() == b.keys()
    apart = torch.cat([(a[name].double() - b[name].double()).flatten() for name in a]).norm()
    assert float(apart) == pytest.approx(lr * (norm - limit), rel=1e-3)


def test_divergence_ends_the_run_and_is_named(plain: Finished) -> None:
    # Each step multiplies the matrices by about 1e5.
    wild = ("optim=sgd", "optim.lr=1e3", "optim.weight_decay=100", "optim.clip_norm=0")
    once = ("launch.max_restarts=0", "checkpoint.every_steps=1")
    run = train(plain.dir.root.parent, "nan", *RUN, *wild, *once)
    assert run.exit_code != 0
    assert run.result["outcome"] == "nan", run.said
    assert "of step 3" in run.result["cause"]
    assert "optim.lr" in run.result["cause"] + run.result["fix"]
    assert "Traceback" not in run.said
    last = run.lines("train")[-1]
    assert (last["step"], last["nonfinite"]) == (3, True)
    assert list_steps(run.dir.checkpoints) == [1, 2], "nothing bad is saved"
    assert not run.dir.final_model.exists()
