"""A network as a plan knows it: counted from its modules in the process that traces it. Pure.

``llmx.train.memory_trace`` counts, ``Plan.network`` and ``Plan.beside`` keep it. Where no process
could build the network (code of the Hub), a plan has none, and says what is unknown for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """Sizes and operations of one network, with its adapter."""

    num_parameters: int
    """All, those in 4 bits included, tied ones once."""
    num_trained: int
    num_packed: int
    """Frozen weights that are kept in 4 bits."""
    num_looked_up: int
    """Parameters of embeddings (of positions, too), which multiply nothing; a tied one multiplies
    as the head."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    kv_size: int
    """Width of keys (and of values): heads of K x head width."""
    vocab_size: int
    forward_flops: float
    """Floating point operations of a token in a full row."""
    backward_flops: float
    """The same of the backward pass, without what is computed again; 0 of a frozen network."""
    attention_flops: float
    """The part of ``forward_flops`` that attention computes."""
    head_flops: float
    """The part of ``forward_flops`` of the output head, which is not checkpointed."""
    rms_norm: bool
    """Its norms and gates are operations of their own, which move much memory (Llama's blocks)."""

    @property
    def largest(self) -> int:
        """Elements of its largest layer, or of its embedding."""
        embedding = self.vocab_size * self.hidden_size
        layer = (self.num_parameters - 2 * embedding) // max(1, self.num_layers)
        return max(layer, embedding)

    @property
    def num_outside(self) -> int:
        """Parameters outside the layers, which AdamW updates beside Muon."""
        head = self.vocab_size * self.hidden_size
        return max(head, self.num_looked_up + (head if self.num_looked_up else 0))
