"""From an experiment to a DeepSpeed engine.

``process_group`` finds this rank's GPU and joins the others; ``build`` makes the networks and
wraps them; ``optimizer`` is what DeepSpeed wraps; ``loss_scale`` corrects its fp16 scale.
"""
