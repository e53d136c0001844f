"""What the processes of a run need: launcher, signals, exchange between ranks, deadlines."""
