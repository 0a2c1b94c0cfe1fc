"""Makes rows of records: conversations, documents, labels, preference pairs.

``rows`` are what records mean. ``formats`` is the registry of dataset formats, each with its
readers; ``turns`` reads the turns of chats; ``columns`` refuses columns that change what a record
means. ``templates`` are chat templates; ``rendering`` writes conversations with one, and tells
where the completions lie in the text.
"""
