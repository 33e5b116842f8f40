"""Backends: how an assembled model is run."""
