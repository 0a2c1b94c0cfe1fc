"""A long training on a real cluster, hit by faults at random moments, must end as if by none.

``make chaos N=200 SEED=7`` or ``python -m tests.chaos --faults 200 --seed 7``.
"""
