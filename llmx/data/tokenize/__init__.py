"""From examples to token ids and target tokens; loading and training tokenizers."""
