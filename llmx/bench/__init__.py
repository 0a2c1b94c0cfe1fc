"""What this machine does: kernels, real training runs, memory against the plan, against peers.

    python -m llmx bench                      every part that this machine can run
    python -m llmx bench --parts matmul,mfu   some of them
    python -m llmx bench --tiny               shrunken sizes, to see that it runs (also on a CPU)

Each part is a process of its own with a time limit: one that fails, hangs or runs out of memory
never stops the next. Every number stands beside what is expected of it. ``make gpu`` sets up a
bare machine first and keeps the table under ``benchmarks/results/``.
"""
