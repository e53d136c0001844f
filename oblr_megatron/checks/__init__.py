"""Checks of a run against its model, its layout and its machine. Each finding is a `UserError`. Imports no torch."""
