"""The arithmetic of ``task=grpo``: advantages, estimates of the KL divergence, losses.

Tried by ``python -m pytest tests/unit/test_tasks_grpo.py``, against TRL's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from llmx.tasks.grpo import Options


def group_advantages(kind: str, rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The advantages, and the standard deviation of each group (NaN without two rewards).

    Args:
        kind: ``Options.advantage``.
        rewards: [prompts, group]; NaN for a completion without one, whose advantage is 0 and which
            counts in neither mean nor deviation.
    """
    has_reward = ~np.isnan(rewards)
    counts = has_reward.sum(axis=1, keepdims=True)
    means = np.nansum(rewards, axis=1, keepdims=True) / np.maximum(counts, 1)
    centred = np.nan_to_num(rewards - means)
    num_others = np.maximum(counts - 1, 1)
    spread = np.sqrt((centred**2).sum(axis=1, keepdims=True) / num_others)
    match kind:
        case "normalised":  # GRPO, Shao et al. 2024, with TRL's epsilon
            advantages = centred / (spread + 1e-4)
        case "centred":  # Dr. GRPO, Liu et al. 2025
            advantages = centred
        case "leave_one_out":  # RLOO, Ahmadian et al. 2024
            advantages = centred * counts / num_others
        case _:
            raise ValueError(kind)
    return advantages, np.where(counts > 1, spread, np.nan)[:, 0]


def kl_estimate(kind: str, difference: torch.Tensor) -> torch.Tensor:
    """Of KL(policy || reference) at each token, from ``difference``: its log-probability under the
    policy minus that under the reference (Schulman 2020)."""
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference**2 / 2
        case "k3":
            return (-difference).exp() - 1 + difference
    raise ValueError(kind)


def policy_loss(
    options: Options,
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    reference_logps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(the summed loss, what was clipped, the KL estimate of each token or None).

    What was clipped is [n] or [sequences], as the loss has one ratio for each token or sequence.

    Args:
        logps: fp32 [n], of the target tokens, with a graph.
        old_logps: [n], of the policy that drew them.
        advantages: [sequences].
        sequences: int64 [n], the sequence of each token.
        reference_logps: [n], where ``options.beta`` is not 0.
    """
    import torch

    def by_sequence(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(advantages).index_add(0, sequences, values)

    counts = by_sequence(torch.ones_like(logps))

    def summed(values: torch.Tensor) -> torch.Tensor:
        """The sum of values by token, as the loss weighs tokens."""
        match options.loss:
            case "grpo" | "gspo":
                return (by_sequence(values) / counts.clamp(min=1)).sum()
            case "dr_grpo":
                return values.sum() / options.max_new_tokens
        return values.sum()

    low, high = 1 - options.clip_low, 1 + options.clip_high
    log_ratios, of_sequence = logps - old_logps, options.loss in ("gspo", "rloo")
    if of_sequence:
        # Zheng et al. 2025 take the mean over the tokens, RLOO the probability of the whole.
        divisor = counts.clamp(min=1) if options.loss == "gspo" else 1
        log_ratios = by_sequence(log_ratios) / divisor
    ratios, factors = log_ratios.exp(), advantages if of_sequence else advantages[sequences]
    over, under = (ratios > high) & (factors > 0), (ratios < low) & (factors < 0)
    if options.loss == "cispo":  # MiniMax-M1, 2025, eq. 4
        gains, clipped = ratios.clamp(max=high).detach() * factors * logps, over
    else:
        gains = torch.minimum(ratios * factors, ratios.clamp(low, high) * factors)
        clipped = over | under
    total = -(gains * (counts > 0)).sum() if of_sequence else -summed(gains)
    if reference_logps is None:
        return total, clipped, None
    kl = kl_estimate(options.kl, logps - reference_logps)
    if options.kl_in == "loss":
        total = total + options.beta * summed(kl)
    return total, clipped, kl
