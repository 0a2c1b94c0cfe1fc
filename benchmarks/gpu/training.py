"""Parts that train: real runs of llmx, read from what they leave behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import material
from benchmarks.gpu.part import Context, Measure, NotHere, PartFailed, at_most, failed, must
from benchmarks.gpu.runs import Run, several, train
from llmx.config.groups import CONF
from llmx.plan.types import MemoryPlan

DEMO = CONF.parent / "llmx" / "assets" / "demo"
ROWS = ("data=file", f"data.path={DEMO / 'train.jsonl'}")
VOWELS = "task.options.rewards=[benchmarks.peers.vowels:vowels]"
QUICK = ("task.eval_generate=0", "task.save_model=false", "checkpoint=none", "task.epochs=null")
SMALL = ("data.max_rows=96", "data.eval_samples=4", "data.seq_len=128", "batch.global_batch=4")
"""Of a run that shows that a path is right: the work of a CPU core in a second."""
LOSSES = Path(__file__).with_name("losses.json")
"""Of six steps of each path (and rewards, where samples are drawn), on a CPU in fp32.
LLMX_RECORD_GOLDEN=1 writes them anew."""
LACKING = ("async_io", "bitsandbytes", "adapter=qlora")
"""In the message of a run that this machine cannot make, and need not."""
APART = {"fp32": 0.01, "16 bits": 0.1}
"""Losses of other hardware: both round, and six steps carry it on."""


def paths(context: Context) -> Iterator[Measure]:
    """Every kind of run for six steps: it ends well, and its losses are those of a CPU."""
    tiny = ("model=tiny",)
    base = context.root / "runs" / "stage2" / "model"
    adapter = ("model=hf", f"model.path={base}", *ROWS, "zero=stage2")
    rl = (*tiny, *ROWS, VOWELS, "task.options.max_new_tokens=16")
    rl += ("precision=fp32", "batch.global_batch=2", "batch.micro_batch=4")
    pairs = (*tiny, "task=dpo", "data=file", f"data.path={DEMO / 'preferences' / 'pairs.jsonl'}")
    labels = (*tiny, "task=classify", "data=labelled", f"data.path={material.labelled(context)}")
    moe = ("model=hf", f"model.path={material.experts(context)}", "model.init=scratch", *ROWS)
    nvme = f"zero.nvme_path={context.root / 'nvme'}"
    kinds: dict[str, tuple[str, ...]] = {
        "stage2": (*tiny, *ROWS, "zero=stage2", "task.save_model=true"),
        "stage3": (*tiny, *ROWS, "zero=stage3"),
        "stage2_offload": (*tiny, *ROWS, "zero=stage2_offload"),
        "stage3_offload": (*tiny, *ROWS, "zero=stage3_offload"),
        "infinity": (*tiny, *ROWS, "zero=infinity", nvme),
        "lora": (*adapter, "adapter=lora"),
        "qlora": (*adapter, "adapter=qlora"),
        "dpo": (*pairs, "zero=stage2"),
        "dpo, live reference": (*pairs, "zero=stage3", "task.options.reference=live"),
        "classify": (*labels, "zero=stage2"),
        "moe": (*moe, "model.tokenizer=demo", "zero=stage3"),
        "grpo, stage 2": (*rl, "task=grpo", "zero=stage2"),
        "grpo, stage 3": (*rl, "task=grpo", "zero=stage3"),
        "ppo, stage 3": (*rl, "task=ppo", "zero=stage3"),
    }
    recording = bool(os.environ.get("LLMX_RECORD_GOLDEN")) and not context.cuda
    known = json.loads(LOSSES.read_text(encoding="utf-8")) if LOSSES.is_file() else {}
    (context.root / "nvme").mkdir(exist_ok=True)
    for title, words in kinds.items():
        if title in context.known and (title != "stage2" or base.is_dir()):
            continue
        steps = ("task.steps=6", "task.log_every_steps=1", *QUICK, *SMALL)
        try:
            run = train(context, _slug(title), *steps, *words)
        except PartFailed as error:
            here = not any(word in str(error) for word in LACKING)
            yield failed(title, error) if here else Measure(title, str(error)[:160])
            continue
        # The loss of GRPO is 0 whatever is drawn, where a sample trains once.
        values = [
            line[key] for key in ("loss", "reward") for line in run.lines("train") if key in line
        ]
        if recording:
            known[title] = [round(value, 5) for value in values]
            LOSSES.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        yield Measure(title, run.steady("step_time_s"), "s a step")
        precision = "fp32" if run.json("plan.json")["precision"] == "fp32" else "16 bits"
        if title in known:
            apart = max(abs(a - b) for a, b in zip(values, known[title], strict=True))
            yield at_most(f"{title}: apart from a CPU ({precision})", apart, APART[precision])


def rl(context: Context) -> Iterator[Measure]:
    """GRPO with and without cuDNN's attention: tokens/s, and the peak against the plan's."""
    for title, allowed in {"with cuDNN": True, "without cuDNN": False}.items():
        if title in context.known:
            continue
        before = partial(_choose_cudnn, allowed)
        run = train(context, _slug(f"rl {title}"), *_grpo(context, steps=4), before=before)
        drawn = sorted(run.json("rank.json")["_drawn"])
        rows, tokens = _completions(context)
        yield Measure(title, run.steady("step_time_s"), "s a step")
        yield Measure(f"{title}: generation", rows * tokens / drawn[len(drawn) // 2], "tokens/s")
        yield from _memory(context, run, title)


def _choose_cudnn(allowed: bool, launch: Any) -> None:
    """Generate with cuDNN's attention or without, whatever llmx would choose; note the seconds."""
    import torch

    import llmx.train.rollout

    torch.backends.cuda.enable_cudnn_sdp(allowed)
    torch.backends.cuda.enable_cudnn_sdp = lambda _: None
    _noted(launch, "rank.json", llmx.train.rollout, "_drawn")


def _completions(context: Context) -> tuple[int, int]:
    """Rows of a step, tokens of each."""
    return (4, 8) if context.pretend else (64, 512)


def _grpo(context: Context, *, steps: int) -> tuple[str, ...]:
    """Random weights: hardly a row ends before its last token."""
    rows, tokens = _completions(context)
    shape: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    shape |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    shape |= {"vocab_size": 151936, "max_position_embeddings": 2048}
    if context.pretend:
        shape |= {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 1024}
        shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return (
        *("model=tiny", "model.kind=qwen3", "~model.config.rope_parameters"),
        *(f"++model.config.{key}={value}" for key, value in shape.items()),
        *("task=grpo", "zero=stage2", "optim.lr=1e-6", VOWELS),
        f"task.options.max_new_tokens={tokens}",
        "task.options.group_size=4" if context.pretend else "task.options.group_size=8",
        f"data.seq_len={128 + tokens}",
        f"batch.global_batch={1 if context.pretend else rows // 8}",
        f"batch.micro_batch={4 if context.pretend else 8}",
        *(*ROWS, "data.eval_samples=0", "data.max_rows=96"),
        *(f"task.steps={steps}", "task.log_every_steps=1", *QUICK),
    )


def _noted(launch: Any, name: str, place: Any, *functions: str) -> None:
    """Have a file of the run directory hold the seconds of each call of some functions."""
    path = launch.run_dir.root / name
    seconds: dict[str, list[float]] = {}

    def timed(function: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        answer = call(*args, **kwargs)
        noted = args[1] if function == "request" else function
        seconds.setdefault(noted, []).append(time.perf_counter() - began)
        path.write_text(json.dumps(seconds), encoding="utf-8")
        return answer

    for function in functions:
        call = getattr(place, function)
        # A method gets its object: a partial is no descriptor.
        setattr(place, function, lambda *a, _f=function, _c=call, **k: timed(_f, _c, *a, **k))


def resume(context: Context) -> Iterator[Measure]:
    """Half a run, then the other half after a new start: equal to the whole, bit for bit. fp16
    whose loss scale doubles every 4 steps follows fp32: no step is lost at a doubling."""
    options = ["stage2"] if context.pretend else ["stage2", "stage3"]
    steps = 4 if context.pretend else 20
    logged = ("task.epochs=null", "task.log_every_steps=1", "task.eval_generate=0", *SMALL)
    logged += ROWS
    for option in options:
        words = [f"zero={option}", "deterministic=true", f"task.steps={steps}", *logged]
        words += ["task.save_model=false"]
        whole = train(context, f"whole-{option}", *words, "checkpoint=none")
        half = (f"task.stop_at_step={steps // 2}", "checkpoint.at_end=true")
        train(context, f"halves-{option}", *words, *half)
        again = train(context, f"halves-{option}", "task.stop_at_step=null", resume=True)
        hashes = {run.lines("end")[-1]["weights_hash"] for run in (whole, again)}
        same = whole.losses() == again.losses()
        yield must(f"{option}: losses equal after a resume", same)
        yield must(f"{option}: weights equal after a resume", len(hashes) == 1)
    window = "{loss_scale_window: 4, initial_scale_power: 8, hysteresis: 1}"
    words = ["task.steps=24", "optim=sgd", "task.save_model=false", "checkpoint=none"]
    words += logged
    for option in ("stage0", "stage2", "stage3") if context.cuda else ():
        exact = train(context, f"fp32-{option}", f"zero={option}", "precision=fp32", *words)
        extra = ("precision=fp16", f"+zero.extra.fp16={window}")
        half_run = train(context, f"fp16-{option}", f"zero={option}", *extra, *words)
        scales = {line["loss_scale"] for line in half_run.lines("train")}
        pairs = zip(exact.losses(), half_run.losses(), strict=True)
        apart = max(abs(a - b) for a, b in pairs)
        yield must(f"fp16 {option}: the scale doubled on the way", len(scales) > 2)
        yield at_most(f"fp16 {option}: losses apart from fp32", apart, 0.02)


def llama_1_7b(context: Context) -> tuple[str, ...]:
    """Model, text and optimizer of the runs that measure speed: a Llama of 1.7B parameters."""
    if context.pretend:
        return ("model=tiny", "model.config.max_position_embeddings=256", *_shape(context, 128))
    return ("model=llama_1_7b", "model.config.max_position_embeddings=4096", *_shape(context, 4096))


def llama_8b_layers(context: Context) -> tuple[str, ...]:
    """Eight layers of the shape of Llama 3 8B: what one GPU holds of it with its optimizer."""
    if context.pretend:
        return llama_1_7b(context)
    config = ("num_hidden_layers=8", "max_position_embeddings=4096")
    words = ("model=llama3_8b", "model.path=null", "model.init=scratch")
    return (*words, *(f"model.config.{word}" for word in config), *_shape(context, 4096))


def _shape(context: Context, seq_len: int) -> tuple[str, ...]:
    return (
        f"model.tokenizer={material.tokenizer(context)}",
        f"data.seq_len={seq_len}",
        "optim=pretrain",
        f"data.cache_dir={context.root / 'cache'}",
    )


def _pretrain(
    context: Context, *, steps: int, micro_batch: int = 2, accumulation: int = 1, slots: int = 1
) -> list[str]:
    global_batch = micro_batch * accumulation * slots
    seq_len = 128 if context.pretend else 4096
    path = material.text(context, tokens=int(1.2 * steps * global_batch * seq_len))
    return [
        *("data=text", f"data.path={path}", "task=pretrain", f"task.steps={steps}"),
        f"task.log_every_steps={max(1, steps // 4)}",
        f"batch.micro_batch={micro_batch}",
        f"batch.global_batch={global_batch}",
        *QUICK,
    ]


def mfu(context: Context) -> Iterator[Measure]:
    """Model FLOPs utilization and peak memory at seq 4096, the latter against the plan's."""
    shapes = {"1.7B": llama_1_7b(context), "8 layers of 8B": llama_8b_layers(context)}
    variants = [("full", 1), ("none", 1), ("selective", 1), ("full", 8), ("none", 8)]
    for shape, recompute, accumulation in [
        (shape, *variant) for shape in shapes for variant in variants[: 1 if context.pretend else 5]
    ]:
        title = f"{shape}, recompute {recompute}, accumulation {accumulation}"
        if title in context.known:
            continue
        steps = 4 if context.pretend else (16 if accumulation == 1 else 6)
        micro_batch = 2 if context.pretend else 4
        words = _pretrain(context, steps=steps, micro_batch=micro_batch, accumulation=accumulation)
        words += [f"model.activation_checkpointing={recompute}", "zero=stage1"]
        try:
            run = train(context, _slug(f"mfu {title}"), *shapes[shape], *words)
        except PartFailed as error:
            yield failed(title, error)
            continue
        yield Measure(title, run.steady("tokens_per_s"), "tokens/s")
        if context.compares and context.peak_tflops(run.json("plan.json")["precision"]):
            bound = 50 if recompute == "full" else 60
            yield context.at_least(f"{title}: MFU", 100 * run.steady("mfu"), bound, "%")
        yield from _memory(context, run, title)


def _memory(context: Context, run: Run, title: str) -> Iterator[Measure]:
    """The peak of a rank, and the plan's over it."""
    # The allocator of torch, whose peak a rank reports, does not see the CUDA context.
    plans = [MemoryPlan(**values) for values in run.json("plan.json")["memory"]]
    predicted = [plan.total_gib - plan.context_gib for plan in plans]
    peak = run.peak_memory_gib()
    yield Measure(f"{title}: peak memory of a rank", peak, "GiB")
    if predicted and context.compares:
        ratio = max(predicted) / peak
        within = 0.95 <= ratio <= 1.15
        yield Measure(f"{title}: plan over peak", ratio, expected="0.95 to 1.15", ok=within)


def saves(context: Context) -> Iterator[Measure]:
    """Background saves of 1.7B parameters (20 GB): training waits for the copy only."""
    free = shutil.disk_usage(context.root).free / 2**30
    if not context.pretend and free < 50:
        raise NotHere(f"needs 50 GiB of free disk for two checkpoints; {free:.0f} GiB are free")
    steps, every = (6, 2) if context.pretend else (120, 30)
    words = _pretrain(context, steps=steps)
    words.remove("checkpoint=none")
    words += ["checkpoint=default", "checkpoint.every_minutes=null", "checkpoint.keep.last=1"]
    words += [f"checkpoint.every_steps={every}", "checkpoint.at_end=false"]
    words += ["checkpoint.background=always", "zero=stage1"]
    run = train(context, "saves", *llama_1_7b(context), *words)
    events = [line for line in run.lines("event") if line["event"] == "saved"]
    shutil.rmtree(run.directory / "checkpoints", ignore_errors=True)
    if len(events) < 2:
        raise PartFailed(f"only {len(events)} checkpoints were saved in {steps} steps")
    yield Measure("size of a checkpoint", events[0]["bytes"] / 1e9, "GB")
    yield Measure("training waits, first save", events[0]["stall_s"], "s")
    yield Measure("written in the background in", events[-1]["background_s"], "s")
    later = max(line["stall_s"] for line in events[1:])
    bound = at_most("training waits, later saves at most", later, 2.0, "s")
    yield bound if context.compares else Measure(bound.name, later, "s")


def packed(context: Context) -> Iterator[Measure]:
    """SFT with rows packed, and each in a padded row of its own: useful tokens/s, and the loss."""
    path = material.chats(context, rows=64 if context.pretend else 3000)
    steps = 4 if context.pretend else 16
    shared = [*llama_1_7b(context), "data=file", f"data.path={path}", "task=sft", "zero=stage1"]
    shared += [f"task.steps={steps}", "task.log_every_steps=4", *QUICK]
    shared += ["batch.global_batch=2", "batch.micro_batch=2"]
    speed, losses = {}, {}
    for layout in ("packed", "padded"):
        run = train(context, f"sft-{layout}", *shared, f"data.layout={layout}")
        speed[layout], losses[layout] = run.steady("tokens_per_s"), run.losses()
        yield Measure(layout, speed[layout], "useful tokens/s")
    apart = max(abs(a - b) for a, b in zip(losses["packed"], losses["padded"], strict=True))
    yield context.at_least("packed over padded", speed["packed"] / speed["padded"], 1.0)
    # The same steps on the same rows: only rounding is between them.
    yield at_most("losses apart", apart, 0.05)


def server(context: Context) -> Iterator[Measure]:
    """A rollout server beside the rank, on its device: the seconds of each part of a push."""
    run = train(context, "server", *_grpo(context, steps=4), before=_with_server)
    files = [run.json(f"{name}.json") for name in ("rank", "put", "server")]
    seconds = {name: taken for file in files for name, taken in file.items()}
    for name, title in PUSH.items():
        if name in seconds:  # of all pushes but the first, which warms up
            taken = sorted(seconds[name][1:] or seconds[name])
            yield Measure(title, taken[len(taken) // 2], "s")
    yield Measure("a step", run.steady("step_time_s"), "s")
    yield Measure("tokens of the server", run.steady("rollout_tokens_per_s"), "tokens/s")


PUSH = {
    "gather": "gather (weights to the host)",
    "pack": "pack (one body)",
    "PUT": "put (send, load)",
    "take_weights": "load (into the server's network)",
}
"""Functions of ``llmx.rollout`` whose seconds count; requests by their method."""


def _with_server(launch: Any) -> None:
    """Fork a server, and tell this rank where it listens."""
    from llmx.rollout import client, protocol, server

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        place = protocol.ServerAddress("localhost", *listener.getsockname())
    os.environ[protocol.LISTEN] = os.environ[protocol.SERVERS] = protocol.render_servers([place])
    if os.fork() == 0:
        try:
            _noted(launch, "server.json", server.Policy, "take_weights")
            server.main()
        finally:
            traceback.print_exc()
            os._exit(1)
    _noted(launch, "rank.json", client, "gather", "pack")
    _noted(launch, "put.json", client.Connection, "request")


def waits(context: Context) -> Iterator[Measure]:
    """Where a step between two logged ones waits for the GPU: by phase, and by line of code."""
    steps, quiet = (6, 2) if context.pretend else (14, 10)
    few = (f"task.steps={steps}", f"task.log_every_steps={steps}")
    sft = ("model=tiny", *ROWS, *QUICK, *SMALL, *few)
    grpo = (*_grpo(context, steps=steps), *few, "task.options.max_new_tokens=8")
    runs: dict[str, tuple[str, ...]] = {
        "stage1": (*sft, "zero=stage1"),
        "stage2": (*sft, "zero=stage2"),
        "stage3": (*sft, "zero=stage3"),
        "grpo, stage 2": grpo,
        "grpo, stage 3": (*grpo, "zero=stage3"),
        "grpo, server": grpo,
    }
    for title, words in runs.items():
        before = partial(_count_waits, title.endswith("server"), steps)
        run = train(context, _slug(f"waits {title}"), *words, before=before)
        found = run.json(WAITS) if context.cuda else {}
        phases = Counter(step=0)
        for place, count in found.items():
            phases[place.split()[0]] += count
        for phase, count in phases.items():
            yield Measure(f"{title}: waits in {phase}", count / quiet, "a step")
        ours = sum(count for place, count in found.items() if "llmx/" in place)
        if "grpo" not in title:
            yield at_most(f"{title}: waits of llmx", ours / quiet, 0.1, "a step")
        for place, count in sorted(found.items(), key=lambda item: -item[1])[:4]:
            yield Measure(f"{title}: {place}", count / quiet, "a step")


WAITS = "waits.json"
"""File of a run directory: phase and line of code -> waits for the GPU."""


def _count_waits(with_server: bool, steps: int, launch: Any) -> None:
    """Count what torch's debug mode of synchronisations warns of, from after step 3 to before the
    last one, where no line is logged."""
    if with_server:
        _with_server(launch)
    import torch

    from llmx.train.status import RankStatus

    counts: Counter[str] = Counter()
    at_step, shown = RankStatus.at_step, warnings.showwarning

    def count(message: Any, _category: Any, file: str, line: int, *_: Any) -> None:
        if "synchroniz" in str(message):
            counts[f"{_phase()} {'/'.join(Path(file).parts[-3:])}:{line}"] += 1

    def watched(status: RankStatus, step: int) -> None:
        if step == 3:
            warnings.simplefilter("always")
            warnings.showwarning = count
            torch.cuda.set_sync_debug_mode("warn")
        elif step == steps - 1:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown
            (launch.run_dir.root / WAITS).write_text(json.dumps(counts), encoding="utf-8")
        at_step(status, step)

    if torch.cuda.is_available():
        RankStatus.at_step = watched  # type: ignore[method-assign]


def _phase() -> str:
    """Of what the stack is in: the innermost frame that tells."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        for part, phase in PHASES.items():
            if part in place:
                return phase
        frame = frame.f_back
    return "step"


PHASES = {
    "llmx/rollout/": "push",
    "llmx/models/decode.py:_prefill": "prefill",
    "llmx/models/decode.py:_decode": "token",
    "llmx/train/rollout.py": "rollout",
}
"""Parts of FILE:FUNCTION; what is in none of them is the step itself."""


def several_gpus(context: Context) -> Iterator[Measure]:
    """ZeRO-3 over all GPUs, ZeRO++ (hpZ, qwZ, qgZ), communication beside computation."""
    if context.num_gpus < 2:
        raise NotHere(f"needs two or more GPUs; this machine has {context.num_gpus}")
    runs = {
        "stage3": (),
        "stage3, no overlap": ("zero.overlap_comm=false",),
        "hpZ": ("zero.hpz_partition_size=0",),
        "qwZ": ("zero.quantized_weights=true",),
        "qgZ": ("zero.quantized_gradients=true",),
    }
    work = [*llama_1_7b(context), *_pretrain(context, steps=12, slots=context.num_gpus)]
    for title, words in runs.items():
        try:
            run = several(context, _slug(f"several {title}"), *work, "zero=stage3", *words)
        except PartFailed as error:
            yield failed(title, error)
            continue
        yield Measure(title, run.steady("tokens_per_s"), "tokens/s")
        yield must(f"{title}: the loss falls", run.losses()[-1] < run.losses()[0])


def _slug(title: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", title)
