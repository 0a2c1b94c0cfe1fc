"""From a record to what it means: a conversation, a document, a label, a preference pair.

``formats`` recognises and reads the dataset formats, ``turns`` the turns of chats; ``columns``
refuses columns that change what a record means. ``templates`` are chat templates; ``rendering``
writes conversations with one, and tells where the completions lie in the text.
"""
