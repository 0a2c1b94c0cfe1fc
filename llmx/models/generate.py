"""Text generation: completions of prompts, batched, with a key-value cache, on one process or many.

    sampling = Sampling(temperature=1.0, max_new_tokens=256, stop_ids=frozenset({2}))
    completions = generate(engine, prompts, sampling, seeds=seeds)     # all ranks together

Every rank runs as many forwards as the others, so it works under every ZeRO stage. Prompts of a
batch are padded at the left and masked, or of equal length where the attention takes no mask.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from llmx.collectives import all_gather
from llmx.config import ModelConfig
from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod, additive, windows_of
from llmx.models.loss import head_at, takes
from llmx.models.sampling import Sampling, draw, truncated, uniforms

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


def exported_generation_config(model: Any, config: Any, *, tokenizer: Any) -> Any:
    """The generation config to write beside the weights: the model's, with every stop token."""
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
    return generation


def write_generation_config(directory: Path, model: Any, config: Any, *, tokenizer: Any) -> None:
    """Write ``generation_config.json``. Its values are not judged: published configs hold some
    that ``save_pretrained`` would refuse (Llama 2: a temperature without sampling)."""
    generation = exported_generation_config(model, config, tokenizer=tokenizer)
    generation.to_json_file(directory / FILE, use_diff=True, keys_to_pop=["compile_config"])


BATCH = 32
"""Prompts completed together on one rank."""

MASKED = ("sdpa", "eager")
"""Implementations that take the mask of left padding."""

OWN_CACHE = ("xlstm",)
"""Models whose state along the sequence is a class of their own."""

STOP, LENGTH, POSITIONS = "stop", "length", "positions"
"""Why a completion ended: a stop token; ``max_new_tokens``; the model's last position."""


class Decoder(Protocol):
    """A causal language model for generation. A ``Model`` is one; a bare module becomes one by
    ``decoder_of``."""

    @property
    def module(self) -> nn.Module:
        """Its forward takes ``input_ids`` and gives ``logits``."""

    @property
    def config(self) -> Any:
        """The Hugging Face config of the model."""

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary that count; the others are never drawn."""

    @property
    def attention(self) -> AttentionMethod:
        """The method by which it gets a batch."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""

    @property
    def device(self) -> torch.device:
        """The device of its inputs."""


@dataclass(frozen=True)
class BareDecoder:
    """A causal language model that nothing wraps."""

    module: nn.Module
    config: Any
    vocab_size: int
    attention: AttentionMethod
    dtype: torch.dtype
    device: torch.device


def decoder_of(model: Any, *, try_padding: bool = False) -> BareDecoder:
    """A bare model of Transformers. Only prompts of equal length share a batch: nothing is known
    about how it takes padding. ``try_padding``: it is found out, by two short forwards."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation or "eager"
    decoder = BareDecoder(
        module=model,
        config=config,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        attention=AttentionMethod(implementation, "none", "padded"),
        dtype=model.dtype,
        device=model.device,
    )
    if try_padding:
        masked = replace(decoder, attention=AttentionMethod(implementation, "mask", "packed"))
        if takes_left_padding(config, masked.attention) and _padding_is_unseen(masked):
            return masked
    return decoder


@torch.no_grad()
def _padding_is_unseen(model: BareDecoder) -> bool:
    """Whether a prompt has the same logits with padding at its left as alone, to the bit whatever
    the padding is."""
    if not takes(type(model.module), "position_ids", by_name=True):
        return False
    prompt, pads = [(7 * i + 5) % model.vocab_size for i in range(5)], 3
    length = pads + len(prompt)
    padding = torch.tensor([pads, 0], device=model.device)
    place = torch.arange(length, device=model.device)

    def logits(pad: int) -> torch.Tensor:
        rows = [[pad] * pads + prompt, [(3 * i + 1) % model.vocab_size for i in range(length)]]
        outputs = model.module(
            input_ids=torch.tensor(rows, device=model.device),
            position_ids=(place[None, :] - padding[:, None]).clamp(min=0),
            attention_mask=_mask(model, place, length, padding),
        )
        last: torch.Tensor = outputs.logits[0, -1, : model.vocab_size].float()
        return last

    try:
        first, second = logits(0), logits(1 % model.vocab_size)
        outputs = model.module(input_ids=torch.tensor([prompt], device=model.device))
        alone = outputs.logits[0, -1, : model.vocab_size].float()
    except Exception:  # whatever a model's own code says to such a mask, it takes none
        return False
    near = 1e-3 if model.dtype == torch.float32 else 5e-2
    return torch.equal(first, second) and bool(
        (first - alone).abs().max() <= near * alone.abs().max().clamp(min=1)
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
            times: it goes through the model once for those in a batch.
        seeds: one a prompt; unused where ``sampling`` is greedy. The token at a position (counted
            from the prompt's first token) depends on the seed, the position and the tokens before
            it: not on the batch, the ranks or padding, beyond the rounding of the logits. A
            completion that was cut goes on as it would have, if prompt and completion are given
            as a prompt with the same seed.
        batch_size: prompts completed together on one rank.
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
    world, rank = _world()
    batches = group(
        rows,
        world=world,
        equal=not _all_take_left_padding(model, world=world),
        together=not sampling.greedy,
        limit=batch_size,
    )
    completed: dict[int, Completion] = {}
    with _generating(model):
        for first in range(0, len(batches), world):
            # Where a rank has no batch left it repeats the round's first, and drops the result.
            has_batch = first + rank < len(batches)
            batch = batches[first + rank] if has_batch else batches[first]
            completions = _complete(
                model,
                [rows[index] for index in batch],
                sampling,
                seeds=[keys[index] for index in batch],
                on_token=_of_batch(on_token, batch) if has_batch else None,
            )
            if has_batch:
                completed.update(zip(batch, completions, strict=True))
    if world > 1:
        for part in all_gather(completed):
            completed.update(part)
    return [completed[index] for index in range(len(rows))]


def _world() -> tuple[int, int]:
    """(number of ranks, own rank)."""
    if not torch.distributed.is_initialized():
        return 1, 0
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


def _of_batch(on_token: OnToken | None, batch: list[int]) -> OnToken | None:
    if on_token is None:
        return None
    return lambda row, token: on_token(batch[row], token)


def group(
    prompts: Sequence[tuple[int, ...]], *, world: int, equal: bool, together: bool, limit: int
) -> list[list[int]]:
    """Indices of prompts by batch, of similar (``equal``: the same) length.

    At most ``limit`` a batch; few prompts are still spread over ``world`` ranks. ``together``:
    samples of one prompt stand side by side.
    """
    first: dict[tuple[int, ...], int] = {}
    keys = [
        (len(prompt), first.setdefault(prompt, index) if together else index, index)
        for index, prompt in enumerate(prompts)
    ]
    size = max(1, min(limit, -(-len(prompts) // world)))
    batches: list[list[int]] = []
    for length, _, index in sorted(keys):
        fits = bool(batches) and len(batches[-1]) < size
        if fits and equal:
            fits = len(prompts[batches[-1][0]]) == length
        if fits:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def takes_left_padding(config: Any, attention: AttentionMethod) -> bool:
    """Whether prompts of different lengths may share a batch, padded at the left and masked."""
    windows = [window for _, window in windows_of(config)]
    if getattr(config, "layer_types", None) is None:
        windows.append(getattr(config, "sliding_window", None))
    return (
        attention.layout == "packed"  # else a state along the sequence would see the padding
        and (attention.implementation in MASKED or attention.implementation.startswith("llmx_"))
        # A cache that forgets what left the window has no place for a mask over everything.
        and not any(windows)
    )


def _all_take_left_padding(model: Decoder, *, world: int) -> bool:
    """Whether every rank does. Hosts may have other attention than each other: with other batches
    the ranks would make other numbers of forwards, and wait for each other. Collective."""
    takes_padding = takes_left_padding(model.config, model.attention)
    return all(all_gather(takes_padding)) if world > 1 else takes_padding


def cache_argument(model: Decoder) -> str | None:
    """The forward's argument for a ``DynamicCache``; None if it has none."""
    if getattr(model.config, "model_type", "") in OWN_CACHE:
        return None
    names = ("past_key_values", "cache_params")
    return next((name for name in names if takes(type(model.module), name, by_name=True)), None)


@contextlib.contextmanager
def _generating(model: Decoder) -> Iterator[None]:
    """Inside, no dropout, and an attention that takes a cache."""
    module: Any = model.module
    training = [child for child in module.modules() if child.training]
    implementation = model.attention.implementation
    packed_only = implementation.startswith("llmx_")  # knows packed lines, and no cache
    module.eval()
    if packed_only:
        module.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if packed_only:
            module.set_attn_implementation(implementation)
        for child in training:
            child.training = True


@torch.no_grad()
def _complete(
    model: Decoder,
    prompts: list[tuple[int, ...]],
    sampling: Sampling,
    *,
    seeds: list[int],
    on_token: OnToken | None,
) -> list[Completion]:
    """The completions of one batch. Collective."""
    from transformers import DynamicCache

    device, kind, world = model.device, type(model.module), _world()[0]
    name = cache_argument(model)
    # Without a cache that it takes from us, the whole row goes through the model for each token.
    cache = DynamicCache(config=model.config) if name else None
    # Samples of one prompt share its first forward; greedy ones keep the rows as they are given.
    shared = cache is not None and not sampling.greedy
    distinct = list(dict.fromkeys(prompts)) if shared else prompts
    longest = max(map(len, distinct))
    tokens, padding = _left_padded(distinct, longest, device)
    padded = bool(padding.any())
    with_positions = model.attention.isolation not in ("padding_mask", "none") and takes(
        kind, "position_ids"
    )
    last = getattr(model.config, "max_position_embeddings", None)
    last = last or longest + sampling.max_new_tokens
    stops = torch.tensor(sorted(sampling.stop_ids), device=device, dtype=torch.long)
    drawn: list[list[int]] = [[] for _ in prompts]
    ended: list[str | None] = [None] * len(prompts)
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []
    for length in range(longest, longest + sampling.max_new_tokens):
        new = tokens.shape[1]
        place = torch.arange(length - new, length, device=device)
        arguments: dict[str, Any] = {}
        if with_positions:
            arguments["position_ids"] = (place[None, :] - padding[:, None]).clamp(0, last - 1)
        if padded:
            arguments["attention_mask"] = _mask(model, place, length, padding)
        if name:
            arguments.update({name: cache, "use_cache": True})
        every_row = torch.arange(len(tokens), device=device)
        with head_at(model.module, every_row, torch.full_like(every_row, new - 1)):
            logits = model.module(input_ids=tokens, **arguments).logits[0, :, : model.vocab_size]
            logits = logits.float()
        if cache is not None and len(tokens) < len(prompts):
            row_of = torch.tensor([distinct.index(prompt) for prompt in prompts], device=device)
            cache.reorder_cache(cast(torch.LongTensor, row_of))
            logits, padding, tokens = logits[row_of], padding[row_of], tokens[row_of]
        ahead = length - longest
        fed = [len(prompt) + ahead for prompt in prompts]
        chosen, logp, sampled_logp = _choose(logits, sampling, seeds, fed)
        steps.append((logp, sampled_logp))
        stopped = torch.isin(chosen, stops)
        for row, (token, stop) in enumerate(zip(chosen.tolist(), stopped.tolist(), strict=True)):
            if fed[row] > last:  # the prompt itself; forwards go on for the others
                ended[row] = ended[row] or POSITIONS
            if ended[row]:
                continue
            drawn[row].append(token)
            if stop:
                ended[row] = STOP
            elif fed[row] >= last and len(drawn[row]) < sampling.max_new_tokens:
                ended[row] = POSITIONS  # no place to feed the token back
            if on_token is not None:
                on_token(row, token)
        # Everyone stops together, or ZeRO-3 would wait for a forward that never comes.
        if not _any_rank(not all(ended), world, device):
            break
        tokens = chosen[:, None] if name else torch.cat([tokens, chosen[:, None]], dim=1)
    logps, sampled_logps = (
        torch.stack(values, dim=1).tolist() for values in zip(*steps, strict=True)
    )
    return [
        Completion(
            tokens=tuple(drawn[row]),
            logps=tuple(logps[row][: len(drawn[row])]),
            sampled_logps=tuple(sampled_logps[row][: len(drawn[row])]),
            ended=ended[row] or LENGTH,
        )
        for row in range(len(prompts))
    ]


def _left_padded(
    prompts: list[tuple[int, ...]], longest: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [n, longest], padding tokens at the left of each row [n])."""
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    return tokens.to(device), padding


def _choose(
    logits: torch.Tensor, sampling: Sampling, seeds: list[int], positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token, its log-probability under the model, under what was drawn from), each [n]."""
    if sampling.greedy:
        chosen = logits.argmax(dim=-1)
        logp = _logp(logits, chosen)
        return chosen, logp, torch.zeros_like(logp)
    drawn_from = logits if sampling.is_model else truncated(logits, sampling)
    chosen = draw(drawn_from, torch.from_numpy(uniforms(seeds, positions)).to(logits.device))
    logp = _logp(logits, chosen)
    return chosen, logp, logp if sampling.is_model else _logp(drawn_from, chosen)


def _logp(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(dim=-1)


def _any_rank(condition: bool, world: int, device: torch.device) -> bool:
    """Whether it is so on any rank. Collective."""
    if world == 1:
        return condition
    flag = torch.tensor(int(condition), dtype=torch.int32, device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag)


def _mask(model: Decoder, place: torch.Tensor, length: int, padding: torch.Tensor) -> torch.Tensor:
    """[B, 1, new, length]: causal, and blind to the padding at the left."""
    keys = torch.arange(length, device=place.device)
    causal = keys[None, None, :] <= place[None, :, None]
    # A query that is itself padding sees itself: a row of nothing would be NaN in softmax.
    real = (keys[None, None, :] >= padding[:, None, None]) | (
        keys[None, None, :] == place[None, :, None]
    )
    mask = (causal & real).unsqueeze(1)
    return additive(mask, dtype=model.dtype) if model.attention.implementation == "eager" else mask
