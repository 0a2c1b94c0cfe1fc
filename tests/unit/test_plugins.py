"""A tracker, a transport, an optimizer and a dataset format of an installed package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from llmx.compose.effects import without_effect
from llmx.config.schema import OptimConfig, SourceConfig
from llmx.data.format import formats
from llmx.data.source.records import refuse
from llmx.data.split import Source
from llmx.errors import ConfigError
from llmx.launch.files import render_command, write_launch_files
from llmx.run.rundir import RunDir
from llmx.run.snapshot import load
from llmx.tracking.base import check_packages
from llmx.tracking.process import send
from llmx.train.engine.optimizer import build_optimizer
from tests import tracked_run
from tests.composing import composed, planned

FILES = {
    "their_tracker.py": """
from llmx.tracking import Tracker

class Names(Tracker):
    name = "names"
    reads = ("entity",)

    def start(self, meta):
        self.path = meta.run_dir / "names.txt"

    def log(self, record):
        with self.path.open("a") as stream:
            print(record["kind"], file=stream)

    def finish(self, result):
        self.report("finished", str(self.path))
""",
    "their_transport.py": """
from llmx.launch.transports import Transport, deepspeed_argv, module_argv

class Rope(Transport):
    name = "rope"
    programs = (("rope", "rope-client"),)
    has_agents = False
    allocates = True

    def argv(self, spec):
        return deepspeed_argv(spec, ["--launcher=rope", *module_argv(spec)])
""",
    "their_optimizer.py": """
from llmx.config.optimizers import Optimizer

def needs(exp):
    if exp.zero.stage == 3:
        yield "optim.kind=still needs zero.stage below 3. Use zero=stage2."

STILL = Optimizer("their_optimizer:make", state_bytes=16, needs=needs, reads=())

def make(groups, optim, *, fused):
    import torch

    return torch.optim.SGD(groups, lr=optim.lr, momentum=0.5)
""",
    "their_data.py": """
from llmx.config.file_formats import FileType
from llmx.data.format.formats import Format, conversation_of
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.lines import lines_of
from llmx.data.source.records import Record

def to_dialogue(fields):
    question, answer = fields.text("dialogue").split(" -> ")
    turns = [Message("user", question), Message("assistant", answer)]
    return conversation_of(fields, turns)

DIALOGUE = Format("dialogue", {Conversation: to_dialogue})

def read(file, stream, bad, text_unit):
    for line, where in lines_of(file, stream, bad):
        yield Record({"dialogue": line.strip()}, where)

TALK = FileType((".talk",), "their_data:read")
""",
    "theirs-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1\n",
    "theirs-1.dist-info/entry_points.txt": """
[llmx.trackers]
names = their_tracker:Names
[llmx.transports]
rope = their_transport:Rope
[llmx.optimizers]
still = their_optimizer:STILL
[llmx.formats]
dialogue = their_data:DIALOGUE
[llmx.file_types]
talk = their_data:TALK
""",
}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in FILES:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)


def test_a_tracker(tmp_path: Path) -> None:
    run = tracked_run.write_start(tmp_path / "run", kinds=["names"], entity="us")
    tracked_run.append(run, tracked_run.lines(steps=20))
    experiment = load(run)
    check_packages(experiment.tracking)
    assert not without_effect(experiment, ["tracking.entity=us"])
    assert without_effect(experiment, ["tracking.uri=http://mlflow"])
    assert send(run, experiment, {}, lifeline=None) == 0
    kinds = (run.root / "names.txt").read_text().split()
    assert kinds[0] == "start"
    assert "train" in kinds


def test_a_transport(tmp_path: Path) -> None:
    host = "{name: b, address: 10.0.0.9, slots: 1, device: v100_32g}"
    words = ["hardware=static", f"hardware.hosts=[{host}]", "launch.transport=rope"]
    done = composed(words, run_dir=tmp_path)
    spec = write_launch_files(done.experiment, done.plan, RunDir(tmp_path))
    assert "--launcher=rope --module" in render_command(spec)
    list_indices = "hardware.hosts=[{name: a, slots: 1, device: v100_32g, gpus: [1]}]"
    with pytest.raises(ConfigError, match="rope chooses the GPUs of a host"):
        composed([*words, list_indices], run_dir=tmp_path)


@pytest.mark.usefixtures("made_up_traces")
def test_an_optimizer() -> None:
    words = ["model=llama3_8b", "hardware=a100x8", "zero=stage0", "optim.lr=0.1"]
    theirs, adamw = (planned([*words, f"optim.kind={kind}"]) for kind in ("still", "adamw"))
    more = theirs.plan.memory[0].optimizer_gib - adamw.plan.memory[0].optimizer_gib
    assert more == pytest.approx(8 * 8.03e9 / 2**30, rel=0.01)
    with pytest.raises(ConfigError, match="still needs zero.stage below 3"):
        composed([*words, "optim.kind=still", "zero=stage3"])
    made = build_optimizer(nn.Linear(2, 2), OptimConfig(kind="still", lr=0.1), accelerator="cpu")
    assert made.defaults["momentum"] == 0.5


def test_a_dataset_format_and_a_type_of_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(formats, "FORMATS", dict(formats.FORMATS))
    (tmp_path / "rows.talk").write_text("Q -> A\nq -> a\n")
    data = composed(["data=file", f"data.path={tmp_path}/rows.talk", "data.form=dialogue"])
    source = Source.of(data.experiment.data, SourceConfig(f"{tmp_path}/rows.talk"), split="train")
    rows = [[message.content for message in row.messages] for row in source.rows(refuse)]
    assert rows == [["Q", "A"], ["q", "a"]]


def test_a_name_that_no_package_has() -> None:
    with pytest.raises(ConfigError, match="adamw, .*, or an optimizer of an installed package"):
        composed(["optim.kind=adamv"])
    with pytest.raises(ConfigError, match=r"tracking.kinds\[0\]=names2: must be one of wandb, "):
        composed(["tracking.kinds=[names2]"])
