"""What a record means: a conversation, a document, a label, a preference pair, a pair of texts.

Alpaca (``instruction``, ``input``, ``output``, ``history``), ShareGPT (``conversations``), OpenAI
``messages``, ``prompt``/``response``, records with a ``label``, preference pairs (``chosen``,
``rejected``) and plain ``text`` (or ``title`` and ``content``); other column names by
``data.columns``, which maps our name to the one in the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmx.data.format.columns import NEGATIVE, PAIRS
from llmx.data.format.turns import Message, labelled_history, pairs, turns
from llmx.data.source.records import Record, Where, excerpt, names, wrong_record
from llmx.errors import DataError

__all__ = [
    "Conversation",
    "Document",
    "Labelled",
    "Message",
    "Preference",
    "TextPair",
    "UnpairedPreference",
    "conversation_of",
    "detect_form",
    "to_conversation",
    "to_document",
    "to_pair",
    "to_preference",
    "to_unpaired",
]

KEYS = {
    "preference": ("chosen", "rejected"),
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "prompt_response": ("prompt", "response"),  # or TRL's prompt and completion
    "text": ("text",),
}
"""The keys by which a form is recognised, in the order in which they are tried."""


@dataclass(frozen=True)
class Conversation:
    """Turns that end with an assistant's. ``tools`` is the JSON text of a list of tool
    definitions, empty where there are none.

    ``keeps_completion``: where the record is too long its prompt is cut, never the answer (a
    label).
    ``unanswered``: turns after the last answer, which were left out.
    """

    messages: tuple[Message, ...]
    where: Where
    tools: str = ""
    keeps_completion: bool = False
    unanswered: int = 0


@dataclass(frozen=True)
class Document:
    """Text to pretrain on."""

    text: str
    where: Where


@dataclass(frozen=True)
class Labelled:
    """A text and its label, for tasks that learn the label itself."""

    text: str
    label: Any
    """As it is in the data: a name, a number, a list of names."""
    name: str
    """What ``data.label_names`` calls it; of a label that is no text or whole number, its text."""
    where: Where
    history: tuple[Message, ...] = ()
    """Earlier turns, where the data has them."""


@dataclass(frozen=True)
class UnpairedPreference:
    """A conversation whose last answer is good or bad."""

    conversation: Conversation
    desirable: bool

    @property
    def where(self) -> Where:
        return self.conversation.where


VERDICTS = ("label", "kto_tag", "desirable", "is_desirable")
"""Columns that say whether an answer is good: the first that a record has."""


def to_unpaired(
    record: Record, conversation: Conversation | None, *, columns: dict[str, str]
) -> UnpairedPreference | None:
    """A conversation with the verdict on its last answer: ``true`` or ``false``."""
    own = columns.get("desirable")
    names_ = (own,) if own else VERDICTS
    key = next((name for name in names_ if name in record.value), None)
    if key is None:
        raise wrong_record(
            record,
            "no verdict",
            f"no column says whether the answer is good ({', '.join(names_)}: true or false); the "
            f"row has {names(record.value) or 'none'}. Map yours with data.columns.desirable.",
        )
    value = record.value[key]
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if value not in (True, False):
        raise wrong_record(
            record, "no verdict", f'"{excerpt(key)}" is {excerpt(value)}, not true or false.'
        )
    return None if conversation is None else UnpairedPreference(conversation, bool(value))


def detect_form(
    record: Record,
    *,
    text_key: str,
    columns: dict[str, str],
    ranked: bool = False,
    paired: bool = False,
) -> str:
    """The form of a record, by its keys; raises DataError when none or several fit. ``ranked``:
    a list of answers is a preference, the best one first. ``paired``: two texts that belong
    together are a pair."""
    if paired and pair_keys(record, columns):
        return "pair"
    found = [form for form, keys in KEYS.items() if _has(record, keys, text_key, columns)]
    if ranked and ranked_key(record, columns):
        return "preference"
    if "label" in columns and _has(record, ("prompt", "label"), text_key, columns):
        return "labelled"
    if found and (len(found) == 1 or found[0] == "preference"):
        return found[0]  # a pair has its prompt beside it, which is a form of its own
    keys = names(record.value)
    if found:
        raise DataError(
            f"{record.where}: the columns ({keys}) fit the formats {' and '.join(found)}. "
            f"Choose one, e.g. data.form={found[0]}."
        )
    if text_key == "text" and columns.get("content", "content") in record.value:
        return "text"
    if paired:
        raise DataError(
            f"{record.where}: the columns ({keys or 'none'}) hold no pair of texts: none of "
            f"{'; '.join(f'{one} and {other}' for one, other in PAIRS)}; instruction and output; "
            "prompt and response. Map yours, e.g. data.data_map.query=title "
            "data.data_map.positive=text."
        )
    known = "; ".join(f"{form}: {', '.join(needed)}" for form, needed in KEYS.items())
    raise DataError(
        f"{record.where}: the columns ({keys or 'none'}) fit no known format ({known}). Map your "
        "names, e.g. data.form=alpaca data.columns.instruction=question "
        "data.columns.output=answer, or for text data.form=text data.text_key=body."
    )


def to_document(
    record: Record, *, text_key: str, columns: dict[str, str] | None = None
) -> Document:
    """The text under ``text_key``; where there is none, ``title`` and ``content``."""
    columns = columns or {}
    content = columns.get("content", "content")
    if text_key == "text" and "text" not in record.value and content in record.value:
        key = columns.get("title", "title")
        title = _text(record, key) if record.value.get(key) is not None else ""
        text = _text(record, content)
        if title.strip():
            text = f"{title}\n\n{text}"
    else:
        text = _text(record, text_key)
    check_characters(record, text)
    return Document(text, record.where)


def to_conversation(
    record: Record,
    form: str,
    *,
    columns: dict[str, str],
    system: str | None,
    label_names: dict[str, str] | None = None,
    turn_weights: bool = False,
) -> Conversation | None:
    """The conversation in a record, or None if it has nothing to learn: no word of the
    assistant. ``system`` is used where the record has no system message of its own. (Pairs
    have a reader of their own, ``llmx.data.format.formats``.) ``turn_weights``: the "weight" of
    an assistant's turn of a chat is read.

    Turns after the last of the assistant are left out, and counted. Raises RecordError for a key
    that is missing or has a wrong type, an unknown role, or turns that make no conversation.
    """

    def column(name: str) -> str:
        return columns.get(name, name)

    if form == "labelled":
        row = to_labelled(record, columns=columns, label_names=label_names or {})
        messages = [*row.history, Message("user", row.text), Message("assistant", row.name)]
    elif form in ("alpaca", "prompt_response"):
        messages = _single(record, form, column)
    else:
        key = column("conversations" if form == "sharegpt" else "messages")
        messages = turns(record.value.get(key), key, record.where, weighted=turn_weights)
    found = conversation_of(record, messages, columns=columns, system=system)
    if found is not None and form == "labelled":
        return replace(found, keeps_completion=True)
    return found


def conversation_of(
    record: Record, messages: list[Message], *, columns: dict[str, str], system: str | None
) -> Conversation | None:
    """Messages with the record's system message and tools, up to the last answer; None where
    there is none."""
    messages = _with_system(record, messages, columns.get("system", "system"), system)
    given = len(messages)
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not any(message.role == "assistant" and message.content.strip() for message in messages):
        return None
    for message in messages:
        check_characters(record, message.content)
    tools = _tools(record, columns.get("tools", "tools"))
    return Conversation(tuple(messages), record.where, tools, unanswered=given - len(messages))


def _with_system(
    record: Record, messages: list[Message], key: str, default: str | None
) -> list[Message]:
    """Messages with the record's own system message first, else with the default one."""
    own = record.value.get(key)
    if own is not None and not isinstance(own, str):
        reason = "a value of a wrong type"
        raise wrong_record(record, reason, f'"{excerpt(key)}" is {excerpt(own)}, not text.')
    if messages and messages[0].role == "system":
        if own and own.strip() and own.strip() != messages[0].content.strip():
            raise wrong_record(
                record,
                "two system messages",
                f'"{excerpt(key)}" and the first turn are two different system messages; keep one:',
                own,
            )
        return messages
    text = own if own and own.strip() else default
    return [Message("system", text), *messages] if messages and text else messages


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


def _has(record: Record, keys: tuple[str, ...], text_key: str, columns: dict[str, str]) -> bool:
    wanted = [text_key if key == "text" else columns.get(key, key) for key in keys]
    if "response" in wanted and _is_completed(record, columns):
        wanted = ["completion" if name == "response" else name for name in wanted]
    return all(name in record.value for name in wanted)


def _is_completed(record: Record, columns: dict[str, str]) -> bool:
    """Whether the answer is called as TRL calls it: ``completion``."""
    value = record.value
    return "response" not in columns and "response" not in value and "completion" in value


def _text(record: Record, key: str) -> str:
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


def _single(record: Record, form: str, column: Any) -> list[Message]:
    if form == "prompt_response":
        prompt_key, key = column("prompt"), column("response")
        if key == "response" and _is_completed(record, {}):
            key = "completion"
        asked = record.value.get(prompt_key)
        if isinstance(asked, list) and any(isinstance(turn, dict) for turn in asked):
            history_key = column("history")
            before = pairs(record.value.get(history_key), history_key, record.where)
            # TRL's conversational layout
            before = turns(asked, prompt_key, record.where, before=before)
            if isinstance(record.value.get(key), list):
                return turns(record.value[key], key, record.where, before=before)
            return [*before, Message("assistant", _text(record, key))]
        prompt, answer = _text(record, prompt_key), _text(record, key)
    else:
        prompt = _text(record, column("instruction"))
        answer = _text(record, column("output"))
        if record.value.get(column("input")) not in (None, ""):
            prompt = f"{prompt}\n{_text(record, column('input'))}"
    history = pairs(record.value.get(column("history")), column("history"), record.where)
    return [*history, Message("user", prompt), Message("assistant", answer)]


def to_labelled(
    record: Record, *, columns: dict[str, str], label_names: dict[str, str], any_label: bool = False
) -> Labelled:
    """The text and the label of a record, with the label's name where it has one.

    ``any_label``: also a fraction, a truth value, or a list; else only what can be an answer.
    """
    key, known = columns.get("label", "label"), label_names
    label = record.value.get(key)
    plain = isinstance(label, str | int) and not isinstance(label, bool)
    if not plain and (label is None or not any_label):
        raise wrong_record(
            record,
            "a missing label",
            f'"{excerpt(key)}" is {excerpt(label)}; a label is text or a whole number. Map it with '
            "data.data_map.label=COLUMN.",
        )
    if known and plain and str(label) not in known:
        raise wrong_record(
            record,
            "a label without a name",
            f"the label {excerpt(label)} has no name; data.label_names names {', '.join(known)}.",
        )
    history_key = columns.get("history", "history")
    context, history = labelled_history(record.value.get(history_key), history_key, record.where)
    asked = columns.get("prompt", "prompt")
    if asked not in record.value:
        raise wrong_record(
            record,
            "a missing column",
            f'no column "{excerpt(asked)}"; the row has {names(record.value) or "none"}. Map the '
            "text with data.data_map.prompt=COLUMN.",
        )
    prompt = _text(record, asked)
    text = f"{context}\n{prompt}" if context else prompt
    check_characters(record, text)
    name = known.get(str(label), str(label))
    return Labelled(text, label, name, record.where, tuple(history))


@dataclass(frozen=True)
class Preference:
    """Two conversations that are the same but for the last answer: the better, the worse."""

    chosen: Conversation
    rejected: Conversation
    margin: Any = None
    """By how much the one is better, as it is in the data (``margin``); None where it is not."""

    @property
    def where(self) -> Where:
        return self.chosen.where


@dataclass(frozen=True)
class TextPair:
    """A text, another that belongs to it, and texts that do not."""

    query: str
    positive: str
    negatives: tuple[str, ...]
    where: Where


def pair_keys(record: Record, columns: dict[str, str]) -> tuple[str, str] | None:
    """The columns of a pair: those that are mapped (``query``, ``positive``), else a published
    layout; None where the record has neither."""
    if {"query", "positive"} <= columns.keys():
        return columns["query"], columns["positive"]
    for one, other in PAIRS:
        keys = (columns.get(one, one), columns.get(other, other))
        if all(key in record.value for key in keys):
            return keys
    return None


def to_pair(record: Record, form: str, *, columns: dict[str, str]) -> TextPair:
    """A text with the one that belongs to it, and with those that do not: ``negatives`` (a list),
    ``negative``, ``negative_1`` ... as far as they are there. Of ``alpaca`` and
    ``prompt_response`` the prompt (with its earlier turns) and the answer.

    Raises RecordError where one of the texts is missing or empty, where the two are the same, or
    where a negative is one of them.
    """
    if form in ("alpaca", "prompt_response"):
        turns_ = _single(record, form, lambda name: columns.get(name, name))
        query = "\n".join(message.content for message in turns_[:-1])
        sides = [("the prompt", query), ("the answer", turns_[-1].content)]
    else:
        keys = pair_keys(record, columns) or _nearest_pair(record, columns)
        sides = [(f'"{excerpt(key)}"', _side(record, key)) for key in keys]
    for name, text in sides:
        if not text.strip():
            raise wrong_record(
                record, "an empty text", f"{name} is empty: a pair needs both of its texts."
            )
        check_characters(record, text)
    query, positive = (text for _, text in sides)
    if query.strip() == positive.strip():
        raise wrong_record(record, "a pair of equal texts", "both texts are the same:", query)
    negatives = tuple(_negatives(record, columns))
    for text in negatives:
        if text.strip() in (query.strip(), positive.strip()):
            which = "positive" if text.strip() == positive.strip() else "query"
            raise wrong_record(
                record,
                "a negative that is in the pair",
                f"a negative is the {which} itself:",
                text,
            )
    return TextPair(query, positive, negatives, record.where)


def _nearest_pair(record: Record, columns: dict[str, str]) -> tuple[str, str]:
    """Of a record that lacks one of a pair's columns: the layout that it has the other of."""
    layouts = [(columns.get(one, one), columns.get(other, other)) for one, other in PAIRS]
    return next((keys for keys in layouts if {*keys} & record.value.keys()), layouts[0])


def _side(record: Record, key: str) -> str:
    """One text of a pair."""
    if record.value.get(key) is None:
        what = (
            "is null"
            if key in record.value
            else f"is no column of the row, which has {names(record.value) or 'none'}"
        )
        raise wrong_record(
            record,
            "a pair without one of its texts",
            f'"{excerpt(key)}" {what}: a pair needs both texts. Map yours, e.g. '
            "data.data_map.query=title data.data_map.positive=text.",
        )
    return _text(record, key)


def _negatives(record: Record, columns: dict[str, str]) -> Iterator[str]:
    """The texts of all columns of negatives, in the order of the row; a null has none."""
    own = {columns[name] for name in ("negative", "negatives") if name in columns}
    for key, value in record.value.items():
        if not (key in own if own else NEGATIVE.fullmatch(str(key))) or value is None:
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


def ranked_key(record: Record, columns: dict[str, str]) -> str | None:
    """The column of a record with a list of answers, the best one first; None where there is none:
    ``output`` beside an ``instruction``, ``response``, ``responses`` or ``answers`` beside a
    ``prompt`` or turns."""
    for name, asked in RANKED.items():
        key = columns.get(name, name)
        value = record.value.get(key)
        beside = any(columns.get(each, each) in record.value for each in asked)
        if (
            beside
            and isinstance(value, list)
            and value
            and all(isinstance(one, str) for one in value)
        ):
            return key
    return None


RANKED = {
    "output": ("instruction",),
    "response": ("prompt",),
    "responses": ("prompt", "instruction", "conversations", "messages"),
    "answers": ("prompt", "instruction", "conversations", "messages"),
}
"""Columns that may hold a ranked list of answers, and what stands beside them."""


def to_preference(record: Record, *, columns: dict[str, str], system: str | None) -> Preference:
    """The pair in a record. The published layouts: ``chosen`` and ``rejected`` as whole
    conversations (messages, or text with ``Human:`` and ``Assistant:``) or as the answers to a
    ``prompt``, ``conversations`` or ``messages``; and a list of answers, the best one first, of
    which the first and the last are the pair.

    Raises RecordError where an answer is missing or empty, where the two do not have the same turns
    before the answer, or where they are the same.
    """

    def column(name: str) -> str:
        return columns.get(name, name)

    before = _before_the_answers(record, column)
    found: list[Conversation] = []
    for name, key, value in _two_answers(record, column, columns):
        if value is None or (isinstance(value, str | list | dict) and not value):
            problem = f'"{key}" is {excerpt(value)}' if key in record.value else f'no "{key}"'
            raise wrong_record(
                record, f"no {name} answer", f"{problem}: a pair needs both answers."
            )
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, str) and not before and (spoken := transcript(value)):
            messages = turns(
                [{"role": role, "content": text} for role, text in spoken], key, record.where
            )
        elif isinstance(value, str):
            messages = [*before, Message("assistant", value)]
        else:
            after = before if _is_answer(value) else []
            messages = turns(value, key, record.where, before=after)
        conversation = conversation_of(record, messages, columns=columns, system=system)
        last = messages[-1]
        if conversation is None or conversation.messages[-1] != last or not last.content.strip():
            raise wrong_record(record, "no answer", f'"{key}" does not end with an answer.', value)
        found.append(conversation)
    chosen, rejected = found
    if len(chosen.messages) < 2 or chosen.messages[:-1] != rejected.messages[:-1]:
        raise wrong_record(
            record,
            "chosen and rejected answer different things",
            f'"{column("chosen")}" and "{column("rejected")}" must have the same turns before '
            "their last answer, and at least one.",
            record.value.get(column("rejected")),
        )
    if chosen == rejected:
        raise wrong_record(
            record, "chosen is rejected", "both answers are the same.", found[0].tools
        )
    return Preference(chosen, rejected, record.value.get(column("margin")))


def _two_answers(
    record: Record, column: Any, columns: dict[str, str]
) -> list[tuple[str, str, Any]]:
    """(``chosen`` or ``rejected``, column, value) of both answers."""
    ranked = ranked_key(record, columns)
    if ranked and not (column("chosen") in record.value and column("rejected") in record.value):
        answers = record.value[ranked]
        if len(answers) < 2:
            problem = f'"{ranked}" has one answer, and a pair needs two.'
            raise wrong_record(record, "no rejected answer", problem, answers)
        return [("chosen", ranked, answers[0]), ("rejected", ranked, answers[-1])]
    return [(name, column(name), record.value.get(column(name))) for name in ("chosen", "rejected")]


_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]?")
"""As the helpful-harmless data of Anthropic marks the turns of a transcript."""


def transcript(text: str) -> list[tuple[str, str]]:
    """(role, content) of the turns of a text that begins with ``Human:``; empty for another.
    Several turns of one speaker are one."""
    parts = _SPEAKER.split(text)
    if len(parts) < 3 or parts[0].strip() or parts[1] != "Human":
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    found: list[tuple[str, str]] = []
    for speaker, content in zip(parts[1::2], parts[2::2], strict=True):
        role = roles[speaker]
        if found and found[-1][0] == role:
            found[-1] = (role, f"{found[-1][1]}\n\n{content.strip()}")
        else:
            found.append((role, content.strip()))
    return found


def _before_the_answers(record: Record, column: Any) -> list[Message]:
    for name in ("conversations", "messages"):
        if column(name) in record.value:
            return turns(record.value[column(name)], column(name), record.where)
    prompt = record.value.get(column("prompt"), record.value.get(column("instruction")))
    if isinstance(prompt, list):
        return turns(prompt, column("prompt"), record.where)
    if not isinstance(prompt, str):
        return []
    if spoken := transcript(prompt):
        if spoken[-1] == ("assistant", ""):  # the cue to answer
            spoken.pop()
        said = [{"role": role, "content": text} for role, text in spoken]
        return turns(said, column("prompt"), record.where)
    key = column("input")
    extra = record.value.get(key)
    if extra is not None and not isinstance(extra, str):
        reason = "a value of a wrong type"
        raise wrong_record(record, reason, f'"{excerpt(key)}" is {excerpt(extra)}, not text.')
    history = pairs(record.value.get(column("history")), column("history"), record.where)
    return [*history, Message("user", f"{prompt}\n{extra}" if extra else prompt)]


def _is_answer(value: Any) -> bool:
    """Whether a list holds the answer alone, not a conversation that ends with it."""
    return isinstance(value, list) and len(value) == 1
