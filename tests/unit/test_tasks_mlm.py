"""Masked language modelling: what is hidden, of what it is a function, and the loss of BERT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
)

from llmx.data import IGNORE, SampleStore, collate
from llmx.data.store.samples import Sample
from llmx.data.store.summary import lost_rows
from llmx.errors import ConfigError
from llmx.models.attention import AttentionMethod, model_inputs
from llmx.models.loss import micro_batch_loss
from llmx.plan.types import BatchPlan
from llmx.tasks import SampleKey, task_of
from llmx.tasks.mlm import Options, Vocabulary, masked
from llmx.train.batches import Layout, make_step
from llmx.train.step import transform_of
from tests.data_rows import prepared, sequences_of
from tests.rundirs import experiment, parity_experiment
from tests.small_stores import write_store

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{number}" for number in range(90)]
PARTS = [f"##p{number}" for number in range(30)]


def bert_tokenizer() -> BertTokenizerFast:
    vocab = {token: number for number, token in enumerate([*SPECIAL, *WORDS, *PARTS])}
    return BertTokenizerFast(vocab=vocab, do_lower_case=False)


def sample(*lengths: int, seed: int = 0) -> Sample:
    """Sequences [CLS] ... [SEP]."""
    draw = np.random.Generator(np.random.Philox(key=seed))
    rows = [[2, *draw.integers(5, 125, size=size - 2).tolist(), 3] for size in lengths]
    tokens = np.array([token for row in rows for token in row], np.uint32)
    return Sample(
        tokens=tokens,
        targets=np.ones(len(tokens), np.bool_),
        sequence_starts=np.cumsum([0, *lengths[:-1]]).astype(np.int64),
    )


VOCABULARY = Vocabulary(bert_tokenizer(), whole_words=False)
WHOLE = Vocabulary(bert_tokenizer(), whole_words=True)


def test_the_parts_are_those_of_the_collator_of_transformers() -> None:
    """15 % of what is no special token; of those 80 % hidden, 10 % any token, 10 % as they are."""
    one = sample(*[500] * 400)
    ours = masked(one, SampleKey(0, 3, 7), Options(), VOCABULARY)
    torch.manual_seed(0)
    ids = torch.from_numpy(one.tokens.astype(np.int64)).view(400, 500)
    collator = DataCollatorForLanguageModeling(bert_tokenizer())
    theirs, labels = collator.torch_mask_tokens(ids.clone())
    found = [
        parts(one.tokens.astype(np.int64), ours.tokens.astype(np.int64), ours.labels),
        parts(ids.view(-1).numpy(), theirs.view(-1).numpy(), labels.view(-1).numpy()),
    ]
    assert found[0] == pytest.approx([0.15, 0.8, 0.1, 0.1], abs=0.01)
    assert found[0] == pytest.approx(found[1], abs=0.015)


def parts(before: np.ndarray, after: np.ndarray, labels: Any) -> list[float]:
    """Hidden of all ordinary tokens; of the hidden: masks, others, the same."""
    hidden = labels != IGNORE
    assert (labels[hidden] == before[hidden]).all()
    assert (after[~hidden] == before[~hidden]).all()
    assert not hidden[np.isin(before, [0, 2, 3])].any()
    ordinary = ~np.isin(before, [0, 2, 3])
    count = hidden.sum()
    mask = (after[hidden] == 4).sum() / count
    same = (after[hidden] == before[hidden]).sum() / count
    return [count / ordinary.sum(), mask, 1 - mask - same, same]


def test_what_is_hidden_is_a_function_of_the_key_alone() -> None:
    one = sample(40, 50)
    draws = [
        masked(one, SampleKey(*key), Options(), VOCABULARY).labels
        for key in ((1, 2, 3), (1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4))
    ]
    assert np.array_equal(draws[0], draws[1])
    assert all(not np.array_equal(draws[0], other) for other in draws[2:])
    np.random.seed(1)
    assert np.array_equal(masked(one, SampleKey(1, 2, 3), Options(), VOCABULARY).labels, draws[0])
    # Recorded: another platform or NumPy hides the same.
    assert np.flatnonzero(draws[0] != IGNORE).tolist() == RECORDED


RECORDED = [2, 14, 16, 24, 25, 31, 34, 43, 46, 47, 61, 69, 74, 83, 85]


def test_words_are_hidden_whole() -> None:
    one = sample(*[200] * 50)
    options = Options(whole_words=True)
    hidden = masked(one, SampleKey(0, 0, 0), options, WHOLE).labels != IGNORE
    continues = one.tokens >= 5 + len(WORDS)
    follows = np.flatnonzero(continues[1:]) + 1
    # What stands behind [CLS] begins a word, whatever it looks like.
    follows = follows[~np.isin(one.tokens[follows - 1], [2, 3])]
    assert (hidden[follows] == hidden[follows - 1]).all()
    assert hidden.mean() == pytest.approx(0.15, abs=0.02)
    # A sequence does not continue the one before it: here each is a part of a word.
    alone = Sample(np.full(2000, 5 + len(WORDS), np.uint32), np.ones(2000, bool), np.arange(2000))
    hidden = masked(alone, SampleKey(0, 0, 0), options, WHOLE).labels != IGNORE
    assert hidden.mean() == pytest.approx(0.15, abs=0.03)
    bpe = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    bpe.pre_tokenizer, bpe.normalizer = pre_tokenizers.Whitespace(), normalizers.NFC()
    unmarked = PreTrainedTokenizerFast(tokenizer_object=bpe, mask_token="b")
    with pytest.raises(ConfigError, match="does not mark where words begin"):
        Vocabulary(unmarked, whole_words=True)


def mlm_experiment(tmp_path: Path) -> Any:
    exp = parity_experiment(tmp_path / "run")
    exp.task.kind = "mlm"
    return exp


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    tokenizer = bert_tokenizer()
    tokenizer.mask_token = None
    with pytest.raises(ConfigError, match="no mask token.*kind=wordpiece"):
        task_of(mlm_experiment(tmp_path), tokenizer)


def test_a_step_hides_the_same_for_every_split(tmp_path: Path) -> None:
    given = [sample(20 + n, 11, seed=n) for n in range(24)]
    store = write_store(tmp_path / "store", given, fingerprint="x", seq_len=128, meta={})
    task = task_of(mlm_experiment(tmp_path), bert_tokenizer())
    common: dict[str, Any] = {
        "seed": 4,
        "layout": Layout(seq_len=128, pad_id=0, layout="packed", pad_to=128),
        "transform": transform_of(task, seed=4),
    }
    found = []
    for sizes, accumulation in (((8,), 1), ((3, 1), 2), ((1, 1, 1, 1), 2)):
        batch = BatchPlan(8, accumulation, sizes, 128)
        micro_batches = [
            micro
            for rank in range(len(sizes))
            for micro in make_step(
                store, 5, batch=batch, rank=rank, normaliser="batch", **common
            ).micro_batches
        ]
        lines = [
            (tuple(ids.tolist()), tuple(labels.tolist()))
            for micro in micro_batches
            for ids, labels in zip(micro["input_ids"], micro["labels"], strict=True)
        ]
        found.append((sorted(lines), sum(map(task.weight, micro_batches))))
    assert all(one == found[0] for one in found)
    assert found[0][1] > 0


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_loss_is_that_of_bert_for_masked_lm(layout: str) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=125, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    samples = [
        masked(one, SampleKey(0, 0, place), Options(mask_probability=0.3), VOCABULARY)
        for place, one in enumerate([sample(9, 13, 7), sample(17, seed=2)])
    ]
    total, count = torch.zeros(()), 0
    for one in samples:
        for start, stop in one.bounds():
            ids = torch.from_numpy(one.tokens[start:stop].astype(np.int64))[None]
            assert one.labels is not None
            labels = torch.from_numpy(one.labels[start:stop])[None]
            targets = int((labels != IGNORE).sum())
            if targets:
                total = total + model(input_ids=ids, labels=labels).loss * targets
                count += targets
    total.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    isolation = "mask" if layout == "packed" else "padding_mask"
    method = AttentionMethod("sdpa", isolation, layout, causal=False)
    batch = collate(samples, seq_len=64, pad_id=0, layout=layout)
    inputs, labels = model_inputs(batch, method=method, dtype=torch.float32, device=model.device)
    loss = micro_batch_loss(model, inputs, labels)
    loss.backward()
    assert int((batch["labels"] != IGNORE).sum()) == count > 3
    torch.testing.assert_close(loss, total.detach().float(), rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5)


def stored(tmp_path: Path, texts: list[str], tokenizer: Any, **data: Any) -> SampleStore:
    """Documents as ``task=mlm`` prepares them."""
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{text}\n" for text in texts))
    of_text = {"path": str(path), "form": "text", "text_unit": "line", "max_rows": None}
    exp = experiment(tmp_path / "run", data={**of_text, **data}, task={"kind": "mlm"})
    return prepared(exp, tokenizer)[1]


def test_documents_begin_and_end_as_the_tokenizer_does_also_where_they_are_cut(tmp_path) -> None:
    tokenizer = bert_tokenizer()
    tokenizer.eos_token = tokenizer.sep_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    texts = ["w1 w2 w3 w4 w5 w6", "w7"]
    store = stored(tmp_path, texts, tokenizer, seq_len=5, over_long="truncate", packing="none")
    w = len(SPECIAL)
    assert sorted(sequences_of(store)) == [(2, w + 1, w + 2, w + 3, 3), (2, w + 7, 3)]


def test_the_recipe_of_a_bert_loses_no_token(tmp_path: Path) -> None:
    texts = [" ".join(f"w{(n + k) % 90}" for k in range(n)) for n in (3, 40, 700)]
    store = stored(tmp_path, texts, bert_tokenizer(), seq_len=64)
    assert (store.meta["rows_read"], store.meta["truncated"]) == (3, 0)
    tokens = [token for one in sequences_of(store) for token in one]
    assert sum(token >= len(SPECIAL) for token in tokens) == 3 + 40 + 700
    assert lost_rows(store.meta) == []
