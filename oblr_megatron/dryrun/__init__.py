"""`train --dry-run`: a run of any number of ranks checked in one process, without weights, data, GPUs or a cluster.

fake_ranks.py   one process that stands as one rank after another, with megatron-core's own groups
models.py       the model of every position, built on meta devices; parameters, and whose ranks hold what
memory.py       what a rank holds while it trains, and while the engine beside it samples
checking.py     everything `preflight` checks that needs neither weights nor data
table.py        the table and the line of JSON at the end
command.py      flags of the command line
"""
