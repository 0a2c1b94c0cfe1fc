"""The network of a rank: its config, its weights, sharded from the first moment under ZeRO-3.

From scratch or pretrained, a model is built empty on its device and filled parameter by
parameter, so that under ZeRO-3 no rank ever holds it whole. Tried by
``python -m pytest -m deepspeed tests/integration/test_train_models.py``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llmx.collectives import world
from llmx.config import AdapterConfig, DataConfig, ModelConfig
from llmx.config.model_rules import added_tokens, head_problem
from llmx.errors import ConfigError
from llmx.models.blocks import compile_blocks, recompute
from llmx.models.experts import accept_masks
from llmx.models.generate import keep_generation_config
from llmx.models.initialise import initialise
from llmx.models.load import OnArrival, load_weights
from llmx.models.model import BACKBONE, CAUSAL_LM, CLASSIFICATION, ModelSpec, auto_class
from llmx.models.network_config import network_config
from llmx.models.pooling import (
    give_pooled_forward,
    has_other_labels,
    has_score,
    head_names,
    pooler_names,
    take_config,
)
from llmx.models.quantized import (
    Quantization,
    linear_layers_on_meta,
    materialise,
    quantize_on_arrival,
    quantized_layers,
    to_quantize,
)
from llmx.models.varlen import name_of_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def padded_vocab(size: int, *, multiple_of: int) -> int:
    """``size`` rounded up: rows of the embedding that a matrix unit likes."""
    return math.ceil(size / multiple_of) * multiple_of if multiple_of > 1 else size


def true_vocab(tokenizer: Any) -> int:
    """Ids the tokenizer can give; ``len(tokenizer)`` misses the holes that some have."""
    ids: dict[str, int] = tokenizer.get_vocab()
    return max(len(tokenizer), max(ids.values()) + 1)


def num_embeddings(model: ModelConfig, tokenizer: Any) -> int | None:
    """Rows of the embedding of a pretrained model whose tokenizer has tokens beyond them
    (google/gemma-3-1b-it: ``<image_soft_token>``); None where each token has a row."""
    if model.init == "scratch" or added_tokens(model):
        return None
    try:
        rows = getattr(network_config(model).get_text_config(), "vocab_size", None)
    except (OSError, ValueError):  # not on this machine; no network is built without it
        return None
    return rows if isinstance(rows, int) and rows < true_vocab(tokenizer) else None


def model_config(
    model: ModelConfig, data: DataConfig, *, tokenizer: Any, spec: ModelSpec | None = None
) -> Any:
    """The Hugging Face config of the run's model, vocabulary padded when from scratch, or where
    tokens that are added make it grow.

    ``spec``: what it ends in; None for a causal LM.
    """
    config = network_config(model)
    text = config.get_text_config()
    rows = vocab_rows(model, text, tokenizer)
    if model.init == "scratch" or rows > text.vocab_size:
        text.vocab_size = padded_vocab(rows, multiple_of=model.pad_vocab_to_multiple_of)
    if model.init == "scratch":
        _take_special_tokens(text, tokenizer)
    if spec is not None and spec.head == CLASSIFICATION:
        take_config(
            config,
            num_labels=spec.num_labels,
            labels=spec.labels,
            problem=spec.problem,
            tokenizer=tokenizer,
        )
    config.use_cache = text.use_cache = False
    _check(text, tokenizer, seq_len=data.seq_len)
    return config


def vocab_rows(model: ModelConfig, text: Any, tokenizer: Any) -> int:
    """Rows of the vocabulary that count: those that the tokenizer can give from scratch, those of
    the pretrained model, and those of added tokens that it has no row for.

    ``text``: the config of the language model, as published (``network_config``).
    """
    if model.init == "scratch":
        return true_vocab(tokenizer)
    rows: int = text.vocab_size
    return max(rows, true_vocab(tokenizer)) if added_tokens(model) else rows


def new_token_ids(model: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Ids of the tokens that are added to a pretrained model."""
    if model.init == "scratch":
        return ()
    return tuple(tokenizer.convert_tokens_to_ids(added_tokens(model)))


def _take_special_tokens(config: Any, tokenizer: Any) -> None:
    """A new model answers with the tokenizer's own special tokens, not with its family's."""
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    # An embedding that names a padding row gives it a zero vector and no gradient: only right
    # if that token is nothing but padding.
    alone = tokenizer.pad_token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id)
    config.pad_token_id = tokenizer.pad_token_id if alone else None


def _check(config: Any, tokenizer: Any, *, seq_len: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and seq_len > limit:
        raise ConfigError(
            f"data.seq_len={seq_len} is over the {limit} positions of the model. "
            f"Set data.seq_len to at most {limit}, or model.config.max_position_embeddings."
        )
    # Tokens that were added to it may lack a row: a record with one of them is refused.
    ids = set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
    if (largest := max(ids, default=0)) >= config.vocab_size:
        raise ConfigError(
            f"The tokenizer has ids up to {largest}, the model an embedding of "
            f"{config.vocab_size} rows. Set model.tokenizer to the model's own tokenizer; "
            "model.add_tokens adds tokens to it."
        )


def build_model(
    source: ModelConfig,
    seed: int,
    config: Any,
    *,
    precision: str,
    device: torch.device,
    implementation: str,
    ds_config: dict[str, Any],
    head: str = CAUSAL_LM,
    new_tokens: Sequence[int] = (),
    weights: bool = True,
    adapter: AdapterConfig | None = None,
) -> nn.Module:
    """A network with its weights in place, in the training dtype; by default a causal LM.

    Weights from scratch depend on ``seed`` and the parameter's module alone: the same for
    every ZeRO stage and number of ranks. Needs ``torch.distributed`` under ZeRO-3.

    ``new_tokens``: ids that pretrained weights know nothing of (``new_token_ids``).
    ``weights``: else parameters stay as they were made, for a network that is only looked at.
    ``adapter``: the one that will be put into it, where it may want the weights in 4 bits.
    """
    published = source.init == "pretrained" and weights
    if published and (problem := head_problem(config.to_dict(), head, f"model.path={source.path}")):
        raise ConfigError(problem)
    dtype = DTYPES[precision]
    stage = ds_config["zero_optimization"]["stage"]
    quantization = Quantization.of(adapter) if adapter is not None else None
    _import_network(head, config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            _empty_model(stage=stage, device=device, ds_config=ds_config, dtype=dtype)
        )
        if quantization is not None:
            stack.enter_context(linear_layers_on_meta())
        model = _construct(source, config, dtype=dtype, implementation=implementation, head=head)
    model.tie_weights()
    on_arrival: OnArrival | None = None
    if quantization is not None and adapter is not None:
        head_parameters = head_names(model) if head == CLASSIFICATION else set()
        layers = to_quantize(model, adapter, without=head_parameters | pooler_names(model))
        materialise(model, layers, device=device)
        model.tie_weights()
        on_arrival = quantize_on_arrival(model, quantization, device=device, dtype=dtype)
    config.architectures = model.config.architectures = [type(model).__name__]
    if head == CLASSIFICATION and has_score(model):
        give_pooled_forward(model)
    accept_masks(model)
    if not weights:
        pass
    elif source.init == "scratch":
        initialise(model, seed=seed)
    else:
        drawn = load_weights(
            model,
            source,
            seed=seed,
            head=head,
            replaced=head == CLASSIFICATION and has_other_labels(network_config(source), config),
            new_tokens=new_tokens,
            on_arrival=on_arrival,
        )
        if drawn and head == CLASSIFICATION and world()[1] == 0:
            print(
                f"model.path={source.path} has no classification head for these labels. Newly "
                f"initialised (seed={seed}): {', '.join(sorted(drawn))}.",
                flush=True,
            )
        keep_generation_config(model, source)
    if head == BACKBONE:
        for name in pooler_names(model):  # it is behind the hidden states: nothing trains it
            model.get_parameter(name).requires_grad_(False)
    if source.activation_checkpointing != "none":
        recompute(model, source.activation_checkpointing)
    if source.compile:
        compile_blocks(model)
    return model


def _import_network(head: str, config: Any) -> None:
    """Import the modules of a network of transformers and of the language model in it.

    On every rank before ``deepspeed.zero.Init``, which wraps the ``__init__`` of each class of
    modules, and at its end takes from those that were defined meanwhile what they had around it
    (0.19.8): experts lose the decorator that gives them their config.
    """
    from transformers import AutoModel

    auto_class(head, config)._model_mapping.get(type(config), None)
    AutoModel._model_mapping.get(type(config.get_text_config()), None)


def _construct(
    model: ModelConfig, config: Any, *, dtype: torch.dtype, implementation: str, head: str
) -> PreTrainedModel:
    try:
        network: PreTrainedModel = auto_class(head, config).from_config(
            config,
            dtype=dtype,
            attn_implementation=implementation,
            trust_remote_code=model.trust_remote_code,
        )
        return network
    except ValueError as error:
        if "attn_implementation" in str(error) or "attention" in str(error).lower():
            raise ConfigError(
                f"model.attention={name_of_attention(implementation)} does not work with "
                f"{type(config).__name__}: {error} Set model.attention=eager."
            ) from error
        if head != CAUSAL_LM and "Unrecognized configuration" in str(error):
            raise ConfigError(
                f"transformers has no {head} network for {type(config).__name__}. "
                "Choose another architecture."
            ) from error
        raise


@contextlib.contextmanager
def _empty_model(
    *, stage: int, device: torch.device, ds_config: dict[str, Any], dtype: torch.dtype
) -> Iterator[None]:
    """Inside, a model is made without drawing weights; under ZeRO-3 sharded as it is made.

    Transformers' own way (``HfDeepSpeedConfig``) is not used: it keeps a process-wide state,
    draws the weights of rank 0 from one stream, and reads a checkpoint whole on rank 0.
    """
    from transformers.initialization import no_init_weights

    with contextlib.ExitStack() as stack:
        if stage == 3:
            import deepspeed
            from transformers.integrations.deepspeed import prevent_arange_dtype_change

            # zero.Init turns every new float tensor into the training dtype; the rotary
            # frequencies come from arange and must stay fp32. Entered first, as it must be.
            stack.enter_context(prevent_arange_dtype_change())
            # From the config: DeepSpeed 0.19.8 takes its argument `dtype` only where
            # the device knows fp16; on a CPU it would be bf16, whatever is asked for.
            precisions = {name: {"enabled": dtype == DTYPES[name]} for name in ("bf16", "fp16")}
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=ds_config | precisions))
        else:
            stack.enter_context(device)
        stack.enter_context(no_init_weights())
        yield


def num_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Elements of all parameters, or of the ``trained`` ones; tied ones once, whole also under
    ZeRO-3. Weights that are kept in 4 bits are counted."""
    packed = 0 if trained else sum(layer.num_weights for layer in quantized_layers(model).values())
    return packed + sum(
        getattr(p, "ds_numel", p.numel())
        for p in model.parameters()
        if p.requires_grad or not trained
    )
