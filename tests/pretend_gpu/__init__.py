"""Ranks on GPUs that are not there: llmx's worker, DeepSpeed's CUDA accelerator, CPU storage.

``server.py`` is started by ``tests.forked_ranks.Server("tests.pretend_gpu.server")`` and forks
ranks as ``tests/programs/ranks.py`` does. In each of them

- ``devices.py``: a tensor's storage knows the GPU that it lies on. An operator over two devices
  raises, as CUDA's does, and so does whatever touches the GPU of another rank. Waits of the host
  for the GPU are counted by place.
- ``cuda.py``: ``torch.cuda``, with the compute capability that the run's plan has for the host.
- ``collectives.py``: the rules of NCCL, and a log of the collectives of each rank.
- ``fetches.py``: what ZeRO-3 gathers ahead of a module, and what only when that begins.

The report of a rank is ``ranks/pretended-NNN.json`` of its run (``report.py``). What this cannot
show: the numbers, memory, speed and kernels of a GPU, and the order of its streams.
"""
