"""Answer prompts with the model of a run: ``python -m llmx generate RUN_DIR "What is ...?"``.

Greedy, on one process; the prompt is laid out exactly as it was in training. Without a
prompt, reads them from the terminal, one a line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmx import snapshot
from llmx.config import Experiment
from llmx.data.forms import Conversation, Message
from llmx.data.read import Where
from llmx.data.render import Renderer
from llmx.errors import ConfigError, LlmxError
from llmx.rundir import RunDir


def main(argv: list[str] | None = None) -> int:
    """Parse, load, answer; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m llmx generate", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory whose model/ was written")
    parser.add_argument("prompt", nargs="*", help="prompts; none reads the terminal")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(argv)
    try:
        return _answer(options)
    except LlmxError as error:
        print(f"llmx: {error}", file=sys.stderr)
        return error.exit_code


def _answer(options: argparse.Namespace) -> int:
    run = RunDir(options.run)
    exp = snapshot.load(run)
    if not (run.final_model / "config.json").is_file():
        raise ConfigError(
            f"{run.root} has no model/: the run did not end well (see {run.result}) or had "
            "task.save_model=false."
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bar would stand between the answers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(run.final_model)
    model = AutoModelForCausalLM.from_pretrained(run.final_model).to(device).eval()
    for prompt in options.prompt or _lines():
        ids = torch.tensor([prompt_ids(exp, tokenizer, prompt)], device=device)
        room = exp.data.seq_len - ids.shape[1]
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(1, min(options.max_new_tokens, room)),
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        print(
            tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip(), flush=True
        )
    return 0


def prompt_ids(exp: Experiment, tokenizer: Any, prompt: str) -> list[int]:
    """The prompt as training lays it out: a user's turn for SFT, plain text for pretraining."""
    if exp.task.kind == "pretrain":
        return list(tokenizer(prompt)["input_ids"])
    renderer = Renderer(tokenizer, template=exp.data.template)
    system = [Message("system", exp.data.system)] if exp.data.system else []
    turns = (*system, Message("user", prompt), Message("assistant", "."))
    tokens, _ = renderer.prompt(Conversation(turns, Where(Path("prompt"), 1, "line")))
    return [int(token) for token in tokens]


def _lines() -> Iterable[str]:
    """Prompts typed or piped in, one a line."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True, file=sys.stderr)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


if __name__ == "__main__":
    sys.exit(main())
