"""A real cluster on one machine, and the tests that train on it.

``python -m tests.cluster up`` opens one by hand; ``tests/cluster/netns.py`` has the API.
"""
