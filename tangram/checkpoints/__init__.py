"""Weights in and out: Hugging Face directories, ``mp_rank`` directories, fresh initialisation, conversion and export.

Whatever holds a model's tensors is a ``CanonicalReader`` (reader.py). Placements say which rectangles of which canonical tensors make
up a local parameter, and copier.py moves them, in both directions. All else here is a source or a sink of that one path.
"""
