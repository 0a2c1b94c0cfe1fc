"""Build a DeepSpeed engine from an experiment.

``process_group`` finds this rank's GPU and joins the others; ``build`` makes the networks and
wraps them; ``optimizer`` and ``muon`` are what DeepSpeed wraps; ``patches`` corrects its engine.
"""
