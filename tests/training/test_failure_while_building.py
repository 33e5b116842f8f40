"""A fault of one rank before there is anything to train: all ranks end at once with its one line, whichever way the run was started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fsdp2.own import WORDS_PLUGIN, llama, write
from tests.trial import Trial, entry_flags, run

pytestmark = pytest.mark.timeout(300)
CLASS = '''

import os

from transformers import LlamaForCausalLM

from tangram.backends.fsdp2.registry import model_register


@model_register.register("fragile")
class Fragile(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        if os.environ["RANK"] == "1":
            raise RuntimeError("no room for\\nthe second rank")
'''


def test_a_class_of_a_plug_in_that_fails_on_one_rank_of_the_fsdp2_backend(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a\nb\nc\nd\n")
    changes = {"model": {"model_id": "fragile"}, "data": {"dataset_param": {"dataset_type": "words", "own": {"start": 1}}}}
    run_file = write(tmp_path, llama(), WORDS_PLUGIN + CLASS, changes)
    outcome = run(tmp_path / "log", ["tangram", "train", str(run_file)], 2)
    assert outcome.codes == [1, 2] and "Traceback" not in outcome.output, outcome.output
    assert outcome.errors() == [
        "tangram: error: [rank 1] model.model_id fragile: Fragile cannot be built of its config.json "
        "(RuntimeError: no room for the second rank (plugin.py, line 36)); correct the plug-in"
    ]


def test_an_entry_script_that_fails_on_one_rank_of_the_megatron_backend(trial: Trial, folder: Path) -> None:
    script = (Path(__file__).parents[2] / "pretrain_vlm.py").read_text()
    folder.mkdir()
    path = folder / "pretrain_mine.py"
    fault = 'import os\n    from tangram.errors import ConfigError\n    if os.environ["RANK"] == "1":\n        raise ConfigError("no such file")\n'
    start = script.index("    return", script.index("def model_provider("))
    path.write_text(f"{script[:start]}    {fault}{script[start:]}")
    outcome = run(folder / "log", [str(path), *entry_flags(trial, folder, {"--load": trial.hf})], 2)
    assert outcome.codes == [1, 2], outcome.output
    assert outcome.errors() == ["pretrain_mine.py: error: [rank 1] no such file"]
