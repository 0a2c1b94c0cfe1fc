"""Copies of a state in host memory, of their own or in blocks that are used again."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmx.checkpoint.save import HostCopies
from llmx.checkpoint.state.engine_state import StateTensor

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=9),
    blocks=st.integers(1, 6),
)
@settings(max_examples=25, deadline=None)
def test_copies_in_blocks_are_the_same_elements(
    sizes: list[tuple[int, torch.dtype]], blocks: int
) -> None:
    """As from a GPU, but for the page-lock and the wait: every element once, blocks used again."""
    made: list[torch.Tensor] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        made.append(torch.empty(num_bytes, dtype=torch.uint8))
        return made[-1]

    copies = HostCopies(devices=("cpu",), allocate=allocate, block_bytes=16 * blocks)
    for seed in (0, 1):
        torch.manual_seed(seed)
        live = [torch.randint(0, 2, (size,)).to(dtype) for size, dtype in sizes]
        wanted = [values.clone() for values in live]
        fragments = [
            StateTensor("master", str(number), 7, values) for number, values in enumerate(live)
        ]
        copied = copies.copy(fragments)
        for values in live:
            values.zero_()
        for number, values in enumerate(wanted):
            mine = [each for each in copied if each.name == str(number)]
            assert torch.equal(torch.cat([each.tensor for each in mine]), values)
            starts = [7 + sum(len(each.tensor) for each in mine[:k]) for k in range(len(mine))]
            assert [each.start for each in mine] == starts
        assert copies.held_bytes == sum(block.nbytes for block in made)
        if seed == 0:
            first = len(made)
    assert len(made) == first, "the second copy needs no memory"


def test_where_no_page_can_be_locked_a_copy_is_made_all_the_same() -> None:
    asked = []

    def refuse(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")

    copies, live = HostCopies(devices=("cpu",), allocate=refuse), torch.arange(3.0)
    for _ in range(2):
        (copy,) = copies.copy([StateTensor("master", "a", 0, live)])
        assert torch.equal(copy.tensor, live)
        assert copy.tensor.data_ptr() != live.data_ptr()
    assert len(asked) == 1
    assert copies.held_bytes == 0
