"""Typed configuration: schemas, readers and checks."""
