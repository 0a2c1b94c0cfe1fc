"""Packed SFT of llmx against TRL and the Hugging Face Trainer, each as well as it can be set."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

from benchmarks.gpu import material
from benchmarks.gpu.part import Context, Measure, PartFailed, at_least
from benchmarks.gpu.training import QUICK, llama_1_7b

TARGET = 1.3
"""Times the useful tokens/s of TRL at its best configuration."""


def peers(context: Context) -> list[Measure]:
    """Useful tokens/s on the same rows and network, one GPU, bf16, run in turn."""
    steps = 4 if context.tiny else 24
    data = material.chats(context, rows=64 if context.tiny else 3000)
    # Row batches of the padded peers are larger: a packed sample holds about ten rows.
    ours = context.train(
        "peers-llmx",
        *llama_1_7b(context),
        "data=file",
        f"data.path={data}",
        "task=sft",
        f"task.steps={steps}",
        "task.epochs=null",
        f"task.log_every_steps={max(1, steps // 6)}",
        "batch.micro_batch=4",
        "batch.global_batch=4",
        "zero=stage1",
        *(["hardware.slots=1"] if context.cuda else []),  # the peers train on one
        *QUICK,
    )
    speed = ours.steady("tokens_per_s", after_step=steps // 3)
    measures = [Measure("llmx", speed, "useful tokens/s")]
    model = _network(context)
    for kind, package in (("trl", "trl"), ("hf", "transformers")):
        title = {"trl": "TRL SFTTrainer", "hf": "Hugging Face Trainer"}[kind]
        if importlib.util.find_spec(package) is None:
            measures.append(Measure(title, f"{package} is not installed"))
            continue
        best: tuple[float, str] | None = None
        # Their speed depends on it: the best of three counts, what does not fit is left out.
        for micro_batch in (4,) if context.tiny else (4, 16, 32):
            try:
                result = _peer(context, kind, model, data=str(data), micro=micro_batch, steps=steps)
            except PartFailed as error:
                measures.append(Measure(f"{title}, micro batch {micro_batch}", str(error)[:90]))
                continue
            begin, end = result["points"][steps // 3], result["points"][-1]
            rate = (end[1] - begin[1]) / (end[0] - begin[0])
            how = f"micro batch {micro_batch}"
            how += ", FlashAttention" if result["flash"] else ""
            how += ", Liger" if result["liger"] else ""
            measures.append(Measure(f"{title}, {how}", rate, "useful tokens/s"))
            best = max(best or (0.0, ""), (rate, how))
        if best is not None:
            ratio = speed / best[0]
            name = f"llmx over {title} ({best[1]})"
            compared = context.compares and kind == "trl"
            measures.append(at_least(name, ratio, TARGET) if compared else Measure(name, ratio))
    return measures


def _network(context: Context) -> dict[str, Any]:
    """The shape of the model that ``llama_1_7b`` trains."""
    if context.tiny:
        shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    else:
        shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 32}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    vocab = -(-material.vocab_size(context) // 64) * 64
    return {**shape, **heads, "vocab_size": vocab, "tie_word_embeddings": context.tiny}


def _peer(
    context: Context, kind: str, model: dict[str, Any], *, data: str, micro: int, steps: int
) -> dict[str, Any]:
    out = context.root / f"peer-{kind}-{micro}.json"
    job = {
        "kind": kind,
        "tokenizer": str(material.tokenizer(context)),
        "model": model,
        "data": data,
        "seq_len": 128 if context.tiny else 4096,
        "micro_batch": micro,
        "steps": steps,
        "tiny": context.tiny,
        "out": str(out),
    }
    path = out.with_suffix(".job.json")
    path.write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.gpu.peer_trainer", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", flush=True)
    if done.returncode != 0 or not out.is_file():
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PartFailed(f"exit code {done.returncode}: {last}")
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result
