"""Baselines and gates: whether a run still gives the numbers that an earlier one gave. Imports no torch."""
