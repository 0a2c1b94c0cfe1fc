"""The training state inside a DeepSpeed engine as fragments of a checkpoint, and back.

``engine_state`` captures and restores; ``layout`` says where DeepSpeed keeps each parameter's
values on this rank, at every ZeRO stage and precision; ``values`` are counts, tables and the loss
scale; ``hashing`` is the hash of all weights; ``refresh`` updates the model's own copies. Needs
torch: the control process must not import it.
"""
