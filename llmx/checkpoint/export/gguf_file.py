"""A Hugging Face model as a GGUF file (llama.cpp, Ollama), checked with transformers' own reader.

Llama-like models: their tensors under llama.cpp's names, tokenizer and chat template in the same
file. Tried by ``python -m pytest tests/unit/test_export_formats.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmx.checkpoint.export.compared import compare, load_model, questions, quiet
from llmx.errors import ConfigError
from llmx.run.exported import generates_no_text

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""``model_type`` -> what llama.cpp calls it."""
PERMUTED = ("llama",)
"""llama.cpp turns neighbouring pairs of a head, transformers its halves."""
TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
PRE_TOKENIZERS = {
    f"{_CONTRACTIONS}{_WORDS}\\p{{N}}{{1,3}}{_REST}": "llama-bpe",
    f"{_CONTRACTIONS}{_WORDS}\\p{{N}}{_REST}": "qwen2",
}
"""How a tokenizer cuts a text before merging -> what llama.cpp calls that."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write_gguf(source: Path, target: Path, *, name: str, precision: str) -> list[str]:
    """Write ``NAME-PRECISION.gguf`` into ``target``; what there is to say of it.

    Args:
        source: a Hugging Face directory with safetensors.

    Raises:
        ConfigError: a model, or a tokenizer, that the format cannot hold.
        CheckpointError: the file answers otherwise than the model.
    """
    import gguf

    config, kind = check_architecture(source)
    if not list(source.glob("*.safetensors")):
        raise ConfigError(f"--to gguf: {source} has no *.safetensors, whose weights it takes.")
    path = target / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name) or 'model'}-{precision}.gguf"
    model = load_model(source)
    batches = questions(model, ("input_ids",))
    with torch.no_grad(), quiet():
        references = [model(**batch, use_cache=False).logits for batch in batches]
        frequencies = model.model.rotary_emb.inv_freq.clone()
    del model
    writer = gguf.GGUFWriter(str(path), kind, use_temp_file=True)
    with quiet():
        _write_config(writer, config, name=name, precision=precision)
        remarks = _write_tokenizer(writer, source, rows=config.vocab_size)
        has_factors = _rope(config).get("rope_type") == "llama3"
        if has_factors:  # of Llama 3.1 and later; llama.cpp divides the plain frequencies by them
            size = _head_dim(config)
            plain = float(_rope(config)["rope_theta"]) ** -(np.arange(0, size, 2) / size)
            factors = plain / frequencies.double().numpy()
            writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
        for tensor, values in _tensors(source, config, kind):
            _write_tensor(writer, tensor, values, precision)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    # What transformers reads of no GGUF: rope factors, biases of Llama, qwen3's head size.
    biased = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    options = {"config": config} if kind == "qwen3" or has_factors or biased else {}
    back = _load_back(path, options)

    def answer(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), quiet():
            logits: torch.Tensor = back(**inputs, use_cache=False).logits
        return logits

    return [*remarks, compare(batches, references, answer, precision=precision, name=path.name)]


def check_architecture(source: Path) -> tuple[Any, str]:
    """The config, and llmx's name of a model that can be written; ConfigError for any other."""
    from transformers import AutoConfig

    values = _json(source / "config.json")
    kind, without = ARCHITECTURES.get(str(values.get("model_type"))), generates_no_text(source)
    if kind is None or without:
        raise ConfigError(
            f"--to gguf: {source.name} is a {without or values.get('model_type')}; it is written "
            f"for language models of these architectures: {', '.join(sorted(ARCHITECTURES))}. Use "
            "--to onnx, or --to hf."
        )
    config: Any = AutoConfig.from_pretrained(source)
    rope = _rope(config).get("rope_type", "default")
    unsupported = {
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
        f"rope_type={rope}": rope not in ("default", "llama3"),
    }
    if refused := [setting for setting, is_so in unsupported.items() if is_so]:
        raise ConfigError(
            f"--to gguf: {source.name} has {' and '.join(refused)}, which this export does not "
            "write (it knows hidden_act silu, rope_type default and llama3). Use --to onnx."
        )
    return config, kind


def _json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--to gguf needs {path}, which cannot be read ({reason}).") from None
    return values


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _write_config(writer: Any, config: Any, *, name: str, precision: str) -> None:
    import gguf

    context = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral" and window:
        context = min(context, window)  # llama.cpp looks at everything
    # transformers takes a model of just this name for an architecture of GGUF.
    writer.add_name("Mistral" if name == "mistral" else name)
    writer.add_file_type(getattr(gguf.LlamaFileType, FILE_TYPES[precision]))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_vocab_size(config.vocab_size)


def _tensors(source: Path, config: Any, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of llama.cpp and values, one at a time."""
    import gguf
    from safetensors import safe_open

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - no mapping
                if key == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                gguf_name = names.get_name(key, try_suffixes=(".weight", ".bias"))
                if gguf_name is None:
                    raise ConfigError(f"--to gguf: llama.cpp has no name for {key}.")
                value = opened.get_tensor(key).float()
                count = next((heads[part] for part in heads if f".{part}." in key), None)
                if kind in PERMUTED and count:
                    halves = value.reshape(count, 2, value.shape[0] // count // 2, *value.shape[1:])
                    value = halves.swapaxes(1, 2).reshape(value.shape)
                yield gguf_name, value


def _write_tensor(writer: Any, name: str, value: torch.Tensor, precision: str) -> None:
    import gguf

    type_name = TYPES[precision] if value.dim() > 1 else "F32"
    if type_name == "Q8_0" and value.shape[-1] % 32:
        type_name = "F16"  # a block has 32 values
    kind = getattr(gguf.GGMLQuantizationType, type_name)
    data = gguf.quants.quantize(value.contiguous().numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _write_tokenizer(writer: Any, source: Path, *, rows: int) -> list[str]:
    """Vocabulary, merges or scores, special tokens, chat template; what there is to say."""
    import gguf

    values = _json(source / "tokenizer.json")
    model = values["model"]
    if model.get("type") != "BPE":
        raise ConfigError(
            f"--to gguf: the tokenizer is of kind {model.get('type')}; it is written for BPE, over "
            "bytes or with bytes as a fallback (SentencePiece). Use --to onnx."
        )
    tokens = {number: token for token, number in model["vocab"].items()}
    types = dict.fromkeys(tokens, NORMAL)
    for added in values.get("added_tokens") or []:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    pieces = bool(model.get("byte_fallback"))
    for number, token in tokens.items():
        if pieces and re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[number] = BYTE
        elif pieces and token == model.get("unk_token"):
            types[number] = UNKNOWN
    if tokens and max(tokens) >= rows:
        raise ConfigError(
            f"--to gguf: the tokenizer has {max(tokens) + 1} tokens, and the model rows for {rows}."
        )
    listed = [tokens.get(number, f"[PAD{number}]") for number in range(rows)]
    remarks: list[str] = []
    if pieces:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        # llama.cpp merges what has the highest score first.
        rank: dict[str, int] = {}
        for position, merge in enumerate(model["merges"]):
            left, right = merge if isinstance(merge, list) else merge.split(" ")
            rank.setdefault(left + right, position)
        writer.add_token_scores([-float(rank.get(token, len(rank) + 1)) for token in listed])
        parts = json.dumps([values.get("normalizer"), values.get("pre_tokenizer")])
        prepends = re.search('"Prepend"|"prepend_scheme": "(always|first)"', parts)
        writer.add_add_space_prefix(prepends is not None)
    else:
        writer.add_tokenizer_model("gpt2")
        pre_tokenizer = _pre_tokenizer(values)
        writer.add_tokenizer_pre(pre_tokenizer or "default")
        if pre_tokenizer is None:
            remarks.append(
                "llama.cpp knows no name for how this tokenizer cuts texts: it will cut some "
                "otherwise. Give it token ids, or compare its tokens with transformers'."
            )
    writer.add_token_list(listed)
    writer.add_token_types([types.get(number, UNUSED) for number in range(rows)])
    special = gguf.SpecialVocab(source, load_merges=not pieces, n_vocab=rows)
    special.add_to_gguf(writer, quiet=True)
    return remarks


def _pre_tokenizer(values: dict[str, Any]) -> str | None:
    """llama.cpp's name of how the tokenizer cuts a text; None where there is none."""
    first = values.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers") or [first]
    cuts = [part for part in parts if part.get("type") == "Split"]
    level = [part for part in parts if part.get("type") == "ByteLevel"]
    if len(level) != 1 or len(parts) != len(cuts) + 1 or level[0].get("add_prefix_space"):
        return None
    if not cuts:
        return "gpt-2" if level[0].get("use_regex", True) else None
    pattern = (cuts[0].get("pattern") or {}).get("Regex")
    return PRE_TOKENIZERS.get(str(pattern)) if len(cuts) == 1 else None


def _load_back(path: Path, options: dict[str, Any]) -> Any:
    """The model as transformers' own GGUF reader has it."""
    from transformers import AutoModelForCausalLM

    # It draws a bar of its own there.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **options
        )
    return model.eval()
