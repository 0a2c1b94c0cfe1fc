"""What a task gives for its columns, and its ready tokens, as arrays of the declared types.

Apart from ``examples``, which the control process imports: it reads rows and makes no arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmx.data.examples import TOKEN_WEIGHT, Column, Schema, Tokens, listed
from llmx.data.source.records import excerpt
from llmx.errors import ConfigError


def values_of_tokens(
    part: Tokens, schema: Schema, *, task: str, vocab_size: int, by: str = "encode()"
) -> tuple[np.ndarray, np.ndarray, dict[Column, np.ndarray]]:
    """(ids uint32, targets, columns by token) of a sequence that a task gave as tokens. Targets
    are bool; where the schema has weights, float32.

    Raises:
        ConfigError: no ids of this vocabulary, or not the values of the declared columns.
    """
    ids = np.asarray(part.ids)
    right = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) > 0
    if not right or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"task={task}: Tokens are at least one id, each from 0 to {vocab_size - 1} (the last "
            f"of the vocabulary); {by} gave {excerpt(str(part.ids))}."
        )
    count = len(ids)
    declared = "columns" if by == "encode()" else "rollout_columns"
    weight = np.ones(count) if part.weight is None else part.weight
    targets = values_of(weight, TOKEN_WEIGHT, count=count, task=task)
    if not schema.weighted:
        if not np.isin(targets, (0, 1)).all():
            raise ConfigError(
                f"task={task}: Tokens have weights that are neither 0 nor 1. Declare the "
                f'column: {declared} = (Column("weight", per="token"),).'
            )
        targets = targets != 0
    token_columns = schema.per("token")
    if set(part.columns) != {column.name for column in token_columns}:
        raise ConfigError(
            f"task={task}: Tokens have the columns {listed(part.columns)}, and the task "
            f"declares {listed(column.name for column in token_columns)} by token in `{declared}`."
        )
    columns = {
        column: values_of(part.columns[column.name], column, count=count, task=task)
        for column in token_columns
    }
    return ids.astype(np.uint32), targets, columns


def values_of(values: Any, column: Column, *, count: int, task: str) -> np.ndarray:
    """``count`` values of a column as an array of its type; raises ConfigError for others."""
    shape = (count, *column.shape)
    if not count:
        return np.zeros(shape, column.numpy_dtype)
    problem = ""
    try:
        array = np.asarray(values)
        cast = array.astype(column.numpy_dtype)
    except (TypeError, ValueError, OverflowError) as error:
        problem = str(error)
    else:
        if array.shape != shape:
            problem = f"{count} values have together the shape {array.shape}, not {shape}"
        elif cast.dtype.kind == "f" and not np.isfinite(cast).all():
            problem = "a value is not finite"
        elif cast.dtype.kind != "f" and not np.array_equal(cast, array):
            problem = f"{column.dtype} does not hold every value"
        else:
            return cast
    raise ConfigError(
        f"task={task}: the column {column.name} (by {column.per}, {column.dtype}) got "
        f"{excerpt(str(values))}: {problem}."
    )
