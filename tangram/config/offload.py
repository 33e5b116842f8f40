"""Whether offload of activations moves anything, said before any process starts."""

from __future__ import annotations

from tangram.config.model import LayerKeys, ModelConfig
from tangram.errors import ConfigError
from tangram.placement.topology import Topology
from tangram.platform.offload import STAY


def check_offload(model: ModelConfig, topology: Topology) -> str:
    """Check the components that offload; what was found in a few words.

    Args:
        model: the assembled model.

    Raises:
        ConfigError: nothing would ever leave the device.
    """
    asked = {name: section for name, section in model.layered.items() if section.activation_offload}
    if not asked:
        return "off"
    moved, reasons = [], []
    for name, section in asked.items():
        runs = [(len(chunk.text if name == "text_decoder" else chunk.vision), chunk.pp_rank) for chunk in topology.order]
        calls = max(_calls(section, layers) for layers, _ in runs)
        # Where micro-batches wait for later stages, the next one pushes out what the last calls saved.
        waiting = any(layers and (rank < topology.pipeline - 1 or topology.virtual > 1) for layers, rank in runs)
        if name == "vision_encoder" and section.freeze:
            reasons.append(f"{name} is frozen and saves nothing")
        elif calls <= STAY and not waiting:
            reasons.append(f"{name} has {calls} layers, or groups of layers that are recomputed together, and the last {STAY} stay on the device")
        else:
            moved.append(name)
    if not moved:
        raise ConfigError(f"activation_offload would move nothing: {'; '.join(reasons)}; leave it out")
    return ", ".join(moved)


def _calls(section: LayerKeys, layers: int) -> int:
    """What a run of layers is offloaded in."""
    together = section.recompute_num_layers if section.recompute_method == "uniform" else 1
    return -(-layers // (together or 1))
