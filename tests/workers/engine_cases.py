"""Splits and situations in which the engine is held against plain torch: name -> case, by number of processes.

Layers: 2 of vision, 4 of text. A case is what ``engine_worker`` takes; ``check`` is ``train`` unless given.
"""

from __future__ import annotations

from typing import Any

Case = dict[str, Any]
FROZEN_VISION = {"vision": True, "projector": True}


def split(vision: list[Any] | None = None, text: list[Any] | None = None, tensor: int = 1, **flags: bool) -> dict[str, Any]:
    parallel: dict[str, Any] = {"tensor_model_parallel_size": tensor, **flags}
    if not text:
        return parallel
    rows = text if isinstance(text[0], list) else [text]
    sizes = {"pipeline_model_parallel_size": len(rows[0]), "virtual_pipeline_model_parallel_size": len(rows) if len(rows) > 1 else None}
    return parallel | sizes | {"vit_pp_layers": vision, "llm_pp_layers": text}


ZERO = {"use_distributed_optimizer": True}
OVERLAP = {**ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True}
SAME_RANK_TIE = ([[2, 0], [0, 0]], [[0, 1], [1, 2]])
SPLIT_TIE = ([[1, 1], [0, 0]], [[0, 0], [2, 2]])

CASES: dict[int, dict[str, Case]] = {
    1: {
        "tied": {"parallel": split()},
        "untied": {"tied": False, "parallel": split()},
        "no clipping": {"training": {"clip_grad": 0}, "parallel": split()},
        "everything frozen": {
            "check": "refuses",
            "freeze": {**FROZEN_VISION, "text": True},
            "error": "ConfigError",
            "message": "nothing to train: every component is frozen",
            "parallel": split(),
        },
        "loss function off contract": {
            "check": "refuses",
            "report": "pair",
            "error": "ConfigError",
            "message": "loss_func must return (numerator, denominator, {'loss': (numerator, denominator)}), got tuple of 2",
            "parallel": split(),
        },
        "virtual stages without a pipeline": {
            "check": "refuses",
            "error": "ConfigError",
            "message": "2 virtual stages need a pipeline of at least 2 ranks, got 1",
            "parallel": split([[2], [0]], [[2], [2]]),
        },
    },
    2: {
        "TP2": {"parallel": split(tensor=2)},
        "PP2": {"parallel": split([2, 0], [2, 2])},
        "PP2, vision over both stages, untied": {"tied": False, "parallel": split([1, 1], [0, 4])},
        "PP2 x VPP2, text begins on the second rank": {"parallel": split([[1, 1], [0, 0]], [[0, 1], [2, 1]])},
        "PP2 x VPP2, tied copies on one rank, overlapped": {"parallel": split(*SAME_RANK_TIE, overlap_grad_reduce=True)},
        "PP2 x VPP2, text begins on the second row, 8 micro-batches": {"rounds": 2, "parallel": split(*SPLIT_TIE)},
        "DP2": {"parallel": split()},
        "DP2, distributed optimizer": {"parallel": split(**ZERO)},
        "DP2, distributed optimizer, overlapped": {"parallel": split(**OVERLAP)},
        "PP2, frozen vision encoder": {"freeze": {"vision": True}, "parallel": split([2, 0], [1, 3])},
        "PP2, first rank wholly frozen": {"freeze": FROZEN_VISION, "parallel": split([2, 0], [0, 4])},
        "PP2, first rank wholly frozen, distributed optimizer": {"freeze": FROZEN_VISION, "parallel": split([1, 1], [0, 4], **ZERO)},
        "PP2, frozen text decoder": {"freeze": {"text": True}, "parallel": split([2, 0], [1, 3])},
        "PP2, last rank wholly frozen": {"freeze": {"text": True}, "parallel": split([2, 0], [0, 4])},
        "DP2, one rank without labels": {"check": "silent_rank", "parallel": split()},
        "DP2, one rank without labels, distributed optimizer": {"check": "silent_rank", "parallel": split(**ZERO)},
        "DP2 skips together": {"check": "skip", "parallel": split()},
        "DP2 skips together, distributed optimizer": {"check": "skip", "parallel": split(**ZERO)},
        "PP2 skips together": {"check": "skip", "parallel": split([2, 0], [2, 2])},
        "norm of 3 and 4, TP2": {"check": "literal_norm", "parallel": split(tensor=2)},
        "norm of 3 and 4, PP2, tied copies": {"check": "literal_norm", "parallel": split([2, 0], [2, 2])},
        "norm of 3 and 4, DP2": {"check": "literal_norm", "parallel": split()},
        "norm of 3 and 4, DP2, distributed optimizer": {"check": "literal_norm", "parallel": split(**ZERO)},
        "TP2, bf16": {"check": "precision", "training": {"dtype": "bf16"}, "parallel": split(tensor=2)},
        "PP2, bf16": {"check": "precision", "training": {"dtype": "bf16"}, "parallel": split([2, 0], [2, 2])},
        "DP2, distributed optimizer, bf16": {"check": "precision", "training": {"dtype": "bf16"}, "parallel": split(**ZERO)},
        "DP2, fp16": {"check": "precision", "training": {"dtype": "fp16"}, "parallel": split()},
        "micro-batches that do not fill the pipeline": {
            "check": "refuses",
            "micro_batches": 5,
            "error": "ConfigError",
            "message": "5 micro-batches per data-parallel rank are not a multiple of the pipeline size 2",
            "parallel": split(*SPLIT_TIE),
        },
        "too few processes": {
            "check": "refuses",
            "error": "ConfigError",
            "message": "world size 2 is not divisible by tensor-parallel 2 x pipeline-parallel 2 = 4; start a multiple of 4 processes",
            "parallel": split([2, 0], [2, 2], tensor=2),
        },
    },
    4: {
        "TP2 x PP2": {"parallel": split([2, 0], [1, 3], tensor=2)},
        "TP2 x PP2 x VPP2": {"parallel": split(*SAME_RANK_TIE, tensor=2)},
        "TP4": {"parallel": split(tensor=4)},
        "TP2 x DP2, distributed optimizer, untied": {"tied": False, "parallel": split(tensor=2, **ZERO)},
        "PP4, text begins on the third rank": {"parallel": split([1, 1, 0, 0], [0, 0, 2, 2])},
        "PP4, overlapped": {"parallel": split([2, 0, 0, 0], [1, 1, 1, 1], overlap_grad_reduce=True)},
        "PP2 x DP2, distributed optimizer": {"parallel": split([2, 0], [1, 3], **ZERO)},
        "PP2 x VPP2 x DP2, distributed optimizer, overlapped": {"parallel": split(*SPLIT_TIE, **OVERLAP)},
        "PP2 x VPP2 x DP2, distributed optimizer, bf16": {
            "check": "precision",
            "training": {"dtype": "bf16"},
            "parallel": split(*SAME_RANK_TIE, **ZERO),
        },
        "norm of 3 and 4, TP2 x PP2": {"check": "literal_norm", "parallel": split([2, 0], [1, 3], tensor=2)},
        "norm of 3 and 4, TP2 x DP2, distributed optimizer": {"check": "literal_norm", "parallel": split(tensor=2, **ZERO)},
        "TP2 x DP2 skips together": {"check": "skip", "parallel": split(tensor=2, **ZERO)},
    },
}
