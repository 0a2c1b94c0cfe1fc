"""The training state inside a DeepSpeed engine as fragments of a checkpoint, and back.

``engine_state`` captures, restores and hashes; ``layout`` says where DeepSpeed keeps each
parameter's values on this rank, at every ZeRO stage and precision; ``values`` are counts, tables
and the loss scale. Needs torch: the control process must not import it.
"""
