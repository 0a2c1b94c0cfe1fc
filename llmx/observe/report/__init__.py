"""What a person looks at: the plan before a run; tables, loss curve and HTML after it.

``python -m llmx report RUN_DIR`` reads a run directory, prints tables, and writes ``loss.png`` and
``report.html`` into it.
"""
