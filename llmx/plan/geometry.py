"""The size of a network from its Hugging Face config values: parameters, widths, limits.

Pure; needs neither transformers nor weights, so that a plan is there before anything is
loaded. Counts are tested against transformers' own models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmx.config.model_rules import LANGUAGE_SECTION, added_tokens
from llmx.config.schema import ModelConfig


@dataclass(frozen=True)
class Geometry:
    """The sizes that the time model reads."""

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    kv_size: int
    """Width of keys (and of values): heads of K x head width."""
    vocab_size: int
    num_heads: int = 1
    query_size: int = 0
    """Width of queries: heads x head width. Not always ``hidden_size`` (Qwen3)."""
    block: str = "llama"
    """How a layer is built: ``llama`` (RMSNorm, gated), or with LayerNorm as ``gpt2``,
    ``opt`` and ``bert``."""
    causal: bool = True
    """A token sees those before it; else all of its row."""
    keeps_scores: bool = False
    """Its attention has no kernel that keeps no scores."""
    qk_norm: bool = False
    """Queries and keys are normalised (Qwen3)."""
    num_looked_up: int = 0
    """Parameters of embeddings (of positions, too), which multiply nothing; a tied one multiplies
    as the head."""

    def flops_per_token(self, seq_len: int, *, trained: int | None = None) -> float:
        """Training FLOPs a token: 6 N plus attention (12 L x heads x head width x s, halved where
        it is causal). N leaves out what is looked up. Frozen weights have no gradients of their
        own: 4 N, and 6 for each of the ``trained`` parameters beside them."""
        dense = self.num_parameters - self.num_looked_up
        weights = 6.0 * dense if trained is None else 4.0 * dense + 6.0 * trained
        return weights + self.attention_flops_per_token(seq_len)

    def attention_flops_per_token(self, seq_len: int) -> float:
        """The training FLOPs of a token that attention computes."""
        width = self.query_size or self.hidden_size
        return (6.0 if self.causal else 12.0) * self.num_layers * width * seq_len


MOST_COUNTED = 256
_COUNTED: dict[tuple[str, int, int], tuple[dict[str, Any], Geometry]] = {}
"""The last geometries, with the values of the config that they are of."""


def position_limit(config: dict[str, Any]) -> int | None:
    """The longest sequence the network takes, under the names that HF configs use; of a multi-modal
    model, its language model."""
    config = config.get(LANGUAGE_SECTION) or config
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return None


def model_geometry(model: ModelConfig) -> Geometry | None:
    """Geometry of a model of the config; None when only loading would tell."""
    kind, config, added = model.architecture, model.network, len(added_tokens(model))
    if added and isinstance(config.get("vocab_size"), int):
        # As if the model had no spare rows: only its tokenizer knows.
        config = {**config, "vocab_size": config["vocab_size"] + added}
    grown = added or model.init == "scratch"
    return geometry(kind, config, vocab_multiple=model.pad_vocab_to_multiple_of if grown else 1)


def geometry(kind: str, config: dict[str, Any], *, vocab_multiple: int = 1) -> Geometry | None:
    """Geometry of one of the known architectures; None where values are missing.

    ``kind``: ``llama``, ``qwen3``, ``gpt2``, ``opt``, ``bert``, ``megatron-bert`` (also a
    config.json's ``model_type``). Of the latter two the masked language model.
    ``vocab_multiple``: the vocabulary is padded to a multiple of it.
    """
    count = _COUNTERS.get(kind)
    if count is None:
        return None
    # A plan with ``auto`` asks for the same one some thousand times.
    key = (kind, vocab_multiple, id(config))
    values, shape = _COUNTED.get(key, ({}, None))
    if shape is None or values != config:
        try:
            shape = count(config, vocab_multiple)
        except KeyError:
            return None
        if len(_COUNTED) >= MOST_COUNTED:
            _COUNTED.clear()
        _COUNTED[key] = dict(config), shape
    return shape


def _padded(vocab_size: int, multiple: int) -> int:
    return -(-vocab_size // max(1, multiple)) * max(1, multiple)


def _llama(config: dict[str, Any], multiple: int, *, qk_norm: bool = False) -> Geometry:
    hidden, ffn = int(config["hidden_size"]), int(config["intermediate_size"])
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    vocab = _padded(int(config["vocab_size"]), multiple)
    head = int(config.get("head_dim") or hidden // heads)
    kv = int(config.get("num_key_value_heads") or heads) * head
    query = heads * head
    attention = hidden * query + 2 * hidden * kv + query * hidden
    layer = attention + 3 * hidden * ffn + 2 * hidden + (2 * head if qk_norm else 0)
    layer += query + 2 * kv + hidden if config.get("attention_bias") else 0
    layer += 2 * ffn + hidden if config.get("mlp_bias") else 0
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return Geometry(
        embeddings + layers * layer + hidden,
        hidden, ffn, layers, kv, vocab,
        num_heads=heads, query_size=query, qk_norm=qk_norm,
        num_looked_up=0 if config.get("tie_word_embeddings") else vocab * hidden,
    )  # fmt: skip


def _qwen3(config: dict[str, Any], multiple: int) -> Geometry:
    return _llama({"head_dim": 128, **config}, multiple, qk_norm=True)


def _gpt2(config: dict[str, Any], multiple: int) -> Geometry:
    hidden, layers = int(config["n_embd"]), int(config["n_layer"])
    vocab = _padded(int(config["vocab_size"]), multiple)
    positions = int(config.get("n_positions") or 1024)
    ffn = int(config.get("n_inner") or 4 * hidden)
    layer = 4 * hidden * hidden + 2 * hidden * ffn + 9 * hidden + ffn
    total = vocab * hidden + positions * hidden + layers * layer + 2 * hidden
    return Geometry(
        total, hidden, ffn, layers, hidden, vocab,
        num_heads=int(config.get("n_head") or 12), query_size=hidden, block="gpt2",
        num_looked_up=positions * hidden,
    )  # fmt: skip


def _opt(config: dict[str, Any], multiple: int) -> Geometry:
    hidden, ffn = int(config["hidden_size"]), int(config["ffn_dim"])
    layers, positions = int(config["num_hidden_layers"]), int(config["max_position_embeddings"])
    vocab = _padded(int(config["vocab_size"]), multiple)
    layer = 4 * hidden * hidden + 2 * hidden * ffn + 9 * hidden + ffn
    # OPT's position table has two rows more than positions; embeddings narrower than the layers
    # are projected on both sides, and a network that normalises after its layers has no last norm.
    width = int(config.get("word_embed_proj_dim") or hidden)
    total = vocab * width + (positions + 2) * hidden + layers * layer
    total += 2 * hidden * width if width != hidden else 0
    last_norm = config.get("do_layer_norm_before", True) and not config.get(
        "_remove_final_layer_norm", False
    )
    total += 2 * hidden if last_norm else 0
    heads = int(config.get("num_attention_heads") or 12)
    return Geometry(
        total, hidden, ffn, layers, hidden, vocab,
        num_heads=heads, query_size=hidden, block="opt",
        num_looked_up=(positions + 2) * hidden,
    )  # fmt: skip


def _bert(config: dict[str, Any], multiple: int, *, keeps_scores: bool = False) -> Geometry:
    hidden, ffn = int(config["hidden_size"]), int(config["intermediate_size"])
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    vocab = _padded(int(config["vocab_size"]), multiple)
    positions = int(config.get("max_position_embeddings") or 512)
    looked_up = (positions + int(config.get("type_vocab_size") or 2)) * hidden
    layer = 4 * hidden * hidden + 2 * hidden * ffn + 9 * hidden + ffn
    head = hidden * hidden + 3 * hidden + vocab  # a dense layer, its norm, and a bias by token
    untied = 0 if config.get("tie_word_embeddings", True) else vocab * hidden
    return Geometry(
        (vocab * hidden + untied) + looked_up + layers * layer + 2 * hidden + head,
        hidden, ffn, layers, hidden, vocab,
        num_heads=heads, query_size=hidden, block="bert", causal=False,
        keeps_scores=keeps_scores, num_looked_up=looked_up + untied,
    )  # fmt: skip


def _megatron_bert(config: dict[str, Any], multiple: int) -> Geometry:
    return _bert(config, multiple, keeps_scores=True)


_COUNTERS = {
    "llama": _llama,
    "mistral": _llama,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "opt": _opt,
    "bert": _bert,
    "megatron-bert": _megatron_bert,
}
