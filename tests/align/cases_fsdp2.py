"""What ranks do in the comparisons of ``test_fsdp2``."""

from tangram.align.worker import main


def work_off(tasks: str) -> int:
    return main([tasks])
