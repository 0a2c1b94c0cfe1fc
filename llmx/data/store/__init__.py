"""The sample store: its name, building it (staging, truncation, packing), opening it, summary."""
