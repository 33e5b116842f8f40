"""What the server of ``tests.trial`` imports once; its children are forked with all of it in place."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tangram.backends.megatron.cpu

    tangram.backends.megatron.cpu.adapt()
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules
    import PIL.Image  # noqa: F401
    import tokenizers  # noqa: F401
    import torch.distributed.checkpoint

    import tangram.cli.main
    import tangram.models.vlm
    import tangram.training.entry
    import tangram.training.pretrain  # noqa: F401
