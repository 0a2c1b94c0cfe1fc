"""Dataset formats: how each is recognised, and the rows that its readers make of records.

A format is an entry of ``FORMATS``. Another one is a file with its reader: ``data.form`` finds it
by an entry point (``llmx.config.plugins``), and ``data.form=auto`` by its keys once it is here:

    register(Format("dialogue", readers={Conversation: read}, keys=("dialogue",)))

A reader asks its ``Fields`` for columns by our names; ``data.columns`` maps these to the names in
the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmx.config import plugins
from llmx.data.format.columns import (
    RENAME_CALLS,
    VERDICTS,
    Fields,
    Reading,
    checked_text,
    unread_columns,
)
from llmx.data.format.rows import (
    Conversation,
    Labelled,
    Message,
    Preference,
    Prompted,
    TextPair,
    UnpairedPreference,
)
from llmx.data.format.turns import labelled_history, pairs
from llmx.data.source.records import (
    Document,
    Record,
    RecordError,
    Rejected,
    Row,
    excerpt,
    names,
)
from llmx.errors import DataError

Reader = Callable[[Fields], Row | None]
"""Raises Rejected for a record that is wrong; None for one that has nothing to learn."""
Turns = Callable[[Fields], list[Message]]


@dataclass(frozen=True)
class Format:
    """A dataset format: how it is recognised, and how its records are read."""

    name: str
    """The value of ``data.form``."""
    readers: Mapping[type, Reader]
    """Type of row -> its reader, the most specific type first. Of a format with a reader of
    ``UnpairedPreference`` each answer of another type of row is learned as a good one."""
    keys: tuple[str, ...] = ()
    """The columns by which it is recognised where no other format has all of its own."""
    recognises: Callable[[Fields, tuple[type, ...]], bool] | None = None
    """Whether a record surely is of it, whatever other formats fit, for a task with these
    ``takes``."""
    changing: Mapping[str, str] = field(default_factory=dict)
    """Columns that change what a row means where they are not read -> the fix; ``{name}`` in it is
    the column."""

    def read(
        self,
        record: Record,
        reading: Reading,
        row_type: type | None,
        *,
        ignore: Collection[str] | None = None,
    ) -> tuple[Row | None, list[str]]:
        """The row of a record, and the columns with a value that nothing read.

        ``row_type``: None is the first that the format can be. ``ignore``: columns that may be
        ignored whatever they hold; None: the record is not trained on, and no column is judged.
        """
        fields, unread = Fields(record, reading), list[str]()
        row: Row | None = record
        try:
            if row_type is not Record and self.readers:
                row = self.readers[row_type or next(iter(self.readers))](fields)
                if ignore is not None:
                    learned = UnpairedPreference in self.readers
                    unread += unread_columns(
                        fields,
                        ignore=ignore,
                        changing=self.changing,
                        learned=learned and row_type is not UnpairedPreference,
                        is_pair=row_type is TextPair,
                    )
            for text in () if row is None else row.texts:
                if not text.isascii():
                    _check_characters(text)
        except Rejected as problem:
            raise RecordError.of(problem, record.where, record.value) from problem
        return row, unread


def _check_characters(text: str) -> None:
    """Raise Rejected for half of a surrogate pair: JSON can write it, nothing encodes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise Rejected(
            "half of a surrogate pair",
            f"character {at + 1} of a text is half of a surrogate pair (\\u{ord(text[at]):04x}), "
            "which is no text. Repair the row, or leave it out with data.on_bad_row=skip:",
            text[max(0, at - 20) : at + 20],
        ) from error


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


def detect_form(fields: Fields, *, takes: tuple[type, ...] = ()) -> str:
    """The name of a record's format, by its keys; raises DataError when none or several fit."""
    for dataset_format in FORMATS.values():
        if dataset_format.recognises and dataset_format.recognises(fields, takes):
            return dataset_format.name
    keyed = {name: candidate.keys for name, candidate in FORMATS.items() if candidate.keys}
    matches = [name for name, columns in keyed.items() if fields.has(*columns)]
    if len(matches) == 1:
        return matches[0]
    keys = names(fields.record.value)
    if matches:
        raise DataError(
            f"{fields.where}: the columns ({keys}) fit the formats {' and '.join(matches)}. "
            f"Choose one, e.g. data.form={matches[0]}."
        )
    if fields.reading.text_key == "text" and fields.has("content"):
        return "text"
    if TextPair in takes:
        raise DataError(
            f"{fields.where}: the columns ({keys or 'none'}) hold no pair of texts: none of "
            f"{'; '.join(' and '.join(pair) for pair in PAIRS)}; instruction and output; "
            "prompt and response. Map yours, e.g. data.data_map.query=title "
            "data.data_map.positive=text."
        )
    known_formats = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in keyed.items())
    raise DataError(
        f"{fields.where}: the columns ({keys or 'none'}) fit no known format ({known_formats}). "
        "Map your names, e.g. data.form=alpaca data.columns.instruction=question "
        "data.columns.output=answer, or for text data.form=text data.text_key=body."
    )


# Conversations


def conversation_of(
    fields: Fields, messages: list[Message], *, prompted: bool = False
) -> Conversation | None:
    """Messages with the record's system message (or the default one) and tools, up to the last
    answer; None where there is none. Turns after it are counted. ``prompted``: an empty answer
    follows the last turn where it is none."""
    row_system = fields.text("system", optional=True)
    row_system = row_system if row_system.strip() else ""
    tools = _tools(fields)
    if messages and messages[0].role == "system":
        if row_system and row_system.strip() != messages[0].content.strip():
            raise Rejected(
                "two system messages",
                f'"{excerpt(fields.column("system"))}" and the first turn are two different system '
                "messages; keep one:",
                row_system,
            )
    elif messages and (text := row_system or fields.reading.system):
        messages = [Message("system", text), *messages]
    if prompted and messages and messages[-1].role in ("user", "tool"):
        messages = [*messages, Message("assistant", "")]
    num_turns = len(messages)
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    answers = [message.content for message in messages if message.role == "assistant"]
    if not any(prompted or answer.strip() for answer in answers):
        return None
    return Conversation(tuple(messages), fields.where, tools, unanswered=num_turns - len(messages))


def _tools(fields: Fields) -> str:
    """The definitions of tools as the JSON text of a list, as it stands where it is text; empty
    where there are none."""
    value = fields.get("tools")
    text = value if isinstance(value, str) else ""
    if text.strip():
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Rejected("wrong tools", f"tools are not JSON ({error}).", text) from error
    if not value:
        return ""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        problem = "tools must be a list of objects, each the definition of a tool:"
        raise Rejected("wrong tools", problem, value)
    return text or json.dumps(value, ensure_ascii=False)


def _history(fields: Fields) -> list[Message]:
    return pairs(fields.get("history"), fields.column("history"))


def _question(fields: Fields, prompt: str) -> list[Message]:
    """The earlier turns, and the prompt with the text of ``input``."""
    extra = fields.text("input", optional=True)
    text = f"{prompt}\n{extra}" if extra else prompt
    return [*_history(fields), Message("user", text)]


def _prompt_and_answer(fields: Fields, reference: Any = None) -> list[Message]:
    """The turns of ``prompt_response``, whose prompt may be text or turns (TRL's conversational
    layout). ``reference``: the answer where the record's own is not meant."""
    prompt, before = fields.get("prompt"), _history(fields)
    answer = fields.get("response") if reference is None else reference
    if isinstance(prompt, list) and any(isinstance(turn, dict) for turn in prompt):
        before = fields.turns("prompt", before=before)
        if isinstance(answer, list):
            return fields.turns("response", answer, before=before)
    else:
        before.append(Message("user", fields.text("prompt")))
    if reference is None:
        answer = fields.text("response")
    return [*before, Message("assistant", checked_text(fields.column("response"), answer))]


REFERENCES = ("response", "completion", "answer", "solution", "ground_truth", "reward_model")
"""Columns with the reference of a prompt: the first that a record has."""


def _prompt_and_reference(fields: Fields) -> list[Message]:
    """The turns of ``prompt_response`` with a reference that may be a number, any JSON, or missing;
    ``reward_model`` holds it as ``ground_truth`` (verl's layout)."""
    key = fields.first("response", REFERENCES)
    value = fields.at(key) if key else ""
    if isinstance(value, dict) and "ground_truth" in value:
        value = value["ground_truth"]
    are_turns = isinstance(value, list) and value and all(isinstance(v, dict) for v in value)
    if not isinstance(value, str) and not (are_turns and {"role", "from"} & value[0].keys()):
        value = "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return _prompt_and_answer(fields, value)


def _is_prompt(fields: Fields, takes: tuple[type, ...]) -> bool:
    """Whether a record is a prompt, with a reference or without, for a task that takes it."""
    other_formats = ("conversations", "messages", "text")
    return Prompted in takes and fields.has("prompt") and not any(map(fields.has, other_formats))


def _instruction_and_output(fields: Fields) -> list[Message]:
    """The turns of a record in the format ``alpaca``."""
    prompt, answer = fields.text("instruction"), fields.text("output")
    return [*_question(fields, prompt), Message("assistant", answer)]


def _chat(name: str) -> Turns:
    """The turns that stand in one column."""
    return lambda fields: fields.turns(name, weighted=fields.reading.turn_weights)


def _unpaired(fields: Fields, messages: list[Message]) -> UnpairedPreference | None:
    """A conversation with the verdict on its last answer: ``true`` or ``false``, in the column that
    is mapped to ``desirable``, else in one of ``VERDICTS``."""
    conversation = conversation_of(fields, messages)
    key = fields.first("desirable", VERDICTS)
    if key is None:
        looked_for = fields.reading.columns.get("desirable") or ", ".join(VERDICTS)
        raise Rejected(
            "no verdict",
            f"no column says whether the answer is good ({looked_for}: true or false); "
            f"the row has {names(fields.record.value) or 'none'}. Map yours with "
            "data.columns.desirable.",
        )
    value = fields.at(key)
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if value not in (True, False):
        problem = f'"{excerpt(key)}" is {excerpt(value)}, not true or false.'
        raise Rejected("no verdict", problem)
    return None if conversation is None else UnpairedPreference(conversation, bool(value))


# Text and labels


def to_document(fields: Fields) -> Document:
    """The text under ``text_key``; where there is none, ``title`` and ``content``."""
    if fields.reading.text_key != "text" or fields.has("text") or not fields.has("content"):
        return Document(fields.text("text"), fields.where)
    title, text = fields.text("title", optional=True), fields.text("content")
    return Document(f"{title}\n\n{text}" if title.strip() else text, fields.where)


def to_labelled(fields: Fields, *, any_label: bool = True) -> Labelled:
    """The text and the label of a record, with the label's name where it has one.

    ``any_label``: also a fraction, a truth value, or a list; else only what can be an answer.
    """
    label, label_names = fields.get("label"), fields.reading.label_names
    plain = isinstance(label, str | int) and not isinstance(label, bool)
    if not plain and (label is None or not any_label):
        raise Rejected(
            "a missing label",
            f'"{excerpt(fields.column("label"))}" is {excerpt(label)}; a label is text or a whole '
            "number. Map it with data.data_map.label=COLUMN.",
        )
    if label_names and plain and str(label) not in label_names:
        raise Rejected(
            "a label without a name",
            f"the label {excerpt(label)} has no name; data.label_names names "
            f"{', '.join(label_names)}.",
        )
    context, history = labelled_history(fields.get("history"), fields.column("history"))
    prompt = fields.text("prompt")
    text = f"{context}\n{prompt}" if context else prompt
    name = label_names.get(str(label), str(label))
    return Labelled(text, label, name, fields.where, tuple(history))


def _label_as_answer(fields: Fields) -> Conversation | None:
    row = to_labelled(fields, any_label=False)
    messages = [*row.history, Message("user", row.text), Message("assistant", row.name)]
    conversation = conversation_of(fields, messages)
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


def _pair_columns(fields: Fields) -> tuple[str, str] | None:
    """The columns of a pair: those that are mapped (``query``, ``positive``), else a published
    layout; None where the record has neither."""
    if {*PAIRS[0]} <= fields.reading.columns.keys():
        return PAIRS[0]
    return next((pair for pair in PAIRS if fields.has(*pair)), None)


def _two_columns(fields: Fields) -> TextPair:
    """A pair of two columns."""
    columns = _pair_columns(fields) or next(
        (pair for pair in PAIRS if any(map(fields.has, pair))), PAIRS[0]
    )
    for name in columns:
        if fields.get(name) is None:
            key, row = excerpt(fields.column(name)), names(fields.record.value) or "none"
            problem = "is null" if fields.has(name) else f"is no column of the row, which has {row}"
            raise Rejected(
                "a pair without one of its texts",
                f'"{key}" {problem}: a pair needs both texts. Map yours, e.g. '
                "data.data_map.query=title data.data_map.positive=text.",
            )
    return _pair_of(
        fields, [(f'"{excerpt(fields.column(name))}"', fields.text(name)) for name in columns]
    )


def _pair_of_turns(read: Turns) -> Reader:
    """The reader of pairs of a prompt (with its earlier turns) and the answer."""

    def to_pair(fields: Fields) -> TextPair:
        *before, answer = read(fields)
        query = "\n".join(message.content for message in before)
        return _pair_of(fields, [("the prompt", query), ("the answer", answer.content)])

    return to_pair


def _pair_of(fields: Fields, sides: list[tuple[str, str]]) -> TextPair:
    """Two texts, each with its name for messages, and those that do not belong to them:
    ``negatives`` (a list), ``negative``, ``negative_1`` ... as far as they are there.

    Raises Rejected where one of the texts is empty, where the two are the same, or where a negative
    is one of them.
    """
    for name, text in sides:
        if not text.strip():
            raise Rejected("an empty text", f"{name} is empty: a pair needs both of its texts.")
    query, positive = (text for _, text in sides)
    if query.strip() == positive.strip():
        raise Rejected("a pair of equal texts", "both texts are the same:", query)
    negatives = tuple(_negatives(fields))
    for text in negatives:
        for side, own_text in (("positive", positive), ("query", query)):
            if text.strip() == own_text.strip():
                problem = f"a negative is the {side} itself:"
                raise Rejected("a negative that is in the pair", problem, text)
    return TextPair(query, positive, negatives, fields.where)


def _negatives(fields: Fields) -> Iterator[str]:
    """The texts of all columns of negatives, in the order of the row; a null has none."""
    columns = fields.reading.columns
    mapped = {columns[name] for name in ("negative", "negatives") if name in columns}
    for key in fields.record.value:
        if not (key in mapped if mapped else NEGATIVE.fullmatch(str(key))):
            continue
        value = fields.at(key)
        for text in value if isinstance(value, list) else [value] if value is not None else []:
            if not isinstance(text, str) or not text.strip():
                raise Rejected(
                    "a negative that is no text",
                    f'"{excerpt(key)}" holds {excerpt(text)}: a negative is a text, and '
                    "one that is not there is null or left out of the list.",
                )
            yield text


# Preferences


def to_preference(fields: Fields) -> Preference:
    """The pair in a record: ``chosen`` and ``rejected`` as whole conversations (messages, or text
    with ``Human:`` and ``Assistant:``) or as the answers to a ``prompt``, ``conversations`` or
    ``messages``.

    Raises Rejected where an answer is missing or empty, where the two do not have the same turns
    before the answer, or where they are the same.
    """
    before = _before_the_answers(fields)
    conversations: list[Conversation] = []
    for name in ("chosen", "rejected"):
        key, value = fields.column(name), fields.get(name)
        if value is None or (isinstance(value, str | list | dict) and not value):
            there = key in fields.record.value
            problem = f'"{key}" is {excerpt(value)}' if there else f'no "{key}"'
            raise Rejected(f"no {name} answer", f"{problem}: a pair needs both answers.")
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, str) and not before and (spoken := transcript(value)):
            messages = fields.turns(name, spoken)
        elif isinstance(value, str):
            messages = [*before, Message("assistant", value)]
        else:
            # A list of one turn is the answer alone, not a conversation that ends with it.
            is_answer = isinstance(value, list) and len(value) == 1
            messages = fields.turns(name, value, before=before if is_answer else [])
        conversation = conversation_of(fields, messages)
        last = messages[-1]
        if conversation is None or conversation.messages[-1] != last or not last.content.strip():
            raise Rejected("no answer", f'"{key}" does not end with an answer.', value)
        conversations.append(conversation)
    chosen, rejected = conversations
    if len(chosen.messages) < 2 or chosen.messages[:-1] != rejected.messages[:-1]:
        raise Rejected(
            "chosen and rejected answer different things",
            f'"{fields.column("chosen")}" and "{fields.column("rejected")}" must have the same '
            "turns before their last answer, and at least one.",
            fields.get("rejected"),
        )
    if chosen == rejected:
        raise Rejected("chosen is rejected", "both answers are the same.", chosen.tools)
    return Preference(chosen, rejected, fields.get("margin"))


_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]?")
"""Marks a turn in the transcripts of Anthropic's helpful-harmless data."""


def transcript(text: str) -> list[dict[str, str]]:
    """The turns of a text that begins with ``Human:``; empty for another. Several turns of one
    speaker are one."""
    before, *parts = _SPEAKER.split(text)
    if before.strip() or parts[:1] != ["Human"]:
        return []
    spoken: list[dict[str, str]] = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role = "user" if speaker == "Human" else "assistant"
        if spoken and spoken[-1]["role"] == role:
            spoken[-1]["content"] += f"\n\n{content.strip()}"
        else:
            spoken.append({"role": role, "content": content.strip()})
    return spoken


def _before_the_answers(fields: Fields) -> list[Message]:
    """The turns that both answers of a pair follow; empty where the answers have them."""
    for name in ("conversations", "messages"):
        if fields.has(name):
            return fields.turns(name)
    prompt = fields.get("prompt") if fields.has("prompt") else fields.get("instruction")
    if isinstance(prompt, list):
        return fields.turns("prompt", prompt)
    if not isinstance(prompt, str):
        return []
    if spoken := transcript(prompt):
        if spoken[-1] == {"role": "assistant", "content": ""}:  # the cue to answer
            spoken.pop()
        return fields.turns("prompt", spoken)
    return _question(fields, prompt)


# The formats, and the columns that change what their rows mean

ANSWERED = {
    **dict.fromkeys(("system_prompt", "system_message"), "data.columns.system={name}"),
    **dict.fromkeys(("functions", "available_tools"), "data.columns.tools={name}"),
    **dict.fromkeys(("function_calls", "tool_call"), RENAME_CALLS),
}
LEARNED = {
    **ANSWERED,
    **dict.fromkeys(("score", "rating", "reward"), "Filter the rows by it first"),
    **dict.fromkeys(
        ("chosen", "chosen_response"),
        "data.form=preference data.columns.chosen={name} learns the chosen answers",
    ),
    **dict.fromkeys(
        ("rejected", "rejected_response"),
        "data.form=preference data.columns.rejected={name} learns the chosen answers",
    ),
}
CHAT = {**LEARNED, "history": "Put the earlier turns into the turns of the row"}
_AS_ALPACA = (
    "data.form=alpaca data.columns.instruction=prompt data.columns.input={name} "
    "data.columns.output=response"
)
_BEFORE_PROMPT = "data.data_map.history={name} puts it before the prompt"


def _conversational(
    name: str,
    keys: tuple[str, ...],
    read: Turns,
    changing: Mapping[str, str],
    *,
    prompts: Turns | None = None,
    recognises: Callable[[Fields, tuple[type, ...]], bool] | None = None,
) -> Format:
    """A format whose records are turns. ``prompts``: those of a prompt, where they differ."""
    read_prompts = prompts or read
    readers: dict[type, Reader] = {
        UnpairedPreference: lambda fields: _unpaired(fields, read(fields)),
        Prompted: lambda fields: conversation_of(fields, read_prompts(fields), prompted=True),
        Conversation: lambda fields: conversation_of(fields, read(fields)),
    }
    if len(keys) == 2:  # a prompt and its answer
        readers = {TextPair: _pair_of_turns(read), **readers}
    return Format(name, readers, keys, recognises, changing)


for built_in in (
    Format(
        "pair",
        {TextPair: _two_columns},
        recognises=lambda fields, takes: TextPair in takes and _pair_columns(fields) is not None,
    ),
    Format(
        "labelled",
        {Labelled: to_labelled, Conversation: _label_as_answer},
        recognises=lambda fields, takes: (
            "label" in fields.reading.columns and fields.has("prompt", "label")
        ),
        changing={**ANSWERED, **dict.fromkeys(("context", "input"), _BEFORE_PROMPT)},
    ),
    Format(
        "preference",
        {Preference: to_preference, Conversation: lambda fields: to_preference(fields).chosen},
        keys=("chosen", "rejected"),
        # A pair has its prompt beside it, which is a format of its own.
        recognises=lambda fields, takes: fields.has("chosen", "rejected"),
        changing=ANSWERED,
    ),
    _conversational("sharegpt", ("conversations",), _chat("conversations"), CHAT),
    _conversational("messages", ("messages",), _chat("messages"), CHAT),
    _conversational(
        "alpaca",
        ("instruction", "output"),
        _instruction_and_output,
        {**LEARNED, "context": "data.columns.input={name}"},
    ),
    _conversational(
        "prompt_response",  # or TRL's prompt and completion
        ("prompt", "response"),
        _prompt_and_answer,
        {**LEARNED, **dict.fromkeys(("context", "input"), _AS_ALPACA)},
        prompts=_prompt_and_reference,
        recognises=_is_prompt,
    ),
    Format("text", {Document: to_document}, keys=("text",)),
    Format("record", {}),
):
    register(built_in)
