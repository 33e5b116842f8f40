"""Expert parallel: ranks hold different experts, and tokens travel to them.

Ranks are laid out ``[edp, efsdp, ep]``: ``ep`` ranks side by side hold different experts, ``efsdp`` share the weights of the same ones, ``edp`` are
copies. Stacks of experts become DTensors cut on their first axis over ``ep``, and ``fully_shard`` cuts them on their second over ``efsdp``. Every
token reaches its experts once, from whatever rank, so the gradients of experts are sums over all ranks as all others are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tangram.backends.fsdp2.expert_weights import holds_out_in
from tangram.backends.fsdp2.features.wrapped import Wrapped
from tangram.config.fsdp2 import Fsdp2Parallel
from tangram.config.fsdp2_sizes import expert_sizes
from tangram.config.patterns import match_each
from tangram.errors import ConfigError
from tangram.platform import current
from tangram.platform.exchange import exchange, gather, sum_parts

KEY = "parallel.ep_plan"
STACKS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class SplitExperts:
    """Modules that hold this rank's experts, and over what ``fully_shard`` cuts each."""

    meshes: dict[str, DeviceMesh]
    """By path: ``[efsdp]``, or ``[edp, efsdp]`` where there are copies."""

    def shard(self, model: nn.Module, **options: Any) -> list[Any]:
        """Make each a unit.

        Args:
            options: of ``fully_shard``, the mesh left out.

        Raises:
            ConfigError: an axis does not divide.
        """
        units = []
        for path, mesh in self.meshes.items():
            module = model.get_submodule(path)
            ranks = mesh.size(mesh.ndim - 1)
            for name in STACKS:
                rows = getattr(module, name).shape[1]
                if rows % ranks:
                    raise ConfigError(
                        f"parallel.expert_fully_shard_parallel_size {ranks} must divide the second axis of {path}.{name}, {rows}; choose another, or "
                        "name the module in ep_plan.apply_modules alone"
                    )
            units.append(fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: Shard(1), **options))
        return units


def split_experts(model: nn.Module, parallel: Fsdp2Parallel, device: torch.device) -> SplitExperts:
    """Deal the experts of ``ep_plan`` out, before the model is sharded. Every rank must call it.

    Raises:
        ConfigError: a plan without a size or a size without a plan; patterns as ``match_each``; modules that are no experts or that the sharding
            plan names too; experts that do not divide.
    """
    plan, ranks = parallel.ep_plan, parallel.expert_parallel_size
    check_plan(parallel)
    if ranks == 1:
        return SplitExperts({})
    copies, shard, _ = expert_sizes(parallel, dist.get_world_size())
    paths = [path for path, _ in model.named_modules() if path]
    chosen = _flat(match_each(plan.apply_modules, paths, f"{KEY}.apply_modules"))
    sharded = _flat(match_each(plan.apply_efsdp_modules, paths, f"{KEY}.apply_efsdp_modules")) if plan.apply_efsdp_modules else chosen
    for path in sharded:
        if path not in chosen:
            raise ConfigError(f"{KEY}.apply_efsdp_modules: {path} is not among apply_modules; add it there, or remove it here")
    for key in ("apply_modules", "ignored_modules"):
        for path in _flat(match_each(getattr(parallel.fsdp_plan, key), paths, f"parallel.fsdp_plan.{key}")):
            held = next((own for own in chosen if path == own or (own.startswith(f"{path}.") and key == "ignored_modules")), None)
            if held is not None:
                raise ConfigError(f"parallel.fsdp_plan.{key} names {path}, but {KEY} shards {held}; remove it from one of them")

    # What is not sharded is copied to all ranks that hold the same experts.
    used = sorted({shard if path in sharded else 1 for path in chosen})
    meshes_of = {size: _mesh(device, copies * shard // size, size, ranks) for size in used}
    meshes = {}
    for path in chosen:
        whole = meshes_of[shard if path in sharded else 1]
        _split(path, model.get_submodule(path), whole["ep"], plan.dispatcher)
        meshes[path] = whole["edp", "efsdp"] if whole.size(0) > 1 else whole["efsdp"]
    return SplitExperts(meshes)


def _mesh(device: torch.device, copies: int, shard: int, ranks: int) -> DeviceMesh:
    return init_device_mesh(device.type, (copies, shard, ranks), mesh_dim_names=("edp", "efsdp", "ep"))


def check_plan(parallel: Fsdp2Parallel) -> None:
    """Check that ``ep_plan`` and the sizes belong together.

    Raises:
        ConfigError: one without the other.
    """
    plan, ranks = parallel.ep_plan, parallel.expert_parallel_size
    if ranks > 1 and not plan.apply_modules:
        raise ConfigError(f"parallel.expert_parallel_size {ranks}, but {KEY}.apply_modules is empty; name the experts, such as *.mlp.experts")
    if ranks == 1 and (plan.apply_modules or plan.apply_efsdp_modules or parallel.expert_fully_shard_parallel_size):
        raise ConfigError(
            f"{KEY} or expert_fully_shard_parallel_size is given, but parallel.expert_parallel_size is 1; set that, or leave experts to fsdp_plan"
        )
    if ranks > 1 and plan.use_npu_fused_ops and current().name == "npu":
        raise ConfigError(f"{KEY}.use_npu_fused_ops: this backend has no fused operators for experts; set it to false")


def _flat(found: Mapping[str, Sequence[str]]) -> list[str]:
    return [path for matched in found.values() for path in matched]


def _split(path: str, module: nn.Module, mesh: DeviceMesh, dispatcher: str) -> None:
    """Keep this rank's experts of one module, and let its forward send tokens to them."""
    stacks = [getattr(module, name, None) for name in STACKS]
    if not all(isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks) or len(list(module.parameters())) != len(STACKS):
        raise ConfigError(
            f"{KEY}.apply_modules: {path} is a {type(module).__name__}, not experts that are stacked as {' and '.join(STACKS)}; correct it"
        )
    if not getattr(module, "is_concatenated", True) or not getattr(module, "has_gate", True):
        raise ConfigError(f"{KEY}.apply_modules: {path} holds its experts without a gate or with gate and up interleaved, which is not supported")
    count, ranks = len(stacks[0]), mesh.size()  # type: ignore[arg-type]
    if count % ranks:
        raise ConfigError(f"parallel.expert_parallel_size {ranks} does not divide the {count} experts of {path}; choose a size that does")
    experts = {"alltoall": AllToAllExperts, "allgather": AllGatherExperts}[dispatcher](path, module, mesh.get_group(), count)
    for name in STACKS:
        whole: nn.Parameter = getattr(module, name)
        own = whole.detach()[experts.first : experts.first + experts.held].clone()
        cut = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        setattr(module, name, nn.Parameter(cut, requires_grad=whole.requires_grad))
    experts.install()


class SentExperts(Wrapped):
    """A forward of stacked experts over the experts of all ranks of a group.

    Args:
        group: ranks that hold different experts.
        count: experts of all ranks.
    """

    def __init__(self, path: str, module: nn.Module, group: dist.ProcessGroup, count: int) -> None:
        super().__init__(path, module)
        self.group, self.ranks = group, dist.get_world_size(group)
        self.held = count // self.ranks
        self.first = self.held * dist.get_rank(group)
        self.out_in = holds_out_in(module)

    def __call__(self, hidden_states: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """As the class's own: 5.x gives expert numbers and weights ``[tokens, k]``, 4.57 weights of all experts ``[tokens, experts]`` and numbers.

        Args:
            hidden_states: ``[..., hidden]``.
        """
        numbers, weights = (second, first) if first.is_floating_point() else (first, second)
        if weights.shape != numbers.shape:
            weights = weights.gather(1, numbers)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        made = self.send(tokens, numbers, weights)
        # fully_shard warns of outputs that are views.
        return made if made.shape == hidden_states.shape else made.view(hidden_states.shape)

    @abstractmethod
    def send(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """What the experts make of tokens.

        Args:
            tokens: ``[tokens, hidden]``.
            numbers, weights: ``[tokens, k]``, the experts that each goes to, and what each counts.
        """

    def compute(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's experts, each on its run of tokens. One without tokens gets gradients of zeros, as its weights must have a part in the graph.

        Args:
            counts: tokens of each held expert.
        """
        up, down = (_whole(getattr(self.module, name)) for name in STACKS)
        activation: Callable[[Tensor], Tensor] = self.module.act_fn  # type: ignore[assignment]
        made = []
        for expert, part in enumerate(tokens.split(list(counts))):
            gate, linear = self._linear(part, up[expert]).chunk(2, dim=-1)
            made.append(self._linear(activation(gate) * linear, down[expert]))
        return torch.cat(made)

    def _linear(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(tokens, weight) if self.out_in else tokens @ weight


class AllToAllExperts(SentExperts):
    """Each token is sent to the ranks of its experts, once for each, and back."""

    def send(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        copies = numbers.shape[1]
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten().bincount(minlength=self.held * self.ranks)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        by_rank = arriving.view(self.ranks, self.held)
        sent, received = counts.view(self.ranks, self.held).sum(1).tolist(), by_rank.sum(1).tolist()
        here = exchange(tokens[order // copies], self.group, 0, sent, 0, received)
        # They come rank by rank, those of each rank by expert.
        expert = torch.arange(self.held, device=tokens.device).repeat(self.ranks).repeat_interleave(arriving)
        by_expert = expert.argsort(stable=True)
        made = self.compute(here[by_expert], by_rank.sum(0).tolist())[by_expert.argsort()]
        back = exchange(made, self.group, 0, received, 0, sent)[order.argsort()]
        return (back.view(*numbers.shape, -1) * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


class AllGatherExperts(SentExperts):
    """Every rank gets the tokens of all, and what its experts make of them is summed."""

    def send(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        own = torch.tensor([len(tokens)], device=tokens.device)
        every = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(every, own, group=self.group)
        sizes = torch.cat(every).tolist()
        tokens, numbers, weights = (gather(part, self.group, sizes) for part in (tokens, numbers, weights))
        row, copy = ((numbers >= self.first) & (numbers < self.first + self.held)).nonzero(as_tuple=True)
        expert = numbers[row, copy] - self.first
        order = expert.argsort(stable=True)
        row, copy = row[order], copy[order]
        made = self.compute(tokens[row], expert.bincount(minlength=self.held).tolist()) * weights[row, copy].unsqueeze(-1)
        return sum_parts(torch.zeros_like(tokens).index_add(0, row, made.to(tokens.dtype)), self.group, sizes)


def _whole(parameter: Tensor) -> Tensor:
    """All of this rank's experts, while their unit is gathered."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
