"""`train --dry-run`: checks a run of any number of ranks in one process, without weights, data, GPUs or a cluster.

fake_ranks.py        one process that takes the place of one rank after another, with megatron-core's groups
models.py            the model of each rank on meta devices, and its parameters
device_memory.py     memory of a device during training and during sampling
checking.py          the checks of `preflight` that need neither weights nor data
examine.py           all of these for one run
table.py             the table and the line of JSON
dry_run_command.py   the command-line flags
"""
