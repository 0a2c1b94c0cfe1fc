"""task=distill: divergences with the values of plain PyTorch and TRL, stored and live teachers."""

from __future__ import annotations

import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

from llmx.compose.complete import complete
from llmx.compose.task_rules import task_problems, task_warnings
from llmx.config import Experiment
from llmx.data import IGNORE, collate
from llmx.data.examples import Schema
from llmx.data.store.precomputed import check_values
from llmx.data.store.samples import Sample
from llmx.errors import ConfigError
from llmx.launch.sync import _configured_paths
from llmx.models.loss import CHUNK_ELEMENTS
from llmx.models.model import Batch, Model, Models
from llmx.tasks import Prompt, task_class, task_of
from llmx.tasks.distill import Distill, OnPolicyDistill, Options, divergence, outcomes
from tests import rollouts
from tests.architectures import small_config
from tests.composing import composed
from tests.reference import word_tokenizer
from tests.rundirs import experiment
from tests.unit.test_models_model import model_of

TRUE_VOCABULARY = 100
SEQUENCES = [[5, 6, 7, 8, 9], [3, 4], [9, 8, 7, 6], [2, 3, 4, 5, 6, 7]]


class Tokenizer:
    """Of 100 tokens; networks pad their vocabularies beyond."""

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(TRUE_VOCABULARY)}

    def __len__(self) -> int:
        return TRUE_VOCABULARY


def task(**options: Any) -> Distill:
    kind = task_class("distill", options)
    assert issubclass(kind, Distill)
    exp = rollouts.of_task("distill", **{"teacher": "owner/teacher", **options})
    return kind(exp, Tokenizer())


def network(vocabulary: int, seed: int) -> torch.nn.Module:
    """Of random weights, large enough for distributions that are not flat."""
    config = small_config("llama")
    config.vocab_size = vocabulary
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(20)
    return made


def models_of(layout: str, *, student: int = 128, teacher: int = 112) -> Models:
    return Models(
        {
            "student": named("student", network(student, 0).train(), layout),
            "teacher": named("teacher", network(teacher, 1).eval(), layout, trained=False),
        }
    )


def named(name: str, network: torch.nn.Module, layout: str, **spec: Any) -> Model:
    found = model_of(network, layout, **spec)
    found.name = name
    return found


def batch_of(layout: str, sequences: list[list[int]] = SEQUENCES) -> Batch:
    """Of two samples; the first token after the start of each sequence is no target."""
    samples = []
    for first in range(0, len(sequences), 2):
        own = sequences[first : first + 2]
        tokens = np.array([token for one in own for token in one], np.uint32)
        starts = np.cumsum([0, *(len(one) for one in own[:-1])])
        targets = np.ones(len(tokens), np.bool_)
        targets[starts] = targets[starts + 1] = False
        samples.append(Sample(tokens, targets, starts))
    return collate(samples, seq_len=32, pad_id=0, layout=layout, columns=())


def with_stored(own: Distill, models: Models, batch: Batch) -> Batch:
    """The batch with the columns that are precomputed, as the store and ``collate`` give them."""
    if not own.precomputed:
        return batch
    targets = batch["labels"] != IGNORE
    with torch.no_grad():
        found = own.precompute(models, batch)
    Schema(own.precomputed)
    arrays = check_values(found, own.precomputed, {"target": int(targets.sum())}, task="distill")
    whole = dict(batch)
    for column in own.precomputed:
        values = torch.from_numpy(arrays[column.name])
        whole[column.name] = torch.zeros(*targets.shape, *column.shape, dtype=values.dtype)
        whole[column.name][targets] = values
    return whole


def plain_logits(network: torch.nn.Module) -> torch.Tensor:
    """[targets, V], in the order of the batch, each sequence alone."""
    found = [network(input_ids=torch.tensor([one])).logits[0, 1:-1] for one in SEQUENCES]
    return torch.cat([each.float() for each in found])


TARGETS = torch.tensor([token for one in SEQUENCES for token in one[2:]])


def plain_divergence(
    student: torch.Tensor, teacher: torch.Tensor, kind: str, beta: float
) -> torch.Tensor:
    """Of log-probabilities, by PyTorch's own function: [rows]."""

    def kl(target: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return kl_div(other, target, reduction="none", log_target=True).sum(-1)

    if kind == "forward_kl":
        return kl(teacher, student)
    if kind == "reverse_kl":
        return kl(student, teacher)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def plain_loss(models: Models, own: Distill, kept: int | None) -> torch.Tensor:
    """The summed loss with whole fp32 logits. ``kept``: tokens of the teacher; None: all."""
    options = own.options
    ours, theirs = (plain_logits(models[name].module) for name in ("student", "teacher"))
    hard = cross_entropy(ours, TARGETS, reduction="none")
    student, teacher = (
        (each[:, :TRUE_VOCABULARY] / options.temperature).softmax(-1) for each in (ours, theirs)
    )
    if kept is not None:
        ids = teacher.topk(kept).indices
        student, teacher = (
            torch.cat([each.gather(1, ids), 1 - each.gather(1, ids).sum(1, keepdim=True)], 1)
            for each in (student, teacher)
        )
    apart = plain_divergence(student.log(), teacher.log(), options.loss, options.beta)
    return (options.alpha * hard + (1 - options.alpha) * options.temperature**2 * apart).sum()


def assert_gradients(
    models: Models, found: torch.Tensor, wanted: torch.Tensor, *, rtol: float, atol: float
) -> None:
    """Assert that two losses have one gradient of the student."""
    parameters = list(models["student"].module.parameters())
    ours, theirs = (torch.autograd.grad(loss, parameters) for loss in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("teacher_logits", "kind", "layout"),
    [
        ("live", "forward_kl", "packed"),
        ("live", "reverse_kl", "padded"),
        ("live", "jsd", "packed"),
        ("stored", "forward_kl", "padded"),
        ("stored", "reverse_kl", "packed"),
        ("stored", "jsd", "packed"),
    ],
)
def test_the_loss_is_that_of_plain_pytorch(teacher_logits, kind, layout, monkeypatch) -> None:
    """Values and gradients, over vocabularies that are padded to different sizes, a few rows of
    logits at a time."""
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 300)
    own = task(
        teacher_logits=teacher_logits, loss=kind, beta=0.3, temperature=2.0, alpha=0.25, top_k=7
    )
    models, batch = models_of(layout), batch_of(layout)
    found = own.loss(models, with_stored(own, models, batch))
    wanted = plain_loss(models, own, 7 if teacher_logits == "stored" else None)
    torch.testing.assert_close(found.sum, wanted, rtol=1e-5, atol=1e-5)
    assert found.weight == len(TARGETS) == 9
    assert_gradients(models, found.sum, wanted, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in models["teacher"].module.parameters())
    student, teacher = (plain_logits(models[name].module) for name in ("student", "teacher"))
    best = [each[:, :TRUE_VOCABULARY].argmax(-1) for each in (student, teacher)]
    assert int(found.metrics["agreement"]) == int((best[0] == best[1]).sum())
    hard = cross_entropy(student, TARGETS, reduction="sum")
    torch.testing.assert_close(found.metrics["hard_loss"], hard.detach())


def test_all_tokens_of_the_teacher_are_the_whole_distribution() -> None:
    live = task(teacher_logits="live", loss="reverse_kl")
    stored = task(top_k=500, loss="reverse_kl")
    models, batch = models_of("packed"), batch_of("packed")
    assert [column.shape for column in stored.precomputed] == [(100,), (100,)], "no others"
    assert [column.shape for column in task(top_k=99).precomputed] == [(99,), (100,)]
    torch.testing.assert_close(
        stored.loss(models, with_stored(stored, models, batch)).sum, live.loss(models, batch).sum
    )


def test_what_is_left_of_a_sharp_distribution_keeps_its_digits() -> None:
    """All but 1e-12 lies on the tokens that are kept; 1 minus their sum is 0 in fp32."""
    logits = torch.tensor([[30.0, 1.0, 0.0, -1.0, 2.0]], requires_grad=True)
    found = outcomes(logits, torch.tensor([[0]]))
    exact = logits.detach().double().log_softmax(-1)[0, 1:].logsumexp(0)
    assert float(found[0, 1].detach()) == pytest.approx(float(exact), rel=1e-6)
    teacher = torch.tensor([[0.5, 0.5]]).log()
    divergence(found, teacher, Options(loss="forward_kl")).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert float(logits.grad[0, 0]) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("teacher_logits", ["live", "stored"])
def test_a_split_changes_nothing(teacher_logits: str) -> None:
    """A rank without a sample keeps step, through the same forwards."""
    own, models = task(teacher_logits=teacher_logits), models_of("packed")
    whole, *parts = (
        own.loss(models, with_stored(own, models, batch_of("packed", sequences)))
        for sequences in (SEQUENCES, SEQUENCES[:2], [], SEQUENCES[2:])
    )
    assert sum(part.weight for part in parts) == whole.weight
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
    for name, value in whole.metrics.items():
        assert sum(float(part.metrics[name]) for part in parts) == pytest.approx(float(value))
    assert (float(parts[1].sum.detach()), parts[1].weight) == (0.0, 0.0)
    parts[1].sum.backward()
    assert {*parts[1].metrics} == {*own.metrics}


def test_an_evaluation_is_plain_cross_entropy() -> None:
    own = task(teacher_logits="live", alpha=0.1)
    models, batch = models_of("packed"), batch_of("packed")
    models["student"].module.eval()
    with torch.no_grad():
        found = own.loss(models, batch)
        hard = cross_entropy(plain_logits(models["student"].module), TARGETS, reduction="sum")
    torch.testing.assert_close(found.sum, hard)
    assert {*found.metrics} == {"divergence", "agreement"}


def test_half_precision_has_no_whole_copies_in_fp32() -> None:
    """For the backward pass the logits of both are kept as they are; fp32 has a chunk of them."""
    own = task(teacher_logits="live", temperature=2.0)
    models, batch = models_of("packed"), batch_of("packed")
    wanted = own.loss(models, batch)
    for model in models.values():
        model.module.to(torch.bfloat16)
        model.dtype = torch.bfloat16
    found = own.loss(models, batch)
    assert found.sum.dtype == torch.float32
    assert float(found.sum.detach()) == pytest.approx(float(wanted.sum.detach()), rel=0.05)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = own.loss(models, batch).sum
    loss.backward()
    rows = [x for x in saved if x.shape[:1] == (9,) and x.dim() == 2]
    assert [x.dtype for x in rows if x.shape[1] >= TRUE_VOCABULARY] == [torch.bfloat16] * 2


def test_models_and_columns_that_the_options_need() -> None:
    stored, live = task(), task(teacher_logits="live", teacher_revision="v2")
    assert stored.models()["teacher"].precomputes
    assert live.precomputed == ()
    teacher = live.models()["teacher"]
    found = (teacher.source, teacher.revision, teacher.trained, teacher.precomputes)
    assert found == ("owner/teacher", "v2", False, False)
    # A sweep over alpha and the kind of divergence prepares and precomputes once.
    other = task(alpha=0.0, loss="jsd")
    assert other.encoding_identity() == stored.encoding_identity()
    assert other.precompute_identity() == stored.precompute_identity()
    assert task(temperature=2.0).precompute_identity() != stored.precompute_identity()


def test_rows_that_are_cut_anywhere_are_refused() -> None:
    data = types.SimpleNamespace(packing="concat")
    source: Any = types.SimpleNamespace(has_conversations=True, data=data)
    with pytest.raises(ConfigError, match=r"Use data\.packing=best_fit"):
        task().check_source(source)
    source.has_conversations = False
    task().check_source(source)


def test_the_place_of_the_teacher_is_checked_where_the_user_stands(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def completed(teacher: str, *, seq_len: int = 128) -> tuple[Experiment, str]:
        own = {"kind": "distill", "options": {"teacher": teacher}}
        exp = experiment(tmp_path / "run", task=own, data={"seq_len": seq_len})
        exp, problems = complete(exp)
        return exp, "\n".join(problems)

    assert completed("owner/teacher")[1] == ""
    assert "task.options.teacher=./techer: no such file" in completed("./techer")[1]
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "model.safetensors").touch()
    (teacher / "config.json").write_text('{"max_position_embeddings": 128}')
    too_long = "data.seq_len=129, but task.options.teacher=teacher takes at most 128"
    assert too_long in completed("teacher", seq_len=129)[1]
    exp, problems = completed("./teacher")
    assert problems == ""
    assert exp.task.options["teacher"] == str(teacher), "absolute in the snapshot"
    # With launch.sync=rsync it travels, as model.path does.
    assert (str(teacher), "model of the task") in list(_configured_paths(exp))


# On-policy: the student draws what it learns from

PROMPTS = [*rollouts.PROMPTS[:2], Prompt((3,) * 13, ((4,),))]


def on_policy(**options: Any) -> tuple[Distill, Models, list[Sample]]:
    """The task, its models, and a rollout, cut at 16 tokens."""
    exp = rollouts.of_task("distill", teacher="owner/teacher", on_policy=True, **options)
    own = task_of(exp, word_tokenizer())
    assert isinstance(own, OnPolicyDistill)
    size = len(own.tokenizer)
    models = models_of("packed", student=size, teacher=size)
    models["student"].module.eval()
    samples = rollouts.rolled(own, models, PROMPTS)
    models["student"].module.train()
    return own, models, samples


@pytest.mark.parametrize(("kind", "beta"), [("reverse_kl", 1), ("forward_kl", 0), ("jsd", 0.3)])
def test_on_policy_is_the_gkd_of_trl_on_the_students_completions(kind: str, beta: float) -> None:
    """Values and gradients, but for the square of the temperature."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    options = {} if kind == "reverse_kl" else {"loss": kind, "beta": beta or 0.5}
    own, models, samples = on_policy(temperature=1.5, max_new_tokens=6, **options)
    assert own.options.loss == kind
    found = own.loss(models, rollouts.batch_of(own, samples))
    wanted, lengths = torch.zeros(()), []
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        ids = torch.tensor(sample.tokens.astype(np.int64))[None]
        first = len(prompt.tokens)
        assert tuple(ids[0, :first].tolist()) == prompt.tokens
        lengths.append(ids.shape[1] - first)
        with torch.no_grad():
            teacher = models["teacher"].module(input_ids=ids).logits[:, first - 1 : -1]
        student = models["student"].module(input_ids=ids).logits[:, first - 1 : -1]
        wanted = wanted + gkd.GKDTrainer.generalized_jsd_loss(
            student, teacher, ids[:, first:], beta=beta, temperature=1.5, num_items_in_batch=1
        )
    assert max(lengths) <= 6
    assert lengths[2] <= 3, "cut at data.seq_len"
    assert found.weight == sum(lengths)
    torch.testing.assert_close(found.sum, 1.5**2 * wanted, rtol=1e-4, atol=1e-5)
    assert_gradients(models, found.sum, 1.5**2 * wanted, rtol=1e-3, atol=1e-4)
    assert {*found.metrics} == {*own.metrics}
    total, count = found.metrics["completion_tokens"]
    assert (float(total), count) == (sum(lengths), 3)


def test_on_policy_a_split_changes_nothing() -> None:
    own, models, samples = on_policy()
    whole = own.loss(models, rollouts.batch_of(own, samples))
    parts = [
        own.loss(models, rollouts.batch_of(own, part)) for part in (samples[:1], [], samples[1:])
    ]
    assert sum(part.weight for part in parts) == whole.weight
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
    models["student"].module.eval()
    batch = batch_of("packed")
    with torch.no_grad():
        evaluated = own.evaluate(models, [batch])
    assert {*evaluated} == {"loss", "divergence", "agreement"}
    assert evaluated["loss"].weight == float((batch["labels"] != IGNORE).sum())


def test_what_on_policy_chooses_and_refuses() -> None:
    words = ["task=distill", "task.options.teacher=owner/name", "data=file", "data.path=demo"]
    stored = composed(["model=tiny", *words])
    assert stored.experiment.data.packing == "best_fit"
    assert stored.plan.beside[0].before_training
    live = composed(["model=tiny", *words, "task.options.on_policy=true"])
    exp = live.experiment
    assert exp.data.packing == "none"
    chosen = {"teacher_logits": "live", "loss": "reverse_kl", "alpha": 0.0, "max_new_tokens": 256}
    assert exp.task.options.items() >= chosen.items()
    assert not live.plan.beside[0].before_training
    assert Distill(exp, Tokenizer()).precomputed == ()
    (warning,) = task_warnings(exp)
    assert "task=distill generates its samples. The plan counts completions" in warning
    own = task(on_policy=True)
    assert own.loss_on == "last"
    assert own.encoding_identity() != task().encoding_identity()
    source: Any = types.SimpleNamespace(has_text=True)
    with pytest.raises(ConfigError, match=r"on_policy=true needs conversations"):
        own.check_source(source)
    exp.task.options["max_new_tokens"] = exp.data.seq_len
    assert "prompt and completion are at most" in "\n".join(task_problems(exp))
