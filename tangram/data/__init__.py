"""Samples to micro-batches: JSON files, chat templates, images, order, collation. Importing this package imports no torch."""
