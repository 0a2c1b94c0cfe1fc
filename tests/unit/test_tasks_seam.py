"""Nothing that drives, watches or shows a run names a task or what one task alone measures.

Beside the import contracts (``pyproject.toml``) this reads the code itself: a task can also be
named by a text. Docstrings and comments may name tasks, as examples.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmx.compose.task_rules import task_problems
from llmx.config import Experiment, ModelConfig
from llmx.config.tasks import DIRECTORY, shipped_tasks
from llmx.errors import ConfigError
from llmx.tasks import Task, task_class, task_of, tokenizer_of
from tests.reference import word_tokenizer

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("train", "launch", "observe", "tracking", "lifecycle"),
    *("checkpoint", "run", "plan", "compose", "hardware", "models", "worker.py"),
)
ADVISING = ("config", "data", "cli")
"""Packages whose help, examples and messages may name tasks ("Use task=pretrain"). What they do may
not depend on a name."""
FOREIGN = "llmx/config/foreign.py"
"""What other tools call their kinds of training, and the task that it is here."""
ALLOWED = {
    # The default of the config's `task.kind`.
    ("llmx/config/tasks.py", "sft"),
    # A name of a column in other people's data.
    ("llmx/data/format/formats.py", "reward"),
    # A metric of completions that eval computes for every task.
    ("llmx/cli/evaluate.py", "exact_match"),
    # Files of runs that earlier versions wrote, before tasks declared their metrics.
    ("llmx/run/metrics/declared.py", "exact_match"),
    # A library of metrics of texts, which any task may use.
    ("llmx/run/metrics/completions.py", "exact_match"),
    # What modules of networks are called.
    ("llmx/train/engine/optimizer.py", "embed"),
    # What to type where `rollout` has no effect.
    ("llmx/compose/effects.py", "grpo"),
}


KINDS = shipped_tasks()


def test_every_task_is_a_file_that_says_its_name() -> None:
    """And a group file of the same name, which is what ``task=NAME`` takes."""
    assert KINDS[0] == "sft"
    assert {"sft", "pretrain"} <= set(KINDS)
    for kind in KINDS:
        assert issubclass(task_class(kind), Task)
        assert task_class(kind).__module__ == f"llmx.tasks.{kind}"
        assert f"kind: {kind}\n" in (ROOT / "conf" / "task" / f"{kind}.yaml").read_text()


def of_one_task() -> set[str]:
    """Kinds, class names, and names of metrics that no other word is like (``exact_match``)."""
    names = set(KINDS) | {task_class(kind).__name__ for kind in KINDS}
    for kind in KINDS:
        source = (DIRECTORY / f"{kind}.py").read_text(encoding="utf-8")
        names |= set(re.findall(r'"(\w+_\w+)": Metric\(', source))
    return names


def named(source: str, names: set[str], *, advising: bool = False) -> Iterator[tuple[int, str]]:
    """(line, name) of each of ``names`` in code: in a text, an import, or as a name.

    ``advising``: a text that has more words than the name is help, or a message.
    """
    tree = ast.parse(source)
    # A text of its own: the docstring of a module, a class, a function or an attribute.
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                passed = id(node) in docstrings or (advising and text not in names)
                words, is_function = [] if passed else re.findall(r"\w+", text), False
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.keyword(arg=str(word)):
                words, is_function = [word], True
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                text = f"{getattr(node, 'module', '')} {' '.join(one.name for one in imported)}"
                words, is_function = re.findall(r"\w+", text), "llmx.tasks" not in text
            case _:
                continue
        for word in words:
            # A function may well be called `classify`.
            if word in names and not (is_function and word in KINDS):
                yield node.lineno, word


def test_nothing_that_drives_tasks_names_one() -> None:
    names = of_one_task()
    assert {"sft", "pretrain", "Sft", "Pretrain", "macro_f1"} <= names
    of_code = 'from llmx.tasks import sft\ndef f():\n    """Of sft."""\n    return kind == "sft"'
    assert list(named(of_code, names, advising=True)) == [(1, "sft"), (4, "sft")]
    assert not list(named('raise ConfigError("Use task=sft.")', names, advising=True))
    found = []
    for package in (*PACKAGES, *ADVISING):
        place = ROOT / "llmx" / package
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            if where.startswith(FOREIGN):
                continue
            source = path.read_text(encoding="utf-8")
            for line, name in named(source, names, advising=package in ADVISING):
                if (where, name) not in ALLOWED:
                    found.append(f"{where}:{line}: names {name!r}")
    assert not found, (
        "\n".join(found) + "\nA task is known to its own file alone. Let it declare what is needed "
        "here (llmx/tasks/base.py), and ask for that."
    )


def test_what_a_task_learns_decides_its_chat_template() -> None:
    """Not a list of names, which a task of one's own would be missing from."""
    learns = {kind for kind in KINDS if task_class(kind).learns_chats()}
    assert {"sft", "dpo", "reward"} <= learns
    assert learns.isdisjoint({"pretrain", "mlm", "classify"})
    assert Task.learns_chats(), "by default conversations are taken"


class Own(Task):
    """A task of a user's own; this is where the ranks find it."""

    def problems(self) -> list[str]:
        seq_len = self.exp.data.seq_len
        return [f"data.seq_len={seq_len}: too short."] if seq_len < 9 else []


def test_a_task_of_ones_own_has_the_chat_template_and_its_own_rules(tmp_path: Path) -> None:
    word_tokenizer().save_pretrained(tmp_path)
    exp = Experiment(model=ModelConfig(tokenizer=str(tmp_path)))
    exp.task.kind = "pretrain"
    assert tokenizer_of(exp).chat_template is None
    exp.task.kind = f"{__name__}:Own"
    assert "<|im_start|>" in tokenizer_of(exp).chat_template
    assert isinstance(task_of(exp, None), Own)
    exp.data.seq_len = 8
    assert task_problems(exp) == [], "it is not imported where the config is composed"
    with pytest.raises(ConfigError, match="seq_len=8: too short"):
        task_of(exp, None)


def test_a_task_is_asked_for_its_networks_without_torch() -> None:
    """So that a config is composed in a moment."""
    code = (
        "import sys\n"
        "from llmx.compose.task_rules import specs\n"
        "from llmx.config import Experiment, TaskConfig\n"
        "from llmx.config.tasks import shipped_tasks\n"
        "for kind in shipped_tasks():\n"
        "    options = {'teacher': 'a/b'} if kind == 'distill' else {}\n"
        "    assert specs(Experiment(task=TaskConfig(kind=kind, options=options))), kind\n"
        "    assert not {'torch', 'transformers'} & sys.modules.keys(), kind\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("member", "base"),
    [
        ("rollout", "OnlineTask"),
        ("generates", "OnlineTask"),
        ("joint_loss", "JointTask"),
        ("joint", "JointTask"),
    ],
)
def test_a_member_that_only_another_kind_of_task_has_is_named(
    member: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be asked of nobody."""
    monkeypatch.setattr(Own, member, lambda self: None, raising=False)
    with pytest.raises(ConfigError, match=rf"Own has {member}, which only a llmx\.tasks\.{base}"):
        task_class(f"{__name__}:Own")


def test_a_check_under_a_name_that_nothing_calls_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Own, "config_problems", lambda self, exp: (), raising=False)
    with pytest.raises(ConfigError, match=r"Own has config_problems.*Rename it to problems"):
        task_class(f"{__name__}:Own")
