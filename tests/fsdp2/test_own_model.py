"""Models that are of no family: as transformers or a plug-in has them, from their first gradient to an exported directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tangram.align.assemble import assemble
from tangram.align.reference import token_loss
from tangram.backends.fsdp2.file_names import ModelFileNames
from tangram.cli.main import main
from tangram.config.yaml_config import read_run
from tangram.data.own import own_loader
from tests.fsdp2.own import GEMMA_PLUGIN, WORDS_PLUGIN, gemma, llama, write
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_own.py")
WORDS = ["sphinx of black quartz", "judge my vow", "the five boxing", "wizards jump quickly", "how vexingly quick", "daft zebras jump"]


@pytest.fixture(scope="module")
def gemma_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder, model = tmp_path_factory.mktemp("gemma"), gemma()
    units = ["model.vision_tower*layers.{*}", "model.language_model.layers.{*}"]
    changes = {
        "model": {"model_id": "my_gemma"},
        "parallel": {"fsdp_plan": {"apply_modules": units}},
        "data": {"dataset_param": {"dataset_type": "pictures"}},
        "training": {"init_model_with_meta_device": True, "val_interval": 3},
    }
    return write(folder, model, GEMMA_PLUGIN, changes), model


@pytest.fixture(scope="module")
def llama_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder, model = tmp_path_factory.mktemp("llama"), llama()
    (folder / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    data = {"dataset_param": {"dataset_type": "words", "own": {"start": 1}}}
    units = ["model.layers.{*}"]
    return write(folder, model, WORDS_PLUGIN, {"parallel": {"fsdp_plan": {"apply_modules": units}}, "data": data}), model


@pytest.mark.parametrize("which", ["gemma_run", "llama_run"])
def test_loss_and_every_gradient_on_two_ranks_are_those_of_transformers(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run_file, model = request.getfixturevalue(which)
    losses = on_ranks(2, CASES, "first_step", run_file, tmp_path)
    run = read_run(run_file)
    batches = [next(iter(own_loader(run, rank, 2)))[0] for rank in range(2)]
    # One rank of Gemma's has a picture and the other has none, so it makes a pass of the tower for the first one's sake.
    assert sum("pixel_values" in batch for batch in batches) == (0 if which == "llama_run" else 1)
    tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    model.zero_grad()
    total = 0.0
    for batch, count in zip(batches, tokens, strict=True):
        given = {name: value for name, value in batch.items() if name not in ("labels", "sample_ids")}
        loss = token_loss(model(**given, use_cache=False).logits, batch["labels"]) * count / sum(tokens)
        loss.backward()
        total += float(loss.detach())
    assert losses == pytest.approx([total, total], rel=1e-6)
    found = {one.name: one.tensor for one in assemble(sorted(tmp_path.glob("*.safetensors")))}
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    # Some are true zeros (biases of keys), of which rounding of terms as large as the others is left.
    rounding = 1e-6 * float(torch.stack([gradient.norm() for gradient in expected.values()]).median())
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= max(1e-5 * expected[name].norm(), rounding), name


def losses_of(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.parametrize("which", ["gemma_run", "llama_run"])
def test_it_trains_resumes_and_exports_to_what_transformers_loads(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    import transformers

    run_file, model = request.getfixturevalue(which)
    assert on_ranks(2, CASES, "trained", run_file) == [3, 3]
    whole = losses_of(run_file.parent / "out")
    again = [f"training.load={run_file.parent / 'out' / 'iter_0000002'}", f"training.save={tmp_path / 'again'}"]
    assert on_ranks(1, CASES, "trained", run_file, *again, "training.gradient_accumulation_steps=2") == [3]
    assert losses_of(tmp_path / "again")[3] == pytest.approx(whole[3], rel=1e-6)
    plugin, hf = ["--plugin", str(run_file.parent / "plugin.py")], str(run_file.parent / "hf")
    assert main(["inspect", str(run_file.parent / "out"), *plugin]) == 0
    assert main(["export", str(run_file.parent / "out"), str(tmp_path / "hf"), "--hf", hf, *plugin]) == 0
    loaded, info = getattr(transformers, model.config.architectures[0]).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    moved = {name: float((value - model.state_dict()[name]).norm()) for name, value in loaded.state_dict().items()}
    assert all(0 < distance < 1 for distance in moved.values()), moved


def test_random_weights_are_what_the_constructor_draws_under_the_runs_seed(llama_run: tuple[Path, Any], tmp_path: Path) -> None:
    run_file, model = llama_run
    random = ["training.random_init=true", "training.train_iters=1", "training.save_interval=null"]
    losses = []
    for ranks, accumulation in ((2, 1), (1, 2)):
        save = tmp_path / f"of_{ranks}"
        more = [f"training.save={save}", f"training.gradient_accumulation_steps={accumulation}"]
        assert on_ranks(ranks, CASES, "trained", run_file, *random, *more) == [1] * ranks
        losses.append(losses_of(save)[1])
    torch.manual_seed(42)
    fresh = type(model)(model.config).float().requires_grad_(False)
    batches = next(iter(own_loader(read_run(run_file, ["training.gradient_accumulation_steps=2"]), 0, 1)))
    tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    sums = [
        float(token_loss(fresh(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits, batch["labels"])) * count
        for batch, count in zip(batches, tokens, strict=True)
    ]
    assert losses == pytest.approx([sum(sums) / sum(tokens)] * 2, rel=1e-6)
    with pytest.raises(AssertionError, match="nothing says how random weights of .*LlamaForCausalLM are drawn on the meta device"):
        on_ranks(1, CASES, "trained", run_file, *random, "training.init_model_with_meta_device=true", f"training.save={tmp_path / 'meta'}")


def test_weights_that_do_not_fit_are_named_not_drawn(llama_run: tuple[Path, Any], tmp_path: Path) -> None:
    run_file, _ = llama_run
    broken = tmp_path / "hf"
    broken.mkdir()
    tensors = load_file(run_file.parent / "hf" / "model.safetensors")
    tensors["model.layers.1.mlp.gate.weight"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_text((run_file.parent / "hf" / "config.json").read_text())
    with pytest.raises(AssertionError, match=r"missing: model.layers.1.mlp.gate_proj.weight.*unexpected: model.layers.1.mlp.gate.weight"):
        on_ranks(1, CASES, "trained", run_file, f"training.load={broken}", f"training.save={tmp_path / 'out'}")


def test_keys_of_files_are_read_as_the_class_renames_them() -> None:
    """The hub's keys of Gemma 3, those of a base model, and a tied head."""
    model = gemma()
    names = ModelFileNames(model)
    hub = ["language_model.model.norm.weight", "vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"]
    canonical = [name for name in model.state_dict() if any(name.endswith(key.removeprefix("language_model.model.")[-20:]) for key in hub)]
    assert set(names(hub).values()) <= set(model.state_dict())
    assert len(canonical) >= 2
    assert names(["lm_head.weight"]) == {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    base = ["layers.0.mlp.up_proj.weight"]
    assert ModelFileNames(llama())(base) == {base[0]: "model.layers.0.mlp.up_proj.weight"}
