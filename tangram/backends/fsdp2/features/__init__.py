"""What a run does to save memory: recomputation, offload of activations, chunks of micro-batches."""

from tangram.backends.fsdp2.features.apply import prepare

__all__ = ["prepare"]
