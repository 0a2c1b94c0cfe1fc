"""Learning rates of parts of a network, as factors of the schedule's: ``optim.layer_decay``,
``optim.lr_scale``, ``optim.muon_lr`` and ``adapter.lr``.

Each becomes a factor of a parameter; parameters with the same one share a group of the optimizer
(``llmx.train.engine.optimizer``), so the schedule keeps their ratios. Tried by
``python -m pytest tests/unit/test_train_learning_rates.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from llmx.config import AdapterConfig, OptimConfig
from llmx.config.layers import EMBEDDINGS, HEAD, layer_factor, layer_number
from llmx.errors import ConfigError, did_you_mean
from llmx.models.adapter_names import is_added
from llmx.train.engine.muon import hidden_matrices


def lr_scales(
    optim: OptimConfig, adapter: AdapterConfig, networks: Iterable[nn.Module]
) -> dict[int, float]:
    """Id of a trained parameter -> its part of the schedule's learning rate; left out where it is
    all of it.

    Raises:
        ConfigError: a pattern of ``optim.lr_scale`` matches no trained parameter, or there are no
            layers for ``optim.layer_decay``.
    """
    networks = list(networks)
    named = [
        (name, parameter, network)
        for network in networks
        for name, parameter in network.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    ]
    _check_patterns(optim, [name for name, _, _ in named])
    trained = {id(network): network for _, _, network in named}
    decays = {key: LayerDecay(network, optim) for key, network in trained.items()}
    beside_adapter = 1.0
    if adapter.kind != "none" and adapter.lr is not None:
        beside_adapter = optim.lr / adapter.lr
    matrices: set[int] = set()
    if optim.kind == "muon" and optim.muon_lr is not None:
        matrices = {one for network in networks for one in hidden_matrices(network)}
    found: dict[int, float] = {}
    for name, parameter, network in named:
        factor = decays[id(network)].factor(name)
        factor *= 1.0 if is_added(name) else beside_adapter
        if id(parameter) in matrices and optim.muon_lr is not None:
            own = adapter.lr if is_added(name) else None
            factor *= optim.muon_lr / (own or optim.lr)
        for pattern, scale in optim.lr_scale.items():
            factor *= scale if fnmatchcase(name, pattern) else 1.0
        # A tied weight is looked up by its first name: an embedding, where it is the head, too.
        found.setdefault(id(parameter), factor)
    return {key: factor for key, factor in found.items() if factor != 1.0}


class LayerDecay:
    """``optim.layer_decay`` over one network."""

    def __init__(self, network: nn.Module, optim: OptimConfig) -> None:
        self._decay = optim.layer_decay
        numbers = [layer_number(name) for name, _ in network.named_parameters()]
        self._layers = max((number for number in numbers if number is not None), default=-1) + 1
        self._embeddings = tuple(f"{name}." for name in _embeddings(network))
        if self._decay is not None and not self._layers:
            raise ConfigError(
                f"optim.layer_decay={self._decay}: {type(network).__name__} has no numbered "
                "layers. Set optim.layer_decay=null, or name its parts in optim.lr_scale."
            )

    def factor(self, name: str) -> float:
        if self._decay is None:
            return 1.0
        place: int | str | None = layer_number(name)
        if place is None:
            place = EMBEDDINGS if name.startswith(self._embeddings) else HEAD
        return layer_factor(self._decay, place, num_layers=self._layers)


def _embeddings(network: nn.Module) -> Iterator[str]:
    """Modules below the first layer: tables, and what is called so (the norm of BERT's)."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding) or "embed" in name.rpartition(".")[2]:
            yield name


def _check_patterns(optim: OptimConfig, names: list[str]) -> None:
    for pattern in optim.lr_scale:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        near = did_you_mean(pattern.strip("*.")[:100], names)
        some = [*names[:3], "...", *names[-2:]] if len(names) > 6 else names
        raise ConfigError(
            f"optim.lr_scale: {pattern} matches none of the {len(names)} trained parameters: "
            f"{', '.join(some)}.{near} A star stands for any characters, as in "
            "'*.embed_tokens.*'."
        )
