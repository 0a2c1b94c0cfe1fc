"""Export a checkpoint as a Hugging Face model, ONNX or GGUF: ``python -m llmx export RUN_DIR``.

Offline, on one machine, without a GPU: the fragments are read, joined and written a piece at a
time. The directory gets its name only when it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmx import text as human
from llmx.checkpoint import commit, selection
from llmx.checkpoint.disk import DISK, make_directories, write_file
from llmx.checkpoint.fragments import FragmentIndex, check_cover
from llmx.checkpoint.manifest import MODEL, STATE, CheckpointError, step_of
from llmx.checkpoint.model_files import check_model_files, damaged_files
from llmx.checkpoint.pointers import BEST, read_pointer
from llmx.checkpoint.selection import ProgressLine, check_all, explain, verify_with_progress
from llmx.checkpoint.tensors import NAMES, SHARD_BYTES
from llmx.errors import ConfigError, DiskFullError, LlmxError, disk_is_full
from llmx.hardware.survey import nearest_directory
from llmx.models.adapter_names import holds_adapter
from llmx.run import snapshot, trust
from llmx.run.card import write_card
from llmx.run.rundir import RunDir, no_run, read_json, read_mapping

HF, ADAPTER, MERGED, ONNX, GGUF = FORMS = ("hf", "adapter", "merged", "onnx", "gguf")
"""What is written: all that a run trained, an adapter, its base with the adapter in it; or the
whole model in another format."""
CONVERTED = (ONNX, GGUF)
QUANTIZED = ("q8_0",)
"""Precisions of GGUF alone."""
HF_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Precisions as a Hugging Face config calls them."""


def run(options: argparse.Namespace) -> int:
    """Export or check; returns the exit code."""
    if options.check and _is_model(options.run):
        return check_models([options.run], start=Path.cwd())
    if options.to in CONVERTED and _is_model(options.run):
        convert_model(options.run, to=options.to, out=options.out, dtype=options.dtype)
        return 0
    run, step = _which(options.run, options.step)
    if options.best:
        step = _best(run, step)
    if options.check:
        return check(run)
    export(
        run,
        step=step,
        out=options.out,
        to=options.to,
        dtype=options.dtype,
        shard_bytes=int(options.shard_gib * 2**30),
        trusted=options.trust,
    )
    return 0


def _is_model(path: Path) -> bool:
    """Whether ``path`` is a Hugging Face directory, and no run."""
    return (path / "config.json").is_file() and not (path / "config.yaml").is_file()


def _best(run: RunDir, step: int | None) -> int:
    best_step = read_pointer(run.checkpoints, BEST)
    if step is not None:
        raise ConfigError("--best and --step both say which checkpoint. Leave one out.")
    if best_step is None:
        raise ConfigError(
            f"{run.root} has no best checkpoint: none was saved at an evaluation that measured "
            "checkpoint.metric. Use --step N, or leave --best out for the newest."
        )
    return best_step


def check(run: RunDir) -> int:
    """Say of every checkpoint whether it is usable, and of the final model and the exports whether
    a file is damaged; 0 if the newest checkpoint and all models can be used."""
    lines, good = check_all(run.checkpoints, stream=sys.stderr)
    models = [run.final_model, *sorted((run.root / "export").glob("*"))]
    models = [path for path in models if path.is_dir()]
    if not lines and not models:
        raise CheckpointError(_without_checkpoints(run))
    print("\n".join(lines))
    return check_models(models, start=run.root) if good or not lines else CheckpointError.exit_code


def check_models(models: Sequence[Path], *, start: Path) -> int:
    """Print a line for each of these directories: its damaged files. 0 if there are none."""
    code = 0
    for path in models:
        problems = "; ".join(damaged_files(path))
        print(f"{os.path.relpath(path, start)}  {f'damaged: {problems}' if problems else 'whole'}")
        code = CheckpointError.exit_code if problems else code
    return code


def _which(path: Path, step: int | None) -> tuple[RunDir, int | None]:
    """The run and the step, also where one of its checkpoints was named instead."""
    inside = step_of(Path(os.path.abspath(path)).name)
    if inside is None:
        return RunDir(path), step
    if step not in (None, inside):
        raise ConfigError(f"{path} is the checkpoint of step {inside}, not of --step {step}.")
    return RunDir(Path(os.path.abspath(path)).parent.parent), inside


def export(
    run: RunDir,
    *,
    step: int | None = None,
    out: Path | None = None,
    to: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    trusted: bool = False,
) -> Path:
    """Write the model of one checkpoint; its directory.

    Args:
        step: None is the newest usable one.
        out: must not exist; None is ``RUN/export/step-00000120``, of a merged model with
            ``-merged`` behind it.
        to: one of ``FORMS``; None is what the run trains.
        dtype: ``fp32``, ``bf16``, ``fp16`` (GGUF: or ``q8_0``); None is what the run trained in.
        trusted: code that the run directory names may run.

    Raises:
        LlmxError: there is no such checkpoint, it is damaged, the disk is full.
    """
    from llmx.checkpoint.export.weights import list_weights, write_adapter, write_weights

    began = time.monotonic()
    if out is not None:
        _refuse_existing(out)  # before the checkpoint is read, which takes minutes
    final = _check_form(to, dtype)
    if _trusts_remote_code(run):
        code = trust.code_of(snapshot.load(run))
        trust.check_trusted(run, code, trust.MODEL, trusted=trusted, say="--trust")
    checkpoint = _select(run, step)
    adapted = holds_adapter(checkpoint / MODEL)
    to = _form((MERGED if adapted else HF) if final else to, adapted=adapted, run=run)
    if final == GGUF and (checkpoint / MODEL / "config.json").is_file():
        from llmx.checkpoint.export.gguf_file import check_architecture

        check_architecture(checkpoint / MODEL)  # before the weights are read
    end = f"-{final}" if final else "-merged" if to == MERGED else ""
    name = checkpoint.name + end
    directory = Path(os.path.abspath(out or run.root / "export" / name))
    _refuse_existing(directory)
    try:
        state = read_json(checkpoint / STATE)
        index = FragmentIndex(sorted(checkpoint.glob("rank-*.safetensors")))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint} was removed just now: the run that is training keeps only some (see "
            "checkpoint.keep). Export again."
        ) from error
    written = dtype or ("fp32" if final == ONNX else state["precision"])
    precision = state["precision"] if written in QUANTIZED else written
    check_cover(
        index.cover,
        state["parameters"],
        state.get("buffers"),
        state.get("optimizer", {}).get("states"),
    )
    # What is merged is computed in fp32.
    weights = list_weights(state, index, dtype=NAMES["fp32" if to == MERGED else precision])
    total = sum(weight.num_bytes for weight in weights)
    elements = sum(weight.num_elements for weight in weights)
    progress = ProgressLine("writing", total, stream=sys.stderr)
    described, trusts = checkpoint / MODEL, _trusts_remote_code(run)
    # Of what is merged only the adapter's size is known here.
    num_bytes = 0 if to == MERGED else total
    with contextlib.ExitStack() as stack:
        stack.callback(index.close)
        partial = stack.enter_context(_named_at_the_end(directory, num_bytes))
        stack.callback(progress.end)
        model = partial / "model" if final else partial
        make_directories(DISK, model)
        if to == ADAPTER:
            _copy_description(described, model, without="config.json")
            write_adapter(model, state, index, dtype=NAMES[precision], on_bytes=progress.add)
        elif to == MERGED:
            from llmx.checkpoint.export.merged import write_merged

            with tempfile.TemporaryDirectory(dir=model.parent, prefix=".adapter-") as place:
                adapter = Path(place)
                _copy_description(described, adapter, dtype=HF_NAMES[precision])
                write_adapter(adapter, state, index, dtype=NAMES["fp32"], on_bytes=progress.add)
                base = snapshot.load(run).model
                elements = write_merged(
                    model, adapter, base, dtype=NAMES[precision], shard_bytes=shard_bytes
                )
            total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        else:
            _copy_description(described, model, dtype=HF_NAMES[precision])
            write_weights(
                model,
                weights,
                index,
                conversions=state.get("conversions") or [],
                model=described,
                trust_remote_code=trusts,
                shard_bytes=shard_bytes,
                on_bytes=progress.add,
            )
        if final:
            progress.end()
            name = str(read_mapping(run.config).get("name") or run.root.name)
            _convert(model, partial, to=final, name=name, precision=written, trust=trusts)
            shutil.rmtree(model)
            total = sum(path.stat().st_size for path in partial.iterdir())
        write_card(run, partial, step=state["step"])
    print(
        f"{directory}: step {state['step']}, {elements:,} parameters in {written}, "
        f"{human.size(total)}, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return directory


@contextlib.contextmanager
def _named_at_the_end(directory: Path, num_bytes: int) -> Iterator[Path]:
    """An empty directory that becomes ``directory`` once it is complete; else nothing is left.

    ``num_bytes``: what is written, for the message where the disk is full; 0 if it is not known.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make_directories(DISK, partial)
        yield partial
        DISK.sync_directory(partial)
        DISK.rename(partial, directory)
        DISK.sync_directory(directory.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)  # and say what is free without it
        raise _disk_error(error, directory, num_bytes) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def convert_model(
    model: Path, *, to: str, out: Path | None = None, dtype: str | None = None
) -> Path:
    """A Hugging Face directory in another format; the directory that is written."""
    began = time.monotonic()
    final, source = _check_form(to, dtype), Path(os.path.abspath(model))
    directory = Path(os.path.abspath(out or f"{source}-{to}"))
    _refuse_existing(directory)
    if holds_adapter(source):
        raise ConfigError(
            f"{model} is an adapter. Export the run that trained it, which merges it first."
        )
    check_model_files(source)
    with _named_at_the_end(directory, 0) as partial:
        _convert(
            source, partial, to=final, name=source.name, precision=dtype or "fp32", trust=False
        )
    total = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory}: {human.size(total)}, {time.monotonic() - began:.0f} s", flush=True)
    return directory


def _check_form(to: str | None, dtype: str | None) -> str:
    """``onnx`` or ``gguf`` where it is asked for and its packages are here; else empty."""
    if dtype in QUANTIZED and to != GGUF:
        raise ConfigError(f"--dtype {dtype} is a precision of GGUF. Add --to gguf.")
    if to not in CONVERTED:
        return ""
    if to == ONNX and dtype == "bf16":
        raise ConfigError("--to onnx is written in fp32 or fp16. Set --dtype to one of them.")
    from llmx.checkpoint.export.compared import require_packages

    require_packages(to)
    return to


def _convert(
    source: Path, target: Path, *, to: str, name: str, precision: str, trust: bool
) -> None:
    """Write the other format, compare it with transformers, and print the result."""
    from llmx.checkpoint.export.gguf_file import write_gguf
    from llmx.checkpoint.export.onnx_file import write_onnx

    if to == ONNX:
        lines = [write_onnx(source, target, precision=precision, trust_remote_code=trust)]
    else:
        lines = write_gguf(source, target, name=name, precision=precision)
    for line in lines:
        print(f"llmx: {to}: {line}", file=sys.stderr)


def _select(run: RunDir, step: int | None) -> Path:
    """The directory of the checkpoint, after every byte of it was verified."""
    steps = selection.list_steps(run.checkpoints)
    if not steps:
        raise CheckpointError(_without_checkpoints(run))
    if step is not None and step not in steps:
        have = ", ".join(map(str, steps))
        raise ConfigError(f"{run.root} has no checkpoint of step {step}. It has: {have}.")
    refused: list[str] = []
    for candidate in [step] if step is not None else reversed(steps):
        directory = commit.committed_dir(run.checkpoints, candidate)
        problems = verify_with_progress(directory, stream=sys.stderr)
        if not problems:
            for line in refused:
                print(f"llmx: {line}", file=sys.stderr)
            return directory
        refused.append(f"{directory.name} cannot be used: {explain(directory, problems)}")
    alternatives = ", ".join(str(listed) for listed in steps if listed != step)
    hint = f" Other steps: {alternatives}." if step is not None and alternatives else ""
    raise CheckpointError("\n      ".join(refused) + hint)


def _without_checkpoints(run: RunDir) -> str:
    if not run.config.is_file():
        return no_run(run.root)
    words = f"{run.root} has no checkpoints (see checkpoint.every_steps and checkpoint.at_end)."
    if holds_adapter(run.final_model):
        words += f" Its final model, {run.final_model}, is an adapter in the format of peft."
    elif (run.final_model / "config.json").is_file():
        words += f" Its final model, {run.final_model}, is a Hugging Face directory already."
    return words


def _form(to: str | None, *, adapted: bool, run: RunDir) -> str:
    """The form to write: ``to`` if it fits the run, else the run's own."""
    if to is None:
        return ADAPTER if adapted else HF
    if adapted == (to == HF):
        have = (
            "trains an adapter beside frozen weights. Use --to adapter, or --to merged for a whole "
            "model"
            if adapted
            else "trains no adapter: its model is whole. Leave --to out"
        )
        raise ConfigError(f"--to {to}: {run.root} {have}.")
    return to


def _copy_description(source: Path, target: Path, *, dtype: str = "", without: str = "") -> None:
    """Config, generation config and tokenizer; the config names the dtype of the weights.

    ``without``: a file that is left out.
    """
    for path in sorted(entry for entry in source.rglob("*") if entry.is_file()):
        if path.relative_to(source).as_posix() == without:
            continue
        data = path.read_bytes()
        if dtype and path == source / "config.json":
            config = json.loads(data)
            if _set_dtype(config, dtype):
                data = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        place = target / path.relative_to(source)
        make_directories(DISK, place.parent)
        write_file(DISK, place, data)


def _trusts_remote_code(run: RunDir) -> bool:
    """``model.trust_remote_code`` of the run; False where its snapshot has none."""
    model = read_mapping(run.config).get("model")
    return isinstance(model, dict) and model.get("trust_remote_code") is True


def _set_dtype(config: Any, dtype: str) -> bool:
    """Name ``dtype`` wherever a config names one; whether that changed anything."""
    if not isinstance(config, dict):
        return False
    changed = False
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            changed |= value != dtype
            config[key] = dtype
        else:
            changed |= _set_dtype(value, dtype)
    return changed


def _refuse_existing(directory: Path) -> None:
    # Not Path.exists(), which raises for a name that is too long.
    if os.path.lexists(directory):
        raise ConfigError(f"{directory} exists already. Remove it, or set --out to another name.")


def _disk_error(error: OSError, directory: Path, num_bytes: int) -> LlmxError:
    if disk_is_full(error):
        free = shutil.disk_usage(nearest_directory(str(directory.parent))).free
        needs = f"the export needs {human.size(num_bytes)} in all, " if num_bytes else ""
        return DiskFullError(
            f"The disk of {directory} is full: {needs}{human.size(free)} are free now. Nothing was "
            "left there. Free some space, or set --out to another disk."
        )
    return ConfigError(
        f"{directory}: cannot be written ({error.strerror or error}). Nothing was left there. Set "
        "--out to a directory that can be created."
    )
