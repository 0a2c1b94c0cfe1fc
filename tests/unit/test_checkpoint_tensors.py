"""The file format, and fragments read from several files as if they were one array."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmx.checkpoint.fragments import FragmentIndex, check_cover, cover_of, fragment_key, parse_key
from llmx.checkpoint.manifest import CheckpointError, digest_bytes
from llmx.checkpoint.tensors import Fragment, TensorFile, TensorSpec, TensorWriter, write_tensors

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
         "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
many = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(dtype: str, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 100
    return (values > 0) if dtype == "BOOL" else values.abs().to(TORCH[dtype])


def fragment(key: str, dtype: str, values: torch.Tensor) -> Fragment:
    return Fragment(key, dtype, values.numel(), values.contiguous().view(torch.uint8).numpy())


@many
@given(
    st.lists(st.tuples(st.sampled_from(sorted(TORCH)), st.integers(0, 40)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_the_safetensors_library_reads_what_was_written(tmp_path: Path, tensors, random) -> None:
    values = {f"t{n}|ä.weight|{n}": (d, make(d, c, n)) for n, (d, c) in enumerate(tensors)}
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "x.safetensors"
    entry = write_tensors(
        path, [fragment(key, d, x) for key, (d, x) in values.items()], metadata={"step": "3"}
    )
    assert entry == digest_bytes(path.read_bytes())
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == values.keys()
    with closing(TensorFile(path)) as file:
        assert {s.key: s.dtype for s in file.specs} == {key: d for key, (d, _) in values.items()}
        for key, (_, tensor) in values.items():
            assert torch.equal(loaded[key], tensor)
            start = random.randint(0, tensor.numel())
            stop = random.randint(start, tensor.numel())
            wanted = bytes(tensor[start:stop].view(torch.uint8).numpy())
            out = bytearray(len(wanted))
            file.read_into(key, start, stop, out)
            assert out == wanted


def test_our_reader_reads_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(4.0)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with closing(TensorFile(tmp_path / "x.safetensors")) as file:
        assert {spec.key: spec.num_elements for spec in file.specs} == {"a": 15, "b": 7, "c": 1}
        row, halves = np.empty(5, np.float32), bytearray(14)
        file.read_into("a", 5, 10, row)
        file.read_into("b", 0, 7, halves)
        assert np.array_equal(row, tensors["a"][1].numpy())
        assert halves == bytes(tensors["b"].view(torch.uint8).numpy())


def test_a_tensor_may_come_in_pieces(tmp_path: Path) -> None:
    values = np.arange(1000, dtype=np.float32)
    pieces = iter([values[:7], values[7:500], values[500:]])
    with TensorWriter(tmp_path / "x", [TensorSpec("a", "F32", 1000, (10, 100))]) as writer:
        writer.write([Fragment("a", "F32", 1000, pieces, (10, 100))])
    found = safetensors.torch.load_file(tmp_path / "x")["a"]
    assert torch.equal(found, torch.from_numpy(values).view(10, 100))


def test_what_was_not_announced_is_refused(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "F32", 4)]
    values = np.zeros(4, dtype=np.float32)
    for name, given_, words in [
        ("none", [], "was announced"),
        ("other", [Fragment("b", "F32", 4, values)], "was announced"),
        ("short", [Fragment("a", "F32", 4, values[:3])], "its buffer has 12"),
        ("long", [Fragment("a", "F32", 4, iter([values, values]))], "its buffer has 32"),
        ("more", [Fragment("a", "F32", 4, values), Fragment("b", "F32", 4, values)], "not ann"),
    ]:
        with TensorWriter(tmp_path / name, specs) as writer, pytest.raises(ValueError, match=words):
            writer.write(given_)
    with pytest.raises(ValueError, match="two tensors"):
        TensorWriter(tmp_path / "x", specs * 2)
    with pytest.raises(ValueError, match="C-contiguous"):
        write_tensors(tmp_path / "y", [Fragment("a", "F32", 4, np.zeros((4, 2), "f4")[:, 0])])
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "none", [Fragment("a", "F32", 4, values)])


@many
@given(st.data())
def test_a_header_that_does_not_fit_the_file_is_refused(tmp_path: Path, data) -> None:
    path = tmp_path / "x.safetensors"
    path.unlink(missing_ok=True)
    write_tensors(path, [Fragment("a", "F32", 16, np.ones(16, "f4"))], metadata={"step": "3"})
    whole = path.read_bytes()
    how = data.draw(st.sampled_from(["cut", "longer", "header"]))
    if how == "cut":
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    elif how == "longer":
        path.write_bytes(whole + b"x")
    else:
        size = int.from_bytes(whole[:8], "little")
        at = data.draw(st.integers(0, 7))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
        assert int.from_bytes(path.read_bytes()[:8], "little") != size
    with pytest.raises(CheckpointError):
        TensorFile(path)


def test_a_file_cut_after_it_was_opened_is_an_error_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_tensors(path, [Fragment("a", "U8", 9000, bytes(9000))])
    with closing(TensorFile(path)) as file:
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(CheckpointError, match="truncated"):
            file.read_into("a", 0, 9000, bytearray(9000))


@many
@given(st.integers(1, 60), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_range_is_read_from_any_cut(tmp_path: Path, total: int, files: int, random) -> None:
    values = np.arange(total, dtype=np.float32)
    cuts = sorted({0, total, *(random.randint(0, total) for _ in range(6))})
    parts: list[list[Fragment]] = [[] for _ in range(files)]
    for start, stop in itertools.pairwise(cuts):
        key = fragment_key("master", "a|b.w", start)
        random.choice(parts).append(Fragment(key, "F32", stop - start, values[start:stop]))
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    for number, part in enumerate(parts):
        write_tensors(folder / str(number), part)
    index = FragmentIndex(sorted(folder.iterdir()))
    check_cover(index.cover, {"a|b.w": {"shape": [total], "trained": True, "tied_to": None}})
    assert index.states() == {"master"}
    start = random.randint(0, total)
    stop = random.randint(start, total)
    out = np.full(stop - start, -1, dtype=np.float32)
    index.read_range("master", "a|b.w", start, stop, out)
    assert np.array_equal(out, values[start:stop])
    with pytest.raises(CheckpointError, match=f"element {total} is in none"):
        index.read_range("master", "a|b.w", total - 1, total + 1, np.empty(2, "f4"))
    index.close()


TABLE = {
    "w": {"shape": [2, 5], "trained": True, "tied_to": None},
    "head": {"shape": [2, 5], "trained": True, "tied_to": "w"},
    "frozen": {"shape": [3], "trained": False, "tied_to": None},
}
GOOD = {
    "rank-0": [("master", "w", 0, 6), ("exp_avg", "w", 0, 10), ("frozen", "frozen", 0, 3)],
    "rank-1": [("master", "w", 6, 10), ("buffer", "b", 0, 1)],
}


def cover(files: dict[str, list[tuple[str, str, int, int]]], dtype: str = "F32"):
    return cover_of(
        {
            file: [TensorSpec(fragment_key(s, n, a), dtype, b - a) for s, n, a, b in parts]
            for file, parts in files.items()
        }
    )


@pytest.mark.parametrize(
    ("remove", "add", "words"),
    [
        (("master", "w", 6, 10), None, "master of w lacks elements 6 to 10 of 10"),
        (("master", "w", 0, 6), None, "master of w lacks elements 0 to 6 of 10"),
        (("exp_avg", "w", 0, 10), ("exp_avg", "w", 0, 0), None),
        (("frozen", "frozen", 0, 3), None, "frozen of frozen lacks elements 0 to 3 of 3"),
        (None, ("master", "w", 4, 8), "master of w has elements 4 to 6 twice (again in new)"),
        (None, ("master", "w", 10, 12), "has 12 elements, and the shape [2, 5] has 10"),
        (None, ("master", "head", 0, 10), "the model has no such parameter"),
        (None, ("exp_avg", "frozen", 0, 3), "the model has no such parameter"),
        (None, ("exp_avg_sq", "w", 0, 9), "exp_avg_sq of w lacks elements 9 to 10 of 10"),
        (("buffer", "b", 0, 1), None, "buffer of b lacks elements 0 to 1 of 1"),
    ],
)
def test_what_is_missing_or_double_is_named(remove, add, words) -> None:
    files = {file: [part for part in parts if part != remove] for file, parts in GOOD.items()}
    files["new"] = [add] if add else []
    if words is None:
        check_cover(cover(files), TABLE, {"b": {"shape": []}})
        return
    with pytest.raises(CheckpointError, match="The checkpoint is incomplete|holds") as caught:
        check_cover(cover(files), TABLE, {"b": {"shape": []}})
    assert words in str(caught.value)


def test_empty_weights_and_names_that_are_no_keys_are_refused() -> None:
    with pytest.raises(CheckpointError, match="master of w is empty"):
        check_cover({}, {"w": {"shape": [0], "trained": True, "tied_to": None}})
    assert parse_key(fragment_key("exp_avg", "a|b.c", 12)) == ("exp_avg", "a|b.c", 12)
    for key in ("master", "master|w", "master|w|x", "|w|0", "master||0"):
        with pytest.raises(CheckpointError):
            parse_key(key)
