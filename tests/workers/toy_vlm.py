"""A small vision-language chain built of megatron-core's parallel layers, its tensor table, and the same model in plain torch.

It has what the engine must get right (patches, merge, image tokens put into text, a head on supervised positions, split and replicated
parameters, tied embeddings) and no attention, so that the plain version is a screen long.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tangram.config.data import DataConfig
from tangram.config.model import ModelConfig
from tangram.config.run import FeaturesConfig, ModelSource, ParallelConfig, RunConfig, TrainingConfig
from tangram.placement.table import Replicated, Rule, Source, Split, Vocabulary
from tangram.placement.topology import Chunk, Topology

VISION_WIDTH, TEXT_WIDTH, MERGE, PIXELS, VOCAB, IMAGE_TOKEN = 8, 16, 2, 12, 48, 7
VISION_LAYERS, TEXT_LAYERS = 2, 4


def toy_config(tied: bool, **freeze: bool) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "model_id": "toy",
            "img_context_token_id": IMAGE_TOKEN,
            "video_token_id": 8,
            "vision_start_token_id": 9,
            "image_encoder": {
                "vision_encoder": {
                    "model_id": "toy",
                    "num_layers": VISION_LAYERS,
                    "hidden_size": VISION_WIDTH,
                    "ffn_hidden_size": 16,
                    "num_attention_heads": 2,
                    "patch_size": 2,
                    "temporal_patch_size": 1,
                    "spatial_merge_size": MERGE,
                    "activation_func": "gelu",
                    "normalization": "RMSNorm",
                    "freeze": freeze.get("vision", False),
                },
                "vision_projector": {
                    "model_id": "toy",
                    "input_size": VISION_WIDTH,
                    "ffn_hidden_size": VISION_WIDTH * MERGE**2,
                    "hidden_size": TEXT_WIDTH,
                    "normalization": "RMSNorm",
                    "freeze": freeze.get("projector", False),
                },
            },
            "text_decoder": {
                "model_id": "toy",
                "num_layers": TEXT_LAYERS,
                "hidden_size": TEXT_WIDTH,
                "ffn_hidden_size": 32,
                "num_attention_heads": 4,
                "num_query_groups": 4,
                "vocab_size": VOCAB,
                "position_embedding_type": "rope",
                "untie_embeddings_and_output_weights": not tied,
                "freeze": freeze.get("text", False),
            },
        }
    )


def toy_run(tied: bool = True, freeze: dict[str, bool] | None = None, parallel: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    """A run of the toy; the data section is of no account here.

    The large adam_eps makes an update smooth in the gradient; with a tiny one rounding noise in a near-zero gradient moves a weight by lr.
    """
    settings = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.05, "adam_eps": 1e-3, **training}
    return RunConfig.model_construct(
        parallel=ParallelConfig.model_validate(parallel or {}),
        model=ModelSource(config=toy_config(tied, **(freeze or {}))),
        data=DataConfig.model_construct(),
        features=FeaturesConfig(),
        training=TrainingConfig.model_validate(settings),
    )


def toy_table(tied: bool) -> list[Rule]:
    def mlp(local: str, source: str, width: int, ffn: int, component: Any) -> list[Rule]:
        return [
            Rule(f"{local}.norm", (Source(f"{source}.norm", (width,)),), Replicated(), component),
            Rule(f"{local}.fc1.weight", (Source(f"{source}.fc1.weight", (ffn, width)),), Split(0), component),
            Rule(f"{local}.fc1.bias", (Source(f"{source}.fc1.bias", (ffn,)),), Split(0), component),
            Rule(f"{local}.fc2.weight", (Source(f"{source}.fc2.weight", (width, ffn)),), Split(1), component),
            Rule(f"{local}.fc2.bias", (Source(f"{source}.fc2.bias", (width,)),), Replicated(), component),
        ]

    merged = VISION_WIDTH * MERGE**2
    embedding = Source("embed.weight", (VOCAB, TEXT_WIDTH))
    head = embedding if tied else Source("head.weight", (VOCAB, TEXT_WIDTH))
    return [
        Rule("image_encoder.patch", (Source("vision.patch", (VISION_WIDTH, PIXELS)),), Replicated(), "vision", "first"),
        *mlp("image_encoder.layers.{i}", "vision.layers.{i}", VISION_WIDTH, 16, "vision"),
        Rule("image_encoder.projector.fc1.weight", (Source("vision.merge1", (merged, merged)),), Split(0), "vision", "last"),
        Rule("image_encoder.projector.fc2.weight", (Source("vision.merge2", (TEXT_WIDTH, merged)),), Split(1), "vision", "last"),
        Rule("text_decoder.embedding.weight", (embedding,), Vocabulary(VOCAB), "text", "first"),
        *mlp("text_decoder.layers.{i}", "text.layers.{i}", TEXT_WIDTH, 32, "text"),
        Rule("text_decoder.norm", (Source("text.norm", (TEXT_WIDTH,)),), Replicated(), "text", "last"),
        Rule("text_decoder.output_layer.weight", (head,), Vocabulary(VOCAB), "text", "last", tied=tied),
    ]


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def causal_mean(x: Tensor) -> Tensor:
    """Mean over the positions so far: [s, b, h] -> [s, b, h]."""
    count = torch.arange(1, x.shape[0] + 1, dtype=x.dtype)[:, None, None]
    return x.cumsum(0) / count


def plain_token_losses(weights: dict[str, Tensor], batch: dict[str, Tensor], tied: bool) -> Tensor:
    """Losses at supervised positions, in plain torch on whole tensors."""

    def mlp(x: Tensor, name: str) -> Tensor:
        w = {key: weights[f"{name}.{key}"] for key in ("norm", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}
        return x + F.linear(F.gelu(F.linear(normalise(x, w["norm"]), w["fc1.weight"], w["fc1.bias"])), w["fc2.weight"], w["fc2.bias"])

    text = weights["embed.weight"][batch["input_ids"]]
    if "pixel_values" in batch:
        x = F.linear(batch["pixel_values"], weights["vision.patch"])
        for i in range(VISION_LAYERS):
            x = mlp(x, f"vision.layers.{i}")
        x = F.linear(F.gelu(F.linear(x.reshape(-1, VISION_WIDTH * MERGE**2), weights["vision.merge1"])), weights["vision.merge2"])
        text = text.masked_scatter((batch["input_ids"] == IMAGE_TOKEN)[..., None], x)
    text = text.transpose(0, 1)
    for i in range(TEXT_LAYERS):
        text = mlp(text + causal_mean(text), f"text.layers.{i}")
    text = normalise(text, weights["text.norm"])
    rows, places = (batch["labels"][:, 1:] != -100).nonzero(as_tuple=True)
    logits = F.linear(text[places, rows], weights["embed.weight" if tied else "head.weight"])
    return F.cross_entropy(logits, batch["labels"][rows, places + 1], reduction="none")


def toy_weights(tied: bool) -> dict[str, Tensor]:
    """Every canonical tensor, random; the same in every process."""
    from tangram.placement.blocks import canonical_shapes

    topology = Topology.build(vision_layers=VISION_LAYERS, text_layers=TEXT_LAYERS)
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) / math.sqrt(shape[-1]) + (1.0 if name.endswith("norm") else 0.0)
        for name, shape in canonical_shapes(toy_table(tied), topology).items()
    }


GRIDS = {0: [[1, 2, 4]], 1: [[1, 4, 4], [1, 2, 2]], 2: [], 3: [[1, 2, 2]]}


def toy_batches(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Micro-batches of unequal length, images and labels; every third has no image."""
    batches = []
    for number in range(count):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        length, grids = (17, 31, 8, 24)[number % 4], GRIDS[number % 4]
        ids = torch.randint(10, VOCAB, (2, length), generator=generator)
        labels = ids.clone()
        labels[:, : length // 2 + number % 3] = -100
        labels[0, -1 - number % 3 :] = -100
        tokens = sum(t * h * w for t, h, w in grids) // MERGE**2
        first = min(tokens, 4)
        ids[0, 1 : 1 + first] = IMAGE_TOKEN
        ids[1, 2 : 2 + tokens - first] = IMAGE_TOKEN
        batch: dict[str, Any] = {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.zeros(3, *ids.shape, dtype=torch.int64),
        }
        if grids:
            batch["image_grid_thw"] = torch.tensor(grids)
            batch["pixel_values"] = torch.randn(tokens * MERGE**2, PIXELS, generator=generator)
        batches.append(batch)
    return batches


def build_toy_chunk(model: ModelConfig, chunk: Chunk, topology: Topology, dtype: torch.dtype, padded_vocab: int) -> nn.Module:
    """The chunk on megatron-core's layers; same contract as ``tangram.models.vlm.build_model_chunk``."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, vocab_parallel_cross_entropy
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    config = TransformerConfig(
        num_layers=TEXT_LAYERS,
        hidden_size=TEXT_WIDTH,
        num_attention_heads=4,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=topology.tensor,
        pipeline_model_parallel_size=topology.pipeline,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    common: dict[str, Any] = {"config": config, "init_method": nn.init.zeros_, "skip_bias_add": False}

    class MLP(nn.Module):
        def __init__(self, width: int, ffn: int) -> None:
            super().__init__()
            self.norm = nn.Parameter(torch.zeros(width, dtype=dtype))
            self.fc1 = ColumnParallelLinear(width, ffn, bias=True, gather_output=False, **common)
            self.fc2 = RowParallelLinear(ffn, width, bias=True, input_is_parallel=True, **common)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(F.gelu(self.fc1(normalise(x, self.norm))[0]))[0]

    class Projector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            merged = VISION_WIDTH * MERGE**2
            self.fc1 = ColumnParallelLinear(merged, merged, bias=False, gather_output=False, **common)
            self.fc2 = RowParallelLinear(merged, TEXT_WIDTH, bias=False, input_is_parallel=True, **common)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.gelu(self.fc1(x.reshape(-1, 1, VISION_WIDTH * MERGE**2))[0]))[0]

    class Toy(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.vp_stage = chunk.vp_rank if topology.virtual > 1 else None
            self.pre_process, self.post_process = chunk.position == 0, chunk.text_last
            self.share_embeddings_and_output_weights = not model.text_decoder.untie_embeddings_and_output_weights
            from megatron.core.enums import ModelType

            self.model_type = ModelType.encoder_or_decoder
            self.input_tensor: Tensor | None = None
            self.image_encoder, self.text_decoder = nn.Module(), nn.Module()
            if chunk.vision_first:
                self.image_encoder.patch = nn.Parameter(torch.zeros(VISION_WIDTH, PIXELS, dtype=dtype))
            self.image_encoder.layers = nn.ModuleList(MLP(VISION_WIDTH, 16) for _ in chunk.vision)
            if chunk.vision_last:
                self.image_encoder.projector = Projector()
            if chunk.text_first:
                self.text_decoder.embedding = VocabParallelEmbedding(padded_vocab, TEXT_WIDTH, init_method=nn.init.zeros_, config=config)
            self.text_decoder.layers = nn.ModuleList(MLP(TEXT_WIDTH, 32) for _ in chunk.text)
            self.borrows = self.share_embeddings_and_output_weights and chunk.text_first
            if chunk.text_last:
                self.text_decoder.norm = nn.Parameter(torch.zeros(TEXT_WIDTH, dtype=dtype))
                self.text_decoder.output_layer = ColumnParallelLinear(
                    TEXT_WIDTH, padded_vocab, bias=False, gather_output=False, skip_weight_param_allocation=self.borrows, **common
                )

        def set_input_tensor(self, tensor: Any) -> None:
            self.input_tensor = tensor[0] if isinstance(tensor, list) else tensor

        def shared_embedding_or_output_weight(self) -> Tensor | None:
            if chunk.text_first:
                return self.text_decoder.embedding.weight
            return self.text_decoder.output_layer.weight if chunk.text_last else None

        def freeze(self, freeze_text_decoder: bool, freeze_image_encoder: bool, freeze_image_projection: bool) -> None:
            for name, parameter in self.named_parameters():
                if "projector" in name:
                    parameter.requires_grad_(not freeze_image_projection)
                else:
                    parameter.requires_grad_(not (freeze_text_decoder if name.startswith("text") else freeze_image_encoder))

        def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any = None, labels: Any = None, **images: Any) -> Any:
            x = self.input_tensor
            if chunk.has_vision:
                pixels = images.get("pixel_values", torch.zeros(MERGE**2, PIXELS, dtype=dtype))
                x = F.linear(pixels, self.image_encoder.patch)[:, None] if chunk.vision_first else x
                for layer in self.image_encoder.layers:
                    x = layer(x)
                x = self.image_encoder.projector(x) if chunk.vision_last else x
            if not chunk.has_text:
                return x
            if chunk.text_first:
                places = (input_ids == IMAGE_TOKEN)[..., None]
                x = self.text_decoder.embedding(input_ids).masked_scatter(places, x).transpose(0, 1).contiguous()
            for layer in self.text_decoder.layers:
                x = layer(x + causal_mean(x))
            if not chunk.text_last:
                return x
            rows, where = (labels[:, 1:] != -100).nonzero(as_tuple=True)
            x = normalise(x, self.text_decoder.norm)[where, rows]
            weight = self.text_decoder.embedding.weight if self.borrows else None
            logits = self.text_decoder.output_layer(x[:, None], weight=weight)[0].float()
            losses = vocab_parallel_cross_entropy(logits, labels[rows, where + 1][:, None])[:, 0]
            return {"loss_dict": {"token_losses": losses, "samples": rows}, "logits": None}

    return Toy()
