"""One rank of ``benchmarks/checkpoint_stall.py``: both ways to save, in turn, on one engine.

``deepspeed --num_gpus 2 --no_local_rank benchmarks/peers/checkpoint_stall.py RUN_DIR ROUNDS OUT``
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from llmx.checkpoint.commit import committed_dir
from llmx.checkpoint.fragments import FragmentIndex
from llmx.checkpoint.state.engine_state import capture
from llmx.checkpoint.state.layout import state_layout
from llmx.plan.types import Plan
from llmx.run.rundir import RunDir, read_json
from llmx.train.batches import make_step
from llmx.train.engine.process_group import join_process_group
from llmx.train.saver import Flags
from llmx.train.schedule import lr_at
from llmx.train.session import Session, open_session
from llmx.train.status import RankStatus, handle_signals
from llmx.train.step import train_step
from llmx.train.step_log import StepLog
from llmx.worker import read_experiment

PLAIN_STEPS = 4
"""Steps without a save before each one: what a step takes otherwise."""


class Runs:
    """Steps and saves of one engine, each timed on this rank."""

    def __init__(self, session: Session, *, total: int) -> None:
        self.session, self.total = session, total
        self.log = StepLog(session)
        self.done = 0
        self.peer = session.run_dir.root / "peer"

    def step(self) -> float:
        """One training step; seconds."""
        session, exp = self.session, self.session.exp
        step = make_step(
            session.train_store,
            self.done,
            batch=session.plan.batch,
            rank=session.rank,
            seed=exp.seed,
            layout=session.layout,
        )
        began = time.perf_counter()
        session.engine.set_lr(lr_at(self.done, optim=exp.optim, total=self.total))
        loss = train_step(session.engine, step, session.task, world=session.plan.world_size)
        self.done += 1
        self.log.add(step, loss)
        torch.distributed.barrier()
        return time.perf_counter() - began

    def peer_save(self) -> float:
        """DeepSpeed's own; seconds until all ranks go on."""
        torch.distributed.barrier()
        began = time.perf_counter()
        self.session.engine.engine.save_checkpoint(str(self.peer), tag="now")
        torch.distributed.barrier()
        return time.perf_counter() - began

    def own_save(self, usual_s: float) -> dict[str, float]:
        """llmx's: seconds until all ranks go on, and what the steps meanwhile took more."""
        saver = self.session.saver
        torch.distributed.barrier()
        began = time.perf_counter()
        saver.at_boundary(self.done, Flags(), self.log)
        torch.distributed.barrier()
        stall_s = time.perf_counter() - began
        began, steps, busy = time.perf_counter(), 0, True
        while busy:
            self.step()
            steps += 1
            busy = self.session.consensus.post_and_read(Flags(busy=saver.busy)).busy
        slower_s = time.perf_counter() - began - steps * usual_s
        return {"own_s": stall_s, "slower_s": max(0.0, slower_s), "steps": steps}

    def clean(self) -> None:
        """No old bytes on their way to the disk while something is timed."""
        torch.distributed.barrier()
        if self.session.rank == 0:
            shutil.rmtree(self.peer, ignore_errors=True)
        torch.distributed.barrier()
        os.sync()
        torch.distributed.barrier()

    def round(self, *, peer_first: bool) -> dict[str, Any]:
        """Both saves, in turn."""
        usual_s = sorted(self.step() for _ in range(PLAIN_STEPS))[PLAIN_STEPS // 2]
        live = {
            (each.state, each.name, each.start): each.tensor.clone()
            for each in capture(self.session.engine, world=self.session.plan.world_size)
        }
        step, result = self.done, {"usual_s": usual_s}
        for peer in (peer_first, not peer_first):
            self.clean()
            if peer:
                result |= {"peer_s": self.peer_save(), "peer_bytes": self.same_as_peer()}
            else:
                result |= self.own_save(usual_s)
        result["bytes"] = self.same_as_saved(live, step)
        return result

    def same_as_saved(self, live: dict[tuple[str, str, int], torch.Tensor], step: int) -> int:
        """Bytes of this rank's state in the committed files; each equals what was live then."""
        directory = committed_dir(self.session.run_dir.checkpoints, step)
        index, total = FragmentIndex(sorted(directory.glob("*.safetensors"))), 0
        for (state, name, start), value in live.items():
            found = torch.empty_like(value)
            out = memoryview(found.view(torch.uint8).numpy())
            index.read_range(state, name, start, start + len(value), out)
            assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)), (state, name)
            total += value.nbytes
        index.close()
        return total

    def same_as_peer(self) -> int:
        """Bytes of DeepSpeed's file of this rank; its values are the engine's, as llmx names
        them. The file is DeepSpeed's own pickle, written a moment ago by this process."""
        path = self.peer / "now" / f"zero_pp_rank_{self.session.rank}_mp_rank_00_optim_states.pt"
        saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
        owners = state_layout(self.session.engine.engine).owners
        states = saved["base_optimizer_state"]["state"]
        for number, owner in enumerate(owners):
            values = owner.values()
            flat = saved["single_partition_of_fp32_groups"][number]
            assert torch.equal(flat, values["master"][: len(flat)])
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(states[number][key], values[key])
        return sum(file.stat().st_size for file in (self.peer / "now").iterdir())


def main() -> None:
    run_dir, rounds, out = RunDir(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    status = RankStatus(run_dir, rank=rank)
    exp, plan = read_experiment(run_dir), Plan.from_dict(read_json(run_dir.plan))
    join_process_group(plan)
    session = open_session(
        exp, plan, read_json(run_dir.ds_config), run_dir, status, handle_signals(status)
    )
    runs = Runs(session, total=1000)
    for _ in range(PLAIN_STEPS):
        runs.step()
    runs.round(peer_first=True)  # warming up: files, pages, DeepSpeed's first save
    found = [runs.round(peer_first=number % 2 == 0) for number in range(rounds)]
    if rank == 0:
        out.write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
