"""Measure a trained model on any data: ``python -m llmx eval RUN|MODEL data=... [key=value] ...``.

By the code that evaluates during training.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmx.cli.target import Target, find_target, load_network, load_tokenizer, on_device
from llmx.compose.apply_overrides import apply, group_of
from llmx.compose.overrides import resolve_alias
from llmx.compose.task_rules import with_chosen_packing
from llmx.config import DataConfig, Experiment, ModelConfig, TaskConfig
from llmx.config.model_rules import length_problem
from llmx.errors import ConfigError
from llmx.run import trust
from llmx.run.metrics.completions import DECLARED, METRICS, load_metric, score
from llmx.run.metrics.declared import Metric
from llmx.run.rundir import check_writable, write_json
from llmx.text import columns, plural, printable

FLAGS = {"task.eval_max_new_tokens": "--max-new-tokens", "task.eval_metrics": "--metrics"}
"""Keys of the config that are flags of this command."""


def measured_of(options: argparse.Namespace) -> tuple[Target, Experiment, Path]:
    """The model to measure, the data that it is measured on, and the file of the results.

    Raises ConfigError for a directory that is no model, and for a lack of data.
    """
    words = [resolve_alias(word) for word in options.overrides]
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word}: is not key=value. Write group=option or key=value.")
        key = group_of(word) or word.split(".", 1)[0]
        if key not in ("data", "task"):
            raise ConfigError(f"{word}: eval takes data and task (data.path=FILE, task=pretrain).")
        if flag := FLAGS.get(word.lstrip("+").partition("=")[0]):
            raise ConfigError(f"{word}: write {flag} {word.partition('=')[2]}.")
    keys = {word.lstrip("+").split("=", 1)[0] for word in words}
    names_data = keys & PLACES or any(group_of(word) == "data" for word in words)
    target = find_target(
        options.target,
        command="eval",
        model=options.model,
        trusted=options.trust,
        runs=(trust.MODEL, trust.TASK),
        generates=False,
    )
    if target.exp is None and not names_data:
        raise ConfigError(
            f"{target.directory} is a model directory, so name the data. Add, for example, "
            "data=messages data.path=FILE."
        )
    exp = target.exp or Experiment(
        model=target.base or ModelConfig(path=os.path.abspath(target.directory)), task=TaskConfig()
    )
    if "data.eval_path" in keys:  # which takes the place of the rows that the run held out
        data = dataclasses.replace(exp.data, eval_samples=0, eval_fraction=0)
        exp = dataclasses.replace(exp, data=data)
    exp = apply(exp, words)
    data = typed_data(exp.data, keys) if names_data else exp.data
    task = exp.task
    if options.generate:
        task = dataclasses.replace(task, eval_generate=options.generate)
    if options.max_new_tokens:
        task = dataclasses.replace(task, eval_max_new_tokens=options.max_new_tokens)
    exp = with_chosen_packing(dataclasses.replace(exp, data=data, task=task))
    # A glob, or a name on the Hub, may be no name of a file.
    name = re.sub(r"[^\w.-]+", "-", Path(data.eval_path or data.path).stem).strip("-") or "data"
    out = target.run.root if target.run else Path()
    return target, exp, options.out or out / f"eval-{name}.json"


PLACES = {"data.path", "data.eval_path", "data.sources"}
"""Keys that name other data."""


def typed_data(data: DataConfig, keys: set[str]) -> DataConfig:
    """The data that was typed is the evaluation data: ``data.eval_path``, else all rows of
    ``data.path``, whatever the run itself had beside them."""
    if "data.max_rows" not in keys:
        data = dataclasses.replace(data, max_rows=None)
    has_own = data.eval_path and ("data.eval_path" in keys or "data.path" not in keys)
    if "data.sources" in keys or (data.sources and "data.path" not in keys and not has_own):
        raise ConfigError("data.sources: eval measures one source. Set data.path.")
    if has_own:
        return data
    eval_path = None if data.path == "demo" else data.path
    return dataclasses.replace(
        data, sources=[], eval_path=eval_path, eval_samples=0, eval_fraction=0
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit code."""
    if options.metrics and not options.generate:
        raise ConfigError("--metrics measures completions. Add --generate 100.")
    target, exp, out = measured_of(options)
    check_writable(out, fix="Set --out FILE.json.")
    if exp.task.code_path is not None:  # as the ranks of the run find it
        sys.path.insert(0, exp.task.code_path)
    metrics = options.metrics.split(",") if options.metrics else exp.task.eval_metrics
    metrics = list(metrics or METRICS)
    for name in metrics:
        if options.generate and name not in METRICS:
            load_metric(name)  # before minutes of work

    if not exp.data.has_eval:
        raise ConfigError(
            "the run has no evaluation data. Name some: data.path=FILE (read as the run reads its "
            "own), or data=OPTION data.path=FILE."
        )
    began = time.monotonic()
    from transformers import AutoConfig
    from transformers.utils import logging

    from llmx.data import prepare
    from llmx.models.generate import stop_ids
    from llmx.tasks import OnlineTask, Task, task_of

    logging.disable_progress_bar()
    tokenizer = load_tokenizer(target)
    task = task_of(exp, tokenizer)
    if not task.evaluates_loss and not exp.task.eval_generate:
        raise ConfigError(f"task={task.name} is measured by completions. Add --generate 100.")
    store = prepare(exp.data, exp.seed, tokenizer, task, split="eval")
    of_model = type(task).see_model is not Task.see_model
    trained = target.exp  # as it was trained; None of a model directory
    if type(task).see_data is not Task.see_data and (trained or not of_model):
        # What follows from the training data (the labels), it learns from that of the run.
        training = store
        if trained:
            training = prepare(trained.data, trained.seed, tokenizer, task, split="train")
        task.see_data(training, store)
    if of_model and not trained:  # a published model says it itself
        for line in task.see_model(AutoConfig.from_pretrained(target.directory), store):
            print(printable(line))
    models = load(target, exp, task, tokenizer)
    limit = getattr(models.main.config.get_text_config(), "max_position_embeddings", None)
    if problem := length_problem(exp.data.seq_len, limit, "the model"):
        raise ConfigError(problem)
    values = measure(task, models, store, batch=options.batch)
    rows: list[dict[str, str]] = []
    if options.generate:
        rows = complete(task, models, stop_ids(models.main.module, tokenizer))
        pairs = ([row["completion"] for row in rows], [row["expected"] for row in rows])
        if isinstance(task, OnlineTask):  # its rewards, as training measures them
            values |= task.score(task.eval_prompts(), pairs[0])
        values |= score(metrics, *pairs)
    declared = {**DECLARED, **dict(task.metrics)}
    where = f"{plural(len(store), 'sample')} of {exp.data.eval_path or exp.data.path}"
    print(table(values, declared, title=f"{target.directory} on {printable(where)}"))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        out,
        {
            "model": os.path.abspath(target.directory),
            "data": exp.data.eval_path or exp.data.path,
            "data_fingerprint": store.fingerprint,
            "task": exp.task.kind,
            "samples": len(store),
            "metrics": {
                name: value if math.isfinite(value) else None for name, value in values.items()
            },
            "seconds": round(time.monotonic() - began, 1),
            "completions": rows,
        },
    )
    print(f"\nwritten to {out}")
    return 0


# --- Loss and metrics ------------------------------------------------------------------------


def load(target: Target, exp: Experiment, task: Any, tokenizer: Any) -> Any:
    """The models of the task, with their heads, on the GPU or the CPU: the trained one from the
    directory, frozen ones from where training had them.

    Raises ConfigError for a frozen one that is kept nowhere, and for an adapter in a model with
    another head than that of a causal LM.
    """
    from llmx.models.model import Models, base_of
    from llmx.models.spec import are_bases

    specs = task.models()
    bases = are_bases(specs, exp.adapter, exp.model) if target.base is not None else set()
    main = next(name for name, spec in specs.items() if spec.trained)
    models = {main: _as_model(main, specs[main], _trained_network(target, specs[main]))}
    if not task.evaluates_loss:
        return Models(models)
    for name, spec in specs.items():
        if name in bases:
            models[name] = base_of(models[main], name=name, spec=spec)
        elif name != main:
            network = _frozen_network(name, spec, target, exp, tokenizer)
            models[name] = _as_model(name, spec, network)
    return Models(models)


def _trained_network(target: Target, spec: Any) -> Any:
    """The trained network in the precision of its files; a CPU computes fp32."""
    import torch

    from llmx.models.model import CAUSAL_LM, CLASSIFICATION

    directory = target.directory
    if target.base is not None and spec.head != CAUSAL_LM:
        raise ConfigError(
            f"{directory} is an adapter in a model with a head of its own, and eval loads whole "
            "models of this kind. Write one with `python -m llmx export RUN --to merged`, and give "
            "it as --model DIR."
        )
    network = load_network(target, head=spec.head)
    network = network if torch.cuda.is_available() else network.float()
    outputs = int(getattr(network.config, "num_labels", 0))
    if spec.head == CLASSIFICATION and outputs != spec.num_labels:
        raise ConfigError(
            f"{directory} has {plural(outputs, 'output')}, and the data {spec.num_labels}. "
            "Evaluate the run (python -m llmx eval RUN), or give its labels: data.label_names."
        )
    return network


def _frozen_network(name: str, spec: Any, target: Target, exp: Experiment, tokenizer: Any) -> Any:
    """A frozen network, loaded from its own source or from the weights that the run began with."""
    import torch

    from llmx.models.model import auto_class
    from llmx.models.network_config import network_config
    from llmx.train.engine.build import check_source, check_tokenizer, with_source

    of_run = target.exp is not None and exp.model.init == "pretrained"
    if spec.source is None and not of_run:
        start = "random weights" if target.exp is not None else "not said by a model alone"
        raise ConfigError(
            f"task={exp.task.kind} compares with the model {name!r}, the one that training begins "
            f"with: it is {start}, and kept nowhere. Evaluate while training "
            "(task.eval_every_steps), or measure the model as a language model: task=sft."
        )
    of_source = with_source(exp, spec)
    check_source(of_source.model)
    check_tokenizer(of_source.model, tokenizer)
    return auto_class(spec.head, network_config(of_source.model)).from_pretrained(
        of_source.model.path,
        revision=of_source.model.revision,
        dtype="auto" if torch.cuda.is_available() else "float32",
        trust_remote_code=of_source.model.trust_remote_code,
    )


def _as_model(name: str, spec: Any, network: Any) -> Any:
    """The model that the task computes with, given one sequence per line."""
    from llmx.models.attention import AttentionMethod
    from llmx.models.experts import Routing
    from llmx.models.isolation import sees_ahead
    from llmx.models.model import BACKBONE, CAUSAL_LM, CLASSIFICATION, Model
    from llmx.models.pooling import give_pooled_forward, has_score

    network = on_device(network)
    if spec.head == CLASSIFICATION and has_score(network):
        give_pooled_forward(network)
    config = network.config.get_text_config()
    implementation = config._attn_implementation or "eager"
    causal = spec.head == CAUSAL_LM or (spec.head == CLASSIFICATION and has_score(network))
    if spec.head == BACKBONE:
        causal = not sees_ahead(network, network.device)
    return Model(
        name=name,
        spec=spec,
        module=network,
        forward=network,
        config=network.config,
        vocab_size=config.vocab_size,
        # One sequence a line: right for every architecture.
        attention=AttentionMethod(
            implementation, "none" if causal else "padding_mask", "padded", causal=causal
        ),
        dtype=network.dtype,
        device=network.device,
        routing=Routing(network),
    )


def measure(task: Any, models: Any, store: Any, *, batch: int) -> dict[str, float]:
    """The loss, what follows from it, and the task's metrics, over all samples."""
    import torch

    from llmx.data import collate
    from llmx.models.model import CAUSAL_LM
    from llmx.tasks import Mean, held_out

    began = time.monotonic()

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for start in range(0, len(store), batch):
            if sys.stderr.isatty():
                print(f"\r{start} of {plural(len(store), 'sample')}", end="", file=sys.stderr)
            rows = collate(
                held_out(task, store, range(start, min(start + batch, len(store)))),
                seq_len=store.seq_len,
                pad_id=task.pad_id,
                layout="padded",
                # Frozen models answer batch by batch here: nothing is stored.
                columns=(store.batch_columns or ()) if task.precomputed else store.batch_columns,
            )
            yield with_precomputed(task, models, rows) if task.precomputed else rows
        if sys.stderr.isatty():
            print(f"\r\033[K{time.monotonic() - began:.0f} s", file=sys.stderr)

    with torch.no_grad():
        means = task.evaluate(models, batches())
    numbers: dict[str, float] = {}
    for name, mean in means.items():
        values = {name: mean.value} if isinstance(mean, Mean) else dict(mean.values())
        values.pop("weight", None)  # what the loss is a mean over
        numbers |= {key: float(value) for key, value in values.items() if value is not None}
    if "loss" in numbers and task.normaliser == "tokens" and models.main.spec.head == CAUSAL_LM:
        loss = {"loss": numbers.pop("loss")}
        perplexity = math.exp(loss["loss"]) if loss["loss"] < 700 else math.inf
        numbers = {**loss, "perplexity": perplexity, **numbers}
    return numbers


def with_precomputed(task: Any, models: Any, batch: Any) -> dict[str, Any]:
    """The batch with the ``precomputed`` columns of the task, computed now."""
    import torch

    from llmx.data import IGNORE
    from llmx.data.store.precomputed import check_values

    targets, ids = batch["labels"] != IGNORE, batch["example_ids"]
    counts = {
        "sequence": len(ids),
        "example": int(ids.max()) + 1 if len(ids) else 0,
        "target": int(targets.sum()),
    }
    precomputed = task.precompute(models, batch)
    arrays = check_values(precomputed, task.precomputed, counts, task=task.name)
    extended = dict(batch)
    for column in task.precomputed:
        values = torch.from_numpy(arrays[column.name])
        if column.per == "token":
            by_token = values.new_zeros((*targets.shape, *column.shape))
            by_token[targets] = values
            values = by_token
        extended[column.name] = values
    return extended


def complete(task: Any, models: Any, stops: Sequence[int]) -> list[dict[str, str]]:
    """The prompts of the data with the expected and the greedy completion of each."""
    from llmx.data.eval_prompts import unreachable_completions
    from llmx.models.generate import decoder_of, generate
    from llmx.models.sampling import Sampling

    prompts = task.eval_prompts()
    if not prompts:
        raise ConfigError(
            f"task={task.name} has no prompts in this data to complete. Leave out --generate, or "
            "give conversations: task=sft data=messages."
        )
    limit = task.exp.task.eval_max_new_tokens
    if warning := unreachable_completions(prompts, limit):
        print(warning)
    greedy = Sampling(max_new_tokens=limit, stop_ids=frozenset(stops))
    decoder = decoder_of(models.main.module)
    completions = generate(decoder, [prompt.tokens for prompt in prompts], greedy)
    return [
        {
            "prompt": prompt.prompt,
            "expected": prompt.expected,
            "completion": task.decode(list(completion.text_tokens)),
        }
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def table(values: dict[str, float], declared: dict[str, Metric], *, title: str) -> str:
    """A title, and below it each metric with its value."""
    texts = {
        (declared[name].title if name in declared else name.replace("_", " ")): (
            declared[name].shown(value) if name in declared else f"{value:.6g}"
        )
        for name, value in values.items()
    }
    return "\n".join([title, *columns([*texts.items()], indent="  ")])
