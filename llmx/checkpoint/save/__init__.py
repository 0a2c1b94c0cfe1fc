"""One checkpoint from live state to a committed directory, in a thread of its own.

``job`` is the collective save; ``host_copies`` is the copy of the state that it writes while
training continues. When to save is decided by ``llmx.train.saver``. Needs torch.
"""
