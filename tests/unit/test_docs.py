"""Every command in README.md and docs/ works: it composes, and its flags and keys are known.

What a training is started with is planned; commands that read a run get a planned one. Nothing
is launched, nothing asks the network. Files that the reader is to have (``chats.jsonl``) are made.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override

from llmx.__main__ import main
from llmx.cli import sweeps
from llmx.cli.commands import COMMANDS
from llmx.cli.help import ENVIRONMENT
from llmx.cli.hydra_app import composed, composed_for
from llmx.cli.words import parse, split_command
from llmx.compose.complete import complete, plan_experiment
from llmx.config import OptimConfig
from llmx.config.groups import CONF, GROUPS, options
from llmx.config.reference import keys, sections
from llmx.data.source.files import DEMO_DIRECTORY
from llmx.run.sweepdir import load
from llmx.sweep.best import write_best
from llmx.train.schedule import lr_at
from tests import sweepdirs
from tests.rundirs import TINY_LLAMA

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHATS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
PREFERENCE = {"prompt": "a", "chosen": "b", "rejected": "c"}
STAND_FOR_A_RUN = re.compile(r"(user@host:)?(RUN\w*|outputs/\w+|/runs/demo|runs/demo)")

STAND_FOR_A_SWEEP = re.compile(r"SWEEP_DIR|outputs/sweeps/\w+")


def commands() -> Iterator[tuple[str, list[str]]]:
    """``(page, words)`` of each command, from code blocks and from between backquotes."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        blocks += re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
        for block in blocks:
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                found = re.match(r"\s*(?:\$ )?(?:exec )?(python -m llmx|llmx)( .*|$)", line)
                if found:
                    yield page.name, shlex.split(found[2], comments=True)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for said in re.findall(r"`python -m llmx( [^`]+)?`", prose):
            yield page.name, shlex.split(said)


def concrete(words: list[str]) -> bool:
    """Whether it can be typed as it stands: no ``...``, no word in capitals for a name."""
    placeholders = {"KEY", "GROUP", "GROUP=OPTION", "COMMAND", "NAME", "$@", "[command]"}
    return not any("..." in word or word in placeholders or word[:1] in "[$" for word in words)


ALL = list(dict.fromkeys((page, tuple(words)) for page, words in commands()))
TYPED = [(page, words) for page, words in ALL if concrete(list(words))]


def test_every_task_stands_in_the_readme_with_its_command() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| `(python -m llmx .*)` \|$", PAGES[0].read_text(), re.M)
    named = {name for name, command in rows if name == "sft" or f"task={name} " in command}
    assert named >= {path.stem for path in (CONF / "task").glob("*.yaml")}


def test_every_experiment_has_a_card() -> None:
    """With a command of it, its hardware, its plan and what was measured."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    cards = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", text, re.M | re.S))
    assert set(cards) == {path.stem for path in (CONF / "experiment").glob("*.yaml")}
    for name, card in cards.items():
        assert re.search(rf"^python -m llmx .*experiment={name}\b", card, re.M), name
        parts = re.findall(r"^- \*\*(\w+)\*\*: ", card, re.M)
        assert parts == ["Hardware", "Plan", "Measured"], name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the reader is said to have: data, a cluster, a run."""
    place = tmp_path_factory.mktemp("reader")
    tasks = (ROOT / "docs" / "custom-tasks.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (hardware,) = [block for block in blocks if "hosts:" in block]
    chats = ("chats", "clean", "questions", "benchmark", "prompts", "a", "mixed", "PATH/rows")
    tokenizers = ("mine", "bert", "docs")
    for name, content in {
        **{f"{name}.jsonl": CHATS for name in chats},
        **dict.fromkeys(("train.tsv", "dev.tsv"), "label\ttext_a\n1\tgood\n0\tbad\n"),
        **{f"tokenizers/{name}/tokenizer.json": "{}" for name in tokenizers},
        "corpus.txt": CHATS,
        "corpus/one.txt": "Some text.\n",
        "llmx/data/support.yaml": f"path: {place}/chats.jsonl\n",
        "clusters/hardware/mine.yaml": hardware,
        "my.yaml": "grid: {zero: [stage1, stage2]}\n",
        "my_tasks.py": re.findall(r"^```python\n(.*?)^```", tasks, re.M | re.S)[0],
        "my_env.py": "class Calculator: pass\n",
        "my_rewards.py": "def short(prompt, completion, reference): return 1.0\n",
        "my_metrics.py": "",
        "mine.jsonl": '{"prompt": "a", "completion": "b"}\n',
        "pairs.jsonl": json.dumps(PREFERENCE) + "\n",
        "queries.jsonl": '{"query": "a", "positive": "b"}\n',
        "rows.jsonl": '{"prompt": "a", "response": "b", "label": true}\n',
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)
    (place / "run").mkdir()
    rows = [json.loads(line) for line in CHATS.splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "b.parquet")
    for name in ("first", "sums"):  # models of earlier commands of the tutorials
        model = place / "outputs" / name / "model"
        shutil.copytree(DEMO_DIRECTORY / "tokenizer", model)
        config = {"model_type": "llama", **TINY_LLAMA, "max_position_embeddings": 1024}
        (model / "config.json").write_text(json.dumps({"vocab_size": 1088, **config}))
        (model / "model.safetensors").touch()
    sweepdirs.rates(place / "rates")
    return place


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("LLMX_OUTPUTS", str(place / "outputs"))
    if not (place / "run" / "config.yaml").exists():
        small = ["hardware=cpu2", f"run_dir={place / 'run'}"]
        assert main(["plan", *small]) == 0
        shutil.copyfile(place / "run" / "config.yaml", place / "config.yaml")
        assert main([*small[:1], "dry_run=true"]) == 0  # one under outputs/, which `status` lists
        grid = ["zero=stage1,stage2", "hydra.sweep.dir=outputs/sweeps/x", "dry_run=true"]
        assert main(["-m", *grid, *small[:1]]) == 0
        sweep = load(place / "outputs" / "sweeps" / "x")
        for trial in sweep.trials:
            trial.outcome, trial.loss = "ok", 1.0
        sweep.objective = "train/loss"
        write_best(sweep)
        assert sweep.best
    return place


def test_commands_are_found() -> None:
    assert len(TYPED) > 30
    assert {page for page, _ in TYPED} >= {"README.md", "data.md", "reproduce.md", "reliability.md"}
    left_out = [words for page, words in ALL if not concrete(list(words))]
    assert len(left_out) < 20, left_out
    # The first one needs no cluster, no model, no data.
    first = re.findall(r"^```sh\n(\S.*?)\s*(?:#.*)?$", PAGES[0].read_text(), re.MULTILINE)[0]
    assert first == "make demo"


def is_many(words: tuple[str, ...]) -> bool:
    """Whether it plans many trials, which takes seconds."""
    return words[:1] in (("-m",), ("sweep",), ("tune",)) and words[:2] != ("sweep", "resume")


EACH = [(page, words) for words, page in {words: page for page, words in reversed(TYPED)}.items()]
"""Each command once, with the first page that has it."""
MANY = [(page, words) for page, words in EACH if is_many(words)]


def name(command: tuple[str, tuple[str, ...]]) -> str:
    page, words = command
    return f"{page}:{' '.join(words)[:60]}"


@pytest.mark.parametrize(
    ("page", "words"),
    [
        pytest.param(*one, id=name(one), marks=pytest.mark.nightly if one in MANY else [])
        for one in EACH
    ],
)
def test_the_command_works(page: str, words: tuple[str, ...], here: Path, capsys) -> None:
    if words[:2] == ("sweep", "resume"):  # of a sweep that is planned alone, as all here
        assert main(list(words)) == 0
        return
    typed = ["rates" if STAND_FOR_A_SWEEP.fullmatch(word) else word for word in words]
    typed = [STAND_FOR_A_RUN.sub("run", w) if STAND_FOR_A_RUN.fullmatch(w) else w for w in typed]
    typed = [word.replace("~", str(here)).replace("DIR", str(here / "clusters")) for word in typed]
    command, rest = split_command(typed, COMMANDS)
    rest = rest[: rest.index("--")] if "--" in rest else rest  # behind it: another program's words
    flags = {word.name for word in COMMANDS[command].words}
    if any(word in ("--help", "--version", "--cfg", "--info") for word in rest):
        assert main(typed) == 0
    elif command in ("train", "plan", "sweep", "tune"):
        # On the machine of the tests `hardware=local` has no GPU.
        gpus = ["hardware=a100x8"] if "adapter=qlora" in typed else []
        several = any(re.match(rf"({'|'.join(GROUPS)})=.*,", word) for word in rest)
        pairs = all(re.match(r"[^-].*=", word) for word in rest)
        if command in ("train", "plan") and pairs and not several:
            is_planned([*rest, *gpus])
        else:
            assert main([*typed, *gpus, "dry_run=true"]) == 0, capsys.readouterr().err
    elif COMMANDS[command].own_process and COMMANDS[command].overrides:
        composed_for(command, parse(command, rest))
    elif command in ("help", "completion"):
        assert main(typed) == 0
    elif command in ("resume", "reproduce") and rest:  # else only its name is said
        own = [word for word in rest if f"{word.split('=')[0]}=" in flags]
        kept = [w for w in rest if w not in own or w.startswith(("dry_run", "to_step"))]
        assert main([command, *kept, *["dry_run=true"] * ("dry_run=true" not in kept)]) == 0
    elif command == "status":  # the others that read a run need one that was trained
        assert main([command, *(word for word in rest if word != "--json")]) == 0
    if command not in ("train", "plan", "sweep", "tune"):
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert given <= flags | {"--config-dir", "--help"}, page


def is_planned(words: list[str]) -> None:
    """Checked, composed and planned as a training is, without a run directory."""
    exp, _, _ = composed(parse("train", words))
    assert plan_experiment(*complete(exp)).plan.world_size


@pytest.mark.parametrize(("page", "words"), MANY, ids=map(name, MANY))
def test_the_first_of_many_trials_composes(
    page: str, words: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By night all of them are planned."""
    typed: list[str] = []
    monkeypatch.setattr(sweeps, "train", lambda made: typed.extend(made.overrides) or 0)
    if words[0] == "-m":
        typed.extend(words)
    else:
        command, rest = split_command(words, COMMANDS)
        assert {"sweep": sweeps.sweep, "tune": sweeps.tune}[command](parse(command, rest)) == 0
    overrides = OverridesParser.create().parse_overrides(
        [word for word in typed if not word.startswith("-")]
    )

    def first_of(each: Override) -> str:
        value = each.value()
        if isinstance(value, Glob):
            return value.filter(list(options(each.key_or_group)))[0]
        return next(each.sweep_string_iterator())

    first = [
        f"{each.key_or_group}={first_of(each)}" if each.is_sweep_override() else each.input_line
        for each in overrides
    ]
    assert first != [each.input_line for each in overrides] or words[0] == "tune"
    is_planned([word for word in first if not word.startswith("sweep.")])  # read by a sweep alone


def test_links_go_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_plan_in_the_readme_fits(here: Path, capsys) -> None:
    for page, words in TYPED:
        if page == "README.md" and words[:1] == ("plan",):
            typed = [word.replace("~", str(here)) for word in words]
            assert main(typed) == 0
            assert "does not fit" not in capsys.readouterr().out, words


def test_keys_that_are_named_exist() -> None:
    """``optim.lr`` between backquotes in a guide is a key of the schema."""
    names = {key.name for key in keys()} | set(sections())
    mappings = tuple(f"{key.name}." for key in keys() if key.type.startswith("mapping"))
    groups = {name.split(".")[0] for name in names if "." in name}
    variables = {name for table in ENVIRONMENT.values() for name in table}
    pattern = rf"`((?:{'|'.join(groups)})\.[a-z_.]+[a-z_])(?:=[^`]*)?`"
    for page in [p for p in PAGES if p.name != "contracts.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for name in re.findall(pattern, text):
            a_file = re.search(r"\.(json|yaml|py|md|png|html|jsonl|gz|onnx|csv)$", name)
            assert a_file or name in names or name.startswith(mappings), f"{page.name}: {name}"
        for name in re.findall(r"\bLLMX_[A-Z_]+\b", text):
            assert name in variables, f"{page.name}: {name}"


def test_the_schedule_in_the_guide_is_the_one_that_trains() -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| llmx \| (.*) \|$", text, re.MULTILINE)
    optim = OptimConfig(lr=1.0, warmup_steps=4, schedule="linear")
    rates = [f"{lr_at(step, optim=optim, total=12):.3g}" for step in range(12)]
    assert row.split(" | ") == rates


def test_the_site_and_its_index_list_every_page() -> None:
    """``mkdocs.yml`` has what docs/README.md links; decision records are found through theirs."""
    listed: list[str] = []
    for section in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]:
        for page in next(iter(section.values())):
            listed.append(page if isinstance(page, str) else next(iter(page.values())))
    index = ROOT / "docs" / "README.md"
    links = re.findall(r"\]\(([^)#]+\.md)\)", index.read_text())
    linked = {os.path.relpath(index.parent / link, ROOT) for link in links}
    pages = {str(page.relative_to(ROOT)) for page in PAGES if page.parent.name != "adr"}
    assert pages <= set(listed)
    assert pages <= linked | {"docs/README.md", "README.md"}
    made = {"docs/config.md", "docs/failures.md"}  # by `make site`, from the code
    assert all((ROOT / page).is_file() for page in set(listed) - made)


def test_the_chinese_readme_has_the_headings_and_commands_of_the_english_one() -> None:
    """Order and level of headings, each line of a code block without its comment, each command of
    a table, each page that is linked."""

    def outline(text: str) -> dict[str, list[str]]:
        lines = [line for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
                 for line in block.splitlines()]  # fmt: skip
        return {
            "headings": re.findall(
                r"^(#+) ", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M
            ),
            "lines": [code for line in lines if (code := line.split("#")[0].strip())],
            "commands": re.findall(r"\| (`python -m llmx [^|]*`) \|", text),
            "pages": sorted(set(re.findall(r"\]\((docs/[\w/.-]+)", text))),
        }

    english = outline((ROOT / "README.md").read_text(encoding="utf-8"))
    chinese = outline((ROOT / "README.zh.md").read_text(encoding="utf-8"))
    for part, expected in english.items():
        assert chinese[part] == expected, f"README.zh.md: other {part} than README.md"
