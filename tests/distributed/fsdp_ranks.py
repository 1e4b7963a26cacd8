"""What each rank does in the tests of FSDP2; a failed assertion here fails the test."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist
from small_models import assert_same, dense, full, gradients, loss_of, shard, sparse, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.training.weight_cache import _active as active_caches


def mesh_of(*sizes: int) -> Any:
    names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def step_is_bit_equal(recipes: list[str], sizes: tuple[int, ...]) -> None:
    """Output and gradients of a sharded model on the same batch everywhere equal those of one process."""
    mesh = mesh_of(*sizes)
    for recipe in recipes:
        for build in (dense, sparse):
            alone, sharded = build(recipe), shard(build(recipe), mesh)
            loss, expected = loss_of(sharded), loss_of(alone)
            assert torch.equal(loss, expected), (recipe, build.__name__, float(loss), float(expected))
            loss.backward()
            expected.backward()
            assert_same(gradients(sharded), gradients(alone))


def mixed_precision_is_bit_equal(recipes: list[str]) -> None:
    """Float32 shards, bfloat16 computation, float32 reduction: as one process with rounded weights."""
    # Casting the inputs of layers would round the rotary angles, which one process keeps in float32.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for recipe in recipes:
        for build in (dense, sparse):
            alone = build(recipe).to(torch.bfloat16)
            sharded = shard(build(recipe), mesh_of(dist.get_world_size()), mp_policy=policy)
            loss, expected = loss_of(sharded), loss_of(alone)
            assert torch.equal(loss, expected), (recipe, build.__name__)
            loss.backward()
            expected.backward()
            grads = gradients(sharded)
            assert {g.dtype for g in grads.values()} == {torch.float32}
            assert_same({n: g.bfloat16() for n, g in grads.items()}, gradients(alone))


def twenty_steps(recipes: list[str]) -> dict[str, list[float]]:
    """Losses of 20 steps beside those of one process on the joined batch, when each rank has its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gaps = {}
    for recipe in recipes:
        alone, sharded = dense(recipe), shard(dense(recipe), mesh_of(world))
        one = torch.optim.SGD(alone.parameters(), lr=0.05)
        many = torch.optim.SGD(sharded.parameters(), lr=0.05)
        gaps[recipe] = []
        for step in range(20):
            expected = sum((loss_of(alone, world * step + r) for r in range(world)), torch.zeros(())) / world
            loss = loss_of(sharded, world * step + rank)
            for optimizer, value in ((one, expected), (many, loss)):
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            gaps[recipe].append(abs(float(mean / world) / float(expected.detach()) - 1))
    return gaps


def uneven_and_empty_shards(recipes: list[str], prepared: bool = False) -> None:
    """Weights of 10 and 2 rows over three ranks: shards of 4, 4, 2 and 1, 1, 0 rows; a step as one process."""
    mesh = mesh_of(dist.get_world_size())
    for recipe in recipes:
        alone, sharded = rows_of_ten_and_two(recipe), rows_of_ten_and_two(recipe)
        if prepared:
            octavo.prepare_fsdp(sharded)
        for module in (*sharded, sharded):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        rows = [p.to_local().shape[0] for p in sharded.parameters() if p.ndim == 2]
        assert rows == [[4, 1], [4, 1], [2, 0]][dist.get_rank()]
        assert_same_steps(sharded, alone)


def rows_of_ten_and_two(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 10), nn.Linear(10, 2))
    octavo.convert(model, recipe)
    return model


def assert_same_steps(sharded: nn.Module, alone: nn.Module, steps: int = 2) -> None:
    """Bit-equal outputs, gradients of the input and weights after each of some steps on the same batch.

    Rank 0 alone has a gradient, and gradients are summed: a third of three equal numbers is not that number.
    """
    first = dist.get_rank() == 0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (sharded, alone)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(12, 16, generator=generator)
        results = []
        for model, optimizer in zip((sharded, alone), optimizers, strict=True):
            leaf = x.clone().requires_grad_()
            out = model(leaf)
            (out.square().sum() * float(first or model is alone)).backward()
            optimizer.step()
            optimizer.zero_grad()
            weights = {n: full(p).clone() for n, p in model.named_parameters()}
            results.append({"output": out.detach(), **({"input": leaf.grad} if first else {}), **weights})
        assert_same(*results)


def accumulation_is_bit_equal(recipe: str) -> None:
    """Two micro-batches a step, with and without the weight cache, resharding as by default."""
    mesh = mesh_of(dist.get_world_size())
    results = []
    for cache in (False, True):
        model = shard(dense(recipe), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with octavo.accumulate() if cache else contextlib.nullcontext():
            for step in range(3):
                for micro in range(2):
                    model.set_requires_gradient_sync(micro == 1)
                    loss_of(model, 2 * step + micro).backward()
                    if cache:
                        # What was quantized of a layer that is sharded again is forgotten.
                        assert len(active_caches[-1].entries) <= 14
                optimizer.step()
                optimizer.zero_grad()
        results.append({n: full(p) for n, p in model.named_parameters()})
    assert_same(*results)


def unsharded_weights_are_quantized_once(recipe: str) -> tuple[int, int]:
    """Quantizations of weights in the first and in the second micro-batch while the weights stay unsharded."""
    model = shard(dense(recipe, spans=False), mesh_of(dist.get_world_size()), reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(False)
    counts = []
    with octavo.accumulate():
        for micro in range(2):
            before = len(active_caches[-1].entries)
            loss_of(model, micro).backward()
            counts.append(len(active_caches[-1].entries) - before)
    return counts[0], counts[1]


def gather_in_8_bits_is_bit_equal(recipe: Any, hidden: int, mixed: bool, layers_in_8_bits: int) -> None:
    """Output and gradients of the first step, and weights after more, with 16- and with 8-bit all-gather."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options = {"mp_policy": policy} if mixed else {}
    plain, prepared = dense(recipe, hidden=hidden), dense(recipe, hidden=hidden)
    report = octavo.prepare_fsdp(prepared)
    assert len(report.in_8_bits) == layers_in_8_bits, str(report)
    mesh = mesh_of(dist.get_world_size())
    models = [shard(model, mesh, **options) for model in (plain, prepared)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        losses = [loss_of(model, step) for model in models]
        assert torch.equal(*losses), (recipe, step, losses)
        for loss in losses:
            loss.backward()
        assert_same(gradients(prepared), gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def gathered_bytes(recipe: str, prepare: bool) -> list[tuple[str, int]]:
    """(collective, bytes) of a step after the first, as they reach the process group."""
    model = dense(recipe)
    if prepare:
        octavo.prepare_fsdp(model)
    shard(model, mesh_of(dist.get_world_size()), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    train(model, 1)
    with Collectives() as collectives:
        train(model, 1)
    return collectives.seen


class Collectives(TorchDispatchMode):
    """Names and input bytes of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.seen.append((func.name().split("::")[1].split(".")[0], min(map(nbytes, tensors))))
        return func(*args, **(kwargs or {}))


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def state_dicts_hold_plain_tensors(recipe: str) -> None:
    """Before and after sharding, saved, loaded strictly, by copy and by assignment, through files and DCP."""
    model, other = (dense(recipe) for _ in range(2))
    before = {n: p.clone() for n, p in model.state_dict().items()}
    octavo.prepare_fsdp(model)
    assert_same(dict(model.state_dict()), before)
    assert {type(t) for t in model.state_dict().values()} == {torch.Tensor}
    mesh = mesh_of(dist.get_world_size())
    shard(model, mesh)
    train(model, 1)
    state = model.state_dict()
    assert {type(t.to_local()) for t in state.values()} == {torch.Tensor}
    buffer = io.BytesIO()
    torch.save({n: full(t) for n, t in state.items()}, buffer)
    buffer.seek(0)
    whole = torch.load(buffer, weights_only=True)
    other.load_state_dict(whole)
    assert torch.equal(loss_of(model, 5), loss_of(other, 5))
    for assign in (False, True):
        again = dense(recipe)
        octavo.prepare_fsdp(again)
        shard(again, mesh)
        loss_of(again, 3)  # scales of the first weights, which must not be used for the loaded ones
        again.load_state_dict({n: t.clone() for n, t in state.items()}, assign=assign)
        for seed in (5, 6):
            assert torch.equal(loss_of(model, seed), loss_of(again, seed)), assign
        assert train(again, 2) == train(model, 2)
        model.load_state_dict({n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in whole.items()})


def every_write_is_seen(recipe: str) -> None:
    """Scales follow the weights whatever wrote them: optimizers of any kind, in-place ops, local shards."""
    plain, prepared = dense(recipe), dense(recipe)
    octavo.prepare_fsdp(prepared)
    mesh = mesh_of(dist.get_world_size())
    models = [shard(model, mesh) for model in (plain, prepared)]

    def by_hand(parameter: Any) -> None:
        parameter.mul_(1.5)

    def by_copy(parameter: Any) -> None:
        parameter.copy_(parameter * 0.6)

    def by_local_shard(parameter: Any) -> None:
        parameter.to_local().mul_(1.2)

    writes = [by_hand, by_copy, by_local_shard]
    optimizers = [
        lambda p: torch.optim.SGD(p, 0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    ]
    for write in writes:
        for model in models:
            loss_of(model)
            model.reshard()  # the root stays unsharded after forward
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        write(parameter)
        assert torch.equal(*(loss_of(model) for model in models)), write.__name__
    for make in optimizers:
        losses = [train(model, 2, make) for model in models]
        assert losses[0] == losses[1], losses
