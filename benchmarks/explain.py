"""How many real failures ``python -m llmx explain`` explains: of texts that its rows were written
from, and of others.

    LLMX_REAL_DATA=DIR python benchmarks/explain.py [-v]

``DIR/failures`` holds texts ``NNN-slug.txt``: a header (``# cause: ...``), an empty line, the log.
Of the files sorted by name, those whose position modulo 14 is in ``HELD_OUT`` were not opened
before the rows were written; of those after number 200, the ones in ``HELD_OUT_LATER``. ``RIGHT``
says which row agrees with the cause in the header, by reading; a text that stands in no table is
not judged. Each text is also explained behind five of ``HARMLESS``, in ten draws.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from pathlib import Path

from llmx.failures.diagnose import find_failure

HELD_OUT = (2, 5, 8, 11, 13)
HELD_OUT_LATER = ("203", "207", "211", "215", "219", "223", "227")
DRAWS = 10
VERDICTS = ("right", "partly", "wrong", "unknown")
HARMLESS = (
    "[2024-01-05 10:00:00,123] [WARNING] [builder.py:90] Installed CUDA version 11.8 does not "
    "match the version torch was compiled with 11.7 but since the APIs are compatible, accepting "
    "this combination",
    "[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - "
    "Address already in use).",
    "2024-01-05 10:00:01.1: W tensorflow/dso_loader.cc:64] Could not load dynamic library "
    "'libcudart.so.11.0'; dlerror: libcudart.so.11.0: cannot open shared object file: No such file",
    "'(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded "
    "with url: /x\"), '(Request ID: 1)')' thrown while requesting HEAD https://huggingface.co/x. "
    "Retrying in 1s [Retry 1/5].",
    "/opt/torch/cuda/__init__.py:128: UserWarning: CUDA initialization: Found no NVIDIA driver on "
    "your system.",
    "df: /root/.triton/autotune: No such file or directory",
    "WARNING: async_io requires the dev libaio .so object and headers but these were not found.",
    "[rank0]:[W704 05:12:20.114 ProcessGroupNCCL.cpp:1168] Warning: WARNING: process group has NOT "
    "been destroyed before we destruct ProcessGroupNCCL.",
    "wandb: WARNING Unable to verify login status: No API key configured, continuing offline",
    "INFO 01-05 10:00:02 Failed to import flash_attn: No module named 'flash_attn', using sdpa",
    "Warning: Permanently added '10.0.0.2' (ED25519) to the list of known hosts.",
    "fatal: not a git repository (or any of the parent directories): .git",
    "E0000 00:00:1700000000.1 12 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to "
    "register factory for plugin cuDNN when one has already been registered",
    "ERROR: ld.so: object 'libgomp.so.1' from LD_PRELOAD cannot be preloaded (cannot open shared "
    "object file): ignored.",
    "Exception ignored in: <function _ConnectionBase.__del__ at 0x7f>",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "node-a:1:1 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : "
    "libnccl-net.so: cannot open shared object file: No such file or directory",
    "Token indices sequence length is longer than the specified maximum sequence length for this "
    "model (1436 > 1024). Running this sequence through the model will result in indexing errors",
)
RIGHT: dict[str, str] = {
    "003": "interface_missing", "006": "shm_full", "008": "ib_memlock", "009": "gpu_twice",
    "015": "store_timeout", "017": "cuda_mismatch", "022": "cuda_headers", "023": "nvme",
    "029": "sigbus", "034": "checkpoint_world_size", "036": "checkpoint_files",
    "041": "batch_triple", "043": "cuda_build", "046": "oom_fragmented", "048": "token_index",
    "052": "fabric_manager", "054": "peer_died", "059": "shm_full", "063": "chat_template",
    "065": "flash_attn_abi", "071": "hub_offline", "072": "disk_full", "081": "hydra_missing_key",
    "082": "slurm_memory", "086": "transformers_old", "087": "mpi_orted", "095": "vocabulary",
    "099": "driver_old", "102": "tokenizer_package", "105": "fp16_weights", "107": "bitsandbytes",
    "110": "ds_hf_mismatch", "111": "zero3_device_map", "116": "glibc", "118": "nvcc_arch",
    "124": "ddp_unused", "128": "local_rank", "130": "k8s_evicted", "135": "ssh_host_key",
    "138": "token_index", "141": "no_grad", "143": "pad_token", "155": "weights_damaged",
    "156": "weights_damaged", "159": "wandb_unreachable",
    "201": "vllm_memory", "205": "vllm_server", "209": "slurm_busy", "213": "precision",
    "217": "numpy_abi", "221": "not_executable", "225": "slurm_config", "229": "gpu_busy",
    # Held out.
    "007": "ib_memlock", "012": "launcher_missing", "021": "cuda_linker", "026": "loss_scale",
    "032": "zero3_partitioned", "044": "cuda_oom", "050": "gpu_lost", "056": "port_in_use",
    "061": "weights_only", "068": "hub_login", "077": "wandb_unreachable", "084": "kernel_oom_log",
    "096": "open_files", "104": "peft_target", "108": "dataset_columns", "115": "deepspeed_old",
    "121": "ds_no_sync", "125": "p2p_rtx4000", "132": "slurm_pmi", "140": "process_limit",
    "149": "arrow_types", "157": "illegal_memory", "161": "read_only",
    "203": "vllm_server", "207": "kernel_oom_log", "211": "driver_mismatch",
    "215": "environment_missing", "219": "ragged_batch", "223": "nccl_ib", "227": "wandb_login",
}  # fmt: skip
PARTLY: dict[str, str] = {"089": "ssh_name", "203": "rendezvous", "223": "nccl_error"}
"""Number of a file -> a row that is true and not the whole cause."""
FIRST = {
    "037": "", "089": "ssh_name", "203": "rendezvous", "215": "module", "223": "nccl_error",
}  # fmt: skip
"""What these were given when they were opened. Rows were written for them then (as ``output_path``
and ``mpi_hosts``), which must not count."""


def measure(folder: Path) -> dict[bool, list[tuple[str, str, list[str]]]]:
    """Whether it was held out -> name, row, and the rows behind harmless lines of each text."""
    results: dict[bool, list[tuple[str, str, list[str]]]] = {False: [], True: []}
    for position, path in enumerate(sorted(folder.glob("*.txt"))):
        number = path.name[:3]
        if number not in {**RIGHT, **PARTLY, **FIRST}:
            continue  # nobody has said yet which row would be right
        text = path.read_text(encoding="utf-8").partition("\n\n")[2]
        draws = random.Random(path.name)
        behind = [_row("\n".join([*draws.sample(HARMLESS, 5), text])) for _ in range(DRAWS)]
        row = _row(text)
        if number in FIRST:
            row = FIRST[number]
            behind = [row] * DRAWS
        is_later = number > "200"
        held_out = number in HELD_OUT_LATER if is_later else position % 14 in HELD_OUT
        results[held_out].append((path.name, row, behind))
    return results


def judge(file_name: str, row: str) -> str:
    """``right``, ``partly``, ``wrong`` or ``unknown``."""
    number = file_name[:3]
    if not row:
        return "unknown"
    return {RIGHT.get(number): "right", PARTLY.get(number): "partly"}.get(row, "wrong")


def _row(text: str) -> str:
    match = find_failure(text)
    return match.row.name if match is not None and match.row is not None else ""


def main() -> int:
    """Measure, print, write benchmarks/results/explain.md."""
    from machine import write_result

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-v", action="store_true", help="the row of each text")
    options = parser.parse_args()
    lines = [
        "| texts | number | right | partly | wrong | unknown |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for held_out, results in measure(Path(os.environ["LLMX_REAL_DATA"]) / "failures").items():
        title = "held out" if held_out else "rows were written from"
        alone = [judge(name, row) for name, row, _ in results]
        behind = [judge(name, row) for name, _, rows in results for row in rows]
        for what, verdicts in ((title, alone), (f"{title}, behind five harmless lines", behind)):
            counts = Counter(verdicts)
            shares = [f"{100 * counts[verdict] / len(verdicts):.0f} %" for verdict in VERDICTS]
            lines.append(f"| {what} | {len(verdicts)} | {' | '.join(shares)} |")
        for name, row, rows in results if options.v else ():
            print(f"{judge(name, row):8} {name:45} {row or '-':24} {sorted({*rows} - {row}) or ''}")
    write_result("explain", "Failures that are explained", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
