"""The manifest of an ``mp_rank`` directory: what it was converted from, and for which split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

import tangram
from tangram.checkpoints.copier import show
from tangram.config.model import ModelConfig
from tangram.config.parsing import Section, parse_section, read_mapping
from tangram.errors import CheckpointError, ConfigError
from tangram.families.base import get_family
from tangram.placement.topology import Topology

MANIFEST = "tangram_manifest.json"


class SplitManifest(Section):
    """For which family and split a directory was written."""

    format_version: Literal[1] = 1
    family: str
    tensor_parallel: int
    vit_pp_layers: list[list[int]]
    llm_pp_layers: list[list[int]]
    expert_parallel: int = 1
    vision_tensor_parallel: int = 0
    """Of the vision encoder and the projector; 0: ``tensor_parallel``."""
    padded_vocab: int
    """Rows of the word embedding over all tensor-parallel ranks."""
    hf_config: dict[str, Any]
    """config.json of the source; of an adapter's base."""
    package_version: str = tangram.__version__

    @property
    def topology(self) -> Topology:
        """The split that the directory was converted for.

        Raises:
            ConfigError: the lists are not those of a split.
        """
        return Topology(
            tensor=self.tensor_parallel,
            vision=tuple(map(tuple, self.vit_pp_layers)),
            text=tuple(map(tuple, self.llm_pp_layers)),
            expert=self.expert_parallel,
            vision_tensor=self.vision_tensor_parallel or None,
        )


class Manifest(SplitManifest):
    """Content of ``tangram_manifest.json``."""

    pipeline_parallel: int
    virtual_pipeline: int
    canonical_form: bool = False
    """Parameters are not fused; see ``tangram.placement.canonical_form``."""
    vit_only: bool = False
    """The vision encoder and the projector are there alone."""
    tied: bool
    """The head is the embedding."""
    vocab_size: int
    dtypes: dict[str, int]
    """Canonical tensors per element type."""
    source: str
    """``sha256:`` of the source's config and headers."""


def make_manifest(
    *,
    family: str,
    topology: Topology,
    model: ModelConfig,
    padded_vocab: int,
    dtypes: Iterable[torch.dtype],
    hf_config: dict[str, Any],
    source: str,
    canonical_form: bool = False,
    vit_only: bool = False,
) -> Manifest:
    """Describe a conversion."""
    vision_tensor = topology.tensor_of("vision")
    return Manifest(
        family=family,
        tensor_parallel=topology.tensor,
        pipeline_parallel=topology.pipeline,
        virtual_pipeline=topology.virtual,
        vit_pp_layers=[list(row) for row in topology.vision],
        llm_pp_layers=[list(row) for row in topology.text],
        expert_parallel=topology.expert,
        vision_tensor_parallel=0 if vision_tensor == topology.tensor else vision_tensor,
        canonical_form=canonical_form,
        vit_only=vit_only,
        tied=not model.text_decoder.untie_embeddings_and_output_weights,
        vocab_size=model.text_decoder.vocab_size,
        padded_vocab=padded_vocab,
        dtypes=dict(sorted(Counter(map(show, dtypes)).items())),
        hf_config=hf_config,
        source=source,
    )


def manifest_text(manifest: Manifest) -> str:
    return json.dumps(manifest.model_dump(), indent=2) + "\n"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory; None where it has none, as directories of other converters.

    Raises:
        CheckpointError: it is damaged or of another format version.
    """
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        return parse_section(Manifest, read_mapping(path), str(path))
    except ConfigError as error:
        raise CheckpointError(f"{error}; convert again") from None


Difference = tuple[str, object, object]
"""What differs, its value in the manifest, and the other."""


def differences(
    manifest: Manifest,
    topology: Topology,
    model: ModelConfig,
    padded_vocab: int | None = None,
    *,
    canonical_form: bool = False,
    vit_only: bool = False,
) -> list[Difference]:
    """Where a manifest and a split of a model disagree; the keys are those of ``_RUN_PLACES``.

    Args:
        padded_vocab: None: not compared.
    """
    text = model.text_decoder
    compared: list[Difference] = [
        ("family", manifest.family, get_family(model.model_id).name),
        ("tp_size", manifest.tensor_parallel, topology.tensor),
        ("vit_tp_size", manifest.vision_tensor_parallel or manifest.tensor_parallel, topology.tensor_of("vision")),
        ("ep_size", manifest.expert_parallel, topology.expert),
        ("pipeline size", manifest.pipeline_parallel, topology.pipeline),
        ("virtual stages", manifest.virtual_pipeline, topology.virtual),
        ("vit_pp_layers", manifest.vit_pp_layers, [list(row) for row in topology.vision]),
        ("llm_pp_layers", manifest.llm_pp_layers, [list(row) for row in topology.text]),
        ("enable_canonical_hf_struct", manifest.canonical_form, canonical_form),
        ("save_vit_only", manifest.vit_only, vit_only),
        ("tied embeddings", manifest.tied, not text.untie_embeddings_and_output_weights),
        ("vocab_size", manifest.vocab_size, text.vocab_size),
        ("padded vocabulary", manifest.padded_vocab, padded_vocab or manifest.padded_vocab),
    ]
    return [(what, ours, theirs) for what, ours, theirs in compared if ours != theirs]


_LISTS = "pipeline_num_layers of model.json or the run config's"
_RUN_PLACES = {
    "family": "model_id of model.json",
    "tp_size": "the launch flag --tensor-model-parallel-size",
    "vit_tp_size": "the launch flag --vision-tensor-model-parallel-size (absent: --tensor-model-parallel-size)",
    "ep_size": "the launch flag --expert-model-parallel-size",
    "pipeline size": "the launch flag --pipeline-model-parallel-size with its layer lists",
    "virtual stages": f"the rows of {_LISTS} layer lists",
    "vit_pp_layers": f"{_LISTS} vit_pp_layers",
    "llm_pp_layers": f"{_LISTS} llm_pp_layers",
    "enable_canonical_hf_struct": "training, which holds fused parameters",
    "save_vit_only": "training, which holds the whole model",
    "tied embeddings": "untie_embeddings_and_output_weights of model.json",
    "vocab_size": "vocab_size of model.json",
    "padded vocabulary": "the launch flag --make-vocab-size-divisible-by",
}
"""Where a run sets what is compared."""


def check_manifest(manifest: Manifest, topology: Topology, model: ModelConfig, where: str = MANIFEST, padded_vocab: int | None = None) -> None:
    """Check that a directory was converted for this run.

    Three places describe a split: the converter's manifest, the layer lists of model.json or the run config, and the sizes among the
    launch flags. They must agree. Training loads the fused form of the whole model.

    Args:
        where: the directory, for the message.
        padded_vocab: the run's; None: not compared.

    Raises:
        CheckpointError: one line that names each difference, the place it is set in, both values and the mend.
    """
    found = [
        f"{what} is {ours} in the converter manifest but {theirs} by {_RUN_PLACES[what]}"
        for what, ours, theirs in differences(manifest, topology, model, padded_vocab)
    ]
    if found:
        raise CheckpointError(
            f"{where}: converted for another run: {'; '.join(found)}; convert again for this split, or correct the run to the manifest's values"
        )
