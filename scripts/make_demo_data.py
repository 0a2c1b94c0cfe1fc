"""Makes the bundled demo set: instructions that a small model learns from scratch in a minute.

    python scripts/make_demo_data.py [--output llmx/assets/demo]

Writes ``train.jsonl``, ``eval.jsonl``, ``preferences/`` and ``tokenizer/``. Seeded: the same bytes
every time (a test compares them with the bundled ones).

Why it proves something: the held-out questions are new. Either their answer lies in the
question itself (who has the kite, what colour is the boat), so that it can only be found by
reading, or a known item is asked for in a phrasing that it was never seen in. No held-out
question is a training question.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

SEED = 20
TRAIN_ROWS = 6000
EVAL_ROWS = 160
PAIR_ROWS = 1000
VOCABULARY = 1024

NAMES = (
    "Anna Ben Carla David Emma Felix Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul "
    "Rosa Sam Tina Victor"
).split()
THINGS = (
    "ball kite boat book lamp drum bell cup hat coat chair clock key map ring shoe spoon "
    "table train wagon"
).split()
COLOURS = "red blue green yellow black white brown pink purple orange grey golden".split()
PLACES = "garden kitchen attic cellar hall barn shed school church office".split()
STORIES = (
    "{name} put a {colour} {thing} in the {place}.",
    "In the {place} {name} left a {colour} {thing}.",
    "Yesterday {name} took a {colour} {thing} to the {place}.",
    "There is a {colour} {thing} in the {place}, put there by {name}.",
)
WORDS = (
    "maple river cloud stone candle sunset winter bridge silver forest meadow harbour "
    "window mountain shadow thunder pepper velvet island feather copper marble lantern "
    "castle breeze acorn valley willow ember comet"
).split()
SEQUENCES = (
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "January February March April May June July August September October November December".split(),
    "one two three four five six seven eight nine ten eleven twelve".split(),
)
OPPOSITES = [
    pair.split("-")
    for pair in (
        "hot-cold big-small fast-slow high-low old-young hard-soft wet-dry full-empty "
        "open-closed early-late light-dark long-short rich-poor thick-thin loud-quiet "
        "strong-weak happy-sad sweet-sour near-far clean-dirty day-night up-down left-right "
        "inside-outside"
    ).split()
]
KINDS = {
    "bird": "robin eagle swan owl crow pigeon heron gull".split(),
    "fish": "salmon trout shark tuna herring carp cod pike".split(),
    "fruit": "pear apple plum cherry lemon grape peach banana".split(),
    "tool": "hammer saw drill wrench chisel pliers spade axe".split(),
    "tree": "oak birch pine cedar elm ash beech spruce".split(),
    "instrument": "violin flute piano guitar trumpet harp cello organ".split(),
}
AFTER = (
    "What comes after {}?",
    "Which one follows {}?",
    "Name the one right after {}.",
    "Tell me what is next after {}.",
    "After {} comes what?",
    "{} is followed by what?",
)
BEFORE = (
    "What comes before {}?",
    "Which one precedes {}?",
    "Name the one right before {}.",
    "Tell me what is just before {}.",
    "Before {} comes what?",
    "{} is preceded by what?",
)
OPPOSITE = (
    "What is the opposite of {}?",
    "Give me the opposite of {}.",
    "Name the opposite of {}.",
    "Which word means the opposite of {}?",
    "{} is the opposite of what?",
    "Tell me the opposite of {}.",
)
KIND = (
    "What kind of thing is a {}?",
    "A {} is what kind of thing?",
    "Name the kind of thing that a {} is.",
    "Tell me what kind of thing a {} is.",
    "What is a {}?",
    "Say what a {} is.",
)
OPENINGS = ("", "Please tell me: ", "I forgot. ", "A quick question. ")
Question = tuple[str, str]


def known_items() -> list[Question]:
    """Every known item in every phrasing; the held-out ones are combinations never trained."""
    questions: list[Question] = []
    for sequence in SEQUENCES:
        for first, second in itertools.pairwise(sequence):
            after, before = f"After {first} comes {second}.", f"Before {second} comes {first}."
            questions += [(phrase.format(first), after) for phrase in AFTER]
            questions += [(phrase.format(second), before) for phrase in BEFORE]
    for pair in OPPOSITES:
        for one, other in (pair, pair[::-1]):
            answer = f"The opposite of {one} is {other}."
            questions += [(phrase.format(one), answer) for phrase in OPPOSITE]
    for kind, members in KINDS.items():
        for member in members:
            answer = f"The {member} is a kind of {kind}."
            questions += [(phrase.format(member), answer) for phrase in KIND]
    return [
        (opening + question[0].upper() + question[1:], answer)
        for question, answer in questions
        for opening in OPENINGS
    ]


def read_story(rng: random.Random) -> Question:
    name, colour = rng.choice(NAMES), rng.choice(COLOURS)
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    story = rng.choice(STORIES).format(name=name, colour=colour, thing=thing, place=place)
    question, answer = rng.choice(
        (
            ("What colour is it?", f"It is {colour}."),
            ("Where is it now?", f"It is in the {place}."),
            ("Who put it there?", f"It was {name}."),
            ("What did they put there?", f"They put a {thing} there."),
        )
    )
    return f"{story} {question}", answer


def one_of_a_kind(rng: random.Random) -> Question:
    kinds = rng.sample(sorted(KINDS), 2)
    members = [rng.choice(KINDS[kind]) for kind in kinds]
    asked = rng.randrange(2)
    question = f"Which of these is a kind of {kinds[asked]}: {', '.join(members)}?"
    return question, f"The {members[asked]} is a kind of {kinds[asked]}."


def repeated(rng: random.Random) -> Question:
    word, (number, times) = rng.choice(WORDS + THINGS), rng.choice((("two", 2), ("three", 3)))
    phrase = rng.choice(
        ("Say the word {} {} times.", "Repeat the word {} {} times.", "Write {} {} times.")
    )
    return phrase.format(word, number), " ".join([word] * times)


def swapped(rng: random.Random) -> Question:
    one, other = rng.sample(WORDS, 2)
    return f"Swap the two words: {one}, {other}.", f"{other}, {one}."


def place_in_list(rng: random.Random) -> Question:
    words = rng.sample(WORDS, rng.randint(3, 5))
    place, index = rng.choice((("first", 0), ("last", -1)))
    question = f"What is the {place} word of this list: {', '.join(words)}?"
    return question, f"The {place} word is {words[index]}."


def reversed_list(rng: random.Random) -> Question:
    words = rng.sample(WORDS, 3)
    return f"Reverse the order: {', '.join(words)}.", f"{', '.join(reversed(words))}."


FAMILIES = (
    read_story,
    one_of_a_kind,
    place_in_list,
    read_story,
    repeated,
    one_of_a_kind,
    swapped,
    reversed_list,
)


def generated(rng: random.Random, taken: set[str]) -> Iterator[Question]:
    """Endless questions whose answer lies in the question; none that is already ``taken``."""
    for family in itertools.cycle(FAMILIES):
        for _ in range(1000):
            text, answer = family(rng)
            question = (rng.choice(OPENINGS) + text, answer)
            if question[0] not in taken:
                break
        else:
            continue
        taken.add(question[0])
        yield question


def make_rows() -> tuple[list[Question], list[Question]]:
    """(train, eval) questions with answers, shuffled; no question is in both."""
    rng = random.Random(SEED)
    known = known_items()
    rng.shuffle(known)
    known = known[: TRAIN_ROWS // 3]
    half = EVAL_ROWS // 4
    fresh = generated(rng, taken={question for question, _ in known})
    held_out = known[:half] + list(itertools.islice(fresh, EVAL_ROWS - half))
    train = known[half:] + list(itertools.islice(fresh, TRAIN_ROWS - len(known) + half))
    rng.shuffle(held_out)
    rng.shuffle(train)
    return train, held_out


def make_pairs(train: list[Question]) -> list[tuple[str, str, str]]:
    """(question, right answer, wrong answer that begins alike), for a reward model."""
    rng = random.Random(SEED)
    alike: dict[str, list[str]] = {}
    for _, answer in train:
        alike.setdefault(" ".join(answer.split()[:2]), []).append(answer)
    pairs = []
    for question, answer in train:
        wrong = rng.choice(alike[" ".join(answer.split()[:2])])
        if wrong != answer:
            pairs.append((question, answer, wrong))
    return pairs[:PAIR_ROWS]


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL_TOKENS = (
    "<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
)  # fmt: skip


def make_tokenizer(texts: list[str], directory: Path) -> None:
    """A byte-level BPE (no text is unknown to it) in which most words are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # A word is the same token at the start of a turn and inside a sentence.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Strip(content=" ", left=1, right=0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "pad_token": "<|pad|>",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def write_rows(path: Path, rows: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    lines = [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "llmx" / "assets" / "demo"
    parser.add_argument("--output", type=Path, default=default)
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    train, held_out = make_rows()
    write_rows(output / "train.jsonl", train, ("prompt", "response"))
    write_rows(output / "eval.jsonl", held_out, ("prompt", "response"))
    (output / "preferences").mkdir(exist_ok=True)
    write_rows(
        output / "preferences" / "pairs.jsonl", make_pairs(train), ("prompt", "chosen", "rejected")
    )
    make_tokenizer([text for row in train for text in row], output / "tokenizer")
    print(f"{len(train)} training and {len(held_out)} held-out rows in {output}")


if __name__ == "__main__":
    main()
