"""Small random Hugging Face checkpoints, for trials and tests.

Every parameter is random, biases and norms too, so that a swapped or forgotten tensor shows. Values are a function of (seed,
parameter name): the installed transformers does not change them.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tangram.errors import ConfigError
from tangram.families.tokenizer_files import FIRST_SPECIAL, SPECIAL_IDS, require_tokenizer_package, write_json, write_tokenizer
from tangram.placement.table import Shape

if TYPE_CHECKING:
    import torch

REAL_VOCABULARY = 151936
"""Rows of the embedding in the published Qwen2-VL and Qwen2.5-VL checkpoints up to 3B."""
CLIP_PIXELS = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
"""Mean and deviation of the three colours by which CLIP, and Qwen-VL up to 2.5, scale pixels."""
LAST_SPECIAL = max(SPECIAL_IDS.values())
SMALLEST_VOCABULARY = 32


@dataclass(frozen=True)
class TinySpec:
    """Sizes of a small model. ``None`` means: derived from the others.

    Raises:
        ConfigError: sizes that do not make a model.
    """

    hidden: int = 64
    """Width of the text decoder."""
    ffn: int | None = None
    """Width of the text MLP; None: 2 * hidden."""
    text_layers: int = 4
    heads: int = 4
    """Attention heads of the text decoder."""
    kv_heads: int = 2
    """Key/value heads of the text decoder."""
    vision_hidden: int = 32
    vision_ffn: int | None = None
    """Width of the vision MLP; None: 2 * vision_hidden. For qwen2_vl a multiple of vision_hidden."""
    vision_layers: int = 4
    vision_heads: int = 4
    vocab: int | None = None
    """Rows of the embedding. None: the real vocabulary and tokenizer files. A number: no tokenizer files, and the special ids
    151643..151656 become the last ones, so ``<|video_pad|>`` is vocab - 1 and ``<|image_pad|>`` vocab - 2."""
    experts: int | None = None
    """Experts of a text layer, for a family that has them; None: 4."""
    experts_per_token: int | None = None
    """Experts that a token goes to, for a family that has them; None: 2."""
    expert_ffn: int | None = None
    """Width of an expert, for a family that has them; None: 3/4 of hidden."""
    deepstack: tuple[int, ...] | None = None
    """Vision blocks with a DeepStack merger, for a family that has them; None: every second, as far as there are text layers."""
    position_rows: int | None = None
    """Rows of the vision encoder's position table, a square number, for a family that has one; None: 64."""
    max_pixels: int = 256 * 28 * 28
    """Largest picture, in pixels, after the image processor's resizing."""
    weight_std: float | None = None
    """Standard deviation of matrices; None: 1 / sqrt(fan-in), at which attention is far from uniform, so that wrong positions show."""
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise ConfigError(f"tiny model: {name} {value} must be positive{'' if isinstance(value, int) else ' and finite'}")
        for width, heads, unit, why in (
            ("hidden", "heads", 2, "rotary positions need an even head width"),
            ("vision_hidden", "vision_heads", 4, "2-D rotary positions need a head width divisible by 4"),
        ):
            size, count = getattr(self, width), getattr(self, heads)
            if size % (count * unit):
                raise ConfigError(f"tiny model: {width} {size} is not divisible by {heads} {count} * {unit}; {why}")
        if self.head_dim < 6:
            raise ConfigError(f"tiny model: hidden {self.hidden} / heads {self.heads} = {self.head_dim}; 3-D positions need a head width of 6")
        if self.heads % self.kv_heads:
            raise ConfigError(f"tiny model: heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.vocab is not None and not SMALLEST_VOCABULARY <= self.vocab < FIRST_SPECIAL:
            raise ConfigError(
                f"tiny model: vocab {self.vocab} lies outside {SMALLEST_VOCABULARY}..{FIRST_SPECIAL - 1}; leave it out for the real {REAL_VOCABULARY}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def mrope_section(self) -> list[int]:
        """Rotary pairs of time, height and width, near the 2:3:3 of the published models."""
        pairs = self.head_dim // 2
        time = max(1, pairs // 4)
        height = (pairs - time) // 2
        return [time, height, pairs - time - height]

    def token_id(self, token: str) -> int:
        """Id of a special token in this vocabulary."""
        return SPECIAL_IDS[token] if self.vocab is None else SPECIAL_IDS[token] - LAST_SPECIAL - 1 + self.vocab


DEFAULT_SPEC = TinySpec()
FAMILY_SIZES = ("experts", "experts_per_token", "expert_ffn", "deepstack", "position_rows")
"""Sizes that not every family has."""


class TinyWriter(Protocol):
    """Writes a small random Hugging Face checkpoint of one family.

    Args:
        out: directory to write; an empty one may exist.
        seed: the same seed and spec give byte-identical weights.
        tied: the output layer is the embedding.
        force: replace the checkpoint that lies in ``out``.

    Raises:
        ConfigError: ``out`` is not empty (with ``force``: and holds no config.json), or the real vocabulary is wanted and its package is missing.
    """

    def __call__(self, out: Path, seed: int, tied: bool, spec: TinySpec = ..., *, force: bool = False) -> None: ...


def write_checkpoint(
    out: Path,
    config: Mapping[str, Any],
    processor_class: str,
    seed: int,
    spec: TinySpec,
    force: bool,
    *,
    sizes: tuple[str, ...] = (),
    stacks: Mapping[str, Shape] | None = None,
    pixels: tuple[list[float], list[float]] = CLIP_PIXELS,
    tokenizer: Callable[[Path], None] = write_tokenizer,
) -> None:
    """Write a Qwen-VL of a Hugging Face ``config`` with random weights, and its generation, image processor and tokenizer files.

    Args:
        config: content of config.json, with ``model_type``.
        processor_class: name that the hub's preprocessor_config.json gives.
        sizes: those of ``FAMILY_SIZES`` that the family has.
        stacks: ends of the names of stacked experts, ``[experts, in, out]`` in the hub's files, with their shapes.
        pixels: mean and deviation of the three colours.
        tokenizer: writes the tokenizer files of the real vocabulary.

    Raises:
        ConfigError: as ``model_files``.
    """
    if spec.vocab is None:
        require_tokenizer_package()
    end, pad = spec.token_id("<|im_end|>"), spec.token_id("<|endoftext|>")
    tokens = {"bos_token_id": pad, "eos_token_id": [end, pad], "pad_token_id": pad}
    processor = _image_processor(config["vision_config"], processor_class, spec, pixels)
    with model_files(out, config, processor, tokens, seed, spec, force, sizes=sizes, stacks=stacks) as folder:
        if spec.vocab is None:
            tokenizer(folder)


@contextmanager
def model_files(
    out: Path,
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    tokens: Mapping[str, Any],
    seed: int,
    spec: TinySpec,
    force: bool,
    *,
    sizes: tuple[str, ...] = (),
    stacks: Mapping[str, Shape] | None = None,
) -> Iterator[Path]:
    """Weights, config, generation and image processor files in a temporary folder, to which the block can add more.

    Keys of the weight file are the hub's. Everything appears under ``out`` at once when the block ends well, or not at all.

    Args:
        config: content of config.json, with ``model_type``.
        processor: content of preprocessor_config.json.
        tokens: special ids of generation_config.json.
        sizes, stacks: as ``write_checkpoint``.

    Raises:
        ConfigError: ``out`` is occupied, or the spec gives a size that the family has not; see TinyWriter.
    """
    from tangram.families.base import get_family

    foreign = [name for name in FAMILY_SIZES if getattr(spec, name) is not None and name not in sizes]
    if foreign:
        raise ConfigError(f"tiny model: {config['model_type']} has no {', '.join(foreign)}; leave {'it' if len(foreign) == 1 else 'them'} out")
    family = get_family(config["model_type"])
    with _published(out, force) as folder:
        model = _build(config, seed, spec, family.canonical_name, stacks or {})
        model.generation_config = _generation(tokens)
        model.save_pretrained(folder)
        _as_the_hub_has_it(folder / "model.safetensors", lambda key: family.hub_name(family.canonical_name(key)), stacks or {})
        write_json(folder / "preprocessor_config.json", processor)
        yield folder


def _build(config: Mapping[str, Any], seed: int, spec: TinySpec, canonical_name: Callable[[str], str], stacks: Mapping[str, Shape]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = {k: v for k, v in config.items() if k != "model_type"}
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(config["model_type"], **settings), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = _hub_shape(name, stacks) or tuple(parameter.shape)
            values = _random(canonical_name(name), shape, seed, spec.weight_std)
            parameter.copy_(values if values.shape == parameter.shape else values.transpose(1, 2))
    return model.to(getattr(torch, spec.dtype))


def _generation(tokens: Mapping[str, Any]) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(**tokens, do_sample=False)


def _hub_shape(name: str, stacks: Mapping[str, Shape]) -> Shape | None:
    return next((shape for end, shape in stacks.items() if name.endswith(end)), None)


def _as_the_hub_has_it(path: Path, hub_name: Callable[[str], str], stacks: Mapping[str, Shape]) -> None:
    """Give the tensors of a file the hub's names and stacked experts its orientation: transformers 5.x writes others that 4.57 does not read."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    renamed = {}
    for key, tensor in tensors.items():
        shape = _hub_shape(key, stacks)
        renamed[hub_name(key)] = tensor if shape in (None, tuple(tensor.shape)) else tensor.transpose(1, 2).contiguous()
    if list(renamed) != list(tensors) or any(renamed[key] is not tensor for key, tensor in tensors.items()):
        save_file(renamed, path, metadata={"format": "pt"})


def _random(name: str, shape: tuple[int, ...], seed: int, weight_std: float | None) -> torch.Tensor:
    """fp32 values of one parameter: matrices N(0, std), norm weights 1 + N(0, 0.1), biases N(0, 0.1)."""
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        fan_in = shape[1] if len(shape) == 3 else noise[0].numel()  # a stack of experts is [experts, in, out]
        return noise * (fan_in**-0.5 if weight_std is None else weight_std)
    return 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)


def _image_processor(vision: Mapping[str, Any], processor_class: str, spec: TinySpec, pixels: tuple[list[float], list[float]]) -> dict[str, Any]:
    """Content of preprocessor_config.json in the form that the hub's files of Qwen2-VL have."""
    return {
        "min_pixels": 4 * (vision["patch_size"] * vision["spatial_merge_size"]) ** 2,
        "max_pixels": spec.max_pixels,
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "image_mean": pixels[0],
        "image_std": pixels[1],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor_class,
    }


@contextmanager
def _published(out: Path, force: bool) -> Iterator[Path]:
    """A temporary folder beside ``out`` that becomes ``out`` when the block ends well, and vanishes when it does not."""
    _refuse_occupied(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _refuse_occupied(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise ConfigError(f"{out}: not an empty directory; give another one, or --force to replace the checkpoint that lies there")
    if not (out / "config.json").is_file():
        raise ConfigError(f"{out}: not replaced, since it is no checkpoint: it has no config.json; give another directory")
