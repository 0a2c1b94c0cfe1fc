"""Rollout servers that draw with vLLM: the real one where ``LLMX_VLLM_PYTHON`` names the Python of
an environment that has it, and a module of its name everywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmx.errors import ConfigError
from llmx.plan.cuda_builds import has_code_for
from llmx.rollout.vllm_child import check_build
from tests.rollouts import plain_logps
from tests.small_models import small_model
from tests.unit.test_rollout_server import (
    PROMPTS,
    ServerProcess,
    by_ranks,
    change,
    drawn,
    policy,
    ranks,
    tokens_of,
)

STAND_IN = """
__version__ = "0.33.0"

class SamplingParams:
    def __init__(self, **values):
        self.__dict__.update(values)

class LLM:
    def __init__(self, directory, **options):
        import json
        self.config = json.load(open(directory + "/config.json"))
        assert self.config["architectures"] == ["LlamaForCausalLM"], self.config
        assert options["dtype"] == "float32"
        self.llm_engine = type("E", (), {"model_config": type("M", (), {"max_model_len": 64})})

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.weights = dict(kwargs["weights_iterator"])
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= self.weights.keys()
        assert not any("inv_freq" in name for name in self.weights)

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, params, use_tqdm):
        print("vLLM prints what it does")
        first = float(self.weights["model.norm.weight"][0])
        for prompt, options in zip(prompts, params, strict=True):
            tokens = [*prompt["prompt_token_ids"], 2][: options.max_tokens]
            probabilities = [{token: type("L", (), {"logprob": -first})} for token in tokens]
            reason = "stop" if tokens[-1] == 2 else "length"
            values = {"token_ids": tokens, "logprobs": probabilities, "finish_reason": reason}
            yield type("A", (), {"outputs": [type("O", (), values)]})
"""


OLD_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda: (7, 0)
torch.cuda.get_arch_list = lambda: ["sm_75", "sm_80", "compute_120"]
"""


def server(python: str, **env: str) -> Iterator[ServerProcess]:
    os.environ.update(env, LLMX_ROLLOUT_VLLM=python)
    process = ServerProcess()
    yield process
    process.end()


def environment(directory: Path, module: str) -> str:
    """A Python with this text as the module vllm."""
    (directory / "vllm").mkdir()
    (directory / "vllm" / "__init__.py").write_text(module)
    (directory / "vllm" / "inputs.py").write_text("TokensPrompt = dict\n")
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={directory} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose environment has a module called vllm: this Python with one more directory."""
    yield from server(environment(tmp_path, STAND_IN))


def test_weights_and_prompts_reach_the_child_and_samples_come_back(stand_in: ServerProcess) -> None:
    """Frozen and tied parameters too, at each reload; buffers that no file has never."""
    model, lines = policy(network=small_model("llama", tie_word_embeddings=True)), []
    model.module.model.embed_tokens.requires_grad_(False)
    with ranks(model, [stand_in.place], lines, vllm_python="python") as servers:
        for step in range(2):
            servers.at_step(step)
            first = model.module.model.norm.weight[0].item()
            samples = drawn(model, step, n=2)
            assert tokens_of(samples) == [[(*prompt, 2)[:6]] * 2 for prompt in PROMPTS]
            assert samples[0][0].logps == pytest.approx([-first] * 4, abs=0)
            assert samples[0][0].sampled_logps == samples[0][0].logps
            change(model)
    assert [line.endswith("vLLM 0.33.0") for line in lines] == [True]


def test_a_child_that_dies_takes_its_server_along(stand_in: ServerProcess) -> None:
    """And the agent starts both again."""
    model = policy()
    with ranks(model, [stand_in.place], wait_s=0.1) as servers:
        servers.at_step(0)
        before = drawn(model, 0)
        pid = stand_in.process.pid
        os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text()), signal.SIGKILL)
        assert drawn(model, 0) == by_ranks(model, 0) != before
    stand_in.process.join(10)
    assert stand_in.process.exitcode == 1


def test_an_environment_without_vllm_is_named() -> None:
    for python, why in (
        ("/nowhere/python", "No such file"), (sys.executable, "No module named 'vllm'"),
    ):  # fmt: skip
        expected = f"here: rollout.vllm_python cannot draw.*{why}"
        for process in server(python):
            with pytest.raises(ConfigError, match=expected), ranks(policy(), [process.place]):
                pass


def test_a_gpu_that_vllm_has_no_code_for_is_named(tmp_path: Path) -> None:
    """A V100, which vLLM's wheels have left out: as torch's own check says it of others."""
    expected = "here: rollout.vllm_python cannot draw: .*sm_75, sm_80, compute_120.* of 7.0. Set"
    for process in server(environment(tmp_path, STAND_IN + OLD_GPU)):
        with pytest.raises(ConfigError, match=expected), ranks(policy(), [process.place]):
            pass
    for major, minor in ((7, 0), (7, 5), (8, 6), (9, 0), (10, 0), (12, 1)):
        for archs in (["sm_70"], ["sm_75", "sm_86"], ["sm_100f"], ["sm_80", "compute_90"]):
            refused = pytest.raises(RuntimeError, match=f"of {major}.{minor}")
            fits = has_code_for(float(f"{major}.{minor}"), archs)
            with contextlib.nullcontext() if fits else refused:
                check_build((major, minor), archs)


@pytest.mark.parametrize("tied", [False, True])
def test_the_real_one(tied: bool) -> None:
    """Its log-probabilities are those of the weights that were sent, of each version."""
    if not (python := os.environ.get("LLMX_VLLM_PYTHON")):
        pytest.skip("LLMX_VLLM_PYTHON does not name the Python of an environment with vLLM")
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = policy(network=LlamaForCausalLM(config).eval())
    for process in server(python):
        with ranks(model, [process.place], wait_s=600) as servers:
            for step in range(3):
                servers.at_step(step)
                samples = drawn(model, step)
                assert samples != by_ranks(model, step), "drawn by vLLM"
                for prompt, of_prompt in zip(PROMPTS, samples, strict=True):
                    for sample in of_prompt:
                        ids = torch.tensor([*prompt, *sample.tokens])
                        with torch.no_grad():
                            logps = plain_logps(model.module, ids, np.arange(len(prompt), len(ids)))
                        assert sample.logps == pytest.approx(logps.tolist(), abs=1e-4)
                change(model)
