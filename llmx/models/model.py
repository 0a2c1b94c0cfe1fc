"""``Model``: a network of the run under its name, with the values that a task asks of it.

A loss never sees ranks, ZeRO, packing or kernels: it asks a ``Model`` for cross entropy, for
log-probabilities or for the logits of a head, and gets fp32 tensors with a graph.

NEFTune is uniform noise on the embeddings while training (Jain et al. 2023, algorithm 1). The noise
of a sequence follows from its own seed and its length alone, so it is the same for every split over
ranks and micro batches, packed or padded, and after a resume (on the same kind of device: CPU and
CUDA draw other numbers).

Shown by ``python -m pytest tests/unit/test_models_model.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from llmx.errors import ConfigError
from llmx.models.adapter import Adapter, base_alone
from llmx.models.attention import model_inputs, sequence_spans
from llmx.models.experts import Routing
from llmx.models.generate import BATCH, Completion, Decoder, generate
from llmx.models.loss import (
    CROSS_ENTROPY,
    IGNORE,
    OfLogits,
    TokenLoss,
    micro_batch_loss,
    target_log_probabilities,
    target_logits,
    target_positions,
    to_device,
    values_of_logits,
    without_cache,
)
from llmx.models.parameters import is_multimodal
from llmx.models.pooling import has_score, pooled, pooled_tokens, sequence_numbers, without_rows
from llmx.models.sampling import Sampling
from llmx.models.spec import BACKBONE as BACKBONE
from llmx.models.spec import CAUSAL_LM as CAUSAL_LM
from llmx.models.spec import CLASSIFICATION as CLASSIFICATION
from llmx.models.spec import HEADS as HEADS
from llmx.models.spec import LANGUAGE_MODELS as LANGUAGE_MODELS
from llmx.models.spec import MASKED_LM as MASKED_LM
from llmx.models.spec import ModelSpec as ModelSpec

SEEDS = "draw_seeds"
"""Key of a batch: int64 [sequences], a seed for each of its sequences (``Task.draws``)."""


def embedding_noise(
    like: torch.Tensor, segment_ids: torch.Tensor, seeds: torch.Tensor, *, alpha: float
) -> torch.Tensor:
    """Noise in the shape of the embeddings ``like`` [..., d]: uniform in +- alpha / sqrt(L d) for
    each sequence of L tokens, 0 in the padding.

    Args:
        segment_ids: int [B, T], on the CPU: 1, 2, ... for the sequences of a line, 0 in the
            padding.
        seeds: int64 [sequences], in the order in which they lie.
    """
    width = like.shape[-1]
    noise = torch.zeros(segment_ids.numel(), width, dtype=like.dtype, device=like.device)
    generator = torch.Generator(like.device)
    for (first, end), seed in zip(sequence_spans(segment_ids), seeds.tolist(), strict=True):
        size = alpha / math.sqrt((end - first) * width)
        generator.manual_seed(seed)
        noise[first:end].uniform_(-size, size, generator=generator)
    return noise.view(like.shape)


@contextmanager
def noisy_embeddings(
    network: nn.Module, segment_ids: torch.Tensor, seeds: torch.Tensor, *, alpha: float
) -> Iterator[None]:
    """Inside, the token embeddings of ``network`` come out with noise."""
    embedding = getattr(network, "get_input_embeddings", lambda: None)()
    if not isinstance(embedding, nn.Module):
        raise TypeError(f"{type(network).__name__} has no token embeddings")

    def add(_module: nn.Module, _arguments: object, output: torch.Tensor) -> torch.Tensor:
        return output + embedding_noise(output, segment_ids, seeds, alpha=alpha)

    handle = embedding.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


Batch = dict[str, torch.Tensor]
"""A micro batch as ``llmx.data.collate`` makes it, on the CPU."""


Sampler = Callable[[list[Sequence[int]], Sampling, list[int]], list[Completion]]
"""Completions of prompts, in order, each of its seed; the same on every rank. Collective."""


@dataclass(frozen=True)
class SequenceLogProbs:
    """Log-probabilities of the target tokens of a micro batch, [n] each."""

    values: torch.Tensor
    """fp32 [n], with a graph unless gradients are off."""
    sequences: torch.Tensor
    """int64 [n]: the sequence of the micro batch that each is of."""
    num_sequences: int

    def sums(self) -> torch.Tensor:
        """fp32 [num_sequences]: of all target tokens of each sequence."""
        zeros = self.values.new_zeros(self.num_sequences)
        return zeros.index_add(0, self.sequences, self.values)

    def counts(self) -> torch.Tensor:
        """fp32 [num_sequences]: how many target tokens each sequence has."""
        zeros = self.values.new_zeros(self.num_sequences)
        return zeros.index_add(0, self.sequences, torch.ones_like(self.values))


@dataclass(kw_only=True)
class Model(Decoder):
    """One network of the run."""

    name: str
    spec: ModelSpec
    forward: Any
    """Called with the arguments of the network's forward: the engine, which gathers what ZeRO-3
    has sharded, or the network itself."""
    routing: Routing
    adapter: Adapter | None = None
    """The adapter that is trained, if its base is frozen."""
    fused_loss: bool = False
    """Head and loss are computed together (``llmx.models.loss``)."""
    of_base: bool = False
    """No network of its own: that of another model, with its adapter off (``base_of``)."""
    gradient_scale: float = 1.0
    """The known factor of the loss: gradients that are computed in the forward pass are kept at
    that scale."""
    liger_kernel: bool = False
    """Liger-Kernel's modules take the place of its own in an engine (``llmx.models.liger``)."""
    sampler: Sampler | None = None
    """Draws the completions of ``sample`` in place of the ranks (``llmx.rollout``)."""
    rows: int = BATCH
    """Completions that are drawn at once (``DrawnSamples.rows`` of the plan)."""

    def connect(self, forward: Any) -> None:
        """Take the forward of an engine, which has its hooks in the network already."""
        self.forward = forward
        if self.liger_kernel:
            from llmx.models.liger import apply_liger

            apply_liger(self.module)

    def inputs(self, batch: Batch) -> tuple[dict[str, Any], torch.Tensor]:
        """Keyword arguments of the forward, on the device; and the labels (``model_inputs``).

        Raises ConfigError for a token without a row: a GPU would only say that an assertion failed.
        """
        rows, largest = self.config.get_text_config().vocab_size, int(batch["input_ids"].max())
        if largest >= rows:
            raise ConfigError(
                f"A sample has the token id {largest}, and the embedding of the model "
                f"{self.name!r} has {rows} rows. Choose a model that has one for each token of the "
                "run's tokenizer, or remove the token from the data."
            )
        return model_inputs(batch, method=self.attention, dtype=self.dtype, device=self.device)

    @property
    def is_training(self) -> bool:
        """Whether the network runs with dropout and the like; not in an evaluation."""
        return self.spec.trained and self.module.training

    def cross_entropy(
        self,
        batch: Batch,
        *,
        token_loss: TokenLoss = CROSS_ENTROPY,
        embedding_noise: float = 0.0,
    ) -> torch.Tensor:
        """Summed cross entropy of the targets, fp32 scalar: each times its weight, where
        ``batch`` has ``weights``.

        Args:
            token_loss: with further terms.
            embedding_noise: NEFTune's alpha, for a task that ``draws``.
        """
        weights = batch.get("weights")
        if weights is not None:
            weights = weights.reshape(-1)[batch["labels"].reshape(-1) != IGNORE]
        inputs, labels = self.inputs(batch)
        noise: AbstractContextManager[None] = nullcontext()
        if embedding_noise:
            lines, seeds = batch["segment_ids"], batch[SEEDS]
            noise = noisy_embeddings(self.module, lines, seeds, alpha=embedding_noise)
        with self._watch(batch), noise:
            return micro_batch_loss(
                self.forward,
                inputs,
                labels,
                vocab_size=self.vocab_size,
                fused=self.fused_loss,
                scale=self.gradient_scale,
                weights=weights,
                token_loss=token_loss,
            )

    def log_probabilities(self, batch: Batch) -> SequenceLogProbs:
        """Log-probability of every target token, by sequence: logits are computed at target
        positions only, and no fp32 copy of them is ever whole."""
        at_targets = self._at_targets(batch)
        values, _ = target_log_probabilities(*at_targets, vocab_size=self.vocab_size)
        numbers, count = self.sequences_of_targets(batch)
        return SequenceLogProbs(values, to_device(numbers, self.device), count)

    def sequences_of_targets(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """int64 [n]: the sequence of each target token of the batch; and how many there are."""
        numbers, count = sequence_numbers(batch["segment_ids"])
        return numbers.reshape(-1)[batch["labels"].reshape(-1) != IGNORE], count

    def by_target(self, batch: Batch, column: str) -> torch.Tensor:
        """[n, ...]: a column by token at every target token, on the device of the network."""
        return to_device(batch[column][batch["labels"] != IGNORE], self.device)

    def of_logits(
        self, batch: Batch, function: OfLogits, *beside: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The values of ``function`` over the logits of every target token, [n, ...] each, with a
        graph unless gradients are off: a loss over whole distributions. It gets some rows at a
        time, so that no fp32 copy of all logits is there, and again in the backward pass.

            def function(logits, targets, *beside):  # fp32 [rows, vocabulary], int64 [rows]
                return (logits.logsumexp(-1),)

        Args:
            beside: [n, ...], in the order of the targets: ``batch[column][labels != IGNORE]``.
        """
        logits, targets = self._at_targets(batch)
        on_device = (to_device(values, self.device) for values in beside)
        return values_of_logits(logits, targets, function, *on_device, vocab_size=self.vocab_size)

    def target_logits(self, batch: Batch) -> torch.Tensor:
        """[n, vocabulary], in the dtype of the network: the logits of every target token. They are
        large; ``log_probabilities`` and ``of_logits`` give what follows from them."""
        logits, _ = self._at_targets(batch)
        return logits[:, : self.vocab_size]

    def _at_targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, columns of the head] at the target tokens, and the targets [n]."""
        inputs, labels = self.inputs(batch)
        with self._watch(batch):
            return target_logits(self.forward, inputs, labels)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        n: int,
        seeds: Callable[[int, int], int],
    ) -> list[list[Completion]]:
        """``n`` completions of each prompt, the same on every rank. Collective.

        Args:
            prompts: token ids.
            seeds: of (number of the prompt, number of the sample): ``RolloutKey.of``.
        """
        rows = [prompt for prompt in prompts for _ in range(n)]
        keys = [seeds(prompt, number) for prompt in range(len(prompts)) for number in range(n)]
        if self.sampler is not None:
            completions = self.sampler(rows, sampling, keys)
        else:
            completions = generate(self, rows, sampling, seeds=keys, batch_size=self.rows)
        return [completions[first : first + n] for first in range(0, len(completions), n)]

    def logits(self, batch: Batch) -> torch.Tensor:
        """fp32 [sequences, num_labels]: what the classification head says of each sequence. A
        ``score`` looks at its last token; other heads pool a sequence as their architecture does.
        """
        inputs, _ = self.inputs(batch)
        # One of padding alone is passed forward, too: for the collectives of ZeRO.
        empty = not int(batch["segment_ids"].max())
        if has_score(self.module):
            inputs["pool_at"] = self._pooled_places(batch)
        outputs = self._outputs(batch, inputs)
        logits: torch.Tensor = getattr(outputs, "logits", outputs).float()
        return without_rows(logits) if empty else logits

    def token_scores(self, batch: Batch) -> torch.Tensor:
        """fp32 [n]: what a ``score`` with one output says at the token before each target token,
        the state in which that one is drawn.

        Raises:
            ConfigError: the network pools a sequence in its own way.
        """
        if not has_score(self.module):
            raise ConfigError(
                f"The model {self.name!r} is a {type(self.module).__name__}, which scores whole "
                "sequences. Choose a causal one, which scores every token."
            )
        inputs, labels = self.inputs(batch)
        at = target_positions(labels, self.device)
        inputs["pool_at"] = at.rows, at.columns
        scores: torch.Tensor = self._outputs(batch, inputs)[:, 0]
        return scores.float()

    def embeddings(self, batch: Batch, *, pooling: str) -> torch.Tensor:
        """fp32 [sequences, H]: the hidden states of each sequence as one vector, of a network that
        ends in them (``backbone``). ``pooling``: of ``llmx.models.pooling.POOLINGS``."""
        inputs, _ = self.inputs(batch)
        hidden = self._outputs(batch, inputs).last_hidden_state
        return pooled(hidden, batch["segment_ids"], pooling)

    def _outputs(self, batch: Batch, inputs: dict[str, Any]) -> Any:
        with self._watch(batch):
            return self.forward(**inputs, **without_cache(self.module))

    def _pooled_places(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, columns) of the hidden states that a ``score`` looks at."""
        pad_id = self.config.get_text_config().pad_token_id
        rows, columns = pooled_tokens(batch["segment_ids"], batch["input_ids"], pad_id)
        if self.attention.isolation == "cu_seq_lens":
            length = batch["segment_ids"].shape[1]
            rows, columns = torch.zeros_like(rows), rows * length + columns
        return to_device(rows, self.device), to_device(columns, self.device)

    @contextmanager
    def _watch(self, batch: Batch) -> Iterator[None]:
        """Inside, one forward: without a graph for a frozen model; routers are watched where they
        are trained, not in an evaluation."""
        graph = torch.is_grad_enabled() and self.spec.trained
        is_watched = graph and self.routing.routers
        watch = self.routing.watch(batch["segment_ids"]) if is_watched else nullcontext()
        with torch.set_grad_enabled(graph), watch:
            yield


class Models(dict[str, Model]):
    """The networks of a run by name: ``models["policy"]`` or ``models.policy``."""

    def __getattr__(self, name: str) -> Model:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"this task has no model {name!r}; Task.models() names {', '.join(self)}"
            ) from None

    @property
    def main(self) -> Model:
        """The first that is trained: the one that is exported, and that generates."""
        return next(model for model in self.values() if model.spec.trained)


class NetworksByName(nn.Module):
    """Several networks in one module, so that one DeepSpeed engine trains them: parameters are
    called ``policy.model...``. ``forward`` goes to the one that is named."""

    def __init__(self, networks: Mapping[str, nn.Module], *, frozen: Sequence[str] = ()) -> None:
        super().__init__()
        self._frozen = tuple(frozen)
        for name, network in networks.items():
            self.add_module(name, network.eval() if name in frozen else network)

    def train(self, mode: bool = True) -> NetworksByName:
        """Set the mode, but keep frozen networks without dropout."""
        super().train(mode)
        for name in self._frozen:
            self.get_submodule(name).eval()
        return self

    def forward(self, network_name: str, **inputs: Any) -> Any:
        return self.get_submodule(network_name)(**inputs)


@dataclass
class ForwardOf:
    """The forward of one network, through the engine that holds several."""

    engine: Callable[..., Any]
    name: str
    module: nn.Module

    def __call__(self, **inputs: Any) -> Any:
        return self.engine(network_name=self.name, **inputs)


@dataclass
class ForwardOfBase:
    """The forward of a network with an adapter, as if there were none."""

    forward: Callable[..., Any]
    module: nn.Module

    def __call__(self, **inputs: Any) -> Any:
        with base_alone(self.module):
            return self.forward(**inputs)


def base_of(model: Model, *, name: str, spec: ModelSpec) -> Model:
    """The frozen base of a model with an adapter, under a name of its own. It takes no memory."""
    return replace(
        model,
        name=name,
        spec=spec,
        forward=ForwardOfBase(model.forward, model.module),
        adapter=None,
        of_base=True,
        fused_loss=False,
    )


AUTO_CLASSES = {
    CAUSAL_LM: "AutoModelForCausalLM",
    MASKED_LM: "AutoModelForMaskedLM",
    CLASSIFICATION: "AutoModelForSequenceClassification",
    BACKBONE: "AutoModel",
}
"""Head -> what others load an exported model with, too."""
_ENDINGS = {
    "LMHeadModel": CAUSAL_LM,
    "ForMaskedLM": MASKED_LM,
    "ForSequenceClassification": CLASSIFICATION,
    "Model": BACKBONE,
}


def head_of(config: Any) -> str:
    """The head of an exported network, by the ``architectures`` of its config."""
    architecture = (config.architectures or [""])[0]
    return next(
        (head for ending, head in _ENDINGS.items() if architecture.endswith(ending)), CAUSAL_LM
    )


def auto_class(head: str, config: Any) -> Any:
    """The class of transformers that builds a network of ``config`` with this head. A multi-modal
    model is built whole: its towers are exported with it."""
    import transformers

    with_towers = transformers.AutoModelForImageTextToText
    if head == CAUSAL_LM and is_multimodal(config) and type(config) in with_towers._model_mapping:
        return with_towers
    return getattr(transformers, AUTO_CLASSES[head])


def empty_network(config: Any, *, trust_remote_code: bool) -> Any:
    """The network of an exported config, without memory for its weights."""
    with torch.device("meta"):
        loader = auto_class(head_of(config), config)
        return loader.from_config(config, trust_remote_code=trust_remote_code)
