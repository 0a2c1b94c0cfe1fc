"""task=dpo: losses with the values of TRL's, metrics, a stored reference, and what is refused."""

from __future__ import annotations

import pickle
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from llmx.config import Experiment
from llmx.config.schema import TaskConfig
from llmx.data import Conversation, Preference, UnpairedPreference, collate
from llmx.data.format.rows import Message
from llmx.data.source.records import Where
from llmx.data.store.samples import Sample
from llmx.models.model import Models
from llmx.tasks import Loss, task_class
from llmx.tasks.dpo import Dpo, Kto, Options, kto_losses, log1mexp, pair_losses, shares_right
from tests.unit.test_models_model import causal_lm, model_of

LOGP = torch.tensor([[-12.5, -30.0], [-8.0, -7.5], [-40.0, -41.0], [-3.0, -90.0]])
REFERENCE = torch.tensor([[-13.0, -28.0], [-8.5, -7.0], [-44.0, -40.0], [-3.25, -80.0]])
COUNTS = torch.tensor([[5.0, 9.0], [3.0, 3.0], [11.0, 10.0], [2.0, 20.0]])


def trl_loss(name: str, *, beta: float, smoothing: float) -> float:
    """The mean loss of these pairs as TRL's trainer computes it, with a model that answers with
    log-probabilities that are given: all of an answer's on its first token."""
    trl = pytest.importorskip("trl", minversion="1.16")
    longest = int(COUNTS.max()) + 1
    counts = torch.cat([COUNTS[:, 0], COUNTS[:, 1]]).long()
    mask = (torch.arange(longest)[None] < counts[:, None]).long()
    logps = torch.zeros(len(counts), longest - 1)
    logps[:, 0] = torch.cat([LOGP[:, 0], LOGP[:, 1]])
    answer = types.SimpleNamespace(
        log_probs=logps, entropy=logps, mean_logits=logps, is_top1=logps > 1
    )
    accelerator = types.SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    trainer: Any = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": REFERENCE[:, 0],
        "ref_rejected_logps": REFERENCE[:, 1],
    }
    found = trl.DPOTrainer._compute_loss(trainer, lambda **_: answer, inputs, return_outputs=False)
    return float(found)


def of_pairs(name: str, *, beta: float, smoothing: float = 0.0, **more: Any) -> float:
    options = Options(loss=name, beta=beta, label_smoothing=smoothing, **more)
    means = name in ("ipo", "orpo", "simpo") or options.length_normalised
    scale = COUNTS if means else torch.ones_like(COUNTS)
    return float(pair_losses(options, LOGP / scale, REFERENCE / scale).mean())


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize(
    "name", ["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "sppo_hard", "nca_pair"]
)
def test_losses_are_those_of_trl(name: str, beta: float) -> None:
    """``sigmoid_norm`` is ``sigmoid`` of means over tokens."""
    smoothing, normalised = 0.2 * (name == "robust"), name == "sigmoid_norm"
    own = name.removesuffix("_norm")
    ours = of_pairs(own, beta=beta, smoothing=smoothing, length_normalised=normalised)
    assert ours == pytest.approx(trl_loss(name, beta=beta, smoothing=smoothing), rel=1e-6)


def test_simpo_and_label_smoothing_are_those_of_trl() -> None:
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    means = LOGP / COUNTS
    for name, gamma in (("simpo", 0.3), ("sigmoid", 0.0)):
        trainer: Any = types.SimpleNamespace(
            alpha=0.0,
            accelerator=types.SimpleNamespace(device=torch.device("cpu")),
            loss_type=name,
            simpo_gamma=gamma,
            beta=2.0,
            label_smoothing=0.1,
        )
        theirs, *_ = cpo.CPOTrainer.cpo_loss(trainer, means[:, 0], means[:, 1])
        options = Options(loss=name, beta=2.0, label_smoothing=0.1, gamma=gamma)
        ours = pair_losses(options, means, torch.zeros_like(means))
        assert torch.allclose(ours, theirs, rtol=1e-6)


def test_orpo_is_that_of_trl() -> None:
    orpo = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    means = LOGP / COUNTS
    trainer: Any = types.SimpleNamespace(
        beta=0.25, accelerator=types.SimpleNamespace(device=torch.device("cpu"))
    )
    theirs, *_ = orpo.ORPOTrainer.odds_ratio_loss(trainer, means[:, 0], means[:, 1])
    ours = pair_losses(Options(loss="orpo", beta=0.25), means, torch.zeros_like(means))
    assert torch.allclose(ours, -theirs, rtol=1e-5)


def test_log1mexp_keeps_its_digits() -> None:
    values = torch.tensor([-1e-6, -0.1, -0.7, -5.0, -80.0], requires_grad=True)
    found = log1mexp(values)
    exact = np.log(-np.expm1(values.detach().double().numpy()))
    assert np.allclose(found.detach().numpy(), exact, rtol=1e-4)
    found.sum().backward()
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()


def test_kto_is_that_of_the_paper() -> None:
    """Ethayarajh et al. 2024, eq. 7 and 8: lambda times (1 - the value function)."""
    ratios = torch.tensor([2.0, -1.0, 0.5])
    desirable = torch.tensor([True, False, True])
    kl = torch.tensor(0.25)
    options = Options(loss="kto", beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)
    found = kto_losses(options, ratios, desirable, kl)
    wanted = [
        1.5 * (1 - torch.sigmoid(torch.tensor(0.4 * 1.75))),
        0.5 * (1 - torch.sigmoid(torch.tensor(0.4 * 1.25))),
        1.5 * (1 - torch.sigmoid(torch.tensor(0.4 * 0.25))),
    ]
    assert torch.allclose(found, torch.stack(wanted))


# The task as a whole, on a small network


def task(**options: Any) -> Dpo:
    exp = Experiment()
    exp.task.kind, exp.task.options = "dpo", options
    kind = task_class("dpo", options)
    assert issubclass(kind, Dpo)
    return kind(exp, None)


PAIRS = [[[5, 6, 7, 8, 9], [5, 6, 9]], [[2, 3, 4, 4, 4, 4], [2, 3, 7, 7]]]
"""Two examples; the first two tokens are the prompt."""


def batch_of(own: Dpo, examples: list[list[list[int]]], layout: str = "packed") -> dict[str, Any]:
    samples = []
    for example in examples:
        lengths = [len(one) for one in example]
        starts = np.cumsum([0, *lengths[:-1]])
        targets = np.concatenate([np.arange(length) >= 2 for length in lengths])
        columns = {"desirable": np.array([1, 0], np.int8)[: len(example)]}
        tokens = np.array([token for one in example for token in one], np.uint32)
        first = np.zeros(1, np.int64)
        samples.append(Sample(tokens, targets, starts, None, first, columns))
    return collate(samples, seq_len=32, pad_id=0, layout=layout, columns=own.columns)


def models_for(own: Dpo, layout: str = "packed") -> Models:
    reference = causal_lm()
    policy = causal_lm()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    found = {"policy": model_of(policy, layout)}
    if own._reference != "free":
        found["reference"] = model_of(reference, layout, trained=False)
    return Models(found)


def loss_of(own: Dpo, models: Models, batch: dict[str, Any]) -> Loss:
    """Of a step of one micro batch."""
    if not isinstance(own, Kto):
        return own.loss(models, batch)
    found = own.joint_loss(own.outputs(models, batch), batch)
    metrics = {name: (sums.sum(), weights.sum()) for name, (sums, weights) in found.metrics.items()}
    return Loss(found.losses.sum(), float(len(found.losses)), metrics)


@pytest.mark.parametrize(
    ("loss", "layout"),
    [("sigmoid", "packed"), ("ipo", "padded"), ("sppo_hard", "packed"), ("kto", "padded")],
)
def test_a_stored_reference_gives_what_a_live_one_does(loss: str, layout: str) -> None:
    live, stored = task(loss=loss, reference="live"), task(loss=loss)
    models = models_for(live, layout)
    batch = batch_of(live, PAIRS, layout)
    wanted = loss_of(live, models, batch)
    columns = stored.precompute(models, batch)
    (column,) = stored.precomputed
    assert column.name in columns
    assert not columns[column.name].requires_grad
    del models["reference"]
    found = loss_of(stored, models, {**batch, **columns})
    assert torch.equal(found.sum, wanted.sum)
    assert found.weight == wanted.weight == 2.0
    assert {*found.metrics} == {*stored.metrics} == {*wanted.metrics}
    found.sum.backward()


def test_the_loss_is_that_of_the_formula() -> None:
    own = task(reference="live", sft_weight=0.5, beta=0.3)
    models, batch = models_for(own), batch_of(own, PAIRS)
    policy = models.policy.log_probabilities(batch)
    logp = policy.sums().view(-1, 2)
    reference = models.reference.log_probabilities(batch).sums().view(-1, 2)
    margin = 0.3 * ((logp - reference)[:, 0] - (logp - reference)[:, 1])
    likelihood = logp[:, 0] / torch.tensor([3.0, 4.0])
    found = own.loss(models, batch)
    assert float(found.sum.detach()) == pytest.approx(
        float((-logsigmoid(margin) - 0.5 * likelihood).sum().detach()), rel=1e-6
    )
    assert float(found.metrics["margin"]) == pytest.approx(float(margin.sum().detach()), rel=1e-5)
    assert int(found.metrics["accuracy"]) == int((margin > 0).sum())
    # Before training both answers are as likely as under the reference: a tie, but for rounding.
    margins = torch.tensor([0.3, -0.3, 1e-6, -1e-6, 0.0])
    assert shares_right(margins, beta=0.3).tolist() == [1, 0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("loss", ["sigmoid", "orpo", "simpo", "kto"])
def test_no_example_is_a_loss_of_zero_with_a_gradient(loss: str) -> None:
    """A rank without a sample must keep step, through the same forwards."""
    own = task(loss=loss, reference="free")
    models, batch = models_for(own), batch_of(own, [])
    found = loss_of(own, models, batch)
    assert (float(found.sum.detach()), found.weight) == (0.0, 0.0)
    found.sum.backward()
    assert {*found.metrics} == {*own.metrics}


def test_kto_of_one_answer_and_of_pairs() -> None:
    own = task(loss="kto", reference="free")
    models = models_for(own)
    pair = loss_of(own, models, batch_of(own, PAIRS[:1]))
    ones = batch_of(own, [PAIRS[0][:1], PAIRS[0][1:]])
    ones["desirable"] = torch.tensor([1, 0], dtype=torch.int8)
    apart = loss_of(own, models, ones)
    assert float(apart.sum.detach()) / 2 == pytest.approx(float(pair.sum.detach()), rel=1e-6)
    assert (pair.weight, apart.weight) == (1.0, 2.0)


def test_held_out_answers_of_kto_have_one_reference_point() -> None:
    """However they lie on ranks and in micro batches."""
    own = task(loss="kto", reference="live", beta=0.7)
    models = models_for(own)
    with torch.no_grad():
        whole = loss_of(own, models, batch_of(own, PAIRS))
        (together,) = own.evaluate(models, [batch_of(own, PAIRS)]).values()
        ranks = [own.evaluate(models, [batch_of(own, [pair])])["held_out"] for pair in PAIRS]
    ranks[0].merge(pickle.loads(pickle.dumps(ranks[1])))
    assert ranks[0].values() == pytest.approx(together.values(), rel=1e-5)
    assert together.values()["loss"] == pytest.approx(float(whole.sum) / 2, rel=1e-6)
    assert {*together.values()} == {"loss", "weight", *own.metrics}


def test_dropout_that_would_not_be_used_is_refused() -> None:
    exp = Experiment(task=TaskConfig(kind="dpo"))
    assert list(Dpo(exp, None).problems()) == []
    exp.adapter.kind, exp.adapter.dropout = "lora", 0.05
    exp.model.config["resid_pdrop"] = 0.1
    (problem,) = Dpo(exp, None).problems()
    assert "adapter.dropout=0.05, model.config.resid_pdrop=0.1: task=dpo trains without" in problem
    exp.task.options["dropout"] = True
    assert list(Dpo(exp, None).problems()) == []
    assert not task().models()["policy"].dropout
    assert task(dropout=True).models()["policy"].dropout


def test_which_models_and_columns_an_option_needs() -> None:
    assert [*task().models()] == ["policy", "reference"]
    assert task().models()["reference"].precomputes
    assert not task(reference="live").models()["reference"].precomputes
    assert not task(reference="live").precomputed
    for without in ({"reference": "free"}, {"loss": "simpo"}, {"loss": "orpo"}):
        own = task(**without)
        assert ([*own.models()], own.precomputed) == (["policy"], ())
    # A sweep over losses and beta prepares the data and the reference once.
    same = [task(beta=0.1), task(beta=0.5, loss="ipo", sft_weight=1.0)]
    assert same[0].encoding_identity() == same[1].encoding_identity()
    assert same[0].precompute_identity() == same[1].precompute_identity()


def test_rows_become_examples() -> None:
    where = Where(Path("rows.json"), 1, "row")
    asked = Message("user", "Q")
    good, bad = (Conversation((asked, Message("assistant", text)), where) for text in ("yes", "no"))
    pair = task().encode(Preference(good, bad))
    assert (pair.sequences, pair.columns) == ((good, bad), {"desirable": [1, 0]})
    one = task(loss="kto").encode(UnpairedPreference(bad, False))
    assert (one.sequences, one.columns, one.cuts) == ((bad,), {"desirable": [False]}, ("prompt",))
