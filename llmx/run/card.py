"""The model card of a directory that a run has written: ``README.md`` as the Hub reads it.

Made from the files of the run directory, so that the ranks (``model/``) and ``python -m llmx
export`` write the same. What would say where it was trained is left out: paths are their last part,
and hosts, launch, trackers and whatever looks like a secret are not named.

    python -m pytest tests/unit/test_model_card.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmx.redact import is_secret
from llmx.run.metrics.declared import declared_of, measured, metric_of
from llmx.run.metrics.lines import Record, read_metrics, step_of
from llmx.run.rundir import RunDir, load_yaml, read_mapping, write_text
from llmx.text import plural

CARD = "README.md"
MARK = "<!-- Written by llmx. Without this line the card is yours, and is kept. -->"
PRIVATE = ("hardware", "launch", "tracking", "run_dir", "checkpoint", "hydra", "name", "dry_run")
"""Groups and keys that say where and how it ran, not what was trained."""
SHOWN = (
    "task.kind", "task.epochs", "task.steps", "data.seq_len", "data.packing", "optim.kind",
    "optim.lr", "optim.schedule", "optim.warmup_steps", "optim.warmup_fraction",
    "optim.weight_decay", "optim.grad_clip", "seed", "zero.stage", "zero.offload_optimizer",
    "zero.offload_param", "adapter.kind", "adapter.rank", "adapter.alpha", "adapter.dropout",
    "adapter.targets", "adapter.lr",
)  # fmt: skip
"""Hyperparameters; the options of the task come with them."""
_PATH = re.compile(
    r"(?<![\w.-])(?:~[\w.-]*|\.{1,2})?/(?:[^\s,;'\"\[\]{}()|]*/)*([^\s,;'\"\[\]{}()|/]*)"
)
_ONE_PATH = re.compile(r"([\w.@+-]+=)?['\"]?[~/][^,\[\]{}]*/([^,/\[\]{}'\"]+)/?['\"]?")
"""A value that is one path, with spaces in it perhaps."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PIPELINES = {
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": ("text-generation", "AutoModelForCausalLM"),
    "ForMaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "CAUSAL_LM": ("text-generation", "AutoModelForCausalLM"),
    "SEQ_CLS": ("text-classification", "AutoModelForSequenceClassification"),
}
"""By the ending of a class, or by the kind of an adapter: the Hub's pipeline, what loads it."""


def write_card(run: RunDir, directory: Path, *, step: int | None = None, own: str = "") -> None:
    """Write ``README.md`` into ``directory``, unless there is one that is not llmx's.

    Args:
        step: of the checkpoint; None is the end of the run.
        own: a card of the user's that was there before (``user_card``), which is kept.
    """
    if not user_card(directory):
        write_text(directory / CARD, own or model_card(run, directory, step=step))


def user_card(directory: Path) -> str:
    """The card in ``directory``, where a person has written it; else empty."""
    try:
        text = (directory / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    return "" if MARK in text else text


def model_card(run: RunDir, directory: Path, *, step: int | None = None) -> str:
    """The card of the model in ``directory``, of which the run's files tell what is known."""
    config = _yaml(run.config)
    records = [
        record
        for record in read_metrics(run.metrics)
        if step is None or "step" not in record or step_of(record) <= step
    ]
    parts = [
        "---",
        yaml.safe_dump(_metadata(config, directory), sort_keys=False, allow_unicode=True).strip(),
        "---",
        MARK,
        f"# {public(str(config.get('name') or 'A model of llmx'))}",
        _introduction(config, directory, records, step),
        *_section("How to load it", _loading(directory)),
        *_section("Data", _data(run, config)),
        *_section("Training", _table(_training(run, config, records))),
        *_section("Results", _results(records)),
        *_section("Made with", _versions(run)),
    ]
    lines = "\n".join(parts).split("\n")
    return "\n".join(line for line in lines if not is_secret("", line)) + "\n"


def public(text: str) -> str:
    """``text`` with every path as its last part."""
    if _HUB_ID.fullmatch(text):
        return text
    if "://" in text:
        return "(an address)"
    if whole := _ONE_PATH.fullmatch(text):
        return (whole[1] or "") + whole[2]
    return _PATH.sub(lambda match: match[1], text)


def _metadata(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """What the Hub reads."""
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
    found = {
        "library_name": library,
        "pipeline_tag": "sentence-similarity" if sentences else pipeline,
        "base_model": base,
        "base_model_relation": ("adapter" if adapter else "finetune") if base else None,
        "license": model.get("license") or inherited.get("license"),
        "language": inherited.get("language"),
        "datasets": [path for path in _sources(config) if _HUB_ID.fullmatch(path)],
        "tags": ["llmx", "deepspeed", public(str(_of(config, "task").get("kind") or "")), library],
    }
    return {key: value for key, value in found.items() if value}


def _base_metadata(model: Mapping[str, Any]) -> dict[str, Any]:
    """Licence and languages of the base, where it is a directory here with a card."""
    path = str(model.get("path") or "")
    if not path.startswith("/") or model.get("init") != "pretrained":
        return {}
    try:
        text = (Path(path) / CARD).read_text(encoding="utf-8")
        values = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return {}
    values = values if isinstance(values, dict) else {}
    found = {key: values.get(key) for key in ("license", "language", "base_model")}
    return {key: value for key, value in found.items() if isinstance(value, str | list)}


def _introduction(
    config: Mapping[str, Any], directory: Path, records: list[Record], step: int | None
) -> str:
    model, task = _of(config, "model"), public(str(_of(config, "task").get("kind") or "a task"))
    base = public(str(model.get("path") or model.get("name") or model.get("kind") or "a model"))
    what = "An adapter for" if _is_adapter(directory) else "A fine-tune of"
    if model.get("init") == "scratch":
        what = "Trained from scratch with the architecture of"
        base = public(str(model.get("name") or model.get("kind") or base))
    last = max((step_of(record) for record in records if record.get("kind") == "train"), default=0)
    where = f" The weights are those of step {step or last}." if step or last else ""
    return f"\n{what} `{base}` (task `{task}`).{where}"


def _loading(directory: Path) -> str:
    _, auto = _pipeline(directory)
    if found := sorted(directory.glob("*.gguf")):
        return f"```bash\nllama-cli -m {found[0].name}\n```"
    if (directory / "model.onnx").is_file():
        code = (
            "import onnxruntime\n\n"
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            "outputs = session.run(None, inputs)  # input_ids, attention_mask: int64 arrays"
        )
    elif (directory / "modules.json").is_file():
        code = (
            "from sentence_transformers import SentenceTransformer\n\n"
            'model = SentenceTransformer("PATH_OR_ID")'
        )
    elif _is_adapter(directory):
        code = (
            f"from peft import {auto.replace('Auto', 'AutoPeft', 1)}\n"
            "from transformers import AutoTokenizer\n\n"
            f'model = {auto.replace("Auto", "AutoPeft", 1)}.from_pretrained("PATH_OR_ID")\n'
            'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")'
        )
    else:
        code = (
            f"from transformers import {auto}, AutoTokenizer\n\n"
            f'model = {auto}.from_pretrained("PATH_OR_ID")\n'
            'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")'
        )
    chat = (directory / "chat_template.jinja").is_file()
    return f"```python\n{code}\n```" + ("\n\nThe tokenizer has a chat template." if chat else "")


def _data(run: RunDir, config: Mapping[str, Any]) -> str:
    """Sources, what became of their rows, and the fingerprints that a reproduction compares."""
    rows = [("sources", ", ".join(f"`{public(path)}`" for path in _sources(config)))]
    for split, values in read_mapping(run.data).items():
        named = values if isinstance(values, list) else []
        rows += [
            (f"{split}: {each[0]}", public(str(each[1])))
            for each in named
            if isinstance(each, list) and len(each) == 2 and each[0] != "sources"
        ]
    rows += [
        (f"hash: {name}", f"`{value}`") for name, value in read_mapping(run.inputs).items() if value
    ]
    return _table(rows)


def _training(
    run: RunDir, config: Mapping[str, Any], records: list[Record]
) -> Iterator[tuple[str, str]]:
    plan = read_mapping(run.plan)
    batch, ranks = _of(plan, "batch"), plan.get("ranks") or []
    options = _of(_of(config, "task"), "options")
    for key in [*SHOWN, *(f"task.options.{name}" for name in options)]:
        group, _, name = key.rpartition(".")
        values = options if group == "task.options" else _of(config, group) if group else config
        value, idle = values.get(name), group == "adapter" and values.get("kind") == "none"
        if value not in (None, "", [], {}, "none") and not idle and not is_secret(key, str(value)):
            yield key, f"`{public(str(value))}`"
    if batch.get("global_batch"):
        yield "samples a step", str(batch["global_batch"])
        yield "micro batch of each rank", ", ".join(map(str, sorted(set(batch["micro_batches"]))))
        yield "accumulation", str(batch.get("accumulation"))
    if plan.get("precision"):
        yield "precision", str(plan["precision"])
    devices = Counter(str(rank.get("device")) for rank in ranks if isinstance(rank, Mapping))
    if devices:
        listed = ", ".join(f"{count} x {device}" for device, count in sorted(devices.items()))
        yield "hardware", f"{listed} on {plural(len(plan.get('hosts') or []), 'host')}"
    if plan.get("num_parameters"):
        yield "parameters", f"{plan['num_parameters']:,}"
    last = next((each for each in reversed(records) if each.get("kind") == "train"), {})
    for key in ("step", "samples", "tokens", "target_tokens"):
        if isinstance(last.get(key), int | float):
            yield f"trained on, {key.replace('_', ' ')}", f"{last[key]:,.0f}"
    typed = [public(word) for word in _overrides(run)]
    yield "command", "`" + " ".join(["python -m llmx", *typed]).replace("`", "'") + "`"


def _results(records: list[Record]) -> str:
    """The last evaluation, and the best value of each metric with its step."""
    declared = declared_of(records)
    evaluations = [record for record in records if record.get("kind") == "eval"]
    found: dict[str, list[tuple[float, int]]] = {}
    for record in evaluations:
        values = {"loss": record.get("loss"), **measured(record, declared)}
        for name, value in values.items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append((float(value), step_of(record)))
    if not found:
        return ""
    lines = ["| metric | last | best | at step |", "|---|---|---|---|"]
    for name, points in found.items():
        better = False if name == "loss" else metric_of(name, declared).higher_is_better
        show = metric_of(name, declared).shown
        best, step = "", ""
        if better is not None:
            value, at = (max if better else min)(points, key=lambda each: each[0])
            best, step = show(value), str(at)
        title = metric_of(name, declared).title
        lines.append(f"| {title} | {show(points[-1][0])} | {best} | {step} |")
    return "\n".join(lines)


def _versions(run: RunDir) -> str:
    provenance = read_mapping(run.provenance)
    packages = _of(provenance, "packages")
    names = ("torch", "deepspeed", "transformers", "tokenizers", "datasets", "peft")
    rows = [("llmx", provenance.get("llmx")), ("commit", _of(provenance, "git").get("commit"))]
    rows += [(name, packages.get(name)) for name in names]
    rows.append(("Python", _of(provenance, "python").get("version")))
    return _table((name, str(value)) for name, value in rows if value)


def _sources(config: Mapping[str, Any]) -> list[str]:
    """Paths of the data; what comes from the Hub as its id."""
    data = _of(config, "data")
    listed = [each.get("path") for each in data.get("sources") or [] if isinstance(each, Mapping)]
    paths = [str(path) for path in listed or [data.get("path")] if path]
    return [path.removeprefix("hub:") for path in paths]


def _overrides(run: RunDir) -> list[str]:
    """What was typed, without what is private."""
    try:
        words = load_yaml(run.overrides)
    except (OSError, ValueError, yaml.YAMLError):
        return []
    found = []
    for word in words if isinstance(words, list) else []:
        key, _, value = str(word).lstrip("+~").partition("=")
        if key.split(".")[0].split("@")[0] not in PRIVATE and not is_secret(key, str(value)):
            found.append(str(word))
    return found


def _pipeline(directory: Path) -> tuple[str | None, str]:
    """The Hub's pipeline, and the class that loads the model."""
    config, adapter = _json(directory / "config.json"), _json(directory / "adapter_config.json")
    listed = config.get("architectures")
    named = str(listed[0]) if isinstance(listed, list) and listed else ""
    named = str(adapter.get("task_type") or named)
    for ending, found in _PIPELINES.items():
        if named.endswith(ending):
            return found
    # A network from scratch does not name its class; ``llmx.models.model`` takes it for a language
    # model.
    return _PIPELINES["CAUSAL_LM"] if config and not named else (None, "AutoModel")


def _is_adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").is_file()


def _section(title: str, text: str) -> list[str]:
    return [f"\n## {title}\n", text] if text else []


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    return "\n".join(["| what | value |", "|---|---|", *lines]) if lines else ""


def _of(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        values = load_yaml(path)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
