"""Makes token ids and targets of examples, on all cores; loading and training tokenizers.

``encoder`` turns rows into examples and these into blocks of tokens: ``documents`` encodes texts,
``conversations`` rendered chats; ``truncation`` cuts what is too long. ``byte_level`` is the fast
path of byte-level BPE tokenizers, proven to give the ids of ``tokenizers``. ``tokenizer`` loads
one, ``train`` trains one.
"""
