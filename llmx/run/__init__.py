"""The run directory: its paths, its snapshot, where the run comes from, its metrics.

``rundir`` names every file and writes one atomically. ``snapshot`` writes, before anything is
launched, and refuses a directory that already contains a run:

    config.yaml        the whole resolved config, with ``schema_version``; read back and compared
    overrides.yaml     what the user typed
    plan.json          hosts, ranks, device and micro batch of each, steps, predicted memory
    traces.json        traced micro steps, by which its memory was predicted; only where there are
    ds_config.json     what ``deepspeed.initialize`` gets: every value explicit, never "auto"
    provenance.json    code by file, commit and diff, packages, devices, variables, and cheap
                       fingerprints of data, tokenizer and model; ``config``: a hash of the values
                       in config.yaml (null or missing: whether they were edited is unknown)
    run.json           {"run_id": "16 hex digits", "created": t, "parent": null | "run id"}

``run_id`` is the run's identity for all attempts, also W&B's run id. ``.token-UID`` (0600) is the
secret ``LLMX_RUN_TOKEN``, by which processes of an earlier attempt are found and ended before the
next.

``provenance`` records and compares; ``metrics`` reads ``metrics.jsonl`` and knows how a metric is
shown; ``tail`` reads every JSON file, says what is damaged in it, and follows a file of lines that
others append to.
"""
