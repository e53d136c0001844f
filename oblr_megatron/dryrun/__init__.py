"""`train --dry-run`: checks a run of any number of ranks in one process, without weights, data, GPUs or a cluster."""
