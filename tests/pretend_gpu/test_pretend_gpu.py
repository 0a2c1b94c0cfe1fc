"""The whole of llmx's worker on GPUs that are not there: what a first day on real ones would find.

``python -m pytest -m deepspeed tests/pretend_gpu``; ``LLMX_RECORD_GOLDEN=1`` records the waits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import llmx
from llmx.plan.types import Plan, RankSpeed
from llmx.run.metrics.lines import read_metrics
from llmx.run.rundir import RunDir, read_json, write_json
from llmx.train.speeds import Change, record
from tests.forked_ranks import Server
from tests.pretend_gpu.collectives import differences
from tests.pretend_gpu.report import STEP, read
from tests.rundirs import TINY_LLAMA, experiment, logs, write_run

pytestmark = pytest.mark.deepspeed

DEVICES = {
    "a100": {"compute_capability": 8.0, "memory_gib": 40, "precisions": ["fp32", "fp16", "bf16"]},
    "v100": {"compute_capability": 7.0, "memory_gib": 32, "precisions": ["fp32", "fp16"]},
}
TWO = (("a100", 2),)
MIXED = (("a100", 2), ("v100", 2))
WATCHED = 5
"""Steps 3 to 7 of 8: no line of the log is written in them."""
WAITS = Path(__file__).parent.parent / "golden" / "pretended_waits.json"
WHOLE = {
    "task": {"save_model": True, "eval_generate": 2, "eval_max_new_tokens": 4},
    "checkpoint": {"every_steps": 7},
}
"""Completions, checkpoints and an export beside the training and its evaluations."""
PAIRS = {"path": "{rows}/pairs.jsonl", "packing": "none", "over_long": "truncate"}
ANSWERS = {**PAIRS, "path": "{rows}/answers.jsonl"}
EVERY_TIME = ("stage3", "grpo")
DRAWN = {"rewards": ["length"], "max_new_tokens": 12, "updates": 2}
MASKED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def of(
    stage: int, kind: str, *, groups: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """A task at a stage of ZeRO, with further groups."""
    return {"zero": {"stage": stage}, "task": {"kind": kind, "options": options}, **(groups or {})}


CASES: dict[str, dict[str, Any]] = {
    "stage0": {"zero": {"stage": 0}},
    "stage1-bf16": {"zero": {"stage": 1}, "precision": "bf16"},
    "stage2": {"zero": {"stage": 2}, **WHOLE},
    "stage3": {"zero": {"stage": 3}, **WHOLE},
    "stage3-offload": {
        "zero": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        **WHOLE,
    },
    "lora-stage3-bf16": {
        "zero": {"stage": 3},
        "precision": "bf16",
        "adapter": {"kind": "lora", "rank": 4, "targets": ["all-linear"]},
        **WHOLE,
    },
    "dpo": of(2, "dpo", groups={"data": PAIRS}),
    "dpo-live-stage3": of(3, "dpo", reference="live", groups={"data": PAIRS}),
    "embed": of(2, "embed", groups={"data": ANSWERS}),
    "classify": of(
        3,
        "classify",
        groups={
            "data": {"path": "{rows}/labelled.jsonl", "form": "labelled"},
            "checkpoint": {"every_steps": 7},
        },
    ),
    "distill": of(2, "distill", teacher="{rows}/teacher", top_k=8),
    "grpo": of(2, "grpo", **DRAWN, group_size=4, beta=0.04, groups={"data": ANSWERS}),
    "ppo-stage3": of(3, "ppo", **DRAWN, groups={"data": ANSWERS}),
    "mlm": of(
        2,
        "mlm",
        groups={
            "model": {"kind": "bert", "tokenizer": "{rows}/masked", "config": MASKED},
            "data": {"path": "{rows}/documents.jsonl", "seq_len": 32},
        },
    ),
    "mixed-hpz-fp16": {
        "hosts": MIXED,
        "zero": {"stage": 3, "hpz_partition_size": 2},
        "precision": "fp16",
        **WHOLE,
    },
    "overflow": {
        "hosts": (("v100", 2),),
        "zero": {"stage": 2, "extra": {"fp16": {"initial_scale_power": 32}}},
        "precision": "fp16",
    },
}


def gpus(*hosts: tuple[str, int]) -> dict[str, Any]:
    """The group ``hardware`` of hosts with so many GPUs of a type."""
    return {
        "name": "pretended",
        "hosts": [
            {"name": f"node-{number}", "address": "127.0.0.1", "slots": slots, "device": device}
            for number, (device, slots) in enumerate(hosts)
        ],
        "devices": {device: {"accelerator": "cuda", **DEVICES[device]} for device in dict(hosts)},
    }


def run_of(directory: Path, hardware: dict[str, Any] | None, **groups: Any) -> RunDir:
    """A small run; ``hardware=None``: on two CPU ranks."""
    defaults: dict[str, Any] = {
        "data": {"seq_len": 64, "max_rows": 200, "eval_samples": 8},
        "task": {"steps": 8, "log_every_steps": 8, "save_model": False},
        "batch": {"micro_batch": 2, "accumulation": 2},
        "checkpoint": {"every_steps": 100},
        "launch": {"comm_timeout_s": 120},
    }
    for group, values in groups.items():
        known = defaults.get(group)
        merged = isinstance(known, dict) and isinstance(values, dict)
        defaults[group] = {**known, **values} if merged else values
    if hardware is not None:
        defaults["hardware"] = hardware
        if len(hardware["hosts"]) > 1:
            defaults["launch"] = {**defaults["launch"], "transport": "ssh"}
    return write_run(experiment(directory, **defaults))


def reports(run: RunDir) -> list[dict[str, list[Any]]]:
    """What each rank saw."""
    return [read(path) for path in sorted(run.ranks.glob("pretended-*.jsonl"))]


@pytest.fixture(scope="module")
def pretended() -> Iterator[Server]:
    """Forks ranks with pretended GPUs."""
    server = Server("tests.pretend_gpu.server")
    yield server
    server.close()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of each form of data."""
    directory = tmp_path_factory.mktemp("rows")
    words = [f"{number} and {number * 7 % 31} and more" for number in range(120)]
    files = {
        "pairs": [{"prompt": w, "chosen": f"yes, {w}", "rejected": f"no, {w}"} for w in words],
        "answers": [{"instruction": w, "output": f"it is {w}"} for w in words],
        "labelled": [{"prompt": w, "label": "ab"[n % 2]} for n, w in enumerate(words)],
        "documents": [{"text": f"{w}, " * 8} for w in words],
    }
    for name, values in files.items():
        text = "".join(json.dumps(value) + "\n" for value in values)
        (directory / f"{name}.jsonl").write_text(text)
    demo = Path(llmx.__file__).parent / "assets" / "demo" / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(demo)
    torch.manual_seed(1)
    teacher = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, vocab_size=len(tokenizer)))
    teacher.save_pretrained(directory / "teacher")
    tokenizer.save_pretrained(directory / "teacher")
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    tokenizer.save_pretrained(directory / "masked")
    return directory


def prepared(case: str, rows: Path) -> tuple[dict[str, Any], tuple[tuple[str, int], ...]]:
    """The groups of a case, and its hosts."""
    groups = json.loads(json.dumps(CASES[case]).replace("{rows}", str(rows)))
    return groups, tuple(map(tuple, groups.pop("hosts", TWO)))


def trained_on(server: Server, run: RunDir, hosts: tuple[tuple[str, int], ...]) -> RunDir:
    """Run it; every rank ends well, mixes no devices and calls what the others call."""
    count = sum(slots for _, slots in hosts)
    codes = server.start(run, ranks=count).wait()
    seen = reports(run)
    assert codes == [0] * count, logs(run)
    assert len(seen) == count
    assert [report["fault"] for report in seen] == [[]] * count
    assert differences(seen) == []
    return run


def losses(run: RunDir) -> list[tuple[str, int, float]]:
    return [
        (line["kind"], line["step"], line["loss"])
        for line in read_metrics(run.metrics)
        if line["kind"] in ("train", "eval")
    ]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in EVERY_TIME else pytest.mark.nightly) for case in CASES],
)
def test_a_run_mixes_no_devices_and_waits_for_no_more_than_it_did(
    case: str, pretended: Server, ranks: Server, rows: Path, tmp_path: Path
) -> None:
    groups, hosts = prepared(case, rows)
    run = trained_on(pretended, run_of(tmp_path / "run", gpus(*hosts), **groups), hosts)
    check_waits(case, run)
    check_fetches(run, at_stage_3=groups["zero"]["stage"] == 3)
    if case == "overflow":
        assert any(line.get("skipped_steps") for line in read_metrics(run.metrics)), logs(run)
    if groups.get("precision", "fp32") == "fp32":
        on_cpus = ranks.start(run_of(tmp_path / "cpu", None, **groups)).finish()
        expected = losses(on_cpus)
        assert [value[:2] for value in losses(run)] == [value[:2] for value in expected]
        for ours, theirs in zip(losses(run), expected, strict=True):
            assert ours[2] == pytest.approx(theirs[2], rel=1e-4), ours


@pytest.mark.nightly
def test_a_resumed_run_shares_out_anew_and_stops_early(
    pretended: Server, ranks: Server, tmp_path: Path
) -> None:
    def until(directory: Path, hardware: dict[str, Any] | None, stop: int | None) -> RunDir:
        early = {"patience": 2, "min_delta": 100.0}  # ended by the evaluations at 0, 3 and 6
        task = {"eval_every_steps": 3, "early_stopping": early, "save_model": True}
        return run_of(
            directory,
            hardware,
            task={**task, "log_every_steps": 1, "stop_at_step": stop},
            batch={"global_batch": 8, "micro_batch": 8, "accumulation": None, "rebalance": True},
            checkpoint={"at_end": True},
        )

    def slower_after_step_4(run: RunDir) -> RunDir:
        """What a run keeps whose rank 1 has been throttled."""
        plan = Plan.from_dict(read_json(run.plan))
        assert plan.balance is not None
        one, other = plan.balance.speeds
        change = Change(4, (one, RankSpeed(3 * other.fixed_fs, 3 * other.token_fs)))
        write_json(run.balance, {**record(plan), "changes": [asdict(change)]})
        return run

    run, on_cpus = tmp_path / "run", tmp_path / "cpu"
    trained_on(pretended, until(run, gpus(*TWO), 2), TWO)
    ended = trained_on(pretended, slower_after_step_4(until(run, gpus(*TWO), None)), TWO)
    lines = read_metrics(ended.metrics)
    happened = {line["event"]: line for line in lines if line["kind"] == "event"}
    assert happened["resumed"]["step"] == 2
    assert (happened["rebalanced"]["step"], happened["rebalanced"]["sizes"]) == (4, [[6], [2]])
    assert happened["early_stopped"]["step"] == lines[-1]["step"] == 6
    assert ended.final_model.is_dir()
    ranks.start(until(on_cpus, None, 2)).finish()
    theirs = ranks.start(slower_after_step_4(until(on_cpus, None, None))).finish()
    assert [loss for *_, loss in losses(ended)] == pytest.approx(
        [loss for *_, loss in losses(theirs)], rel=1e-4
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other-gpu", "local rank 1 makes a tensor on cuda:0"),
        ("two-devices", "aten.add.Tensor takes tensors on cpu and on cuda"),
        ("cpu-in-nccl", "NCCL's all_reduce of a tensor on the CPU"),
        ("two-threads", "a second thread uses NCCL's group world"),
        ("objects-in-nccl", "NCCL is given Python objects"),
        ("other-collective", "rank 0: all_reduce [(1, 'torch.float32')]"),
    ],
)
def test_a_fault_is_seen(fault: str, message: str, pretended: Server, tmp_path: Path) -> None:
    task = {
        "kind": "tests.pretend_gpu.faulty:Faulty",
        "code_path": str(Path(__file__).parents[2]),
    }
    launch = {"comm_timeout_s": 10}  # a rank alone in a collective fails by it
    run = run_of(tmp_path / "run", gpus(*TWO), task=task, launch=launch)
    assert any(pretended.start(run, PRETENDED_FAULT=fault).wait()), "no rank failed"
    seen = reports(run)
    faults = [text for report in seen for text in report["fault"]] + differences(seen)
    assert any(message in text for text in faults), faults


def check_fetches(run: RunDir, *, at_stage_3: bool) -> None:
    """Each parameter that ZeRO-3 gathers is on its way before its module begins, in passes that
    train and in others."""
    for report in reports(run):
        fetches = report["fetches"][0]
        assert bool(fetches.get("training ahead")) == at_stage_3
        assert {kind.split()[1] for kind in fetches} <= {"ahead"}, fetches


def check_waits(case: str, run: RunDir) -> None:
    """Of no place more than the golden file has, for a step, or for a phase in which it is."""
    counts: dict[str, float] = {}
    for report in reports(run):
        begun = {STEP: WATCHED, **report["begun"][0]}
        for phase, place, count in report["wait"]:
            name = place if phase == STEP else f"{phase}: {place}"
            counts[name] = max(counts.get(name, 0), round(count / begun[phase], 2))
    for phase in ("prefill", "token"):  # which rows have ended is asked once
        own = sum(n for name, n in counts.items() if name.startswith(phase) and " llmx/" in name)
        assert own <= 1, counts
    recorded = json.loads(WAITS.read_text()) if WAITS.exists() else {}
    if os.environ.get("LLMX_RECORD_GOLDEN") == "1":
        recorded[case] = dict(sorted(counts.items()))
        WAITS.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")
    known = recorded.get(case, {})
    more = {place: count for place, count in counts.items() if count > known.get(place, 0)}
    assert not more, f"waits for the GPU in each step, new or more than {WAITS.name} has: {more}"
