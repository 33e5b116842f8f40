"""What is new: a learned scale on each branch of a layer, positions of another shape, the merge of 2 x 2 patches by pixel shuffle."""

from collections.abc import Callable

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from tangram.models.clip import ClipEncoder
from tangram.models.norms import NORMS, parameter_device
from tangram.models.projector import MLPProjector
from tangram.models.specs import layer_spec


class ScaledAdd(nn.Module):
    """``residual + weight * (branch + bias)``, in the place of megatron-core's bias-dropout-add (Touvron et al. 2021, LayerScale)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(branch: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            out, bias = branch
            return residual + self.weight * (out if bias is None else out + bias)

        return add


def scaled_layer_spec(section) -> ModuleSpec:
    spec = layer_spec(section)
    for branch in ("self_attn_bda", "mlp_bda"):
        setattr(spec.submodules, branch, ModuleSpec(module=ScaledAdd, params={"width": section.hidden_size}))
    return spec


class Positions(nn.Module):
    """A table ``weight`` [1, positions, width], all of it at once."""

    def __init__(self, rows: int, width: int, **where) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, rows, width, **where))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.weight[0, numbers]


class InternEncoder(ClipEncoder):
    """CLIP's tower without the norms before and after, and with layer scale, which is in the layer spec."""

    def __init__(self, section, options, numbers, first, groups) -> None:
        super().__init__(section, options, numbers, first, groups)
        if first:
            where = {"dtype": options.dtype, "device": parameter_device(self.config)}
            self.position_embeddings = Positions(section.positions, section.hidden_size, **where)
            self.class_token = nn.Parameter(torch.empty(1, 1, section.hidden_size, **where))
            self.ln_pre = nn.Identity()
        if hasattr(self, "ln_post"):
            del self.ln_post

    def merge(self, patches: Tensor) -> Tensor:
        """Pixel shuffle: squares of patches side by side, [n, 1, width] -> [n / merge^2, 1, merge^2 * width]."""
        _, rows, columns = self.section.picture_grid
        merge = self.section.spatial_merge_size
        cells = patches.view(-1, rows // merge, merge, columns // merge, merge, patches.shape[-1]).transpose(2, 3)
        return cells.reshape(-1, 1, merge**2 * patches.shape[-1])


class NormedProjector(MLPProjector):
    """Norm over the merged width, then two linears."""

    def __init__(self, section, options, groups) -> None:
        super().__init__(section, options, groups)
        self.layernorm = NORMS["LayerNorm"](self.config, section.input_size, section.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.layernorm(hidden))
