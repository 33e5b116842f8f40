"""Every launch flag: the ones that work, the ones that are compared, the ones that say what is done anyway, and the ones refused.

Names, types and meaning are Megatron-LM's (``megatron/training/arguments.py``) and, for ``--mm-*`` and a few more, MindSpeed-MM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Works:
    """A flag that sets a key of the run config.

    ``default`` is what an absent flag sets; None leaves it to the run config. ``required`` flags have none. ``const`` makes it a switch.
    """

    key: str
    kind: type = str
    default: Any = None
    required: bool = False
    const: Any = None
    many: bool = False
    says: str = ""


@dataclass(frozen=True)
class Checked:
    """A flag that must agree with the model or the run."""

    against: str
    kind: type = str
    switch: bool = False


@dataclass(frozen=True)
class BuiltIn:
    """A switch whose meaning always holds."""

    says: str


@dataclass(frozen=True)
class Refused:
    """A flag of the public launch scripts that nothing here could obey."""

    why: str


WORKS: dict[str, Works] = {
    "--mm-model": Works("model.config", required=True, says="model.json: the model's pieces"),
    "--mm-data": Works("data", required=True, says="data.json: the samples and how they are read"),
    "--mm-tool": Works("tools", says="tools.json: profiler, memory recorder and writers"),
    "--plugin": Works("model.plugin", many=True, says="files or folders that register models of your own"),
    "--load": Works("model.load", says="weights: a Hugging Face directory, an mp_rank directory or a training checkpoint; absent: random"),
    "--cast-weights": Works("model.cast_weights", const=True, says="change the type of loaded weights to --bf16, --fp16 or fp32"),
    "--tensor-model-parallel-size": Works("parallel.tensor_model_parallel_size", int),
    "--vision-tensor-model-parallel-size": Works(
        "parallel.vision_tensor_model_parallel_size", int, says="of the vision encoder, a divisor of the size above; absent: the same"
    ),
    "--pipeline-model-parallel-size": Works("parallel.pipeline_model_parallel_size", int),
    "--sequence-parallel": Works("parallel.sequence_parallel", const=True, says="needs --tensor-model-parallel-size of 2 or more"),
    "--virtual-pipeline-model-parallel-size": Works(
        "parallel.virtual_pipeline_model_parallel_size", int, says="rows of pipeline_num_layers in model.json"
    ),
    "--context-parallel-size": Works("parallel.context_parallel_size", int, says="ranks that share the tokens of a micro-batch"),
    "--context-parallel-algo": Works(
        "parallel.context_parallel_algo", says="ulysses_cp_algo (MindSpeed's default), megatron_cp_algo (ring) or hybrid_cp_algo"
    ),
    "--ulysses-degree-in-cp": Works("parallel.ulysses_degree_in_cp", int, says="hybrid_cp_algo: ranks that share the heads"),
    "--expert-model-parallel-size": Works("parallel.expert_model_parallel_size", int, says="context- and data-parallel ranks that divide experts"),
    "--moe-token-dispatcher-type": Works(
        "parallel.moe_token_dispatcher_type", says="alltoall or allgather; absent: as model.json says, or alltoall (Megatron: allgather)"
    ),
    "--moe-grouped-gemm": Works(
        "parallel.moe_grouped_gemm", const=True, says="absent: as model.json says, or where an accelerator has a kernel for it (Megatron: off)"
    ),
    "--encoder-dp-balance": Works("parallel.encoder_dp_balance", const=True, says="needs the whole vision encoder on one stage"),
    "--use-distributed-optimizer": Works("parallel.use_distributed_optimizer", const=True),
    "--overlap-grad-reduce": Works("parallel.overlap_grad_reduce", const=True),
    "--overlap-param-gather": Works("parallel.overlap_param_gather", const=True),
    "--distributed-timeout-minutes": Works("parallel.distributed_timeout_minutes", int),
    "--distributed-backend": Works("parallel.distributed_backend", says="gloo, nccl or hccl; absent: what the device offers (Megatron: nccl)"),
    "--make-vocab-size-divisible-by": Works("parallel.make_vocab_size_divisible_by", int, says="Megatron: 128"),
    "--recompute-granularity": Works("features.recompute_granularity"),
    "--recompute-method": Works("features.recompute_method"),
    "--recompute-num-layers": Works("features.recompute_num_layers", int),
    "--micro-batch-size": Works("training.micro_batch_size", int, required=True),
    "--global-batch-size": Works("training.global_batch_size", int, says="absent: micro-batch size times data-parallel size"),
    "--seq-length": Works("training.seq_length", int, required=True, says="longest sample, tokens"),
    "--train-iters": Works("training.train_iters", int, required=True),
    "--seed": Works("training.seed", int, default=1234),
    "--bf16": Works("training.dtype", const="bf16", says="neither --bf16 nor --fp16: fp32"),
    "--fp16": Works("training.dtype", const="fp16"),
    "--optimizer": Works("training.optimizer"),
    "--lr": Works("training.lr", float, required=True),
    "--min-lr": Works("training.min_lr", float),
    "--lr-decay-style": Works("training.lr_decay_style", default="linear"),
    "--lr-decay-iters": Works("training.lr_decay_iters", int, says="absent: train-iters"),
    "--lr-warmup-iters": Works("training.lr_warmup_iters", int),
    "--lr-warmup-fraction": Works("training.lr_warmup_fraction", float),
    "--weight-decay": Works("training.weight_decay", float),
    "--clip-grad": Works("training.clip_grad", float),
    "--adam-beta1": Works("training.adam_beta1", float),
    "--adam-beta2": Works("training.adam_beta2", float),
    "--adam-eps": Works("training.adam_eps", float),
    "--calculate-per-sample-loss": Works("training.loss_type", const="per_sample_loss", says="neither this nor the next: default"),
    "--calculate-per-token-loss": Works("training.loss_type", const="per_token_loss"),
    "--log-interval": Works("training.log_interval", int, default=100),
    "--log-tps": Works("training.log_tps", const=True),
    "--eval-interval": Works("training.eval_interval", int, says="absent: no evaluation (Megatron: 1000)"),
    "--eval-iters": Works("training.eval_iters", int, says="absent: no evaluation (Megatron: 100)"),
    "--exit-interval": Works("training.exit_interval", int),
    "--save": Works("training.save"),
    "--save-interval": Works("training.save_interval", int),
    "--async-save": Works("training.save_async", const=True, says="write checkpoints while training goes on, from a copy in host memory"),
    "--save-total-limit": Works("training.save_total_limit", int, says="checkpoints of the run that are kept; absent: all (not a flag of Megatron)"),
    "--save-hf-interval": Works("training.save_hf_interval", int, says="also write Hugging Face directories (not a flag of Megatron)"),
    "--no-save-optim": Works("training.no_save_optim", const=True),
    "--no-save-rng": Works("training.no_save_rng", const=True),
    "--no-load-optim": Works("training.no_load_optim", const=True),
    "--no-load-rng": Works("training.no_load_rng", const=True),
    "--num-workers": Works("training.num_workers", int, default=2),
    "--use-deter-comp": Works("training.deterministic", const=True),
    "--manual-gc-interval": Works("training.manual_gc_interval", int, says="steps after which all ranks collect Python's garbage; 0: Python decides"),
    "--tensorboard-dir": Works("tools.tensorboard.log_dir", says="switches TensorBoard on"),
    "--wandb-project": Works("tools.wandb.project", says="switches Weights & Biases on"),
    "--wandb-exp-name": Works("tools.wandb.name"),
    "--wandb-save-dir": Works("tools.wandb.dir"),
}

CHECKED: dict[str, Checked] = {
    "--num-layers": Checked("text_decoder.num_layers", int),
    "--hidden-size": Checked("text_decoder.hidden_size", int),
    "--ffn-hidden-size": Checked("text_decoder.ffn_hidden_size", int),
    "--num-attention-heads": Checked("text_decoder.num_attention_heads", int),
    "--num-query-groups": Checked("text_decoder.num_query_groups", int),
    "--max-position-embeddings": Checked("text_decoder.max_position_embeddings", int),
    "--vocab-size": Checked("text_decoder.vocab_size", int),
    "--position-embedding-type": Checked("text_decoder.position_embedding_type"),
    "--normalization": Checked("text_decoder.normalization"),
    "--norm-epsilon": Checked("text_decoder.layernorm_epsilon", float),
    "--untie-embeddings-and-output-weights": Checked("text_decoder.untie_embeddings_and_output_weights", switch=True),
    "--swiglu": Checked("text_decoder has gated_linear_unit true and activation_func silu", switch=True),
    "--use-fused-swiglu": Checked("text_decoder has gated_linear_unit true and activation_func silu", switch=True),
    "--use-fused-rmsnorm": Checked("text_decoder has normalization RMSNorm", switch=True),
    "--group-query-attention": Checked("text_decoder has num_query_groups < num_attention_heads", switch=True),
    "--tokenizer-type": Checked("NullTokenizer; data.json names the tokenizer"),
    "--manual-gc": Checked("--manual-gc-interval of 1 or more", switch=True),
    "--ckpt-format": Checked("torch_dist; training checkpoints are torch.distributed.checkpoint directories"),
}

BUILT_IN: dict[str, BuiltIn] = {
    "--use-mcore-models": BuiltIn("the model is made of megatron-core modules"),
    "--use-flash-attn": BuiltIn("attention runs through scaled_dot_product_attention, which takes the device's fused kernel"),
    "--unaligned-linear": BuiltIn("with --sequence-parallel, lengths that the tensor-parallel size does not divide are padded"),
    "--variable-seq-lengths": BuiltIn("every micro-batch has its own length, at any pipeline size"),
    "--no-masked-softmax-fusion": BuiltIn("there is no such fusion"),
    "--no-gradient-accumulation-fusion": BuiltIn("there is no such fusion"),
}

_STRUCTURE = "the model's structure comes from model.json; set it there"
_DATA = "samples come from data.json; set it there"
_LATER = "not supported yet; remove it"
_STAGES = "the encoder's stages are the numbers above 0 in vision_encoder.pipeline_num_layers"
_NPU = "a setting of one device's kernels; remove it"

REFUSED: dict[str, Refused] = {
    "--num-layers-per-virtual-pipeline-stage": Refused(
        "give pipeline_num_layers in model.json one row per virtual stage, and --virtual-pipeline-model-parallel-size"
    ),
    "--recompute-activations": Refused("write --recompute-granularity selective"),
    "--train-samples": Refused("count training in steps: --train-iters"),
    "--lr-warmup-samples": Refused("count warm-up in steps: --lr-warmup-iters"),
    "--lr-decay-samples": Refused("count the schedule in steps: --lr-decay-iters"),
    "--rotary-base": Refused(f"{_STRUCTURE} (rope_theta)"),
    "--kv-channels": Refused(_STRUCTURE),
    "--init-method-std": Refused(_STRUCTURE),
    "--attention-dropout": Refused(_STRUCTURE),
    "--hidden-dropout": Refused(_STRUCTURE),
    "--qk-layernorm": Refused(_STRUCTURE),
    "--add-qkv-bias": Refused(_STRUCTURE),
    "--disable-bias-linear": Refused(f"{_STRUCTURE} (add_bias_linear)"),
    "--padded-vocab-size": Refused("set --make-vocab-size-divisible-by; the padding follows"),
    "--data-path": Refused(_DATA),
    "--split": Refused(_DATA),
    "--tokenizer-model": Refused(_DATA),
    "--trust-remote-code": Refused("no code is loaded from model folders; remove it"),
    "--transformer-impl": Refused("megatron-core's local modules are used; remove it"),
    "--use-legacy-models": Refused("the model is made of megatron-core modules; remove it"),
    "--log-throughput": Refused("its figure is wrong for pictures of many sizes; use --log-tps"),
    "--calculate-square-loss": Refused(_LATER),
    "--calculate-token-loss": Refused("write --calculate-per-token-loss"),
    "--hetero-parallel": Refused(
        "the encoder's tp is --vision-tensor-model-parallel-size, its pp vision_encoder.pipeline_num_layers, and no ranks are its own; remove it "
        "(docs/parallelism.md)"
    ),
    "--hetero-encoder-mbs-scale": Refused("a micro-batch's pictures are dealt out over the encoder's copies, whatever its size; remove it"),
    "--encoder-tensor-model-parallel-size": Refused("write --vision-tensor-model-parallel-size"),
    "--encoder-pipeline-model-parallel-size": Refused(f"{_STAGES}; remove it"),
    "--enable-dummy-optimizer": Refused("stages whose weights are all frozen need no flag; remove it"),
    "--weight-decay-exclude-modules": Refused(_LATER),
    "--lr-scale-modules": Refused(_LATER),
    "--lr-mult": Refused(_LATER),
    "--use-txt-dynamic-batching": Refused(_LATER),
    "--reuse-fp32-param": Refused(_NPU),
    "--jit-compile": Refused(_NPU),
    "--allow-tf32": Refused(_NPU),
    "--allow-internal-format": Refused(_NPU),
    "--downcast-to-bf16": Refused(_NPU),
    "--use-fused-rotary-pos-emb": Refused("rotary positions are fused where the platform can; remove it"),
    "--lora-r": Refused(_LATER),
    "--lora-alpha": Refused(_LATER),
    "--lora-target-modules": Refused(_LATER),
    "--lora-load": Refused(_LATER),
}


def flags_markdown() -> str:
    """docs/flags.md."""
    from tangram.config.parsing import section_at
    from tangram.config.run import RunConfig

    def default(flag: Works) -> str:
        if flag.required:
            return "required"
        *path, name = flag.key.split(".")
        section = section_at(RunConfig, path)
        assert section is not None
        if flag.const is not None:
            return "off"
        value = flag.default if flag.default is not None else section.model_fields[name].get_default(call_default_factory=False)
        return "" if value in (None, []) or name in ("tools",) else f"`{value}`"

    def table(head: str, rows: list[tuple[str, ...]]) -> list[str]:
        return [f"| {head} |", "|" + "---|" * (head.count("|") + 1), *("| " + " | ".join(row) + " |" for row in rows), ""]

    lines = [
        "# Launch flags",
        "",
        "`pretrain_vlm.py` and `tangram check` take these. Names, types and meaning are Megatron-LM's and MindSpeed-MM's. A flag that is in none of",
        "the tables is an error that suggests the nearest one; names cannot be shortened. Relative paths start from the current folder.",
        "This page is written by `python -m tangram.config.flag_table`.",
        "",
        "## Work",
        "",
        "A default is Megatron's unless the note says otherwise.",
        "",
        *table("flag | key of the run config | default | note", [(f"`{n}`", f"`{f.key}`", default(f), f.says) for n, f in WORKS.items()]),
        "## Compared",
        "",
        "The flag changes nothing; a value that disagrees is an error.",
        "",
        *table("flag | must agree with", [(f"`{n}`", f.against) for n, f in CHECKED.items()]),
        "## Hold anyway",
        "",
        *table("flag | because", [(f"`{n}`", f.says) for n, f in BUILT_IN.items()]),
        "## Refused",
        "",
        *table("flag | why, and what to do", [(f"`{n}`", f.why) for n, f in REFUSED.items()]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(flags_markdown())
