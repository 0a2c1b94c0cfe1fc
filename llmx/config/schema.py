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

from llmx.config.accelerators import ACCELERATORS
from llmx.config.addresses import FINGERPRINT, INTERFACE, PATH, REACH, USER
from llmx.config.fields import (
    AUTO,
    Range,
    Text,
    choice,
    choices,
    file_path,
    items,
    mapping,
    number,
    numbers,
    text,
)
from llmx.config.plugins import FORMATS, OPTIMIZERS, TRACKERS, TRANSPORTS
from llmx.config.tasks import shipped_tasks

SCHEMA_VERSION = 1

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
_FINGERPRINT = Text(
    50, pattern=FINGERPRINT, rule="be a fingerprint of ssh-keygen -l: SHA256: and 43 characters"
)
_GPU = Text(
    100,
    pattern=r"[0-9]{1,4}|(GPU|MIG)-[0-9A-Za-z/-]+",
    rule="be a number (0), the UUID of a GPU (GPU-...) or the name of a MIG slice (MIG-...)",
)
_REACH = Text(260, pattern=REACH, rule="be ADDRESS:PORT, such as 198.51.100.7:30846")
_IDENTITY_FILE = Text(pattern=PATH, rule="be a path without quotes and backslashes")


@dataclass
class ModelConfig:
    """The network, and whether its weights are loaded or initialised at random."""

    name: str = text("", _FILE_NAME, example="qwen3_8b")
    """A short name for tables and run names."""
    kind: str = choice("hf", "llama", "qwen3", "gpt2", "opt", "bert", "megatron-bert")
    """Architecture. ``hf`` takes it from ``path``. The others need no internet access, to plan or
    to train from scratch."""
    path: str | None = file_path(None, example="Qwen/Qwen3-8B")
    """A Hub id or a local directory. Weights are loaded from it when ``init`` is pretrained."""
    revision: str | None = text(None, example="9c925d64d72725edaf899c6cb9c377fd0709d9c5")
    """A commit, tag or branch of ``path`` on the Hub. Null: its main branch."""
    init: str = choice("pretrained", "scratch")
    """``pretrained`` loads weights from ``path``; ``scratch`` initialises them at random."""
    tokenizer: str | None = file_path(None, example="tokenizers/mine")
    """A Hub id or a local directory; default: ``path``. ``demo`` is the bundled tokenizer."""
    trust_remote_code: bool = False
    """Run the Hub repository's own Python code, on every host. Only for a repository that you
    trust."""
    config: dict[str, Any] = mapping(example="{num_hidden_layers: 12}")
    """Values of the Hugging Face config (``hidden_size``, ``num_hidden_layers``, ...). They define
    a network from scratch, and override the config of ``path``."""
    resolved: dict[str, Any] = mapping(example="{model_type: llama, hidden_size: 1024}")
    """The whole config of the network: what transformers made of the file of ``path`` and of
    ``config``. llmx fills it in."""
    resolved_from: str | None = None
    """The fingerprint of the config.json that ``resolved`` was read from. llmx fills it in."""
    license: str | None = text(None, example="apache-2.0")
    """The licence for the model card, an id of the Hub (``apache-2.0``). Null: the licence of the
    base model, if its card names one."""
    trained_dtype: str | None = choice(None, "fp32", "bf16", "fp16")
    """The precision in which the published weights were trained. llmx warns if a model trained in
    bf16 is run in fp16."""
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
    """``auto`` takes the fastest implementation that the devices and the packing allow. The others
    are ``attn_implementation`` of ``transformers``."""
    activation_checkpointing: str = choice(
        "none", "selective", "full", "auto", true="full", false="none"
    )
    """Which activations the backward pass recomputes instead of keeping them. ``selective`` keeps
    the results of matrix products and attention and recomputes the rest (costs little time).
    ``full`` recomputes whole blocks (least memory, about a third more time). ``true`` is ``full``,
    ``false`` is ``none``. ``auto``: the plan chooses the fastest that fits (docs/planner.md)."""
    fused_loss: bool | None = None
    """Compute the output head and the cross entropy together, in chunks of target positions, so
    that the whole logits are never in memory. Null: on for CUDA, off for CPU."""
    liger_kernel: bool | None = None
    """Use Liger-Kernel's fused RMSNorm, rotary embedding and SwiGLU (CUDA; ``pip install
    liger-kernel`` on every host). Null: use it where every host has it and a tiny model of the same
    config has the same loss and gradient with it. True: refuse to train without it."""
    compile: bool = False
    """Apply ``torch.compile`` to each block. It fuses norms, rotations and activation functions,
    and takes a minute or two at the start. Not possible at ZeRO stage 3, because ``torch.compile``
    cannot trace how that stage gathers parameters."""
    pad_vocab_to_multiple_of: int = number(64, minimum=1, maximum=65536, example=128)
    """The number of embedding rows is rounded up to a multiple of this, if the model is from
    scratch or ``add_tokens`` adds rows. The export has the true size."""
    add_tokens: list[str] = items(
        maximum=10_000, example="['<think>', '</think>']", rule=Text(1000, multiline=True)
    )
    """Tokens to add to the tokenizer before the data is tokenized. They match anywhere in a text.
    Their rows of a pretrained embedding and head start as the mean of the other rows. With an
    adapter, embedding and head are then trained whole."""
    add_special_tokens: list[str] = items(
        maximum=10_000, example="['<|tool|>']", rule=Text(1000, multiline=True)
    )
    """Special tokens to add, in the same way. The chat template writes them. In the text of a
    record they are plain text, and completions are shown without them."""
    freeze: list[str] = items(maximum=1000, example="['*.embed_tokens.*', '*.layers.[0-3].*']")
    """Parameters that are not trained, as patterns of their names (``*``, ``?``, ``[0-3]``). A
    pattern that matches nothing is an error. Frozen parameters are saved and exported unchanged."""

    @property
    def network(self) -> dict[str, Any]:
        """Every known value of the network's config; ``config`` alone where there is no file."""
        return self.resolved or self.config

    @property
    def architecture(self) -> str:
        """The ``model_type`` of the network; empty where only its files would tell."""
        return str(self.network.get("model_type") or ("" if self.kind == "hf" else self.kind))


ALL_LINEAR = "all-linear"


@dataclass
class AdapterConfig:
    """The adapter that is trained beside frozen pretrained weights; ``kind=none`` trains the
    weights."""

    kind: str = choice("none", "lora")
    """``lora`` (the ``peft`` library) adds the product of two small matrices to the weights of
    linear layers and trains nothing else. Gradients, optimizer state and checkpoints contain only
    the adapter."""
    rank: int = number(16, minimum=1, maximum=65536, example=64)
    """The inner dimension of the two matrices."""
    alpha: float = number(32.0, above=0, maximum=10**6, example=16)
    """The product is multiplied by ``alpha / rank``."""
    dropout: float = number(0.0, minimum=0, below=1, example=0.05)
    """Dropout on the input of the first matrix, in training."""
    targets: list[str] = items(maximum=10_000, example="[q_proj, v_proj]")
    """Linear layers to adapt, by full name or by the end of a name (``q_proj``,
    ``layers.0.mlp.down_proj``). ``[all-linear]``: all except the output head."""
    rslora: bool = False
    """Multiply by ``alpha / sqrt(rank)`` instead, which keeps high ranks stable."""
    dora: bool = False
    """Train the norm of each row of the adapted weights separately from its direction (DoRA).
    Slower: each forward pass computes the norms of all adapted weights."""
    lr: float | None = number(None, above=0, maximum=1000, example=1e-4)
    """The peak learning rate of the adapter, with the schedule of ``optim``. Null: ``optim.lr``, or
    the task's default if ``optim.lr=auto`` (docs/training.md)."""
    quantize: str = choice("none", "nf4", "fp4")
    """Keep the frozen weights of linear layers in 4 bits (QLoRA, ``bitsandbytes``). They take a
    quarter of the memory of bf16, and are unpacked in each pass. Needs CUDA and ZeRO stage 0 to 2.
    ``nf4`` is made for normally distributed weights, as pretrained ones are."""
    double_quant: bool = True
    """With ``quantize``: keep the scales (one for 64 weights) in 8 bits, too. This saves 0.4 bits
    per weight."""
    modules_to_save: list[str] = items(maximum=1000, example="[embed_tokens, lm_head]")
    """Modules to train whole beside the adapter and save with it, by full name or by the end of a
    name. Their learning rate is ``optim.lr``."""


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
    """One of several sources. A key that is not set has the value of ``data``."""

    path: str = file_path("", example="chats.jsonl")
    """A file, a directory, a glob, or a Hub id."""
    form: str = choice("auto", *FORMS, rule=FORMATS)
    """The format of its rows, as in ``data.form``."""
    text_key: str | None = text(None, example="content")
    """As ``data.text_key``; null: that value."""
    columns: dict[str, str] = mapping(
        maximum=100, example="{instruction: question, output: answer}"
    )
    """As ``data.columns``, for this source."""
    weight: float = number(1.0, above=0, maximum=1000, example=2)
    """How often its rows are taken: 2 takes each row twice, 0.5 takes about half of them (chosen by
    ``seed``). Rows held out for evaluation are not weighted."""
    max_rows: int | None = number(None, minimum=1, maximum=MAX_SAMPLES, example=1000)
    """Read only the first rows of it, up to this number."""
    subset: str | None = text(None, example="en")
    """The subset (configuration) of a Hub dataset."""
    split: str | None = text(None, example="train")
    """The split of a Hub dataset; default: that of ``data``."""


@dataclass
class DataConfig:
    """The training data, and how rows become samples of ``seq_len`` tokens."""

    name: str = text("", _FILE_NAME, example="support_chats")
    """A short name for tables and for the directory of a tokenizer trained on it."""
    path: str = file_path("demo", example="chats.jsonl")
    """A file, a directory, a glob, or a Hub id (``owner/name``, or ``hub:name``). ``demo`` is the
    bundled data."""
    form: str = choice("auto", *FORMS, rule=FORMATS)
    """The format of a row. ``auto`` detects it from the keys of the first rows."""
    text_key: str = text("text", example="content")
    """The key or column that contains the text (``form: text``)."""
    text_unit: str = choice("file", "line", "paragraph")
    """How a plain text file is divided into documents: the whole file (of at most 8,000,000
    characters), each line that is not empty, or each paragraph (paragraphs are separated by empty
    lines)."""
    columns: dict[str, str] = mapping(
        maximum=100, example="{instruction: question, output: answer}"
    )
    """Other column names, e.g. ``{instruction: question, output: answer}``."""
    ignore_columns: list[str] = items(maximum=100, example="[score]")
    """Columns to ignore although they change what a row means (``label``, ``images``, ``weight``,
    ...; docs/data.md). Without this, such rows are rejected. E.g. ``[score]``."""
    seq_len: int = number(1024, minimum=2, maximum=2**24, example=4096)
    """Tokens of one sample. The whole run has this one sequence length."""
    packing: str = choice("auto", "best_fit", "concat", "none")
    """``best_fit`` packs whole rows into samples. ``concat`` joins documents with the EOS token and
    cuts at ``seq_len``. ``none`` makes one sample from each row. ``auto`` is ``none`` for a task
    that generates its samples (``grpo``, ``ppo``), else ``best_fit``."""
    layout: str = choice("auto", "packed", "padded")
    """How the rows of samples are placed in a micro batch. ``packed`` joins them into one line,
    isolated from each other; ``padded`` gives each row a line of its own. ``auto`` packs if a trial
    on a tiny model of the same architecture shows that rows are isolated. The loss is the same."""
    pad_to_multiple_of: int | None = number(None, minimum=1, maximum=2**16, example=64)
    """A micro batch is as long as its longest line, rounded up to a multiple of this, and at most
    ``seq_len``. Null: 128 on CUDA, where a small number of shapes is faster, 8 on a CPU."""
    template: str = choice(
        "auto", "chatml", "llama2", "llama3", "qwen", "alpaca", "vicuna", "human_assistant", "plain"
    )
    """``auto`` is the tokenizer's own chat template, or chatml if it has none. ``plain`` adds only
    the EOS token after an answer: for prompts that already contain their markup."""
    system: str | None = text(
        None, Text(10**6, multiline=True), example="'You are a helpful assistant.'"
    )
    """A system message for rows without one."""
    loss_on: str = choice("assistant", "all", "last")
    """The tokens that are trained on: every ``assistant`` turn, only the ``last`` one, or ``all``
    tokens, prompts included."""
    over_long: str = choice("split", "truncate", "drop", "error")
    """What happens to a row with more tokens than ``seq_len``. ``split`` makes several sequences
    from a document (``task=pretrain``, ``mlm``, ``distill``; nothing is lost) and truncates every
    other row. Counts are reported. llmx warns if more than 2 % of the rows or tokens are lost."""
    truncate_prompt: str = choice("left", "right")
    """How labelled rows longer than ``seq_len`` are truncated: the prompt loses its beginning
    (``left``) or its end (``right``). The label is never cut."""
    last_batch: str = choice("wrap", "drop", "short")
    """With ``task.epochs``, if the samples do not fill the last batch: ``wrap`` fills it with the
    first samples of a further epoch, ``drop`` leaves its samples out, ``short`` trains on fewer
    samples. The loss remains the mean over the target tokens of the step."""
    eval_path: str | None = file_path(None, example="heldout.jsonl")
    """A source for evaluation. Without it, ``eval_samples`` or ``eval_fraction`` holds out rows of
    ``path``."""
    eval_samples: int = number(0, minimum=0, maximum=MAX_SAMPLES, example=200)
    """Rows held out from ``path`` for evaluation (chosen by ``seed``)."""
    eval_fraction: float = number(0.0, minimum=0, below=1, example=0.05)
    """The fraction of the rows to hold out: 0.05 holds out 5 %, and at least one row."""
    max_rows: int | None = number(None, minimum=1, maximum=MAX_SAMPLES, example=1000)
    """Read only the first rows, up to this number."""
    cache_dir: str | None = file_path(None, example="/scratch/llmx")
    """Directory of prepared data; default ``$LLMX_CACHE`` or ``~/.cache/llmx``."""
    num_workers: int = number(0, minimum=0, maximum=1024, example=8)
    """Cores that tokenize; 0 uses all cores of the host."""
    sources: list[SourceConfig] = items(example="[{path: a.jsonl, weight: 2}, {path: b.jsonl}]")
    """Several sources instead of ``path``, each with a weight and a limit."""
    subset: str | None = text(None, example="en")
    """The subset (configuration) of a Hub dataset."""
    split: str | None = text(None, example="validation")
    """The split of a Hub dataset or of a directory that has several; default: ``train``."""
    data_map: dict[str, str] = mapping(maximum=100, example="{prompt: text, label: label_id}")
    """The columns of labelled rows, e.g. ``{prompt: prompt, label: label_id, history:
    context_info}``. The label is the answer."""
    label_names: dict[str, str] = mapping(maximum=10**6, example="{0: negative, 1: positive}")
    """The text of each label in an answer, e.g. ``{0: negative, 1: positive}``."""
    on_bad_row: str = choice("fail", "skip")
    """``fail`` stops at a row that cannot be used. ``skip`` counts it and writes it, with the
    reason, to a file beside the prepared data."""
    deduplicate: bool = False
    """Keep only one of several rows with the same training content; counts are reported."""

    @property
    def has_eval(self) -> bool:
        """Whether there is anything to evaluate on: a source, held-out records, or the demo's."""
        is_demo = self.path == "demo" and not self.sources
        return bool(self.eval_path or self.eval_samples or self.eval_fraction or is_demo)


COMPLETION_METRICS = ("exact_match", "rouge1", "rouge2", "rougeL")


@dataclass
class EarlyStoppingConfig:
    """Ends training when a metric no longer improves."""

    patience: int | None = number(None, minimum=1, maximum=10**6, example=3)
    """End training after this many evaluations in a row without an improvement
    (``task.eval_every_steps``). Null: never."""
    min_delta: float = number(0.0, minimum=0, maximum=10**9, example=0.001)
    """A change counts as an improvement only if it is larger than this."""
    metric: str | None = text(
        None,
        Text(
            100,
            pattern=r"eval/[\w./@-]+",
            rule="be eval/NAME: eval/loss, or a metric of the task, e.g. eval/exact_match",
        ),
        example="eval/exact_match",
    )
    """The metric to monitor. Null: ``checkpoint.metric``, with its ``checkpoint.mode``. For another
    metric, the task declares which direction is better."""


@dataclass
class TaskConfig:
    """The task: what is learned, for how long, and how it is evaluated."""

    kind: str = choice(
        *shipped_tasks(),
        rule=Text(
            pattern=r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*",
            rule="be a class of your own, package.module:Class",
        ),
    )
    """``sft`` learns to answer (loss on completions). ``pretrain`` learns every token of text.
    ``classify`` learns labels, or a number, of texts. ``mlm`` learns to fill in hidden tokens
    (BERT). ``embed`` learns vectors of texts from pairs. ``reward`` learns a score of answers, and
    ``dpo`` to prefer the chosen answer, both from pairs of a better and a worse one. ``grpo``
    learns from rewards of its own answers, and so does ``ppo``, with a value model. ``distill``
    learns the next-token distribution of a frozen teacher. For a task of your own, give the name by
    which Python imports it (docs/custom-tasks.md)."""
    code_path: str | None = file_path(None)
    """The directory that contains the package of your own task, metrics or rewards. Null: the
    working directory of the command, then PYTHONPATH. ``launch.sync=rsync`` copies the package to
    the hosts."""
    options: dict[str, Any] = mapping(example="{beta: 0.1}")
    """Options of the task: the fields of its ``Options``. ``task=sft`` has ``neftune_alpha``,
    ``dft``, ``z_loss`` and ``turn_weights`` (docs/tasks.md)."""
    steps: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=1000)
    """Optimizer steps. If set, it overrides ``epochs``."""
    epochs: float | None = number(None, above=0, maximum=10**6, example=3)
    """Passes over the data; fractions are allowed. Used if ``steps`` is null."""
    log_every_steps: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=50)
    """Log a line every N steps: on the console, in ``metrics.jsonl`` and in trackers. null is every
    10 steps, and more often in a run of fewer than 500, so that its curves have 50 points."""
    evaluate: bool = True
    """Evaluate on the held-out data before and after training, and every ``eval_every_steps``.
    False holds out the same rows and evaluates nothing."""
    eval_every_steps: int = number(0, minimum=0, maximum=MAX_STEPS, example=500)
    """Evaluate every N steps. 0 evaluates only at the end (if there is evaluation data)."""
    eval_generate: int = number(0, minimum=0, maximum=10**6, example=32)
    """The number of eval prompts: held-out conversations that are completed before and after
    training, and scored by exact match or ``eval_metrics``."""
    eval_max_new_tokens: int = number(64, minimum=1, maximum=2**24, example=256)
    """The most new tokens of a completion (``eval_generate``)."""
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
    ``rougeL``, or a function of your own. The function takes two lists of texts, the completions
    and the expected answers, and returns a number (docs/evaluation.md). Empty: exact match, before
    and after training."""
    save_model: bool = True
    """Write the final model as a Hugging Face directory."""
    stop_at_step: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=20)
    """End after this step, with the learning-rate schedule of the whole run: for a quick check."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    on_divergence: str = choice("stop", "skip", "rollback")
    """What to do if the loss is not finite, or jumps, at a step, and does so again after a restart
    from the last checkpoint. ``stop`` ends the run with the cause. ``skip`` skips the samples of
    that step. ``rollback`` skips all samples from the checkpoint up to that step."""
    spike_factor: float | None = number(None, above=1, maximum=10**6, example=3)
    """A logged loss of more than this many times the median of the last 50 counts as divergence.
    Null: only a loss that is not finite counts."""
    max_lost: float = number(0.2, minimum=0, maximum=1)
    """The largest part that may be lost of the rows (left out or rejected), of their tokens (cut
    off), of the rewards of completions and of the checkpoints (they fail). A run that loses more of
    them, and at least 12, is refused or ends with the reason. 1 allows everything."""


@dataclass
class ZeroConfig:
    """How DeepSpeed shards the optimizer state (1), the gradients (2), the parameters (3)."""

    stage: int = number(2, auto=True, minimum=0, maximum=3, example=3)
    """0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters. ``zero=stageN``
    sets this and the keys that belong to it. ``zero=auto``: the plan chooses the fastest stage and
    offload that fit (docs/planner.md)."""
    offload_optimizer: str = choice("none", "cpu", "nvme")
    """Where the optimizer state is kept and updated: on the device, in host RAM (``cpu``), or on
    ``nvme_path``."""
    offload_param: str = choice("none", "cpu", "nvme")
    """Where parameters are kept until a layer needs them (stage 3); ``none`` is the device."""
    nvme_path: str | None = file_path(None, example="/local/nvme")
    """A directory on a local NVMe disk of every host (offload to ``nvme``)."""
    hpz_partition_size: int = number(1, minimum=0, maximum=1024, example=8)
    """ZeRO++ hpZ: the number of ranks that share a second copy of the parameters. 1 is off, 0 is
    all ranks of a host."""
    quantized_weights: bool = False
    """ZeRO++ qwZ (CUDA only)."""
    quantized_gradients: bool = False
    """ZeRO++ qgZ (no effect on one host)."""
    overlap_comm: bool | None = None
    """Null: on for CUDA, off for CPU."""
    grad_accum_dtype: str = choice("auto", "precision", "fp32", "bf16", "fp16")
    """The precision in which gradients are summed over micro steps. ``auto``: fp32 if it costs no
    memory, or if there is memory for it and more than one micro step; else the run's precision.
    ``precision``: always the run's. Over 64 micro steps, a gradient summed in bf16 has an error of
    0.7 %, in fp32 of 0.1 %. Stage 0 sums only in the run's precision."""
    reduce_bucket_size: int | None = number(None, minimum=1, maximum=MAX_ELEMENTS, example=5e8)
    """Elements that are reduced at once. Null: derived from the model's width and the free
    memory."""
    allgather_bucket_size: int | None = number(None, minimum=1, maximum=MAX_ELEMENTS, example=5e8)
    """Elements that stages 1 and 2 gather at once after a step. Null: the value of
    ``reduce_bucket_size``."""
    prefetch_bucket_size: int | None = number(None, minimum=0, maximum=MAX_ELEMENTS, example=5e7)
    """Elements that stage 3 fetches before they are needed. Null: derived from the model's
    width."""
    param_persistence_threshold: int | None = number(
        None, minimum=0, maximum=MAX_ELEMENTS, example=1e5
    )
    """Stage 3 keeps parameters with fewer elements whole on every rank. Null: derived from the
    model's width."""
    max_live_parameters: int = number(1_000_000_000, minimum=0, maximum=MAX_ELEMENTS, example=5e8)
    """The most parameters that stage 3 keeps gathered on a device at once."""
    max_reuse_distance: int = number(1_000_000_000, minimum=0, maximum=MAX_ELEMENTS, example=5e8)
    """Stage 3 does not release a parameter that is needed again within this many parameters."""
    sub_group_size: int = number(1_000_000_000, minimum=1, maximum=MAX_ELEMENTS, example=1e8)
    """Parameters that stage 3 updates at once. A lower value needs less memory in the step."""
    pin_memory: bool = True
    """Use page-locked host memory for offloading. Copies are faster, but this memory cannot be
    swapped."""
    extra: dict[str, Any] = mapping(example="{zero_optimization: {round_robin_gradients: true}}")
    """Further keys of DeepSpeed's JSON, checked against what DeepSpeed accepts, e.g.
    ``zero.extra.zero_optimization.round_robin_gradients=true``."""


@dataclass
class DeviceConfig:
    """One type of accelerator, with values from its data sheet."""

    accelerator: str = choice(*ACCELERATORS)
    """``cuda`` (NVIDIA, and AMD with ROCm), or ``cpu`` for ranks without a GPU. ``npu`` (Ascend)
    and ``xpu`` (Intel) can be planned for; no rank runs on them."""
    memory_gib: float = number(0.0, minimum=0, maximum=10**6, example=40)
    """Memory of one device, GiB. The plan compares its prediction with it."""
    precisions: list[str] = choices("fp32", "bf16", "fp16", example="[fp32, bf16, fp16]")
    """Precisions that the device computes natively; default: those of its
    ``compute_capability``."""
    compute_capability: float = number(0.0, minimum=0, maximum=100, example=8.0)
    """NVIDIA's compute capability: 7.0 for a V100, 8.0 for an A100, 9.0 for an H100. 0 means
    unknown."""
    peak_tflops: dict[str, float] = mapping(
        maximum=10, example="{bf16: 312, fp32: 19.5}", values=Range(above=0, maximum=10**6)
    )
    """Dense peak by precision, TFLOP/s. MFU is computed against it."""
    memory_gb_per_s: float = number(0.0, minimum=0, maximum=10**6, example=1555)
    """Memory bandwidth, GB/s."""
    link_gb_per_s: float = number(0.0, minimum=0, maximum=10**6, example=300)
    """Bandwidth to the other devices of its host (NVLink, PCIe), GB/s in one direction, for
    predicted times. 0: that of PCIe 4."""
    host_link_gb_per_s: float = number(0.0, minimum=0, maximum=10**6, example=32)
    """Bandwidth to the memory of its host (PCIe), GB/s in one direction, for the predicted time of
    offloading. 0: that of PCIe 4."""
    activation_checkpointing: str | None = choice(
        None, "none", "selective", "full", true="full", false="none"
    )
    """``model.activation_checkpointing`` of the ranks on this type of device; null: the run's
    value. For small devices beside large ones, at ZeRO stages 0 to 2 (docs/unequal.md)."""


@dataclass
class HostConfig:
    """One machine."""

    name: str = text("", example="gpu-1")
    """The name in the hostfile, one word; default: ``address``."""
    address: str | None = text(None, example="10.1.0.11")
    """The address at which other hosts reach it: a DNS name, IPv4 or IPv6; default: ``name``."""
    ssh_port: int = number(22, minimum=1, maximum=65535, example=2222)
    """The port of its sshd."""
    user: str | None = text(None, _USER, example="train")
    """The user to log in as; default: the user who starts the run."""
    identity_file: str | None = file_path(None, _IDENTITY_FILE, example="~/.ssh/cluster")
    """The private key for this host, a path on this machine; default: the key that ssh selects."""
    fingerprint: str | None = text(
        None, _FINGERPRINT, example="SHA256:uNiVztksCsDhcc0u9e8BrfxZzSPV1BmjQ5WOtTFtQwM"
    )
    """The fingerprint of its ssh host key, as ``ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub``
    prints it on the host. A host with another key is refused. Default: the key in ``known_hosts``,
    or that of the first login. Needs OpenSSH 8.5 or newer on this machine."""
    slots: int = number(1, minimum=1, maximum=1024, example=8)
    """The number of ranks on this host, one per device."""
    gpus: list[str] = items(maximum=1024, example="[0, 2]", rule=_GPU)
    """The GPUs to use, one per slot, by number, UUID (``nvidia-smi -L``) or name of a MIG slice;
    empty: the first ones. Numbers count those that CUDA_VISIBLE_DEVICES of the host leaves."""
    device: str = text("", example="a100_80g")
    """Its device type, a key of ``hardware.devices``."""
    interface: str | None = text(None, _INTERFACE, example="eno1")
    """The network interface to the other hosts (NCCL/GLOO_SOCKET_IFNAME)."""
    memory_gib: float | None = number(None, above=0, maximum=10**6, example=512)
    """Host RAM, for the offload plan."""
    python: str | None = text(None, Text(), example="/opt/venv/bin/python")
    """The path of Python on this host; default: ``launch.python``."""
    root: str | None = text(None, Text(), example="/mnt/nfs/ada/proj")
    """The directory on this host for what ``hardware.root`` has on the launching machine: the run
    directory, code, data and model, as far as they are below it."""
    env: dict[str, str] = mapping(maximum=100, example="{NCCL_IB_HCA: mlx5_0}", rule=Text())
    """Environment variables of its ranks, beside ``hardware.env``, which they win over."""
    setup: str | None = text(None, Text(), example="/opt/modules/cuda.sh")
    """A shell script on this host that is sourced before its ranks start (modules, conda). What it
    exports wins over what is copied from the launching machine."""
    data: str | None = text(None, Text(), example="/local/chats.jsonl")
    """The path on this host of what ``data.path`` names on the launching machine."""
    model: str | None = text(None, Text(), example="/local/Qwen3-8B")
    """The path on this host of what ``model.path`` names on the launching machine."""
    enter: list[str] = items(maximum=100, example="[docker, exec, -i, trainer]")
    """A command that is put before whatever runs on this host, one word per entry: enters a
    container or a namespace."""


@dataclass
class HardwareConfig:
    """The cluster: its hosts and their devices."""

    name: str = text("", example="mine")
    """A short name for tables."""
    kind: str = choice("static", "local", "hostfile", "slurm", "external")
    """``static`` lists hosts; ``local`` detects this machine; ``hostfile`` reads ``path``;
    ``slurm`` takes the nodes of the allocation (``SLURM_JOB_ID``); ``external`` takes the
    processes that another program started (``launch=external``)."""
    path: str | None = file_path(None, example="/etc/hostfile")
    """An existing hostfile (``kind: hostfile``)."""
    device: str | None = text(None, example="a100_80g")
    """The device type of every host that does not name one (required with a hostfile)."""
    ssh_port: int = number(22, minimum=1, maximum=65535, example=2222)
    """Default ssh port of hosts read from a hostfile."""
    user: str | None = text(None, _USER, example="train")
    """Default ssh user of hosts read from a hostfile."""
    interface: str | None = text(None, _INTERFACE, example="eno1")
    """Default interface of hosts read from a hostfile."""
    slots: int | None = number(None, minimum=1, maximum=1024, example=2)
    """Use only this many devices of each host."""
    nodes: int | None = number(None, minimum=1, maximum=4096, example=2)
    """``kind: slurm`` outside an allocation: the number of nodes that a job asks for, with
    ``slots`` and ``device``. ``plan`` and ``launch.slurm.submit`` use it."""
    hosts: list[HostConfig] = items(
        maximum=4096, example="[{name: gpu-1, address: 10.1.0.11, slots: 4, device: a100_80g}]"
    )
    """The machines, in the order of their ranks (``kind: static``)."""
    devices: dict[str, DeviceConfig] = mapping(
        example="{mine: {memory_gib: 40, precisions: [fp32, bf16, fp16]}}"
    )
    """Device types by name, with values from the vendors' data sheets. Add your own to the known
    ones."""
    root: str | None = text(None, Text(), example="/home/ada/proj")
    """The directory of the launching machine that ``root`` of a host stands for; default: the one
    in which llmx is started."""
    master_addr: str | None = text(None, example="10.1.0.11")
    """The address of rank 0; default: the address of the first host."""
    reach: str | None = text(None, _REACH, example="198.51.100.7:30846")
    """``ADDRESS:PORT`` at which the other hosts reach rank 0, where NAT or a port mapping forwards
    it to ``launch.master_port`` of the first host. Default: ``master_addr`` and that port."""
    network_gbit_per_s: float | None = number(None, above=0, maximum=10**6, example=100)
    """Network bandwidth of each host to the others, Gbit/s in one direction, for predicted times.
    Give the sum over all interfaces that NCCL uses. Null: 10 is assumed, and the plan says so."""
    price_per_hour: dict[str, float] = mapping(
        maximum=100,
        example="{a100_80g: 1.9, v100_32g: 0.6}",
        values=Range(minimum=0, maximum=10**6),
    )
    """The price of one device per hour, by device type, in any currency. ``plan`` then shows the
    cost of the run."""
    env: dict[str, str] = mapping(maximum=100, example="{NCCL_IB_DISABLE: '1'}", rule=Text())
    """Environment variables of the ranks on this cluster, e.g. ``NCCL_IB_DISABLE: "1"``. Only
    variables on an allow list."""


@dataclass
class OptimConfig:
    """Optimizer, learning rate and schedule. All are functions of the step alone."""

    kind: str = choice(*OPTIMIZERS.shipped, rule=OPTIMIZERS)
    """``adamw`` is PyTorch's, as one fused kernel on CUDA and for an offloaded optimizer; it needs
    no compiler. ``cpu_adam`` and ``fused_adam`` are DeepSpeed's extensions. ``lion`` keeps one
    number per parameter instead of two, and needs a learning rate 3 to 10 times smaller. ``muon``
    orthogonalises the updates of the matrices inside the layers and keeps one number per parameter;
    AdamW updates the rest. ``adafactor`` keeps one row and one column per matrix; stage 0 only.
    ``adam8bit`` is AdamW with 8-bit moments (``bitsandbytes``): 2 bytes per parameter instead of 8;
    CUDA, stage 0 only."""
    lr: float = number(AUTO, auto=True, above=0, maximum=1000, example=1e-4)
    """The peak learning rate, which is reached at the end of the warm-up. ``auto``: the default of
    the task for pretrained weights, for training from scratch, or for an adapter
    (docs/training.md). A number applies to an adapter, too."""
    betas: list[float] = numbers([0.9, 0.999], length=2, minimum=0, below=1)
    """AdamW: decay rates of the two moments. Lion: decay rates of the update and of its
    momentum."""
    eps: float = number(1e-8, above=0, maximum=1, example=1e-6)
    """AdamW: the term added to the denominator."""
    weight_decay: float = number(0.0, minimum=0, maximum=100, example=0.1)
    """Decoupled weight decay of matrices. Biases and norms have none."""
    muon_lr: float | None = number(None, above=0, maximum=1000, example=0.02)
    """``muon``: the peak learning rate of the matrices inside the layers; null: ``lr``."""
    muon_momentum: float = number(0.95, minimum=0, below=1)
    """``muon``: the decay rate of the momentum."""
    muon_adjust_lr: str = choice("match_rms_adamw", "original")
    """``muon``: ``match_rms_adamw`` scales updates to the size of AdamW's (0.2 sqrt(longer side)),
    so that AdamW's ``lr`` fits. ``original`` scales by sqrt(rows / columns), at least 1, and needs
    a ``muon_lr`` of about 0.02."""
    layer_decay: float | None = number(None, above=0, maximum=1, example=0.9)
    """Layer-wise learning rates: the head has ``lr``, the last layer ``lr * layer_decay``. The rate
    of each layer below is multiplied by ``layer_decay`` again; the embeddings have the lowest. 0.8
    to 0.95 is usual for fine-tuning an encoder. Null: one rate for all."""
    lr_scale: dict[str, float] = mapping(
        maximum=1000, example="{*.embed_tokens.*: 0.1}", values=Range(above=0, maximum=10**6)
    )
    """Factors of the learning rate by patterns of parameter names (``*``, ``?``, ``[0-3]``), in
    addition to ``layer_decay``. If several patterns match a name, their factors are multiplied. A
    pattern that matches nothing is an error."""
    clip_norm: float = number(1.0, minimum=0, maximum=10**6, example=0.5)
    """Clip gradients to this global norm; 0 does not clip."""
    schedule: str = choice(
        "cosine", "linear", "constant", "wsd", "polynomial", "cosine_restarts", "one_cycle"
    )
    """The schedule after the warm-up. ``cosine``, ``linear`` and ``polynomial`` decay to ``lr *
    min_lr_ratio``. ``constant`` does not decay. ``wsd`` (warm-up, stable, decay) stays at ``lr``
    and decays at the end. ``cosine_restarts`` returns to ``lr`` at each restart. ``one_cycle``
    rises and falls along cosines (PyTorch's ``OneCycleLR``; the momentum is not cycled).
    docs/training.md has the values."""
    warmup_steps: int | None = number(None, minimum=0, maximum=MAX_STEPS, example=100)
    """Steps of linear warm-up; 0 is allowed. If set, it overrides ``warmup_fraction``."""
    warmup_fraction: float | None = number(None, minimum=0, maximum=1, example=0.03)
    """Warm-up as a fraction of all steps, if ``warmup_steps`` is null. Null: no warm-up. The first
    update has ``lr / warm-up steps``."""
    decay_end_fraction: float = number(1.0, minimum=0, maximum=1, example=0.9)
    """The schedule reaches its floor after this fraction of all steps, and stays there."""
    min_lr_ratio: float = number(0.0, minimum=0, maximum=1, example=0.1)
    """The floor, as a fraction of ``lr``."""
    decay_fraction: float = number(0.1, above=0, maximum=1, example=0.2)
    """``wsd``: the length of the decay, as a fraction of all steps."""
    decay_shape: str = choice("linear", "cosine", "1-sqrt")
    """``wsd``: the shape of the decay."""
    decay_power: float = number(1.0, above=0, maximum=100, example=2)
    """``polynomial``: the exponent of the remaining fraction; 1 is ``linear``."""
    cycles: int = number(2, minimum=1, maximum=10**6, example=4)
    """``cosine_restarts``: the number of cosines from ``lr`` to the floor, of equal length; 1 is
    ``cosine``."""
    start_lr_ratio: float = number(0.04, minimum=0, maximum=1, example=0.1)
    """``one_cycle``: the learning rate of the first update, as a fraction of ``lr``."""


@dataclass
class BatchConfig:
    """The batch: global batch = sum over ranks of the micro batch x accumulation."""

    global_batch: int | None = number(None, minimum=1, maximum=2**24, example=256)
    """Samples of one optimizer step. Give this, ``tokens_per_step``, or ``accumulation``."""
    tokens_per_step: int | None = number(None, minimum=1, maximum=10**12, example=2e6)
    """Tokens of one optimizer step, rounded to whole samples of ``data.seq_len``."""
    micro_batch: int = number(1, auto=True, minimum=1, maximum=2**20, example=4)
    """The most samples that the strongest device processes at once. ``auto``: the plan chooses the
    fastest that fits (docs/planner.md)."""
    accumulation: int | None = number(None, minimum=1, maximum=2**20, example=8)
    """Micro steps of one optimizer step."""
    balance: str = choice("auto", "off", "even", "spec", "measured", true="auto", false="off")
    """How the samples of a step are split among the ranks. ``even``: equally. ``spec``: in
    proportion to the speed of each device in its data sheet. ``measured``: in proportion to the
    speed that each rank measures at the start. ``auto``: ``measured`` if device types differ, else
    ``even``. ``off``: ``even``, and the compute time of the ranks is not measured. See
    docs/unequal.md."""
    rebalance: bool = False
    """Continue to measure while training, and split the samples anew if a device becomes slower or
    faster for good (throttling, another job). The split changes at a step boundary and is kept in
    ``balance.json``; resume and reproduce repeat it. ZeRO stages 0 to 2."""
    weights: dict[str, float] = mapping(
        example="{a100_40g: 2.5, v100_32g: 1}", values=Range(above=0, maximum=10**6)
    )
    """Relative speeds that you know, by host name or device type; 1 for those not named. Only with
    ``balance=auto``."""


@dataclass
class KeepConfig:
    """Which checkpoints are kept. One that none of the three keys selects is removed after the next
    commit."""

    last: int = number(2, minimum=1, maximum=10**6, example=3)
    """Keep the newest N, at least 1."""
    best: int = number(0, minimum=0, maximum=10**6, example=1)
    """Keep the best N by ``checkpoint.metric``."""
    every: int = number(0, minimum=0, maximum=MAX_STEPS, example=5000)
    """Keep every checkpoint whose step is a multiple of this; 0 keeps none."""


@dataclass
class CheckpointConfig:
    """When the training state is saved, and which checkpoints are kept."""

    every_steps: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=500)
    """Save a checkpoint at every multiple of this many steps."""
    every_minutes: float | None = number(None, above=0, maximum=10**6, example=30)
    """Save a checkpoint when the last one is this old. Both keys may be set. With neither, nothing
    is saved while training."""
    at_end: bool = False
    """Also save after the last step, so that the run can be extended."""
    on_signal: bool = True
    """Also save when the run is asked to stop (Ctrl-C, SIGTERM, SIGUSR1), before it exits."""
    background: str = choice("auto", "always", "never")
    """Copy the state to host memory and write it while training continues. ``auto``: if the host
    has enough free memory."""
    metric: str = text(
        "auto",
        Text(
            100,
            pattern=r"auto|(eval|train)/[\w./@-]+",
            rule="be auto, or eval/NAME or train/NAME, a value of the lines of metrics.jsonl: "
            "eval/loss, train/loss, or a metric of the task, e.g. eval/exact_match",
        ),
        example="eval/exact_match",
    )
    """The metric that decides which checkpoint is best: ``eval/loss``, ``train/loss``, or a metric
    of the task (``eval/exact_match``). ``auto``: the one that the task is judged by, ``eval/loss``
    or ``eval/reward``; in training (``train/loss``) where no evaluation measures it."""
    mode: str = choice("auto", "min", "max")
    """Whether a lower (``min``) or a higher (``max``) value of ``metric`` is better. ``auto``: as
    the task declares it; a lower loss is better."""
    keep: KeepConfig = field(default_factory=KeepConfig)


@dataclass
class SlurmConfig:
    """What Slurm is asked for (``launch.transport=slurm``)."""

    submit: bool = False
    """Write a batch script (``RUN_DIR/job.sh``) with this command, and submit it with ``sbatch``.
    The job saves a checkpoint before its time limit, and continues in the queue."""
    requeue: bool = False
    """Before the time limit, save a checkpoint and put the job of this supervisor back into the
    queue (``scontrol requeue``). Set by ``submit``; for batch scripts of your own."""
    partition: str | None = text(None, example="gpu")
    """``--partition`` of ``srun`` and ``sbatch``."""
    account: str | None = text(None, example="lab")
    """``--account`` of ``srun`` and ``sbatch``."""
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
    """``--time`` of ``srun`` and ``sbatch``, in Slurm's format, e.g. ``1-12:00:00``."""
    gres: str | None = text(
        None, Text(100, pattern=r"[\w:,.-]+", rule="be a GRES"), example="gpu:a100:8"
    )
    """``--gres`` of ``srun`` and ``sbatch`` instead of ``--gpus-per-node``, where a cluster wants
    it."""
    cpus_per_task: int | None = number(None, minimum=1, maximum=4096, example=8)
    """``srun --cpus-per-task``: cores per rank. Null: the cores of the allocation, or of the
    smallest host, divided among its ranks."""
    extra_args: list[str] = items(maximum=100, example="[--exclusive]")
    """Further arguments of ``srun`` and ``sbatch``."""
    sbatch_args: list[str] = items(maximum=100, example='["--mail-type=END"]')
    """Further arguments of ``sbatch`` alone (``submit``)."""


@dataclass
class LaunchConfig:
    """How ranks are started on the hosts, watched and stopped."""

    transport: str = choice("auto", *TRANSPORTS.shipped, rule=TRANSPORTS)
    """``auto``: ``local`` if all ranks run on this machine, else ``ssh``. With these llmx's agents
    start the ranks; with ``pdsh``, ``openmpi`` and ``slurm`` DeepSpeed's launcher for it does."""
    sync: str = choice("none", "rsync")
    """``rsync`` copies code, model and data to the same path on every host."""
    sync_extra: list[str] = items(example="[/data/dictionaries]", paths=True)
    """Further absolute paths to copy."""
    sync_exclude: list[str] = items(example="[notebooks]")
    """Patterns of rsync: matching files of code, data and model are not copied. Credentials
    (``.env``, ``.netrc``, ``.ssh``, ``*.pem``, ...) and files that git ignores are never copied."""
    python: str | None = file_path(None, example="/opt/venv/bin/python")
    """The path of Python on the hosts; default: the path of this Python."""
    master_port: int = number(0, minimum=0, maximum=65535, example=29500)
    """The port of rank 0; 0 takes a free port of its host."""
    env: dict[str, str] = mapping(maximum=100, example="{NCCL_DEBUG: INFO}", rule=Text())
    """Environment variables of this run's ranks. Only variables on an allow list; secrets are
    refused."""
    start_timeout_s: float = number(900.0, above=0, maximum=MAX_SECONDS, example=1800)
    """The longest time from the start to the first sign of life of every rank."""
    probe: bool = True
    """Before ranks start on several hosts, every pair of hosts is tested on fresh ports in both
    directions. False: only the connection of each host to rank 0."""
    heartbeat_timeout_s: float = number(60.0, above=0, maximum=MAX_SECONDS, example=120)
    """A host whose agent is silent for this long counts as lost."""
    orphan_timeout_s: float = number(300.0, minimum=10, maximum=MAX_SECONDS)
    """How long ranks on other hosts go on while their supervisor is suspended or cut off (a closed
    lid, Wi-Fi). Back in time, it takes them over; after it they save a checkpoint and end, and the
    supervisor restarts them when it is back. A longer time also keeps the GPUs busy for longer
    after a power loss of the supervisor's machine. With ``elastic``, at most half of
    ``heartbeat_timeout_s``."""
    comm_timeout_s: float = number(14400.0, above=0, maximum=MAX_SECONDS)
    """How long a rank waits for the others in one collective (NCCL, gloo) before it gives up. The
    default is long, because ranks must wait while one of them exports a model or reads from a slow
    disk. ``heartbeat_timeout_s`` and ``hang_timeout_s`` find dead and hanging ranks sooner."""
    stop_grace_s: float = number(20.0, above=0, maximum=MAX_SECONDS, example=60)
    """The time that ranks have to save and exit when the run is asked to stop; then they are
    killed."""
    max_restarts: int = number(3, minimum=0, maximum=10**6, example=10)
    """The most automatic restarts in a row without a new checkpoint; 0 never restarts."""
    restart_backoff_s: float = number(10.0, minimum=0, maximum=MAX_SECONDS, example=30)
    """The wait before the first restart; it doubles for each further restart without progress."""
    restart_backoff_max_s: float = number(600.0, minimum=0, maximum=MAX_SECONDS, example=300)
    """The longest wait before a restart."""
    hang_timeout_s: float | None = number(None, minimum=0, maximum=MAX_SECONDS, example=1800)
    """A run without a step for this long counts as hung. Null: 20 times the usual step, at least
    600 s. 0: never."""
    loading_timeout_s: float = number(1800.0, minimum=0, maximum=MAX_SECONDS)
    """Ranks that load data and model without progress for this long count as hung. Progress is a
    new line in the log of any rank: while data is prepared or weights are read, one comes every
    10 s. 0: never."""
    host_wait_s: float = number(1800.0, minimum=0, maximum=MAX_SECONDS, example=600)
    """How long to wait before a restart for a lost host, for the network between the hosts, or for
    a disk that is full or cannot be written."""
    detach: bool = False
    """Start the supervisor in a session of its own and give the terminal back at once. ``attach``
    shows its console, ``stop`` ends the run with a checkpoint."""
    allow_busy: bool = False
    """Start although another run of llmx trains on the same hosts (on the same GPUs)."""
    queue: bool = False
    """Wait for other runs to leave the hosts (the GPUs) instead of being refused. Runs that wait
    for a host start in the order in which they were started."""
    elastic: bool = False
    """When a host is lost, continue on the remaining hosts, at the same global batch."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    openmpi_args: list[str] = items(maximum=100, example="[--report-bindings]")
    """Further arguments of ``mpirun`` (``transport: openmpi``)."""


@dataclass
class RolloutConfig:
    """Where the samples of a task that generates them (``task=grpo``) are drawn."""

    hosts: list[str] = items(maximum=4096, example="[node-b]")
    """Names of hosts of ``hardware.hosts`` that do not train: on each of their slots a rollout
    server draws the samples. Empty: the ranks that train draw them."""
    servers: list[HostConfig] = items(maximum=4096, example="[]")
    """Written by llmx: the entries of ``hardware.hosts`` that ``rollout.hosts`` names."""
    port: int = number(0, minimum=0, maximum=65000)
    """The port of the first server of a host, the next one has the next port; 0 takes free ones."""
    wait_s: float = number(30.0, minimum=0, maximum=MAX_SECONDS)
    """How long the ranks wait when no server answers, before they draw the samples of a step
    themselves."""
    vllm_python: str | None = text(None, Text(), example="/opt/vllm/bin/python")
    """The Python of an environment on the rollout hosts that has vLLM 0.32 or newer, which draws
    the samples then; llmx is not installed there. Null: llmx draws them."""
    max_staleness: int = number(0, minimum=0, maximum=100)
    """How many updates the weights that draw a sample may be behind the trained ones. 0: each step
    waits for samples of its own weights, and the run is repeatable. Over 0 the servers draw ahead
    while the ranks train."""
    importance: str = choice("token", "sequence")
    """With ``max_staleness`` or vLLM: samples are weighted by the probability that the trained
    policy gives them, over that of what drew them, for each token or for whole completions."""
    importance_cap: float = number(2.0, minimum=1, maximum=1000)
    """The largest of these weights (truncated importance sampling)."""

    @property
    def weights_samples(self) -> bool:
        """Whether the loss weights samples by importance: they are of older weights, or of vLLM,
        whose probabilities are not those of the trained policy to the last digit."""
        return self.max_staleness > 0 or self.vllm_python is not None


@dataclass
class TrackingConfig:
    """Where metrics are sent. ``metrics.jsonl`` in the run directory has all of them."""

    kinds: list[str] = choices(*TRACKERS.shipped, rule=TRACKERS, example="[wandb, csv]")
    """Trackers that receive the metrics; empty: none."""
    project: str = text("llmx", example="my-project")
    """The project of Weights & Biases and SwanLab, the experiment of MLflow."""
    entity: str | None = text(None, example="my-team")
    """The user or team of Weights & Biases, the workspace of SwanLab; null: the default of the API
    key."""
    group: str | None = text(None, example="ablation")
    """Groups runs in Weights & Biases and SwanLab; a tag in MLflow."""
    tags: list[str] = items(maximum=100, example="[baseline, zero3]", rule=Text(max_length=64))
    """Tags of the run in ``ui``, Weights & Biases, MLflow and SwanLab."""
    mode: str = choice("auto", "online", "offline")
    """``auto``: online if there is a key and the server answers, else offline."""
    uri: str | None = text(None, example="http://mlflow.lan:5000")
    """MLflow's server (``http://host:5000``) or store (``sqlite:////data/mlflow.db``, a directory).
    Null: MLFLOW_TRACKING_URI, or a store in the run directory if it is not set."""
    finish_timeout_s: float = number(30.0, minimum=0, maximum=MAX_SECONDS, example=120)
    """How long a run waits for a tracker at its end."""


@dataclass
class TokenizerConfig:
    """A tokenizer to train: ``python -m llmx tokenizer data=... tokenizer.vocab_size=64000``."""

    kind: str = choice("bbpe", "wordpiece")
    """``bbpe`` is a byte-level BPE (GPT-2, Qwen, Llama 3). ``wordpiece`` is BERT's, with
    ``[MASK]``."""
    vocab_size: int = number(32000, minimum=300, maximum=10**7, example=64000)
    """The number of tokens, special tokens included. The size padded to a multiple of 64 is
    reported, too."""
    output: str | None = file_path(None, example="tokenizers/mine")
    """The output directory; default ``tokenizers/<data>-<kind>-<vocab_size>`` in the working
    directory."""
    max_bytes: int = number(256 << 20, minimum=1 << 16, maximum=2**50, example=1e9)
    """The most text to train on. A larger source is sampled by row, with ``seed``."""
    max_memory_gib: float = number(4.0, minimum=0.5, maximum=10**6, example=16)
    """Approximate memory limit of the training. The sample is made smaller until its distinct words
    fit. English rarely reaches the limit; Chinese does, because a sentence counts as a word."""
    min_frequency: int = number(2, minimum=1, maximum=10**9, example=5)
    """Pairs that are rarer than this are not merged."""
    lowercase: bool = False
    """Convert letters to lower case and remove accents, as in ``bert-base-uncased`` (wordpiece)."""


FAILURES = (
    "oom", "nan", "comm", "host_lost", "orphaned", "disk_full", "config", "data", "interrupted",
    "hang", "crash",
)  # fmt: skip
"""The outcomes of a run that did not end well."""


@dataclass
class SweepConfig:
    """How the trials of a sweep (``-m``, ``sweep``) are run and compared (docs/sweeps.md)."""

    trial_steps: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=20)
    """Short trials: each ends after this many steps, with the schedule of the whole run, and writes
    no checkpoints and no model. Held-out data is evaluated only if ``objective`` needs it."""
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
    """The metric by which the best trial is selected. Null: ``tokens_per_s`` for short trials, else
    ``checkpoint.metric``."""
    halving: int | None = number(None, minimum=1, maximum=MAX_STEPS, example=200)
    """Successive halving for a loss or a metric: all trials train this many steps, the better half
    continues from its checkpoints to twice as many, and so on. The last trial trains in full. Null:
    every trial trains in full."""
    halving_factor: int = number(2, minimum=2, maximum=100)
    """One of N trials continues, to N times the steps."""
    prune: bool = True
    """Skip trials that cannot fit by the memory plan, that need more memory than one that ran out
    of it, or that equal another trial."""
    fail_fast: bool = False
    """End the sweep at the first trial that fails, and stop the trials that run beside it. ``tune``
    continues when a trial runs out of memory, because that shows how much fits."""
    slots_per_trial: int | None = number(None, minimum=1, maximum=10**6, example=1)
    """Run trials at the same time: each gets this many free slots of ``hardware``, of one device
    type, and on one host if they fit. Null: trials run one after another, each on all slots."""
    max_jobs: int = number(4, minimum=1, maximum=10**4)
    """With Slurm (``launch.transport=slurm``) and outside an allocation: the most trials that are
    queued or running at a time. Each is a job of its own."""
    max_trials: int | None = number(None, minimum=1, maximum=10**4, example=20)
    """A search (``tune``) ends after this many trials. Null: when no promising candidate is
    left."""
    max_minutes: float | None = number(None, above=0, maximum=10**6, example=60)
    """A search starts no further trial after this time."""
    resume: bool = True
    """The same command, typed again in the same directory, continues a sweep that is not finished;
    false starts a new one."""
    retry: list[str] = choices(*FAILURES, "refused")
    """Which failed trials run again when a sweep is continued; empty: all of them. ``refused``
    trials were never started."""


@dataclass
class Experiment:
    """One complete run: the content of ``config.yaml`` in a run directory."""

    schema_version: int = number(SCHEMA_VERSION, minimum=1, maximum=10**6)
    name: str = text("", example="first_try")
    """A short name for tables and trackers; default: the name of the run directory."""
    run_dir: str = file_path("", example="runs/first_try")
    """Absolute path of the run directory."""
    seed: int = number(0, minimum=0, maximum=2**63 - 1, example=1234)
    """Fixes the sample order, the weights of a model from scratch, dropout and which rows are held
    out. The same seed and config give the same numbers."""
    precision: str = choice("auto", "fp32", "bf16", "fp16")
    """``auto`` is the best precision that the weakest device supports."""
    deterministic: bool | None = None
    """Use deterministic algorithms. Null: on for CPU, off for CUDA."""
    dry_run: bool = False
    """Write the run directory, print the plan and the command, start nothing."""
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
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
