"""Gives Hydra the schema to compose from, and explains its errors in terms of the config.

Overrides and the user's files are checked before (``overrides.py``, ``user_files.py``), so what is
left is mostly ``${...}`` and values that a choice leaves open. Nothing of the libraries' own text
is passed on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmx.compose.overrides import quoted
from llmx.config import Experiment, experiment_from_dict, to_dict
from llmx.config.build import schema_fields
from llmx.config.groups import CONF, GROUPS, key_problem, no_such_option, shown
from llmx.errors import ConfigError, LlmxError, did_you_mean
from llmx.text import file_name

if TYPE_CHECKING:
    from omegaconf import DictConfig

_READERS = ("hydra", "omegaconf", "antlr4")


def explain_hydra(error: Exception, overrides: Sequence[str] = ()) -> str:
    """One line on an exception of Hydra or OmegaConf. ``overrides``: what was typed."""
    from hydra.errors import MissingConfigException
    from omegaconf import errors

    chain = [error, *filter(None, (error.__cause__, error.__context__))]
    key = next((str(k) for cause in chain if (k := getattr(cause, "full_key", None))), "")
    for cause in chain:
        if isinstance(cause, errors.MissingMandatoryValue):
            return f"{key} has no value yet, and this choice needs one: set {key}=..."
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            group, _, name = cause.missing_cfg_file.rpartition("/")
            explain = _no_such_plugin if group.startswith("hydra/") else no_such_option
            return explain(group, name)
        if isinstance(
            cause,
            errors.InterpolationResolutionError
            | errors.UnsupportedInterpolationType
            | errors.GrammarParseError
            | RecursionError,
        ):
            return _interpolation(key, cause, overrides)
    if key and not key.startswith("hydra."):
        return key_problem(key) or _unfit(key, overrides)
    words = ", ".join(map(shown, overrides[:5]))
    return f"{words}: cannot be composed together. Leave out one after the other to find which."


def _no_such_plugin(group: str, name: str) -> str:
    """The message for an option that a group of Hydra's own does not have."""
    from hydra.core.config_store import ConfigStore

    files = ConfigStore.instance().list(group)
    names = sorted(file.removesuffix(".yaml") for file in files if file.endswith(".yaml"))
    hint = did_you_mean(name[:100], names)
    return f"{group}={shown(name)}: no such option.{hint} Options of {group}: {', '.join(names)}."


REFERENCES = {
    r"nvironment variable '([^']*)' not found": "asks for the environment variable {}, which is "
    "not set. Set it, or set {key}=...",
    r"Unsupported interpolation type (\S+)": "there is no ${{{}:...}}. ${{oc.env:NAME}} is an "
    "environment variable, ${{optim.lr}} another key.",
    r"Interpolation key '([^']*)' not found": "${{{}}} names no key of the config. Correct the "
    "name.",
}
"""What OmegaConf says of a ``${...}``, which alone has its name, and the message for it."""


def _interpolation(key: str, error: BaseException, overrides: Sequence[str]) -> str:
    """``${...}`` in a value: what it asks for, and is not there."""
    if key.startswith("hydra.") and not any(word.startswith(f"{key}=") for word in overrides):
        # Hydra's own keys are made of others: task.kind is part of a run directory's name.
        asking = [word for word in overrides if "${" in word]
        key = asking[0].partition("=")[0].lstrip("+~") if len(asking) == 1 else ""
    where = key or "a value"
    for pattern, message in REFERENCES.items():
        if match := re.search(pattern, str(error)):
            return f"{where}: {message.format(match[1], key=key or 'the key')}"
    if "ecursi" in str(error):
        return f"{where}: ${{...}} leads back to the key itself. Write the value."
    return (
        f"{where}: the ${{...}} in it cannot be read. Write ${{optim.lr}} for another key, "
        "${oc.env:NAME} for an environment variable, \\${ for the text itself."
    )


def _unfit(key: str, overrides: Sequence[str]) -> str:
    """A list where a mapping must be, or the like: what the key takes instead."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for word in overrides:
        typed, _, _ = word.partition("=")
        if typed not in GROUPS and f"{key}.".startswith(f"{typed}."):
            value: Any = OverridesParser.create().parse_override(word).value()
            for part in reversed(typed.split(".")):
                value = {part: value}
            try:
                experiment_from_dict(value)
            except ConfigError as error:
                return str(error).splitlines()[0]
    return f"{shown(key)}: the value does not fit here. See python -m llmx help {key}."


def register_defaults() -> None:
    """Give Hydra every key of the schema with its default, and ``${file_name:TEXT}``, before it
    composes. Idempotent."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("file_name", file_name, replace=True)
    ConfigStore.instance().store(name="llmx_defaults", node=_node())


@functools.cache
def _node() -> typing.Any:
    """The defaults as a config; made once, since Hydra copies it."""
    from omegaconf import OmegaConf

    values = to_dict(Experiment())
    # OmegaConf lets a "???" of a group not override a value: with the schema's own default,
    # `data=file` without a path would silently train on the demo.
    values["data"]["path"] = "???"
    node = OmegaConf.create(values)
    for key in free_mappings():
        # `launch.env.NCCL_DEBUG=INFO` is no typo, and needs no `+`.
        OmegaConf.set_struct(OmegaConf.select(node, key), False)
    return node


@functools.cache
def free_mappings() -> list[str]:
    """Dotted keys of the schema's fields that are mappings with keys of the user's choice."""
    return [key for key, hint, _ in schema_fields() if typing.get_origin(hint) is dict]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that a config sets; a mapping with keys of the user's
    choice is one value."""
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict) and key not in free_mappings():
            yield from leaves(value, key)
        else:
            yield key, value


@contextlib.contextmanager
def hydra_for(
    typed: Sequence[str], config_dirs: Sequence[str] = ()
) -> Iterator[tuple[Any, list[str]]]:
    """Hydra with the groups of llmx, and the word that adds those of ``config_dirs``.

    ``typed``: the words of the user, for messages. ConfigError for what Hydra refuses.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register_defaults()
    places = [f"file://{os.path.abspath(os.path.expanduser(d))}" for d in config_dirs]  # noqa: PTH111
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), job_name="llmx", version_base="1.3"):
            words = [f"hydra.searchpath={quoted(places)}"] if places else []
            yield GlobalHydra.instance().hydra, words
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(explain_hydra(error, typed)) from error
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        if isinstance(error, LlmxError) or not _of_hydra(error):
            raise
        raise ConfigError(explain_hydra(error, typed)) from error


def _of_hydra(error: BaseException) -> bool:
    """Whether Hydra, or a library that it reads configs with, raised the error: then a word is
    wrong, and there is no defect here."""
    last, trace = "", error.__traceback__
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        if package in (*_READERS, "llmx", "hydra_plugins"):
            last = package
        trace = trace.tb_next
    return last in _READERS


def composed_values(
    config: str, overrides: Sequence[str], *, typed: Sequence[str], config_dirs: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """The values that Hydra composes from a config of its store or of ``conf/``, and the directory
    that a run gets where ``run_dir`` names none. Nothing is made."""
    from hydra import compose

    with hydra_for(typed, config_dirs) as (_, places):
        composed = compose(config, overrides=[*places, *overrides], return_hydra_config=True)
        return resolved(composed, lambda hydra: hydra.run.dir)


def resolved(
    composed: DictConfig, directory_of: Callable[[DictConfig], str]
) -> tuple[dict[str, Any], str]:
    """The values of a config that was composed with Hydra's own part, and its run directory.

    ``directory_of``: that directory by Hydra's own part, whose ``${hydra:...}`` has values then.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict, read_write
    from omegaconf.errors import OmegaConfBaseException

    outer = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(composed)
        try:
            directory = os.path.abspath(directory_of(composed.hydra))
        except OmegaConfBaseException:
            # An error in a key that the directory is named after is told by that key.
            keys = [str(key) for key in composed if key not in ("hydra", "run_dir")]
            OmegaConf.to_container(OmegaConf.masked_copy(composed, keys), resolve=True)
            raise
        with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
            composed.hydra.runtime.output_dir = directory
        HydraConfig.instance().set_config(composed)
        with read_write(composed), open_dict(composed):
            del composed["hydra"]
        values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    finally:
        HydraConfig.instance().cfg = outer
    return {str(key): value for key, value in values.items()}, directory
