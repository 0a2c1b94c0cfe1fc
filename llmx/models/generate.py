"""Text generation: completions of prompts, batched, with a key-value cache, on one process or many.

    sampling = Sampling(temperature=1.0, max_new_tokens=256, stop_ids=frozenset({2}))
    completions = generate(engine.main, prompts, sampling, seeds=seeds)     # all ranks together

The ranks share the prompts. Where ZeRO-3 gathers layers in each forward, they make as many as each
other. How rows are completed together is in ``llmx.models.decode``.

Where a completion ends is said here alone, for evaluation, the command ``generate``, the final
model and every export. A tokenizer has one EOS token, and a chat template may close an assistant's
turn with another (``<|im_end|>``); a pretrained model may name more (Llama 3: three). All of them
go to ``eos_token_id`` of ``generation_config.json``, which ``generate()`` of Transformers, vLLM and
others read. ``cat RUN_DIR/model/generation_config.json`` shows it.

Shown by ``python -m pytest tests/unit/test_models_generate.py``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from llmx.collectives import all_gather, world
from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod
from llmx.models.loss import takes
from llmx.models.sampling import Sampling

FILE = "generation_config.json"


def keep_generation_config(model: Any, source: ModelConfig) -> None:
    """Give ``model`` the generation config that was published with its weights, if there is one.

    A model that is built from its config alone has lost it, and with it some of its stop tokens.
    """
    from transformers import GenerationConfig

    assert source.path is not None
    try:
        published = GenerationConfig.from_pretrained(
            str(Path(source.path).expanduser()), revision=source.revision or "main"
        )
    except (OSError, ValueError):  # most models of research have none
        return
    model.generation_config = published


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a completion of ``model``, sorted: those of the tokenizer and its chat
    template, and what the model's own generation config names besides.

    Of the latter, ids that are ordinary text in this tokenizer are left out: it is not the one
    that the model was published with.
    """
    from llmx.data.eval_prompts import stop_token_ids

    published = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    published_ids = {published} if isinstance(published, int) else set(published or ())
    special_ids = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    return tuple(sorted({*stop_token_ids(tokenizer), *(published_ids & special_ids)}))


def write_generation_config(directory: Path, model: Any, config: Any, *, tokenizer: Any) -> None:
    """Write ``generation_config.json``: the model's, with every stop token. Its values are not
    judged: published configs hold some that ``save_pretrained`` would refuse (Llama 2: a
    temperature without sampling)."""
    from transformers import GenerationConfig

    generation = copy.deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(generation, name, None) is None:
            setattr(generation, name, getattr(config, name, None))
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    stops = list(stop_ids(model, tokenizer))
    if stops:
        generation.eos_token_id = stops if len(stops) > 1 else stops[0]
    generation.use_cache = True
    # Transformers 4 makes one that it takes for derived anew from config.json, where there is only
    # one stop token.
    generation._from_model_config = False
    generation.to_json_file(directory / FILE, use_diff=True, keys_to_pop=["compile_config"])


BATCH = 64
"""Prompts completed together on one rank (as ``llmx.plan.rollout_time`` and docs/tasks.md say)."""

MASKED = ("sdpa", "eager")
"""Implementations that take the mask of left padding."""

OWN_CACHE = ("xlstm",)
"""Models whose state along the sequence is a class of their own."""

STOP, LENGTH, POSITIONS = "stop", "length", "positions"
"""Ends of a completion: a stop token; ``max_new_tokens``; the model's last position."""


Weights = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass
class Decoder:
    """A causal language model for generation; a ``Model`` is one."""

    module: nn.Module
    """The module itself, inside DeepSpeed's engine where there is one."""
    config: Any
    """The Hugging Face config, vocabulary as in memory."""
    vocab_size: int
    """Rows of the vocabulary that count, and are drawn; the config's own may be padded."""
    attention: AttentionMethod
    """The method by which it gets a batch."""
    dtype: torch.dtype
    """Dtype of the activations."""
    device: torch.device
    for_generation: Weights = contextlib.nullcontext
    """Inside, an engine holds this network whole, where that has room (``weights_for_generation``).
    """


def decoder_of(model: Any, *, try_padding: bool = False) -> Decoder:
    """A bare model of Transformers. Only prompts of equal length share a batch: nothing is known
    about how it takes padding. ``try_padding``: a tiny model of its class is tried."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation or "eager"
    attention = AttentionMethod(implementation, "none", "padded")
    if try_padding:
        from llmx.models.isolation import find_methods

        trial = find_methods(
            model.config,
            implementations=[implementation],
            layouts=["packed"],
            trust_remote_code=type(model).__module__.startswith("transformers_modules."),
        )
        if trial.packed is not None and trial.packed.isolation == "mask":  # as decoding does
            attention = trial.packed
    return Decoder(
        module=model,
        config=config,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        attention=attention,
        dtype=model.dtype,
        device=model.device,
    )


@dataclass(frozen=True)
class Completion:
    """The tokens that a model has added to a prompt.

    ``logps`` and ``sampled_logps`` are the same number where tokens are drawn with temperature 1
    and without truncation. A policy gradient compares the policy that draws with the one that is
    trained: its ratio is of two log-probabilities of the same kind, and the training forward
    computes those of ``logps``. It is exact for samples of ``Sampling(temperature=1)`` alone;
    for others ``exp(logps - sampled_logps)`` is the importance weight of a token.
    """

    tokens: tuple[int, ...]
    """All that were drawn; the stop token, if one ended it, is the last."""
    logps: tuple[float, ...]
    """log p of each token under the model itself: temperature 1, nothing removed (fp32)."""
    sampled_logps: tuple[float, ...]
    """log p of each token under what was drawn from, with temperature, top-k and top-p (fp32);
    0 for greedy."""
    ended: str
    """``stop``, ``length`` or ``positions``."""
    age: int = 0
    """Updates by which the weights that drew it are behind those that were asked: over 0 only
    with ``rollout.max_staleness``."""

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The tokens to decode: all but the stop token."""
        return self.tokens[:-1] if self.ended == STOP else self.tokens


OnToken = Callable[[int, int], None]
"""Called with (index of the prompt, token) as soon as the token is drawn; stop tokens too."""


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[int] | None = None,
    batch_size: int = BATCH,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """The completion of every prompt, in order; the same on every rank. Collective.

    Args:
        prompts: token ids, at least one each. For several samples of a prompt, give it several
            times: it goes through the model once for those that a rank completes together.
        seeds: one a prompt; unused where ``sampling`` is greedy. The token at a position (counted
            from the prompt's first token) depends on the seed, the position and the tokens before
            it: not on the batch, the ranks or padding, beyond the rounding of the logits. A
            completion that was cut goes on as it would have, if prompt and completion are given
            as a prompt with the same seed.
        batch_size: prompts completed together on one rank; where one ends, the next one joins.
        on_token: on the rank that completes the prompt. What it raises ends all completions.

    A completion ends with a token of ``sampling.stop_ids``, after ``max_new_tokens``, or where
    the model has no position left; it is empty for a prompt that is too long by itself.

    Raises ConfigError for a token that the model has no row for.
    """
    rows = [tuple(map(int, prompt)) for prompt in prompts]
    table = cast(Any, model.module).get_input_embeddings().weight
    num_embeddings = getattr(table, "ds_shape", table.shape)[0]  # whole, also at ZeRO 3
    for index, prompt in enumerate(rows):
        if not prompt:
            raise ValueError(f"prompt {index} has no tokens. Begin it with a BOS or EOS token.")
        if max(prompt) >= num_embeddings:
            raise ConfigError(
                f"The prompt has the token id {max(prompt)}, and the model an embedding of "
                f"{num_embeddings} rows. Remove it from the prompt, or copy the model's own "
                "tokenizer into its directory."
            )
    if not sampling.greedy and (seeds is None or len(seeds) != len(rows)):
        num_seeds = "none" if seeds is None else len(seeds)
        raise ValueError(f"{len(rows)} prompts need a seed each, {num_seeds} given")
    keys = [0] * len(rows) if sampling.greedy or seeds is None else [int(seed) for seed in seeds]
    from llmx.models.decode import Decoding, Row  # with transformers' cache

    num_ranks, rank = world()
    groups: dict[tuple[int, ...], list[Row]] = {}
    last = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for index in shares(rows, world=num_ranks)[rank]:
        too_long = bool(last and len(rows[index]) > last)
        row = Row(index, rows[index], keys[index], ended=POSITIONS if too_long else None)
        groups.setdefault(rows[index], []).append(row)
    queue = [
        group[at : at + batch_size]
        for group in sorted(groups.values(), key=lambda group: -len(group[0].prompt))
        for at in range(0, len(group), batch_size)
        if group[0].ended is None
    ]
    slots = min(batch_size, sum(map(len, queue)))
    with model.for_generation(), _generating(model):
        decoding = Decoding(model, sampling, slots=slots, on_token=on_token)
        decoding.run(queue, lockstep=num_ranks > 1 and _is_sharded(model.module))
    completed = {row.index: row.completion() for group in groups.values() for row in group}
    if num_ranks > 1:
        for part in all_gather(completed):
            completed.update(part)
    return [completed[index] for index in range(len(rows))]


def _is_sharded(module: nn.Module) -> bool:
    """Whether ZeRO-3 gathers its layers in every forward: all ranks then make as many."""
    return any(getattr(p, "ds_numel", p.numel()) != p.numel() for p in module.parameters())


def shares(prompts: Sequence[tuple[int, ...]], *, world: int) -> list[list[int]]:
    """Indices of the prompts that each rank completes: as many as every other, to one; of all
    lengths; and equal prompts on one rank, as far as that goes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(index)
    longest_first = sorted(groups.values(), key=lambda group: -len(prompts[group[0]]))
    dealt = [
        index for rank in range(world) for group in longest_first[rank::world] for index in group
    ]
    ends = [len(dealt) * rank // world for rank in range(world + 1)]
    return [dealt[start:end] for start, end in pairwise(ends)]


WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kind of attention layer -> the value of the config that says how far it sees."""


def takes_left_padding(config: Any, attention: AttentionMethod) -> bool:
    """Whether prompts of different lengths may share a batch, padded at the left and masked."""
    kinds = getattr(config, "layer_types", None)
    windows = [
        getattr(config, name, None)
        for kind, name in WINDOWS.items()
        if kinds is None or kind in kinds
    ]
    return (
        attention.layout == "packed"  # else a state along the sequence would see the padding
        and (attention.implementation in MASKED or attention.implementation.startswith("llmx_"))
        # A cache that forgets what left the window has no place for a mask over everything.
        and not any(windows)
    )


def cache_argument(model: Decoder) -> str | None:
    """The forward's argument for a ``DynamicCache``; None if it has none."""
    if getattr(model.config, "model_type", "") in OWN_CACHE:
        return None
    names = ("past_key_values", "cache_params")
    return next((name for name in names if takes(type(model.module), name, by_name=True)), None)


@contextlib.contextmanager
def _generating(model: Decoder) -> Iterator[None]:
    """Inside, no dropout, and an attention that takes a cache: not cuDNN's, whose plan is made anew
    for each length, so for each token."""
    module: Any = model.module
    with_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    training = [child for child in module.modules() if child.training]
    implementation = model.attention.implementation
    packed_only = implementation.startswith("llmx_")  # knows packed lines, and no cache
    module.eval()
    if packed_only:
        module.set_attn_implementation("sdpa")
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        if packed_only:
            module.set_attn_implementation(implementation)
        for child in training:
            child.training = True
