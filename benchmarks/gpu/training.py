"""Parts that train: real runs of ``python -m llmx``, read from what they leave behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence

from benchmarks.gpu import material
from benchmarks.gpu.part import Context, Measure, NotHere, PartFailed, Run, at_least, at_most, must
from llmx.plan.types import MemoryPlan
from llmx.run.metrics import declared_in

QUICK = ("task.eval_generate=0", "task.save_model=false", "checkpoint=none")


def demo(context: Context) -> list[Measure]:
    """``python -m llmx``: a tiny model learns the bundled instructions."""
    words = ("task.epochs=null", "task.steps=6", "task.eval_generate=4") if context.tiny else ()
    run = context.train("demo", *words)
    result = run.json("result.json")
    loss = float(result["final_loss"])
    seconds = float(result["ended"] - result["started"])
    if context.tiny:
        return [Measure("final loss", loss), Measure("time", seconds, "s")]
    return [
        at_most("final loss", loss, 0.2),
        *(
            at_least(f"{metric.title} on 160 eval prompts", float(result[name]), 0.8)
            for name, metric in declared_in(run.lines("start")[0]).items()
        ),
        Measure("time", seconds, "s"),
    ]


def stages(context: Context) -> list[Measure]:
    """ZeRO 1, 2, 3 and both offloads, 20 steps each: all learn, and agree at the first step."""
    options = ["stage1", "stage2", "stage3", "stage2_offload", "stage3_offload"]
    steps = 20
    if context.tiny:
        options, steps = ["stage2", "stage3_offload"], 4
    measures, first = [], {}
    for option in options:
        length = (f"task.steps={steps}", "task.epochs=null", "task.log_every_steps=1")
        run = context.train(f"stages-{option}", f"zero={option}", *length, *QUICK)
        losses = [line["loss"] for line in run.lines("train")]
        first[option] = losses[0]
        measures.append(
            at_most(f"{option}: last loss over the first", losses[-1] / losses[0], 0.95)
        )
        measures.append(
            Measure(option, run.steady("tokens_per_s", after_step=steps // 2), "tokens/s")
        )
    apart = max(first.values()) - min(first.values())
    return [*measures, at_most("first losses apart", apart, 0.02)]


def resume(context: Context) -> list[Measure]:
    """Half a run, then the other half after a new start: equal to the whole, bit for bit."""
    options = ["stage2"] if context.tiny else ["stage2", "stage3"]
    steps = 4 if context.tiny else 20
    measures = []
    for option in options:
        words = [f"zero={option}", "deterministic=true", f"task.steps={steps}", "task.epochs=null"]
        words += ("task.log_every_steps=1", "task.eval_generate=0", "task.save_model=false")
        whole = context.train(f"whole-{option}", *words, "checkpoint=none")
        half = (f"task.stop_at_step={steps // 2}", "checkpoint.at_end=true")
        context.train(f"halves-{option}", *words, *half)
        again = context.train(f"halves-{option}", "task.stop_at_step=null", resume=True)
        same = [line["loss"] for line in whole.lines("train")] == [
            line["loss"] for line in again.lines("train")
        ]
        hashes = {run.lines("end")[-1]["weights_hash"] for run in (whole, again)}
        measures.append(must(f"{option}: losses equal after a resume", same))
        measures.append(must(f"{option}: weights equal after a resume", len(hashes) == 1))
    return measures


def llama_1_7b(context: Context) -> tuple[str, ...]:
    """Model, text and optimizer of the runs that measure speed: a Llama of 1.7B parameters."""
    if context.tiny:
        return ("model=tiny", "model.config.max_position_embeddings=256", *_shape(context, 128))
    return ("model=llama_1_7b", "model.config.max_position_embeddings=4096", *_shape(context, 4096))


def llama_8b_layers(context: Context) -> tuple[str, ...]:
    """Eight layers of the shape of Llama 3 8B: what one GPU holds of it with its optimizer."""
    if context.tiny:
        return llama_1_7b(context)
    return (
        "model=llama3_8b",
        "model.path=null",
        "model.init=scratch",
        "model.config.num_hidden_layers=8",
        "model.config.max_position_embeddings=4096",
        *_shape(context, 4096),
    )


def _shape(context: Context, seq_len: int) -> tuple[str, ...]:
    return (
        f"model.tokenizer={material.tokenizer(context)}",
        f"data.seq_len={seq_len}",
        "optim=pretrain",
        f"data.cache_dir={context.root / 'cache'}",
    )


def _pretrain(context: Context, *, steps: int, micro_batch: int, accumulation: int) -> list[str]:
    global_batch = micro_batch * accumulation * context.world_size
    seq_len = 128 if context.tiny else 4096
    path = material.text(context, tokens=int(1.2 * steps * global_batch * seq_len))
    return [
        "data=text",
        f"data.path={path}",
        "task=pretrain",
        f"task.steps={steps}",
        f"task.log_every_steps={max(1, steps // 4)}",
        f"batch.micro_batch={micro_batch}",
        f"batch.global_batch={global_batch}",
        *QUICK,
    ]


def mfu(context: Context) -> list[Measure]:
    """Model FLOPs utilization and peak memory at seq 4096, the latter against the plan's."""
    shapes = {"1.7B": llama_1_7b(context), "8 layers of 8B": llama_8b_layers(context)}
    variants = [("none", 1), ("none", 8), ("selective", 1), ("full", 1), ("full", 8)]
    rows = [
        (shape, recompute, accumulation) for shape in shapes for recompute, accumulation in variants
    ]
    if context.tiny:
        rows = [("1.7B", "full", 2)]
    measures = []
    for shape, recompute, accumulation in rows:
        title = f"{shape}, recompute {recompute}, accumulation {accumulation}"
        steps = 4 if context.tiny else (24 if accumulation == 1 else 8)
        words = _pretrain(
            context, steps=steps, micro_batch=2 if context.tiny else 4, accumulation=accumulation
        )
        words += [f"model.activation_checkpointing={recompute}"]
        slug = title.replace(", ", "-").replace(" ", "_").replace(".", "_")
        try:
            run = context.train(f"mfu-{slug}", *shapes[shape], *words, "zero=stage1")
        except PartFailed as error:
            measures.append(Measure(title, str(error)[:90], expected="a run", ok=False))
            continue
        measures += _speed_and_memory(context, run, title, steps=steps, recompute=recompute)
    return measures


def _speed_and_memory(
    context: Context, run: Run, title: str, *, steps: int, recompute: str
) -> list[Measure]:
    tokens = run.steady("tokens_per_s", after_step=steps // 3)
    measures = [Measure(title, tokens, "tokens/s")]
    if context.compares and context.peak_tflops(run.json("plan.json")["precision"]):
        used = 100 * run.steady("mfu", after_step=steps // 3)
        measures.append(at_least(f"{title}: MFU", used, 50 if recompute == "full" else 60, "%"))
    # The allocator of torch, whose peak a rank reports, does not see the CUDA context.
    plans = [MemoryPlan(**values) for values in run.json("plan.json")["memory"]]
    predicted = [plan.total_gib - plan.context_gib for plan in plans]
    peak = run.peak_memory_gib()
    measures.append(Measure(f"{title}: peak memory of a rank", peak, "GiB"))
    if predicted and context.compares:
        ratio = max(predicted) / peak
        within = 0.95 <= ratio <= 1.15
        measures.append(
            Measure(f"{title}: plan over peak", ratio, expected="0.95 to 1.15", ok=within)
        )
    return measures


def saves(context: Context) -> list[Measure]:
    """Background saves of 1.7B parameters (20 GB): training waits for the copy only."""
    if not context.tiny:
        from benchmarks.gpu.kernels import free_gib

        free = free_gib(context.root)
        if free < 50:
            raise NotHere(f"needs 50 GiB of free disk for two checkpoints; {free:.0f} GiB are free")
    steps, every = (6, 2) if context.tiny else (120, 30)
    words = _pretrain(context, steps=steps, micro_batch=2, accumulation=1)
    words = [word for word in words if word != "checkpoint=none"]
    saving = [
        "checkpoint=default",
        "checkpoint.every_minutes=null",
        f"checkpoint.every_steps={every}",
    ]
    saving += ("checkpoint.keep.last=1", "checkpoint.at_end=false", "checkpoint.background=always")
    run = context.train("saves", *llama_1_7b(context), *words, *saving, "zero=stage1")
    events = [line for line in run.lines("event") if line["event"] == "saved"]
    shutil.rmtree(run.directory / "checkpoints", ignore_errors=True)
    if len(events) < 2:
        raise PartFailed(f"only {len(events)} checkpoints were saved in {steps} steps")
    measures = [
        Measure("size of a checkpoint", events[0]["bytes"] / 1e9, "GB"),
        Measure("training waits, first save", events[0]["stall_s"], "s"),
        Measure("written in the background in", events[-1]["background_s"], "s"),
    ]
    later = max(line["stall_s"] for line in events[1:])
    bound = at_most("training waits, later saves at most", later, 2.0, "s")
    return [*measures, bound if context.compares else Measure(bound.name, later, "s")]


def packed(context: Context) -> list[Measure]:
    """SFT with rows packed, and each in a padded row of its own: useful tokens/s, and the loss."""
    rows = 64 if context.tiny else 3000
    path = material.chats(context, rows=rows)
    steps = 4 if context.tiny else 16
    shared = [*llama_1_7b(context), "data=file", f"data.path={path}", "task=sft"]
    shared += [f"task.steps={steps}", "task.epochs=null", "task.log_every_steps=4", *QUICK]
    shared += [f"batch.global_batch={2 * context.world_size}", "batch.micro_batch=2"]
    speed, loss = {}, {}
    for layout in ("packed", "padded"):
        run = context.train(f"sft-{layout}", *shared, f"data.layout={layout}", "zero=stage1")
        speed[layout] = run.steady("tokens_per_s", after_step=steps // 3)
        loss[layout] = [line["loss"] for line in run.lines("train")]
    apart = max(abs(a - b) for a, b in zip(loss["packed"], loss["padded"], strict=True))
    ratio = Measure("packed over padded", speed["packed"] / speed["padded"])
    return [
        Measure("packed", speed["packed"], "useful tokens/s"),
        Measure("padded", speed["padded"], "useful tokens/s"),
        at_least(ratio.name, float(ratio.value), 1.0) if context.compares else ratio,
        # The same steps on the same rows: only rounding is between them.
        at_most("losses apart", apart, 0.05),
    ]


def fp16(context: Context) -> list[Measure]:
    """fp16 whose loss scale doubles every 4 steps follows fp32: no step is lost at a doubling."""
    if not context.cuda:
        raise NotHere("fp16 needs a GPU")
    window = json.dumps({"loss_scale_window": 4, "initial_scale_power": 8, "hysteresis": 1})
    words = ("task.steps=24", "task.epochs=null", "task.log_every_steps=1", "optim=sgd", *QUICK)
    measures = []
    for option in ("stage0", "stage2", "stage3"):
        exact = context.train(f"fp32-{option}", f"zero={option}", "precision=fp32", *words)
        half = context.train(
            f"fp16-{option}",
            f"zero={option}",
            "precision=fp16",
            f"+zero.extra.fp16={window.replace(chr(34), '')}",
            *words,
        )
        scales = {line["loss_scale"] for line in half.lines("train")}
        pairs = zip(exact.lines("train"), half.lines("train"), strict=True)
        apart = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
        measures.append(must(f"{option}: the scale doubled on the way", len(scales) > 2))
        measures.append(at_most(f"{option}: losses apart from fp32", apart, 0.02))
    return measures


def synchronisations(context: Context) -> list[Measure]:
    """Where a step between two logged ones waits for the GPU, by line of code."""
    if not context.cuda:
        raise NotHere("a CPU has nothing to wait for")
    measures = []
    for option in ("stage1", "stage2", "stage3"):
        steps, quiet = 14, 10
        words = (f"task.steps={steps}", "task.epochs=null", f"task.log_every_steps={steps}")
        watch = "launch.env={LLMX_WATCH_SYNCHRONISATIONS: '3'}"
        run = context.train(f"sync-{option}", f"zero={option}", *words, *QUICK, watch)
        found = run.json("ranks/synchronisations-000.json")
        ours = sum(count for place, count in found.items() if "llmx/" in place)
        measures.append(at_most(f"{option}: llmx waits, a step", ours / quiet, 0.1))
        measures.append(
            Measure(f"{option}: others wait, a step", (sum(found.values()) - ours) / quiet)
        )
        for place, count in sorted(found.items(), key=lambda item: -item[1])[:4]:
            measures.append(Measure(f"{option}: {place}", count / quiet, "a step"))
    return measures


def several_gpus(context: Context) -> list[Measure]:
    """ZeRO-3 over all GPUs, ZeRO++ (hpZ, qwZ, qgZ), communication beside computation."""
    if context.num_gpus < 2:
        raise NotHere(f"needs two or more GPUs; this machine has {context.num_gpus}")
    steps = 12
    runs: dict[str, Sequence[str]] = {
        "stage3": ("zero=stage3",),
        "stage3, no overlap": ("zero=stage3", "zero.overlap_comm=false"),
        "hpZ": ("zero=stage3", "zero.hpz_partition_size=0"),
        "qwZ": ("zero=stage3", "zero.quantized_weights=true"),
        "qgZ": ("zero=stage3", "zero.quantized_gradients=true"),
    }
    measures = []
    for title, words in runs.items():
        work = _pretrain(context, steps=steps, micro_batch=2, accumulation=1)
        slug = title.replace(", ", "-").replace(" ", "_")
        try:
            run = context.train(f"several-{slug}", *llama_1_7b(context), *work, *words)
        except PartFailed as error:
            measures.append(Measure(title, str(error)[:90], expected="a run", ok=False))
            continue
        losses = [line["loss"] for line in run.lines("train")]
        speed = run.steady("tokens_per_s", after_step=steps // 3)
        measures.append(Measure(title, speed, "tokens/s"))
        measures.append(must(f"{title}: the loss falls", losses[-1] < losses[0]))
    return measures
