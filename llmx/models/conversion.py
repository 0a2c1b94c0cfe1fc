"""The layout of a model's weights in files and in memory, and the way from one to the other.

Transformers keeps some weights in memory otherwise than the Hub does: experts fused to one
tensor, projections fused or split, names changed. Its tables say how
(``transformers.conversion_mapping``); here they are carried out one group of tensors at a time,
so that a sharded model is filled, and written, with bounded memory. Everything is first planned
from names and shapes alone. Tried by ``python -m pytest tests/unit/test_train_conversion.py``.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from llmx.errors import ConfigError
from llmx.models.parameters import whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together: experts that become one parameter, for example."""

    sources: tuple[tuple[str, str], ...]
    """(pattern of the transform, name), in the order in which the transform wants them."""
    targets: tuple[str, ...]
    """Names of what comes out."""
    transform: Any = None
    """transformers' ``WeightConverter``; None where the single source is the single target."""
    key: str = ""
    """transformers' name of the group: that of the first target, by its pattern."""

    def convert(
        self, read: Callable[[str], torch.Tensor], model: WholeShapes
    ) -> dict[str, torch.Tensor]:
        """The targets, by name. ``read`` gives a source."""
        if self.transform is None:
            return {self.targets[0]: read(self.sources[0][1])}
        transform = copy.deepcopy(self.transform)
        for pattern, name in self.sources:
            transform.add_tensor(self.key, name, pattern, read(name))
        converted = transform.convert(self.key, model=model, config=model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in converted.items()}


@dataclass
class LoadPlan:
    """Steps by which the tensors of a checkpoint become the weights of a model."""

    groups: list[Group] = field(default_factory=list)
    """The groups in the order of the model's weights."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the targets, as the checkpoint gives them."""
    unexpected: list[str] = field(default_factory=list)
    """Names that would be weights of another model, as the conversion renames them."""
    conversions: list[Any] = field(default_factory=list)
    """Transforms that took part: those to revert when the model is written."""

    def drop(self, names: Collection[str]) -> None:
        """Leave these targets out, as if the checkpoint did not have them."""
        self.groups = [group for group in self.groups if not set(group.targets) & set(names)]
        self.shapes = {name: shape for name, shape in self.shapes.items() if name not in names}


class WholeShapes:
    """A model as transformers' conversions see it: under ZeRO-3 its parameters have whole shapes.

    Everything else is the model's own.
    """

    def __init__(self, model: nn.Module, conversions: list[Any] | None = None) -> None:
        self._model = model
        self._weight_conversions = conversions
        self._shapes = {
            name: whole_shape(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def get_parameter(self, name: str) -> torch.Tensor:
        if name in self._shapes:
            return torch.empty(self._shapes[name], device="meta")
        return self._model.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def plan_load(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    targets: Mapping[str, torch.Tensor],
) -> LoadPlan:
    """Plan how a checkpoint with tensors of these ``shapes`` fills ``targets``. Reads nothing.

    Follows ``convert_and_load_state_dict_in_model`` of transformers, the heart of
    ``from_pretrained``. ``targets`` are the parameters (tied ones under all of their names) and
    persistent buffers of ``model``.

    Raises:
        ConfigError: tensors that belong together do not fit together.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = _conversions_of(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix, state = getattr(model, "base_model_prefix", ""), dict(targets)
    plan = LoadPlan()
    collected: dict[str, list[tuple[str | None, str]]] = {}
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None  # it has the model's own name already
        if renamed in state:
            collected.setdefault(renamed, []).append((pattern, name))
        else:
            plan.unexpected.append(renamed)
    stand_in = WholeShapes(model)
    for renamed, parts in collected.items():
        pattern = parts[0][0]
        if pattern is None:
            # Two files may hold one name's tensor twice, under its old and its new name: the
            # last one counts, as in transformers.
            group = Group((("", parts[-1][1]),), (renamed,))
            plan.groups.append(group)
            plan.shapes[renamed] = tuple(shapes[parts[-1][1]])
            continue
        group = Group(
            tuple((source_pattern or "", name) for source_pattern, name in parts),
            (),
            transform=by_pattern[pattern],
            key=renamed,
        )
        try:
            converted = group.convert(
                lambda name: torch.empty(shapes[name], device="meta"), stand_in
            )
        except Exception as error:  # whatever an operation of transformers raises
            raise ConfigError(
                f"{parts[0][1]} and {len(parts) - 1} more tensors of the checkpoint cannot be put "
                f"together to {renamed}: {error} Is a file missing or damaged?"
            ) from error
        plan.groups.append(Group(group.sources, tuple(converted), group.transform, renamed))
        plan.shapes.update({name: tuple(tensor.shape) for name, tensor in converted.items()})
    plan.unexpected += [name for name in plan.shapes if name not in state]
    order = {name: number for number, name in enumerate(state)}
    plan.groups.sort(key=lambda group: min(order.get(name, len(order)) for name in group.targets))
    plan.conversions = [entry for entry in mapping if entry.was_used()]
    return plan


def conversions_to_revert(model: nn.Module) -> list[Any]:
    """The transforms that lead from ``model`` back to the layout of files.

    Those that were used to load it (``load_weights`` notes them, as ``from_pretrained`` does);
    for a model from scratch those of its architecture, but for what only adds or removes a
    prefix: nobody knows whether the files had it.
    """
    noted = getattr(model, "_weight_conversions", None)
    if noted is not None:
        return list(noted)
    from transformers.core_model_loading import PrefixChange

    mapping = _conversions_of(model, add_legacy=False)
    return [entry for entry in mapping if not isinstance(entry, PrefixChange)]


def _conversions_of(model: nn.Module, **options: Any) -> list[Any]:
    """The conversions that transformers' tables have for the architecture."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(cast("PreTrainedModel", model), **options) or []


def plan_export(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], conversions: list[Any]
) -> list[Group]:
    """Plan how weights of these names and ``shapes`` are written, in their order. Reads nothing.

    ``convert_export`` carries a group out. Transformers' own ``revert_weight_conversion`` is
    asked, with tensors that have a shape only, so names are those of ``save_pretrained``.

    Raises:
        RuntimeError: weights would get lost.
    """
    names = list(shapes)
    if not conversions:
        return [Group((("", name),), (name,)) for name in names]
    stand_in = WholeShapes(model, conversions)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    written = _revert(stand_in, empty)
    origin = {id(tensor): name for name, tensor in empty.items()}
    groups = [
        Group((("", origin[id(tensor)]),), (name,))
        for name, tensor in written.items()
        if id(tensor) in origin
    ]
    renamed = {group.sources[0][1] for group in groups}
    together: dict[str, list[str]] = {}
    for name in names:
        if name not in renamed:
            together.setdefault(_group_key(conversions, name), []).append(name)
    for sources in together.values():
        converted = _revert(stand_in, {name: empty[name] for name in sources})
        groups.append(
            Group(tuple(("", name) for name in sources), tuple(converted), key=sources[0])
        )
    planned_names = sorted(name for group in groups for name in group.targets)
    if planned_names != sorted(written):
        lost = sorted(set(written) ^ set(planned_names))
        raise RuntimeError(
            f"{type(model).__name__} cannot be written piece by piece: {lost[0]} and "
            f"{len(lost) - 1} more tensors come out differently. Please report it."
        )
    order = {name: number for number, name in enumerate(names)}
    return sorted(groups, key=lambda group: min(order[name] for _, name in group.sources))


def convert_export(
    group: Group, values: Mapping[str, torch.Tensor], stand_in: WholeShapes
) -> dict[str, torch.Tensor]:
    """The tensors that a group of ``plan_export`` is written as, in the order of its names."""
    names = [name for _, name in group.sources]
    if not group.key:
        return {group.targets[0]: values[names[0]]}
    converted = _revert(stand_in, {name: values[name] for name in names})
    return {name: converted[name] for name in group.targets}


def _revert(stand_in: WholeShapes, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(cast("PreTrainedModel", stand_in), tensors))


def _group_key(conversions: list[Any], name: str) -> str:
    """A key that is equal for weights that are written together."""
    from transformers.core_model_loading import WeightConverter

    for conversion in reversed(conversions):
        if isinstance(conversion, WeightConverter):
            with contextlib.suppress(ValueError):
                renamed, pattern = conversion.reverse_transform().rename_source_key(name)
                if pattern is not None:
                    return str(renamed)
    return name


def effective_conversions(model: nn.Module) -> list[str]:
    """The transforms of ``conversions_to_revert`` as texts, for ``state.json``.

    Empty where files have the weights as memory has them, so that a checkpoint can be exported
    without transformers. Worked out once for a model.
    """
    if model in _EFFECTIVE:
        return _EFFECTIVE[model]
    shapes = {name: whole_shape(parameter) for name, parameter in model.named_parameters()}
    conversions = conversions_to_revert(model)
    groups = plan_export(model, shapes, conversions)
    as_it_is = all(group.targets == (group.sources[0][1],) and not group.key for group in groups)
    texts = [] if as_it_is else [repr(conversion) for conversion in conversions]
    return _EFFECTIVE.setdefault(model, texts)


_EFFECTIVE: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()


def conversions_of(model: nn.Module, texts: list[str]) -> list[Any]:
    """The transforms of ``effective_conversions``.

    Raises:
        ConfigError: this version of transformers has others.
    """
    by_text = {repr(entry): entry for entry in _conversions_of(model)}
    if unknown := [text for text in texts if text not in by_text]:
        import transformers

        raise ConfigError(
            f"The checkpoint was written with another version of transformers than this one "
            f"({transformers.__version__}), which does not know how {type(model).__name__} is "
            f"laid out in files: {unknown[0]}. Export with the version of the run (see "
            "provenance.json)."
        )
    return [by_text[text] for text in texts]
