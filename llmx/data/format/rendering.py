"""Conversations as text by a chat template, and where the completions lie in it, by construction.

The text is the template's own rendering. The same conversation is also rendered with markers in
the place of data, which shows what the template writes between the data of two messages. Nothing
is found by searching for a completion.

A completion's span is what the model has to produce after the template's generation prompt: what
the template writes of the turn, and the token that ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date as Date
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from llmx.data.format.rows import Conversation, Message
from llmx.data.source.records import Where
from llmx.errors import DataError

Span = tuple[int, int]
"""Characters [start, stop) of a rendered text."""
LOST_THOUGHTS = "thoughts of earlier turns, which the chat template leaves out"
CALLS_AS_TEXT = "rows with tools as JSON text, for the chat template has no form for calls"


@dataclass(frozen=True)
class Rendering:
    """A conversation as text, and its completions: a span an assistant turn.

    ``literal``: special tokens that stand in data, which are tokenized as the text that they are.
    ``end_missing``: the template closes the last turn with no special token, so the EOS token
    is appended. ``weights``: of the completions; empty where all are 1.
    """

    text: str
    completions: tuple[Span, ...]
    end_missing: bool
    literal: tuple[Span, ...] = ()
    weights: tuple[float, ...] = ()
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Turn:
    """What a template writes around the data of an assistant's turn."""

    before: str
    """The text between the data of the message before and that of the turn."""
    prompt: str
    """What the generation prompt has in its place."""
    closing: str
    """The text from the data to the end of the token that ends the turn, or to the end of what
    belongs to the turn where there is no such token."""

    def start(self, text: str, at: int) -> int:
        """The start of the completion, where the data of the message before ends ``at``: after the
        generation prompt, or what is written of it."""
        if text.startswith(self.prompt, at):
            return at + len(self.prompt)
        written = _common(text[at : at + len(self.prompt)], self.before, self.prompt)
        return at + len(_CUT_TAG.sub("", written))


_CUT_TAG = re.compile(r"<[^<>\s]*$")


def _common(*texts: str) -> str:
    """What texts begin with alike."""
    return os.path.commonprefix(texts)  # noqa: RUF071


@dataclass(frozen=True)
class Skeleton:
    """The text that a template writes around the data of conversations of one shape.

    ``order``: the messages in the order in which their contents are written; ``pieces``: the text
    before, between and after them. ``turns``: of the assistant, by message.
    """

    order: tuple[int, ...]
    pieces: tuple[str, ...]
    turns: dict[int, Turn]
    end_missing: bool


def filled(skeleton: Skeleton, messages: tuple[Message, ...], text: str) -> Rendering | None:
    """The spans of ``text`` if it is the skeleton with the contents put in, as they are or
    with the space around them stripped, as many templates do; else None."""
    position = len(skeleton.pieces[0])
    if not text.startswith(skeleton.pieces[0]):
        return None
    spans: dict[int, Span] = {}
    for i, piece in zip(skeleton.order, skeleton.pieces[1:], strict=True):
        content = messages[i].content
        for written in (content, content.strip(), content.lstrip(), content.rstrip()):
            if text.startswith(written + piece, position):
                break
        else:
            return None
        spans[i] = (position, position + len(written))
        position += len(written) + len(piece)
    if position != len(text):
        return None
    completions = tuple(
        (turn.start(text, spans[i - 1][1]), spans[i][1] + len(turn.closing))
        for i, turn in skeleton.turns.items()
    )
    return Rendering(text, completions, skeleton.end_missing)


def shapes_of(conversation: Conversation, *, own_tools: bool) -> list[Conversation]:
    """The conversation as it is, and then as a template that knows less can take it: tool results
    as words of the user, the system in the first turn. ``own_tools``: the template has its own way
    to write tools; else they are in the system message."""
    messages = conversation.messages
    if conversation.tools and not own_tools:
        note = f"Tools that you may call, as JSON:\n{conversation.tools}"
        if messages[0].role == "system":
            note = f"{messages[0].content}\n\n{note}"
            messages = messages[1:]
        messages = (Message("system", note), *messages)
        conversation = replace(conversation, messages=messages, tools="")
    shapes = [conversation]
    has_calls = any(message.calls for message in messages)
    if not has_calls and any(message.role == "tool" for message in messages):
        turns: list[Message] = []
        for message in messages:
            if message.role == "tool":
                result = f"<tool_response>\n{message.content}\n</tool_response>"
                if turns[-1].role == "user":  # the result of another call
                    result = f"{turns.pop().content}\n{result}"
                message = Message("user", result)
            turns.append(message)
        messages = tuple(turns)
        shapes.append(replace(conversation, messages=messages))
    if messages[0].role == "system":
        first = Message("user", f"{messages[0].content}\n\n{messages[1].content}")
        shapes.append(replace(conversation, messages=(first, *messages[2:])))
    return shapes


_MARK = "\ue000{}.{}\ue001"
_MARKS = re.compile("\ue000(\\d+)\\.(\\d+)\ue001")
_HIDDEN = 0x100000
"""The first character of private use that stands for a special token."""
_HIDDEN_FIRST = re.compile("[\U00100000-\U0010fffd]")
# Where the prompt has the "<think>", answers come without: the "</think>" is then a line.
_THOUGHT = re.compile(r"(?:\s*<think>|(?=.*?\n</think>\n))(.*?)</think>\s*", re.DOTALL)
_ASKING = (Message("user", "a"), Message("assistant", "b"))
_CALLS = Message("assistant", "", calls=({"id": "call00001", "name": "f", "arguments": {}},))
_CALLING = (_ASKING[0], _CALLS, Message("tool", "c", call_id="call00001"), _ASKING[1])
_PROBES = tuple(
    Conversation(turns * 2, Where(Path("probe"), 1, "row")) for turns in (_ASKING, _CALLING)
)
"""What is asked of a template once."""
_TOOL = (
    '[{"type": "function", "function": {"name": "f", "description": "d", "parameters": '
    '{"type": "object", "properties": {"key": {"type": "string", "description": "d"}}}}}]'
)


@dataclass(frozen=True)
class CallForm:
    """How a template takes calls of tools."""

    as_text: bool
    """Whether arguments are JSON text, not an object."""
    no_words: str | None
    """The content of a turn that only calls."""


class _NotWritten(Exception):
    """The reason for which a template cannot write a conversation."""


def _reason(error: Exception) -> str:
    """Why a template cannot write a conversation, by whatever it raised."""
    return str(error) if isinstance(error, _NotWritten) else f"{type(error).__name__}: {error}"


class TemplateSpans:
    """Renders conversations with one chat template. ``special``: the tokenizer's special tokens."""

    def __init__(self, tokenizer: Any, *, name: str, template: str, special: dict[str, int]):
        self._tokenizer = tokenizer
        self._name = name
        # With the day in the place of what asks for it.
        self._template = _DATE.sub(lambda match: json.dumps(_day().strftime(match[2])), template)
        self._special = sorted(special, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, self._special)) or "(?!)")
        self._skeletons: dict[Any, Skeleton | Exception] = {}

    def render(self, conversation: Conversation) -> Rendering:
        """The text of a conversation, with its spans; raises DataError if the template
        refuses it."""
        notes = Counter[str]()
        messages = conversation.messages
        if self._call_form is None and (conversation.tools or any(m.calls for m in messages)):
            notes[CALLS_AS_TEXT] = 1
        try:
            rendering = self._render(self._prepared(conversation), notes)
        except Exception as error:  # whatever a template raises, it refuses this row
            roles = " → ".join(message.role for message in messages)
            raise DataError(
                f"{conversation.where}: the chat template ({self._name}) cannot render {roles}: "
                f"{_reason(error)}. data.on_bad_row=skip leaves such rows out and counts them; "
                "another template is chosen by data.template."
            ) from error
        rendering = self._restored(rendering)
        weights = tuple(message.weight for message in messages if message.role == "assistant")
        weights = () if set(weights) == {1.0} else weights
        return replace(rendering, weights=weights, notes=notes)

    def _render(self, conversation: Conversation, notes: Counter[str]) -> Rendering:
        """The rendering of the first shape that the template can write."""
        problem = ""
        own_tools = not conversation.tools or self._own_tools
        for shaped in shapes_of(conversation, own_tools=own_tools):
            messages = shaped.messages
            try:
                skeleton = self._skeleton_of(shaped)
                text = self._apply(messages, tools=shaped.tools)
            except Exception as error:  # whatever a template raises, it refuses this shape
                problem = _reason(error)
                continue
            rendering = None
            if not any(message.calls or message.thought for message in messages):
                rendering = filled(skeleton, messages, text)
            return rendering or self._located(shaped, skeleton, text, notes)
        raise _NotWritten(problem)

    # Messages as the template takes them

    def _prepared(self, conversation: Conversation) -> Conversation:
        """The conversation with calls and thoughts as this template takes them, and with special
        tokens in data hidden from it (``_restored``)."""
        messages = []
        for message in _numbered(conversation.messages):
            if message.calls and self._call_form is None:
                message = replace(message, calls=())
            elif message.calls:
                message = replace(message, content=message.said)
            if message.role == "assistant":
                message = self._with_thought(message)
            content, thought = map(self._hidden, (message.content, message.thought))
            if message.role == "assistant" and _THOUGHT.match(message.content):
                for tag in ("<think>", "</think>"):  # they are no data
                    content = content.replace(self._hidden(tag), tag, 1)
            calls = tuple(_changed(call, self._hidden) for call in message.calls)
            messages.append(replace(message, content=content, calls=calls, thought=thought))
        tools = conversation.tools
        if tools:
            hidden = json.dumps(_changed(json.loads(tools), self._hidden), ensure_ascii=False)
            tools = hidden if _HIDDEN_FIRST.search(hidden) else tools
        return replace(conversation, messages=tuple(messages), tools=tools)

    def _with_thought(self, message: Message) -> Message:
        """The thought as a value of its own for templates that know it as such only, else in the
        content. Templates that know both get what the row has."""
        reads, parses = self._reads_thoughts
        inline = _THOUGHT.match(message.content)
        if message.thought and not reads:
            if "think>" not in self._template:
                raise _NotWritten('it does not write "reasoning_content"')
            content = f"<think>\n{message.thought}\n</think>\n\n{message.content}"
            return replace(message, content=content, thought="")
        if inline and not message.thought and reads and not parses:
            content = message.content[inline.end() :]
            return replace(message, content=content, thought=inline[1].strip())
        return message

    @cached_property
    def _reads_thoughts(self) -> tuple[bool, bool]:
        """Whether the template writes a thought that is a value of its own; and whether it writes
        one in the content in the same way."""
        thought, answer = _MARK.format(1, 0), _MARK.format(1, 1)
        beside = Message("assistant", answer, thought=thought)
        inline = Message("assistant", f"<think>\n{thought}\n</think>\n\n{answer}")
        try:
            first, second = (
                self._apply((Message("user", "a"), message), tools="").split()
                for message in (beside, inline)
            )
        except Exception:  # whatever a template raises, it has no place for one
            return False, False
        written = "".join(first)
        return thought in written and answer in written, written == "".join(second)

    @cached_property
    def _call_form(self) -> CallForm | None:
        """How the template writes calls and their results; None where it has no way to. One
        decision for all rows, so that a model never learns two syntaxes."""
        for as_text, no_words in product((False, True), ("", None)):
            form = CallForm(as_text, no_words)
            try:
                turns_of = self._skeleton(_PROBES[1], form=form).turns
            except Exception:  # whatever a template raises, it refuses this form
                continue
            if turns_of[1].closing == turns_of[5].closing:
                return form
        return None

    @cached_property
    def _own_tools(self) -> bool:
        """Whether the template writes tools and calls of them. One decision for all rows."""
        try:
            self._skeleton_of(replace(_PROBES[1], tools=_TOOL))
        except Exception:  # whatever a template raises, it has no way to write tools
            return False
        return self._call_form is not None

    @property
    def turn_ends(self) -> set[str]:
        """The special tokens that end a turn, also one that calls tools or that another follows."""
        tokens: set[str] = set()
        for probe in _PROBES[: 1 if self._call_form is None else 2]:
            with contextlib.suppress(Exception):  # whatever a template raises, it refuses it
                for turn in self._skeleton_of(probe).turns.values():
                    tokens.update(self.special_pattern.findall(turn.closing)[-1:])
        return tokens

    def _apply(
        self,
        messages: Sequence[Message],
        *,
        tools: str,
        generation_prompt: bool = False,
        form: CallForm | None = None,
    ) -> str:
        """What the template makes of messages."""
        form = form or (self._call_form if any(message.calls for message in messages) else None)
        dicts: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        for message in messages:
            value: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.thought:
                value |= dict.fromkeys(("reasoning_content", "thinking"), message.thought)
            if message.calls and form is not None:
                value |= {"content": message.content or form.no_words, "tool_calls": []}
                for call in message.calls:
                    names[call["id"]] = call["name"]
                    function = {"name": call["name"], "arguments": call["arguments"]}
                    if form.as_text:
                        function["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
                    value["tool_calls"].append(
                        {"id": call["id"], "type": "function", "function": function}
                    )
            elif message.call_id in names:
                value |= {"tool_call_id": message.call_id, "name": names[message.call_id]}
            dicts.append(value)
        # Templates take tools as OpenAI's API does: a bare function stands in an object.
        functions = [
            {"type": "function", "function": tool}
            if "name" in tool and "function" not in tool
            else tool
            for tool in json.loads(tools or "[]")
        ]
        text = self._tokenizer.apply_chat_template(
            dicts,
            tools=functions or None,
            chat_template=self._template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    # Special tokens in data

    def _hidden(self, text: str) -> str:
        """The text with another first character in each special token, which no template reads."""
        return self.special_pattern.sub(
            lambda match: chr(_HIDDEN + self._special.index(match[0])) + match[0][1:], text
        )

    def _restored(self, rendering: Rendering) -> Rendering:
        """The rendering with the special tokens that were hidden, as literal text."""
        literal: list[Span] = []

        def first_character(match: re.Match[str]) -> str:
            token = self._special[ord(match[0]) - _HIDDEN : ord(match[0]) - _HIDDEN + 1]
            if not token or not rendering.text.startswith(token[0][1:], match.end()):
                return match[0]  # a character of the data
            literal.append((match.start(), match.start() + len(token[0])))
            return token[0][0]

        text = _HIDDEN_FIRST.sub(first_character, rendering.text)
        return replace(rendering, text=text, literal=tuple(literal))

    # What the template writes around data

    def _skeleton_of(self, conversation: Conversation) -> Skeleton:
        """The skeleton of the shape of a conversation; raises what the template raises."""
        shape = [
            (m.role, bool(m.content.strip()), m.call_id, [call["name"] for call in m.calls])
            for m in conversation.messages
        ]
        key = (str(shape), conversation.tools)
        if key not in self._skeletons:
            if len(self._skeletons) > 1000:  # tools may differ in every record
                self._skeletons.clear()
            try:
                self._skeletons[key] = self._skeleton(conversation)
            except Exception as error:  # whatever a template raises, it refuses this shape
                self._skeletons[key] = error
        skeleton = self._skeletons[key]
        if isinstance(skeleton, Exception):
            raise skeleton.with_traceback(None)  # else it grows with every row
        return skeleton

    def _skeleton(self, conversation: Conversation, form: CallForm | None = None) -> Skeleton:
        """Raises _NotWritten if the template leaves out a part of a message or the tools, or writes
        it twice."""
        tools = conversation.tools
        marked = [_marked(message, i) for i, message in enumerate(conversation.messages)]

        def apply(messages: list[Message], tools: str = tools, prompt: bool = False) -> str:
            return self._apply(messages, tools=tools, generation_prompt=prompt, form=form)

        text = apply(marked)
        parts = _MARKS.split(text)
        pieces, order = parts[::3], [int(number) for number in parts[1::3]]
        for i, message in enumerate(marked):
            expected = len(message.calls) + (1 if message.content else 0)
            if order.count(i) != expected:
                fault = "leaves out" if order.count(i) < expected else "repeats"
                part = "words or a call of turn" if message.calls else "turn"
                raise _NotWritten(f"it {fault} {part} {i + 1} ({message.role})")
        if tools and text == apply(marked, ""):
            raise _NotWritten("it does not write the tools")
        turns: dict[int, Turn] = {}
        last = len(marked) - 1
        for i, message in enumerate(marked):
            if message.role != "assistant":
                continue
            first, stop = order.index(i), len(order) - order[::-1].index(i)
            if first == 0 or {*order[first:stop]} != {i} or order[first - 1] != i - 1:
                raise _NotWritten(f"turn {i + 1} is not written after turn {i}")
            prompt = _MARKS.split(apply(marked[:i], prompt=True))[-1]
            closing = _MARKS.split(apply(marked[: i + 1]))[-1]
            after = pieces[stop]
            if i == last:
                after = self._after_last(marked, apply)
            turns[i] = Turn(pieces[first], prompt, self._closing(closing, after, last=i == last))
            if prompt and not _common(prompt, pieces[first]):
                raise _NotWritten(f"turn {i + 1} does not begin as the generation prompt does")
        end_missing = not self.special_pattern.search(turns[last].closing)
        return Skeleton(tuple(order), tuple(pieces), turns, end_missing)

    def _after_last(self, marked: list[Message], apply: Callable[[list[Message]], str]) -> str:
        """What stands behind the last turn where another follows; empty where none can."""
        following = _marked(Message("user", "a"), len(marked))
        try:
            return _MARKS.split(apply([*marked, following]))[-4]
        except Exception:  # whatever a template raises, no other turn follows
            return ""

    def _closing(self, closing: str, after: str, *, last: bool) -> str:
        """The end of a turn: ``closing`` where it is the last one, up to the last special token
        that also ends it where another turn follows (``after``)."""
        ends = [match.end() for match in self.special_pattern.finditer(closing)]
        for end in reversed(ends):
            if after.startswith(closing[:end]):
                return closing[:end]
        if last:
            return closing[: ends[0]] if ends else closing.rstrip()
        # Without a token of its own, a turn ends with that of the next one.
        following = self.special_pattern.match(after, len(closing))
        if not ends and following and after.startswith(closing):
            return after[: following.end()]
        return _CUT_TAG.sub("", _common(closing, after)).rstrip()

    def _located(
        self, conversation: Conversation, skeleton: Skeleton, text: str, notes: Counter[str]
    ) -> Rendering:
        """The spans of a conversation whose data a template does not write as it is: tool calls,
        and thoughts, which many drop in earlier turns. Each turn of the assistant is found by
        rendering the conversation with markers in it: what is before and behind it stays.

        The last answer has its thought, also with a template that drops every one."""
        messages, tools = conversation.messages, conversation.tools
        completions: list[Span] = []
        for i, turn in skeleton.turns.items():
            before, content, following = messages[:i], messages[i].content, messages[i + 1 :]
            marked = self._apply((*before, _marked(messages[i], i), *following), tools=tools)
            marks = list(_MARKS.finditer(marked))
            start, after = marks[0].start(), marked[marks[-1].end() :]
            begin = start - len(turn.before)
            inline = _THOUGHT.match(content)
            thought = (messages[i].thought or (inline[1] if inline else "")).strip()
            answer = content[inline.end() if inline else 0 :]
            token = max((m.start() for m in self.special_pattern.finditer(turn.closing)), default=0)
            rest = after[token:]
            written = text[begin : len(text) - len(rest)]
            if thought and written.count(thought) <= (turn.before + answer).count(thought):
                if following:
                    notes[LOST_THOUGHTS] += 1
                elif not inline:
                    raise _NotWritten(f"it leaves out the thought of turn {i + 1}")
                else:
                    lead = content[: inline.end()]
                    opened = turn.prompt[len(_common(turn.before, turn.prompt)) :]
                    if opened.strip() == "<think>":
                        lead = opened + content[inline.start(1) : inline.end()].lstrip()
                    text = self._apply((*before, replace(messages[i], content=answer)), tools=tools)
                    text = text[:start] + lead + text[start:]
            same = text.startswith(marked[:begin]) and text.endswith(rest)
            if marked[begin:start] != turn.before or not after.startswith(turn.closing) or not same:
                raise _NotWritten(
                    f"what it writes around turn {i + 1} depends on the words of the turn, so what "
                    "is learned of it cannot be told"
                )
            end = len(text) - len(rest) + len(turn.closing) - token
            completions.append((turn.start(text, begin), end))
        return Rendering(text, tuple(completions), skeleton.end_missing)


_DATE = re.compile(r"""\bstrftime_now\(\s*(['"])(.*?)\1\s*\)""")
_days: list[Date] = []


def write_day(day: Date) -> None:
    """Let templates write this day in this process, that on which a run began, and not today."""
    _days[:] = [day]


def day_written(template: str) -> str | None:
    """The day that a template writes, if it writes the one on which it is rendered."""
    return str(_day()) if "strftime_now(" in template else None


def _day() -> Date:
    return _days[0] if _days else Date.today()


def _numbered(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with ids of calls and of their results that every template takes."""
    open_calls: dict[str, str] = {}
    number = 0
    for message in messages:
        if message.calls:
            calls, open_calls = [], {}
            for call in message.calls:
                number += 1
                call_id = f"call{number:05}"
                open_calls[call.get("id") or call_id] = call_id
                calls.append({**call, "id": call_id})
            message = replace(message, calls=tuple(calls))
        elif message.role == "tool":
            first_open = next(iter(open_calls), "")
            answered = message.call_id if message.call_id in open_calls else first_open
            message = replace(message, call_id=open_calls.pop(answered, ""))
        yield message


def _marked(message: Message, number: int) -> Message:
    """The message with markers in the place of its data: of what it says, and of each call."""
    calls = tuple(
        {**call, "arguments": {"key": _MARK.format(number, 1 + k)}}
        for k, call in enumerate(message.calls)
    )
    words = _MARK.format(number, 0) if message.content.strip() or not calls else ""
    return Message(message.role, words, calls=calls, call_id=message.call_id)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with each text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(part, change) for part in value]
    if isinstance(value, dict):
        return {change(key): _changed(part, change) for key, part in value.items()}
    return value
