"""``metrics.jsonl`` and metrics by name: written by rank 0, read by everybody.

One JSON object a line, flushed a line at a time, each with its ``kind``:

    {"kind": "start", "time": 0.0, "total_steps": 600, "tokens_per_step": 4096, "num_parameters": 1,
     "num_samples": 9, "world_size": 2, "resumed_from": 0, "loss_unit": "nats per target token",
     "metrics": {"exact_match": {"title": "exact match", "format": "percent",
                                 "higher_is_better": true, "kinds": ["eval"]}}}
    {"kind": "train", "step": 10, "time": 0.0, "samples": 640, "tokens": 40960,
     "target_tokens": 9999, "epoch": 0.1, "loss": 3.2, "loss_mean": 3.3, "lr": 1e-3,
     "grad_norm": 0.9, "loss_scale": 1.0, "step_time_s": 0.1, "tokens_per_s": 4e4, "mfu": 0.31,
     "memory_gib": [1.2, 1.2], "data_wait_s": 0.0}
    {"kind": "eval", "step": 600, "time": 0.0, "loss": 1.1, "target_tokens": 999,
     "exact_match": 0.97}
    {"kind": "event", "event": "resumed", "step": 300, "attempt": 2, "world_size": 2,
     "total_steps": 600}
    {"kind": "end", "step": 600, "time": 0.0, "weights_hash": "32 hex digits"}

``loss`` is that of the line's one step; the console, ``status`` and reports show it, with the mean
beside it where the two differ. ``loss_mean`` is the mean over all target tokens since the last
line, or since a resume between two lines: it alone is not the same in a resumed run as in an
undisturbed one. Times and tokens a second are those of the same steps, evaluations left out.
``tokens`` counts non-padding tokens; ``mfu`` is null where the peak is unknown. A NaN is written as
null with ``"nonfinite": true``. ``forward_s``, ``backward_s`` and ``update_s`` are the
seconds of these phases in a step, one a rank (in the last two, ranks wait for each other), and
``idle_share`` the mean part of the slowest rank's forward time that the others wait for it; all are
there with several ranks up to ZeRO stage 2 (docs/unequal.md). Where they are not, ``probe_s`` is
how long each rank took for a small product of matrices, at most twice a minute. An ``eval`` line
with ``"step": 0`` is the evaluation before training. A mixture of experts also has
``expert_load_max`` and ``experts_idle``, and ``aux_loss`` where the auxiliary loss is trained
(docs/models.md). A task whose loss is not weighted by target tokens has ``weight`` in the place of
``target_tokens``.

``metrics`` of the ``start`` line declares what the task measures besides the loss
(``declared.Metric``); a ``resumed`` event declares it again, and the newest declaration counts.
Each is a flat key of the lines of its ``kinds``: ``exact_match`` in ``eval`` lines,
``eval/exact_match`` for trackers and ``checkpoint.metric``; null where this evaluation did not
measure it. Readers show every number of an ``eval`` line: one that is not declared has its key for
a title and a plain number format.

Events are not metrics: trackers may ignore those they do not know. Each has its ``step``: ``saved``
(``reason``, ``stall_s``, ``background_s``, ``bytes``), ``save_failed`` (``reason``),
``passed_over`` (a checkpoint was due while the one before was still being written), ``skipped``
(``samples``: first, and first no more), ``straggler`` (``rank``, ``host``, ``factor``: how many
times longer than the others it computes; ``forward_s`` or ``probe_s`` of all ranks),
``rebalanced`` (``sizes``: samples of each micro step of each rank from the next step on;
``time_factor``: predicted time of a step against the split before), ``damaged``
(``checkpoint``, ``reason``; ``step`` is where the run goes on). What a resume does with the file:
docs/development/contracts.md, "Resuming".

Standard library only; every room may import it.
"""

from __future__ import annotations

from llmx.run.metrics.declared import Metric, declared_in, declared_of, measured, metric_of

__all__ = ["Metric", "declared_in", "declared_of", "measured", "metric_of"]
