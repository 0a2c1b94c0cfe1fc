#!/bin/sh
# What an image of llmx contains beside its base: called by Dockerfile and llmx.def, as root, in a copy of the repository.
set -eu
export DEBIAN_FRONTEND=noninteractive
export PIP_BREAK_SYSTEM_PACKAGES=1 # an image serves nobody else
apt-get update
# g++ and ninja build DeepSpeed's extensions; sshd lets `enter` be left out; the others start ranks.
apt-get install -y --no-install-recommends \
  g++ git iproute2 openmpi-bin openssh-client openssh-server pdsh procps rsync
rm -rf /var/lib/apt/lists/*
# A base with torch keeps its build, which fits its CUDA. Others get the one for CPUs.
python -c 'import torch' 2>/dev/null ||
  pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" \
    --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
pip install --no-cache-dir -c constraints.txt .
python -m llmx --help >/dev/null
