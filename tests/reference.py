"""What training should compute, in plain PyTorch: no DeepSpeed, no packing, no mask, no split.

A small real tokenizer, a fixed synthetic store, and a loop that runs every row by itself and
takes the mean over the step's target tokens. Parity tests hold the engine against it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from llmx.config import Experiment
from llmx.data import collate
from llmx.data.examples import Column, Schema
from llmx.data.order import samples_of_step
from llmx.data.store.samples import Sample, SampleStore, in_memory
from llmx.models.attention import AttentionMethod
from llmx.models.experts import Routing
from llmx.models.factory import build_model, model_config
from llmx.models.model import Model, Models
from llmx.models.parameters import persistent_buffers, whole
from llmx.tasks import OnlineTask, RolloutKey, Task, next_token_loss
from llmx.train.rollout import prompts_of
from llmx.train.schedule import lr_at
from tests.small_stores import write_store

NEXT_TOKEN: Any = SimpleNamespace(
    updates=1, joint=False, loss=lambda models, batch: next_token_loss(models.main, batch)
)
"""A task as ``train_step`` sees it."""
VOCABULARY = 90
SEQ_LEN = 48
NUM_SAMPLES = 40
GLOBAL_BATCH = 12
STEPS = 6


def word_tokenizer() -> Any:
    """A word-level tokenizer of ``VOCABULARY`` words, no multiple of 64."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def synthetic_store(path: Path) -> SampleStore:
    """Samples of one to four rows; some rows without any target, some wholly targets."""
    if path.exists():
        return SampleStore.open(path)
    draw = np.random.Generator(np.random.Philox(key=7))
    samples = []
    for _ in range(NUM_SAMPLES):
        lengths = []
        while not lengths or (len(lengths) < 4 and sum(lengths) + 4 < SEQ_LEN):
            room = SEQ_LEN - sum(lengths)
            lengths.append(int(draw.integers(3, min(room, 24) + 1)))
        rows = [draw.integers(3, VOCABULARY, size=length) for length in lengths]
        targets = []
        for row in rows:
            mask = np.arange(len(row)) >= draw.integers(1, len(row))
            if draw.random() < 0.2:
                mask[:] = False
            mask[0] = False
            targets.append(mask)
        samples.append(sample_of(rows, np.concatenate(targets)))
    return write_store(path, samples, fingerprint="synthetic", seq_len=SEQ_LEN, meta={})


def sample_of(rows: list[np.ndarray], targets: np.ndarray, **more: Any) -> Sample:
    """These sequences as one sample."""
    return Sample(
        tokens=np.concatenate(rows).astype(np.uint32),
        targets=targets,
        sequence_starts=np.cumsum([0, *map(len, rows[:-1])]).astype(np.int64),
        **more,
    )


def write_pretrained(directory: Path) -> None:
    """A small GPT-2 with the tokenizer of these tests, as the Hub would have it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(directory)
    word_tokenizer().save_pretrained(directory)


STRENGTH = Column("strength", per="example")


def paired_store(path: Path) -> SampleStore:
    """Samples of one or two pairs: a prompt, and two completions of it that share it."""
    if path.exists():
        return SampleStore.open(path)
    draw = np.random.Generator(np.random.Philox(key=8))
    samples = []
    for _ in range(NUM_SAMPLES):
        rows, masks, strengths = [], [], []
        for _ in range(int(draw.integers(1, 3))):
            prompt = draw.integers(3, VOCABULARY, size=int(draw.integers(1, 6)))
            for length in draw.integers(1, 6, size=2).tolist():
                rows.append(np.concatenate([prompt, draw.integers(3, VOCABULARY, size=length)]))
                masks.append(np.arange(len(rows[-1])) >= len(prompt))
            strengths.append(float(draw.integers(1, 5)) / 2)
        columns = {STRENGTH.name: np.array(strengths, np.float32)}
        starts = np.arange(0, len(rows), 2, dtype=np.int64)
        targets = np.concatenate(masks)
        samples.append(sample_of(rows, targets, example_starts=starts, columns=columns))
    return write_store(
        path, samples, fingerprint="paired", seq_len=SEQ_LEN, meta={}, columns=(STRENGTH,)
    )


def preference_store(path: Path) -> SampleStore:
    """The pairs of ``paired_store``, as task=dpo stores them."""
    if path.exists():
        return SampleStore.open(path)
    column = Column("desirable", per="sequence", dtype="int8")
    pairs = paired_store(path.with_name(f"{path.name}-pairs"))
    samples = [
        replace(pairs[n], columns={column.name: np.array([1, 0] * len(pairs[n].example_starts))})
        for n in range(len(pairs))
    ]
    return write_store(
        path, samples, fingerprint="preference", seq_len=SEQ_LEN, meta={}, columns=(column,)
    )


TEXT = Column("text_id", per="sequence", dtype="int64")


def text_pairs_store(path: Path, *, examples: int = NUM_SAMPLES) -> SampleStore:
    """An example a sample: two texts that belong together, and up to two that do not. Some texts
    are there more than once."""
    if path.exists():
        return SampleStore.open(path)
    draw = np.random.Generator(np.random.Philox(key=4))
    samples = []
    for _ in range(examples):
        lengths = [*draw.integers(2, 9, size=2), *[3] * int(draw.integers(0, 3))]
        rows = [draw.integers(5, VOCABULARY, size=int(length)) for length in lengths]
        targets, first = np.ones(sum(map(len, rows)), np.bool_), np.zeros(1, np.int64)
        columns = {TEXT.name: draw.integers(0, 12, size=len(rows))}
        samples.append(sample_of(rows, targets, example_starts=first, columns=columns))
    return write_store(
        path, samples, fingerprint="text pairs", seq_len=SEQ_LEN, meta={}, columns=(TEXT,)
    )


def naive_loss(
    model: torch.nn.Module,
    store: SampleStore,
    samples: np.ndarray,
    *,
    vocab_size: int = VOCABULARY,
) -> torch.Tensor:
    """Mean cross entropy over all targets of ``samples``, each row run alone; and the weighted
    auxiliary loss of a mixture of experts, by sample."""
    total = auxiliary = torch.zeros((), dtype=torch.float64)
    targets_seen = tokens_seen = 0
    for index in samples:
        routed = []
        for tokens, targets in store[int(index)].sequences():
            ids = torch.from_numpy(tokens.astype(np.int64))
            mask = torch.from_numpy(targets.copy())
            # The head is padded to a round number of rows; only words take probability.
            output = model(input_ids=ids[None])
            logits = output.logits[0, :-1, :vocab_size]
            losses = F.cross_entropy(logits, ids[1:], reduction="none")
            total = total + losses[mask[1:]].double().sum()
            targets_seen += int(mask.sum())
            routed.append(getattr(output, "router_logits", None))
        if getattr(model.config, "output_router_logits", False):
            # Over all rows of the sample, as transformers would see them in one batch.
            of_layers = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
            num_tokens = len(of_layers[0])
            auxiliary = auxiliary + num_tokens * load_balancing_loss_func(
                of_layers, model.num_experts, model.num_experts_per_tok
            )
            tokens_seen += num_tokens
    loss = total / targets_seen
    if tokens_seen:
        loss = loss + model.router_aux_loss_coef * auxiliary / tokens_seen
    return loss


def naive_training(
    exp: Experiment,
    store: SampleStore,
    tokenizer: Any,
    *,
    steps: int,
    global_batch: int,
    stop: int | None = None,
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses of ``steps`` steps of SGD, and the gradients of each, by name of parameter.
    ``stop``: samples of all steps, of which the last may have fewer."""
    model = build_model(
        exp.model,
        exp.seed,
        model_config(exp.model, exp.data, tokenizer=tokenizer),
        precision="fp32",
        device=torch.device("cpu"),
        implementation="sdpa",
        ds_config={"zero_optimization": {"stage": 0}},
    )
    model.train()
    losses, gradients = [], []
    for step in range(steps):
        samples = samples_of_step(
            step, global_batch=global_batch, num_samples=len(store), seed=exp.seed, stop=stop
        )
        loss = naive_loss(model, store, samples)
        model.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        lr = lr_at(step, optim=exp.optim, total=steps)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
    return losses, gradients


def naive_gradient(
    exp: Experiment, task: Task, store: SampleStore, tokenizer: Any, *, global_batch: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the first step of any task: networks that nothing wraps, one line for
    each sequence, one example after the other."""
    cpu = torch.device("cpu")
    networks = {
        name: build_model(
            exp.model,
            exp.seed,
            model_config(exp.model, exp.data, tokenizer=tokenizer, spec=spec),
            precision="fp32",
            device=cpu,
            implementation="sdpa",
            ds_config={"zero_optimization": {"stage": 0}},
            head=spec.head,
        ).eval()
        for name, spec in task.models().items()
    }
    models = Models(
        {
            name: Model(
                name=name,
                spec=task.models()[name],
                module=network,
                forward=network,
                config=network.config,
                vocab_size=VOCABULARY,
                attention=AttentionMethod("sdpa", "position_ids", "padded"),
                dtype=torch.float32,
                device=cpu,
                routing=Routing(network),
            )
            for name, network in networks.items()
        }
    )
    samples = samples_of_step(0, global_batch=global_batch, num_samples=len(store), seed=exp.seed)
    columns = store.columns
    examples = [store[int(index)] for index in samples]
    if isinstance(task, OnlineTask):
        prompts = [one for sample in examples for one in prompts_of(sample, columns)]
        columns = task.rollout_columns
        with torch.no_grad():
            made = task.rollout(models, prompts, RolloutKey(exp.seed, 0))
        examples = [
            in_memory(one, Schema(columns, task.name), vocab_size=VOCABULARY)
            for group in made
            for one in group
        ]
    losses = [
        task.loss(
            models, collate([one], seq_len=SEQ_LEN, pad_id=0, layout="padded", columns=columns)
        )
        for one in examples
    ]
    weight = sum(loss.weight for loss in losses)
    total = sum(loss.sum for loss in losses) / weight
    total.backward()
    gradient = {
        f"{name}.{parameter_name}": parameter.grad
        for name, network in networks.items()
        for parameter_name, parameter in network.named_parameters()
        if parameter.grad is not None
    }
    return float(total.detach()), gradient


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters (tied ones once) and persistent buffers. Collective under ZeRO-3."""
    parameters = dict(model.named_parameters())
    with torch.no_grad(), whole(list(parameters.values())):
        found = {name: parameter.data.clone() for name, parameter in parameters.items()}
    return {**found, **{name: buffer.clone() for name, buffer in persistent_buffers(model)}}
