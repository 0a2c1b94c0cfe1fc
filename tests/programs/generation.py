"""The same completions on one, two and three forked ranks (gloo).

``python -m tests.programs.generation OUT``

Every rank of every world writes ``OUT/WORLD.RANK.json``: the completions of ``sampled``,
``greedy``, ``mixed`` and ``lockstep``, and how many forwards it made for the last. Judged by
``tests/unit/test_models_generate.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401, imported for the children

from llmx.models.attention import AttentionMethod
from llmx.models.generate import decoder_of, generate
from llmx.models.sampling import Sampling, sample_seed
from tests.small_models import small_model

WORLDS = (1, 2, 3)
PROMPTS = [(5, 6, 7), (8,), (5, 6, 7), (9, 10, 11, 12, 13), (5, 6, 7), (20, 21), (8,)]
SEEDS = [sample_seed(1, step=0, prompt=prompt, sample=0) for prompt in range(len(PROMPTS))]


def completions(model: Any, sampling: Sampling, attention: str = "sdpa") -> list[dict[str, Any]]:
    decoder = dataclasses.replace(decoder_of(model), attention=AttentionMethod(attention))
    found = generate(decoder, PROMPTS, sampling, seeds=SEEDS, batch_size=2)
    return [dataclasses.asdict(one) for one in found]


def run_rank(rank: int, world: int, out: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{out}/store.{world}", rank=rank, world_size=world
    )
    model = small_model("llama")
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    stops = frozenset({2, 30, 31, 32, 33})
    greedy = Sampling(max_new_tokens=9, stop_ids=stops)
    # The last host has an attention that takes no mask of left padding.
    mixed = completions(model, greedy, "flex_attention" if rank == world - 1 else "sdpa")
    drawn = Sampling(max_new_tokens=9, temperature=1.5, top_k=60, stop_ids=stops)
    result = {
        "mixed": mixed,
        "sampled": completions(model, drawn),
        "greedy": completions(model, greedy),
    }
    parameter = next(model.parameters())
    parameter.ds_numel = world * parameter.numel()  # as if ZeRO-3 had sharded it
    model.register_forward_hook(count)
    attention = "flex_attention" if rank == world - 1 else "sdpa"
    result |= {"lockstep": completions(model, drawn, attention), "forwards": forwards}
    (out / f"{world}.{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def main() -> None:
    out, codes = Path(sys.argv[1]), []
    for world in WORLDS:
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    run_rank(rank, world, out)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            pids.append(pid)
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
