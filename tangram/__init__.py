"""Tangram: assemble, split, train and prove vision-language models."""

__version__ = "0.1.0"
