"""What a person looks at: the plan before a run; tables, loss curve and HTML after it.

``python -m llmx.observe.report RUN_DIR`` reads a run directory and nothing else.
"""
