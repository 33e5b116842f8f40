"""Blocks, topology, tensor tables and the proof that they cover a model. Imports neither torch nor megatron."""
