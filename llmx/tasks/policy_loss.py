"""The arithmetic of ``task=grpo`` and ``task=ppo``: advantages, estimates of the KL divergence,
losses.

Tried by ``python -m pytest tests/unit/test_tasks_grpo.py``, against TRL's, and
``tests/unit/test_tasks_ppo.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def estimated_advantages(
    rewards: np.ndarray, values: np.ndarray, *, gamma: float, gae_lambda: float
) -> np.ndarray:
    """Generalised advantage estimation over the tokens of one completion (Schulman et al. 2016,
    eq. 16). The completion ends with its last token, so the value after it is 0.

    Args:
        rewards: fp64 [tokens], of each token.
        values: [tokens], of the state in which each token was drawn.
    """
    errors = rewards + gamma * np.append(values[1:], 0.0) - values
    advantages, advantage = np.zeros(len(errors)), 0.0
    for at in reversed(range(len(errors))):
        advantage = errors[at] + gamma * gae_lambda * advantage
        advantages[at] = advantage
    return advantages


def whitened(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Advantages with mean 0 and variance 1 over the tokens of all completions, as TRL's
    ``masked_whiten`` computes them; one token alone is only centred."""
    if not (tokens := np.concatenate([*advantages, np.zeros(0)])).size:
        return list(advantages)
    variance = tokens.var(ddof=1) if len(tokens) > 1 else 0.0
    return [(part - tokens.mean()) / np.sqrt(variance + 1e-8) for part in advantages]


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp``, at most e^20: fp32 ends at e^88, which the sum over a sequence may pass. Beyond it
    there is no gradient."""
    return log_ratio.clamp(max=20.0).exp()


def kl_estimate(kind: str, difference: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy || reference) at each token (Schulman 2020).

    ``difference``: its log-probability under the policy minus that under the reference.
    """
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference**2 / 2
        case "k3":
            return ratio_of(-difference) - 1 + difference
    raise ValueError(kind)


def clipped_gains(
    ratios: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's objective of each action, and whether it is clipped (Schulman et al. 2017, eq. 7)."""
    import torch

    gains = torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
    over, under = (ratios > high) & (advantages > 0), (ratios < low) & (advantages < 0)
    return gains, over | under


def value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each value, at least that of the value held within ``clip`` of the
    old one; and whether that decides. Arrays are [n]."""
    import torch

    held = old_values + (values - old_values).clamp(-clip, clip)
    errors, held_errors = (values - returns) ** 2, (held - returns) ** 2
    return torch.maximum(errors, held_errors) / 2, held_errors > errors


def importance_weights(
    kind: str, log_ratios: torch.Tensor, sequences: torch.Tensor, *, count: int, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncated importance weights of tokens that other weights have drawn, and which of them were
    truncated; [n] each.

    Args:
        kind: ``token``, or ``sequence``: all tokens of a sequence have that of the whole.
        log_ratios: [n], of each token: its log-probability under the trained policy minus that
            under the one that drew it.
        sequences: int64 [n], the sequence of each token.
    """
    import torch

    if kind == "sequence":
        zeros = torch.zeros(count, dtype=log_ratios.dtype, device=log_ratios.device)
        log_ratios = zeros.index_add(0, sequences, log_ratios)[sequences]
    ratios = log_ratios.exp()
    return ratios.clamp(max=cap), ratios > cap


def policy_loss(
    options: Options,
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    reference_logps: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(the summed loss, what was clipped, the KL estimate of each token or None).

    What was clipped is [n] or [sequences], as the loss has one ratio for each token or sequence.

    Args:
        logps: fp32 [n], of the target tokens, with a graph.
        old_logps: [n], of the policy that drew them.
        advantages: [sequences].
        sequences: int64 [n], the sequence of each token.
        reference_logps: [n], where ``options.beta`` is not 0.
        importance: [n], of tokens that other weights have drawn (``importance_weights``).
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
    ratios, factors = ratio_of(log_ratios), advantages if of_sequence else advantages[sequences]
    gains, clipped = clipped_gains(ratios, factors, low, high)
    if options.loss == "cispo":  # MiniMax-M1, 2025, eq. 4
        gains = ratios.clamp(max=high).detach() * factors * logps
        clipped = (ratios > high) & (factors > 0)
    if importance is not None:
        alike = by_sequence(importance) / counts.clamp(min=1)  # in a sequence
        gains = gains * (alike if of_sequence else importance)
    total = -(gains * (counts > 0)).sum() if of_sequence else -summed(gains)
    if reference_logps is None:
        return total, clipped, None
    kl = kl_estimate(options.kl, logps - reference_logps)
    if options.kl_in == "loss":
        total = total + options.beta * summed(kl)
    return total, clipped, kl
