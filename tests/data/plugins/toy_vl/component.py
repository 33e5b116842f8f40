"""The component: the neighbour's encoder, and a norm where its last layer is."""

from tangram.models.norms import LayerNorm
from tangram.models.vision import VisionEncoder


class ToyVisionEncoder(VisionEncoder):
    def __init__(self, section, options, numbers, first, groups):
        super().__init__(section, options, numbers, first, groups)
        self.holds_last = numbers.stop == section.num_layers
        if self.holds_last:
            self.post_layernorm = LayerNorm(self.config, section.hidden_size, section.layernorm_epsilon)

    def forward(self, hidden, grids):
        hidden = super().forward(hidden, grids)
        return self.post_layernorm(hidden) if self.holds_last else hidden
