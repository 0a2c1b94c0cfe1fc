"""task=embed: InfoNCE with the values of sentence-transformers, retrieval, pairs of every layout;
the exported directory is one of sentence-transformers."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmx.checkpoint.export.model import write_description
from llmx.data import SampleStore
from llmx.errors import ConfigError, DataError
from llmx.models.attention import AttentionMethod
from llmx.models.model import Models
from llmx.tasks import embed
from llmx.tasks.embed import (
    Embed,
    Options,
    Pairs,
    _published,
    contrast,
    number_of,
    retrieval,
)
from llmx.tasks.joint import HeldOut
from tests.data_rows import assert_rejected, batch_of, experiment_on, prepared
from tests.unit.test_models_classification import backbone
from tests.unit.test_models_classification import vector_model_of as model_of

PAIRS = [{"question": f"What is {n}?", "answer": f"It is {n * n}."} for n in range(12)]


def texts_of(store: SampleStore, task: Embed) -> set[tuple[str, ...]]:
    """The texts of each example."""
    found = set()
    for number in range(len(store)):
        texts = (task.tokenizer.decode(tokens).strip() for tokens, _ in store[number].sequences())
        found |= {tuple(islice(texts, size)) for size in store[number].example_sizes()}
    return found


def drawn(sizes: list[int], *, width: int = 16) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Vectors of examples with so many sequences, all of other texts."""
    torch.manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    outputs = torch.randn(len(ids), width, requires_grad=True)
    return outputs, {"example_ids": ids, "text_id": torch.arange(len(ids)) + 100}


class Sides(torch.nn.Module):
    """In the place of a SentenceTransformer: the vectors are given."""

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return features


# Its symmetric loss has no word about negatives of their own.
@pytest.mark.parametrize(("symmetric", "negatives"), [(False, 0), (False, 2), (True, 0)])
def test_the_loss_is_that_of_sentence_transformers(symmetric: bool, negatives: int) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    outputs, columns = drawn([2 + negatives] * 5)
    found, right = contrast(outputs, Pairs.of(columns), Options(symmetric=symmetric))
    by_side = outputs.view(5, 2 + negatives, -1).unbind(dim=1)
    kind = (
        losses.MultipleNegativesSymmetricRankingLoss
        if symmetric
        else losses.MultipleNegativesRankingLoss
    )
    features = [{"sentence_embedding": side} for side in by_side]
    wanted = kind(Sides(), scale=20.0)(features, torch.zeros(0))
    torch.testing.assert_close(found.mean(), wanted)
    (ours,) = torch.autograd.grad(found.mean(), outputs, retain_graph=True)
    (theirs,) = torch.autograd.grad(wanted, outputs)
    torch.testing.assert_close(ours, theirs)
    assert set(right.tolist()) <= {0.0, 1.0}


def naive(outputs: torch.Tensor, sizes: list[int], temperature: float) -> torch.Tensor:
    """Every query against every passage, one by one."""
    vectors = list(F.normalize(outputs, dim=-1))
    queries, passages, own = [], [], []
    for size in sizes:
        queries.append(vectors.pop(0))
        own.append(len(passages))
        passages += [vectors.pop(0) for _ in range(size - 1)]
    scores = [torch.stack([query @ one for one in passages]) for query in queries]
    return torch.stack(
        [-(each / temperature).log_softmax(0)[at] for each, at in zip(scores, own, strict=True)]
    )


@pytest.mark.parametrize("room", [embed.ROOM, 20])
def test_pairs_may_have_different_numbers_of_negatives(room, monkeypatch) -> None:
    """Computed at once or a few rows at a time: values and gradient."""
    monkeypatch.setattr(embed, "ROOM", room)
    sizes = [2, 4, 3, 2, 2]
    outputs, columns = drawn(sizes)
    found, _ = contrast(outputs, Pairs.of(columns), Options(temperature=0.3))
    wanted = naive(outputs, sizes, 0.3)
    torch.testing.assert_close(found, wanted)
    (ours,) = torch.autograd.grad(found.sum(), outputs)
    (theirs,) = torch.autograd.grad(wanted.sum(), outputs)
    torch.testing.assert_close(ours, theirs)


def test_matryoshka_sums_the_losses_of_shorter_vectors() -> None:
    outputs, columns = drawn([2, 2, 3])
    pairs = Pairs.of(columns)
    found, right = contrast(outputs, pairs, Options(matryoshka_dims=[8, 4]))
    each = [contrast(outputs[:, :dims], pairs, Options()) for dims in (16, 8, 4)]
    torch.testing.assert_close(found, sum(losses for losses, _ in each))
    assert torch.equal(right, each[0][1])


def test_dot_products_where_vectors_keep_their_length() -> None:
    outputs, columns = drawn([2, 2])
    found, _ = contrast(outputs, Pairs.of(columns), Options(normalize=False, temperature=1.0))
    scores = outputs[[0, 2]] @ outputs[[1, 3]].t()
    torch.testing.assert_close(found, F.cross_entropy(scores, torch.arange(2), reduction="none"))


def test_equal_texts_are_no_negatives() -> None:
    """Pairs 0 and 1 have one passage; pairs 0 and 2 one query; passage 3 is the query of 1."""
    outputs, columns = drawn([2, 2, 2, 2])
    columns["text_id"] = torch.tensor([1, 10, 2, 10, 1, 11, 3, 2])
    pairs = Pairs.of(columns)
    hidden = pairs.hidden(torch.arange(4))
    assert hidden.int().tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert pairs.swapped().hidden(torch.arange(4)).int().tolist() == [
        [0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0],
    ]  # fmt: skip
    every = Pairs.of(columns, mask_duplicates=False)
    assert not every.hidden(torch.arange(4)).any()
    masked, _ = contrast(outputs, pairs, Options(symmetric=True))
    assert bool((masked < contrast(outputs, every, Options(symmetric=True))[0]).any())


# Retrieval


def gathered(options: Options) -> HeldOut:
    return HeldOut(["text_id"], lambda *arrays: retrieval(*arrays, options))


def held_out(ranks: int) -> dict[str, float | None]:
    """Of six pairs on so many ranks."""
    torch.manual_seed(1)
    queries = F.normalize(torch.randn(6, 8), dim=-1)
    passages = queries.clone()
    passages[[0, 1]] = queries[[1, 0]]  # the second most similar, or less, of two queries
    vectors = torch.stack([queries, passages], dim=1).view(12, 8)
    parts = []
    for number in range(ranks):
        part = gathered(Options(recall_at=3))
        for pair in np.array_split(np.arange(6), ranks)[number]:
            batch = {
                "example_ids": torch.zeros(2, dtype=torch.long),
                "text_id": torch.tensor([2 * pair, 2 * pair + 1]),
            }
            part.add_batch(vectors[2 * pair : 2 * pair + 2], batch)
        part.add_batch(vectors[:0], {"example_ids": torch.zeros(0), "text_id": torch.zeros(0)})
        parts.append(part)
    first, *others = parts
    for other in others:
        first.merge(pickle.loads(pickle.dumps(other)))  # as it comes from another rank
    return first.values()


def test_retrieval_is_the_same_on_any_number_of_ranks() -> None:
    found = held_out(1)
    assert found["weight"] == 6
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert 4 / 6 < float(found["mrr"] or 0) <= 5 / 6
    assert float(found["recall"] or 0) >= float(found["accuracy"] or 0)
    for ranks in (2, 3):
        assert held_out(ranks) == pytest.approx(found, rel=1e-12)


def test_a_model_that_says_the_same_of_all_texts_finds_none() -> None:
    found = gathered(Options(recall_at=2))
    ids = torch.repeat_interleave(torch.arange(20), 2)
    found.add_batch(torch.ones(40, 4), {"example_ids": ids, "text_id": torch.arange(40)})
    values = found.values()
    assert (values["accuracy"], values["mrr"], values["recall"]) == (0, 0, 0)
    assert values["loss"] == pytest.approx(np.log(20))


# Data


@pytest.mark.parametrize(
    ("query", "positive", "more"),
    [
        ("question", "answer", {}),
        ("query", "positive", {}),
        ("anchor", "positive", {}),
        ("sentence1", "sentence2", {"label": 1}),
        ("instruction", "output", {}),
        ("prompt", "response", {}),
        ("title", "body", {}),
    ],
)
def test_every_layout_gives_the_same_pairs(query, positive, more, tmp_path) -> None:
    rows = [{query: row["question"], positive: row["answer"], **more} for row in PAIRS]
    named = {"data_map": {"query": query, "positive": positive}} if query == "title" else {}
    task, store = prepared(experiment_on(tmp_path, "embed", rows, **named))
    assert texts_of(store, task) == {(r["question"], r["answer"]) for r in PAIRS}


def test_negatives_of_their_own_and_prompts(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "positive": "b", "negatives": ["c", "d"]},
        {"query": "e", "positive": "f", "negatives": []},
        {"query": "g", "positive": "h", "negative": "i"},
        {"query": "j", "positive": "k", "negative_1": "l", "negative_2": None, "negative_3": "m"},
    ]
    options = {"query_prompt": "q: ", "passage_prompt": "p: "}
    task, store = prepared(experiment_on(tmp_path, "embed", rows, options))
    assert texts_of(store, task) == {
        ("q: a", "p: b", "p: c", "p: d"),
        ("q: e", "p: f"),
        ("q: g", "p: h", "p: i"),
        ("q: j", "p: k", "p: l", "p: m"),
    }
    assert number_of("b") in store.values_of("text_id"), "without the prompt"
    (line,) = task.see_data(store, None)
    assert line.startswith("4 pairs with 5 negatives")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"question": "", "answer": "x"}, '"question" is empty'),
        ({"question": "x", "answer": " "}, '"answer" is empty'),
        ({"question": "x"}, '"answer" is no column of the row, which has question'),
        ({"answer": "x"}, '"question" is no column of the row'),
        ({"question": "x", "answer": None}, '"answer" is null'),
        ({"question": "x", "answer": "x "}, "both texts are the same"),
        ({"question": "x", "answer": "y", "negatives": ["y"]}, "a negative is the positive itself"),
        ({"question": "x", "answer": "y", "negative": "x"}, "a negative is the query itself"),
        ({"question": "x", "answer": "y", "negatives": ["z", 3]}, "a negative is a text"),
        ({"question": "x", "answer": "y", "negatives": [""]}, "a negative is a text"),
        ({"question": "x", "answer": "y", "label": 0}, "how well the two texts belong together"),
        ({"question": "x", "answer": 3}, "not text"),
    ],
)
def test_rows_that_are_no_pair_are_rejected_and_counted(wrong, reason, tmp_path) -> None:
    exp = experiment_on(tmp_path, "embed", [*PAIRS[:3], wrong, *PAIRS[3:]])
    assert assert_rejected(exp, line=4, match=reason).num_sequences == 24


def test_columns_without_a_pair_are_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"question and answer.*data\.data_map\.query=title"):
        prepared(experiment_on(tmp_path, "embed", [{"title": "a", "body": "b"}]))


def test_a_long_text_is_cut_before_the_other(tmp_path: Path) -> None:
    rows = [*PAIRS, {"question": "short", "answer": "word " * 200}]
    exp = experiment_on(tmp_path, "embed", rows, over_long="truncate", seq_len=32, packing="none")
    task, store = prepared(exp)
    assert store.meta["truncated"] == 1
    (long,) = [one for one in texts_of(store, task) if one[0] == "short"]
    assert long[1].startswith("word word")


def test_nothing_to_tell_apart_is_refused(tmp_path: Path) -> None:
    task, store = prepared(experiment_on(tmp_path, "embed", PAIRS[:1]))
    with pytest.raises(ConfigError, match="Add more pairs"):
        task.see_data(store, None)
    exp = experiment_on(tmp_path / "one", "embed", PAIRS, packing="none")
    exp.batch.global_batch = 1
    task, store = prepared(exp)
    with pytest.raises(ConfigError, match="batch.global_batch=64"):
        task.see_data(store, None)


def test_more_dimensions_than_the_model_has(tmp_path: Path) -> None:
    task, store = prepared(experiment_on(tmp_path, "embed", PAIRS, {"matryoshka_dims": [4096]}))
    models = Models(policy=model_of(backbone("llama"), AttentionMethod("sdpa", "mask", "packed")))
    with pytest.raises(ConfigError, match="4096: the vectors of this model have"):
        task.outputs(models, batch_of(store, 0))


# Model


def test_pooling_follows_from_the_model(tmp_path: Path) -> None:
    task, _ = prepared(experiment_on(tmp_path, "embed", PAIRS))
    causal = SimpleNamespace(config=SimpleNamespace(_name_or_path=""))
    for attention, wanted in ((True, "last"), (False, "mean")):
        causal.attention = SimpleNamespace(causal=attention)
        assert task.pooling(causal) == wanted
    (tmp_path / "1_Pooling").mkdir()
    published = tmp_path / "1_Pooling" / "config.json"
    published.write_text('{"pooling_mode": "cls"}')
    causal.config._name_or_path = str(tmp_path)
    assert task.pooling(causal) == "cls"
    published.write_text('{"pooling_mode": "max"}')
    _published.cache_clear()
    with pytest.raises(ConfigError, match="pooled by max.*task.options.pooling=mean"):
        task.pooling(causal)
    task.options.pooling = "cls"
    assert task.pooling(causal) == "cls"


@pytest.mark.parametrize(("kind", "normalize"), [("llama", True), ("bert", False)])
def test_sentence_transformers_gives_the_same_vectors(kind, normalize, tmp_path) -> None:
    library = pytest.importorskip("sentence_transformers")
    options = {"query_prompt": "query: ", "normalize": normalize}
    task, store = prepared(experiment_on(tmp_path, "embed", PAIRS, options, packing="none"))
    network = backbone(kind)
    method = AttentionMethod("sdpa", "mask", "packed", causal=kind == "llama")
    models = Models(policy=model_of(network, method))
    with torch.no_grad():
        ours = task.outputs(models, batch_of(store, 0, 1))
    ours = F.normalize(ours, dim=-1) if normalize else ours
    out = tmp_path / "model"
    network.save_pretrained(out)
    write_description(
        out, network, network.config, tokenizer=task.tokenizer,
        vocab_size=network.config.vocab_size, dtype=torch.float32,
        files=task.export_files(models.main),
    )  # fmt: skip
    loaded = library.SentenceTransformer(str(out), device="cpu")
    assert loaded.similarity_fn_name == ("cosine" if normalize else "dot")
    assert loaded.max_seq_length == task.exp.data.seq_len
    decoded = [
        task.tokenizer.decode(tokens, skip_special_tokens=True)
        for number in (0, 1)
        for tokens, _ in store[number].sequences()
    ]
    plain = loaded.encode(decoded)
    np.testing.assert_allclose(plain, ours.numpy(), atol=2e-5)
    queries = loaded.encode_query([decoded[0].strip().removeprefix("query: ")])
    np.testing.assert_allclose(queries[0], ours[0].numpy(), atol=2e-5)
