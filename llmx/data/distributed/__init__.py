"""Several hosts prepare one dataset: each a shard of it, or one host all of it, which it sends.

``collective.prepare_together`` is called by every rank. The hosts compare what they are to prepare
and which of them share a disk (``transfer``). Where records can be read apart, each host stages a
run of the sources' bytes (``shards``), and the first host puts the shards together; else the
first host prepares everything. Hosts with another disk get the finished store in a chain. The
store has the same bytes as one that a single host prepares.
"""
