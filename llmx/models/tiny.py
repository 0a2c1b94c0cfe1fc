"""A tiny config of the same architecture: narrow, few layers, but every kind of layer.

What a model computes with its inputs (masks, positions, state along the sequence) is decided by
its class and its options, not by its width. So a question about a model of 70B parameters is
answered by one of 100,000, on a CPU, in a fraction of a second (``llmx.models.isolation`` asks).
Tried by ``python -m pytest tests/unit/test_train_isolation.py``.
"""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

WIDTHS = {
    # The widths of the network, under the names that the configs of transformers use.
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "emb_dim": 64, "embedding_dim": 64,
    "embedding_size": 64, "word_embed_proj_dim": 64, "input_embedding_size": 64,
    "output_embedding_size": 64, "attention_hidden_size": 64, "lru_width": 64,
    "intermediate_size": 64, "n_inner": 64, "ffn_dim": 64, "ffn_hidden_size": 64,
    "decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "dim_ff": 64, "dff": 64, "d_inner": 64,
    "feed_forward_size": 64, "intermediate_size_mlp": 64, "dense_intermediate_size": 64,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "hidden_size_per_layer_input": 16, "laurel_rank": 8, "indexer_head_dim": 16,
    "block_multiple_of": 16, "base_channels": 32,
    # Heads.
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "head_dim": 16, "d_head": 16, "dim_head": 16, "kv_channels": 16, "attention_head_size": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 16, "rotary_dim": 8,
    "index_head_dim": 16, "index_n_heads": 4, "query_pre_attn_scalar": 16,
    "global_head_dim": 16, "swa_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_v_head_dim": 16,
    # State-space, linear and convolutional layers.
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
    "mamba_d_ssm": 128, "mamba_dt_rank": 8, "mamba_chunk_size": 8, "chunk_size": 8,
    "state_size": 8, "time_step_rank": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
    # Experts.
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "zero_expert_num": 2,
    # Tables.
    "vocab_size": 96, "vocab_size_per_layer_input": 96, "decoder_vocab_size": 96,
    "unpadded_vocab_size": 96, "shape_vocab_size": 96, "pronunciation_vocab_size": 96,
    "ngram_vocab_size_base": 96,
}  # fmt: skip
"""Key of a config -> its largest value in a tiny config."""

LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
    "num_decoder_layers", "num_encoder_layers", "num_blocks",
)  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HEAD_WIDTHS = (
    "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "rotary_dim",
    "query_pre_attn_scalar", "global_head_dim",
)  # fmt: skip
WINDOWS = (
    "sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size",
    "window_size", "local_attention", "keep_window_size",
)  # fmt: skip
"""Keys of windows: how many tokens back some layers see."""
WINDOW, LONG_WINDOW = 4, 512
"""A window that a test's row crosses, and one that none reaches, tokens."""
INDEX_LISTS = (
    "full_attn_idxs",
    "moe_layers",
    "mlp_only_layers",
    "ple_layer_ids",
    "hybrid_layer_ids",
)
PERIODS = {
    # Layers of a kind come at every n-th place: the place within the period stays in it.
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
}


def tiny_config(
    config: Any, *, seq_len: int = 1 << 30, per_kind: int = 1, real_heads: bool = False
) -> Any:
    """A copy of ``config`` whose model has about 100,000 parameters.

    Args:
        config: a Hugging Face config.
        seq_len: a window that is as long as this plays no part, nor does it here.
        real_heads: keep how wide a head is, for kernels that have limits there.
        per_kind: layers of each kind that are kept (some share weights with the next of theirs).

    Kept: the class, every switch, the ratio of query to key heads, kinds of layers (two layers
    at least). It may be that a config has widths that are tied in a way this
    does not know: building or running the model then fails, and the caller has no answer.
    """
    tiny = copy.deepcopy(config)
    _shrink(tiny, seq_len=seq_len, per_kind=per_kind)
    if real_heads:
        _restore_heads(tiny, config)
    return tiny


def _shrink(config: Any, *, seq_len: int, per_kind: int) -> None:
    values = config.__dict__
    for value in values.values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value, seq_len=seq_len, per_kind=per_kind)
    ratio = _query_heads_per_key_head(values)
    if values.get("head_dim") is not None and values["head_dim"] == values.get("qk_rope_head_dim"):
        values["head_dim"] = WIDTHS["qk_rope_head_dim"]
    for key, small in WIDTHS.items():
        if _is_int(values.get(key)) and values[key] > small:
            values[key] = small
        elif isinstance(values.get(key), list):  # a width for each layer
            values[key] = [min(width, small) if _is_int(width) else width for width in values[key]]
    heads = next((values[key] for key in HEADS if _is_int(values.get(key))), 4)
    for key in KV_HEADS:
        if _is_int(values.get(key)):
            values[key] = max(1, heads // ratio)
    for key in WINDOWS:
        if _is_int(values.get(key)) and values[key] > WINDOW:
            values[key] = WINDOW if values[key] < seq_len else LONG_WINDOW
    _tie_widths(values)
    _special_tokens_inside(values)
    _fewer_layers(values, per_kind=per_kind)


def _tie_widths(values: dict[str, Any]) -> None:
    """Widths that follow from others, where a config stores them: heads x head = inner width."""
    hidden = values.get("hidden_size")
    if not _is_int(hidden):
        return
    if "attention_head_dim" in values:  # Zamba: attention over the input beside the embedding
        values["attention_hidden_size"] = 2 * hidden
        values["attention_head_dim"] = 2 * hidden // values["num_attention_heads"]
    expand = values.get("mamba_expand", values.get("expand"))
    if not isinstance(expand, int | float):
        return
    inner = int(values.get("mamba_d_ssm") or expand * hidden)
    pairs = [
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
    ]
    if _is_int(values.get("state_size")):  # Mamba 2
        pairs.append(("num_heads", "head_dim"))
    for heads, width in pairs:
        if _is_int(values.get(heads)) and _is_int(values.get(width)):
            values[width] = inner // values[heads]


def _special_tokens_inside(values: dict[str, Any]) -> None:
    """Ids that a smaller table has; 95 for padding, which is none of a test's tokens."""
    size = WIDTHS["vocab_size"]
    for key, value in values.items():
        if key == "pad_token_id" and _is_int(value):
            values[key] = size - 1
        elif key.endswith("_token_id") and _is_int(value) and value >= size:
            values[key] = size - 2


def _restore_heads(tiny: Any, config: Any) -> None:
    """Heads as wide as before: stored by themselves, or as a part of the hidden size."""
    new, old = tiny.__dict__, config.__dict__
    for key in HEAD_WIDTHS:
        if _is_int(old.get(key)):
            new[key] = old[key]
    heads = next((old[key] for key in HEADS if _is_int(old.get(key))), None)
    width = next((old[key] for key in ("hidden_size", "n_embd", "d_model") if key in old), None)
    if heads and width and not _is_int(old.get("head_dim")):
        wide = width // heads * next(new[key] for key in HEADS if _is_int(new.get(key)))
        for key, value in new.items():
            if old.get(key) == width and value == WIDTHS.get(key):
                new[key] = wide


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _query_heads_per_key_head(values: dict[str, Any]) -> int:
    heads: int | None = next((values[key] for key in HEADS if _is_int(values.get(key))), None)
    keys: int | None = next((values[key] for key in KV_HEADS if _is_int(values.get(key))), None)
    if not heads or not keys:
        return 1
    return min(4, max(1, heads // keys))


def _fewer_layers(values: dict[str, Any], *, per_kind: int) -> None:
    """So many layers of each kind, in their order; two where all are of one kind."""
    for period, offset in PERIODS.items():
        if _is_int(values.get(period)):
            values[period] = min(values[period], 2)
            values[offset] = values[offset] % values[period]
    if _is_int(values.get("num_kv_shared_layers")):
        values["num_kv_shared_layers"] = 0  # counted from the end: layers that take others' keys
    if _is_int(values.get("first_k_dense_replace")):
        values["first_k_dense_replace"] = min(values["first_k_dense_replace"], 1)
    for key in LAYERS:
        count = values.get(key)
        if not _is_int(count):
            continue
        chosen = _layers_of_each_kind(values, count, per_kind=per_kind)
        for name, value in list(values.items()):
            if name in INDEX_LISTS:
                continue
            if isinstance(value, list | tuple) and len(value) == count:
                values[name] = type(value)(value[index] for index in chosen)
        for name in INDEX_LISTS:
            if isinstance(values.get(name), list):
                inside = set(values[name])
                values[name] = [new for new, old in enumerate(chosen) if old in inside]
        values[key] = len(chosen)


def _layers_of_each_kind(values: dict[str, Any], count: int, *, per_kind: int) -> list[int]:
    lists = [
        value
        for name, value in values.items()
        if isinstance(value, list | tuple) and len(value) == count and name not in INDEX_LISTS
    ]
    lists += [
        [index in values[name] for index in range(count)]
        for name in INDEX_LISTS
        if isinstance(values.get(name), list)
    ]
    kinds: dict[str, list[int]] = {}
    for index in range(count):
        kinds.setdefault(repr([kinds_by_layer[index] for kinds_by_layer in lists]), []).append(
            index
        )
    chosen = sorted(index for layers in kinds.values() for index in layers[:per_kind])
    return chosen if len(chosen) > 1 else list(range(min(2, count)))
