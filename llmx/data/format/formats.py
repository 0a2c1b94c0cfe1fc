"""Dataset formats: how each is recognised, which columns it reads, and the rows that it gives.

A format is an entry of ``FORMATS``. Another one is a file with its reader: ``data.form`` finds it
by an entry point (``llmx.config.plugins``), and ``data.form=auto`` by its keys once it is here:

    register(Format("dialogue", reads=("dialogue",), keys=("dialogue",), readers={Conversation: f}))

Other column names come from ``data.columns``, which maps our name to the one in the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmx.config import plugins
from llmx.data.format.rows import (
    Conversation,
    Labelled,
    Message,
    Preference,
    Prompted,
    TextPair,
    UnpairedPreference,
)
from llmx.data.format.turns import labelled_history, pairs, turns
from llmx.data.source.records import Document, Record, Row, excerpt, names, wrong_record
from llmx.errors import DataError


@dataclass(frozen=True)
class Reading:
    """The options of ``data`` that readers of records use."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name of a column -> the one in the data."""
    text_key: str = "text"
    system: str | None = None
    """A system message for records that have none."""
    label_names: Mapping[str, str] = field(default_factory=dict)
    turn_weights: bool = False
    """Whether the "weight" of an assistant's turn of a chat is read."""

    def column(self, name: str) -> str:
        """Our column, as it is called in the data."""
        return self.columns.get(name, name)

    def has(self, record: Record, keys: Iterable[str]) -> bool:
        """Whether a record has all of our columns."""
        return all(
            (self.text_key if key == "text" else self.column(key)) in record.value
            or (key == "response" and self.is_completed(record))
            for key in keys
        )

    def is_completed(self, record: Record) -> bool:
        """Whether the answer is called as TRL calls it: ``completion``."""
        value = record.value
        return "response" not in self.columns and "response" not in value and "completion" in value


Reader = Callable[[Record, Reading], Row | None]
"""Raises RecordError for a record that is wrong; None for one that has nothing to learn."""


@dataclass(frozen=True)
class Format:
    """A dataset format: how it is recognised, and how its records are read."""

    name: str
    """The value of ``data.form``."""
    reads: tuple[str, ...]
    """Our names of the columns that it reads."""
    readers: Mapping[type, Reader]
    """Type of row -> its reader, the most specific type first."""
    keys: tuple[str, ...] = ()
    """The columns by which it is recognised where no other format has all of its own."""
    recognises: Callable[[Record, Reading, tuple[type, ...]], bool] | None = None
    """Whether a record surely is of it, whatever other formats fit, for a task with these
    ``takes``."""
    groups: tuple[str, ...] = ()
    """Groups of the rules of ``columns`` that hold for it: ``chat``, ``learned``, ``answered``."""
    used: Callable[[frozenset[str], frozenset[str], Reading], frozenset[str]] | None = None
    """(columns that it reads, columns of a record) -> those that it reads of this record, as they
    are called in the data; None: all of them."""


FORMATS: dict[str, Format] = {}
"""Name -> format, in the order in which they are tried."""


def register(dataset_format: Format) -> None:
    """Add a format, or replace the one of its name."""
    FORMATS[dataset_format.name] = dataset_format


def format_of(name: str) -> Format:
    """A format by its name, also one of an installed package."""
    if name not in FORMATS:
        register(plugins.FORMATS.load(name))
    return FORMATS[name]


def detect_form(record: Record, reading: Reading, *, takes: tuple[type, ...] = ()) -> str:
    """The name of a record's format, by its keys; raises DataError when none or several fit."""
    for dataset_format in FORMATS.values():
        if dataset_format.recognises and dataset_format.recognises(record, reading, takes):
            return dataset_format.name
    keyed = {name: candidate.keys for name, candidate in FORMATS.items() if candidate.keys}
    matches = [name for name, columns in keyed.items() if reading.has(record, columns)]
    if len(matches) == 1:
        return matches[0]
    keys = names(record.value)
    if matches:
        raise DataError(
            f"{record.where}: the columns ({keys}) fit the formats {' and '.join(matches)}. "
            f"Choose one, e.g. data.form={matches[0]}."
        )
    if reading.text_key == "text" and reading.column("content") in record.value:
        return "text"
    if TextPair in takes:
        raise DataError(
            f"{record.where}: the columns ({keys or 'none'}) hold no pair of texts: none of "
            f"{'; '.join(' and '.join(pair) for pair in PAIRS)}; instruction and output; "
            "prompt and response. Map yours, e.g. data.data_map.query=title "
            "data.data_map.positive=text."
        )
    known_formats = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in keyed.items())
    raise DataError(
        f"{record.where}: the columns ({keys or 'none'}) fit no known format ({known_formats}). "
        "Map your names, e.g. data.form=alpaca data.columns.instruction=question "
        "data.columns.output=answer, or for text data.form=text data.text_key=body."
    )


# What several formats read


def text_of(record: Record, key: str) -> str:
    if key not in record.value:
        raise wrong_record(
            record,
            "a missing column",
            f'no column "{excerpt(key)}"; the row has {names(record.value) or "none"}. '
            "Map your names with data.columns, or set data.text_key.",
        )
    value = record.value[key]
    if not isinstance(value, str):
        reason = "a value of a wrong type"
        raise wrong_record(record, reason, f'"{excerpt(key)}" is {excerpt(value)}, not text.')
    return value


def check_characters(record: Record, text: str) -> None:
    """Raise RecordError for half of a surrogate pair, which JSON can write and no encoder takes."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise wrong_record(
            record,
            "half of a surrogate pair",
            f"character {at + 1} of a text is half of a surrogate pair "
            f"(\\u{ord(text[at]):04x}), which is no text. Repair the row, or leave it out with "
            "data.on_bad_row=skip:",
            text[max(0, at - 20) : at + 20],
        ) from error


def to_record(record: Record, reading: Reading) -> Record:
    """The record as it is, for tasks that read its columns themselves."""
    for value in record.value.values():
        if isinstance(value, str):
            check_characters(record, value)
    return record


def conversation_of(
    record: Record, messages: list[Message], reading: Reading, *, prompted: bool = False
) -> Conversation | None:
    """Messages with the record's system message (or the default one) and tools, up to the last
    answer; None where there is none. Turns after it are counted. ``prompted``: an empty answer
    follows the last turn where it is none."""
    key = reading.column("system")
    system = record.value.get(key)
    if system is not None and not isinstance(system, str):
        reason = "a value of a wrong type"
        raise wrong_record(record, reason, f'"{excerpt(key)}" is {excerpt(system)}, not text.')
    row_system = system if system and system.strip() else ""
    if messages and messages[0].role == "system":
        if row_system and row_system.strip() != messages[0].content.strip():
            raise wrong_record(
                record,
                "two system messages",
                f'"{excerpt(key)}" and the first turn are two different system messages; keep one:',
                system,
            )
    elif messages and (text := row_system or reading.system):
        messages = [Message("system", text), *messages]
    if prompted and messages and messages[-1].role in ("user", "tool"):
        messages = [*messages, Message("assistant", "")]
    num_turns = len(messages)
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    answers = [message.content for message in messages if message.role == "assistant"]
    if not any(prompted or answer.strip() for answer in answers):
        return None
    for message in messages:
        check_characters(record, message.thought + message.content)
    tools = _tools(record, reading.column("tools"))
    return Conversation(tuple(messages), record.where, tools, unanswered=num_turns - len(messages))


def _tools(record: Record, key: str) -> str:
    """The definitions of tools as the JSON text of a list, as it stands where it is text; empty
    where there are none."""
    value = record.value.get(key)
    text = value if isinstance(value, str) else ""
    if text.strip():
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            problem = f"tools are not JSON ({error})."
            raise wrong_record(record, "wrong tools", problem, text) from error
    if not value:
        return ""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        problem = "tools must be a list of objects, each the definition of a tool:"
        raise wrong_record(record, "wrong tools", problem, value)
    text = text or json.dumps(value, ensure_ascii=False)
    check_characters(record, text)
    return text


def _history(record: Record, reading: Reading) -> list[Message]:
    key = reading.column("history")
    return pairs(record.value.get(key), key, record.where)


def _prompt_and_answer(record: Record, reading: Reading) -> list[Message]:
    """The turns of ``prompt_response``, whose prompt may be text or turns (TRL's conversational
    layout)."""
    prompt_key, key = reading.column("prompt"), reading.column("response")
    if reading.is_completed(record):
        key = "completion"
    prompt = record.value.get(prompt_key)
    if isinstance(prompt, list) and any(isinstance(turn, dict) for turn in prompt):
        before = turns(prompt, prompt_key, record.where, before=_history(record, reading))
        if isinstance(record.value.get(key), list):
            return turns(record.value[key], key, record.where, before=before)
        return [*before, Message("assistant", text_of(record, key))]
    prompt, answer = text_of(record, prompt_key), text_of(record, key)
    return [*_history(record, reading), Message("user", prompt), Message("assistant", answer)]


REFERENCES = ("response", "completion", "answer", "solution", "ground_truth", "reward_model")
"""Columns with the reference of a prompt: the first that a record has."""


def _prompt_and_reference(record: Record, reading: Reading) -> list[Message]:
    """The turns of ``prompt_response`` with a reference that may be a number, any JSON, or missing;
    ``reward_model`` holds it as ``ground_truth`` (verl's layout)."""
    key = reading.column("response")
    names_of_it = [key] if "response" in reading.columns else REFERENCES
    value = next((record.value[name] for name in names_of_it if name in record.value), "")
    if isinstance(value, dict) and "ground_truth" in value:
        value = value["ground_truth"]
    are_turns = isinstance(value, list) and value and all(isinstance(v, dict) for v in value)
    if not isinstance(value, str) and not (are_turns and {"role", "from"} & value[0].keys()):
        value = "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return _prompt_and_answer(replace(record, value={**record.value, key: value}), reading)


def _is_prompt(record: Record, reading: Reading, takes: tuple[type, ...]) -> bool:
    """Whether a record is a prompt, with a reference or without, for a task that takes it."""
    other_formats = ("conversations", "messages", "text")
    return (
        Prompted in takes
        and reading.has(record, ("prompt",))
        and not any(reading.has(record, (key,)) for key in other_formats)
    )


def _instruction_and_output(record: Record, reading: Reading) -> list[Message]:
    """The turns of a record in the format ``alpaca``."""
    prompt = text_of(record, reading.column("instruction"))
    answer = text_of(record, reading.column("output"))
    if record.value.get(reading.column("input")) not in (None, ""):
        prompt = f"{prompt}\n{text_of(record, reading.column('input'))}"
    return [*_history(record, reading), Message("user", prompt), Message("assistant", answer)]


def _chat(column: str) -> Callable[[Record, Reading], list[Message]]:
    """The turns that stand in one column."""

    def turns_of(record: Record, reading: Reading) -> list[Message]:
        key = reading.column(column)
        return turns(record.value.get(key), key, record.where, weighted=reading.turn_weights)

    return turns_of


Turns = Callable[[Record, Reading], list[Message]]


def _conversations(read: Turns, *, prompts: Turns | None = None) -> dict[type, Reader]:
    """Readers of a format that gives turns: of conversations, of prompts (``prompts``: their turns,
    where they differ), and of conversations with a verdict."""

    def to_prompted(record: Record, reading: Reading) -> Conversation | None:
        messages = (prompts or read)(record, reading)
        return conversation_of(record, messages, reading, prompted=True)

    def to_conversation(record: Record, reading: Reading) -> Conversation | None:
        return conversation_of(record, read(record, reading), reading)

    def to_unpaired(record: Record, reading: Reading) -> UnpairedPreference | None:
        return unpaired_of(record, to_conversation(record, reading), reading)

    return {
        UnpairedPreference: to_unpaired,
        Prompted: to_prompted,
        Conversation: to_conversation,
    }


VERDICTS = ("label", "kto_tag", "desirable", "is_desirable")
"""Columns that say whether an answer is good: the first that a record has."""


def verdict_columns(reading: Reading) -> tuple[str, ...]:
    """The column that is mapped to ``desirable``, else those that may be one."""
    mapped = reading.columns.get("desirable")
    return (mapped,) if mapped else VERDICTS


def unpaired_of(
    record: Record, conversation: Conversation | None, reading: Reading
) -> UnpairedPreference | None:
    """A conversation with the verdict on its last answer: ``true`` or ``false``."""
    candidates = verdict_columns(reading)
    key = next((name for name in candidates if name in record.value), None)
    if key is None:
        raise wrong_record(
            record,
            "no verdict",
            f"no column says whether the answer is good ({', '.join(candidates)}: true or false); "
            f"the row has {names(record.value) or 'none'}. Map yours with data.columns.desirable.",
        )
    value = record.value[key]
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if value not in (True, False):
        raise wrong_record(
            record, "no verdict", f'"{excerpt(key)}" is {excerpt(value)}, not true or false.'
        )
    return None if conversation is None else UnpairedPreference(conversation, bool(value))


# Text


def to_document(record: Record, reading: Reading) -> Document:
    """The text under ``text_key``; where there is none, ``title`` and ``content``."""
    content = reading.column("content")
    if reading.text_key == "text" and "text" not in record.value and content in record.value:
        key = reading.column("title")
        title = text_of(record, key) if record.value.get(key) is not None else ""
        text = text_of(record, content)
        if title.strip():
            text = f"{title}\n\n{text}"
    else:
        text = text_of(record, reading.text_key)
    check_characters(record, text)
    return Document(text, record.where)


def _used_of_text(
    columns: frozenset[str], layout: frozenset[str], reading: Reading
) -> frozenset[str]:
    # Title and content stand in the place of a text that is not there.
    alone = reading.text_key in layout or reading.text_key != "text"
    return frozenset({reading.text_key}) | (frozenset() if alone else columns)


# Labels


def to_labelled(record: Record, reading: Reading, *, any_label: bool = True) -> Labelled:
    """The text and the label of a record, with the label's name where it has one.

    ``any_label``: also a fraction, a truth value, or a list; else only what can be an answer.
    """
    key, label_names = reading.column("label"), reading.label_names
    label = record.value.get(key)
    plain = isinstance(label, str | int) and not isinstance(label, bool)
    if not plain and (label is None or not any_label):
        raise wrong_record(
            record,
            "a missing label",
            f'"{excerpt(key)}" is {excerpt(label)}; a label is text or a whole number. Map it with '
            "data.data_map.label=COLUMN.",
        )
    if label_names and plain and str(label) not in label_names:
        raise wrong_record(
            record,
            "a label without a name",
            f"the label {excerpt(label)} has no name; data.label_names names "
            f"{', '.join(label_names)}.",
        )
    history_key, prompt_key = reading.column("history"), reading.column("prompt")
    context, history = labelled_history(record.value.get(history_key), history_key, record.where)
    if prompt_key not in record.value:
        raise wrong_record(
            record,
            "a missing column",
            f'no column "{excerpt(prompt_key)}"; the row has {names(record.value) or "none"}. Map '
            "the text with data.data_map.prompt=COLUMN.",
        )
    prompt = text_of(record, prompt_key)
    text = f"{context}\n{prompt}" if context else prompt
    check_characters(record, text)
    name = label_names.get(str(label), str(label))
    return Labelled(text, label, name, record.where, tuple(history))


def _label_as_answer(record: Record, reading: Reading) -> Conversation | None:
    row = to_labelled(record, reading, any_label=False)
    messages = [*row.history, Message("user", row.text), Message("assistant", row.name)]
    conversation = conversation_of(record, messages, reading)
    return conversation and replace(conversation, keeps_completion=True)


# Pairs of texts that belong together

PAIRS = (
    ("query", "positive"),
    ("anchor", "positive"),
    ("question", "answer"),
    ("sentence1", "sentence2"),
    ("query", "passage"),
)
"""Columns of a text and the one that belongs to it, in the order in which they are tried."""
NEGATIVE = re.compile(r"negatives?(_\d+)?")
"""Columns of texts that do not belong to the first of a pair."""


def pair_keys(record: Record, reading: Reading) -> tuple[str, str] | None:
    """The columns of a pair: those that are mapped (``query``, ``positive``), else a published
    layout; None where the record has neither."""
    if {"query", "positive"} <= reading.columns.keys():
        return reading.columns["query"], reading.columns["positive"]
    layouts = [(reading.column(first), reading.column(second)) for first, second in PAIRS]
    return next((keys for keys in layouts if all(key in record.value for key in keys)), None)


def _two_columns(record: Record, reading: Reading) -> TextPair:
    """A pair of two columns."""
    keys = pair_keys(record, reading)
    if keys is None:  # the layout of which it has one column
        layouts = [(reading.column(first), reading.column(second)) for first, second in PAIRS]
        keys = next((keys for keys in layouts if {*keys} & record.value.keys()), layouts[0])
    sides = []
    for key in keys:
        if record.value.get(key) is None:
            listed = names(record.value) or "none"
            problem = "is null" if key in record.value else (
                f"is no column of the row, which has {listed}"
            )  # fmt: skip
            raise wrong_record(
                record,
                "a pair without one of its texts",
                f'"{excerpt(key)}" {problem}: a pair needs both texts. Map yours, e.g. '
                "data.data_map.query=title data.data_map.positive=text.",
            )
        sides.append((f'"{excerpt(key)}"', text_of(record, key)))
    return pair_of(record, sides, reading)


def _pair_of_turns(read: Callable[[Record, Reading], list[Message]]) -> Reader:
    """A pair of a prompt (with its earlier turns) and the answer."""

    def to_pair(record: Record, reading: Reading) -> TextPair:
        *before, answer = read(record, reading)
        query = "\n".join(message.content for message in before)
        return pair_of(record, [("the prompt", query), ("the answer", answer.content)], reading)

    return to_pair


def pair_of(record: Record, sides: list[tuple[str, str]], reading: Reading) -> TextPair:
    """Two texts, each with its name for messages, and those that do not belong to them:
    ``negatives`` (a list), ``negative``, ``negative_1`` ... as far as they are there.

    Raises RecordError where one of the texts is empty, where the two are the same, or where a
    negative is one of them.
    """
    for name, text in sides:
        if not text.strip():
            raise wrong_record(
                record, "an empty text", f"{name} is empty: a pair needs both of its texts."
            )
        check_characters(record, text)
    query, positive = (text for _, text in sides)
    if query.strip() == positive.strip():
        raise wrong_record(record, "a pair of equal texts", "both texts are the same:", query)
    negatives = tuple(_negatives(record, reading.columns))
    for text in negatives:
        if text.strip() in (query.strip(), positive.strip()):
            side = "positive" if text.strip() == positive.strip() else "query"
            raise wrong_record(
                record,
                "a negative that is in the pair",
                f"a negative is the {side} itself:",
                text,
            )
    return TextPair(query, positive, negatives, record.where)


def _negatives(record: Record, columns: Mapping[str, str]) -> Iterator[str]:
    """The texts of all columns of negatives, in the order of the row; a null has none."""
    mapped = {columns[name] for name in ("negative", "negatives") if name in columns}
    for key, value in record.value.items():
        if not (key in mapped if mapped else NEGATIVE.fullmatch(str(key))) or value is None:
            continue
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or not text.strip():
                raise wrong_record(
                    record,
                    "a negative that is no text",
                    f'"{excerpt(key)}" holds {excerpt(text)}: a negative is a text, and '
                    "one that is not there is null or left out of the list.",
                )
            check_characters(record, text)
            yield text


# Preferences

RANKED = {
    "output": ("instruction",),
    "response": ("prompt",),
    "responses": ("prompt", "instruction", "conversations", "messages"),
    "answers": ("prompt", "instruction", "conversations", "messages"),
}
"""Columns that may hold a list of answers, the best one first, and what stands beside them."""


def ranked_key(record: Record, reading: Reading) -> str | None:
    """The column of a record with a ranked list of answers; None where there is none."""
    for name, prompts in RANKED.items():
        key = reading.column(name)
        value = record.value.get(key)
        beside = any(reading.column(prompt) in record.value for prompt in prompts)
        if not (beside and isinstance(value, list) and value):
            continue
        if all(isinstance(answer, str) for answer in value):
            return key
    return None


def to_preference(record: Record, reading: Reading) -> Preference:
    """The pair in a record. The published layouts: ``chosen`` and ``rejected`` as whole
    conversations (messages, or text with ``Human:`` and ``Assistant:``) or as the answers to a
    ``prompt``, ``conversations`` or ``messages``; and a list of answers, the best one first, of
    which the first and the last are the pair.

    Raises RecordError where an answer is missing or empty, where the two do not have the same turns
    before the answer, or where they are the same.
    """
    before = _before_the_answers(record, reading)
    conversations: list[Conversation] = []
    for name, key, value in _two_answers(record, reading):
        if value is None or (isinstance(value, str | list | dict) and not value):
            problem = f'"{key}" is {excerpt(value)}' if key in record.value else f'no "{key}"'
            raise wrong_record(
                record, f"no {name} answer", f"{problem}: a pair needs both answers."
            )
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, str) and not before and (spoken := transcript(value)):
            messages = turns(spoken, key, record.where)
        elif isinstance(value, str):
            messages = [*before, Message("assistant", value)]
        else:
            # A list of one turn is the answer alone, not a conversation that ends with it.
            is_answer = isinstance(value, list) and len(value) == 1
            messages = turns(value, key, record.where, before=before if is_answer else [])
        conversation = conversation_of(record, messages, reading)
        last = messages[-1]
        if conversation is None or conversation.messages[-1] != last or not last.content.strip():
            raise wrong_record(record, "no answer", f'"{key}" does not end with an answer.', value)
        conversations.append(conversation)
    chosen, rejected = conversations
    if len(chosen.messages) < 2 or chosen.messages[:-1] != rejected.messages[:-1]:
        raise wrong_record(
            record,
            "chosen and rejected answer different things",
            f'"{reading.column("chosen")}" and "{reading.column("rejected")}" must have the same '
            "turns before their last answer, and at least one.",
            record.value.get(reading.column("rejected")),
        )
    if chosen == rejected:
        raise wrong_record(record, "chosen is rejected", "both answers are the same.", chosen.tools)
    return Preference(chosen, rejected, record.value.get(reading.column("margin")))


def _two_answers(record: Record, reading: Reading) -> list[tuple[str, str, Any]]:
    """(``chosen`` or ``rejected``, column, value) of both answers."""
    ranked = ranked_key(record, reading)
    if ranked and not reading.has(record, ("chosen", "rejected")):
        answers = record.value[ranked]
        if len(answers) < 2:
            problem = f'"{ranked}" has one answer, and a pair needs two.'
            raise wrong_record(record, "no rejected answer", problem, answers)
        return [("chosen", ranked, answers[0]), ("rejected", ranked, answers[-1])]
    keys = [(name, reading.column(name)) for name in ("chosen", "rejected")]
    return [(name, key, record.value.get(key)) for name, key in keys]


_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]?")
"""Marks a turn in the transcripts of Anthropic's helpful-harmless data."""


def transcript(text: str) -> list[dict[str, str]]:
    """The turns of a text that begins with ``Human:``; empty for another. Several turns of one
    speaker are one."""
    parts = _SPEAKER.split(text)
    if len(parts) < 3 or parts[0].strip() or parts[1] != "Human":
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    spoken: list[dict[str, str]] = []
    for speaker, content in zip(parts[1::2], parts[2::2], strict=True):
        if spoken and spoken[-1]["role"] == roles[speaker]:
            spoken[-1]["content"] += f"\n\n{content.strip()}"
        else:
            spoken.append({"role": roles[speaker], "content": content.strip()})
    return spoken


def _before_the_answers(record: Record, reading: Reading) -> list[Message]:
    """The turns that both answers of a pair follow; empty where the answers have them."""
    for name in ("conversations", "messages"):
        key = reading.column(name)
        if key in record.value:
            return turns(record.value[key], key, record.where)
    prompt_key, input_key = reading.column("prompt"), reading.column("input")
    prompt = record.value.get(prompt_key, record.value.get(reading.column("instruction")))
    if isinstance(prompt, list):
        return turns(prompt, prompt_key, record.where)
    if not isinstance(prompt, str):
        return []
    if spoken := transcript(prompt):
        if spoken[-1] == {"role": "assistant", "content": ""}:  # the cue to answer
            spoken.pop()
        return turns(spoken, prompt_key, record.where)
    extra = record.value.get(input_key)
    if extra is not None and not isinstance(extra, str):
        reason = "a value of a wrong type"
        raise wrong_record(record, reason, f'"{excerpt(input_key)}" is {excerpt(extra)}, not text.')
    text = f"{prompt}\n{extra}" if extra else prompt
    return [*_history(record, reading), Message("user", text)]


def _used_of_preference(
    columns: frozenset[str], layout: frozenset[str], reading: Reading
) -> frozenset[str]:
    def mapped(*column_names: str) -> set[str]:
        return {reading.column(name) for name in column_names}

    if mapped("conversations", "messages") & layout:  # its turns stand in their place
        columns -= mapped("prompt", "instruction", "input", "history")
    if mapped("chosen", "rejected") <= layout:
        columns -= mapped(*RANKED)
    return columns


def _used_of_prompt_response(
    columns: frozenset[str], layout: frozenset[str], reading: Reading
) -> frozenset[str]:
    if "response" in reading.columns:
        return columns
    return columns | set([name for name in REFERENCES if name in layout][:1])


# The formats

_BESIDE = ("system", "tools")
LEARNED = ("learned", "answered")

for built_in in (
    Format(
        "pair",
        (
            "query", "positive", "anchor", "question", "answer", "sentence1", "sentence2",
            "passage", "negative", "negatives",
        ),
        {TextPair: _two_columns},
        recognises=lambda record, reading, takes: (
            TextPair in takes and pair_keys(record, reading) is not None
        ),
        used=lambda columns, layout, reading: columns | set(filter(NEGATIVE.fullmatch, layout)),
    ),
    Format(
        "labelled",
        ("prompt", "label", "history", *_BESIDE),
        {Labelled: to_labelled, Conversation: _label_as_answer},
        recognises=lambda record, reading, takes: (
            "label" in reading.columns and reading.has(record, ("prompt", "label"))
        ),
        groups=("answered",),
    ),
    Format(
        "preference",
        (
            "chosen", "rejected", "conversations", "messages", "prompt", "instruction", "input",
            "history", *_BESIDE, "margin", *RANKED,
        ),
        {
            Preference: to_preference,
            Conversation: lambda record, reading: to_preference(record, reading).chosen,
        },
        keys=("chosen", "rejected"),
        # A pair has its prompt beside it, which is a format of its own.
        recognises=lambda record, reading, takes: (
            reading.has(record, ("chosen", "rejected"))
            or (Preference in takes and ranked_key(record, reading) is not None)
        ),
        groups=("answered",),
        used=_used_of_preference,
    ),
    Format(
        "sharegpt",
        ("conversations", *_BESIDE),
        _conversations(_chat("conversations")),
        keys=("conversations",),
        groups=("chat", *LEARNED),
    ),
    Format(
        "messages",
        ("messages", *_BESIDE),
        _conversations(_chat("messages")),
        keys=("messages",),
        groups=("chat", *LEARNED),
    ),
    Format(
        "alpaca",
        ("instruction", "input", "output", "history", *_BESIDE),
        {
            TextPair: _pair_of_turns(_instruction_and_output),
            **_conversations(_instruction_and_output),
        },
        keys=("instruction", "output"),
        groups=LEARNED,
    ),
    Format(
        "prompt_response",  # or TRL's prompt and completion
        ("prompt", "response", "history", *_BESIDE),
        {
            TextPair: _pair_of_turns(_prompt_and_answer),
            **_conversations(_prompt_and_answer, prompts=_prompt_and_reference),
        },
        keys=("prompt", "response"),
        recognises=_is_prompt,
        groups=LEARNED,
        used=_used_of_prompt_response,
    ),
    Format(
        "text",
        ("title", "content"),
        {Document: to_document},
        keys=("text",),
        used=_used_of_text,
    ),
    Format("record", (), {}),
):  # fmt: skip
    register(built_in)
