"""``task=embed``: vectors of texts, from pairs that belong together (contrastive, InfoNCE).

    python -m llmx task=embed data=file data.path=queries.jsonl model=hf model.path=BAAI/bge-m3

The other passages of the whole step are what a query is told apart from, whatever the ranks and
micro batches. The exported model loads with ``SentenceTransformer``.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from llmx.config.fields import choice, number
from llmx.config.tasks import TaskDefaults
from llmx.data import Column, Example, SampleStore, TextPair
from llmx.data.source.records import Document
from llmx.errors import ConfigError
from llmx.models.spec import BACKBONE, ModelSpec
from llmx.run.metrics import Metric
from llmx.tasks.base import BOTH
from llmx.tasks.joint import EXAMPLES, JointLoss, JointTask
from llmx.text import plural

if TYPE_CHECKING:
    import torch

    from llmx.models.model import Batch, Model, Models

TEXT = "text_id"
"""The column that tells equal texts."""
CUTOFF = 10
"""The rank from which a reciprocal rank counts as 0."""
ROOM = 2**24
"""Similarities that are computed at once."""


@dataclass
class Options:
    """``task.options`` of ``task=embed``."""

    temperature: float = number(0.05, above=0, maximum=100, example=0.05)
    """Similarities are divided by it: less sets the most similar wrong passages further apart."""
    pooling: str = choice("auto", "mean", "cls", "last")
    """What of a text's hidden states is its vector: their ``mean``, that of the first token
    (``cls``) or of the ``last`` one. ``auto``: as the pretrained model was published
    (``1_Pooling``), else ``last`` of a causal network and ``mean`` of every other."""
    normalize: bool = True
    """Vectors of length 1, so that similarities are cosines; else dot products."""
    symmetric: bool = False
    """Also tell the query of each passage apart from the other queries: the mean of both losses."""
    matryoshka_dims: list[int] = field(default_factory=list)
    """Also learn the first so many numbers of each vector as a vector: the sum of all losses."""
    query_prompt: str = ""
    """Stands before each query, e.g. "query: "; kept in the exported model."""
    passage_prompt: str = ""
    """Stands before each positive and negative, e.g. "passage: "."""
    mask_duplicates: bool = True
    """A passage of another pair is not a negative where its text is that of the positive or the
    query, or where it belongs to the same query."""
    recall_at: int = number(10, minimum=1, maximum=10_000, example=10)
    """``recall`` is the part of held-out queries whose passage is among the first so many."""


class Embed(JointTask):
    """The passage of a query is more similar to it than all other passages of the step."""

    defaults = TaskDefaults(adapter=1e-4, batch=64)
    Options = Options
    takes: ClassVar[tuple[type, ...]] = (TextPair,)
    columns = (Column(TEXT, per="sequence", dtype="int64"),)
    loss_on = "all"
    verbatim = True

    def problems(self) -> Iterator[str]:
        dims = self.options.matryoshka_dims
        if min(dims, default=1) < 1 or len(set(dims)) != len(dims):
            yield (
                f"task.options.matryoshka_dims={dims}: must be different whole numbers from 1, "
                "e.g. [256, 128, 64]."
            )

    # Data

    def encoding_identity(self) -> dict[str, Any]:
        """The options that decide the examples: the prompts alone."""
        prompts = [self.options.query_prompt, self.options.passage_prompt]
        return {"kind": "pairs of texts", "version": 1, "prompts": prompts}

    def encode(self, row: TextPair) -> Example:
        """The query, its passage and its negatives: one sequence each, the longest cut first."""
        texts = [row.query, row.positive, *row.negatives]
        prompts = [self.options.query_prompt, *[self.options.passage_prompt] * (len(texts) - 1)]
        documents = [
            Document((prompt + text.strip()).strip(), row.where)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return Example.of(*documents, cut="end", text_id=[number_of(text) for text in texts])

    def see_data(self, train: SampleStore, evaluation: SampleStore | None) -> list[str]:
        """Log how many passages a query is compared with."""
        pairs = train.num_examples(np.arange(len(train)))
        negatives = train.num_sequences - 2 * pairs
        if pairs < 2 and not negatives:
            raise ConfigError(
                f"{self.exp.data.path}: a single pair without negatives has no other passage to "
                "compare with. Add more pairs."
            )
        step = self.exp.batch.global_batch
        if step == 1 and pairs == len(train) and not negatives:
            raise ConfigError(
                "batch.global_batch=1: a step with one pair has no other passage to compare with. "
                "Set e.g. batch.global_batch=64, or add negatives to the rows."
            )
        line = f"{plural(pairs, 'pair')} with {plural(negatives, 'negative')}"
        if step:
            of_step = pairs * step / len(train)
            num_passages = (1 + negatives / pairs) * of_step - 1
            line += (
                f"; about {of_step:.0f} pairs per step, each against {num_passages:.0f} passages"
            )
        return [line]

    # Model, loss

    def models(self) -> dict[str, ModelSpec]:
        """One network that ends in hidden states."""
        return {"policy": ModelSpec(head=BACKBONE)}

    def pooling(self, model: Model) -> str:
        """``task.options.pooling``, or what follows from the model."""
        if self.options.pooling != "auto":
            return str(self.options.pooling)
        path = getattr(model.config, "_name_or_path", None)
        commit = getattr(model.config, "_commit_hash", None)  # of a model of the Hub
        return _published(path, commit) or ("last" if model.attention.causal else "mean")

    def outputs(self, models: Models, batch: Batch) -> torch.Tensor:
        """fp32 [sequences, width]: a vector of each text, not of length 1 yet."""
        vectors = models.main.embeddings(batch, pooling=self.pooling(models.main))
        width = vectors.shape[1]
        if too_large := [dims for dims in self.options.matryoshka_dims if dims >= width]:
            raise ConfigError(
                f"task.options.matryoshka_dims={too_large[0]}: the vectors of this model have "
                f"{width} dimensions, which are always trained. Use dimensions below {width}."
            )
        return vectors

    def joint_loss(self, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> JointLoss:
        """InfoNCE of each query over all passages of the step (van den Oord et al. 2018)."""
        pairs = Pairs.of(columns, mask_duplicates=self.options.mask_duplicates)
        losses, right = contrast(outputs, pairs, self.options)
        return JointLoss(losses, {"accuracy": right})

    # Measuring

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Metrics of each query against all held-out passages, or those of its step."""
        recall = f"recall@{self.options.recall_at}"
        return {
            "accuracy": Metric("accuracy@1", "percent", higher_is_better=True, kinds=BOTH),
            "mrr": Metric(f"MRR@{CUTOFF}", "number", higher_is_better=True),
            "recall": Metric(recall, "percent", higher_is_better=True),
        }

    def measured(
        self, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> dict[str, float | None]:
        """Retrieval among all held-out passages (``retrieval``)."""
        return retrieval(outputs, columns, self.options)

    # What is exported

    def export_files(self, model: Model) -> Mapping[str, str]:
        """The files with which sentence-transformers loads the exported directory."""
        from llmx.models.pooling import POOLING_FILE, pooling_config

        width = int(model.config.get_text_config().hidden_size)
        modules = ["", POOLING_FILE.split("/")[0], *["2_Normalize"] * self.options.normalize]
        files: dict[str, Any] = {
            "modules.json": [
                {
                    "idx": number,
                    "name": str(number),
                    "path": path,
                    "type": f"sentence_transformers.models.{kind}",
                }
                for number, (path, kind) in enumerate(
                    zip(modules, ("Transformer", "Pooling", "Normalize"), strict=False)
                )
            ],
            POOLING_FILE: pooling_config(self.pooling(model), width=width),
            "sentence_bert_config.json": {
                "max_seq_length": self.exp.data.seq_len,
                "do_lower_case": False,
            },
            "config_sentence_transformers.json": {
                "prompts": {
                    "query": self.options.query_prompt,
                    "document": self.options.passage_prompt,
                },
                "default_prompt_name": None,
                "similarity_fn_name": "cosine" if self.options.normalize else "dot",
            },
        }
        return {
            name: json.dumps(values, indent=2, ensure_ascii=False) + "\n"
            for name, values in files.items()
        }


@functools.cache
def _published(path: str | None, commit: str | None) -> str | None:
    """The pooling of the pretrained model, if its files name one."""
    from llmx.models.pooling import POOLINGS, published_pooling

    try:
        return published_pooling(path, revision=commit)
    except ValueError as error:
        raise ConfigError(
            f"{path} was published to be pooled by {error}, and llmx knows {', '.join(POOLINGS)}. "
            "Choose one of them: task.options.pooling=mean."
        ) from error


def number_of(text: str) -> int:
    """Equal for equal texts, but for the space around them."""
    digest = hashlib.blake2b(text.strip().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class Pairs:
    """The places of queries and passages among the vectors of a step."""

    queries: torch.Tensor
    """int64 [pairs]: places among the vectors."""
    passages: torch.Tensor
    """int64 [passages]: of all pairs, positives and negatives."""
    positives: torch.Tensor
    """int64 [pairs]: the positive of each pair among the passages."""
    query_text: torch.Tensor
    """int64 [pairs]: equal for equal texts."""
    passage_text: torch.Tensor
    """int64 [passages]."""
    mask_duplicates: bool

    @classmethod
    def of(cls, columns: Mapping[str, torch.Tensor], *, mask_duplicates: bool = True) -> Pairs:
        """The first sequence of an example is its query, the second its positive."""
        import torch

        ids, text = columns[EXAMPLES], columns[TEXT]
        count = int(ids[-1]) + 1 if len(ids) else 0
        sizes = torch.bincount(ids, minlength=count)
        queries = torch.cumsum(sizes, 0) - sizes
        is_passage = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        is_passage[queries] = False
        passages = torch.nonzero(is_passage).squeeze(1)
        positives = queries - torch.arange(count, device=ids.device)
        return cls(queries, passages, positives, text[queries], text[passages], mask_duplicates)

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """bool [rows, passages]: which are no negatives of these queries, beside their positive."""
        query, passage = self.query_text[rows, None], self.passage_text[self.positives[rows], None]
        equal = (self.passage_text == passage) | (self.passage_text == query)
        to_positives = equal.index_select(1, self.positives) | (self.query_text == query)
        # Not equal[:, positives] = ..., for which the host would wait for the device.
        equal.index_copy_(1, self.positives, to_positives)
        equal = equal.scatter(1, self.positives[rows][:, None], value=False)
        return equal if self.mask_duplicates else equal & False

    def swapped(self) -> Pairs:
        """The positives as queries, which are told apart by the queries as passages."""
        import torch

        numbers = torch.arange(len(self.queries), device=self.queries.device)
        places, text = self.passages[self.positives], self.passage_text[self.positives]
        return Pairs(places, self.queries, numbers, text, self.query_text, self.mask_duplicates)


def contrast(
    outputs: torch.Tensor, pairs: Pairs, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [pairs]: the loss of each pair; and 1 where its passage is the most similar one."""
    import torch

    losses, chunks = outputs.new_zeros(len(pairs.queries)), list(_chunks(pairs))
    right = losses
    for dims in (outputs.shape[1], *options.matryoshka_dims):
        vectors = outputs[:, :dims]
        if options.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        queries, passages = vectors[pairs.queries], vectors[pairs.passages]
        dim_losses, best = _over_rows(queries, passages, pairs, chunks, options)
        if options.symmetric:
            positives = passages[pairs.positives]
            backwards, _ = _over_rows(positives, queries, pairs.swapped(), chunks, options)
            dim_losses = (dim_losses + backwards) / 2
        losses = losses + dim_losses
        if dims == outputs.shape[1]:
            right = best
    return losses, right


def _over_rows(
    queries: torch.Tensor,
    passages: torch.Tensor,
    pairs: Pairs,
    chunks: Sequence[torch.Tensor],
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of each query's positive among the passages, those of a chunk at once; and
    whether the positive is the most similar one."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def some(queries: torch.Tensor, passages: torch.Tensor, rows: torch.Tensor) -> Any:
        positives = pairs.positives[rows]
        scores = queries @ passages.t() / options.temperature
        scores = scores.masked_fill(pairs.hidden(rows), -torch.inf)
        losses = torch.nn.functional.cross_entropy(scores, positives, reduction="none")
        return losses, (scores.detach().argmax(dim=1) == positives).float()

    losses, right = [], []
    for rows in chunks:
        if len(chunks) == 1 or not torch.is_grad_enabled():
            row_losses, best = some(queries[rows], passages, rows)
        else:
            row_losses, best = checkpoint(
                some, queries[rows], passages, rows, use_reentrant=False, preserve_rng_state=False
            )
        losses.append(row_losses)
        right.append(best)
    empty = queries.sum(dim=1)[:0]
    return torch.cat([empty, *losses]), torch.cat([empty.detach(), *right])


def _chunks(pairs: Pairs) -> Iterator[torch.Tensor]:
    """Numbers of pairs, so many that their similarities take a bounded room."""
    import torch

    count = len(pairs.queries)
    size = max(1, ROOM // max(1, len(pairs.passages)))
    for start in range(0, count, size):
        yield torch.arange(start, min(start + size, count), device=pairs.queries.device)


def retrieval(
    vectors: torch.Tensor, columns: Mapping[str, torch.Tensor], options: Options
) -> dict[str, float | None]:
    """``loss``, ranks and recall of each query over all passages; a passage that is as similar as
    the right one counts as more similar, so that a model that says the same of all finds nothing.
    """
    import torch

    pairs = Pairs.of(columns, mask_duplicates=options.mask_duplicates)
    losses, _ = contrast(vectors, pairs, options)
    if options.normalize:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    passages, parts = vectors[pairs.passages], []
    for rows in _chunks(pairs):
        scores = vectors[pairs.queries[rows]] @ passages.t()
        scores = scores.masked_fill(pairs.hidden(rows), -torch.inf)
        right_scores = scores.gather(1, pairs.positives[rows][:, None])
        parts.append((scores >= right_scores).sum(dim=1).double())
    ranks = torch.cat(parts).clamp(min=1)  # not a number is no rank
    reciprocal = torch.where(ranks <= CUTOFF, 1 / ranks, 0.0)
    return {
        "loss": float(losses.double().mean()),
        "weight": float(len(ranks)),
        "accuracy": float((ranks == 1).double().mean()),
        "mrr": float(reciprocal.mean()),
        "recall": float((ranks <= options.recall_at).double().mean()),
    }
