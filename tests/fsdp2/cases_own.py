"""What ranks do in the tests of models and data of one's own."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tangram.align.assemble import write_pieces
from tangram.checkpoints.load_hf import load_hf
from tangram.config.yaml_config import read_run
from tangram.data.own import own_loader
from tangram.errors import DataError
from tangram.training.entry import build_engine, train
from tangram.training.shared import same_everywhere


def first_step(run_file: Path, out: Path) -> float:
    """Loss of the first global batch; this rank's gradients go to a file."""
    run = read_run(run_file)
    engine = build_engine(run)
    assert run.model.load is not None
    _, placement, parameters = engine.chunks[0]
    load_hf(engine.hf_directory(run.model.load), [placement], [parameters], cast=True, shapes=engine.canonical_shapes)
    engine.weights_changed()
    loader = own_loader(run, engine.data_parallel_rank, engine.data_parallel_size)
    result = engine.forward_backward(next(iter(loader)))
    write_pieces(engine.canonical_gradients(), out / f"gradients_{dist.get_rank()}.safetensors")
    return result.loss


def trained(run_file: Path, *overrides: str) -> int:
    return train(read_run(run_file, overrides)).step


def said_of(values: list[int]) -> str:
    """What this rank hears when each has another one of ``values``."""
    dist.init_process_group("gloo")
    try:
        same_everywhere("samples of the train data", values[dist.get_rank()])
    except DataError as error:
        return str(error)
    return ""
