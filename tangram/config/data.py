"""The typed form of data.json. Key names are those of MindSpeed-MM's data.json (which are LLaMA-Factory's).

Other keys of the public files: see ``tangram.config.public_keys``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from tangram.config.parsing import LocalPath, LocalPaths, Section


class PreprocessParameters(Section):
    """Tokenizer and media processing."""

    model_name_or_path: LocalPath
    """Folder with the tokenizer and preprocessor_config.json of the Hugging Face model."""
    image_max_pixels: int = Field(default=768 * 768, ge=1)
    """Images with more pixels are scaled down before patching."""
    image_min_pixels: int = Field(default=32 * 32, ge=0)
    video_max_pixels: int = Field(default=256 * 256, ge=1)
    """Like ``image_max_pixels``, for each frame of a video."""
    video_min_pixels: int = Field(default=16 * 16, ge=0)
    video_fps: float | None = Field(default=None, gt=0)
    """Frames taken from each second of a video; None: 2, unless ``video_num_frames`` is given."""
    video_num_frames: int | None = Field(default=None, ge=1)
    """Frames taken from every video, evenly spaced. Excludes ``video_fps``."""
    video_maxlen: int = Field(default=128, ge=1)
    """Most frames taken from a video."""

    @model_validator(mode="after")
    def _one_way_to_count_frames(self) -> PreprocessParameters:
        if self.video_fps is not None and self.video_num_frames is not None:
            raise ValueError(f"video_fps {self.video_fps} and video_num_frames {self.video_num_frames} exclude each other: give one of them")
        return self


class BasicParameters(Section):
    """Which samples, and how they become tokens."""

    dataset: LocalPaths
    """Path of a file (JSON, JSON lines, parquet) or folder of samples, several separated by commas, or names in ``dataset_dir/dataset_info.json``."""
    dataset_dir: LocalPath = "."
    """Folder that relative media paths start from."""
    mix_strategy: Literal["concat", "interleave_under", "interleave_over"] = "concat"
    """Several datasets one after another, or drawn in turn until the first (under) or the last (over) is used up."""
    interleave_probs: str | None = None
    """Shares of the datasets when they are interleaved, separated by commas; None: equal shares."""
    streaming: bool = False
    """Start at once, without looking through the dataset first; it is then read in file order."""
    template: str | None = None
    """Chat template; None: the family's."""
    chat_template: LocalPath | None = None
    """Jinja file used instead of ``template``."""
    enable_thinking: bool = True
    """False: templates that think leave an empty thought in the prompt, where it is not learnt."""
    cutoff_len: int | None = Field(default=None, ge=1)
    """Longest sample, tokens; None: the run's ``seq_length``, which it may not exceed."""
    truncation: Literal["turns", "sample"] = "turns"
    """What goes of a sample longer than the cutoff: whole turns from its end, or all of it, as ``bad_samples`` says."""
    train_on_prompt: bool = False
    mask_history: bool = False
    max_samples: int | None = Field(default=None, ge=1)
    val_dataset: LocalPaths | None = None
    """Like ``dataset``, for evaluation; read every ``eval_interval`` steps."""
    val_max_samples: int | None = Field(default=None, ge=1)
    val_rate: float | None = Field(default=None, gt=0, lt=1)
    """Part of ``dataset`` that is set aside for evaluation, drawn by the run's seed."""
    packing: bool = False
    """Rows of up to ``cutoff`` tokens are filled with several samples, which do not see each other."""
    packing_strategy: Literal["knapsack", "sequential"] = "knapsack"
    """Which samples share a row: the largest first within a window, or in order as long as they fit."""
    preprocessing_batch_size: int = Field(default=1000, ge=1)
    """Samples of a window of the knapsack."""
    preprocessing_num_workers: int = Field(default=0, ge=0)
    """Processes that tokenise the dataset for the cache or for its lengths."""
    cache_dir: LocalPath | None = None
    """Folder where the tokenised dataset is kept; None: nothing is kept."""
    overwrite_cache: bool = False
    bad_samples: Literal["fail", "skip"] = "fail"
    """What a sample does that cannot be used: end the run, or leave its place empty, counted and listed in ``bad_samples_report``."""
    bad_samples_report: LocalPath | None = None
    """JSON-lines file of skipped samples; None: bad_samples.jsonl in ``training.save``."""

    @model_validator(mode="after")
    def _choices_fit(self) -> BasicParameters:
        if self.val_rate is not None and self.val_dataset is not None:
            raise ValueError(f"val_rate {self.val_rate} and val_dataset {self.val_dataset} exclude each other: give one of them")
        if self.interleave_probs is not None and self.mix_strategy == "concat":
            raise ValueError("interleave_probs needs mix_strategy interleave_under or interleave_over")
        if self.template is not None and self.chat_template is not None:
            raise ValueError(f"template {self.template} and chat_template {self.chat_template} exclude each other: give one of them")
        return self


class DatasetAttr(Section):
    """How the records of the files that ``dataset`` names are written; a key is the concept, its value the user's name for it.

    What is left out is what the first record of each file shows, which the log says once. Messages: column ``messages`` or ``conversations``;
    in them ``role`` and ``content`` or ``from`` and ``value``; roles ``user`` and ``assistant`` or ``human`` and ``gpt``. LLaVA-Instruct, with
    ``image`` and ``conversations``, needs no attr. A name that is given wins over what the record shows.

    A dataset of dataset_info.json brings its own.
    """

    formatting: Literal["sharegpt", "openai", "alpaca"] = "sharegpt"
    """sharegpt: messages whose contents are texts. openai: contents may also be lists of parts, and ``tool_calls`` and the role ``tool`` are known.
    alpaca: one question and its answer in columns of their own."""
    system: str | None = None
    """Column of the system prompt. None: it is no column."""
    tools: str | None = None
    """Column of the tools that may be called, a JSON list. None: none is read; openai: ``tools``."""
    images: str | None = "images"
    """Column of image paths; ``images`` also finds ``image``. None: none is read."""
    videos: str | None = "videos"
    """Column of videos; ``videos`` also finds ``video``. None: none is read."""
    messages: str | None = None
    role_tag: str | None = None
    content_tag: str | None = None
    user_tag: str | None = None
    assistant_tag: str | None = None
    system_tag: str | None = "system"
    """None: samples hold no system turns."""
    observation_tag: str | None = None
    """What a tool answered. None: ``observation``; openai: ``tool``."""
    function_tag: str | None = None
    """An answer that calls tools. None: ``function_call``."""
    prompt: str | None = None
    """alpaca; None: ``instruction``. ``query``: ``input``; ``response``: ``output``; ``history`` stays unread unless it is named."""
    query: str | None = None
    response: str | None = None
    history: str | None = None


class DatasetParam(Section):
    dataset_type: str = "huggingface"
    """``huggingface``: the files that ``dataset`` names; else the id of a dataset that a plug-in of the fsdp2 backend registers."""
    preprocess_parameters: PreprocessParameters
    basic_parameters: BasicParameters
    attr: DatasetAttr = DatasetAttr()
    own: dict[str, Any] = {}
    """What the dataset of a plug-in reads besides."""

    @property
    def of_plugin(self) -> bool:
        return self.dataset_type != "huggingface"

    @model_validator(mode="after")
    def _own_is_read(self) -> DatasetParam:
        if self.own and not self.of_plugin:
            raise ValueError(f"own {self.own} is for the dataset of a plug-in, and dataset_type is huggingface; remove it")
        return self


class CollateParam(Section):
    model_name: str | None = None
    """None: the family's collator."""
    ignore_pad_token_for_loss: Literal[True] = True


SamplerType = Literal["BaseRandomBatchSampler", "SequentialSampler", "LengthGroupedSampler", "BucketBatchSampler"]

Tail = Literal["drop", "pad", "continue"]


class DataloaderParam(Section):
    dataloader_mode: Literal["sampler"] = "sampler"
    sampler_type: SamplerType = "BaseRandomBatchSampler"
    """Order: as ``shuffle`` says; file order; samples of like length together; micro-batches of images of one size."""
    shuffle: bool = False
    drop_last: bool | None = None
    """True: ``tail`` drop; false: ``tail`` pad."""
    tail: Tail | None = None
    """Samples at the end of an epoch that do not fill a global batch: left out (the default), filled up with empty rows, or with the next epoch."""
    token_budget: int | None = Field(default=None, ge=1)
    """Most tokens of a micro-batch: the samples of a global batch share as few micro-batches as hold them. None: ``micro_batch_size`` rows."""
    balance_vision: bool = False
    """Deal a global batch's micro-batches out so that all data-parallel ranks have about as many patches."""
    prefetch_factor: int = Field(default=4, ge=1)
    """Micro-batches that each worker reads ahead."""
    enable_preload: bool = False
    """Read the next step's micro-batches in a thread while this one's run."""
    slow_sample_seconds: float = Field(default=60.0, gt=0)
    """A sample that takes longer is named in the log."""
    pin_memory: bool = False
    pad_to_multiple_of: int = Field(default=1, ge=1)
    """Sequence lengths are padded to a multiple of this."""
    collate_param: CollateParam = CollateParam()

    @model_validator(mode="after")
    def _tail_fits(self) -> DataloaderParam:
        if self.tail is not None and self.drop_last is not None and (self.tail == "drop") != self.drop_last:
            raise ValueError(f"tail {self.tail!r} and drop_last {str(self.drop_last).lower()} contradict each other: give one of them")
        return self

    @property
    def tail_policy(self) -> Tail:
        """``tail``, or what ``drop_last`` says of it."""
        return self.tail or ("pad" if self.drop_last is False else "drop")


class DataConfig(Section):
    dataset_param: DatasetParam
    dataloader_param: DataloaderParam = DataloaderParam()
