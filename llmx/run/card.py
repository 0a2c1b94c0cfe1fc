"""The model card of a directory that a run has written: ``README.md`` as the Hub reads it.

Made from the files of the run directory, so that the ranks (``model/``) and ``python -m llmx
export`` write the same. What would say where it was trained is left out: paths are their last part,
and hosts, launch, trackers and whatever looks like a secret are not named.

    python -m pytest tests/unit/test_model_card.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmx.redact import is_secret
from llmx.run.exported import ADAPTER_CONFIG
from llmx.run.metrics.declared import declared_of, measured, metric_of
from llmx.run.metrics.lines import Record, read_metrics, step_of
from llmx.run.rundir import RunDir, read_mapping, write_text
from llmx.text import plural

CARD = "README.md"
MARK = "<!-- Written by llmx. Without this line the card is yours, and is kept. -->"
SHOWN = (
    "task.kind", "task.epochs", "task.steps", "data.seq_len", "data.packing", "optim.kind",
    "optim.lr", "optim.schedule", "optim.warmup_steps", "optim.warmup_fraction",
    "optim.weight_decay", "optim.grad_clip", "seed", "zero.stage", "zero.offload_optimizer",
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

    config = read_mapping(run.config)
    records = [
        record
        for record in read_metrics(run.metrics)
        if step is None or "step" not in record or step_of(record) <= step
    ]
    last = max((step_of(record) for record in records if record.get("kind") == "train"), default=0)
    model, task = _of(config, "model"), public(_of(config, "task").get("kind") or "a task")
    relation = "An adapter for" if _is_adapter(directory) else "A fine-tune of"
    names = [model.get("path"), model.get("name"), model.get("kind"), "a model"]
    if model.get("init") == "scratch":
        relation, names = "Trained from scratch with the architecture of", names[1:]
    base = public(next(name for name in names if name))
    where = f" The weights are those of step {step or last}." if step or last else ""
    parts = [
        f"---\n{_metadata(config, directory)}\n---\n{MARK}",
        f"# {public(config.get('name') or 'A model of llmx')}",
        f"\n{relation} `{base}` (task `{task}`).{where}",
        f"\n## How to load it\n\n{_loading(directory)}",
    ]
    tables = {
        "Training": _table("what | value", _training(run, config, records)),
        "Results": _table("metric | last evaluation", _results(records)),
        "Made with": _table("what | value", _versions(run)),
    }
    parts += [f"\n## {title}\n\n{table}" for title, table in tables.items() if table]
    lines = "\n".join(parts).split("\n")
    text = "\n".join(line for line in lines if not is_secret("", line)) + "\n"
    return str(ModelCard(text))


def public(value: object) -> str:
    """A value as text; a path as its last part, an address not at all."""
    text = str(value)
    if "://" in text:
        return "(an address)"
    return text if _HUB_ID.fullmatch(text) else Path(text).name if "/" in text else text


def _metadata(config: Mapping[str, Any], directory: Path) -> str:
    """The metadata that the Hub reads, as YAML."""
    from huggingface_hub import ModelCardData

    model = _of(config, "model")
    inherited = _base_metadata(model)
    pipeline, _ = _pipeline(directory)
    adapter, sentences = _is_adapter(directory), (directory / "modules.json").is_file()
    base = model.get("path") if model.get("init") == "pretrained" else None
    base = base if base and _HUB_ID.fullmatch(str(base)) else inherited.get("base_model")
    library = "peft" if adapter else "sentence-transformers" if sentences else "transformers"
    if list(directory.glob("*.gguf")):
        library, pipeline = "gguf", "text-generation"
    elif (directory / "model.onnx").is_file():
        library = "onnx"
    data = ModelCardData(
        library_name=library,
        pipeline_tag="sentence-similarity" if sentences else pipeline,
        base_model=base,
        base_model_relation=("adapter" if adapter else "finetune") if base else None,
        license=model.get("license") or inherited.get("license"),
        language=inherited.get("language"),
        datasets=[path for path in _sources(config) if _HUB_ID.fullmatch(path)] or None,
        tags=["llmx", "deepspeed", public(_of(config, "task").get("kind") or "model"), library],
    )
    return str(data.to_yaml())


def _base_metadata(model: Mapping[str, Any]) -> dict[str, Any]:
    """Licence and languages of the base, where it is a directory here with a card."""
    from huggingface_hub import ModelCard

    path = str(model.get("path") or "")
    if not path.startswith("/") or model.get("init") != "pretrained":
        return {}
    try:
        values = ModelCard.load(Path(path) / CARD).data.to_dict()
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return {}
    names = ("license", "language", "base_model")
    return {name: values[name] for name in names if isinstance(values.get(name), str | list)}


def _loading(directory: Path) -> str:
    """Code that loads the model."""
    _, auto = _pipeline(directory)
    if files := sorted(directory.glob("*.gguf")):
        return f"```bash\nllama-cli -m {files[0].name}\n```"
    package = "transformers"
    if (directory / "model.onnx").is_file():
        code = 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("model.onnx")'
    elif (directory / "modules.json").is_file():
        code = (
            "from sentence_transformers import SentenceTransformer\n\n"
            'model = SentenceTransformer("PATH_OR_ID")'
        )
    else:
        if _is_adapter(directory):
            package, auto = "peft", auto.replace("Auto", "AutoPeft", 1)
        code = (
            f"from {package} import {auto}\nfrom transformers import AutoTokenizer\n\n"
            f'model = {auto}.from_pretrained("PATH_OR_ID")\n'
            'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")'
        )
    chat = (directory / "chat_template.jinja").is_file()
    return f"```python\n{code}\n```" + ("\n\nThe tokenizer has a chat template." if chat else "")


def _training(
    run: RunDir, config: Mapping[str, Any], records: list[Record]
) -> Iterator[tuple[str, str]]:
    plan = read_mapping(run.plan)
    batch, ranks = _of(plan, "batch"), plan.get("ranks") or []
    options = _of(_of(config, "task"), "options")
    if sources := _sources(config):
        yield "data", ", ".join(f"`{public(path)}`" for path in sources)
    for key in [*SHOWN, *(f"task.options.{name}" for name in options)]:
        group, _, name = key.rpartition(".")
        values = options if group == "task.options" else _of(config, group) if group else config
        value, idle = values.get(name), group == "adapter" and values.get("kind") == "none"
        if value not in (None, "", [], {}, "none") and not idle and not is_secret(key, str(value)):
            yield key, f"`{public(value)}`"
    if batch.get("global_batch"):
        yield "samples a step", str(batch["global_batch"])
    if plan.get("precision"):
        yield "precision", str(plan["precision"])
    devices = Counter(str(rank.get("device")) for rank in ranks if isinstance(rank, Mapping))
    if devices:
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
    provenance = read_mapping(run.provenance)
    packages = _of(provenance, "packages")
    names = ("torch", "deepspeed", "transformers", "tokenizers", "datasets", "peft")
    versions = {
        "llmx": provenance.get("llmx"),
        "commit": _of(provenance, "git").get("commit"),
        **{name: packages.get(name) for name in names},
        "Python": _of(provenance, "python").get("version"),
    }
    yield from ((name, str(version)) for name, version in versions.items() if version)


def _sources(config: Mapping[str, Any]) -> list[str]:
    """Paths of the data; what comes from the Hub as its id."""
    data = _of(config, "data")
    sources = [source for source in data.get("sources") or [] if isinstance(source, Mapping)]
    paths = [str(source["path"]) for source in sources or [data] if source.get("path")]
    return [path.removeprefix("hub:") for path in paths]


def _pipeline(directory: Path) -> tuple[str | None, str]:
    """The Hub's pipeline, and the class that loads the model."""
    config = read_mapping(directory / "config.json")
    adapter = read_mapping(directory / ADAPTER_CONFIG)
    name = str(adapter.get("task_type") or (config.get("architectures") or [""])[0])
    for ending, pipeline in _PIPELINES.items():
        if name.endswith(ending):
            return pipeline
    # A network from scratch does not name its class; ``llmx.models.model`` takes it for a language
    # model.
    return _PIPELINES["CAUSAL_LM"] if config and not name else (None, "AutoModel")


def _is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).is_file()


def _table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    return "\n".join([f"| {head} |", "|---|---|", *lines]) if lines else ""


def _of(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = values.get(key)
    return part if isinstance(part, Mapping) else {}
