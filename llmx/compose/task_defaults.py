"""Learning rate and batch where the config leaves them open: by task, and by what is trained.

Each task declares its own (``Task.defaults``). ``docs/training.md`` shows the table with its
sources; a test keeps the two equal. Epochs stand in ``conf/task``.

    python -m llmx plan task=dpo model=hf model.path=Qwen/Qwen3-8B
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmx.compose.task_rules import defaults_of
from llmx.config.fields import AUTO
from llmx.config.optimizers import optimizer_of
from llmx.config.schema import BatchConfig, Experiment


def default_lr(exp: Experiment, *, adapter: bool) -> float:
    """The peak learning rate of the weights, or of an ``adapter`` beside them."""
    row, optimizer = defaults_of(exp.task.kind), optimizer_of(exp.optim.kind)
    rate = row.scratch if exp.model.init == "scratch" else row.full
    return optimizer.lr or (row.adapter if adapter else rate) * optimizer.lr_factor


def default_batch(exp: Experiment) -> int | None:
    """Samples of a step: of what the ranks take at once, the multiple nearest to the table. None
    from scratch, where the task has no usual number: one micro step of all ranks."""
    row = defaults_of(exp.task.kind)
    samples = row.scratch_batch if exp.model.init == "scratch" else row.batch
    if samples is None:
        return None
    at_once = sum(host.slots for host in exp.hardware.hosts) or 1
    if exp.batch.micro_batch != AUTO:
        at_once *= exp.batch.micro_batch
    return at_once * max(1, round(samples / at_once))


def with_task_defaults(exp: Experiment) -> Experiment:
    """With numbers where ``optim.lr`` is auto and where nothing says the size of a step."""
    batch = exp.batch
    is_open = batch.global_batch is None and batch.tokens_per_step is None
    if is_open and batch.accumulation is None:
        exp = replace(exp, batch=replace(batch, global_batch=default_batch(exp)))
    return with_default_lr(exp)


def with_default_lr(exp: Experiment) -> Experiment:
    """With a number where ``optim.lr`` is auto. An adapter gets a rate of its own only there: a
    number that was set holds for all that is trained."""
    if exp.optim.lr != AUTO:
        return exp
    adapter = exp.adapter
    if adapter.kind != "none" and adapter.lr is None:
        adapter = replace(adapter, lr=default_lr(exp, adapter=True))
    optim = replace(exp.optim, lr=default_lr(exp, adapter=False))
    return replace(exp, optim=optim, adapter=adapter)


def origin_of_lr(exp: Experiment, overrides: Sequence[str]) -> str:
    """What has set the peak learning rate of a completed experiment: the word that was typed, the
    default of its task, or the option that was chosen."""
    has_own = exp.adapter.kind != "none" and exp.adapter.lr is not None
    typed = _typed(("adapter.lr", "optim.lr") if has_own else ("optim.lr",), overrides)
    if typed and not typed.endswith("=auto"):
        return typed
    rate = exp.adapter.lr if has_own else exp.optim.lr
    if rate == default_lr(exp, adapter=has_own):
        return f"default of task={exp.task.kind}, {'adapter' if has_own else _weights(exp)}"
    return _option("optim", overrides)


def origin_of_batch(exp: Experiment, overrides: Sequence[str]) -> str:
    """What has set the samples of a step, and the micro batch, of a completed experiment."""
    batch, option = exp.batch, _option("batch", overrides)
    micro_batch = _typed(("batch.micro_batch",), overrides)
    if micro_batch.endswith("=auto"):
        micro_batch = "chosen by the plan"
        exp = replace(exp, batch=replace(batch, micro_batch=AUTO))
    elif not micro_batch:
        micro_batch = "default" if batch.micro_batch == BatchConfig.micro_batch else option
    sizes = (batch.global_batch, batch.tokens_per_step, batch.accumulation)
    step = _typed(("batch.global_batch", "batch.tokens_per_step", "batch.accumulation"), overrides)
    if not step and sizes == (None, None, None):
        step = "one micro step of all ranks, since batch.global_batch is not set"
    elif not step and sizes == (default_batch(exp), None, None):
        step = f"default of task={exp.task.kind}, {_weights(exp)}"
    return f"{step or option}; micro batch: {micro_batch}"


def _typed(keys: Sequence[str], overrides: Sequence[str]) -> str:
    """The last override of the first of these keys that has one."""
    for key in keys:
        words = [word for word in overrides if word.lstrip("+").startswith(f"{key}=")]
        if words:
            return f"typed: {words[-1]}"
    return ""


def _option(group: str, overrides: Sequence[str]) -> str:
    """The option of ``group``, or the experiment, that was chosen last."""
    chosen = [word for word in overrides if word.startswith((f"{group}=", "experiment="))]
    return f"set by {chosen[-1]}" if chosen else "set by the config"


def _weights(exp: Experiment) -> str:
    return "from scratch" if exp.model.init == "scratch" else "pretrained"
