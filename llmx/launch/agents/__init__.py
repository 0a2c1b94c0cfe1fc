"""The processes on the hosts (``agent.py``), and how the supervisor uses them.

``connection.py`` is the protocol; ``preflight.py`` starts agents and checks every host before the
ranks start; ``shutdown.py`` ends the ranks.
"""
