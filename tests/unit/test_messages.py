# ruff: noqa: E501, RUF100 - tables of words
"""The corpus of messages: what a user reads who makes a mistake, in one file for a person to read.

``tests/golden/messages.txt``; recorded by ``make golden``. Read it as a whole after a change:
value, rule and fix, one line each, in plain English and the words of docs/development/.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llmx.cli.arguments import sweep_overrides
from llmx.cli.commands import COMMANDS
from llmx.cli.words import parse, split_command
from llmx.compose.overrides import check_overrides
from llmx.config import experiment_from_dict, experiment_of_snapshot
from llmx.config.build import schema_fields
from llmx.errors import LlmxError
from llmx.hardware.resolve import parse_hostfile
from tests.composing import composed
from tests.fuzz.check import FOREIGN

LINES = [
    "--cfg jbo", "--info foo", "--resolve", "--package optim", "--cfg job --package", "--cfg job -m", "--cfg job --info", "-cd .", "--cfg job --cfg all",
    "--experimental-rerun X", "--shell-completion install=bash", "--config-name mine", "--config-path x", "--config-dir nowhere", "--config-dir",
    "--multi", "--multirun=yes", "a=1 --version", "--lr=1e-4",
]  # fmt: skip
WORDS = [
    "seq_len=3", "zero=stage4", "zreo=stage3", "foo", "plan", "optim.lr=[1", "name='a", "optim.lr=1,2", "hardware=cpu2,a100x8",
    "+task.foo=1", "launch.envv.A=1", "launch.supervisor=first", "optim.lr.x=1", "optim.betas.x=1", "model=null", "model=[a]", "models/x=1",
    "model@x=tiny", "~zero=stage2", "a.=1", "=1", "data.columns={0: é}", "hydra.job.chdir=true",
    "hydra/launcher=3", "name=\ud800", "seed=" + "9" * 5000,
    "name=" + "x" * 70000, "name=" + "[" * 3000 + "]" * 3000, "checkpoint=1", "hydra.sweeper.x=choice(1,2)",
    "hydra=3", "hydra/job_logging=nope", "hydra.mode=MULTIRUN", "hydra.searchpath=[file:///nowhere]", "experiment=none",
    "tracking=wandb,csv", "model=./", "data.path=[a,b]", "task.steps=3\r", "name=a#b", 'launch.env={"A": "b"}', "tracking.tags=[中文]",
    "data=[demo,{file: 0.5}]", "hardware.hosts[0].slots=2", "optim.learning_rate=1",
]  # fmt: skip
SWEEPS = [
    ["seed=range(0,1e9)"], ["seed=interval(0,1)"], ["seed=range(0,9000)", "optim.lr=1,2"], ["seed=1,2", "run_dir=x"],
    ["experiment=demo,null"], ["zero=stage1,stage9"],
]  # fmt: skip
RULES = [
    ["precision=bf16", "hardware=a100x2_v100x2"], ["adapter=qlora", "model=llama2_7b", "hardware=a100x8", "zero=stage3"], ["zero.offload_param=cpu"], ["zero=stage3", "zero.hpz_partition_size=3", "hardware=a100x8"],
    ["zero=stage2", "zero.hpz_partition_size=2", "hardware=a100x8"], ["data.seq_len=2048"], ["hardware=a100x8", "hardware.slots=9"],
    ["zero=stage3_zeropp", "hardware=cpu2"], ["task.epochs=null"], ["batch.global_batch=13", "batch.micro_batch=4"],
    ["batch.global_batch=1", "hardware=a100x8"], ["batch.global_batch=16", "batch.accumulation=3"],
    ["batch.global_batch=8", "batch.tokens_per_step=4096"], ["batch.global_batch=null", "batch.tokens_per_step=4096", "batch.accumulation=2"],
    ["batch.global_batch=null", "batch.tokens_per_step=1e12", "data.seq_len=8", "model.kind=qwen3", "hardware=a100x8"],
    ["launch.transport=local", "hardware=a100x2_v100x2"], ["data.packing=concat"], ["optim.warmup_steps=9", "task.steps=5"],
    ["zero.extra.zero_optimisation={}"], ["zero.extra.elasticity={}"], ["zero.extra.train_batch_size=8"],
    ["zero.extra.zero_optimization.round_robin=true"], ["model=hf"], ["model=gpt2", "model.path=./nowhere"],
    ["model=tiny", "model.tokenizer=null"], ["model.init=pretrained", "model=tiny"], ["hardware=hostfile"],
    ["hardware=hostfile", "hardware.path=hosts"], ["hardware=hostfile", "hardware.path=nowhere", "hardware.device=cpu"],
    ["zero=infinity", "zero.nvme_path=null", "hardware=a100x8"], ["zero=infinity", "zero.nvme_path=disk", "hardware=a100x8"],
    ["zero.offload_optimizer=nvme", "zero.nvme_path=/nvme"], ["zero=stage0", "zero.offload_optimizer=cpu"],
    ["optim.kind=fused_adam", "hardware=cpu2"], ["optim.kind=fused_adam", "hardware=a100x8", "zero=stage2_offload"],
    ["launch.transport=slurm", "launch.sync=rsync"], ["model.attention=flash_attention_2", "hardware=cpu2"],
    ["zero=stage3", "model.compile=true"], ["hardware=a100x8", "zero=stage0", "zero.grad_accum_dtype=fp32"],
    ["hardware=a100x8", "zero.grad_accum_dtype=fp16"], ["zero.extra={data_types: {grad_accum_dtype: fp32}}"],
    ["optim=adam8bit", "zero=stage0"], ["optim=adam8bit", "hardware=a100x8"], ["optim=adafactor"],
    ["optim=muon", "zero=infinity", "hardware=a100x8", "zero.nvme_path=/x"],
    ["data=file", "data.path=rows.jsonl"], ["data=file", "data.path=/nowhere/rows.jsonl"], ["data=file", "data.path='*.json'"],
    ["data=file", "data.path=hub:x"], ["data=file", "data.path=''"], ["data.columns={promt: x}"], ["data.data_map={response: x}"],
    ["launch.env.WANDB_API_KEY=abc"], ["launch.env.MASTER_PORT=1"],
    ["launch.sync_extra=[more]"], ["schema_version=4"], ["hardware.hosts=[{name: a, slots: 2, device: x}]", "hardware=a100x8"],
    ["hardware.hosts=[]", "hardware=a100x8"], ["hardware.hosts=[{name: a, slots: 1024, device: cpu}]", "hardware.devices.cpu.accelerator=cuda"],
]  # fmt: skip
FILES = {
    "tab": b"lr: 1\n\tkind: sgd\n", "bracket": b"lr: 1\nbetas: [0.9, 0.95\n", "twice": b"lr: 1\nlr: 2\n", "quote": b"kind: 'sgd\n",
    "colon": b"kind: a: b\n", "alias": b"kind: *sgd\n", "list": b"- a\n", "mixed": b"lr: 1\n- a\n", "key": b"kidn: sgd\n",
    "latin1": b"kind: caf\xe9\n", "utf16": "lr: 1\n".encode("utf-16"), "bom": b"\xef\xbb\xbflr: 1\n", "zero": b"kind: a\x00b\n",
    "option": b"defaults:\n  - nope\n", "group": b"defaults:\n  - /zero: stage1\n", "defaults": b"defaults: adamw\n",
    "mapping": b"defaults: {override /zero: stage3}\n",
    "relative": b"defaults:\n  - zero: stage1\n", "equals": b"lr: 1\nbeta2: =\n",
}  # fmt: skip
GRIDS = [
    "grid: 3\n", "a: 1\n", "grid: {zero: stage1}\n", "grid: {zero: [[stage1]]}\n", "grid: {}\nb: 1\n",
    "grid: {zero: [stage1]}\noverrides: 3\n", "grid:\n\tzero: [stage1]\n", "grid: {zero: [stage1]\n",
]  # fmt: skip
HOSTFILES = [
    "", "a slots=0\n", "a slots = 2\n", "a:22 slots=2\n", "u@a slots=2\n", "a\n", "a slots=2\na slots=2\n",
    "a[1-4] slots=2\n", "// x\n", "a b\n",
]  # fmt: skip


def said(call: Callable[[], Any]) -> str:
    """The message of a mistake."""
    try:
        call()
    except LlmxError as error:
        return str(error)
    return "ACCEPTED"


def out_of_range() -> Iterator[str]:
    """The message of every number and closed set of the schema, for a value it does not take."""
    for key, hint, field in schema_fields():
        limits, closed = field.metadata.get("range"), field.metadata.get("choices")
        value: Any = "nope" if closed is not None or hint is bool else None
        if limits is not None:
            value = (limits.minimum if limits.minimum is not None else limits.above) - 1
            value = {list: [value, value], dict: {"a": value}}.get(typing.get_origin(hint), value)
        if value is not None:
            for part in reversed(key.split(".")):
                value = {part: value}
            yield said(functools.partial(experiment_from_dict, value))


def rule(words: list[str]) -> None:
    known = any("hardware=" in word for word in words)
    composed([*words, *([] if known else ["hardware=cpu2"])])


def corpus(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """(title, messages)."""
    commands = tuple(COMMANDS)
    own, grid = directory / "own", directory / "grid.yaml"
    (directory / "hosts").write_text("a slots=2\n")
    (own / "optim").mkdir(parents=True)
    for name, content in FILES.items():
        (own / "optim" / f"{name}.yaml").write_bytes(content)

    def each(call: Callable[[Any], Any], values: Iterable[Any]) -> list[str]:
        return [said(functools.partial(call, value)) for value in values]

    def sweep(text: str) -> None:
        grid.write_text(text)
        sweep_overrides(grid)

    yield "Options", each(lambda line: parse("train", line.split()), LINES)
    words = ("trian", "import", "render", "bundle", "queue")
    yield "Commands", each(lambda word: split_command([word], commands), words)
    yield "Words", each(lambda word: check_overrides([word], commands=commands), WORDS)
    yield "Sweeps", each(lambda words: check_overrides(words, multirun=True), SWEEPS)
    names = [*FILES, "mime"]
    yield "Files", each(lambda n: check_overrides([f"optim={n}"], config_dirs=[str(own)]), names)
    yield "Sweep files", each(sweep, GRIDS)
    yield "Hostfiles", each(parse_hostfile, HOSTFILES)
    yield "Values", list(out_of_range())
    yield "Rules", each(rule, RULES)
    snapshots = [None, {"schema_version": 0}, {"schema_version": 99}]
    yield "Snapshots", each(experiment_of_snapshot, snapshots)


def test_the_corpus_of_messages(golden, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = []
    for title, messages in corpus(tmp_path):
        lines += [title, "-" * len(title)]
        for message in messages:
            message = message.replace(str(tmp_path), "DIR")
            assert message != "ACCEPTED", lines[-1]
            foreign = FOREIGN.search(message)
            assert foreign is None, f"{foreign}: {message}"
            assert message.isprintable() or "\n" in message, message
            lines.append(message)
        lines.append("")
    golden("messages.txt", "\n".join(lines))
