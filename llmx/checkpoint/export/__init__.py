"""A model as a Hugging Face directory: of a checkpoint, or of the engine at the end of training.

``weights`` reads a checkpoint and writes the files in both cases, with numpy only; ``converted``
(architectures whose files differ from memory) and ``model`` (from the engine) need torch.
"""
