"""A model as a Hugging Face directory: of a checkpoint, or of the engine at the end of training.

``shards`` writes the files in both cases. ``weights`` reads a checkpoint and needs numpy only;
``converted`` (architectures whose files differ from memory) and ``model`` (from the engine) need
torch.
"""
