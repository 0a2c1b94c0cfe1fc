"""The model card of a directory that a run has written: ``README.md`` as the Hub reads it.

Made from the files of the run directory, so that the ranks (``model/``) and ``python -m llmx
export`` write the same. What would say where it was trained is left out: paths are their last part,
and hosts, launch, trackers and whatever looks like a secret are not named.

    python -m pytest tests/unit/test_model_card.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmx.redact import is_secret
from llmx.run.exported import ADAPTER_CONFIG
from llmx.run.metrics.declared import declared_of, measured, metric_of
from llmx.run.metrics.lines import Record, read_metrics, step_of
from llmx.run.provenance.differences import flattened
from llmx.run.rundir import RunDir, read_mapping, write_text
from llmx.text import plural

CARD = "README.md"
MARK = "<!-- Written by llmx. Without this line the card is yours, and is kept. -->"
SHOWN = (
    "task.kind", "task.epochs", "task.steps", "data.seq_len", "data.packing", "optim.kind",
    "optim.lr", "optim.schedule", "optim.warmup_steps", "optim.warmup_fraction",
    "optim.weight_decay", "optim.clip_norm", "seed", "zero.stage", "zero.offload_optimizer",
    "zero.offload_param", "adapter.kind", "adapter.rank", "adapter.alpha", "adapter.dropout",
    "adapter.targets", "adapter.lr",
)  # fmt: skip
"""Hyperparameters; the options of the task come with them."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PIPELINES = {
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": ("text-generation", "AutoModelForCausalLM"),
    "ForMaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "CAUSAL_LM": ("text-generation", "AutoModelForCausalLM"),
    "SEQ_CLS": ("text-classification", "AutoModelForSequenceClassification"),
}
"""The Hub's pipeline and the class that loads a model, by the ending of its class or by the kind of
an adapter."""
PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "datasets", "peft")


def write_card(run: RunDir, directory: Path, *, step: int | None = None, former: str = "") -> None:
    """Write ``README.md`` into ``directory``, unless there is one that is not llmx's.

    Args:
        step: of the checkpoint; None is the end of the run.
        former: a card of the user's that was there before (``user_card``), which is kept.
    """
    if not user_card(directory):
        write_text(directory / CARD, former or model_card(run, directory, step=step))


def user_card(directory: Path) -> str:
    """The card in ``directory``, where a person has written it; else empty."""
    try:
        text = (directory / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    return "" if MARK in text else text


def model_card(run: RunDir, directory: Path, *, step: int | None = None) -> str:
    """The card of the model in ``directory``, of which the run's files tell what is known."""
    from huggingface_hub import ModelCard

    config = flattened(read_mapping(run.config))
    records = [
        record
        for record in read_metrics(run.metrics)
        if step is None or "step" not in record or step_of(record) <= step
    ]
    last = max((step_of(record) for record in records if record.get("kind") == "train"), default=0)
    relation = "An adapter for" if _is_adapter(directory) else "A fine-tune of"
    names = [config.get(f"model.{key}") for key in ("path", "name", "kind")]
    if config.get("model.init") == "scratch":
        relation, names = "Trained from scratch with the architecture of", names[1:]
    base = public(next(filter(None, names), "a model"))
    where = f" The weights are those of step {step or last}." if step or last else ""
    tables = {
        "Training": ("what | value", [*_training(run, config, records)]),
        "Results": ("metric | last evaluation", [*_results(records)]),
        "Made with": ("what | value", [*_versions(run)]),
    }
    text = (
        f"---\n{_metadata(config, directory)}\n---\n{MARK}\n"
        f"# {public(config.get('name') or 'A model of llmx')}\n\n"
        f"{relation} `{base}` (task `{public(config.get('task.kind') or 'a task')}`).{where}\n\n"
        f"## How to load it\n\n{_loading(directory)}\n"
    )
    for title, (head, rows) in tables.items():
        lines = [f"| {name} | {value.replace('|', '/')} |\n" for name, value in rows]
        if lines:
            text += f"\n## {title}\n\n| {head} |\n|---|---|\n{''.join(lines)}"
    return str(ModelCard("".join(x for x in text.splitlines(True) if not is_secret("", x))))


def public(value: object) -> str:
    """A value as text; a path as its last part, an address not at all."""
    text = str(value)
    if "://" in text:
        return "(an address)"
    return text if _HUB_ID.fullmatch(text) else Path(text).name if "/" in text else text


def _metadata(config: Mapping[str, Any], directory: Path) -> str:
    """The metadata that the Hub reads, as YAML."""
    from huggingface_hub import ModelCardData

    path, inherited = config.get("model.path"), _base_metadata(config)
    library, pipeline, _ = _library(directory)
    is_hub = config.get("model.init") == "pretrained" and _HUB_ID.fullmatch(str(path))
    base = path if is_hub else inherited.get("base_model")
    data = ModelCardData(
        library_name=library,
        pipeline_tag=pipeline,
        base_model=base,
        base_model_relation=("adapter" if library == "peft" else "finetune") if base else None,
        license=config.get("model.license") or inherited.get("license"),
        language=inherited.get("language"),
        datasets=[path for path in _sources(config) if _HUB_ID.fullmatch(path)] or None,
        tags=["llmx", "deepspeed", public(config.get("task.kind") or "model"), library],
    )
    return str(data.to_yaml())


def _base_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Licence and languages of the base, where it is a directory here with a card."""
    from huggingface_hub import ModelCard

    path = str(config.get("model.path") or "")
    if not path.startswith("/") or config.get("model.init") != "pretrained":
        return {}
    try:
        values = ModelCard.load(Path(path) / CARD).data.to_dict()
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return {}
    names = ("license", "language", "base_model")
    return {name: values[name] for name in names if isinstance(values.get(name), str | list)}


def _loading(directory: Path) -> str:
    """Code that loads the model."""
    library, _, auto = _library(directory)
    if library == "gguf":
        return f"```bash\nllama-cli -m {min(directory.glob('*.gguf')).name}\n```"
    if library == "onnx":
        code = 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("model.onnx")'
    elif library == "sentence-transformers":
        code = (
            "from sentence_transformers import SentenceTransformer\n\n"
            'model = SentenceTransformer("PATH_OR_ID")'
        )
    else:
        code = (
            f"from {library} import {auto}\nfrom transformers import AutoTokenizer\n\n"
            f'model = {auto}.from_pretrained("PATH_OR_ID")\n'
            'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")'
        )
    chat = (directory / "chat_template.jinja").is_file()
    return f"```python\n{code}\n```" + ("\n\nThe tokenizer has a chat template." if chat else "")


def _training(
    run: RunDir, config: Mapping[str, Any], records: list[Record]
) -> Iterator[tuple[str, str]]:
    plan = read_mapping(run.plan)
    if sources := _sources(config):
        yield "data", ", ".join(f"`{public(path)}`" for path in sources)
    is_idle = config.get("adapter.kind") == "none"
    for key in (*SHOWN, *(key for key in config if key.startswith("task.options."))):
        value, is_of_idle = config.get(key), is_idle and key.startswith("adapter.")
        if (
            value not in (None, "", [], {}, "none")
            and not is_of_idle
            and not is_secret(key, str(value))
        ):
            yield key, f"`{public(value)}`"
    if samples := flattened(plan).get("batch.global_batch"):
        yield "samples a step", str(samples)
    if plan.get("precision"):
        yield "precision", str(plan["precision"])
    if devices := Counter(str(rank["device"]) for rank in plan.get("ranks") or []):
        listed = ", ".join(f"{count} x {device}" for device, count in sorted(devices.items()))
        yield "hardware", f"{listed} on {plural(len(plan.get('hosts') or []), 'host')}"
    if plan.get("num_parameters"):
        yield "parameters", f"{plan['num_parameters']:,}"
    last = next((line for line in reversed(records) if line.get("kind") == "train"), {})
    for key in ("step", "samples", "tokens", "target_tokens"):
        if isinstance(last.get(key), int | float):
            yield f"trained on, {key.replace('_', ' ')}", f"{last[key]:,.0f}"


def _results(records: list[Record]) -> Iterator[tuple[str, str]]:
    declared = declared_of(records)
    last = next((line for line in reversed(records) if line.get("kind") == "eval"), {})
    for name, value in {"loss": last.get("loss"), **measured(last, declared, shown=True)}.items():
        if isinstance(value, int | float):
            metric = metric_of(name, declared)
            yield metric.title, metric.shown(value)


def _versions(run: RunDir) -> Iterator[tuple[str, str]]:
    values = flattened(read_mapping(run.provenance))
    names = {"llmx": "llmx", "git.commit": "commit"}
    names |= {f"packages.{name}": name for name in PACKAGES}
    names["python.version"] = "Python"
    yield from ((title, str(values[key])) for key, title in names.items() if values.get(key))


def _sources(config: Mapping[str, Any]) -> list[str]:
    """Paths of the data; what comes from the Hub as its id."""
    sources = config.get("data.sources") or [{"path": config.get("data.path")}]
    return [str(s["path"]).removeprefix("hub:") for s in sources if s.get("path")]


def _library(directory: Path) -> tuple[str, str | None, str]:
    """The Hub's library and pipeline, and the class that loads the model."""
    config = read_mapping(directory / "config.json")
    adapter = read_mapping(directory / ADAPTER_CONFIG)
    name = str(adapter.get("task_type") or (config.get("architectures") or [""])[0])
    pipeline, auto = None, "AutoModel"
    # A network from scratch does not name its class; ``llmx.models.model`` takes it for a language
    # model.
    for ending, classes in _PIPELINES.items():
        if (name or ("CAUSAL_LM" if config else "")).endswith(ending):
            pipeline, auto = classes
            break
    if any(directory.glob("*.gguf")):
        return "gguf", "text-generation", auto
    if (directory / "model.onnx").is_file():
        return "onnx", pipeline, auto
    if (directory / "modules.json").is_file() and not _is_adapter(directory):
        return "sentence-transformers", "sentence-similarity", auto
    if _is_adapter(directory):
        return "peft", pipeline, auto.replace("Auto", "AutoPeft", 1)
    return "transformers", pipeline, auto


def _is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).is_file()
