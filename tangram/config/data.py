"""The typed form of data.json. Key names are those of MindSpeed-MM's data.json (which are LLaMA-Factory's).

Other keys of the public files: see ``tangram.config.public_keys``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tangram.config.parsing import LocalPath, LocalPaths, Section


class PreprocessParameters(Section):
    """Tokenizer and media processing."""

    model_name_or_path: LocalPath
    """Folder with the tokenizer and preprocessor_config.json of the Hugging Face model."""
    image_max_pixels: int = Field(default=768 * 768, ge=1)
    """Images with more pixels are scaled down before patching."""
    image_min_pixels: int = Field(default=32 * 32, ge=0)


class BasicParameters(Section):
    """Which samples, and how they become tokens."""

    dataset: LocalPaths
    """Path of a JSON file of samples, or several separated by commas."""
    dataset_dir: LocalPath = "."
    """Folder that relative media paths start from."""
    template: str | None = None
    """Chat template; None: the family's."""
    train_on_prompt: bool = False
    mask_history: bool = False
    max_samples: int | None = Field(default=None, ge=1)
    val_dataset: LocalPaths | None = None
    """Like ``dataset``, for evaluation; read every ``eval_interval`` steps."""
    val_max_samples: int | None = Field(default=None, ge=1)


class DatasetAttr(Section):
    """Names of columns and tags in the samples."""

    system: str | None = None
    images: str | None = "images"
    messages: str = "messages"
    role_tag: str = "role"
    content_tag: str = "content"
    user_tag: str = "user"
    assistant_tag: str = "assistant"
    system_tag: str | None = "system"
    """None: samples hold no system turns."""
    formatting: Literal["sharegpt"] = "sharegpt"


class DatasetParam(Section):
    dataset_type: Literal["huggingface"] = "huggingface"
    preprocess_parameters: PreprocessParameters
    basic_parameters: BasicParameters
    attr: DatasetAttr = DatasetAttr()


class CollateParam(Section):
    model_name: str | None = None
    """None: the family's collator."""
    ignore_pad_token_for_loss: Literal[True] = True


class DataloaderParam(Section):
    dataloader_mode: Literal["sampler"] = "sampler"
    sampler_type: Literal["BaseRandomBatchSampler"] = "BaseRandomBatchSampler"
    shuffle: bool = False
    drop_last: bool = True
    pin_memory: bool = False
    pad_to_multiple_of: int = Field(default=1, ge=1)
    """Sequence lengths are padded to a multiple of this."""
    collate_param: CollateParam = CollateParam()


class DataConfig(Section):
    dataset_param: DatasetParam
    dataloader_param: DataloaderParam = DataloaderParam()
