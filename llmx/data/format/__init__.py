"""From a record to what it means: a conversation, a document, a label, a preference pair."""
