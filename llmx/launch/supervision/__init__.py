"""The supervisor: attempts, what it monitors, how they end, and what follows.

``supervisor.py`` runs attempts (``attempt.py``). ``monitor.py`` observes one, ``outcome.py``
classifies how it ended, ``restart.py`` decides what follows; ``backoff.py`` prepares the next one.
"""
