"""Which keys may change when a run is resumed: one table.

``python -m llmx resume --help`` prints it. The first row that names a key decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from llmx.errors import ConfigError
from llmx.run.provenance.differences import changed_values, short_value

SAME = "same numbers"
ROUNDING = "equal within rounding"
OTHER = "trains differently from here on"
REFUSED = "refused"


@dataclass(frozen=True)
class Rule:
    """Keys, and how a change of them affects the numbers or why it is refused."""

    keys: tuple[str, ...]
    effect: str
    why: str

    @property
    def allowed(self) -> bool:
        return self.effect != REFUSED


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the snapshot."""

    key: str
    old: Any
    new: Any
    rule: Rule

    @property
    def values(self) -> str:
        """``1 -> 2``."""
        return f"{short_value(self.old)} -> {short_value(self.new)}"


_OTHER_SAMPLES = "they determine the samples of a step"
_OTHER_MODEL = "the checkpoint contains the weights of that network"

PLACES = ("data.path", "data.eval_path", "model.path", "model.tokenizer")
"""May change where the content is the same, e.g. on another machine."""

RULES = (
    Rule(("launch.*",), SAME, "how the ranks are started and monitored"),
    Rule(("tracking.*",), SAME, "where metrics are sent"),
    Rule(("checkpoint.*",), SAME, "when the state is saved and which checkpoints are kept"),
    Rule(("hardware.*",), ROUNDING, "any hosts and devices; the global batch stays the same"),
    Rule(
        (
            *("batch.micro_batch", "batch.accumulation", "batch.balance", "batch.weights"),
            "batch.rebalance",
        ),
        ROUNDING,
        "how the same global batch is split",
    ),
    Rule(("zero.*",), ROUNDING, "a checkpoint loads at every ZeRO stage and offload"),
    Rule(
        (
            "model.attention",
            "model.activation_checkpointing",
        ),
        ROUNDING,
        "the same network, computed differently",
    ),
    Rule(("model.fused_loss", "model.compile", "model.liger_kernel"), ROUNDING, "other kernels"),
    Rule(
        ("task.log_every_steps", "task.evaluate", "task.eval_every_steps"), SAME, "what is reported"
    ),
    Rule(
        ("task.eval_generate", "task.eval_max_new_tokens", "task.eval_metrics"),
        SAME,
        "what is reported",
    ),
    Rule(("task.save_model", "task.stop_at_step"), SAME, "what happens at the end"),
    Rule(("task.early_stopping.*",), SAME, "when training ends"),
    Rule(("task.on_divergence", "task.spike_factor"), SAME, "what happens when it diverges"),
    Rule(("task.steps", "task.epochs"), OTHER, "a longer or shorter run; its schedule follows"),
    Rule(("precision",), OTHER, "the master weights stay; the arithmetic changes"),
    Rule(("deterministic",), ROUNDING, "other kernels"),
    Rule(("optim.kind",), REFUSED, "the checkpoint contains the states of that optimizer"),
    Rule(("optim.*",), OTHER, "read again at each step"),
    Rule(("data.cache_dir", "data.num_workers"), SAME, "where and how "
         "the same samples are prepared"),
    Rule(PLACES, SAME, "where the same content is stored; the contents are compared"),
    Rule(("data.seq_len",), REFUSED, "a different length gives different samples"),
    Rule(("data.layout", "data.pad_to_multiple_of"), ROUNDING, "the same rows in other batches"),
    Rule(("data.*",), REFUSED, _OTHER_SAMPLES),
    Rule(("seed",), REFUSED, "it determines the order of the samples"),
    Rule(
        ("batch.global_batch", "batch.tokens_per_step"),
        REFUSED,
        "a step would have different samples",
    ),
    Rule(("adapter.lr",), OTHER, "read again at each step"),
    Rule(("adapter.*",), REFUSED, "the checkpoint contains that adapter"),
    Rule(("model.*",), REFUSED, _OTHER_MODEL),
    Rule(("task.kind",), REFUSED, "a different task is a different run"),
    Rule(("task.options", "task.options.*"), REFUSED, "they determine the task's samples and loss"),
    Rule(("task.code_path",), SAME, "where the task's code is stored; the code is compared"),
    Rule(("sweep.*",), SAME, "how a sweep runs its trials"),
    Rule(("tokenizer.*",), REFUSED, "used only by the tokenizer command"),
    Rule(("name",), SAME, "the name of the run"),
    Rule(("run_dir",), SAME, "a run is resumed where its directory is"),
    Rule(("dry_run",), SAME, "dry_run=true shows what would be done"),
    Rule(("schema_version",), REFUSED, "the version of the snapshot's format"),
)  # fmt: skip


def rule_of(key: str) -> Rule:
    """The row that decides on a dotted key."""
    for rule in RULES:
        if any(fnmatchcase(key, pattern) for pattern in rule.keys):
            return rule
    return Rule((key,), REFUSED, "its effect on the numbers is unknown")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The keys whose values differ, in the order of the schema."""
    found = changed_values(old, new)
    return [Change(key, before, after, rule_of(key)) for key, (before, after) in found.items()]


def refuse(found: list[Change]) -> None:
    """Raise ConfigError with every change that is not allowed, and why."""
    refused = [change for change in found if not change.rule.allowed]
    if refused:
        lines = [
            f"{change.key}: cannot change {change.values}: {change.rule.why}." for change in refused
        ]
        raise ConfigError(
            "\n".join(lines) + "\nStart a new run with the new value. `python -m llmx resume "
            "--help` lists the keys that may change."
        )


def refuse_other_content(
    found: list[Change], then: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise ConfigError where an input has a new path and different content.

    ``then``, ``now``: the provenances with their fingerprints.
    """
    prints = {
        "data.path": ("data",),
        "data.eval_path": ("eval_data",),
        "model.path": ("model", "tokenizer"),
        "model.tokenizer": ("tokenizer",),
    }
    for change in found:
        for name in prints.get(change.key, ()):
            old = (then.get("fingerprints") or {}).get(name)
            new = (now.get("fingerprints") or {}).get(name)
            if old is None and new is None and change.key == "model.path":
                continue
            if old is None or new is None or old["digest"] != new["digest"]:
                why = (
                    "its content was not recorded" if old is None
                    else "it is not on this machine" if new is None
                    else f"its content differs ({new['digest'][:12]}, was {old['digest'][:12]})"
                )  # fmt: skip
                raise ConfigError(
                    f"{change.key}: cannot change {change.values}: {why}. A resumed run needs the "
                    "inputs with which it was started."
                )


def table() -> str:
    """The rules as text: allowed ones by their effect, then the refused ones."""
    lines = []
    for effect in (SAME, ROUNDING, OTHER, REFUSED):
        lines.append(
            f"{effect}:" if effect != REFUSED else "refused, since it would be a different run:"
        )
        for rule in RULES:
            if rule.effect == effect and "run_dir" not in rule.keys:
                keys = ", ".join(rule.keys)
                gap = " " if len(keys) < 44 else f"\n{'':<46}"
                lines.append(f"  {keys:<43}{gap}{rule.why}")
        lines.append("")
    return "\n".join(lines)
