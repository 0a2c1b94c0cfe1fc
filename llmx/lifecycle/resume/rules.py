"""What may be changed when a run goes on, and what may not: one table.

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
    """One row: keys, and what changing them does to the numbers, or why it is refused."""

    keys: tuple[str, ...]
    effect: str
    why: str

    @property
    def allowed(self) -> bool:
        return self.effect != REFUSED


@dataclass(frozen=True)
class Change:
    """One value that is not what it was."""

    key: str
    old: Any
    new: Any
    rule: Rule

    @property
    def values(self) -> str:
        """``1 -> 2``."""
        return f"{short_value(self.old)} -> {short_value(self.new)}"


_OTHER_SAMPLES = "they decide the samples of a step"
_OTHER_MODEL = "the checkpoint holds the weights of that network"

PLACES = ("data.path", "data.eval_path", "model.path", "model.tokenizer")
"""May be said anew, on another machine, where the content is the recorded one."""

RULES = (
    Rule(("launch.*",), SAME, "how the ranks are started and watched"),
    Rule(("tracking.*",), SAME, "where metrics are sent"),
    Rule(("checkpoint.*",), SAME, "when the state is saved, what is kept"),
    Rule(("hardware.*",), ROUNDING, "any hosts and devices; the global batch stays"),
    Rule(
        (
            *("batch.micro_batch", "batch.accumulation", "batch.balance", "batch.weights"),
            "batch.rebalance",
        ),
        ROUNDING,
        "how the same global batch is split",
    ),
    Rule(("zero.*",), ROUNDING, "a checkpoint fits every ZeRO stage and offload"),
    Rule(
        (
            "model.attention",
            "model.activation_checkpointing",
        ),
        ROUNDING,
        "the same network, computed in another way",
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
    Rule(("precision",), OTHER, "the master weights stay, the arithmetic changes"),
    Rule(("deterministic",), ROUNDING, "other kernels"),
    Rule(("optim.kind",), REFUSED, "the checkpoint holds the states of that optimizer"),
    Rule(("optim.*",), OTHER, "read again at each step"),
    Rule(("data.cache_dir", "data.num_workers"), SAME, "where and how "
         "the same samples are prepared"),
    Rule(PLACES, SAME, "where the same content lies; it is compared"),
    Rule(("data.seq_len",), REFUSED, "another length makes different samples"),
    Rule(("data.layout", "data.pad_to_multiple_of"), ROUNDING, "the same rows in other batches"),
    Rule(("data.*",), REFUSED, _OTHER_SAMPLES),
    Rule(("seed",), REFUSED, "the order of the samples follows from it"),
    Rule(
        ("batch.global_batch", "batch.tokens_per_step"),
        REFUSED,
        "a step would take other samples",
    ),
    Rule(("adapter.lr",), OTHER, "read again at each step"),
    Rule(("adapter.*",), REFUSED, "the checkpoint holds that adapter"),
    Rule(("model.*",), REFUSED, _OTHER_MODEL),
    Rule(("task.kind",), REFUSED, "another task is another run"),
    Rule(("task.options", "task.options.*"), REFUSED, "they decide the task's samples and loss"),
    Rule(("task.code_path",), SAME, "where the task's code lies; it is compared"),
    Rule(("sweep.*",), SAME, "how a sweep runs its trials"),
    Rule(("tokenizer.*",), REFUSED, "only for the tokenizer command"),
    Rule(("name",), SAME, "what it is called"),
    Rule(("run_dir",), SAME, "a run is resumed where its directory is"),
    Rule(("dry_run",), SAME, "dry_run=true shows what would happen"),
    Rule(("schema_version",), REFUSED, "it is the version of the snapshot's format"),
)  # fmt: skip


def rule_of(key: str) -> Rule:
    """The row that decides on a dotted key."""
    for rule in RULES:
        if any(fnmatchcase(key, pattern) for pattern in rule.keys):
            return rule
    return Rule((key,), REFUSED, "its effect on the numbers is unknown")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every key whose value differs, in the order of the schema."""
    found = changed_values(old, new)
    return [Change(key, before, after, rule_of(key)) for key, (before, after) in found.items()]


def refuse(found: list[Change]) -> None:
    """ConfigError with every change that may not be made, and why."""
    refused = [change for change in found if not change.rule.allowed]
    if refused:
        lines = [
            f"{change.key}: {change.values} is not possible: {change.rule.why}."
            for change in refused
        ]
        raise ConfigError(
            "\n".join(lines) + "\nStart a new run with it. `python -m llmx resume --help` lists "
            "what may change."
        )


def refuse_other_content(
    found: list[Change], then: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """ConfigError for an input that was said to lie elsewhere and is another one.

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
                    else f"its content differs ({new['digest'][:12]}, not {old['digest'][:12]})"
                )  # fmt: skip
                raise ConfigError(
                    f"{change.key}: {change.values} is not possible: "
                    f"{why}. A run is resumed with the inputs it was started with."
                )


def table() -> str:
    """The rules as text: allowed ones by their effect, then the refused ones."""
    lines = []
    for effect in (SAME, ROUNDING, OTHER, REFUSED):
        lines.append(f"{effect}:" if effect != REFUSED else "refused, since it is another run:")
        for rule in RULES:
            if rule.effect == effect and "run_dir" not in rule.keys:
                keys = ", ".join(rule.keys)
                gap = " " if len(keys) < 44 else f"\n{'':<46}"
                lines.append(f"  {keys:<43}{gap}{rule.why}")
        lines.append("")
    return "\n".join(lines)
