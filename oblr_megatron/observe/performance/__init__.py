"""What a run costs: FLOPs, devices, seconds and memory of every rank, profiles."""
