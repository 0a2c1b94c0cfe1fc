"""``export --to onnx`` and ``--to gguf``: every file is read back by somebody else's reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from llmx.checkpoint.export import compared, gguf_file
from llmx.checkpoint.export.gguf_file import write_gguf
from llmx.checkpoint.export.onnx_file import write_onnx
from llmx.checkpoint.pointers import BEST, set_pointer
from llmx.cli.export import convert_model, export
from llmx.cli.main import run_here
from llmx.errors import ConfigError
from llmx.run.rundir import RunDir
from tests.unit.test_checkpoint_export import VOCABULARY, make_model, save_model
from tests.unit.test_models_classification import BERT

ROWS = 48
SMALL: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
SHALLOW = {"num_hidden_layers": 1}
WORDS = ["<s>", "</s>", "<unk>"]


def write_tokenizer(directory: Path, *, pieces: bool) -> None:
    """BPE over bytes as of GPT-2, or over characters as of Llama 2, with a few merges."""
    letters = ["h", "e", "l", "o", "w", "r", "d"] + (["\u2581"] if pieces else ["Ġ"])
    merged = ["he", "ll", "hell", "hello", f"{letters[-1]}w"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), (letters[-1], "w")]
    data = ["<0x0A>"] if pieces else []
    vocab = {token: number for number, token in enumerate([*WORDS, *data, *letters, *merged])}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=pieces))
    if not pieces:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    made.chat_template = "{{ messages[0]['content'] }}"
    made.save_pretrained(directory)


def write_model(directory: Path, config: Any, auto: Any = AutoModelForCausalLM, **how: Any) -> Path:
    """Weights large enough that a mistake is seen."""
    torch.manual_seed(0)
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    write_tokenizer(directory, **{"pieces": False, **how})
    return directory


CONFIGS = {
    "llama-fp32": LlamaConfig(**SMALL, rope_parameters=LLAMA3, attention_bias=True),
    "mistral-bf16": MistralConfig(**SMALL, sliding_window=32),
    "qwen2-q8_0": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3-fp16": Qwen3Config(**SMALL, head_dim=16),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_gguf(tmp_path: Path, case: str) -> None:
    """transformers' own reader answers as the model does; the vocabulary is in the file."""
    pieces = case.startswith("mistral")
    source = write_model(tmp_path / "model", CONFIGS[case], pieces=pieces)
    precision = case.split("-")[1]
    (tmp_path / "out").mkdir()
    name = "mistral" if pieces else "my run"
    said = write_gguf(source, tmp_path / "out", name=name, precision=precision)
    assert len(said) == 1, "how it cuts texts is known"
    assert "outputs differ by" in said[0]
    reader = GGUFReader(tmp_path / "out" / f"{name.replace(' ', '-')}-{precision}.gguf")

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    kind = "llama" if pieces else case.split("-")[0]
    assert value("general.architecture") == kind
    assert value(f"{kind}.context_length") == (32 if pieces else 64)
    assert value(f"{kind}.attention.head_count_kv") == 2
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = value("tokenizer.ggml.tokens")
    assert {token: tokens.index(token) for token in vocab} == vocab
    assert len(tokens) == ROWS
    assert value("tokenizer.chat_template") == "{{ messages[0]['content'] }}"
    assert value("tokenizer.ggml.bos_token_id") == 0
    types = value("tokenizer.ggml.token_type")
    assert types[0] == 3
    assert types[-1] == 5, "a row that no token has"
    if pieces:
        assert value("tokenizer.ggml.model") == "llama"
        assert types[vocab["<0x0A>"]] == 6
        scores = value("tokenizer.ggml.scores")
        ranks = [scores[vocab[token]] for token in ("he", "ll", "hell", "hello")]
        assert ranks == sorted(ranks, reverse=True)
    else:
        assert value("tokenizer.ggml.pre") == "gpt-2"
        assert value("tokenizer.ggml.merges")[2] == "he ll"
    held = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert held["output_norm.weight"] == "F32"
    wanted = {"fp32": "F32", "bf16": "BF16", "q8_0": "Q8_0", "fp16": "F16"}[precision]
    assert held["blk.0.attn_q.weight"] == wanted
    assert ("output.weight" in held) is not case.startswith("qwen2")
    assert ("rope_freqs.weight" in held) is case.startswith("llama")
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            assert (tensor.data.min(), tensor.data.max()) == pytest.approx((1, LLAMA3["factor"]))


@pytest.mark.parametrize("kind", ["llama-fp16", "classifier-fp32"])
def test_onnx(tmp_path: Path, kind: str) -> None:
    """ONNX Runtime answers as transformers does, at batches and lengths that were not traced."""
    import onnxruntime

    names = ["input_ids", "attention_mask"]
    if kind == "llama-fp16":
        source = write_model(tmp_path / "model", LlamaConfig(**{**SMALL, **SHALLOW}))
    else:
        config = BertConfig(**{**BERT, **SHALLOW, "vocab_size": ROWS, "num_labels": 3})
        source = write_model(tmp_path / "model", config, AutoModelForSequenceClassification)
        names.append("token_type_ids")
    (tmp_path / "out").mkdir()
    said = write_onnx(source, tmp_path / "out", precision=kind.split("-")[1])
    assert "outputs differ by" in said
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    assert [each.name for each in session.get_inputs()] == names
    assert all(each.shape == ["batch", "sequence"] for each in session.get_inputs())
    assert [each.name for each in session.get_outputs()] == ["logits"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_file_that_answers_otherwise_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads left as they are in transformers: just what the comparison is for."""
    source = write_model(tmp_path / "model", LlamaConfig(**SMALL))
    monkeypatch.setattr(gguf_file, "PERMUTED", ())
    assert run_here("export", [str(source), "--to=gguf"]) == 5
    said = capsys.readouterr().err
    assert "model-fp32.gguf answers otherwise than transformers" in said
    assert "0.0001 is the limit for fp32. Nothing was left there." in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Path, message: str, **how: str) -> None:
        with pytest.raises(ConfigError, match=message):
            convert_model(source, **how)

    config = GPT2Config(vocab_size=ROWS, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    source = write_model(tmp_path / "model", config)
    refused(source, "is a gpt2; .* llama, mistral, qwen2, qwen3. Use --to onnx", to="gguf")
    refused(source, "onnx is written in fp32 or fp16", to="onnx", dtype="bf16")
    refused(source, "q8_0 is a precision of GGUF", to="onnx", dtype="q8_0")
    monkeypatch.setitem(compared.PACKAGES, "onnx", ("nowhere_to_be_found",))
    refused(source, r"found. Run `pip install llmx\[onnx\]`", to="onnx")
    other = write_model(tmp_path / "gelu", LlamaConfig(**SMALL, hidden_act="gelu"))
    refused(other, "has hidden_act=gelu, which this export does not write", to="gguf")
    (other / "tokenizer.json").unlink()
    (other / "config.json").write_text(json.dumps(LlamaConfig(**SMALL).to_dict()))
    refused(other, "needs .*/tokenizer.json, which cannot be read", to="gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gelu", "model"]


def test_of_a_run_by_its_best_checkpoint(memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The padded rows are gone, and the card says how it is loaded."""
    run = RunDir(memory / "run")
    small = LlamaConfig(**{**SMALL, **SHALLOW, "vocab_size": 64})
    for step in (1, 2):
        model = make_model(small, seed=step)
        save_model(run, model, step, tokenizer=lambda place: write_tokenizer(place, pieces=False))
    assert run_here("export", [str(run.root), "--best"]) == 2
    assert "has no best checkpoint" in capsys.readouterr().err
    set_pointer(run.checkpoints, BEST, 1)
    assert run_here("export", [str(run.root), "--best", "--to", "gguf", "--dtype", "fp32"]) == 0
    directory = run.root / "export" / "step-00000001-gguf"
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["README.md", "run-fp32.gguf"]
    card = (directory / "README.md").read_text()
    assert "llama-cli -m run-fp32.gguf" in card
    assert "library_name: gguf" in card
    assert not list((run.root / "export").glob(".*"))
    tensors = GGUFReader(directory / "run-fp32.gguf").tensors
    embedding = next(tensor for tensor in tensors if tensor.name == "token_embd.weight")
    assert embedding.shape.tolist() == [64, VOCABULARY]
    whole = export(run, step=1, dtype="fp32")
    loaded = AutoModelForCausalLM.from_pretrained(whole).get_input_embeddings().weight
    assert torch.equal(torch.from_numpy(embedding.data.copy()), loaded.detach())
