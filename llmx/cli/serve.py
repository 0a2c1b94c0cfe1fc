"""Serve a trained model with vLLM: ``python -m llmx serve RUN|MODEL``.

Prints the command, and where vLLM is installed becomes it: a server for programs of this machine
(``-- --host 0.0.0.0``: of others, too).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from llmx.cli.target import Target, dtype_of, find_target
from llmx.config.model_rules import whole_number
from llmx.errors import ConfigError
from llmx.hardware.detect import Gpu, usable_gpus
from llmx.models.adapter_names import CONFIG_FILE
from llmx.run.rundir import read_mapping

PROGRAM = "vllm"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``--max-lora-rank`` (vllm/config/lora.py)."""
WEIGHTS_SHARE = 0.6
"""Largest share of a GPU's memory for weights; the rest is for the caches of requests."""


def run(options: argparse.Namespace) -> int:
    """Print, become vLLM; returns the exit code where it is not installed."""
    target = find_target(
        options.target, command="serve", model=options.model, trusted=options.trust
    )
    gpus = usable_gpus()
    command = vllm_command(
        target, gpus, name=options.name, shared_by=options.gpus, length=options.max_model_len
    )
    command += _passed_on(options.behind)
    print(printed(command), flush=True)
    program = shutil.which(PROGRAM)
    if options.print:
        return 0
    if program is None:
        print(
            "llmx: vLLM is not installed here. Install it in an environment of its own (pip "
            "install vllm), and run the command above there.",
            file=sys.stderr,
        )
        return 0
    os.execv(program, command)
    raise AssertionError("unreachable")


def _passed_on(words: Sequence[str]) -> list[str]:
    """Arguments of the user for vLLM, which by itself would listen on every address."""
    options = {word.partition("=")[0] for word in words}
    if "--api-key" in options:
        raise ConfigError(
            "--api-key: every user of this machine can read a command line. Set the environment "
            "variable VLLM_API_KEY instead, which vLLM reads."
        )
    return [*([] if "--host" in options else ["--host", "127.0.0.1"]), *words]


def vllm_command(
    target: Target,
    gpus: Sequence[Gpu],
    *,
    name: str | None = None,
    shared_by: int | None = None,
    length: int | None = None,
) -> list[str]:
    """The words of ``vllm serve``.

    Args:
        gpus: of this machine.
        name: of the model for clients; None is that of its directory.
        shared_by: GPUs that share the model; None is as few as hold it.
        length: ``--max-model-len``; None is all positions of the model.

    Raises:
        ConfigError: vLLM cannot serve this adapter, or not on so many GPUs.
    """
    directory = Path(os.path.abspath(target.directory))
    name = name or target.name
    served, config = directory, read_mapping(directory / "config.json")
    if target.base is not None:
        check_adapter(directory)
        path = Path(target.base.path or "").expanduser()
        served = Path(os.path.abspath(path)) if path.is_dir() else Path(target.base.path or "")
        config = read_mapping(served / "config.json") | target.base.config
    words = [PROGRAM, "serve", str(served)]
    if target.base is None:
        words += ["--served-model-name", name]
    elif target.base.revision and not served.is_dir():
        words += ["--revision", target.base.revision]
    if dtype := dtype_of(directory):  # vLLM's auto would serve fp32 files in fp16
        words += ["--dtype", dtype]
    positions = whole_number(config, "max_position_embeddings", "n_positions", "max_seq_len")
    if length or positions:
        words += ["--max-model-len", str(length or positions)]
    heads = whole_number(config, "num_attention_heads", "n_head", "num_heads")
    weight_bytes = sum(path.stat().st_size for path in served.glob("*.safetensors"))
    num = shared_by or _fewest(gpus, weight_bytes, heads=heads)
    if heads is not None and heads % num:
        even = [str(n) for n in range(1, min(heads, 16) + 1) if heads % n == 0]
        raise ConfigError(
            f"--gpus {num}: the model's {heads} attention heads cannot be shared out evenly. Set "
            f"--gpus to one of {', '.join(even)}."
        )
    if num > 1:
        words += ["--tensor-parallel-size", str(num)]
    if target.base is not None:
        rank = int(read_mapping(directory / CONFIG_FILE).get("r") or 0)
        words += [
            "--enable-lora",
            "--lora-modules",
            f"{name}={directory}",
            "--max-lora-rank",
            str(next(size for size in LORA_RANKS if size >= rank)),
        ]
        template = directory / "chat_template.jinja"
        if template.is_file():  # the base may have another one
            words += ["--chat-template", str(template)]
    if target.trusts_remote_code:
        words.append("--trust-remote-code")
    return words


def check_adapter(directory: Path) -> None:
    """ConfigError for what vLLM refuses (vllm/lora/peft_helper.py): it would say so after minutes
    of loading."""
    values = read_mapping(directory / CONFIG_FILE)
    rank = values.get("r")
    problems = []
    if values.get("use_dora"):
        problems.append("it is one of DoRA")
    if values.get("modules_to_save"):
        problems.append(f"it has whole modules ({', '.join(values['modules_to_save'])})")
    if isinstance(rank, int) and rank > LORA_RANKS[-1]:
        problems.append(f"its rank is {rank}, over {LORA_RANKS[-1]}")
    if problems:
        raise ConfigError(
            f"{directory} is an adapter that vLLM cannot serve: {' and '.join(problems)}. Merge it "
            "into its base (python -m llmx export RUN --to merged), and serve that with --model."
        )


def _fewest(gpus: Sequence[Gpu], weight_bytes: int, *, heads: int | None) -> int:
    """The fewest GPUs that hold the weights, of those that share the heads evenly; all that can
    where none do."""
    if not gpus:
        return 1
    least = min(gpu.memory_gib for gpu in gpus) * 2**30 * WEIGHTS_SHARE
    counts = [n for n in range(1, len(gpus) + 1) if heads is None or heads % n == 0]
    return next((n for n in counts if weight_bytes <= n * least), counts[-1])


def printed(command: Sequence[str]) -> str:
    """The command for a shell, with one option per line."""
    lines = [" ".join(map(shlex.quote, command[:3]))]
    for word in command[3:]:
        if word.startswith("--"):
            lines.append(f"    {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)
