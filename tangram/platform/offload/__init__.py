"""Offload of activations: what autograd saves waits in host memory. Importing this imports no torch; ``chain`` does the work."""

STAY = 2
"""Calls whose tensors are on the device in the forward pass."""
