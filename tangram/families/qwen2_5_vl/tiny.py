from pathlib import Path


def write_tiny(out: Path, seed: int, tied: bool) -> None:
    raise RuntimeError("placeholder of the first commit")
