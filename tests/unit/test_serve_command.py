"""``python -m llmx serve``: the command of vLLM, and becoming it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llmx.cli.main import run_here
from llmx.cli.serve import LORA_RANKS, printed, vllm_command
from llmx.cli.target import find_target
from llmx.errors import ConfigError
from llmx.hardware.detect import Gpu
from llmx.run.rundir import RunDir
from tests.rundirs import experiment, write_run

CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
          "num_attention_heads": 12}  # fmt: skip


def write_model(directory: Path, *, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file({"w": torch.zeros(4, 4, dtype=dtype)}, directory / "model.safetensors")
    return directory


def write_adapter(directory: Path, base: Path, **values: Any) -> Path:
    directory.mkdir(parents=True)
    found = {"base_model_name_or_path": str(base), "r": 12, "task_type": "CAUSAL_LM", **values}
    (directory / "adapter_config.json").write_text(json.dumps(found))
    weights = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run_dir = write_run(experiment(tmp_path / "my run", ranks=1))
    write_model(run_dir.final_model)
    return run_dir


def words(path: Path, gpus: int = 0, memory_gib: float = 80.0, **options: Any) -> list[str]:
    target = find_target(path, command="serve")
    return vllm_command(target, [Gpu("H100", memory_gib, 9.0)] * gpus, **options)


def test_a_run(run: RunDir) -> None:
    assert words(run.root) == [
        "vllm", "serve", str(run.final_model), "--served-model-name", "my run",
        "--dtype", "bfloat16", "--max-model-len", "4096",
    ]  # fmt: skip
    assert shlex.split(printed(words(run.root)).replace("\\\n", " ")) == words(run.root)


def test_as_few_gpus_as_hold_the_weights_and_share_the_heads(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", dtype=torch.float32)
    size = (model / "model.safetensors").stat().st_size
    assert "--tensor-parallel-size" not in words(model, gpus=8)
    assert words(model)[6] == "float32"
    for memory, gpus, wanted in ((0.9, 8, 2), (0.4, 8, 6), (0.4, 5, 4), (0.01, 8, 6)):
        found = words(model, gpus=gpus, memory_gib=memory * size / 2**30)
        assert found[found.index("--tensor-parallel-size") + 1] == str(wanted)
    found = words(model, shared_by=3, length=100)
    assert found[-4:] == ["--max-model-len", "100", "--tensor-parallel-size", "3"]
    old = tmp_path / "gpt2"
    old.mkdir()
    (old / "config.json").write_text('{"n_positions": 1024, "n_head": 12}')
    assert words(old, shared_by=4)[-4::2] == ["--max-model-len", "--tensor-parallel-size"]
    assert words(old, shared_by=4)[-3::2] == ["1024", "4"]
    with pytest.raises(ConfigError, match="12 attention heads cannot be shared out evenly. Set"):
        words(model, shared_by=5)


def test_an_adapter_on_its_base(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    adapter = write_adapter(tmp_path / "mine", base)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    found = words(adapter)
    assert found[:3] == ["vllm", "serve", str(base)]
    rest = " ".join(found[3:])
    assert f"--enable-lora --lora-modules mine={adapter} --max-lora-rank 16" in rest
    assert rest.endswith(f"--chat-template {adapter / 'chat_template.jinja'}")
    for values, problem in (
        ({"use_dora": True}, "it is one of DoRA"),
        ({"modules_to_save": ["lm_head"]}, r"it has whole modules \(lm_head\)"),
        ({"r": LORA_RANKS[-1] + 1}, "its rank is 513"),
    ):
        refused = write_adapter(tmp_path / f"bad-{len(list(tmp_path.iterdir()))}", base, **values)
        with pytest.raises(ConfigError, match=problem):
            words(refused)


def test_it_is_printed_and_becomes_vllm_where_that_is(run: RunDir, tmp_path: Path) -> None:
    """A stand-in for the program: this shows the exec itself alone."""
    programs = tmp_path / "bin"
    programs.mkdir()
    command = [sys.executable, "-m", "llmx", "serve", str(run.root)]

    def typed(*more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin"}
        return subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, check=False
        )

    absent = typed()
    assert absent.returncode == 0
    assert absent.stdout == printed([*words(run.root), "--host", "127.0.0.1"]) + "\n"
    assert "vLLM is not installed here" in absent.stderr
    (programs / "vllm").write_text('#!/bin/sh\nfor word; do echo "<$word>"; done\nexit 7\n')
    (programs / "vllm").chmod(0o755)
    assert typed("--print").returncode == 0
    assert "VLLM_API_KEY" in typed("--", "--host", "0.0.0.0", "--api-key", "key").stderr
    found = typed("--", "--port", "8001")
    assert found.returncode == 7
    wanted = [*words(run.root)[1:], "--host", "127.0.0.1", "--port", "8001"]
    assert found.stdout.splitlines()[-len(wanted) :] == [f"<{word}>" for word in wanted]


def test_a_classifier_is_refused(tmp_path: Path, capsys: Any) -> None:
    model = write_model(tmp_path / "judge", architectures=["LlamaForSequenceClassification"])
    assert run_here("serve", [str(model)]) == 2
    assert "which generates no text" in capsys.readouterr().err
