"""``FAULT ...``: ``tangram ...`` with a fault for the length of the run."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tangram.backends.megatron import forward
from tangram.cli.main import main
from tangram.data.sampler import GlobalOrder

reduce_token_losses, locate = forward.reduce_token_losses, GlobalOrder._locate


def a_heavier_copy(*arguments: Any) -> Any:
    """The second rank's loss counts a ten-thousandth more."""
    terms = reduce_token_losses(*arguments)
    return replace(terms, numerator=terms.numerator * 1.0001) if os.environ["RANK"] == "1" else terms


def one_further(order: GlobalOrder, place: int) -> tuple[int, int]:
    """The order of samples moved by one."""
    return locate(order, place + 1)


def not_summed(*_: Any) -> None:
    """Sequence parallelism without the sum over tensor-parallel ranks of the gradients of norms."""


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "loss": (forward, "reduce_token_losses", a_heavier_copy),
    "order": (GlobalOrder, "_locate", one_further),
    "norms": (importlib.import_module("megatron.core.distributed.finalize_model_grads"), "_allreduce_non_tensor_model_parallel_grads", not_summed),
}
with patch.object(*FAULTS[sys.argv[1]]):
    status = main(sys.argv[2:])
sys.exit(status)
