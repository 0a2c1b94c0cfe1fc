"""The schema: every key a user can set, its type, its default and what it means.

Plain dataclasses of simple serialisable values; no Hydra, no OmegaConf, no torch. The same
classes type the composed config and a snapshot read back years later. Field docs stand
under the fields; what a field takes (a closed set, a range, a length) stands beside it and is
checked when a config is read (``llmx.config.fields``).

``python -m llmx --cfg job`` prints the composed values.
"""

# ruff: noqa: RUF009 - the helpers return dataclasses.field()
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmx.config.addresses import INTERFACE, PATH, USER
from llmx.config.fields import (
    AUTO,
    Range,
    Text,
    choice,
    choice_or,
    choice_or_flag,
    choice_or_null,
    choice_with_former,
    choices,
    indices,
    items,
    mapping,
    number,
    number_or_auto,
    numbers,
    text,
)
from llmx.config.tasks import shipped_tasks

SCHEMA_VERSION = 3

MAX_STEPS = 10**9
MAX_SAMPLES = 10**12
MAX_ELEMENTS = 10**12
"""Parameters, or elements of a buffer: a thousand billion."""
MAX_SECONDS = 10**7
"""About four months."""
_FILE_NAME = Text(
    100, pattern=r"[^/]*", rule="not contain a slash (it becomes part of a directory's name)"
)

_USER = Text(64, pattern=USER, rule="be the name of a user: letters, digits and . _ - + @")
_INTERFACE = Text(
    15, pattern=INTERFACE, rule="be one network interface, as `ip -brief address` lists them"
)
_IDENTITY_FILE = Text(pattern=PATH, rule="be a path without quotes and backslashes")


@dataclass
class ModelConfig:
    """Which network, and whether its weights are loaded or drawn at random."""

    name: str = text("", _FILE_NAME)
    """A short name for tables and run names."""
    kind: str = choice("hf", "llama", "qwen3", "gpt2", "opt", "bert", "megatron-bert")
    """Architecture. ``hf`` takes it from ``path``; the others need no network to plan or to
    train from scratch."""
    path: str | None = None
    """A Hub id or a local directory. Weights are loaded from it when ``init`` is pretrained."""
    revision: str | None = None
    """A commit, tag or branch of ``path`` on the Hub; null: its main branch."""
    init: str = choice("pretrained", "scratch")
    """``pretrained`` loads weights from ``path``; ``scratch`` draws them at random."""
    tokenizer: str | None = None
    """A Hub id or a local directory; default: ``path``. ``demo`` is the bundled tokenizer."""
    trust_remote_code: bool = False
    """Let the Hub repository's own Python code run, on every host. Only for a repository you
    trust."""
    config: dict[str, Any] = mapping(example="{hidden_size: 1024, num_hidden_layers: 12}")
    """Values of the Hugging Face config (``hidden_size``, ``num_hidden_layers``, ...). The
    network itself when from scratch, overrides otherwise; also what the memory plan reads."""
    license: str | None = None
    """The licence in the model card (an id of the Hub, ``apache-2.0``); null: that of the base,
    where its own card says it."""
    trained_dtype: str | None = choice_or_null("fp32", "bf16", "fp16")
    """The precision the published weights were trained in, for a warning."""
    attention: str = choice(
        "auto",
        "varlen",
        "segments",
        "sdpa",
        "eager",
        "flash_attention_2",
        "flash_attention_3",
        "flex_attention",
    )
    """``auto`` takes the fastest that the devices and the packing allow; the others are what
    ``transformers`` calls ``attn_implementation``."""
    activation_checkpointing: str = choice_or_flag(
        "none", "selective", "full", "auto", true="full", false="none"
    )
    """What the backward pass computes again instead of keeping it: with ``selective`` all but the
    results of matrix products and attention (little time); with ``full`` whole blocks (least
    memory, about a third more time). ``true`` is ``full``, ``false`` is ``none``. ``auto``: the
    plan chooses the fastest that fits (docs/planner.md)."""
    fused_loss: bool | None = None
    """Compute the output head and the cross entropy together, a chunk of target positions at a
    time, so that the logits are never whole in memory. Null: on for CUDA, off for CPU."""
    liger_kernel: bool | None = None
    """Liger-Kernel's fused RMSNorm, rotary embedding and SwiGLU (CUDA; ``pip install liger-kernel``
    on every host). Null: used where it is installed everywhere and a tiny model of the same config
    has the same loss and gradient with it; true refuses to train without it."""
    compile: bool = False
    """``torch.compile`` each block: fused kernels for norms, rotations and activation functions,
    for a minute or two at the start. Not at stage 3, whose gathering it cannot look through."""
    pad_vocab_to_multiple_of: int = number(64, minimum=1, maximum=65536)
    """Rows of the embedding when from scratch, or grown by ``add_tokens``; the export is cut back
    to the true size."""
    add_tokens: list[str] = items(
        maximum=10_000, example="['<think>', '</think>']", rule=Text(1000, multiline=True)
    )
    """Tokens that the tokenizer gets in addition, before the data is tokenized. They are found
    wherever they stand in a text. Their rows of a pretrained embedding and head begin as the mean
    of the others; beside an adapter embedding and head are then trained whole."""
    add_special_tokens: list[str] = items(
        maximum=10_000, example="['<|tool|>']", rule=Text(1000, multiline=True)
    )
    """The same as special tokens: the chat template writes them. In the text of a record they are
    plain text, and a completion is shown without them."""
    freeze: list[str] = items(maximum=1000, example="['*.embed_tokens.*', '*.layers.[0-3].*']")
    """Parameters that are not trained, as patterns of their names (``*``, ``?``, ``[0-3]``). A
    pattern that matches nothing is an error. They are kept and exported as they are."""


ALL_LINEAR = "all-linear"


@dataclass
class AdapterConfig:
    """What is trained beside frozen pretrained weights; ``kind=none`` trains the weights."""

    kind: str = choice("none", "lora")
    """``lora`` (the ``peft`` library) adds the product of two small matrices to the weights of
    linear layers and trains nothing else: gradients, optimizer and checkpoints are those of the
    adapter alone."""
    rank: int = number(16, minimum=1, maximum=65536)
    """The width between the two matrices."""
    alpha: float = number(32.0, above=0, maximum=10**6)
    """The product is multiplied by ``alpha / rank``."""
    dropout: float = number(0.0, minimum=0, below=1)
    """Of what goes into the first matrix, in training."""
    targets: list[str] = items(maximum=10_000, example="[q_proj, v_proj]")
    """Linear layers that are adapted, by their whole names or the ends of these (``q_proj``,
    ``layers.0.mlp.down_proj``). ``[all-linear]``: all but the output head."""
    rslora: bool = False
    """Multiply by ``alpha / sqrt(rank)`` instead, which keeps high ranks stable."""
    dora: bool = False
    """Train the length of each row of the adapted weights apart from its direction (DoRA). Slower:
    each forward pass computes the norms of all adapted weights."""
    lr: float | None = number(None, above=0, maximum=1000, example=2e-4)
    """The adapter's own peak learning rate, with the schedule of ``optim``; null: ``optim.lr``, or
    with ``optim.lr=auto`` that of the task (docs/training.md)."""
    quantize: str = choice("none", "nf4", "fp4")
    """Keep the frozen weights of linear layers in 4 bits (QLoRA, ``bitsandbytes``): a quarter of
    the memory of bf16, at the cost of unpacking them in each pass. CUDA, ZeRO stages 0 to 2.
    ``nf4`` suits weights that are normally distributed, as pretrained ones are."""
    double_quant: bool = True
    """With ``quantize``: the scales (one for 64 weights) in 8 bits, too, which saves 0.4 bits a
    weight."""
    modules_to_save: list[str] = items(maximum=1000, example="[embed_tokens, lm_head]")
    """Modules that are trained whole beside the adapter and saved with it, by their whole names or
    the ends of these; with the learning rate ``optim.lr``."""


FORMS = (
    "text",
    "alpaca",
    "sharegpt",
    "messages",
    "prompt_response",
    "labelled",
    "preference",
    "pair",
)


@dataclass
class SourceConfig:
    """One of several sources; what is not set is that of ``data``."""

    path: str = ""
    """A file, a directory, a glob, or a Hub id."""
    form: str = choice("auto", *FORMS)
    """How its rows are laid out, as ``data.form``."""
    text_key: str | None = None
    """As ``data.text_key``; null: the same."""
    columns: dict[str, str] = mapping(maximum=100, example="{instruction: question}")
    """As ``data.columns``, for this source."""
    weight: float = number(1.0, above=0, maximum=1000)
    """How often its rows are taken: 2 takes each twice, 0.5 about half of them (chosen by
    ``seed``). Never applied to rows held out for evaluation."""
    max_rows: int | None = number(None, minimum=1, maximum=MAX_SAMPLES, example=1000)
    """Read only its first so many rows."""
    subset: str | None = None
    """The subset (configuration) of a Hub data set."""
    split: str | None = None
    """The split of a Hub data set; default: that of ``data``."""


@dataclass
class DataConfig:
    """What to train on and how rows become samples of ``seq_len`` tokens."""

    name: str = text("", _FILE_NAME)
    """A short name for tables and for the directory of a tokenizer trained on it."""
    path: str = "demo"
    """A file, a directory, a glob, a Hub id (``owner/name``, or ``hub:name``); ``demo`` is the
    bundled set."""
    form: str = choice("auto", *FORMS)
    """How a row is laid out; ``auto`` recognises it from the keys of the first rows."""
    text_key: str = "text"
    """The key or column that holds the text (``form: text``)."""
    text_unit: str = choice("file", "line", "paragraph")
    """What a document is in a plain text file: the whole file, each line that is not empty, or
    each paragraph (between empty lines)."""
    columns: dict[str, str] = mapping(maximum=100, example="{instruction: question}")
    """Other column names, e.g. ``{instruction: question, output: answer}``."""
    ignore_columns: list[str] = items(maximum=100, example="[score]")
    """Columns that may be ignored although they change what a row means (``label``, ``images``,
    ``weight``, ...; docs/data.md); otherwise such rows are rejected. E.g. ``[score]``."""
    seq_len: int = number(1024, minimum=2, maximum=2**24)
    """Tokens of one sample. The one sequence length of the whole run."""
    packing: str = choice("best_fit", "concat", "none")
    """``best_fit`` packs whole rows into samples; ``concat`` joins documents with the EOS
    token and cuts at ``seq_len``; ``none`` makes one sample of one row."""
    layout: str = choice("auto", "packed", "padded")
    """How a sample's rows lie in a micro batch: ``packed`` into one line, isolated from each
    other, or ``padded``, each in a line of its own. ``auto`` packs where a trial on a tiny model
    of the same architecture shows that rows are isolated. Same loss."""
    pad_to_multiple_of: int | None = number(None, minimum=1, maximum=2**16, example=64)
    """A micro batch is as long as its longest line, rounded up to a multiple of this, and at most
    ``seq_len``. Null: 128 on CUDA, where few shapes are faster, 8 on a CPU."""
    template: str = choice(
        "auto",
        "chatml",
        "llama2",
        "llama3",
        "qwen",
        "alpaca",
        "vicuna",
        "human_assistant",
        "plain",
    )
    """``auto`` is the tokenizer's own chat template, else chatml. ``plain`` writes nothing around
    the turns but the EOS token after an answer: for prompts that are written out already."""
    system: str | None = text(None, Text(10**6, multiline=True), example="You are terse.")
    """A system message for rows that have none."""
    loss_on: str = choice("assistant", "all", "last")
    """The tokens that are trained on: every assistant turn, only the ``last`` one, or ``all``
    tokens, prompts included."""
    over_long: str = choice("split", "truncate", "drop", "error")
    """A row with more tokens than ``seq_len``: ``split`` makes several sequences of a document
    (``task=pretrain``, ``mlm``, ``distill``; nothing is lost) and truncates every other row. Counts
    are reported, and more than 2 % of the rows or tokens lost is a warning."""
    truncate_prompt: str = choice("left", "right")
    """Labelled rows over ``seq_len`` that are truncated: the label is never cut; the prompt loses
    its beginning (``left``) or its end (``right``)."""
    last_batch: str = choice("wrap", "drop", "short")
    """With ``task.epochs``, where the samples do not fill the last batch: ``wrap`` fills it with
    the first samples of a further epoch, ``drop`` leaves its samples out, ``short`` trains on
    fewer. The loss stays the mean over the target tokens of the step."""
    eval_path: str | None = None
    """A source for evaluation; without it, ``eval_samples`` or ``eval_fraction`` holds rows out."""
    eval_samples: int = number(0, minimum=0, maximum=MAX_SAMPLES)
    """Rows held out from ``path`` for evaluation (chosen by ``seed``)."""
    eval_fraction: float = number(0.0, minimum=0, below=1)
    """The same as a fraction of the rows: 0.05 holds 5 % out. At least one row."""
    max_rows: int | None = number(None, minimum=1, maximum=MAX_SAMPLES, example=1000)
    """Read only the first so many rows."""
    cache_dir: str | None = None
    """Where prepared data lies; default ``$LLMX_CACHE`` or ``~/.cache/llmx``."""
    num_workers: int = number(0, minimum=0, maximum=1024)
    """Cores that tokenize; 0 takes those of the host."""
    share_from_mib: float | None = number(64.0, minimum=0, maximum=10**9)
    """On several hosts: from how much source on each host prepares a shard of it, or one prepares
    it and sends it. Below, and with null, each host prepares all, which gives the same bytes."""
    sources: list[SourceConfig] = items(example="[{path: a.jsonl, weight: 2}]")
    """Several sources instead of ``path``, each with a weight and a limit."""
    subset: str | None = None
    """The subset (configuration) of a Hub data set."""
    split: str | None = None
    """The split of a Hub data set or of a ``save_to_disk`` directory; default: ``train``."""
    data_map: dict[str, str] = mapping(maximum=100, example="{prompt: question, label: answer}")
    """Labelled rows: ``{prompt: prompt, label: label_id, history: context_info}``; the label is
    the answer."""
    label_names: dict[str, str] = mapping(maximum=10**6, example="{0: negative, 1: positive}")
    """What a label is called in an answer, e.g. ``{0: negative, 1: positive}``."""
    on_bad_row: str = choice("fail", "skip")
    """``fail`` stops at a row that cannot be used; ``skip`` counts it and writes it with the
    reason to a file beside the prepared data."""
    deduplicate: bool = False
    """Take rows that are identical in what is trained only once; counts are reported."""


COMPLETION_METRICS = ("exact_match", "rouge1", "rouge2", "rougeL")


@dataclass
class EarlyStoppingConfig:
    """Ends training where a metric no longer improves."""

    patience: int | None = number(None, minimum=1, maximum=10**6, example=3)
    """Training ends after so many evaluations in a row without an improvement
    (``task.eval_every_steps``); null: never."""
    min_delta: float = number(0.0, minimum=0, maximum=10**9)
    """An improvement is more than this."""
    metric: str | None = text(
        None,
        Text(
            100,
            pattern=r"eval/[\w./@-]+",
            rule="be eval/NAME: eval/loss, or a metric of the task, e.g. eval/exact_match",
        ),
        example="eval/loss",
    )
    """What is looked at; null: ``checkpoint.metric``, with its ``checkpoint.mode``. Of another one
    the task says which direction is better."""


@dataclass
class TaskConfig:
    """What is learned, for how long, and what is reported on the way."""

    kind: str = choice_or(
        *shipped_tasks(),
        rule=Text(
            pattern=r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*",
            rule="be a class of your own, package.module:Class",
        ),
    )
    """``sft`` learns to answer (loss on completions); ``pretrain`` learns every token of text;
    ``classify`` learns labels, or a number, of texts; ``mlm`` learns to fill in hidden tokens
    (BERT); ``dpo`` learns to prefer the better of two answers; ``distill`` learns what a frozen
    teacher says of every next token. A task of your own is named as Python finds it
    (docs/tasks.md)."""
    code_path: str | None = None
    """The directory that holds the package of a task, or of metrics, of your own. Null: the
    directory where the command is typed, then PYTHONPATH. ``launch.sync=rsync`` brings the package
    along."""
    options: dict[str, Any] = mapping(example="{beta: 0.1}")
    """What the task itself takes: the fields of its ``Options``. ``task=sft`` has
    ``neftune_alpha``, ``dft``, ``z_loss`` and ``turn_weights`` (docs/tasks.md)."""
    steps: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=1000)
    """Optimizer steps; when set, it wins over ``epochs``."""
    epochs: float | None = number(None, above=0, maximum=10**6, example=3)
    """How often the data is gone through; fractions count. Used where ``steps`` is null."""
    log_every_steps: int = number(10, minimum=1, maximum=MAX_STEPS)
    """A line on the console, in ``metrics.jsonl`` and in trackers every so many steps."""
    evaluate: bool = True
    """Measure the held-out data, before and after training and every ``eval_every_steps``. False
    holds the same rows out and measures nothing."""
    eval_every_steps: int = number(0, minimum=0, maximum=MAX_STEPS)
    """0 evaluates only at the end (when there is evaluation data)."""
    eval_generate: int = number(0, minimum=0, maximum=10**6)
    """Eval prompts: held-out conversations completed before and after training (exact match, or
    ``eval_metrics``)."""
    eval_max_new_tokens: int = number(64, minimum=1, maximum=2**24)
    """New tokens of a completion at most (``eval_generate``)."""
    eval_metrics: list[str] = items(
        maximum=100,
        example="[exact_match, rougeL]",
        rule=Text(
            200,
            pattern=r"(" + "|".join(COMPLETION_METRICS) + r")|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*",
            rule=f"be {', '.join(COMPLETION_METRICS)}, or a function of your own, "
            "package.module:function",
        ),
    )
    """Metrics of these completions, at every evaluation: ``exact_match``, ``rouge1``, ``rouge2``,
    ``rougeL``, or a function of your own that takes the completions and the expected answers, two
    lists of texts, and gives a number (docs/evaluation.md). Empty: exact match, before and after
    training."""
    save_model: bool = True
    """Write the final model as a Hugging Face directory."""
    stop_at_step: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=100)
    """End after this step, with the schedule of the whole run: for a quick check."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    on_divergence: str = choice("stop", "skip", "rollback")
    """When the loss is not finite, or jumps, at a step, and again after a restart from the last
    checkpoint: ``stop`` with the cause, ``skip`` that step's samples, or ``rollback``: skip all
    samples from the checkpoint up to that step."""
    spike_factor: float | None = number(None, above=1, maximum=10**6, example=3)
    """A logged loss over so many times the median of the last 50 counts as divergence; null
    looks at losses that are not finite only."""


@dataclass
class ZeroConfig:
    """How DeepSpeed shards the optimizer state (1), the gradients (2), the parameters (3)."""

    stage: int = number_or_auto(2, minimum=0, maximum=3)
    """0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters. ``zero=stageN``
    sets it with what belongs to it. ``zero=auto``: the plan chooses stage and offload, the fastest
    that fits (docs/planner.md)."""
    offload_optimizer: str = choice("none", "cpu", "nvme")
    """Where the optimizer state lives and is updated: on the device, in host RAM (``cpu``), or on
    ``nvme_path``."""
    offload_param: str = choice("none", "cpu", "nvme")
    """Where parameters wait until a layer needs them (stage 3): ``none`` is the device."""
    nvme_path: str | None = None
    """A directory on a local NVMe disk of every host (offload to ``nvme``)."""
    hpz_partition_size: int = number(1, minimum=0, maximum=1024)
    """ZeRO++ hpZ: ranks that share a second copy of the parameters; 1 is off, 0 is all ranks
    of a host."""
    quantized_weights: bool = False
    """ZeRO++ qwZ (CUDA only)."""
    quantized_gradients: bool = False
    """ZeRO++ qgZ (no effect on one node)."""
    overlap_comm: bool | None = None
    """Null: on for CUDA, off for CPU."""
    grad_accum_dtype: str = choice("auto", "precision", "fp32", "bf16", "fp16")
    """In what gradients are summed over micro steps. ``auto``: fp32 where it costs no memory, or
    where there is memory for it and more than one micro step; else the run's precision.
    ``precision``: always the run's. Over 64 micro steps a gradient summed in bf16 is 0.7 % off, in
    fp32 0.1 %. Stage 0 sums in the run's precision only."""
    reduce_bucket_size: int | None = number(None, minimum=1, maximum=MAX_ELEMENTS, example=5e8)
    """Elements. Null: from the model's width and the free memory."""
    allgather_bucket_size: int | None = number(None, minimum=1, maximum=MAX_ELEMENTS, example=5e8)
    """Elements that stages 1 and 2 gather at once after a step. Null: as ``reduce_bucket_size``."""
    prefetch_bucket_size: int | None = number(None, minimum=0, maximum=MAX_ELEMENTS, example=5e7)
    """Elements that stage 3 fetches ahead of use. Null: from the model's width."""
    param_persistence_threshold: int | None = number(
        None, minimum=0, maximum=MAX_ELEMENTS, example=1e5
    )
    """Stage 3 keeps parameters with fewer elements whole on every rank. Null: from the model's
    width."""
    max_live_parameters: int = number(1_000_000_000, minimum=0, maximum=MAX_ELEMENTS)
    """Parameters that stage 3 keeps gathered on a device at once, at most."""
    max_reuse_distance: int = number(1_000_000_000, minimum=0, maximum=MAX_ELEMENTS)
    """Stage 3 keeps a parameter that is needed again within so many parameters."""
    sub_group_size: int = number(1_000_000_000, minimum=1, maximum=MAX_ELEMENTS)
    """Parameters that stage 3 updates at once: less needs less memory in the step."""
    pin_memory: bool = True
    """Page-locked host memory for offloading: faster copies, memory that cannot be swapped."""
    extra: dict[str, Any] = mapping(example="{zero_optimization: {round_robin_gradients: true}}")
    """Further keys of DeepSpeed's JSON, checked against what DeepSpeed accepts, e.g.
    ``zero.extra.zero_optimization.round_robin_gradients=true``."""


@dataclass
class DeviceConfig:
    """One type of accelerator, from its data sheet."""

    accelerator: str = choice("cuda", "cpu")
    """What drives it: ``cuda``, or ``cpu`` for ranks without a GPU."""
    memory_gib: float = number(0.0, minimum=0, maximum=10**6, example=80)
    """Memory of one device, GiB; the plan holds its prediction against it."""
    precisions: list[str] = choices("fp32", "bf16", "fp16")
    """What the device computes natively; default: what its ``compute_capability`` has."""
    compute_capability: float = number(0.0, minimum=0, maximum=100, example=8.0)
    """NVIDIA's number of the generation: 7.0 for a V100, 8.0 for an A100, 9.0 for an H100. 0 is not
    known."""
    peak_tflops: dict[str, float] = mapping(
        maximum=10, example="{bf16: 312}", values=Range(above=0, maximum=10**6)
    )
    """Dense peak by precision, TFLOP/s; the denominator of MFU."""
    memory_gb_per_s: float = number(0.0, minimum=0, maximum=10**6, example=2000)
    """Memory bandwidth, GB/s."""
    link_gb_per_s: float = number(0.0, minimum=0, maximum=10**6, example=300)
    """To the other devices of its host (NVLink, PCIe), GB/s in one direction, for predicted times.
    0: as over PCIe 4."""
    host_link_gb_per_s: float = number(0.0, minimum=0, maximum=10**6, example=32)
    """To its host's memory (PCIe), GB/s in one direction, for the predicted time of offloading. 0:
    as over PCIe 4."""
    activation_checkpointing: str | None = choice_or_null(
        "none", "selective", "full", true="full", false="none"
    )
    """``model.activation_checkpointing`` of the ranks on this type of device; null: that of the
    run. For small devices beside large ones, at ZeRO stages 0 to 2 (docs/unequal.md)."""


@dataclass
class HostConfig:
    """One machine."""

    name: str = ""
    """What the hostfile calls it, one word; default: ``address``."""
    address: str | None = None
    """Where the other hosts reach it: a DNS name, IPv4 or IPv6; default: ``name``."""
    ssh_port: int = number(22, minimum=1, maximum=65535)
    """Where its sshd listens."""
    user: str | None = text(None, _USER)
    """Who logs in there; default: whoever starts the run."""
    identity_file: str | None = text(None, _IDENTITY_FILE)
    """The private key for it, on this machine; default: what ssh takes."""
    slots: int = number(1, minimum=1, maximum=1024)
    """Ranks on this host, one a device."""
    device_indices: list[int] = indices(maximum=1024, example=[2, 3])
    """Which of its devices, one for each slot, by index (``nvidia-smi -L``); empty: the first ones.
    For GPUs, on this machine and over ssh (pdsh)."""
    device: str = ""
    """A key of ``hardware.devices``."""
    interface: str | None = text(None, _INTERFACE)
    """Network interface towards the other hosts (NCCL/GLOO_SOCKET_IFNAME)."""
    memory_gib: float | None = number(None, above=0, maximum=10**6, example=512)
    """Host RAM, for the offload plan."""


@dataclass
class HardwareConfig:
    """The cluster: hosts and what is in them."""

    name: str = ""
    """A short name for tables."""
    kind: str = choice("static", "local", "hostfile")
    """``static`` lists hosts; ``local`` detects this machine; ``hostfile`` reads ``path``."""
    path: str | None = None
    """An existing hostfile (``kind: hostfile``)."""
    device: str | None = None
    """The device type of every host that does not name its own (needed with a hostfile)."""
    ssh_port: int = number(22, minimum=1, maximum=65535)
    """Default ssh port of hosts read from a hostfile."""
    user: str | None = text(None, _USER)
    """Default ssh user of hosts read from a hostfile."""
    interface: str | None = text(None, _INTERFACE)
    """Default interface of hosts read from a hostfile."""
    slots: int | None = number(None, minimum=1, maximum=1024, example=4)
    """Use only so many devices of each host."""
    hosts: list[HostConfig] = items(maximum=4096, example="[{name: node-a, slots: 8}]")
    """The machines, in the order of their ranks (``kind: static``)."""
    devices: dict[str, DeviceConfig] = mapping(
        example="{mine: {accelerator: cuda, memory_gib: 80}}"
    )
    """Device types by name, from the makers' data sheets; add yours beside the known ones."""
    master_addr: str | None = None
    """Where rank 0 is reached; default: the address of the first host."""
    network_gbit_per_s: float | None = number(None, above=0, maximum=10**6, example=100)
    """Network of each host towards the others, Gbit/s in one direction, for predicted times: of
    all its interfaces that NCCL uses. Null: 10 is assumed, and said."""
    price_per_hour: dict[str, float] = mapping(
        maximum=100, example="{a100_80g: 1.9}", values=Range(minimum=0, maximum=10**6)
    )
    """What one device costs an hour, by device type, in any currency; ``plan`` then says what the
    run costs."""
    env: dict[str, str] = mapping(maximum=100, example="{NCCL_DEBUG: INFO}", rule=Text())
    """Variables of this cluster's ranks, e.g. ``NCCL_IB_DISABLE: "1"``. Allow-listed."""


@dataclass
class OptimConfig:
    """Optimizer, learning rate and its schedule: pure functions of the step."""

    kind: str = choice(
        "adamw", "cpu_adam", "fused_adam", "lion", "sgd", "muon", "adafactor", "adam8bit"
    )
    """``adamw`` is PyTorch's, as one fused kernel on CUDA and for an offloaded optimizer; it needs
    no compiler. ``cpu_adam`` and ``fused_adam`` are DeepSpeed's extensions. ``lion`` keeps one
    number a parameter instead of two, and wants a learning rate 3 to 10 times smaller. ``muon``
    makes the updates of the matrices inside the layers orthogonal, one number a parameter; AdamW
    does the rest. ``adafactor`` keeps a row and a column of each matrix; stage 0 only.
    ``adam8bit`` is AdamW with moments in 8 bits (``bitsandbytes``): 2 bytes a parameter instead of
    8; CUDA, stage 0 only."""
    lr: float = number_or_auto(AUTO, above=0, maximum=1000, example=2e-5)
    """The peak learning rate: reached at the end of the warm-up. ``auto``: by the task, and by
    whether weights are pretrained, from scratch or an adapter (docs/training.md). A number holds
    for an adapter, too."""
    betas: list[float] = numbers([0.9, 0.999], length=2, minimum=0, below=1)
    """AdamW's decay rates of the two moments; Lion's of the update and of its momentum."""
    eps: float = number(1e-8, above=0, maximum=1)
    """AdamW's term in the denominator."""
    weight_decay: float = number(0.0, minimum=0, maximum=100)
    """Decoupled weight decay of matrices; biases and norms do not decay."""
    muon_lr: float | None = number(None, above=0, maximum=1000, example=0.02)
    """``muon``: the peak learning rate of the matrices inside the layers; null: ``lr``."""
    muon_momentum: float = number(0.95, minimum=0, below=1)
    """``muon``: the decay rate of its momentum."""
    muon_adjust_lr: str = choice("match_rms_adamw", "original")
    """``muon``: updates as large as AdamW's, so that AdamW's ``lr`` fits (0.2 sqrt(longer side)),
    or ``original`` (sqrt(rows / columns), at least 1), which wants a ``muon_lr`` of about 0.02."""
    layer_decay: float | None = number(None, above=0, maximum=1, example=0.9)
    """Layer-wise learning rates: the head has ``lr``, the last layer ``lr * layer_decay``, each
    layer below it that much less again, the embeddings least. 0.8 to 0.95 is usual for fine-tuning
    an encoder. Null: one rate for all."""
    lr_scale: dict[str, float] = mapping(
        maximum=1000,
        example="{*.embed_tokens.*: 0.1}",
        values=Range(above=0, maximum=10**6),
    )
    """Factors of the learning rate by patterns of parameter names (``*``, ``?``, ``[0-3]``), beside
    ``layer_decay``. A name that several match has their product; a pattern that matches nothing is
    an error."""
    clip_norm: float = number(1.0, minimum=0, maximum=10**6)
    """Global gradient norm; 0 does not clip."""
    schedule: str = choice(
        "cosine", "linear", "constant", "wsd", "polynomial", "cosine_restarts", "one_cycle"
    )
    """After the warm-up: ``cosine``, ``linear`` or ``polynomial`` decay to ``lr * min_lr_ratio``;
    ``constant``; ``wsd`` stays at ``lr`` and decays at the end (warm-up, stable, decay);
    ``cosine_restarts`` jumps back to ``lr`` on the way; ``one_cycle`` rises and falls on cosines
    (PyTorch's ``OneCycleLR``; the momentum is not cycled). docs/training.md has the values."""
    warmup_steps: int | None = number(None, minimum=0, maximum=MAX_STEPS, example=100)
    """Steps of linear warm-up, 0 allowed; when set, it wins over ``warmup_fraction``."""
    warmup_fraction: float | None = number(None, minimum=0, maximum=1, example=0.03)
    """Warm-up as a part of all steps, where ``warmup_steps`` is null; null: none. The first update
    has ``lr / warm-up steps``."""
    decay_end_fraction: float = number(1.0, minimum=0, maximum=1)
    """The schedule reaches its floor at this part of all steps, and stays there."""
    min_lr_ratio: float = number(0.0, minimum=0, maximum=1)
    """The floor, as a part of ``lr``."""
    decay_fraction: float = number(0.1, above=0, maximum=1)
    """``wsd``: how long the decay is, as a part of all steps."""
    decay_shape: str = choice("linear", "cosine", "1-sqrt")
    """``wsd``: how it falls."""
    decay_power: float = number(1.0, above=0, maximum=100)
    """``polynomial``: the power of the part that is left; 1 is ``linear``."""
    cycles: int = number(2, minimum=1, maximum=10**6)
    """``cosine_restarts``: cosines from ``lr`` to the floor, of equal length; 1 is ``cosine``."""
    start_lr_ratio: float = number(0.04, minimum=0, maximum=1)
    """``one_cycle``: the first update's part of ``lr``."""


@dataclass
class BatchConfig:
    """One batch algebra: global batch = sum over ranks of the micro batch x accumulation."""

    global_batch: int | None = number(None, minimum=1, maximum=2**24, example=64)
    """Samples of one optimizer step. Give this, ``tokens_per_step``, or ``accumulation``."""
    tokens_per_step: int | None = number(None, minimum=1, maximum=10**12, example=2e6)
    """Tokens of one optimizer step; rounded to whole samples of ``data.seq_len``."""
    micro_batch: int = number_or_auto(1, minimum=1, maximum=2**20)
    """Samples that the strongest device takes at once, at most. ``auto``: the plan chooses the
    fastest that fits (docs/planner.md)."""
    accumulation: int | None = number(None, minimum=1, maximum=2**20, example=8)
    """Micro steps of one optimizer step."""
    balance: str = choice_with_former(
        "auto",
        "off",
        "even",
        "spec",
        "measured",
        true="auto",
        false="off",
        former={"speed": "spec"},
    )
    """How the samples of a step are shared out: ``even``; in proportion to the speed of each rank,
    by the data sheet (``spec``) or as each rank measures it at the start (``measured``). ``auto``:
    ``measured`` where device types differ, else ``even``. ``off``: ``even``, and the time that each
    rank computes is not measured either. docs/unequal.md."""
    rebalance: bool = False
    """Measure on while training, and share out anew where a device gets slower or faster for good
    (throttling, a neighbour): at a step boundary, kept in ``balance.json``, repeated by resume and
    reproduce. ZeRO stages 0 to 2."""
    weights: dict[str, float] = mapping(
        example="{a100_40g: 2.5, v100_32g: 1}",
        values=Range(above=0, maximum=10**6),
    )
    """Relative speeds that you know, by host name or device type; of those not named: 1. With
    ``balance=auto`` only."""


@dataclass
class KeepConfig:
    """Which checkpoints stay; what none of the three names is removed after the next commit."""

    last: int = number(2, minimum=1, maximum=10**6)
    """The newest so many, at least 1."""
    best: int = number(0, minimum=0, maximum=10**6)
    """The best so many by ``checkpoint.metric``."""
    every: int = number(0, minimum=0, maximum=MAX_STEPS)
    """Every checkpoint whose step is a multiple of this; 0 is none."""


@dataclass
class CheckpointConfig:
    """When the training state is saved, and what is kept of it."""

    every_steps: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=500)
    """A checkpoint at every multiple of so many steps."""
    every_minutes: float | None = number(None, above=0, maximum=10**6, example=30)
    """A checkpoint when the last one is so old. Both may be set; neither saves on the way."""
    at_end: bool = False
    """Also after the last step, so that the run can be made longer."""
    on_signal: bool = True
    """Also when the run is asked to end (Ctrl-C, SIGTERM, SIGUSR1), before it does."""
    background: str = choice("auto", "always", "never")
    """Copy the state to host memory and write it while training goes on: ``auto`` where the
    host's free memory allows it."""
    metric: str = text(
        "eval/loss",
        Text(
            100,
            pattern=r"(eval|train)/[\w./@-]+",
            rule="be eval/NAME or train/NAME, a value of the lines of metrics.jsonl: eval/loss, "
            "train/loss, or a metric of the task, e.g. eval/exact_match",
        ),
    )
    """What ``best`` goes by: ``eval/loss``, ``train/loss``, or a metric that the task measures
    (``eval/exact_match``)."""
    mode: str = choice("auto", "min", "max")
    """Whether less (``min``) or more (``max``) of ``metric`` is better; ``auto``: as the task
    declares it, and less of a loss."""
    keep: KeepConfig = field(default_factory=KeepConfig)


@dataclass
class SlurmConfig:
    """What ``srun`` is asked for when ``launch.transport=slurm``."""

    partition: str | None = None
    """``srun --partition``."""
    account: str | None = None
    """``srun --account``."""
    time_limit: str | None = text(
        None,
        Text(
            100,
            pattern=r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED",
            rule="be a time as Slurm writes it: minutes, hours:minutes:seconds or "
            "days-hours:minutes:seconds",
        ),
        example="1-12:00:00",
    )
    """As Slurm writes it, e.g. ``1-12:00:00``."""
    cpus_per_task: int | None = number(None, minimum=1, maximum=4096, example=8)
    """``srun --cpus-per-task``: cores of a rank; null: those of the allocation, or of the smallest
    host, shared out among its ranks."""
    extra_args: list[str] = items(maximum=100, example='["--qos=high"]')
    """Further arguments of ``srun``."""


@dataclass
class LaunchConfig:
    """How ranks are started on the hosts, watched and ended."""

    transport: str = choice("auto", "local", "pdsh", "openmpi", "slurm")
    """``auto`` is local for this machine alone, else pdsh."""
    sync: str = choice("none", "rsync")
    """``rsync`` copies code, model and data to the same path on every host."""
    sync_extra: list[str] = items(example="[/data/more]")
    """Further absolute paths to copy."""
    sync_exclude: list[str] = items(example='["*.tmp"]')
    """Patterns of rsync: matching files of code, data and model are not copied. Credentials
    (``.env``, ``.netrc``, ``.ssh``, ``*.pem``, ...) and what git ignores never are."""
    python: str | None = None
    """Python on the hosts; default: this one's path."""
    master_port: int = number(0, minimum=0, maximum=65535)
    """0 takes a free port of the master host."""
    env: dict[str, str] = mapping(maximum=100, example="{NCCL_DEBUG: INFO}", rule=Text())
    """Variables of this run's ranks. Allow-listed; secrets are refused."""
    start_timeout_s: float = number(900.0, above=0, maximum=MAX_SECONDS)
    """From the start to the first sign of life of every rank."""
    heartbeat_timeout_s: float = number(60.0, above=0, maximum=MAX_SECONDS)
    """A host whose agent is silent for so long counts as lost."""
    comm_timeout_s: float = number(14400.0, above=0, maximum=MAX_SECONDS)
    """How long a rank waits for the others in one collective (NCCL, gloo) before it gives up. Long,
    since ranks rightly wait while one of them exports a model or reads from a slow disk; dead and
    hanging ranks are found sooner, by ``heartbeat_timeout_s`` and ``hang_timeout_s``."""
    stop_grace_s: float = number(20.0, above=0, maximum=MAX_SECONDS)
    """For the ranks to save and exit when the run is asked to end; after it they are killed."""
    max_restarts: int = number(3, minimum=0, maximum=10**6)
    """Automatic restarts in a row without a new checkpoint; 0 never restarts."""
    restart_backoff_s: float = number(10.0, minimum=0, maximum=MAX_SECONDS)
    """Before the first restart; doubled for each further one without progress."""
    restart_backoff_max_s: float = number(600.0, minimum=0, maximum=MAX_SECONDS)
    """The longest wait before a restart."""
    hang_timeout_s: float | None = number(None, minimum=0, maximum=MAX_SECONDS, example=1800)
    """Without a step for so long a run counts as hung; null: 20 times the usual step, at least
    600 s. 0 never."""
    host_wait_s: float = number(1800.0, minimum=0, maximum=MAX_SECONDS)
    """How long to wait for a lost host to come back."""
    elastic: bool = False
    """Go on with the hosts that are left, at the same global batch, when one is lost."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    openmpi_args: list[str] = items(maximum=100, example='["--mca btl_tcp_if_include eth0"]')
    """Further arguments of ``mpirun`` (``transport: openmpi``)."""


@dataclass
class TrackingConfig:
    """Where metrics are sent. ``metrics.jsonl`` in the run directory is the truth."""

    kinds: list[str] = choices("wandb", "tensorboard", "csv", "mlflow", "swanlab")
    """Trackers that get the metrics; empty: none."""
    project: str = "llmx"
    """The project of Weights & Biases and SwanLab, the experiment of MLflow."""
    entity: str | None = None
    """The user or team of Weights & Biases, the workspace of SwanLab; null: the key's own."""
    group: str | None = None
    """Groups runs in Weights & Biases and SwanLab; a tag in MLflow."""
    tags: list[str] = items(maximum=100, example="[first, long]", rule=Text(max_length=64))
    """Tags of the run in Weights & Biases, MLflow and SwanLab."""
    mode: str = choice("auto", "online", "offline")
    """``auto``: online with a key and a server that answers, else offline."""
    uri: str | None = None
    """MLflow's server (``http://host:5000``) or store (``sqlite:////data/mlflow.db``, a directory);
    null: MLFLOW_TRACKING_URI, else a store in the run directory."""
    finish_timeout_s: float = number(30.0, minimum=0, maximum=MAX_SECONDS)
    """How long the end of the run may wait for a tracker."""


@dataclass
class TokenizerConfig:
    """A tokenizer to train: ``python -m llmx tokenizer data=... tokenizer.vocab_size=64000``."""

    kind: str = choice("bbpe", "sentencepiece", "wordpiece")
    """``bbpe`` is a byte-level BPE (GPT-2, Qwen, Llama 3); ``sentencepiece`` a BPE over
    characters that falls back to bytes (Llama 2); ``wordpiece`` is BERT's, with ``[MASK]``."""
    vocab_size: int = number(32000, minimum=300, maximum=10**7)
    """Special tokens included; reported with its padding to 64."""
    output: str | None = None
    """The directory to write; default ``tokenizers/<data>-<kind>-<vocab_size>`` here."""
    max_bytes: int = number(256 << 20, minimum=1 << 16, maximum=2**50)
    """Text to learn from at most; more is sampled row by row, by ``seed``."""
    max_memory_gib: float = number(4.0, minimum=0.5, maximum=10**6)
    """What the training may take, about: the sample is made smaller until its different words
    fit. English rarely comes near; Chinese, where a sentence is a word, does."""
    min_frequency: int = number(2, minimum=1, maximum=10**9)
    """Pairs that are rarer are not merged (bbpe, wordpiece)."""
    character_coverage: float = number(0.9995, minimum=0.98, maximum=1)
    """Part of all characters that get a token of their own (sentencepiece); the rest is bytes."""
    lowercase: bool = False
    """Letters are made small and lose their accents, as in ``bert-base-uncased`` (wordpiece)."""


FAILURES = (
    "oom", "nan", "comm", "host_lost", "disk_full", "config", "data", "interrupted", "hang",
    "crash",
)  # fmt: skip
"""The outcomes of a run that did not end well."""


@dataclass
class SweepConfig:
    """How the trials of a sweep (``-m``, ``sweep``) are run and compared (docs/sweeps.md)."""

    trial_steps: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=20)
    """Short trials: each ends after so many steps, with the schedule of the whole run, and writes
    neither checkpoints nor a model. Held-out data is measured only if ``objective`` asks for it."""
    objective: str | None = text(
        None,
        Text(
            100,
            pattern=r"tokens_per_s|(eval|train)/[\w./@-]+",
            rule="be tokens_per_s, train/loss, eval/loss, or a metric of the task, e.g. "
            "eval/exact_match",
        ),
        example="tokens_per_s",
    )
    """What the best trial is best at. Null: ``tokens_per_s`` of short trials, else
    ``checkpoint.metric``."""
    halving: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=200)
    """Successive halving for a loss or a metric: all trials train so many steps, the better half
    goes on from its checkpoints to twice as many, and so on; the last one trains in full. Null:
    every trial trains in full."""
    halving_factor: int = number(2, minimum=2, maximum=100)
    """One of so many trials goes on, and to so many times the steps."""
    prune: bool = True
    """Leave out trials that cannot fit by the memory plan, that need more than one that ran out of
    memory, and that are the same as another one."""
    fail_fast: bool = False
    """End the sweep at the first trial that fails; trials that run beside it are stopped. A
    ``tune`` goes on where a trial runs out of memory: that tells it how much fits."""
    slots_per_trial: int | None = number(None, minimum=1, maximum=10**6, example=1)
    """Trials at the same time: each gets so many free slots of ``hardware``, of one device type, on
    one host where they fit. Null: each has all of them, one after another."""
    max_jobs: int = number(4, minimum=1, maximum=10**4)
    """Slurm (``launch.transport=slurm``), outside an allocation: trials that wait in the queue or
    run at a time, each a job of its own."""
    max_trials: int | None = number(None, minimum=1, maximum=10**4, example=20)
    """A search (``tune``) ends after so many trials; null: when nothing promising is left."""
    max_minutes: float | None = number(None, above=0, maximum=10**6, example=60)
    """A search starts no further trial after so long."""
    resume: bool = True
    """The same command, typed again in the same directory, continues a sweep that is not finished;
    false starts a new one."""
    retry: list[str] = choices(*FAILURES, "refused")
    """Which failed trials run again when a sweep is continued; empty: all of them. ``refused`` were
    never started."""


@dataclass
class Experiment:
    """One run, whole. What ``config.yaml`` of a run directory holds."""

    schema_version: int = number(SCHEMA_VERSION, minimum=1, maximum=10**6)
    name: str = ""
    """A short name for tables and trackers; default: that of the run directory."""
    run_dir: str = ""
    """Absolute path of the run directory."""
    seed: int = number(0, minimum=0, maximum=2**63 - 1)
    """Fixes the sample order, scratch weights, dropout and which rows are held out. Same seed, same
    config: same numbers."""
    precision: str = choice("auto", "fp32", "bf16", "fp16")
    """``auto`` is the best that the weakest device supports."""
    deterministic: bool | None = None
    """Null: on for CPU, off for CUDA."""
    dry_run: bool = False
    """Render the run directory, print the plan and the command, launch nothing."""
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
