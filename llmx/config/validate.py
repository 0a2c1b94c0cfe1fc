"""The rules that hold before a GPU is touched: each names the value, the rule and the fix.

Pure: an experiment whose hardware is resolved goes in, problems come out, all at once. Here are
the rules between fields; the range of one field stands beside it (``llmx.config.schema``).
Precision and batch sizes have their rules where they are computed (``llmx.plan``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from llmx.config.accelerators import ACCELERATORS
from llmx.config.build import experiment_from_dict, shown, to_dict
from llmx.config.by_host import by_host_problems
from llmx.config.hardware_rules import hardware_problems, on_cpus, used_devices
from llmx.config.model_rules import (
    adapter_problems,
    added_token_problems,
    length_problem,
    model_config_problems,
    quantize_problems,
)
from llmx.config.optimizers import optimizer_of
from llmx.config.plugins import TRANSPORTS
from llmx.config.rollout_rules import rollout_problems
from llmx.config.schema import (
    SCHEMA_VERSION,
    DataConfig,
    Experiment,
    HardwareConfig,
    HostConfig,
    LaunchConfig,
    ModelConfig,
    SweepConfig,
    TaskConfig,
    ZeroConfig,
)
from llmx.errors import ConfigError, did_you_mean
from llmx.redact import is_secret
from llmx.text import CONTROL, SURROGATES

MAX_RANKS = 16384


def validate(
    exp: Experiment,
    problems: Sequence[str] = (),
    *,
    position_limit: int | None = None,
    is_typed: bool = False,
) -> None:
    """Raise one ConfigError with every broken rule, after ``problems`` that were found before.

    ``position_limit``: the longest sequence the model takes, where it is known. ``is_typed``: every
    value has been checked by its field already.
    """
    if not is_typed:  # hosts of a hostfile, or of this machine, came in after the config was read
        exp = experiment_from_dict(to_dict(exp))
    problems = [
        *_version(exp.schema_version),
        *problems,
        *hardware_problems(exp.hardware, exp.zero, exp.rollout.servers),
        *rollout_problems(exp),
        *_model_and_data(exp, position_limit),
        *model_config_problems(exp.model),
        *added_token_problems(exp.model),
        *adapter_problems(exp.adapter, exp.model),
        *quantize_problems(exp.adapter, exp.model, exp.zero, on_cpus(exp.hardware)),
        *data_problems(exp.data),
        *_length(exp),
        *_eval_metrics(exp.task),
        *_batch_and_optim(exp),
        *_zero(exp.zero, exp.model, exp.hardware),
        *launch_problems(exp.launch, exp.hardware, exp.rollout.servers),
        *by_host_problems(exp.hardware, exp.data, exp.model),
        *_secrets(to_dict(exp)),
        *_sweep(exp.sweep),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _version(version: int) -> Iterator[str]:
    if version != SCHEMA_VERSION:
        yield (
            f"schema_version={version}: is set by llmx ({SCHEMA_VERSION} now), not by "
            "you. Leave it out."
        )


def _sweep(sweep: SweepConfig) -> Iterator[str]:
    if sweep.halving is None:
        return
    if sweep.trial_steps is not None:
        yield (
            f"sweep.halving={sweep.halving}, sweep.trial_steps={sweep.trial_steps}: short trials "
            "are all trained alike, and keep no checkpoint to go on from. Set one of them."
        )
    if sweep.objective == "tokens_per_s":
        yield (
            f"sweep.halving={sweep.halving}: compares losses and metrics, and "
            "sweep.objective=tokens_per_s needs no long training. Set sweep.objective=eval/loss."
        )


def _model_and_data(exp: Experiment, position_limit: int | None) -> Iterator[str]:
    model, data = exp.model, exp.data
    if model.init == "pretrained" and not model.path:
        yield "model.path is empty, but model.init=pretrained loads weights from it. Set it."
    if model.init == "scratch" and model.kind == "hf" and not model.path:
        yield "model.kind=hf needs model.path (its config.json is the architecture)."
    if model.init == "scratch" and model.kind != "hf" and not model.config:
        yield f"model.config is empty: a {model.kind} from scratch needs hidden_size and the like."
    if not model.tokenizer and not model.path:
        yield "model.tokenizer is empty and there is no model.path to take it from. Set it."
    if problem := length_problem(data.seq_len, position_limit, model.path or model.name):
        yield problem
    flash = model.attention in ("varlen", "flash_attention_2", "flash_attention_3")
    if flash and (exp.precision == "fp32" or on_cpus(exp.hardware)):
        yield (
            f"model.attention={model.attention} needs CUDA and bf16 or fp16. Use "
            "model.attention=auto."
        )
    old = sorted(
        name
        for name, device in used_devices(exp.hardware).items()
        if ACCELERATORS[device.accelerator].is_gpu and "bf16" not in device.precisions
    )
    if flash and old:
        yield (
            f"model.attention={model.attention} needs GPUs that compute bf16 (compute capability "
            f"8.0 or higher), {', '.join(old)} does not. Use model.attention=auto, "
            "which chooses for each device."
        )
    if data.layout == "padded" and model.attention not in ("auto", "sdpa", "eager"):
        yield (
            f"data.layout=padded and model.attention={model.attention} do not go together. Use "
            "model.attention=auto."
        )


def _length(exp: Experiment) -> Iterator[str]:
    task, data, checkpoint = exp.task, exp.data, exp.checkpoint
    objective = exp.sweep.objective
    if task.steps is None and task.epochs is None:
        yield "task.steps and task.epochs are both null. Set one, e.g. task.steps=1000."
    patience, metric = task.early_stopping.patience, checkpoint.metric
    stops_early = f"task.early_stopping.patience={patience}"
    if patience is not None and not task.eval_every_steps:
        yield (
            f"{stops_early} needs evaluations on the way. Set, for example, "
            "task.eval_every_steps=100."
        )
    keeps_best = checkpoint.keep.best and metric.startswith("eval/")
    every = task.eval_every_steps
    intervals = [f"task.eval_every_steps={every}"] if every else []
    goals = {
        f"checkpoint.keep.best={checkpoint.keep.best} by {metric}": keeps_best,
        f"sweep.objective={objective}": (objective or "").startswith("eval/"),
        stops_early: patience is not None,
    }
    goals_set = [key for key, is_set in goals.items() if is_set]
    if (intervals or goals_set) and not data.has_eval:
        yield (
            f"{', '.join([*intervals, *goals_set])}: needs evaluation data. Set data.eval_path, or "
            "data.eval_fraction=0.05 to hold rows out."
        )
    elif goals_set and not task.evaluate:
        yield f"{', '.join(goals_set)}: task.evaluate=false measures nothing. Leave it out."
    elif patience is not None and (task.early_stopping.metric or metric).startswith("train/"):
        yield (
            f"{stops_early} looks at checkpoint.metric={metric}, which no evaluation measures. Set "
            "task.early_stopping.metric=eval/loss, or for a task that learns from rewards "
            "task.eval_generate=32."
        )


def _eval_metrics(task: TaskConfig) -> Iterator[str]:
    if not task.eval_metrics:
        return
    key = f"task.eval_metrics={shown(task.eval_metrics)}"
    if not task.eval_generate:
        yield f"{key} is of completions, and none are made. Set task.eval_generate=32."
    names = [name.rpartition(":")[2].rpartition(".")[2] for name in task.eval_metrics]
    if twice := [name for name in names if names.count(name) > 1]:
        yield f"{key}: two are called {twice[0]}. Leave one out, or give it another name."


def _batch_and_optim(exp: Experiment) -> Iterator[str]:
    batch, optim = exp.batch, exp.optim
    ranks = sum(host.slots for host in exp.hardware.hosts)
    if ranks > MAX_RANKS:
        yield (
            f"hardware.hosts: {ranks} ranks in all, at most {MAX_RANKS} are planned. Use fewer "
            "hosts, or set hardware.slots."
        )
    if batch.global_batch is not None and batch.tokens_per_step is not None:
        yield "batch.global_batch and batch.tokens_per_step say the same thing. Set one to null."
    if batch.tokens_per_step is not None and batch.accumulation is not None:
        yield "batch.accumulation follows from batch.tokens_per_step. Set one of them to null."
    if batch.weights and batch.balance != "auto":
        yield (
            f"batch.weights and batch.balance={batch.balance} both say how samples are shared out. "
            "Leave batch.balance=auto with weights, or remove the weights."
        )
    if batch.rebalance and batch.balance == "off":
        yield (
            "batch.rebalance=true measures while it trains, and batch.balance=off measures "
            "nothing. Set batch.balance=auto (or even, spec, measured), or batch.rebalance=false."
        )
    if batch.rebalance and exp.zero.stage == 3:
        yield (
            "batch.rebalance=true, zero.stage=3: there every rank waits for weights of the others "
            "in its forward passes, so none of them shows who has become slower. Set "
            "batch.rebalance=false, or zero=stage2. To measure anew at stage 3: stop the run, "
            "remove balance.json, resume."
        )
    hosts = exp.hardware.hosts
    names = sorted(filter(None, {host.name for host in hosts} | {host.device for host in hosts}))
    for name in batch.weights:
        if hosts and name not in names:
            yield (
                f"batch.weights.{shown(name)}: there is no such host or device type. Those of this "
                f"run: {', '.join(names)}.{did_you_mean(name[:100], names)}"
            )
    if optim.warmup_steps is not None and optim.warmup_steps > (exp.task.steps or float("inf")):
        yield (
            f"optim.warmup_steps={optim.warmup_steps} is more than task.steps="
            f"{exp.task.steps}: the learning rate would never reach optim.lr. "
            "Set fewer warm-up steps."
        )
    yield from optimizer_of(optim.kind).needs(exp)


def _zero(zero: ZeroConfig, model: ModelConfig, hardware: HardwareConfig) -> Iterator[str]:
    hosts = hardware.hosts
    if zero.offload_param != "none" and zero.stage != 3:
        yield (
            f"zero.offload_param={zero.offload_param} needs stage 3 (stage is {zero.stage}; "
            "DeepSpeed would ignore it). Use zero=stage3_offload."
        )
    if zero.offload_optimizer != "none" and zero.stage == 0:
        yield "zero.offload_optimizer needs stage 1 or higher. Use zero=stage2_offload."
    if zero.offload_optimizer == "nvme" and zero.stage != 3:
        yield "zero.offload_optimizer=nvme needs stage 3. Use zero=infinity."
    if "nvme" in (zero.offload_optimizer, zero.offload_param) and not zero.nvme_path:
        yield "zero.nvme_path is empty, but something is offloaded to NVMe. Set it to a fast disk."
    if zero.nvme_path and not zero.nvme_path.startswith("/"):
        yield (
            f"zero.nvme_path={zero.nvme_path}: must be an absolute path, as it is one of every "
            "host. Set e.g. zero.nvme_path=/nvme/llmx."
        )
    if model.liger_kernel and on_cpus(hardware):
        yield "model.liger_kernel=true needs CUDA on every rank. Use model.liger_kernel=false."
    if model.compile and zero.stage == 3:
        yield (
            "model.compile=true with stage 3: torch.compile cannot look through the gathering of "
            "parameters inside a block. Use zero=stage2, or model.compile=false."
        )
    yield from _checkpointing(zero, model, hardware)
    hpz = zero.hpz_partition_size
    if hpz > 1 and zero.stage != 3:
        yield f"zero.hpz_partition_size={hpz} needs stage 3. Use zero=stage3_zeropp."
    for host in hosts:
        if hpz > 1 and host.slots % hpz:
            yield (
                f"zero.hpz_partition_size={hpz} does not divide the {host.slots} ranks of "
                f"{host.name}. Use a divisor, or 1 to turn it off."
            )
            break
    if zero.quantized_weights or zero.quantized_gradients:
        if zero.stage != 3:
            yield (
                "zero.quantized_weights and zero.quantized_gradients need stage 3. Use "
                "zero=stage3_zeropp."
            )
        if on_cpus(hardware):
            yield (
                "zero.quantized_weights (qwZ) and zero.quantized_gradients (qgZ) need CUDA. Set "
                "both to false."
            )


def _checkpointing(zero: ZeroConfig, model: ModelConfig, hardware: HardwareConfig) -> Iterator[str]:
    """Activation checkpointing that differs by type of device."""
    run = model.activation_checkpointing
    chosen = {
        name: device.activation_checkpointing
        for name, device in used_devices(hardware).items()
        if device.activation_checkpointing is not None
    }
    uses_default = len(used_devices(hardware)) > len(chosen)
    if len({*chosen.values(), *([run] if uses_default else [])}) <= 1:
        return
    name, checkpointing = max(chosen.items(), key=lambda setting: setting[1] != run)
    where = f"hardware.devices.{shown(name)}.activation_checkpointing={checkpointing}"
    if zero.stage == 3:
        yield (
            f"{where}, zero.stage=3: what is computed again gathers its weights again, and all "
            "ranks gather together, so stage 3 has one value for all of them. Use zero=stage2, or "
            f"model.activation_checkpointing={checkpointing} for all and null for the type of "
            "device."
        )
    elif model.compile:
        yield (
            f"{where}, model.compile=true: a compiled block hands over its gradients in an order "
            "that may change with what it computes again, and ranks that add them up in different "
            "orders would add up different parameters. Set model.compile=false, or one "
            "model.activation_checkpointing for all."
        )


def _secrets(value: object, key: str = "") -> Iterator[str]:
    """Credentials in the config, which is stored and shown in many places."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _secrets(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _secrets(item, f"{key}[{index}]")
    elif isinstance(value, str) and not key.startswith(("launch.env.", "hardware.env.")):
        # Names count where they are the user's own.
        name = key.rpartition(".")[2] if key.startswith("task.options.") else ""
        if is_secret(name, value):
            variables = (
                ", and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
                if key == "tracking.uri"
                else ", and read it from an environment variable or a file"
            )
            yield (
                f"{key}: looks like a password or a token, and config.yaml, reports and trackers "
                f"show the config. Leave it out{variables}."
            )


COLUMNS = (
    "text title content instruction input output history system tools conversations messages "
    "prompt response label chosen rejected margin responses answers desirable"
).split()
"""Our names of columns: the keys of ``data.columns``."""
MAPPED = ("prompt", "label", "history", "query", "positive")
"""Our names of the columns of a labelled row, and of a pair of texts: the keys of
``data.data_map``."""


def data_problems(data: DataConfig) -> Iterator[str]:
    """One message for each name of a column that llmx does not know, and for each second setting of
    the evaluation rows: both would be ignored silently."""
    settings = {key: getattr(data, key) for key in ("eval_path", "eval_fraction", "eval_samples")}
    if len(set_keys := [f"data.{key}={value}" for key, value in settings.items() if value]) > 1:
        yield f"{' and '.join(set_keys)}: each says which rows are evaluated. Keep one of them."
    groups = [("data.columns", data.columns, COLUMNS), ("data.data_map", data.data_map, MAPPED)]
    groups += [
        (f"data.sources[{i}].columns", source.columns, COLUMNS)
        for i, source in enumerate(data.sources)
    ]
    for where, mapping, columns in groups:
        for name in mapping:
            if name not in columns:
                yield (
                    f"{where}.{name}: no such column.{did_you_mean(name, columns)} The keys are "
                    f"{', '.join(columns)}; the values are the names in your data."
                )


RESERVED = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE LOCAL_WORLD_SIZE CROSS_RANK CROSS_SIZE NODE_RANK "
    "MASTER_ADDR MASTER_PORT DS_ENV_FILE DS_ACCELERATOR LLMX_RUN_TOKEN LLMX_GPUS "
    "LLMX_ROLLOUT_SERVERS LLMX_ROLLOUT_LISTEN CUDA_VISIBLE_DEVICES PDSH_RCMD_TYPE "
    "PDSH_SSH_ARGS_APPEND"
).split()
"""Variables that the launch sets itself."""
_INSTEAD = {
    "MASTER_ADDR": ", and set hardware.master_addr=ADDRESS",
    "MASTER_PORT": ", and set launch.master_port=PORT",
    "CUDA_VISIBLE_DEVICES": ", and list the gpus of the host in the hardware file, or export it on "
    "the host",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ONE_LINE = re.compile(f"[^{CONTROL}{SURROGATES}]*")


def launch_problems(
    launch: LaunchConfig, hardware: HardwareConfig, servers: Sequence[HostConfig] = ()
) -> Iterator[str]:
    """Every broken rule: value, rule and fix. ``servers``: hosts beside those that train."""
    yield from env_problems(hardware.env, key="hardware.env")
    yield from env_problems(launch.env, key="launch.env")
    for host in (*hardware.hosts, *servers):
        yield from env_problems(host.env, key=f"hardware.hosts ({shown(host.name)}).env")
    if launch.queue and launch.allow_busy:
        yield (
            "launch.queue=true and launch.allow_busy=true: one waits for the other runs on the "
            "hosts, the other starts beside them. Leave one out."
        )
    for index, path in enumerate(launch.sync_extra):
        if not path.startswith(("/", "~")):
            yield (
                f"launch.sync_extra[{index}]={path}: must be an absolute path, as it is the same "
                "on every host. Write e.g. /data/more."
            )
    if launch.transport != "auto":
        # By its name: the schema does not depend on what launches.
        yield from TRANSPORTS.load(launch.transport)().problems(launch, hardware)


def env_problems(env: Mapping[str, str], *, key: str) -> Iterator[str]:
    """Every problem of the variables of a config (``key``: ``launch.env`` or ``hardware.env``)."""
    for name, value in env.items():
        where = f"{key}.{name}"
        if not _NAME.fullmatch(name):
            yield f"{where}: is not the name of a variable. Use letters, digits and _."
        elif is_secret(name, value):
            yield (
                f"{where}: looks like a secret, and every user of a host can read the variables of "
                "the ranks. Leave it out: W&B and its key stay in the supervisor, and a gated "
                "model is downloaded before the run (set model.path to the directory)."
            )
        elif name in RESERVED:
            yield f"{where}: is set by llmx. Leave it out{_INSTEAD.get(name, '')}."
        elif not is_one_line(value):
            yield (
                f"{where}: has a line break or another control character, which cannot be passed "
                "to other hosts. Write it on one line."
            )


def is_variable_name(name: str) -> bool:
    """Whether a shell takes ``name`` for a variable."""
    return _NAME.fullmatch(name) is not None


def is_one_line(value: str) -> bool:
    """Whether ``value`` is text without control characters."""
    return _ONE_LINE.fullmatch(value) is not None
