"""Sweeps of llmx against a shell loop over bare ``deepspeed``: the same networks, data and steps.

    python benchmarks/sweep.py overhead      what a trial costs beside the loop's
    python benchmarks/sweep.py infeasible    a grid of 16 of which half runs out of memory
    python benchmarks/sweep.py concurrent    four trials of one rank, two hosts of two slots
    python benchmarks/sweep.py autotuner     trials and time against DeepSpeed's autotuner

The second and third need root (control groups, and two hosts in namespaces of the network).

The loop runs ``peers/bare_deepspeed.py``, a script as DeepSpeed's tutorials write it, on samples
that lie packed in a file: it pays for no preparation. Both sides are run in turn on a machine that
does nothing else. Each part prints its ratio, writes ``results/sweep_PART.md``, and exits with 1
where the target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import refuse_left_locks, write_result

HERE = Path(__file__).parent
RANKS = 2
IGNORE = -100
Result = tuple[list[str], bool]
"""Lines of the result, and whether the target is met."""


@dataclass(frozen=True)
class Side:
    """What one side took for all of its trials."""

    wall_s: float
    trials: int
    good: int
    """That ended well."""
    train_s: float
    """Of those, from their first step to their last, together."""
    pruned: int = 0


class Bench:
    """Both sides on the same network and samples, in one temporary directory."""

    def __init__(self, root: Path, words: Sequence[str], *, steps: int, ranks: int = RANKS) -> None:
        self.root, self.steps, self.ranks = root, steps, ranks
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "LLMX_CACHE": str(root / "cache")}
        self.words = [
            "experiment=demo", "precision=fp32", "tracking=none", "data.loss_on=all",
            "data.eval_samples=0", "task.eval_generate=0", "launch.max_restarts=0",
            "batch.global_batch=null", "batch.accumulation=1", f"task.steps={steps}",
            "task.epochs=null", "task.log_every_steps=1", *words,
        ]  # fmt: skip
        self.peer_env = {**self.env, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(ranks)}
        self.peer_env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.job = self._prepare()

    def _prepare(self) -> dict[str, Any]:
        """Both sides' data, and the peer's network: what llmx plans for these words."""
        run_dir = self.root / "plan"
        command = [sys.executable, "-m", "llmx", *self.words, f"hardware=cpu{RANKS}"]
        run([*command, "dry_run=true", f"run_dir={run_dir}"], env=self.env, log=self.log("plan"))
        os.environ["LLMX_CACHE"] = self.env["LLMX_CACHE"]
        from llmx.models.factory import padded_vocab
        from llmx.run.rundir import RunDir
        from llmx.tasks import prepare, tokenizer_of
        from llmx.worker import read_experiment

        exp = read_experiment(RunDir(run_dir))
        tokenizer = tokenizer_of(exp)
        store = prepare(exp, tokenizer)
        tokens = np.zeros((len(store), exp.data.seq_len), np.int32)
        labels = np.full_like(tokens, IGNORE)
        for index in range(len(store)):
            sample = store[index]
            size = len(sample.tokens)
            tokens[index, :size] = sample.tokens
            labels[index, :size] = np.where(sample.targets, sample.tokens, IGNORE)
        paths = {"tokens": tokens, "labels": labels}
        for name, values in paths.items():
            np.save(self.root / f"{name}.npy", values)
        rows = padded_vocab(len(tokenizer), multiple_of=exp.model.pad_vocab_to_multiple_of)
        attention = exp.model.attention if exp.model.attention in ("eager", "sdpa") else "sdpa"
        self.zero = json.loads((run_dir / "ds_config.json").read_text())["zero_optimization"]
        return {
            **{name: str(self.root / f"{name}.npy") for name in paths},
            "model": {"model_type": "llama", **exp.model.config, "vocab_size": rows},
            "attention": attention,
            "steps": self.steps,
        }

    def log(self, name: str) -> Path:
        """Where a side's output goes."""
        return self.root / f"{name}.log"

    def peer_words(
        self, name: str, *, micro_batch: int, lr: float, stage: int | None = None
    ) -> list[str]:
        """One ``deepspeed`` of the loop; writes its files."""
        zero = self.zero if stage is None else {"stage": stage}
        config = self.ds_config(micro_batch=micro_batch, lr=lr, zero=zero)
        job = {**self.job, "out": str(self.root / f"{name}.out.json")}
        for kind, values in (("job", job), ("ds", config)):
            (self.root / f"{name}.{kind}.json").write_text(json.dumps(values))
        script = HERE / "peers" / "bare_deepspeed.py"
        files = ["--job", f"{self.root}/{name}.job.json"]
        files += ["--deepspeed_config", f"{self.root}/{name}.ds.json"]
        return ["deepspeed", "--num_gpus", str(self.ranks), str(script), *files]

    def ds_config(self, *, micro_batch: Any, lr: float, zero: dict[str, Any]) -> dict[str, Any]:
        """DeepSpeed's JSON, as a user writes it."""
        return {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }

    def loop(self, name: str, trials: Sequence[dict[str, Any]], *, start: Any = None) -> Side:
        """A shell script with one ``deepspeed`` after the other."""
        names = [f"{name}-{index}" for index in range(len(trials))]
        lines = [
            f"{shlex.join(self.peer_words(each, **trial))} > {self.root}/{each}.log 2>&1 || true"
            for each, trial in zip(names, trials, strict=True)
        ]
        script = self.root / f"{name}.sh"
        script.write_text("\n".join(lines) + "\n")
        wall_s = run(["bash", str(script)], env=self.peer_env, log=self.log(name), start=start)
        outs = [self.root / f"{each}.out.json" for each in names]
        good = [json.loads(out.read_text()) for out in outs if out.exists()]
        if not good:
            raise RuntimeError(f"no trial of the loop ended well:\n{tail(self.root, names[0])}")
        return Side(wall_s, len(trials), len(good), sum(out["train_s"] for out in good))

    def sweep(self, name: str, axes: Sequence[str], *, start: Any = None) -> Side:
        """One ``python -m llmx -m`` of the same."""
        directory = self.root / name
        words = ["-m", *self.words, f"sweep.trial_steps={self.steps}", *axes]
        if not any(word.startswith("hardware=") for word in axes):
            words.append(f"hardware=cpu{RANKS}")
        words += [f"hydra.sweep.dir={directory}"]
        command = [sys.executable, "-m", "llmx", *words]
        wall_s = run(command, env=self.env, log=self.log(name), start=start, may_fail=True)
        trials = json.loads((directory / "sweep.json").read_text())["trials"]
        ended = [trial["outcome"] for trial in trials]
        if "ok" not in ended:
            raise RuntimeError(f"no trial of the sweep ended well:\n{tail(self.root, name)}")
        train_s = 0.0
        for trial in trials:
            if trial["outcome"] == "ok":
                lines = (directory / trial["run_dir"] / "metrics.jsonl").read_text().splitlines()
                times = [each["time"] for each in map(json.loads, lines) if each["kind"] == "train"]
                train_s += times[-1] - times[0]
        pruned = ended.count("pruned")
        print(f"  {name}: {', '.join(f'{ended.count(o)} {o}' for o in dict.fromkeys(ended))}")
        return Side(wall_s, len(trials), ended.count("ok"), train_s, pruned)


def overhead(options: argparse.Namespace) -> Result:
    """Time of a trial, all included, against that of the loop."""
    rates = [1e-3 * (index + 1) for index in range(options.trials)]
    with scratch() as root:
        bench = Bench(root, options.words or MEDIUM, steps=options.steps)
        micro = 4
        bench.sweep("warm-up", [f"optim.lr={rates[0]}", f"batch.micro_batch={micro}"])
        pairs = []
        for number in range(options.pairs):
            loop = bench.loop(f"loop-{number}", [{"micro_batch": micro, "lr": lr} for lr in rates])
            axes = [f"optim.lr={','.join(map(str, rates))}", f"batch.micro_batch={micro}"]
            pairs.append((loop, bench.sweep(f"sweep-{number}", axes)))
            print(f"pair {number + 1}: " + per_trial(*pairs[-1]), flush=True)
    ratios = [ours.wall_s / loop.wall_s for loop, ours in pairs]
    median = statistics.median(ratios)
    lines = [
        f"{options.trials} trials of {options.steps} steps, two ranks, one learning rate each.",
        "",
        "| pair | a trial of the loop | a trial of llmx | of it training | ratio |",
        "|---|---|---|---|---|",
    ]
    for number, (loop, ours) in enumerate(pairs):
        lines.append(
            f"| {number + 1} | {loop.wall_s / loop.trials:.1f} s "
            f"| {ours.wall_s / ours.trials:.1f} s "
            f"| {loop.train_s / loop.good:.1f} and {ours.train_s / ours.good:.1f} s "
            f"| {ratios[number]:.2f} |"
        )
    met = median < 1.1
    lines += ["", f"Overhead a trial: {100 * (median - 1):+.0f} %; target under 10 %: {said(met)}."]
    return lines, met


def infeasible(options: argparse.Namespace) -> Result:
    """16 trials under a limit of RAM that half of them break, all of them in the loop."""
    rates = [1e-3 * (index + 1) for index in range(options.trials)]
    sizes = options.micro_batches
    trials = [{"micro_batch": micro, "lr": lr} for lr in rates for micro in sizes]
    axes = [
        f"optim.lr={','.join(map(str, rates))}",
        f"batch.micro_batch={','.join(map(str, sizes))}",
    ]
    with scratch() as root, memory_group(options.ram_mib) as start:
        bench = Bench(root, options.words or HUNGRY, steps=options.steps)
        bench.sweep("warm-up", ["optim.lr=1e-3", f"batch.micro_batch={sizes[0]}"])
        loop = bench.loop("loop", trials, start=start)
        ours = bench.sweep("sweep", axes, start=start)
    ratio = ours.wall_s / loop.wall_s
    met = ratio <= 0.55 and loop.good == ours.good == len(trials) // 2
    lines = [
        f"{len(rates)} learning rates x micro batches of {', '.join(map(str, sizes))}, two ranks, "
        f"{options.steps} steps, all under a limit of {options.ram_mib} MiB of RAM.",
        "",
        "| side | seconds | ended well | ran out of memory | left out |",
        "|---|---|---|---|---|",
        f"| loop | {loop.wall_s:.0f} | {loop.good} | {loop.trials - loop.good} | |",
        f"| llmx | {ours.wall_s:.0f} | {ours.good} | {ours.trials - ours.good - ours.pruned} "
        f"| {ours.pruned} |",
        "",
        f"{ratio:.0%} of the loop's time; target at most 55 %, with the good half on both sides: "
        f"{said(met)}.",
    ]
    return lines, met


def concurrent(options: argparse.Namespace) -> Result:
    """Trials of one rank: after one another in the loop, beside each other in the sweep."""
    sys.path.insert(0, str(HERE.parent))
    import yaml

    from tests.cluster.launching import hardware_of
    from tests.cluster.netns import Cluster

    rates = [1e-3 * (index + 1) for index in range(options.trials)]
    with scratch() as root, Cluster(hosts=2) as cluster:
        bench = Bench(root, options.words or MEDIUM, steps=options.steps, ranks=1)
        (root / "conf/hardware").mkdir(parents=True)
        (root / "conf/hardware/pair.yaml").write_text(yaml.safe_dump(hardware_of(cluster, (2, 2))))
        slot = {"SLOT_CORES": str(options.cores), "PYTHONPATH": str(HERE / "peers" / "slot")}
        bench.env, bench.peer_env = {**bench.env, **slot}, {**bench.peer_env, **slot}

        def start(words: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
            return cluster.first.popen(words, cwd=str(root), **more)

        try:
            loop = bench.loop("loop", [{"micro_batch": 4, "lr": lr} for lr in rates], start=start)
            axes = [
                "hardware=pair", "sweep.slots_per_trial=1", "batch.micro_batch=4",
                f"optim.lr={','.join(map(str, rates))}", f"--config-dir={root}/conf",
            ]  # fmt: skip
            ours = bench.sweep("sweep", axes, start=start)
        finally:
            for group in Path("/sys/fs/cgroup/cpu").glob("llmx-slot-*"):
                with contextlib.suppress(OSError):
                    group.rmdir()
    one_start = (loop.wall_s - loop.train_s) / loop.trials
    limit = 0.3 * loop.wall_s + one_start
    met = ours.wall_s <= limit and loop.good == ours.good == len(rates)
    lines = [
        f"{len(rates)} trials of {options.steps} steps, one rank each. Two hosts of two slots; a "
        f"slot is {options.cores:g} of a core for its rank on both sides (a quota), so that all of "
        f"them are within the {os.cpu_count()} cores of this machine.",
        "",
        "| side | seconds | training of a trial |",
        "|---|---|---|",
        f"| loop, one after another | {loop.wall_s:.0f} | {loop.train_s / loop.good:.1f} |",
        f"| llmx, all at once | {ours.wall_s:.0f} | {ours.train_s / ours.good:.1f} |",
        "",
        f"{ours.wall_s / loop.wall_s:.0%} of the loop's time. Target: at most 30 % and one start "
        f"({one_start:.0f} s), {limit:.0f} s: {said(met)}.",
    ]
    return lines, met


def autotuner(options: argparse.Namespace) -> Result:
    """``tune`` against ``deepspeed --autotuning``, over the same ZeRO stages and micro batches."""
    sizes, stages = options.micro_batches, [1, 2, 3]
    with scratch() as root:
        bench = Bench(root, options.words or MEDIUM, steps=options.steps)
        theirs = autotuned(bench, sizes, stages)
        directory = root / "tuned"
        # The same space, and a step of one micro batch on both sides: what is no axis of the
        # autotuner's fast mode stays as it is.
        words = [word for word in bench.words if not word.startswith("zero=")]
        words += [
            f"hardware=cpu{RANKS}", f"zero={','.join(f'stage{stage}' for stage in stages)}",
            f"batch.micro_batch={','.join(map(str, sizes))}", "model.activation_checkpointing=none",
            f"zero.reduce_bucket_size={int(bench.zero['reduce_bucket_size'])}",
            f"hydra.sweep.dir={directory}",
        ]  # fmt: skip
        command = [sys.executable, "-m", "llmx", "tune", *words]
        wall_s = run(command, env=bench.env, log=bench.log("tune"))
        trials = json.loads((directory / "sweep.json").read_text())["trials"]
        ran = [trial for trial in trials if trial["outcome"] not in ("pruned", "same", "")]
        import yaml

        best = yaml.safe_load((directory / "experiment/best.yaml").read_text())
        stage = next(
            int(each["override /zero"].removeprefix("stage")[0])
            for each in best["defaults"]
            if isinstance(each, dict) and "override /zero" in each
        )
        ours = {"micro_batch": best["batch"]["micro_batch"], "stage": stage}
        speeds: dict[str, list[float]] = {"theirs": [], "ours": []}
        for number in range(options.pairs):
            for side, chosen in (("theirs", theirs["best"]), ("ours", ours)):
                name = f"{side}-{number}"
                bench.loop(name, [{**chosen, "lr": 1e-3}])
                out = json.loads((root / f"{name}-0.out.json").read_text())
                speeds[side].append(out["tokens_per_s"])
    their_speed, our_speed = (statistics.median(speeds[side]) for side in ("theirs", "ours"))
    met = (
        len(ran) < theirs["trials"]
        and wall_s < theirs["wall_s"]
        and our_speed >= 0.97 * their_speed
    )
    lines = [
        f"ZeRO stages {stages} x micro batches {sizes}, two ranks. The fastest configuration of "
        "each side is then timed with the same bare script, in turn.",
        "",
        "| side | trials | seconds | found | tokens/s of what was found |",
        "|---|---|---|---|---|",
        f"| DeepSpeed's autotuner | {theirs['trials']} | {theirs['wall_s']:.0f} | {theirs['best']} "
        f"| {their_speed:,.0f} |",
        f"| llmx tune | {len(ran)} | {wall_s:.0f} | {ours} | {our_speed:,.0f} |",
        "",
        "Target: fewer trials, less time, at least as fast (within 3 %, the noise of a pair): "
        f"{said(met)}.",
    ]
    return lines, met


def autotuned(bench: Bench, sizes: Sequence[int], stages: Sequence[int]) -> dict[str, Any]:
    """DeepSpeed's own search as in its tutorial: fast mode, these stages and micro batches."""
    work = bench.root / "autotuner"
    work.mkdir()
    command = bench.peer_words("autotuned", micro_batch=1, lr=1e-3)
    config = bench.ds_config(micro_batch=list(sizes), lr=1e-3, zero={"stage": list(stages)})
    config["autotuning"] = {"enabled": True, "fast": True}
    (bench.root / "autotuned.ds.json").write_text(json.dumps(config))
    job = {**bench.job, "steps": 8, "out": str(work / "out.json")}
    (bench.root / "autotuned.job.json").write_text(json.dumps(job))
    command = [command[0], "--autotuning", "tune", *command[1:]]
    # It takes a trial for failed whose stderr has the word "error", as some warning has.
    env = {**bench.peer_env, "PYTHONWARNINGS": "ignore"}
    wall_s = run(command, env=env, log=bench.log("autotuner"), cwd=work, may_fail=True)
    results = work / "autotuning_results"
    best = results / "ds_config_optimal.json"
    if not best.exists():
        raise RuntimeError(f"the autotuner has found nothing:\n{tail(bench.root, 'autotuner')}")
    found = json.loads(best.read_text())
    return {
        "wall_s": wall_s,
        "trials": sum(path.is_dir() for path in results.iterdir()),
        "best": {
            "micro_batch": found["train_micro_batch_size_per_gpu"],
            "stage": found["zero_optimization"]["stage"],
        },
    }


MEDIUM = (
    "model.config.hidden_size=256", "model.config.intermediate_size=688",
    "model.config.num_hidden_layers=4", "zero=stage2",
)  # fmt: skip
HUNGRY = (
    "model.config.hidden_size=64", "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=16", "model.config.num_key_value_heads=16",
    "model.attention=eager", "data.seq_len=512", "zero=stage2",
)  # fmt: skip
"""Attention that keeps its scores: much memory for little work."""
PARTS = {part.__name__: part for part in (overhead, infeasible, concurrent, autotuner)}
DEFAULTS = {
    "overhead": {"steps": 40, "trials": 3, "pairs": 2},
    "infeasible": {"steps": 3, "trials": 4, "micro_batches": [1, 2, 32, 64], "ram_mib": 3000},
    "concurrent": {"steps": 40, "trials": 4, "cores": 0.4},
    "autotuner": {"steps": 20, "micro_batches": [1, 2, 4, 8], "pairs": 2},
}


def main() -> int:
    """Run one part, print, write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("words", nargs="*", help="overrides of the network and its data")
    parser.add_argument("--steps", type=int, help="of each trial")
    parser.add_argument("--trials", type=int, help="learning rates")
    parser.add_argument("--pairs", type=int, help="both sides in turn, so often")
    parser.add_argument("--micro-batches", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--ram-mib", type=int, help="of both ranks and all launchers (infeasible)")
    parser.add_argument("--cores", type=float, help="of one slot (concurrent)")
    options = parser.parse_args()
    for name, value in DEFAULTS[options.part].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    lines, met = PARTS[options.part](options)
    print("\n".join(lines))
    about = PARTS[options.part].__doc__.splitlines()[0].rstrip(".")
    title = f"Sweeps: {about[:1].lower()}{about[1:]}"
    write_result(f"sweep_{options.part}", title, lines)
    return 0 if met else 1


def run(
    words: Sequence[str],
    *,
    env: dict[str, str],
    log: Path,
    cwd: Path | None = None,
    start: Any = None,
    may_fail: bool = False,
) -> float:
    """Run to the end; seconds. A failure shows the end of the log."""
    refuse_left_locks()
    begun = time.monotonic()
    with log.open("w") as stream:
        more = {} if cwd is None else {"cwd": cwd}
        process = (start or subprocess.Popen)(
            words, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, **more
        )
        code = process.wait()
    if code != 0 and not may_fail:
        raise RuntimeError(f"{words[:5]} ended with {code}:\n{tail(log.parent, log.stem)}")
    return time.monotonic() - begun


@contextlib.contextmanager
def memory_group(mib: int) -> Iterator[Any]:
    """What starts a program with so much RAM for it and its own (control groups v1 or v2)."""
    base = Path("/sys/fs/cgroup")
    first = (base / "memory").is_dir()
    group = (base / "memory" if first else base) / f"llmx-bench-{os.getpid()}"
    names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"] if first else ["memory.max"]
    group.mkdir()
    try:
        for name in names:
            (group / name).write_text(str(mib << 20))

        def start(words: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
            entered = f"echo $$ > {group}/cgroup.procs && exec {shlex.join(words)}"
            return subprocess.Popen(["bash", "-c", entered], **more)

        yield start
    finally:
        time.sleep(1)  # the last processes are leaving
        with contextlib.suppress(OSError):
            group.rmdir()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory of this benchmark; kept where BENCH_KEEP is set."""
    if kept := os.environ.get("BENCH_KEEP"):
        path = Path(kept).absolute()
        path.mkdir(parents=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="llmx-bench-") as directory:
        yield Path(directory)


def per_trial(loop: Side, ours: Side) -> str:
    """One line of a pair."""
    return (
        f"loop {loop.wall_s / loop.trials:.1f} s a trial "
        f"({loop.train_s / loop.good:.1f} training), llmx {ours.wall_s / ours.trials:.1f} s "
        f"({ours.train_s / ours.good:.1f} training), "
        f"ratio {ours.wall_s / loop.wall_s:.2f}"
    )


def tail(root: Path, name: str) -> str:
    """The end of a log."""
    return "\n".join((root / f"{name}.log").read_text(errors="replace").splitlines()[-30:])


def said(met: bool) -> str:
    """The verdict."""
    return "met" if met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
