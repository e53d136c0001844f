"""What a job of several nodes needs beside the run itself: the preflight, and servers on other nodes (slurm/lib.sh)."""
