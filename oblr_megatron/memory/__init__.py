"""The memory model of a run: what each rank and each engine holds, before anything is started. Imports no torch."""
