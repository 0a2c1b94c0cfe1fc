"""Refuses a typed word without effect.

Some keys are read only beside another choice: ``optim.cycles`` with one schedule,
``launch.slurm.*`` with one transport. ``RULES`` says which; a word on the command line that is not
read ends the command with the choice that would read it.

    python -m llmx plan model=tiny model.path=Qwen/Qwen3-8B
"""

# ruff: noqa: E501 - a rule is a row
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmx.compose.overrides import SET
from llmx.compose.task_rules import generates, specs
from llmx.config.build import shown
from llmx.config.fields import AUTO
from llmx.config.optimizers import optimizer_of
from llmx.config.plugins import TRACKERS
from llmx.config.schema import Experiment
from llmx.config.user_code import user_functions
from llmx.errors import ConfigError

_RESET = ("", "''", "null", "0", "[]", "{}")
"""Values that turn something off: they ask for nothing that could be left undone."""


def check_effects(exp: Experiment, overrides: Sequence[str], *, command: str | None = None) -> None:
    """ConfigError with each override that nothing of this experiment reads.

    ``exp``: as composed, before anything is completed. ``command``: what the config is for, where
    it is not a training.
    """
    if problems := without_effect(exp, overrides, command=command):
        raise ConfigError("\n".join(problems.values()))


@dataclass(frozen=True)
class Rule:
    """Keys (``launch.slurm`` is all below it) that are read only beside another choice."""

    keys: str
    is_read: Callable[[Experiment], bool]
    because: str
    """Why an experiment does not read them, after "has no effect"."""
    fix: str


def _stages(*stages: int) -> Callable[[Experiment], bool]:
    return lambda exp: exp.zero.stage in (*stages, AUTO)


def _optimizer_reads(setting: str) -> Callable[[Experiment], bool]:
    return lambda exp: setting in optimizer_of(exp.optim.kind).reads


def _form(*forms: str) -> Callable[[Experiment], bool]:
    return lambda exp: exp.data.form in ("auto", *forms) or bool(exp.data.sources)


def _offloads(exp: Experiment) -> set[str]:
    return {exp.zero.offload_optimizer, exp.zero.offload_param}


def _optim_lr_is_read(exp: Experiment) -> bool:
    """Whether a parameter learns at ``optim.lr`` beside an adapter with a rate of its own: named
    modules, rows of new tokens and a new head do."""
    model, adapter = exp.model, exp.adapter
    trained_whole = adapter.modules_to_save or model.add_tokens or model.add_special_tokens
    if adapter.kind == "none" or adapter.lr is None or trained_whole:
        return True
    networks = specs(exp)  # none is known of a task of the user's own
    return not networks or any(spec.head == "sequence_classification" for spec in networks.values())


def _tracker_reads(setting: str) -> Callable[[Experiment], bool]:
    return lambda exp: any(setting in TRACKERS.load(k).reads for k in exp.tracking.kinds)


# fmt: off
RULES = (
    Rule("model.path", lambda exp: exp.model.kind == "hf" or exp.model.init == "pretrained" or not exp.model.tokenizer, "with the chosen model, which starts from random weights", "model=hf"),
    Rule("model.revision", lambda exp: bool(exp.model.path), "without model.path", "model.path=..."),
    Rule("adapter.rank adapter.alpha adapter.dropout adapter.targets adapter.rslora adapter.dora adapter.lr adapter.quantize adapter.double_quant adapter.modules_to_save", lambda exp: exp.adapter.kind != "none", "with adapter.kind=none", "adapter=lora"),
    Rule("adapter.double_quant", lambda exp: exp.adapter.quantize != "none", "without adapter.quantize", "adapter.quantize=nf4"),
    Rule("optim.lr", _optim_lr_is_read, "beside adapter.lr", "adapter.lr=null"),
    Rule("data.path", lambda exp: not exp.data.sources, "beside data.sources", "data=file"),
    Rule("data.eval_samples data.eval_fraction", lambda exp: exp.data.path != "demo" or bool(exp.data.sources), "with data.path=demo, which has evaluation rows of its own", "data=file"),
    Rule("data.text_unit", _form("text"), "on rows of another form", "data=text"),
    Rule("data.data_map", _form("labelled"), "on rows of another form", "data=labelled"),
    Rule("data.truncate_prompt", _form("labelled", "preference"), "on rows of another form", "data=labelled"),
    Rule("data.template data.system data.loss_on", lambda exp: exp.data.form != "text", "on plain text", "data=file"),
    Rule("task.epochs", lambda exp: exp.task.steps is None, "beside task.steps", "task.steps=null"),
    Rule("task.code_path", lambda exp: ":" in exp.task.kind or bool(user_functions(exp.task)), "without a task or a function of your own", "task.kind=package.module:Class"),
    Rule("task.eval_every_steps task.eval_generate", lambda exp: exp.task.evaluate, "with task.evaluate=false", "task.evaluate=true"),
    Rule("task.eval_max_new_tokens", lambda exp: exp.task.eval_generate > 0, "without task.eval_generate", "task.eval_generate=32"),
    Rule("task.early_stopping.min_delta task.early_stopping.metric", lambda exp: exp.task.early_stopping.patience is not None, "without task.early_stopping.patience", "task.early_stopping.patience=3"),
    Rule("rollout", lambda exp: generates(exp.task) is not False, "with a task that reads its samples", "task=grpo"),
    Rule("zero.nvme_path", lambda exp: "nvme" in _offloads(exp), "without NVMe offload", "zero=infinity"),
    Rule("zero.pin_memory", lambda exp: _offloads(exp) != {"none"} or exp.zero.stage == AUTO, "without offload", "zero=stage2_offload"),
    Rule("zero.prefetch_bucket_size zero.param_persistence_threshold zero.max_live_parameters zero.max_reuse_distance zero.sub_group_size", _stages(3), "below stage 3", "zero=stage3"),
    Rule("zero.allgather_bucket_size", _stages(1, 2), "at stages 0 and 3", "zero=stage2"),
    Rule("zero.reduce_bucket_size zero.overlap_comm zero.grad_accum_dtype", _stages(1, 2, 3), "at stage 0", "zero=stage1"),
    Rule("hardware.hosts", lambda exp: exp.hardware.kind == "static", "with the chosen hardware", "hardware=static"),
    Rule("hardware.path hardware.ssh_port hardware.user hardware.interface", lambda exp: exp.hardware.kind == "hostfile", "without a hostfile", "hardware=hostfile, or the same key of each entry of hardware.hosts"),
    Rule("hardware.nodes", lambda exp: exp.hardware.kind == "slurm", "with the chosen hardware", "hardware=slurm"),
    Rule("optim.betas", _optimizer_reads("betas"), "with this optim.kind", "optim.kind=adamw"),
    Rule("optim.eps", _optimizer_reads("eps"), "with this optim.kind", "optim.kind=adamw"),
    Rule("optim.muon_lr optim.muon_momentum optim.muon_adjust_lr", _optimizer_reads("muon_lr"), "with this optim.kind", "optim=muon"),
    Rule("optim.warmup_fraction", lambda exp: exp.optim.warmup_steps is None, "beside optim.warmup_steps", "optim.warmup_steps=null"),
    Rule("optim.min_lr_ratio optim.decay_end_fraction", lambda exp: exp.optim.schedule != "constant", "with optim.schedule=constant", "optim.schedule=cosine"),
    Rule("optim.decay_fraction optim.decay_shape", lambda exp: exp.optim.schedule == "wsd", "with this optim.schedule", "optim.schedule=wsd"),
    Rule("optim.decay_power", lambda exp: exp.optim.schedule == "polynomial", "with this optim.schedule", "optim.schedule=polynomial"),
    Rule("optim.cycles", lambda exp: exp.optim.schedule == "cosine_restarts", "with this optim.schedule", "optim.schedule=cosine_restarts"),
    Rule("optim.start_lr_ratio", lambda exp: exp.optim.schedule == "one_cycle", "with this optim.schedule", "optim.schedule=one_cycle"),
    Rule("launch.sync_extra launch.sync_exclude", lambda exp: exp.launch.sync == "rsync", "with launch.sync=none", "launch=rsync"),
    Rule("launch.slurm", lambda exp: exp.launch.transport == "slurm" or exp.hardware.kind == "slurm", "with this launch.transport", "launch=slurm"),
    Rule("launch.queue", lambda exp: exp.launch.transport != "slurm", "with Slurm, which queues jobs itself", "launch=default"),
    Rule("launch.openmpi_args", lambda exp: exp.launch.transport == "openmpi", "with this launch.transport", "launch=openmpi"),
    Rule("launch.restart_backoff_s launch.restart_backoff_max_s", lambda exp: exp.launch.max_restarts > 0, "with launch.max_restarts=0", "launch.max_restarts=3"),
    Rule("rollout.port rollout.wait_s rollout.vllm_python", lambda exp: bool(exp.rollout.hosts), "without rollout.hosts", "rollout.hosts=[node-b]"),
    Rule("rollout.importance rollout.importance_cap", lambda exp: exp.rollout.weights_samples, "with rollout.max_staleness=0", "rollout.max_staleness=1"),
    Rule("tracking.uri", _tracker_reads("uri"), "without MLflow", "tracking=mlflow"),
    Rule("tracking.entity", _tracker_reads("entity"), "without W&B or SwanLab", "tracking=wandb"),
    Rule("tracking.project tracking.group tracking.mode tracking.finish_timeout_s", lambda exp: bool(exp.tracking.kinds), "without a tracker", "tracking=wandb"),
)
_NEVER_READ = (
    Rule("model.resolved model.resolved_from", lambda exp: False, "as a word: llmx fills it in from the file of model.path and model.config", "model.config.KEY=VALUE"),
    Rule("tokenizer", lambda exp: False, "on a training", "the command: python -m llmx tokenizer"),
    Rule("sweep.halving sweep.halving_factor sweep.prune sweep.fail_fast sweep.slots_per_trial sweep.max_jobs sweep.max_trials sweep.max_minutes sweep.resume sweep.retry", lambda exp: False, "on a single run", "-m and values to compare"),
)
# fmt: on


def without_effect(
    exp: Experiment, overrides: Sequence[str], *, command: str | None = None
) -> dict[str, str]:
    """Key -> the message, of each override that nothing of this experiment reads."""
    problems = {}
    rules = RULES if command else (*RULES, *_NEVER_READ)
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        if word.startswith(SET) or value in _RESET:
            continue
        for rule in rules:
            if not any(key == name or key.startswith(f"{name}.") for name in rule.keys.split()):
                continue
            if not rule.is_read(exp):
                fix = f"Set {rule.fix}; or leave it out."
                problems[key] = f"{shown(word)}: has no effect {rule.because}. {fix}"
                break
    return problems
