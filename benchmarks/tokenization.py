"""Preparing text to pretrain on: llmx against ``datasets.map``, end to end, in turn, in one run.

    LLMX_REAL_DATA=DIR python benchmarks/tokenization.py [--mib 36] [--rounds 3]
    LLMX_REAL_DATA=DIR python benchmarks/tokenization.py --size-gb 0.2 0.5 1     # time and memory

The corpus is real English text (C4, Shakespeare) repeated with variation into JSON Lines, the
tokenizer a real 50k byte-level BPE. Every measurement is a process of its own; its clock starts
when libraries and tokenizer are loaded:

a  ``datasets``: load_dataset, map(tokenize, batched, num_proc), map(group), as the peers do
b  bare ``tokenizers.encode_batch_fast`` of texts that are in memory, nothing written
c  ``llmx.data.prepare``: from the file on disk to packed samples on disk, an empty cache

(The file is not called tokenize.py: that would hide a module of the standard library.)

Both ends of a and c are on disk, and their ids must be equal. The same is measured for a
tokenizer that is not converted to tiktoken (with a space before every text).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
SEQ_LEN = 1024
TARGETS = {"byte-level BPE": 5.0, "not convertible": 1.5}
ROOT = Path(__file__).resolve().parent.parent
PEAK_MB = 600
NOTE = (
    "Where the load at the end is above the number of cores, others took part of the machine: "
    "then the wall times say little, and the core-seconds are what to compare."
)


def main() -> int:
    """Measure, print, write benchmarks/results/tokenize.md or tokenize-size.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=36, help="size of the corpus")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each")
    parser.add_argument("--size-gb", type=float, nargs="+", help="only llmx, on corpora so large")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        which, corpus, tokenizer = options.one
        print(json.dumps(ONE[which](Path(corpus), Path(tokenizer))))
        return 0
    real_data = os.environ.get("LLMX_REAL_DATA")
    if not real_data:
        parser.error("set LLMX_REAL_DATA to the folder of real data (see benchmarks/README.md)")
    with tempfile.TemporaryDirectory(prefix="llmx-tokenize-") as directory:
        place = Path(directory)
        tokenizers = make_tokenizers(Path(real_data), place)
        if options.size_gb:
            return sizes(Path(real_data), place, tokenizers["byte-level BPE"], options.size_gb)
        return compare(Path(real_data), place, tokenizers, options)


def compare(
    real_data: Path, place: Path, tokenizers: dict[str, Path], options: argparse.Namespace
) -> int:
    """a, b and c in turn; 0 where the targets are met and the ids equal."""
    from machine import write_result

    corpus = place / "corpus.jsonl"
    text_mib = write_corpus(real_data, corpus, size=int(options.mib * MIB)) / MIB
    lines = [
        f"Corpus: {text_mib:.1f} MiB of text; {len(os.sched_getaffinity(0))} cores; samples of "
        f"{SEQ_LEN} tokens; median of {options.rounds} rounds, a, b and c in turn.",
        "",
        "| tokenizer | a: datasets.map | b: bare encode_batch_fast | c: llmx | c / a | c / b |",
        "|---|---|---|---|---|---|",
    ]
    good, encoders = True, []
    for name, tokenizer in tokenizers.items():
        rates: dict[str, list[float]] = {"a": [], "b": [], "c": []}
        cpu: dict[str, list[float]] = {which: [] for which in rates}
        encoder = ""
        for _ in range(options.rounds):
            ids = {}
            for which in rates:
                found = measure(which, corpus, tokenizer)
                rates[which].append(text_mib / found["seconds"])
                cpu[which].append(text_mib / found["cpu_seconds"])
                ids[which] = found["ids"]
                encoder = found.get("encoder", encoder)
                print(
                    f"{name} {which}: {rates[which][-1]:.2f} MiB/s, "
                    f"{cpu[which][-1]:.2f} a core-second",
                    flush=True,
                )
            if len(set(ids.values())) != 1:
                raise SystemExit(f"{name}: the ids differ: {ids}")
        middle = {which: statistics.median(values) for which, values in rates.items()}
        pairs = zip(rates["a"], rates["c"], strict=True)
        ratio = statistics.median(c / a for a, c in pairs)
        lines.append(
            f"| {name} | {middle['a']:.2f} MiB/s | {middle['b']:.2f} MiB/s "
            f"| {middle['c']:.2f} MiB/s | **{ratio:.1f}** (target {TARGETS[name]:g}) "
            f"| {middle['c'] / middle['b']:.1f} |"
        )
        busy = {which: statistics.median(values) for which, values in cpu.items()}
        # On a machine that others use, wall time may flatter either side.
        good = good and min(ratio, busy["c"] / busy["a"]) >= TARGETS[name]
        lines.append(
            f"| ... MiB a core-second | {busy['a']:.2f} | {busy['b']:.2f} | {busy['c']:.2f} "
            f"| {busy['c'] / busy['a']:.1f} | {busy['c'] / busy['b']:.1f} |"
        )
        encoders.append(f"- {name}: {encoder}")
    lines += ["", "What llmx encoded with:", *encoders]
    lines += ["", "The ids of a, b and c were equal in every round."]
    lines.append(f"Targets, by wall time and by core-seconds: {'met' if good else 'MISSED'}.")
    lines += ["", NOTE]
    print("\n".join(lines))
    write_result("tokenize", "Preparing text: llmx against datasets.map", lines)
    return 0 if good else 1


def sizes(real_data: Path, place: Path, tokenizer: Path, wanted_gb: list[float]) -> int:
    """Time and peak memory of llmx against the size of the corpus."""
    from machine import write_result

    lines = ["| corpus GB | s | MiB/s | peak memory MB | samples |", "|---|---|---|---|---|"]
    good = True
    for size_gb in wanted_gb:
        corpus = place / "corpus.jsonl"
        text_mib = write_corpus(real_data, corpus, size=int(size_gb * 1e9)) / MIB
        found = measure("c", corpus, tokenizer)
        corpus.unlink()
        good = good and found["peak_mb"] < PEAK_MB
        lines.append(
            f"| {size_gb:g} | {found['seconds']:.1f} | {text_mib / found['seconds']:.1f} "
            f"| {found['peak_mb']:.0f} | {found['samples']:,} |"
        )
        print(lines[-1], flush=True)
    lines += ["", f"Peak memory under {PEAK_MB} MB: {'met' if good else 'MISSED'}."]
    write_result("tokenize-size", "Preparing text: time and memory against size", lines)
    return 0 if good else 1


def measure(which: str, corpus: Path, tokenizer: Path) -> dict[str, object]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--one", which, str(corpus), str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{which} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


class Clock:
    """Wall time, and processor time of this process and of those that it waited for."""

    def __init__(self) -> None:
        self._wall, self._processor = time.monotonic(), self._spent()

    def times(self) -> dict[str, float]:
        return {
            "seconds": time.monotonic() - self._wall,
            "cpu_seconds": self._spent() - self._processor,
        }

    @staticmethod
    def _spent() -> float:
        spent = os.times()
        return spent.user + spent.system + spent.children_user + spent.children_system


def with_datasets(corpus: Path, directory: Path) -> dict[str, object]:
    """a: what the peers' training scripts do."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.split_special_tokens = True
    end = tokenizer.eos_token_id
    workers = len(os.sched_getaffinity(0))

    def tokenize(rows):
        encoded = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
        return {"input_ids": [[*ids, end] for ids in encoded]}

    def group(rows):
        joined = [token for ids in rows["input_ids"] for token in ids]
        whole = len(joined) // SEQ_LEN * SEQ_LEN
        pieces = [joined[i : i + SEQ_LEN] for i in range(0, whole, SEQ_LEN)]
        return {"input_ids": pieces, "labels": [list(piece) for piece in pieces]}

    with tempfile.TemporaryDirectory() as cache:
        clock = Clock()
        rows = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=cache)
        tokens = rows.map(tokenize, batched=True, num_proc=workers, remove_columns=["text"])
        tokens.map(group, batched=True, num_proc=workers)
        times = clock.times()
        digest = hashlib.sha256()
        import numpy as np

        for batch in tokens.with_format("numpy").iter(1000):
            digest.update(np.concatenate(batch["input_ids"]).astype(np.uint32).tobytes())
    return {**times, "ids": digest.hexdigest()}


def bare(corpus: Path, directory: Path) -> dict[str, object]:
    """b: the library alone, on texts in memory, with its own threads."""
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    clock = Clock()
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    times = clock.times()
    digest = hashlib.sha256()
    for encoding in encodings:
        digest.update(np.array([*encoding.ids, tokenizer.eos_token_id], np.uint32).tobytes())
    return {**times, "ids": digest.hexdigest()}


def with_llmx(corpus: Path, directory: Path) -> dict[str, object]:
    """c: what a run does, with nothing prepared before."""
    from llmx.config import Experiment
    from llmx.data import load_tokenizer, prepare

    exp = Experiment()
    exp.task.kind, exp.data.packing, exp.data.seq_len = "pretrain", "concat", SEQ_LEN
    exp.data.path, exp.model.tokenizer = str(corpus), str(directory)
    tokenizer = load_tokenizer(exp)
    with tempfile.TemporaryDirectory() as cache:
        exp.data.cache_dir = cache
        clock = Clock()
        store = prepare(exp, tokenizer)
        times = clock.times()
        digest = store.meta["sha256"]["tokens.bin"]
        # A last token alone, from which nothing can be learned, is not in the store.
        if store.meta["num_tokens"] < sum_of_rows(store):
            raise SystemExit("the corpus ends with a sample of one token; choose another --mib")
    return {
        **times,
        "ids": digest,
        "encoder": store.meta["encoder"],
        "samples": store.meta["num_samples"],
        "peak_mb": peak_mb(),
    }


def sum_of_rows(store) -> int:
    """Tokens before packing."""
    return int(store.meta["row_tokens"])


def peak_mb() -> float:
    """Peak resident memory of this process, MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmHWM")


ONE = {"a": with_datasets, "b": bare, "c": with_llmx}


def make_tokenizers(real_data: Path, place: Path) -> dict[str, Path]:
    """The real BPE, and one from the same files that is not converted."""
    sys.path.insert(0, str(ROOT))
    from tests.realdata import real_tokenizer_dir

    plain = real_tokenizer_dir(real_data, place / "plain")
    spaced = real_tokenizer_dir(real_data, place / "spaced")
    path = spaced / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(state), encoding="utf-8")
    return {"byte-level BPE": plain, "not convertible": spaced}


def write_corpus(real_data: Path, path: Path, *, size: int) -> int:
    """JSON Lines of about ``size`` bytes; returns the bytes of text in it.

    Every repetition of a document has some of its words put elsewhere, so that no cache of
    whole lines helps.
    """
    lines = (real_data / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line)["text"] for line in lines]
    verse = (real_data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    documents += [verse[i : i + 2500] for i in range(0, len(verse), 2500)]
    rng = random.Random(0)
    written = text = 0
    with path.open("w", encoding="utf-8") as stream:
        while written < size:
            words = rng.choice(documents).split(" ")
            for _ in range(len(words) // 10):
                i, j = rng.randrange(len(words)), rng.randrange(len(words))
                words[i], words[j] = words[j], words[i]
            document = " ".join(words)
            line = json.dumps({"text": document}, ensure_ascii=False) + "\n"
            stream.write(line)
            written += len(line.encode())
            text += len(document.encode())
    return text


if __name__ == "__main__":
    sys.exit(main())
