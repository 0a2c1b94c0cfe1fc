"""Draws samples with vLLM, in vLLM's own environment, for the rollout server that started it.

``python vllm_child.py``, with the Python of ``rollout.vllm_python``. It imports nothing of llmx,
which that environment lacks. A request is a line of JSON (``do``, ``size``, and what the method
takes) and a body of ``size`` bytes on its standard input; the answer is a line on its output.
Shown by ``LLMX_VLLM_PYTHON=/opt/vllm/bin/python python -m pytest tests/unit/test_rollout_vllm.py``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

OLDEST = (0, 32)
"""The version that this was written for: its ``reload_weights`` takes tensors."""
KV_CACHE_GIB = "2"
"""KV cache on a CPU unless VLLM_CPU_KVCACHE_SPACE is set: vLLM would take most of the RAM."""
PR_SET_PDEATHSIG = 1


class Engine:
    """vLLM, and the weights that it needs again at each reload."""

    def __init__(self) -> None:
        import torch
        import vllm

        if tuple(int(part) for part in vllm.__version__.split(".")[:2]) < OLDEST:
            needed = ".".join(map(str, OLDEST))
            raise RuntimeError(f"vLLM {vllm.__version__} is too old. Install {needed} or newer")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda":
            check_build(torch.cuda.get_device_capability(), torch.cuda.get_arch_list())
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self.llm: Any = None
        self.fixed: dict[str, Any] = {}
        """Parameters that are not trained."""
        self.copies: dict[str, str] = {}
        """Parameters that are others, by the names of both, where vLLM has them apart."""

    def take_model(self, body: bytes) -> dict[str, Any]:
        """Build the network of a description, its weights undefined."""
        import vllm

        size = int.from_bytes(body[:8], "little")
        metadata = json.loads(body[8 : 8 + size])["__metadata__"]
        description = json.loads(metadata["description"])
        if self.llm is not None:
            raise RuntimeError("it holds a model already")
        tensors = _tensors(body)
        self.fixed = {name: tensors[name] for name in tensors.keys() - {*description["buffers"]}}
        config = description["config"] | {"architectures": [description["architecture"]]}
        if self.device == "cpu":
            # On CPUs vLLM packs the weights of a tied output layer once, and never again.
            config["tie_word_embeddings"] = False
            self.copies = description["tied"]
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            self.llm = vllm.LLM(
                directory,
                skip_tokenizer_init=True,
                generation_config="vllm",  # no options of the model's own
                load_format="dummy",
                dtype=description["dtype"],
                max_model_len=-1,  # what fits
                logprobs_mode="processed_logprobs",
                enforce_eager=self.device == "cpu",
                disable_log_stats=True,
                seed=0,
            )
        return {}

    def take_weights(self, body: bytes) -> dict[str, Any]:
        """Put the trained weights into the network, beside those that are not trained."""
        weights = self.fixed | _tensors(body)
        weights |= {copy: weights[name] for copy, name in self.copies.items()}
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights.items()})
        self.llm.reset_prefix_cache()
        return {}

    def sample(self, rows: list[list[int]], seeds: list[int], sampling: Any) -> dict[str, Any]:
        """A completion of each row. vLLM gives one log-probability of a token: that of what was
        drawn from, which is the model's own where temperature is 1 and nothing is removed."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        longest = self.llm.llm_engine.model_config.max_model_len
        params = [
            SamplingParams(
                temperature=sampling["temperature"],
                top_p=sampling["top_p"],
                top_k=sampling["top_k"],
                max_tokens=min(sampling["max_new_tokens"], longest - len(row)),
                stop_token_ids=sampling["stop_ids"],
                seed=seed % 2**63,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
            )
            for row, seed in zip(rows, seeds, strict=True)
        ]
        prompts = [TokensPrompt(prompt_token_ids=row) for row in rows]
        completions = []
        for row, answer in zip(
            rows, self.llm.generate(prompts, params, use_tqdm=False), strict=True
        ):
            output = answer.outputs[0]
            tokens = list(output.token_ids)
            logps = [at[token].logprob for token, at in zip(tokens, output.logprobs, strict=True)]
            is_full = len(row) + len(tokens) == longest
            cut = "positions" if is_full else "length"
            completions.append(
                {
                    "tokens": tokens,
                    "logps": logps,
                    "sampled_logps": logps,
                    "ended": "stop" if output.finish_reason == "stop" else cut,
                }
            )
        return {"completions": completions}


def check_build(capability: tuple[int, int], archs: list[str]) -> None:
    """Raise RuntimeError where the torch of vLLM, and so vLLM, has no code for the GPU: the machine
    code of its major version, or code that the driver compiles (PTX)."""
    for arch in archs:
        kind, _, number = arch.rstrip("af").partition("_")
        version = divmod(int(number), 10)
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return
    number = ".".join(map(str, capability))
    raise RuntimeError(f"it is built for {', '.join(archs)}, and this GPU is of {number}")


def _tensors(body: bytes) -> dict[str, Any]:
    import safetensors.torch

    tensors: dict[str, Any] = safetensors.torch.load(body)
    return tensors


def main() -> None:
    """Answer until the input ends, which it does with the server."""
    del sys.path[0]  # this file's directory, whose modules are not for vLLM to find
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # ``seed`` of a sample, and one process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIB)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        engine = Engine()
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say(engine.versions | {"device": engine.device})
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        body = sys.stdin.buffer.read(request.pop("size"))
        work = getattr(engine, request.pop("do"))
        try:
            say(work(body) if body else work(**request))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
