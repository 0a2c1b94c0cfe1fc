"""task=grpo: losses, gradients and advantages of TRL's, one gradient for every split, rollouts;
warnings of rewards and lengths that collapse."""

from __future__ import annotations

import inspect
import math
import textwrap
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmx.data.examples import Rejected
from llmx.data.format.rows import Conversation, Message
from llmx.data.source.records import Where
from llmx.errors import ConfigError
from llmx.models.model import Models
from llmx.tasks import Prompt, RolloutKey, task_class
from llmx.tasks.collapse import STEPS, CollapseWatch
from llmx.tasks.grpo import Grpo, Options
from llmx.tasks.policy_loss import (
    group_advantages,
    importance_weights,
    kl_estimate,
    policy_loss,
)
from llmx.train.rollout import prompts_of
from tests.data_rows import experiment_on, prepared
from tests.reference import word_tokenizer
from tests.rollouts import (
    PROMPTS,
    batch_of,
    descend,
    even,
    means_of,
    models_for,
    of_task,
    plain_logps,
    rolled,
    samples_of,
    text_of,
    trained,
    trained_for_every_split,
)

COUNTS = torch.tensor([3, 5, 1, 4])
LONGEST = int(COUNTS.max())
MASK = (torch.arange(LONGEST)[None] < COUNTS[:, None]).long()
SEQUENCES = torch.arange(4)[:, None].expand_as(MASK)[MASK.bool()]
ADVANTAGES = torch.tensor([1.5, -0.7, -1.1, 0.3])
BETA = 0.3
EVEN, BROKEN = "tests.rollouts:even", "tests.rollouts:broken"


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities [4, LONGEST] of the policy, of the one that drew, and of the reference: far
    enough apart that some ratios are clipped on either side."""
    generator = torch.Generator().manual_seed(5)
    logps, *others = (-3 * torch.rand(4, LONGEST, generator=generator) for _ in range(3))
    old, reference = (logps + 0.6 * (other + 1.5) for other in others)
    return logps.requires_grad_(), old, reference


def trl_loss(loss: str, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of these completions as TRL's trainers compute it, and its gradient."""
    trl = pytest.importorskip("trl", minversion="1.16")
    logps, old, reference = given()
    trainer: Any = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros(4, LONGEST), None),
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
        ),
        args=types.SimpleNamespace(
            use_bias_correction_kl=False, delta=None, steps_per_generation=1
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if loss == "gspo" else "token",
        beta=beta,
        loss_type="grpo" if loss == "gspo" else loss,
        epsilon_low=0.2,
        epsilon_high=1.28 if loss == "cispo" else 0.28,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=16,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.ones(4, 2, dtype=torch.long),
        "prompt_mask": torch.ones(4, 2, dtype=torch.long),
        "completion_ids": torch.ones(4, LONGEST, dtype=torch.long),
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "old_logps": (old * MASK).sum(1),
        "num_items_in_batch": MASK.sum(),
    }
    kind = trl.RLOOTrainer if loss == "rloo" else trl.GRPOTrainer
    value = kind._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(value, logps)
    return value.detach(), gradient


LOSSES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo")


@pytest.mark.parametrize(  # TRL's RLOO has the KL divergence in the reward alone
    ("loss", "beta"), [*((loss, beta) for loss in LOSSES for beta in (0, BETA)), ("rloo", 0)]
)
def test_losses_and_gradients_are_those_of_trl(loss: str, beta: float) -> None:
    logps, old, reference = given()
    own = Grpo(of_task(loss=loss, beta=beta, max_new_tokens=16), None)
    at = MASK.bool()
    total, clipped, kl = policy_loss(
        own.options, logps[at], old[at], ADVANTAGES, SEQUENCES, reference[at] if beta else None
    )
    weight = float(COUNTS.sum()) if own.normaliser == "tokens" else 4.0
    (gradient,) = torch.autograd.grad(total / weight, logps)
    value, wanted = trl_loss(loss, beta)
    torch.testing.assert_close(total.detach() / weight, value)
    torch.testing.assert_close(gradient, wanted)
    assert 0 < int(clipped.sum()) < len(clipped)
    assert (kl is None) == (beta == 0)


REWARDS = np.array(
    [[1.0, 0.0, 0.25, 0.5], [0.7, 0.7, 0.7, 0.7], [1.0, math.nan, 0.0, 0.5], [math.nan] * 3 + [1.0]]
)
"""Groups with a signal, without one, with a completion without reward, with one reward alone."""


@pytest.mark.parametrize(
    ("kind", "scale", "trainer"),
    [("normalised", "group", "GRPO"), ("centred", "none", "GRPO"), ("leave_one_out", "", "RLOO")],
)
def test_advantages_are_those_of_trl(kind: str, scale: str, trainer: str) -> None:
    """The lines of TRL's method that turn rewards into advantages are run as they stand there."""
    trl = pytest.importorskip("trl", minversion="1.16")
    method = getattr(trl, f"{trainer}Trainer")._generate_and_score_completions
    source = inspect.getsource(method)
    start = source.index("        unscorable_mask = ")
    end = source.index("advantages = torch.nan_to_num(advantages, nan=0.0)")
    trainer_options = types.SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1).double(),
        scale_rewards=scale, reward_clip_range=None, beta=0.0, normalize_advantages=False,
        reward_funcs=[None],
    )  # fmt: skip
    names = {
        **method.__globals__, "self": trainer_options, "device": "cpu", "num_generations": 4,
        "rewards_per_func": torch.tensor(REWARDS).reshape(-1, 1),
    }  # fmt: skip
    exec(textwrap.dedent(source[start:end]), names)
    wanted = names["advantages"].nan_to_num(0.0).numpy().reshape(REWARDS.shape)
    advantages, spread = group_advantages(kind, REWARDS)
    np.testing.assert_allclose(advantages, wanted, atol=1e-9)
    assert spread[:2] == pytest.approx(np.std(REWARDS[:2], ddof=1, axis=1), abs=1e-9)
    assert np.isnan(spread[3])


def test_kl_estimates() -> None:
    """Their expectation over the policy is the divergence (k2: nearly)."""
    torch.manual_seed(0)
    policy, near = torch.randn(50).log_softmax(0), torch.randn(50)
    reference = (policy + 0.1 * near).log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    for kind, tolerance in (("k1", 1e-5), ("k2", 0.1), ("k3", 1e-4)):
        mean = float((policy.exp() * kl_estimate(kind, policy - reference)).sum())
        assert mean == pytest.approx(exact, rel=tolerance), kind


@pytest.mark.parametrize("loss", [*LOSSES, "rloo"])
def test_a_policy_that_has_left_the_old_one_has_a_finite_loss(loss: str) -> None:
    """Tokens that the old policy and the reference give next to no probability, and a bad reward:
    the ratio of rloo is that of the whole sequence."""
    logps = torch.full((6,), -0.1, requires_grad=True)
    away = torch.tensor([-60.0, -60.0, -100.0, -0.2, -0.1, -0.1])
    options = Options(loss=loss, beta=0.1, kl_in="loss")
    advantages, sequences = torch.tensor([-1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    for reference in (away, 2 * logps.detach() - away):
        total, _, kl = policy_loss(options, logps, away, advantages, sequences, reference)
        (gradient,) = torch.autograd.grad(total, logps)
        assert total.isfinite()
        assert kl is not None
        assert kl.isfinite().all()
        assert gradient.norm().isfinite()


# The task as a whole, on a small network


def task(**options: Any) -> Grpo:
    assert task_class("grpo") is Grpo
    options = {"rewards": [EVEN], "group_size": 4, "max_new_tokens": 6, **options}
    return Grpo(of_task(**options), word_tokenizer())


def test_a_rollout_has_what_the_policy_gave() -> None:
    own = task(beta=0.1, temperature=0.7)
    assert not own.models()["policy"].dropout
    models = models_for(own, drift=1.1)
    samples = rolled(own, models)
    assert len(samples) == 12
    assert all(len(sample.tokens) <= 16 for sample in samples), "cut at data.seq_len"
    batch = batch_of(own, samples)
    targets = batch["labels"] != -100
    assert int(targets.sum()) == sum(int(sample.targets.sum()) for sample in samples)
    with torch.no_grad():
        logps, _ = own._token_values(models.policy, batch)
        reference, _ = own._token_values(models["reference"], batch)
    torch.testing.assert_close(batch["old_logp"][targets], logps, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch["reference_logp"][targets], reference, atol=1e-6, rtol=0)
    # The policy that drew them is the one that is trained: nothing is clipped, ratios are 1.
    with torch.no_grad():
        found = own.loss(models, batch)
    means = means_of(own, found)
    assert means["clipped"] == 0
    assert 0 < means["entropy"] < math.log(len(own.tokenizer))
    assert means["kl"] > 0
    assert means["reward"] == pytest.approx(means["reward/even"])
    assert means["completion_tokens"] == found.weight / 12 == float(targets.sum()) / 12
    assert means["reward_failed"] == 0
    for sample, shown in zip(samples, own.generated, strict=True):
        values = sample.columns["measures"][0]
        assert shown.rewards == pytest.approx({"even": values[0], "reward": values[1]})
        assert shown.advantage == pytest.approx(float(sample.columns["advantage"][0]))
        assert shown.rewards["even"] == pytest.approx(even("", shown.completion, ""))
    values = [own.decode(sample.tokens[sample.targets].tolist()) for sample in samples]
    assert means["reward"] == pytest.approx(np.mean([even("", text, "") for text in values]))


@pytest.mark.parametrize("loss", ["dapo", "grpo", "gspo"])
def test_one_gradient_for_every_split(loss: str) -> None:
    own = task(loss=loss, beta=0.1)
    samples = rolled(own, models_for(own))
    # Another policy than the one that drew, so that ratios differ.
    assert trained_for_every_split(own, models_for(own, drift=1.05), samples) == {"policy"}


def test_several_updates_clip_against_the_policy_that_drew() -> None:
    """DAPO's loss in plain PyTorch, one sample after the other, three times with SGD."""
    own, lr = task(updates=3), 0.05
    models, plain = models_for(own), models_for(own).policy.module
    samples = rolled(own, models)
    targets = sum(int(sample.targets.sum()) for sample in samples)
    parameters, mean_loss, metrics = trained(own, models, samples, parts=(5, 7), lr=lr)

    losses, num_clipped = [], 0
    for _ in range(3):
        total = torch.zeros(())
        for sample in samples:
            ids, at = text_of(sample)
            logps = plain_logps(plain, ids, at)
            old = torch.from_numpy(np.array(sample.columns["old_logp"]))[at]
            ratios, advantage = (logps - old).exp(), float(sample.columns["advantage"][0])
            gains = torch.minimum(ratios * advantage, ratios.clamp(0.8, 1.28) * advantage)
            num_clipped += int((gains != ratios * advantage).sum())
            total = total - gains.sum()
        losses.append(float(total.detach()) / targets)
        descend(total / targets, list(plain.parameters()), lr=lr)
    for ours, theirs in zip(parameters, plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert mean_loss == pytest.approx(np.mean(losses), abs=1e-5)
    assert metrics["clipped"] == [num_clipped, 3 * targets]
    assert num_clipped > 0


def rare(prompt: str, completion: str, reference: str) -> float:
    """A reward that few completions get, so that some groups have none."""
    return float(len(completion) % 7 == 0)


@pytest.mark.parametrize("tries", [1, 20])
def test_groups_without_a_signal_are_replaced(tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"rewards": [f"{__name__}:rare"], "group_size": 3}
    plain = task(**options)
    own = task(**options, dynamic_sampling=True, dynamic_sampling_tries=tries)
    models = models_for(own)
    drawn: list[Any] = []
    seeds: list[int] = []
    make_groups = own._groups

    def recorded(models: Models, prompts: Any, seed_of: Any) -> Any:
        groups = make_groups(models, prompts, seed_of)
        drawn.extend(groups)
        seeds.extend(seed_of(at, 0) for at in range(len(prompts)))
        return list(groups)

    monkeypatch.setattr(own, "_groups", recorded)
    key = RolloutKey(1, 0, lambda attempt: [Prompt((attempt, 4 + at), ((5,),)) for at in range(3)])
    with torch.no_grad():
        before, after = plain.rollout(models, PROMPTS, key), own.rollout(models, PROMPTS, key)
    assert len(seeds) == len(set(seeds)), "every group has random numbers of its own"

    def trains(group: Any) -> bool:
        return any(example.columns["advantage"] for example in group)

    assert [trains(group) for group in before].count(False) == 2
    assert all(map(trains, after)) == (tries == 20)
    kept = [at for at, group in enumerate(before) if trains(group)]
    for at in kept:  # what had a signal stays where it was
        ours, theirs = (
            [example.sequences[0].ids for example in groups[at]] for groups in (after, before)
        )
        assert ours == theirs
    # Measured is all that was drawn.
    means = means_of(own, own.loss(models, batch_of(own, samples_of(own, after))))
    assert means["groups_drawn"] == pytest.approx(len(drawn) / 3)
    assert means["reward"] == pytest.approx(
        np.mean([each.total for group in drawn for each in group])
    )
    silent = sum(len({each.total for each in group}) == 1 for group in drawn)
    assert means["no_signal"] == pytest.approx(silent / len(drawn))


def test_a_failing_reward_costs_its_completions(capsys: pytest.CaptureFixture[str]) -> None:
    own = task(rewards=[EVEN, BROKEN], reward_weights=[1, 0.5])
    models = models_for(own)
    samples = rolled(own, models)
    columns = [sample.columns for sample in samples]
    failed = [not bool(each["measured"][0][own._measures.index("reward")]) for each in columns]
    assert 0 < sum(failed) < len(failed)
    advantages = np.array([float(each["advantage"][0]) for each in columns])
    assert not advantages[np.array(failed)].any()
    found = own.loss(models, batch_of(own, samples))
    total, count = found.metrics["reward_failed"]
    assert (total, count) == (sum(failed), 12)
    assert found.metrics["reward/even"][1] == 12
    assert found.metrics["reward/broken"][1] == 12 - sum(failed)
    output = capsys.readouterr().out
    assert output.count("WARNING: the reward broken failed: it r") == 1


def test_a_reward_that_fails_too_often_ends_the_run() -> None:
    """Over the whole run, and not for a few completions."""
    own = task(rewards=["tests.rollouts:nothing"])
    own._report("nothing", ["it returned [1.0]."] * 4)
    own._report("nothing", [""] * 96)
    with pytest.raises(
        ConfigError, match=r"reward nothing failed for 26 of 122 completions: .*max_lost=0\.22"
    ):
        own._report("nothing", ["it returned [1.0]."] * 22)
    with pytest.raises(ConfigError, match=r"12 of 12 completions: it returned \[\], .*max_lost=1 "):
        rolled(task(rewards=["tests.rollouts:nothing"]), models_for(own))


def test_a_reward_that_abstains_is_left_out() -> None:
    own = task(rewards=[EVEN, "tests.rollouts:abstains"], reward_weights=[1, 0.5])
    samples = rolled(own, models_for(own))
    at = own._measures.index("reward_failed")
    assert not any(sample.columns["measures"][0][at] for sample in samples)
    shown = [sample.rewards for sample in own.generated]
    assert {rewards["abstains"] is None for rewards in shown} == {True, False}
    for rewards in shown:
        total = rewards["even"] + 0.5 * (rewards["abstains"] or 0.0)
        assert rewards["reward"] == pytest.approx(total)
    assert any(float(sample.columns["advantage"][0]) for sample in samples)


def test_prompts_need_an_answer_only_where_a_reward_compares_with_it() -> None:
    turns = (Message("user", "q"), Message("assistant", ""))
    row = Conversation(turns, Where(Path("q.jsonl"), 1, "row"))
    assert task(rewards=[EVEN]).encode(row)
    with pytest.raises(Rejected, match=r'reward exact_match could.*the column "answer"'):
        task(rewards=["exact_match"]).encode(row)


def test_rows_without_a_reference_are_prompts_all_the_same(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "3 times 4?"}], "answer": 12},
        {"prompt": "Name a colour."},
        {"prompt": "2 + 2?", "reward_model": {"ground_truth": "4"}},
    ]
    exp = experiment_on(tmp_path, "grpo", rows, {"rewards": [EVEN]}, packing="none")
    own, store = prepared(exp)
    prompts = [prompt for at in range(len(store)) for prompt in prompts_of(store[at])]
    assert sorted(own.decode(list(prompt.reference)) for prompt in prompts) == ["", "12", "4"]
    questions = "".join(own.decode(list(prompt.tokens)) for prompt in prompts)
    assert all(text in questions for text in ("3 times 4?", "Name a colour.", "2 + 2?"))


def test_what_is_truncated_can_be_masked() -> None:
    own = task(mask_truncated=True, rewards=["length"])
    samples = rolled(own, models_for(own))
    at = own._measures.index("truncated")
    truncated = [bool(sample.columns["measures"][0][at]) for sample in samples]
    assert any(truncated)
    assert [bool(sample.targets.any()) for sample in samples] == [not cut for cut in truncated]
    # What is masked trains nothing, whichever loss.
    for loss in ("grpo", "gspo", "rloo"):
        other = task(loss=loss, mask_truncated=True, rewards=["length"])
        masked = [sample for sample, cut in zip(samples, truncated, strict=True) if cut]
        found = other.loss(models_for(other), batch_of(other, masked))
        assert float(found.sum.detach()) == 0.0


def test_kl_in_the_reward_is_that_of_the_samples() -> None:
    plain = task(rewards=["length"])
    own = task(rewards=["length"], beta=0.5, kl="k1", kl_in="reward")
    models = models_for(own, drift=1.2)
    at = own._measures.index("reward")
    without, samples = rolled(plain, models), rolled(own, models)
    for before, after in zip(without, samples, strict=True):
        assert before.tokens.tolist() == after.tokens.tolist()
        here = after.targets
        kl = (after.columns["old_logp"] - after.columns["reference_logp"])[here].sum()
        reward = float(before.columns["measures"][0][at]) - 0.5 * float(kl)
        assert float(after.columns["measures"][0][at]) == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_reward_model_scores_prompt_and_completion(layout: str) -> None:
    own = task(rewards=[], reward_model="/somewhere", reward_model_weight=2.0)
    models = models_for(own, layout)
    samples = rolled(own, models)
    at, total = own._measures.index("reward/reward_model"), own._measures.index("reward")
    for sample in samples:
        with torch.no_grad():
            ids, _ = text_of(sample)
            score = float(models["reward_model"].module(input_ids=ids[None]).logits)
        measures = sample.columns["measures"][0]
        assert float(measures[at]) == pytest.approx(score, abs=1e-5)
        assert float(measures[total]) == pytest.approx(2 * score, abs=1e-5)


def test_eval_completions_have_rewards_too() -> None:
    own = task(rewards=["exact_match", EVEN], reward_weights=[1, 0.5])
    own.exp.task.eval_generate = 2
    prompts: Any = [types.SimpleNamespace(tokens=(5,), expected="ab c") for _ in range(2)]
    scores = own.score(prompts, ["ab c", "abc"])
    assert scores == {
        "exact_match": 0.5,
        "reward/exact_match": 0.5,
        "reward/even": 0.25,
        "reward": pytest.approx(0.625),
    }
    assert {*scores} == {name for name, metric in own.metrics.items() if "eval" in metric.kinds}


def warned(steps: list[tuple[float, float]]) -> dict[int, list[str]]:
    """The warnings by step, from 1, of (share without signal, tokens)."""
    watch = CollapseWatch(may_stop=False)
    warnings = {
        number: watch.see(no_signal=no_signal, reward=0.25, tokens=tokens)
        for number, (no_signal, tokens) in enumerate(steps, start=1)
    }
    return {number: texts for number, texts in warnings.items() if texts}


def test_equal_rewards_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    silent, other = (1.0, 50.0), (0.9, 50.0)
    assert warned([*[silent] * (STEPS - 1), other] * 3) == {}
    warnings = warned([other, *[silent] * 3 * STEPS])
    assert [*warnings] == [STEPS + 1]
    assert "the same reward in each of the last 10 steps (mean reward now 0.25)" in str(warnings)
    own = task(rewards=["exact_match"], max_new_tokens=2, group_size=2)
    own._collapse._silent_steps = STEPS - 1
    rolled(own, models_for(own))
    assert "WARNING: step 1: all completions of a prompt had the same" in capsys.readouterr().out


def test_a_run_whose_groups_all_have_one_reward_ends() -> None:
    watch = CollapseWatch(may_stop=True)
    for no_signal in (*[1.0] * 19, 0.9, *[1.0] * 19):
        watch.see(no_signal=no_signal, reward=0.0, tokens=5.0)
    with pytest.raises(ConfigError, match=r"the last 20 steps .* task\.max_lost=1 trains on"):
        watch.see(no_signal=1.0, reward=0.0, tokens=5.0)


def test_completions_that_become_short_are_named_once() -> None:
    long, short = (0.0, 100.0), (0.0, 15.0)
    assert warned([*[long] * 20, *[short] * 3, *[long] * 20]) == {}
    assert warned([(0.0, 25.0 if number > 20 else 100.0) for number in range(60)]) == {}
    assert warned([short] * 40) == {}, "short from the beginning"
    warnings = warned([*[long] * 20, *[short] * 40])
    assert [*warnings] == [20 + STEPS]
    assert "averaged 15.0 tokens over the last 10 steps, and 100.0 at first" in str(warnings)


def test_older_samples_are_weighted_by_how_likely_they_are_now() -> None:
    """Truncated importance sampling, by token and by sequence."""
    policy = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    sampler = torch.tensor([-2.0, -2.0, -0.4, -2.0])
    sequences = torch.tensor([0, 0, 1, 1])
    common: dict[str, Any] = {"count": 3, "cap": 2.0}
    weights, over = importance_weights("token", policy - sampler, sequences, **common)
    torch.testing.assert_close(weights, torch.tensor([2.0, 1.0, math.exp(-0.1), math.exp(-1.0)]))
    assert over.tolist() == [True, False, False, False]
    weights, over = importance_weights("sequence", policy - sampler, sequences, **common)
    torch.testing.assert_close(weights, torch.tensor([2.0, 2.0, math.exp(-1.1), math.exp(-1.1)]))
    assert over.tolist() == [True, True, False, False]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "gspo", "rloo", "cispo"])
def test_importance_weights_scale_the_gradient(loss: str) -> None:
    options = Options(loss=loss)
    sequences = torch.tensor([0, 0, 1])
    advantages = torch.tensor([1.0, -0.5])

    def gradient(importance: torch.Tensor | None) -> torch.Tensor:
        logps = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
        total, *_ = policy_loss(
            options, logps, logps.detach(), advantages, sequences, importance=importance
        )
        (result,) = torch.autograd.grad(total, logps)
        return result

    weights = torch.tensor([0.5, 0.5, 2.0])
    torch.testing.assert_close(gradient(weights), gradient(None) * weights)
    torch.testing.assert_close(gradient(torch.ones(3)), gradient(None))
