"""What ranks do in a comparison."""

from tangram.align.worker import main


def work_off(tasks: str) -> int:
    return main([tasks])
