"""Python 3.11.2 pickles a member of an enum as a call of getattr."""

from __future__ import annotations

import io
import pickle

import pytest

from tangram.checkpoints.dcp_planner import _MetadataUnpickler

HEAD = b"cbuiltins\ngetattr\n"


def load(data: bytes) -> object:
    return _MetadataUnpickler(io.BytesIO(data)).load()


def test_a_member_of_an_enum_is_read_and_no_other_attribute() -> None:
    enum = b"(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    assert load(HEAD + enum + b"S'TORCH_CONTIGUOUS_FORMAT'\ntR.").name == "TORCH_CONTIGUOUS_FORMAT"  # type: ignore[attr-defined]
    for attack, name in ((enum + b"S'__class__'\ntR.", "__class__"), (b"(cpathlib\nPath\nS'unlink'\ntR.", "unlink")):
        with pytest.raises(pickle.UnpicklingError, match=f"refers to attribute '{name}'"):
            load(HEAD + attack)
