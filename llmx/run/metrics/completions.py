"""Metrics of completions: how near a text is to the expected one.

    METRICS["rougeL"]("the cat sat", "the cat sat down")     # 0.857

Each is a function of one completion and its reference; a metric of the user's is one of all of them
(``load_metric``). Tried by ``python -m pytest tests/unit/test_eval_command.py``.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llmx.errors import ConfigError
from llmx.run.metrics.declared import Metric, is_number

_WORD = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"  # kana and Han: each by itself
    r"|[^\W_]+"
)


def words(text: str) -> list[str]:
    """Words in lower case; of Chinese and Japanese, which write no spaces, the characters."""
    tokens: list[str] = []
    for part in re.split("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])", text.lower()):
        tokens += _WORD.findall(part)
    return tokens


def exact_match(completion: str, reference: str) -> float:
    """1 where the stripped texts are equal."""
    return float(completion.strip() == reference.strip())


def rouge_n(completion: str, reference: str, *, n: int) -> float:
    """F1 of the n-grams that both have (Lin 2004, "ROUGE")."""
    completed, expected = (_ngrams(words(text), n) for text in (completion, reference))
    shared = sum((completed & expected).values())
    return _f1(shared, sum(completed.values()), sum(expected.values()))


def rouge_l(completion: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, "ROUGE")."""
    completed, expected = words(completion), words(reference)
    row = [0] * (len(expected) + 1)
    for word in completed:
        before = 0  # of the row above, one to the left
        for at, expected_word in enumerate(expected, start=1):
            above = row[at]
            row[at] = before + 1 if word == expected_word else max(above, row[at - 1])
            before = above
    return _f1(row[-1], len(completed), len(expected))


def _ngrams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1))


def _f1(shared: int, num_completed: int, num_expected: int) -> float:
    return 2 * shared / (num_completed + num_expected) if shared else 0.0


METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "rouge1": lambda completion, reference: rouge_n(completion, reference, n=1),
    "rouge2": lambda completion, reference: rouge_n(completion, reference, n=2),
    "rougeL": rouge_l,
}
"""Metrics by name; 1 is the best of each."""
DEFAULT_METRICS = ("exact_match",)
"""Metrics of an evaluation while training."""
DECLARED = {
    "exact_match": Metric("exact match", "percent", higher_is_better=True),
    "rouge1": Metric("ROUGE-1", "percent", higher_is_better=True),
    "rouge2": Metric("ROUGE-2", "percent", higher_is_better=True),
    "rougeL": Metric("ROUGE-L", "percent", higher_is_better=True),
}


def declare(names: Iterable[str]) -> dict[str, Metric]:
    """As a task declares them. One of the user's is called as its function; which direction of it
    is better is not known."""
    short = {name: name.rpartition(":")[2].rpartition(".")[2] for name in names}
    return {
        short_name: DECLARED.get(name) or Metric(short_name.replace("_", " "))
        for name, short_name in short.items()
    }


Scores = Callable[[Sequence[str], Sequence[str]], Mapping[str, float]]


def load_function(path: str, known: Iterable[str]) -> Callable[..., Any]:
    """A function of the user's: ``package.module:function``. Found as Python finds it, and in the
    directory where the command is typed.

    Args:
        known: the names that may be given in its place, for the message.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(
            f"{path}: is neither one of {', '.join(known)} nor package.module:function."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):  # a method of a class, too
            function = getattr(function, part)
    except Exception as error:  # whatever that file does when it is imported
        raise ConfigError(f"{path} cannot be imported: {failure(error)}") from error
    if not callable(function):
        raise ConfigError(f"{path} is a {type(function).__name__}, not a function.")
    return function  # type: ignore[no-any-return]


def load_metric(path: str) -> Scores:
    """A metric of the user's: ``package.module:function``.

    ``function(completions, references)`` gets two lists of texts and gives a number, or numbers by
    name.

    Raises:
        ConfigError: it cannot be imported, or gives something else.
    """
    function, name = load_function(path, METRICS), path.partition(":")[2]

    def scores(completions: Sequence[str], references: Sequence[str]) -> Mapping[str, float]:
        try:
            returned = function(list(completions), list(references))
        except Exception as error:  # whatever it does: its own file and line say more than ours
            raise ConfigError(
                f"{path} failed on {len(completions)} completions: {failure(error)}"
            ) from error
        values = returned if isinstance(returned, Mapping) else {name.rpartition(".")[2]: returned}
        for key, value in values.items():
            if not is_number(value):
                raise ConfigError(
                    f"{path} gave {value!r} for {key}; it gives a number, or numbers by name."
                )
        return {str(key): float(value) for key, value in values.items()}

    return scores


def failure(error: BaseException) -> str:
    """Describe an error in a user's code, with the line of it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    if isinstance(error, SyntaxError):  # says its own place
        place = ""
    return f"{type(error).__name__}: {error}{place}."


def score(
    names: Sequence[str], completions: Sequence[str], references: Sequence[str]
) -> dict[str, float]:
    """The mean of each metric over all completions, and what the user's own give. NaN without
    completions."""
    means: dict[str, float] = {}
    for name in names:
        if name in METRICS:
            values = [METRICS[name](*pair) for pair in zip(completions, references, strict=True)]
            means[name] = math.fsum(values) / len(values) if values else math.nan
        else:
            means.update(load_metric(name)(completions, references))
    return means
