"""Which way round a file holds stacked experts.

The hub's files, and those of transformers 4.x, hold the experts of a layer as ``[experts, in, out]``; transformers 5.x saves
``[experts, out, in]`` under the same names (seen with 5.23.0, ``Qwen3VLMoeForConditionalGeneration.save_pretrained``).
"""

from __future__ import annotations

from collections.abc import Mapping

from tangram.checkpoints.reader import TensorInfo
from tangram.errors import CheckpointError, name_some
from tangram.placement.table import Shape


def turned(shape: Shape) -> Shape:
    """The shape, or the place, of ``[experts, in, out]`` in ``[experts, out, in]``, and the reverse."""
    return shape[0], shape[2], shape[1]


def turned_stacks(stacks: Mapping[str, Shape], infos: Mapping[str, TensorInfo], where: str) -> frozenset[str]:
    """Names of the stacks that a file holds as ``[experts, out, in]``: all of them or none.

    A tensor with in = out tells nothing; the others decide for it. Tensors of neither shape, or absent, are left to the check of the model.

    Args:
        stacks: name and shape, ``[experts, in, out]``, of every stacked tensor of the model.
        infos: what the file holds.
        where: the file, for messages.

    Raises:
        CheckpointError: some are one way round and some the other, or all have in = out.
    """
    held = {name: (infos[name].shape, shape) for name, shape in stacks.items() if name in infos}
    telling = {name: found for name, (found, shape) in held.items() if shape != turned(shape)}
    hub = [name for name, found in telling.items() if found == stacks[name]]
    other = [name for name, found in telling.items() if found == turned(stacks[name])]
    if hub and other:
        raise CheckpointError(
            f"{where}: {len(hub)} tensors of experts are [experts, in, out]: {name_some(hub)}, and {len(other)} are [experts, out, in]: "
            f"{name_some(other)}; the files are of two checkpoints, save the model again"
        )
    if held and not telling:
        raise CheckpointError(
            f"{where}: the experts' tensors have in = out, {name_some(held)}, so nothing tells whether they are [experts, in, out], as the hub's "
            "files, or [experts, out, in], as transformers 5.x saves them"
        )
    return frozenset(held) if other else frozenset()
