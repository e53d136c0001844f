"""Support for multi-node jobs: the preflight of all nodes, and vLLM servers on other nodes (slurm/lib.sh)."""
