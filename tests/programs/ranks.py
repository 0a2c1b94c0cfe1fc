"""Starts ranks by forking, so that torch, DeepSpeed and transformers are imported once for many
runs: a run of two ranks costs two seconds instead of thirty.

``python -m tests.programs.ranks`` reads JSON lines: ``{"start": [run directory of each rank],
"port": n, "env": {}}`` answers ``{"pids": [...]}``, ``{"wait": [pids]}`` answers ``{"codes":
[...]}``. Each child is ``llmx.worker.main``, as ``deepspeed`` would start it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import deepspeed  # noqa: F401, imported for the children
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import llmx.data
import llmx.train.loop  # noqa: F401
from llmx import worker


def start(run_dirs: list[str], *, port: int, env: dict[str, str]) -> list[int]:
    """One child a rank."""
    pids = []
    for rank, run_dir in enumerate(run_dirs):
        pid = os.fork()
        if pid == 0:
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": len(run_dirs),
                "LOCAL_SIZE": len(run_dirs),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            os.environ.update({name: str(value) for name, value in place.items()}, **env)
            os.setsid()
            code = 1
            try:
                code = worker.main([run_dir])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return pids


def main() -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "start" in asked:
            answer = {"pids": start(asked["start"], port=asked["port"], env=asked["env"])}
        else:
            statuses = [os.waitpid(pid, 0)[1] for pid in asked["wait"]]
            answer = {"codes": [os.waitstatus_to_exitcode(status) for status in statuses]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
