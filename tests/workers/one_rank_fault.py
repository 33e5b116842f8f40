"""``tangram train`` with a fault of tensor parallelism on rank 1 alone: it loses half of the gradient of each norm in the text decoder's layers."""

import os
import sys
from typing import Any

from tangram.backends.megatron import gradients
from tangram.cli.main import main

if os.environ["RANK"] == "1":
    sound = gradients.make_finalizer

    def make_finalizer(models: Any, *arguments: Any) -> Any:
        finalize = sound(models, *arguments)

        def lose_half(*given: Any, **others: Any) -> None:
            finalize(*given, **others)
            for model in models:
                for name, parameter in model.named_parameters():
                    if "text_decoder" in name and "layernorm" in name:
                        parameter.main_grad.mul_(0.5)

        return lose_half

    gradients.make_finalizer = make_finalizer
sys.exit(main(sys.argv[1:]))
