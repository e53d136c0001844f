"""Checks of a run against its model, layout and machine. Each one raises `UserError`. Imports no torch."""
