"""Preparing text to pretrain on: llmx against ``datasets.map``, end to end, in turn, in one run.

    LLMX_REAL_DATA=DIR python benchmarks/tokenization.py [--mib 36] [--rounds 3] [--only BPE]

The corpus is real text, English or Chinese, repeated with variation (``data_corpora.py``) into
JSON Lines. Every measurement is a process of its own; its clock starts when libraries and
tokenizer are loaded:

a  ``datasets``: load_dataset, map(tokenize, batched, num_proc), map(group), as the peers do
b  bare ``tokenizers.encode_batch_fast`` of texts that are in memory, nothing written
c  ``llmx.data.prepare``: from the file on disk to packed samples on disk, an empty cache

Both ends of a and c are on disk, and the ids of all must be equal.
(The file is not called tokenize.py: that would hide a module of the standard library.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from data_corpora import MIB, make_tokenizers, write_corpus
from machine import ROOT, write_result

SEQ_LEN = 1024
FAST, OTHERS = 5.0, 1.5
CASES = [
    ("English", "byte-level BPE", FAST),
    ("English", "byte-level BPE, space first", FAST),
    ("English", "WordPiece", OTHERS),
    ("English", "SentencePiece BPE", OTHERS),
    ("English", "Unigram", OTHERS),
    ("Chinese", "byte-level BPE", FAST),
]
"""(text, tokenizer, how many times as fast as ``datasets.map`` it should be)"""
NOTE = (
    "Where the load at the end is above the number of cores, others took part of the machine: "
    "then the wall times say little, and the core-seconds are what to compare."
)


def main() -> int:
    """Measure, print, write benchmarks/results/tokenize.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=36, help="size of a corpus")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each")
    parser.add_argument("--only", default="", help="cases that match this pattern")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        which, corpus, tokenizer = options.one
        print(json.dumps(ONE[which](Path(corpus), Path(tokenizer))))
        return 0
    source = os.environ.get("LLMX_REAL_DATA")
    if not source:
        parser.error("set LLMX_REAL_DATA to the folder of real data (see benchmarks/README.md)")
    cases = [case for case in CASES if re.search(options.only, f"{case[0]} {case[1]}")]
    if not cases:
        parser.error(f"--only {options.only}: no case matches")
    with tempfile.TemporaryDirectory(prefix="llmx-tokenize-") as directory:
        return compare(Path(source), Path(directory), cases, options)


def compare(
    real_data: Path, place: Path, cases: list[tuple[str, str, float]], options: argparse.Namespace
) -> int:
    """a, b and c of each case in turn; 0 where the targets are met and the ids equal."""
    tokenizers = make_tokenizers(real_data, place, {name for _, name, _ in cases})
    corpora = {language: place / f"{language}.jsonl" for language, _, _ in cases}
    text_mib = {
        language: write_corpus(real_data, path, size=int(options.mib * MIB), language=language)
        / MIB
        for language, path in corpora.items()
    }
    sizes = ", ".join(f"{mib:.1f} MiB of {language} text" for language, mib in text_mib.items())
    lines = [
        f"{sizes}; {len(os.sched_getaffinity(0))} cores; samples of {SEQ_LEN} tokens; median of "
        f"{options.rounds} rounds, a, b and c in turn.",
        "",
        "| text, tokenizer | | a: datasets.map | b: encode_batch_fast | c: llmx | c / a | c / b |",
        "|---|---|---|---|---|---|---|",
    ]
    good, encoders = True, []
    for language, name, target in cases:
        rounds = []
        for _ in range(options.rounds):
            rounds.append(
                {which: measure(which, corpora[language], tokenizers[name]) for which in "abc"}
            )
            if len({found["ids"] for found in rounds[-1].values()}) != 1:
                raise SystemExit(f"{language}, {name}: the ids differ: {rounds[-1]}")
        for unit, key in (("MiB/s", "seconds"), ("MiB a core-second", "cpu_seconds")):
            rate = {
                which: statistics.median(text_mib[language] / each[which][key] for each in rounds)
                for which in "abc"
            }
            ratio = statistics.median(each["a"][key] / each["c"][key] for each in rounds)
            # On a machine that others use, wall time may flatter either side.
            good = good and ratio >= target
            lines.append(
                f"| {language}, {name} | {unit} | {rate['a']:.2f} | {rate['b']:.2f} "
                f"| {rate['c']:.2f} | **{ratio:.1f}** (target {target:g}) "
                f"| {rate['c'] / rate['b']:.1f} |"
            )
        encoders.append(f"- {language}, {name}: {rounds[-1]['c']['encoder']}")
    lines += ["", "What llmx encoded with:", *encoders]
    lines += ["", "The ids of a, b and c were equal in every round."]
    lines.append(f"Targets, by wall time and by core-seconds: {'met' if good else 'MISSED'}.")
    lines += ["", NOTE]
    write_result("tokenize", "Preparing text: llmx against datasets.map", lines)
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
    from llmx.tasks import prepare, tokenizer_of

    exp = Experiment()
    exp.task.kind, exp.data.packing, exp.data.seq_len = "pretrain", "concat", SEQ_LEN
    exp.data.path, exp.model.tokenizer = str(corpus), str(directory)
    tokenizer = tokenizer_of(exp)
    with tempfile.TemporaryDirectory() as cache:
        exp.data.cache_dir = cache
        clock = Clock()
        store = prepare(exp, tokenizer)
        times = clock.times()
        digest = store.meta["sha256"]["tokens.bin"]
        # A last token alone, from which nothing can be learned, is not in the store.
        if store.meta["num_tokens"] < store.meta["row_tokens"]:
            raise SystemExit("the corpus ends with a sample of one token; choose another --mib")
    return {**times, "ids": digest, "encoder": store.meta["encoder"]}


ONE = {"a": with_datasets, "b": bare, "c": with_llmx}

if __name__ == "__main__":
    sys.exit(main())
