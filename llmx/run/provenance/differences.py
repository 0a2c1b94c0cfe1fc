"""What differs between two provenances, classified by what it does to the numbers. Pure.

``python -m llmx reproduce RUN`` and ``resume RUN`` show it before the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

BREAKS, MAY, HARMLESS = "breaks", "may change", "harmless"
MEANING = {
    BREAKS: "breaks bitwise equality",
    MAY: "may change numbers",
    HARMLESS: "harmless",
}
SEVERITIES = tuple(MEANING)

NUMERIC_PACKAGES = (
    "torch", "deepspeed", "transformers", "datasets", "tokenizers", "tiktoken", "sentencepiece",
    "accelerate", "safetensors", "peft", "bitsandbytes", "numpy",
)  # fmt: skip
"""Packages that compute; others (hydra-core, omegaconf, wandb) do not."""

NUMERIC_CODE = (
    "llmx/train/", "llmx/tasks/", "llmx/models/", "llmx/data/", "llmx/plan/",
    "llmx/config/", "llmx/checkpoint/", "llmx/rollout/", "llmx/worker.py",
    "llmx/compose/complete.py",
)  # fmt: skip
"""The part of llmx that decides numbers; the rest launches, watches and reports."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was."""

    severity: str
    what: str
    then: str
    now: str
    advice: str = ""
    """What to do to have it as it was; empty where nothing can or need be done."""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Everything that differs, the gravest first. What was not recorded is not compared."""
    rows = [
        *_content(then, now),
        *_machine(then, now),
        *_packages(then, now),
        *_code(then, now),
        *_environment(then, now),
    ]
    return sorted(rows, key=lambda difference: SEVERITIES.index(difference.severity))


def not_recorded(then: Mapping[str, Any]) -> list[str]:
    """Name the parts that are missing in a record and cannot be compared."""
    if not then:
        return ["code, packages, devices and inputs (there is no provenance.json)"]
    names = {
        "code": "the code by file",
        "fingerprints": "the content of data, tokenizer and model",
        "cpu": "the CPU",
        "environment": "the variables of the ranks",
        "config": "whether config.yaml was edited since",
    }
    missing = [name for key, name in names.items() if not then.get(key)]
    prints = then.get("fingerprints") or {}
    if prints and prints.get("data") is None:
        missing.append("the content of the data (it was not on the starting machine)")
    return missing


def _content(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    old, new = then.get("fingerprints") or {}, now.get("fingerprints") or {}
    parts = [
        (name, old.get(key), new.get(key), f"its new place: {word}=PATH")
        for key, name, word in (
            ("data", "data", "data.path"),
            ("eval_data", "evaluation data", "data.eval_path"),
            ("tokenizer", "tokenizer", "model.tokenizer"),
            ("model", "model", "model.path"),
        )
    ]
    networks_then, networks_now = old.get("frozen") or {}, new.get("frozen") or {}
    parts += [
        (f"model {name!r} of the task", before, networks_now.get(name), f"restore {before['path']}")
        for name, before in networks_then.items()
    ]
    for name, before, after, advice in parts:
        if before is None:
            continue
        # Evaluation only measures; all else is trained on.
        severity = MAY if name == "evaluation data" else BREAKS
        if after is None:
            if name == "data" and ", " in before["path"]:
                advice = advice.replace("data.path", "data.sources.N.path")
            yield Difference(severity, name, _print(before), "not on this machine", advice)
        elif before["digest"] != after["digest"]:
            yield Difference(
                severity, name, _print(before), _print(after), f"restore {before['path']}"
            )


def _print(fingerprint: Mapping[str, Any]) -> str:
    size = f", {fingerprint['bytes']:,} bytes" if fingerprint.get("bytes") else ""
    return f"{str(fingerprint['digest'])[:12]}{size}"


def _machine(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    if "gpus" in then and then["gpus"] != now.get("gpus"):
        yield Difference(
            BREAKS, "GPUs", _names(then["gpus"]), _names(now.get("gpus") or []),
            "run on the same type of device",
        )  # fmt: skip
    on_cpu = "gpus" in then and not then["gpus"] and not now.get("gpus")
    if then.get("cpu") and then["cpu"] != now.get("cpu"):
        severity = BREAKS if on_cpu else HARMLESS
        advice = "run on the same type of CPU" if on_cpu else ""
        yield Difference(severity, "CPU", str(then["cpu"]), str(now.get("cpu")), advice)
    for key, name, severity in (
        ("nvidia_driver", "NVIDIA driver", MAY),
        ("cuda", "CUDA of torch", BREAKS),
    ):
        if then.get(key) and now.get(key) != then[key]:
            yield Difference(severity, name, str(then[key]), str(now.get(key) or "none"))
    if then.get("nccl") and then["nccl"] != now.get("nccl"):
        yield Difference(
            MAY, "NCCL", _pins(then["nccl"]), _pins(now.get("nccl") or {}) or "none",
            f"pip install {_pins(then['nccl'])}",
        )  # fmt: skip
    old, new = ((record.get("python") or {}).get("version") for record in (then, now))
    if old and new and old != new:
        minor = old.split(".")[:2] != new.split(".")[:2]
        yield Difference(MAY if minor else HARMLESS, "Python", old, new)


def _names(gpus: list[str]) -> str:
    counts = {name: gpus.count(name) for name in gpus}
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def _pins(versions: Mapping[str, str]) -> str:
    return " ".join(f"{name}=={version}" for name, version in sorted(versions.items()))


def _packages(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    old, new = then.get("packages") or {}, now.get("packages") or {}
    for name, version in old.items():
        if version != new.get(name):
            severity = MAY if name in NUMERIC_PACKAGES else HARMLESS
            severity = BREAKS if name == "torch" else severity
            advice = f"pip install {name}=={version}" if version else f"pip uninstall {name}"
            yield Difference(
                severity, name, version or "not installed", new.get(name) or "not installed",
                "" if severity == HARMLESS else advice,
            )  # fmt: skip


def _code(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    if "task_code" in then:
        yield from _task_code(then["task_code"] or {}, now.get("task_code") or {})
    before, after = then.get("git") or {}, now.get("git") or {}
    advice = f"git checkout {before['commit'][:10]}" if before.get("commit") else ""
    old, new = then.get("code"), now.get("code")
    if old and new:
        changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        numeric = [name for name in changed if name.startswith(NUMERIC_CODE)]
        other = [name for name in changed if name not in numeric]
        state = (_commit(then), _commit(now))
        if numeric:
            yield Difference(
                MAY, f"code that trains: {_listed(numeric)}", *state, advice or "install it"
            )
        if other:
            yield Difference(HARMLESS, f"code around it: {_listed(other)}", *state)
        if not changed and before.get("commit") != after.get("commit"):
            yield Difference(HARMLESS, "commit (the code is the same)", *state)
        return
    if before.get("commit") != after.get("commit") or before.get("diff") != after.get("diff"):
        yield Difference(MAY, "code", _commit(then), _commit(now), advice)


def _task_code(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Difference]:
    """The package of a task of the user's own: which of its files are not as they were."""
    changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if not changed:
        return
    first = changed[0]
    yield Difference(
        MAY, f"code of the task: {_listed(changed)}", _hash(then.get(first)), _hash(now.get(first)),
        "restore its files",
    )  # fmt: skip


def _hash(digest: str | None) -> str:
    return "not there" if digest is None else digest[:12]


def _commit(record: Mapping[str, Any]) -> str:
    state = record.get("git")
    if not state:
        return f"llmx {record.get('llmx', '?')}"
    package = any(text is not None for text in (state.get("untracked") or {}).values())
    changed = state.get("diff") or package
    return str(state["commit"])[:10] + (" with changes" if changed else "")


def _listed(names: list[str]) -> str:
    """``train/loop.py``, or ``54 files, e.g. train/loop.py``."""
    short = [name.removeprefix("llmx/") for name in names]
    return ", ".join(short) if len(short) <= 2 else f"{len(short)} files, e.g. {short[0]}"


def _environment(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    old, new = then.get("environment"), now.get("environment") or {}
    if old is None:
        return
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            quiet = name.endswith(("_DEBUG", "_DEBUG_SUBSYS", "_TIMEOUT", "_IFNAME", "_LEVEL"))
            advice = f"export {name}={old[name]}" if name in old else f"unset {name}"
            yield Difference(
                HARMLESS if quiet else MAY, name, old.get(name, "not set"),
                new.get(name, "not set"), "" if quiet else advice,
            )  # fmt: skip


def plan_differences(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    ds_then: Mapping[str, Any],
    ds_now: Mapping[str, Any],
) -> list[Difference]:
    """Compare two ``plan.json`` and ``ds_config.json`` in all that decides numbers.

    Nothing where one is missing.
    """
    if not (then and now):
        return []
    rows = []
    parts: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "accelerator": lambda plan: plan["accelerator"],
        "precision": lambda plan: plan["precision"],
        "devices of the ranks": lambda plan: _names([r["device"] for r in plan["ranks"]]),
        "micro batches": lambda plan: _names([str(m) for m in plan["batch"]["micro_batches"]]),
        "accumulation": lambda plan: plan["batch"]["accumulation"],
        "global batch": lambda plan: plan["batch"]["global_batch"],
        "ranks on each host": lambda plan: ", ".join(str(h["slots"]) for h in plan["hosts"]),
    }
    for name, value in parts.items():
        old, new = value(then), value(now)
        if old != new:
            rows.append(Difference(BREAKS, name, str(old), str(new)))
    if not rows:
        flat_then, flat_now = flattened(ds_then), flattened(ds_now)
        for key in sorted({*flat_then, *flat_now}):
            old, new = flat_then.get(key, "not set"), flat_now.get(key, "not set")
            if old != new:
                rows.append(Difference(MAY, f"DeepSpeed's {key}", str(old), str(new)))
    return rows


def changed_values(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> its values in two nested mappings, where they differ; None where one has no
    such key. Of ``launch.env: {}`` and ``launch.env.NAME`` only the latter."""
    before, after = flattened(old), flattened(new)
    pairs = {key: (before.get(key), after.get(key)) for key in {**after, **before}}
    return {
        key: (former, latter)
        for key, (former, latter) in pairs.items()
        if former != latter and not ({} in (former, latter) and None in (former, latter))
    }


def short_value(value: Any, limit: int = 48) -> str:
    """A value in one short piece: hosts by name, text as it is."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(v, dict) and "name" in v for v in value)
    ):
        text = ", ".join(
            f"{v['name']} x {v['slots']}" if "slots" in v else v["name"] for v in value
        )
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = "null" if value is None else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; an empty mapping is a value, as is a list."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
