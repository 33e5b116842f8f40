"""Command line: parse, call, print. No module here imports torch, megatron or transformers before its command runs."""
