"""``export``: from a checkpoint of any number of ranks to a Hugging Face directory."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    dynamic_module_utils,
)

from llmx.checkpoint import commit
from llmx.checkpoint.disk import Disk
from llmx.checkpoint.export.model import vocabulary_names, write_config
from llmx.checkpoint.fragments import fragment_key
from llmx.checkpoint.manifest import Manifest, rank_file
from llmx.checkpoint.state.values import buffer_table, parameter_table
from llmx.checkpoint.tensors import Fragment
from llmx.cli.export import export
from llmx.cli.main import run_here
from llmx.config import experiment_from_dict
from llmx.errors import ConfigError, DataError, DiskFullError, LlmxError
from llmx.models.conversion import effective_conversions
from llmx.run.rundir import RunDir
from llmx.run.snapshot import dump_config
from tests.checkpoint_saves import flip_bit, tree

VOCABULARY, PADDED = 50, 64
LLAMA = LlamaConfig(
    vocab_size=PADDED, hidden_size=64, intermediate_size=PADDED, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
)  # fmt: skip
"""One weight that is no table of tokens has as many rows as the padded vocabulary."""


def make_model(config: Any = LLAMA, *, seed: int = 0, **values: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = type(config)(**{**config.to_dict(), **values})
    return AutoModelForCausalLM.from_config(config)


def save_model(
    run: RunDir,
    model: Any,
    step: int,
    *,
    ranks: int = 3,
    precision: str = "bf16",
    tokenizer: Callable[[Path], None] = lambda directory: None,
) -> None:
    """A committed checkpoint of ``model``, its elements shared out at odd places."""
    run.root.mkdir(parents=True, exist_ok=True)
    run.config.write_text("seed: 0\n")
    pieces: list[list[Fragment]] = [[] for _ in range(ranks)]
    named = [("master" if p.requires_grad else "frozen", n, p) for n, p in model.named_parameters()]
    named += [("buffer", name, dict(model.named_buffers())[name]) for name in buffer_table(model)]
    for state, name, tensor in named:
        flat = tensor.detach().flatten()
        kind = {torch.float32: "F32", torch.bool: "BOOL", torch.int64: "I64"}[flat.dtype]
        for rank in range(ranks):
            first, last = (len(flat) * edge // ranks for edge in (rank, rank + 1))
            key = fragment_key(state, name, first)
            pieces[rank].append(Fragment(key, kind, last - first, flat[first:last].numpy()))
            if state == "master":
                key = fragment_key("exp_avg", name, first)
                pieces[rank].append(Fragment(key, kind, last - first, flat[first:last].numpy()))
    state = {
        "step": step,
        "precision": precision,
        "vocab_size": VOCABULARY,
        "padded_vocab_size": PADDED,
        "vocabulary": vocabulary_names(model),
        "parameters": parameter_table(model),
        "buffers": buffer_table(model),
        "conversions": effective_conversions(model),
    }
    config = type(model.config)(**{**model.config.to_dict(), "vocab_size": VOCABULARY})
    config.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    described = run.root / "described"
    write_config(described, model, config)
    tokenizer(described)
    files = {f"model/{path.name}": path.read_bytes() for path in sorted(described.iterdir())}
    shutil.rmtree(described)
    commit_pieces(run, step, pieces, {"state.json": json.dumps(state).encode(), **files})


def commit_pieces(
    run: RunDir, step: int, pieces: list[list[Fragment]], files: dict[str, bytes]
) -> None:
    """A checkpoint of the fragments of each rank, on hosts of their own, and of other files."""
    commit.begin(run.checkpoints, step)
    entries = {}
    for rank, fragments in enumerate(pieces):
        by_key = {each.key: each for each in fragments}
        specs = [each.spec for each in fragments]
        with commit.rank_writer(run.checkpoints, step, rank, specs) as writer:
            entries[rank_file(rank)] = writer.write(by_key[spec.key] for spec in writer.order)
    hosts = {name: f"node-{rank}" for rank, name in enumerate(entries)}
    for name, text in files.items():
        entries[name] = commit.add_file(run.checkpoints, step, name, text)
    manifest = Manifest(step, entries, hosts=hosts, run_id="run")
    commit.write_manifest(run.checkpoints, step, manifest)
    commit.publish(run.checkpoints, step)


def expected(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tables = {*vocabulary_names(model), "lm_head.weight"}  # which may be tied to the other
    return {
        name: tensor[:VOCABULARY].to(dtype) if name in tables else tensor.to(dtype)
        for name, tensor in model.state_dict().items()
    }


@pytest.fixture
def run(memory: Path) -> RunDir:
    return RunDir(memory / "run")


def check_weights(directory: Path, model: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """transformers loads every weight."""
    loaded = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    found = loaded.state_dict()
    for key, tensor in expected(model, dtype).items():
        assert torch.equal(found[key], tensor), key
    return loaded


@pytest.mark.parametrize(
    ("name", "tied"), [("fp32", True), ("bf16", False), ("bf16", True), ("fp16", False)]
)
def test_transformers_loads_every_weight(run: RunDir, name: str, tied: bool) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    model = make_model(tie_word_embeddings=tied)
    model.model.layers[0].mlp.up_proj.weight.requires_grad = False
    save_model(run, model, 12)
    directory = export(run, dtype=name)
    assert directory == run.root / "export" / "step-00000012"
    loaded = check_weights(directory, model, dtype)
    assert loaded.dtype == dtype
    assert loaded.config.vocab_size == VOCABULARY
    on_disk = (directory / "model.safetensors").stat().st_size
    stored = sum(parameter.numel() for parameter in loaded.parameters())
    assert 0 < on_disk - stored * dtype.itemsize < 8000, "tied weights once, no padding"


def test_shards_and_their_index(run: RunDir) -> None:
    model = make_model()
    save_model(run, model, 1)
    directory = export(run, shard_bytes=30_000)
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(files) > 3
    assert all((directory / name).stat().st_size < 32_000 for name in files)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    check_weights(directory, model)


def test_buffers_keep_their_kind(run: RunDir) -> None:
    """A model with a persistent buffer of integers and one of floats."""
    config = GPT2Config(vocab_size=PADDED, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = make_model(config)
    model.register_buffer("steps", torch.tensor(7))
    model.register_buffer("scale", torch.tensor([1.0, 1 / 3]))
    save_model(run, model, 1)
    found = load_file(export(run) / "model.safetensors")
    assert found["steps"].dtype == torch.int64
    assert found["steps"].item() == 7
    assert torch.equal(found["scale"], torch.tensor([1.0, 1 / 3]).bfloat16())


def test_newest_usable_unless_told(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    models = {step: make_model(seed=step) for step in (1, 2, 3)}
    for step, model in models.items():
        save_model(run, model, step)
    flip_bit(run.checkpoint(3) / rank_file(1), -3)
    assert run_here("export", [str(run.root)]) == 0
    said = capsys.readouterr()
    assert "step-00000003 cannot be used: rank-00001.safetensors: damaged, it has" in said.err
    assert "export/step-00000002: step 2, 55,872 parameters in bf16, 109.1 KiB" in said.out
    check_weights(run.root / "export" / "step-00000002", models[2])
    # The same again: it is there.
    assert run_here("export", [str(run.root)]) == 2
    assert "exists already. Remove it" in capsys.readouterr().err
    assert run_here("export", [str(run.root), "--step", "3"]) == 5
    assert "Other steps: 1, 2." in capsys.readouterr().err
    assert run_here("export", [str(run.root), "--step", "4"]) == 2
    assert "no checkpoint of step 4. It has: 1, 2, 3." in capsys.readouterr().err
    assert run_here("export", [str(run.root), "--check"]) == 5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step-00000003   466.9 KiB  cannot be used: rank-00001.safetensors")
    assert lines[1:] == [f"step-0000000{step}   466.9 KiB  usable" for step in (2, 1)]
    # A checkpoint may be named instead of the run.
    assert run_here("export", [str(run.checkpoint(1)), "--out", str(run.root / "one")]) == 0
    assert json.loads((run.root / "one" / "config.json").read_text())["dtype"] == "bfloat16"
    assert run_here("export", [str(run.checkpoint(1)), "--step", "2"]) == 2
    for step in (1, 2):
        (run.checkpoint(step) / "state.json").unlink()
    assert run_here("export", [str(run.root), "--out", str(run.root / "two")]) == 5
    said = capsys.readouterr()
    assert said.err.count("cannot be used") == 3
    assert not (run.root / "two").exists()


def test_a_damaged_model_is_refused_and_named_by_a_check(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(run, make_model(), 7)
    directory = export(run)
    (directory / "README.md").write_text("mine")  # a card may be edited
    for checked, name in ((run.root, "export/step-00000007"), (directory, "step-00000007")):
        assert run_here("export", [str(checked), "--check"]) == 0
        assert f"{name}  whole" in capsys.readouterr().out
    weights = directory / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert run_here("export", [str(run.root), "--check"]) == 5
    assert "step-00000007  damaged: " in capsys.readouterr().out
    assert run_here("serve", ["--print", str(directory)]) == 2
    assert "is damaged or cut off" in (shown := capsys.readouterr().err)
    assert "python -m llmx export RUN" in shown


def test_a_part_on_another_host_is_named(run: RunDir) -> None:
    save_model(run, make_model(), 1)
    (run.checkpoint(1) / rank_file(2)).unlink()
    missing = r"(?s)rank-00002.safetensors: is missing.*copy step-00000001 from node-2 into"
    with pytest.raises(LlmxError, match=missing):
        export(run)


def test_where_there_is_nothing_to_export(run: RunDir) -> None:
    with pytest.raises(LlmxError, match="no such directory|not a run directory"):
        export(run)
    run.root.mkdir()
    run.config.write_text("seed: 0\n")
    with pytest.raises(LlmxError, match=r"has no checkpoints \(see checkpoint.every_steps"):
        export(run)
    run.final_model.mkdir()
    (run.final_model / "config.json").write_text("{}")
    with pytest.raises(LlmxError, match=r"Its final model, .*/model, is a Hugging Face directory"):
        export(run)


def test_a_value_too_large_for_the_dtype_is_no_infinity(run: RunDir) -> None:
    model = make_model()
    model.model.norm.weight.data[3] = 1e6
    save_model(run, model, 1)
    with pytest.raises(LlmxError, match="norm.weight has 1 values that are too large for F16"):
        export(run, dtype="fp16")
    assert not (run.root / "export").exists() or tree(run.root / "export") == []
    assert export(run, dtype="bf16").is_dir()


def test_a_full_disk_leaves_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(run, make_model(), 1)

    def full(self: Disk, descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Disk, "reserve", full)
    with pytest.raises(
        DiskFullError, match=r"is full: the export needs 109.1 KiB in all, .* are free now. Nothing"
    ) as caught:
        export(run)
    assert caught.value.exit_code == DataError.exit_code, "as where prepared data fills a disk"
    assert tree(run.root / "export") == []


def test_a_place_that_cannot_be_written_is_one_line(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(run, make_model(), 1)
    (tmp_path / "file").touch()
    for out, reason in (
        (tmp_path / "file" / "out", "Not a directory"),
        (Path("/dev/null/out"), "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "file", "exists already. Remove it, or set --out to another name"),
    ):
        assert run_here("export", [str(run.root), "--out", str(out)]) == ConfigError.exit_code
        said = [line for line in capsys.readouterr().err.splitlines() if "llmx:" in line]
        assert len(said) == 1
        assert str(out) in said[0]
        assert reason in said[0]
        assert "--out" in said[0]


def test_memory_does_not_grow_with_a_tensor(run: RunDir) -> None:
    """One tensor of 128 MiB, exported by a process that never holds it whole."""
    rows, columns = 2**18, 128
    count = rows * columns
    values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    parameters = {"w": {"shape": [rows, columns], "trained": True, "tied_to": None}}
    run.root.mkdir(parents=True)
    fragment = Fragment(fragment_key("master", "w", 0), "F32", count, values)
    state = {"step": 1, "precision": "bf16", "vocab_size": 1, "padded_vocab_size": 1,
             "vocabulary": [], "parameters": parameters}  # fmt: skip
    commit_pieces(run, 1, [[fragment]], {"state.json": json.dumps(state).encode()})
    program = (
        "import sys, llmx.checkpoint.export.weights; from llmx.cli.main import run_here; "
        "print(open('/proc/self/status').read()); code = run_here('export', sys.argv[1:]); "
        "print(open('/proc/self/status').read()); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run.root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before_kib, peak_kib = map(int, re.findall(r"VmHWM:\s+(\d+) kB", done.stdout))
    assert (peak_kib - before_kib) / 2**10 < 96, done.stdout
    with safe_open(run.root / "export" / "step-00000001" / "model.safetensors", "pt") as file:
        found = file.get_slice("w")[rows - 1 :]
    assert torch.equal(found[0], torch.from_numpy(values[-columns:]).bfloat16())


def test_an_architecture_of_its_own_code_is_exported_as_the_run_trusts_it(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are converted, for which the model is built: without a question to anybody."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(f"asked: {prompt}"))
    source = tmp_path / "own_moe"
    source.mkdir()
    (source / "configuration_own_moe.py").write_text(
        "from transformers import MixtralConfig\n\n\n"
        'class OwnMoeConfig(MixtralConfig):\n    model_type = "own_moe"\n'
    )
    (source / "modeling_own_moe.py").write_text(
        "from torch import nn\n"
        "from transformers import MixtralConfig, MixtralForCausalLM, MixtralModel\n\n"
        "from .configuration_own_moe import OwnMoeConfig\n\n\n"
        "class OwnMoeForCausalLM(MixtralForCausalLM):\n    config_class = OwnMoeConfig\n\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        values = {**config.to_dict(), 'model_type': 'mixtral'}\n"
        "        self.model = MixtralModel(MixtralConfig(**values))\n"
    )
    config = {
        "model_type": "own_moe", "vocab_size": PADDED, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_local_experts": 2, "auto_map": {
            "AutoConfig": "configuration_own_moe.OwnMoeConfig",
            "AutoModelForCausalLM": "modeling_own_moe.OwnMoeForCausalLM",
        },
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(source, trust_remote_code=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True)
    assert effective_conversions(model), "else nothing is built for the export"
    save_model(run, model, 1, precision="fp32")
    with pytest.raises(ValueError, match="trust_remote_code"):
        export(run)  # its config does not say so
    trusting = experiment_from_dict({"model": {"trust_remote_code": True}})
    run.config.write_text(dump_config(trusting))
    with pytest.raises(ConfigError, match="--trust"):
        export(run)  # nor is it known to be a run of this user
    directory = export(run, trusted=True)
    check_weights(directory, model, torch.float32)
