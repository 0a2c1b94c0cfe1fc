"""Resolves ``RUN|MODEL`` of the commands that use a trained model, and loads the model.

    target = find_target(Path("outputs/mine"), command="chat")
    model, tokenizer = load_network(target), load_tokenizer(target)

A run directory stands for its ``model/``; a directory of a model, or of an adapter of ``peft``, for
itself. Torch is imported only to load. Used by ``generate``, ``chat``, ``eval`` and ``serve``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.checkpoint.model_files import check_model_files
from llmx.config import Experiment, ModelConfig
from llmx.config.hardware_rules import native_precisions
from llmx.errors import ConfigError, did_you_mean
from llmx.models.adapter_names import CONFIG_FILE, WEIGHTS_FILE, holds_adapter
from llmx.models.spec import CAUSAL_LM
from llmx.run import snapshot, trust
from llmx.run.exported import generates_no_text
from llmx.run.rundir import RunDir, no_run, read_mapping, runs_inside
from llmx.text import printable

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of safetensors, and those of torch."""


@dataclass(frozen=True)
class Target:
    """A trained model."""

    directory: Path
    """Directory of the model, or of the adapter."""
    run: RunDir | None
    """The run that trained it, where a run directory was named."""
    exp: Experiment | None
    """Experiment of that run, as it was trained."""
    base: ModelConfig | None
    """What ``directory`` is an adapter of; None of a whole model."""

    @property
    def name(self) -> str:
        """A short name: that of the run's directory, or of the model's."""
        return Path(os.path.abspath(self.run.root if self.run else self.directory)).name

    @property
    def trusts_remote_code(self) -> bool:
        """``model.trust_remote_code`` of the run."""
        return self.exp is not None and self.exp.model.trust_remote_code


def find_target(
    place: Path,
    *,
    command: str,
    model: Path | None = None,
    trusted: bool = False,
    runs: Sequence[str] = (trust.MODEL,),
    generates: bool = True,
) -> Target:
    """Resolve ``RUN|MODEL`` to a directory with a model.

    Args:
        place: as it was typed.
        command: for messages.
        model: ``--model``, another model of the run.
        trusted: ``--trust``, code that the run directory names may run.
        runs: the kinds of code that the command runs.
        generates: whether the model must write text.

    Raises:
        ConfigError: it is none, the run has no model yet, a file of the model is damaged, or it
            writes no text and must.
    """
    typed, root = str(place), place.expanduser()
    if "=" in typed and not root.exists():
        raise ConfigError(
            f"{printable(typed)}: the first word is a run directory or a model: "
            f"python -m llmx {command} RUN."
        )
    if (root / "state.json").is_file() and re.fullmatch(r"step-\d+", root.name):
        raise ConfigError(_checkpoint(root, command))
    if (root / "config.yaml").is_file():
        run = RunDir(root)
        exp = snapshot.load(run)
        trust.check_trusted(run, trust.code_of(exp), *runs, trusted=trusted, say="--trust")
        directory = (model or run.final_model).expanduser()
        if not _holds_model(directory):
            raise ConfigError(
                _no_model(run, directory, command=command, exported=model is not None)
            )
        return _checked(Target(directory, run, exp, _base(directory, exp)), generates=generates)
    if _holds_model(root):
        if model:
            raise ConfigError(f"--model is another model of a run; {root} is a model itself.")
        return _checked(Target(root, None, None, _base(root, None)), generates=generates)
    if not root.is_dir():
        hub = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", typed):
            hub = f" A model of the Hub is downloaded first: hf download {typed} --local-dir DIR."
        raise ConfigError(no_run(root) + hub)
    raise ConfigError(
        f"{printable(str(root))}: is neither a run directory (no config.yaml) nor a model (no "
        f"config.json).{runs_inside(root)}"
    )


def _checked(target: Target, *, generates: bool) -> Target:
    """ConfigError where a file of the model, or of the base of an adapter, is damaged."""
    check_model_files(target.directory)
    if target.base is not None:
        check_model_files(Path(target.base.path or "").expanduser())
    if generates:
        check_generates(target)
    return target


def _holds_model(directory: Path) -> bool:
    return (directory / "config.json").is_file() or holds_adapter(directory)


def _base(directory: Path, exp: Experiment | None) -> ModelConfig | None:
    """The model under an adapter: that of its run, else what the adapter names."""
    if not holds_adapter(directory):
        return None
    base = exp.model if exp is not None else _named_base(directory)
    path = Path(base.path or "").expanduser()
    if path.is_absolute() and not path.is_dir():
        raise ConfigError(_no_base(directory, base, "no such directory"))
    return base


def _named_base(directory: Path) -> ModelConfig:
    values = read_mapping(directory / CONFIG_FILE)
    path = values.get("base_model_name_or_path")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"{directory / CONFIG_FILE} does not name the model that it is an adapter of. Set "
            "base_model_name_or_path in it."
        )
    revision = values.get("revision")
    return ModelConfig(path=path, revision=revision if isinstance(revision, str) else None)


def _no_base(directory: Path, base: ModelConfig, why: str) -> str:
    return (
        f"{directory} is an adapter of {base.path}, which cannot be loaded here ({why}). Copy "
        "that model to this path; or copy the adapter elsewhere, set base_model_name_or_path in "
        f"its {CONFIG_FILE} and give that directory; or write a whole model where the run trained: "
        "python -m llmx export RUN --to merged."
    )


def _checkpoint(root: Path, command: str) -> str:
    run = shlex.quote(os.path.relpath(Path(os.path.abspath(root)).parent.parent))
    step = int(root.name.removeprefix("step-"))
    return (
        f"{root} is a checkpoint, to resume from. Write it as a model with `python -m llmx export "
        f"{run} --step {step}`, then: python -m llmx {command} {run} --model DIR, with the "
        "directory that it wrote."
    )


def _no_model(run: RunDir, directory: Path, *, command: str, exported: bool) -> str:
    here = shlex.quote(str(run.root))
    if exported:
        hint = did_you_mean(
            directory.name, [path.name for path in (run.root / "export").glob("step-*")]
        )
        return (
            f"--model {directory}: there is no config.json in it.{hint} Give the directory that "
            f"`python -m llmx export {here}` wrote."
        )
    if not any(run.checkpoints.glob("step-*")):
        return (
            f"{run.root} has no model/ yet, and no checkpoint: the model is written when a run "
            f"ends well. `python -m llmx status {here}` says what it is doing."
        )
    return (
        f"{run.root} has no model/: the final model is written when a run ends well, unless "
        f"task.save_model=false. To try a checkpoint: `python -m llmx export {here}`, then "
        f"{command} with --model and the directory that it wrote."
    )


def check_generates(target: Target) -> None:
    """ConfigError for a model that writes no text: a classifier, say. Transformers would give it a
    new output head, and random completions."""
    directory = target.directory
    name = generates_no_text(directory)
    if name and target.base is not None:
        raise ConfigError(
            f"{directory} is an adapter for {name}, which generates no text. Load it with peft."
        )
    if name:
        raise ConfigError(
            f"{directory} is a {name}, which generates no text. Load it with transformers, "
            f"e.g. `{name}.from_pretrained({str(directory)!r})`."
        )


def dtype_of(directory: Path) -> str | None:
    """The name of the dtype that the weights of a model or an adapter have in its files; None where
    they have none, or several."""
    files = sorted(directory.glob("*.safetensors"))
    if (directory / WEIGHTS_FILE).is_file():
        files = [directory / WEIGHTS_FILE]
    for path in files:
        try:
            with path.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            dtypes = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if len(dtypes & DTYPES.keys()) == 1:
            return DTYPES[(dtypes & DTYPES.keys()).pop()]
    return None


def load_tokenizer(target: Target) -> Any:
    """The tokenizer beside the model; of an adapter without one, that of its base."""
    from transformers import AutoTokenizer

    source, revision = str(target.directory), None
    if target.base is not None and not any(target.directory.glob("tokenizer*")):
        source, revision = str(Path(target.base.path or "").expanduser()), target.base.revision
    try:
        return AutoTokenizer.from_pretrained(
            source, revision=revision or "main", trust_remote_code=target.trusts_remote_code
        )
    except Exception as error:  # of a damaged file, libraries raise anything
        raise ConfigError(
            f"{source} has no tokenizer that can be loaded ({_first_line(error)}). A model and its "
            "tokenizer must be in one directory: copy tokenizer.json and tokenizer_config.json "
            "there."
        ) from error


def load_network(target: Target, *, head: str = CAUSAL_LM) -> Any:
    """The network, in the dtype of its files, on the GPU where there is one (``on_device``).

    Raises:
        ConfigError: it writes no text and was to, its base is not here, it is too large for the
            GPU.
    """
    if head == CAUSAL_LM:
        check_generates(target)
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    from llmx.models.adapter import load_adapted
    from llmx.models.model import auto_class

    logging.disable_progress_bar()  # its bar would stand between the completions
    try:
        if target.base is None:
            options = {"trust_remote_code": target.trusts_remote_code}
            config = AutoConfig.from_pretrained(target.directory, **options)
            network: torch.nn.Module = auto_class(head, config).from_pretrained(
                target.directory, dtype="auto", **options
            )
        else:
            network = load_adapted(target.directory, target.base)
    except Exception as error:  # of a damaged file, libraries raise anything
        if isinstance(error, ConfigError):
            raise
        reason = _first_line(error)
        if target.base is not None:
            problem = _no_base(target.directory, target.base, reason)
        else:
            problem = f"{target.directory} cannot be loaded: {reason}."
        raise ConfigError(problem) from error
    try:
        return on_device(network)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{target.directory} does not fit into the memory of this GPU. Set "
            "CUDA_VISIBLE_DEVICES= (empty) to use the CPU, or serve it on several GPUs: "
            "python -m llmx serve."
        ) from error


def on_device(network: Any) -> Any:
    """A network for evaluation, moved to the GPU where there is one. Its weights in bf16 become
    fp16 on a GPU that only emulates bf16 (before Ampere), as such a GPU trains."""
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if "bf16" not in native_precisions(major + minor / 10):
            for tensor in (*network.parameters(), *network.buffers()):
                if tensor.dtype == torch.bfloat16:
                    tensor.data = tensor.data.half()
        network = network.to("cuda")
    return network.eval()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")[:300]
