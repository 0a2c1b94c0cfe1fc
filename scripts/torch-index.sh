#!/usr/bin/env bash
# Prints the package index of the torch build that this machine's GPUs need, or nothing where PyPI's
# build runs. PyPI's is for CUDA 13: it needs driver 580, and has no code for GPUs before Turing.
# The same rules stand in llmx/plan/cuda_builds.py, which cannot run before torch is installed.
set -euo pipefail
gpus=$(nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader 2>/dev/null) || exit 0
while IFS=', ' read -r capability driver; do
  if [ "${capability/./}" -lt 75 ] || [ "${driver%%.*}" -lt 580 ]; then
    echo https://download.pytorch.org/whl/cu126
    exit 0
  fi 2>/dev/null
done <<<"$gpus"
