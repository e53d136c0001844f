"""What a layout costs before it is run: a stated model of time, the trainer's own estimate of memory, and a search."""
