"""A task on ranks whose devices are nearly full: ``task.kind=tests.programs.no_room:NoRoom``
(``tests/integration/test_train_balance.py``)."""

from llmx.tasks.sft import Sft
from llmx.train import speeds

speeds.free_bytes = lambda _device: 1024  # in the ranks' own processes


class NoRoom(Sft):
    """Learns as ``sft`` does."""
