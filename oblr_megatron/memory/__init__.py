"""The memory model: bytes on each rank and engine, predicted before a run starts. Imports no torch."""
