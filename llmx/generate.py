"""Answer prompts with the model of a run: ``python -m llmx generate RUN_DIR "What is ...?"``.

Greedy, on one process; the prompt is rendered exactly as in training, and an answer ends where it
ends in the evaluation of the run. Without a prompt, reads them from the terminal, one a line.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmx import snapshot
from llmx.config import Experiment
from llmx.data.forms import Conversation, Message
from llmx.data.read import Where
from llmx.data.render import Renderer
from llmx.errors import ConfigError, exit_code
from llmx.flags import Parser, whole_number
from llmx.rundir import RunDir
from llmx.text import plural, printable


def main(argv: list[str] | None = None) -> int:
    """Parse, load, answer; returns the exit code."""
    parser = Parser(prog="python -m llmx generate", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory whose model/ was written")
    parser.add_argument("prompt", nargs="*", help="prompts; none reads the terminal")
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=whole_number(1),
        default=64,
        help="where an answer that does not stop by itself is cut (default 64; the evaluation of "
        "a run has task.eval_max_new_tokens)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="a model of this run, e.g. a checkpoint that `export` wrote (default: RUN_DIR/model)",
    )
    # Prompts may stand before and behind the options.
    options = parser.parse_intermixed_args(argv)
    return exit_code(lambda: _answer(options))


def _answer(options: argparse.Namespace) -> int:
    run = RunDir(options.run)
    exp = snapshot.load(run)
    directory = (options.model or run.final_model).expanduser()
    if not (directory / "config.json").is_file():
        raise ConfigError(_no_model(run, directory, asked=options.model is not None))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    from llmx.models.generation_config import stop_ids

    logging.disable_progress_bar()  # its bar would stand between the answers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).to(device).eval()
    # Computed, not only read: a run of an older llmx named the EOS token alone.
    stops = stop_ids(model, tokenizer)
    # Nothing but these: a published config may sample, or punish repetition, and the answers
    # would not be those of the run's evaluation.
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=next((i for i in (tokenizer.pad_token_id, *stops) if i is not None), None),
    )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    code = 0
    for prompt in options.prompt or _lines():
        ids = torch.tensor([prompt_ids(exp, tokenizer, prompt)], device=device)
        length = ids.shape[1]
        # The last token of an answer is not fed back: it needs no position of its own.
        room = options.max_new_tokens if limit is None else limit - length + 1
        if room < 1:
            print(
                f"llmx: the prompt has {plural(length, 'token')}, the model {limit:,} positions. "
                "Ask something shorter.",
                file=sys.stderr,
            )
            code = ConfigError.exit_code
            continue
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(options.max_new_tokens, room),
            )
        answer = out[0, length:].tolist()
        # A stop token is not always marked as special, so decoding alone would not drop it.
        answer = answer[:-1] if answer and answer[-1] in stops else answer
        text = tokenizer.decode(answer, skip_special_tokens=True).strip()
        print(printable(text) if sys.stdout.isatty() else text, flush=True)
    return code


def _no_model(run: RunDir, directory: Path, *, asked: bool) -> str:
    here = shlex.quote(str(run.root))
    if asked:
        return (
            f"--model {directory}: there is no config.json in it. Give the directory that "
            f"`python -m llmx export {here}` wrote."
        )
    return (
        f"{run.root} has no model/: the final model is written when a run ends well, unless "
        f"task.save_model=false. To try a checkpoint: `python -m llmx export {here}`, then "
        "generate with --model and the directory that it wrote."
    )


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
