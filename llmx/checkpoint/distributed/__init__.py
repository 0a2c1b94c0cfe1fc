"""What ranks on several hosts do together with checkpoints.

``topology``: which ranks share a file system. ``transfer``: files from hosts that have them to
hosts that need them. Needs torch.
"""
