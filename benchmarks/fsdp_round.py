"""What FSDP2 costs where there is nothing to shard: a world of one GPU against no sharding, side by side.

    PYTHONPATH=src python benchmarks/fsdp_round.py OUT [--seconds N] [--rehearse]

A step of four Llama-3-8B blocks on 8192 tokens: forward, backward, clipping and AdamW on float32 masters, as
``octavo train`` does it, in BF16 and in 8-bit recipes. ``none`` is the model alone, ``fsdp`` has ``fully_shard`` on
every block and on the whole over a process group of one, ``fsdp_kept`` does not reshard after forward, and
``fsdp_8_bits`` gathers codes (``octavo.prepare_fsdp``) where the recipe allows it. The same weights and the same batch:
before anything is timed, outputs must be within 50 dB and gradients within 40 dB of ``none``, because attention's
backward adds in any order; whether outputs are the same bits is in the results. The bar is 3% over ``none``. Writes
``OUT/fsdp-round-CARD.json`` after every recipe; ``--rehearse`` runs all of it on a CPU with a small model and writes
nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import octavo
from octavo.models.llama3 import PRESETS, Llama3Config, TransformerBlock, rope_table
from octavo.testing import sqnr
from octavo.trainer.optimizer import MasterAdamW

BAR = 0.03
"""How much slower a step may be with FSDP2 over a world of one."""
ROUNDS, WARM_UP = 15, 3
RECIPES = ("bf16", "rowwise", "rowwise_block_weight")
PROTOCOL = (
    "CUDA events around one training step (forward, backward, clip, AdamW on float32 masters), contenders "
    "interleaved, median of {rounds} rounds after {warm_up}; host_ms is the time until the step's call returns"
)


class Blocks(nn.Module):
    """Transformer blocks without embedding and head: x [B, S, D] to [B, S, D]."""

    def __init__(self, config: Llama3Config, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(count))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class Contender:
    """A model, sharded or not, with its optimizer; ``step`` is one training step."""

    def __init__(self, name: str, recipe: str, config: Llama3Config, layers: int, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Blocks(config, layers).to(torch.bfloat16)
        octavo.convert(self.model, recipe, min_size=0)
        if name == "fsdp_8_bits":
            octavo.prepare_fsdp(self.model)
        if name != "none":
            _shard(self.model, reshard=name != "fsdp_kept")
        self.optimizer = MasterAdamW(self.model.named_parameters(), weight_decay=0.1)

    def backward(self, inputs: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """The output; gradients are those of this batch."""
        self.optimizer.zero_grad()
        inputs[0].grad = None
        out = self.model(*inputs)
        out.backward(gradient)
        return out.detach()

    def step(self, inputs: tuple[Tensor, ...], gradient: Tensor) -> None:
        """Forward, backward, clip, update. Its learning rate leaves every number in range for any steps."""
        self.backward(inputs, gradient)
        self.optimizer.clip(1.0)
        self.optimizer.step(1e-6)

    def gradients(self) -> dict[str, Tensor]:
        """Of the whole parameters, float32."""
        return {
            name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).float()  # pyright: ignore
            for name, p in self.model.named_parameters()
        }


def _shard(model: Blocks, reshard: bool) -> None:
    # Gradients are added over ranks in float32; weights stay in their dtype, as in the trainer.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    if dist.get_backend() == "gloo":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no mean


def names(recipe: str) -> tuple[str, ...]:
    """Contenders in ``recipe``; ``none`` is first."""
    gathers = recipe == "rowwise_block_weight"
    return ("none", "fsdp", "fsdp_8_bits") if gathers else ("none", "fsdp", "fsdp_kept")


def check(
    contenders: dict[str, Contender], inputs: tuple[Tensor, ...], gradient: Tensor
) -> dict[str, dict[str, Any]]:
    """How near each contender is to ``none``; raises RuntimeError for one that is too far to be timed."""
    plain = contenders["none"]
    expected, gradients = plain.backward(inputs, gradient), plain.gradients()
    plain.optimizer.zero_grad()
    found = {}
    for name, contender in contenders.items():
        if contender is plain:
            continue
        out = contender.backward(inputs, gradient)
        output_db = min(sqnr(out, expected), 999.0)
        gradient_db = min(min(sqnr(g, gradients[n]), 999.0) for n, g in contender.gradients().items())
        contender.optimizer.zero_grad()
        if output_db < 50 or gradient_db < 40:
            raise RuntimeError(
                f"{name}: output at {output_db:.1f} dB, gradients at {gradient_db:.1f} dB of none"
            )
        bit_equal = torch.equal(out, expected)
        found[name] = {"output_bit_equal": bit_equal, "output_db": output_db, "gradient_db": gradient_db}
    return found


def timed(call: Callable[[], object], device: str) -> tuple[float, float]:
    """Milliseconds of one call: on the device, and until it returned."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        ms = (time.perf_counter() - begin) * 1e3
        return ms, ms
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    start.record()
    call()
    end.record()
    host = (time.perf_counter() - begin) * 1e3
    end.synchronize()
    return start.elapsed_time(end), host


def peak_gb(call: Callable[[], object]) -> float:
    """GB that a call takes at its peak beyond what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)


def measure(
    recipe: str, config: Llama3Config, layers: int, tokens: int, device: str, count: int
) -> dict[str, Any]:
    """One case of the results: all contenders of ``recipe``, checked and then timed in turn."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(
        1, tokens, config.dim, device=device, dtype=torch.bfloat16, generator=generator
    ).requires_grad_()
    gradient = torch.randn(x.shape, device=device, dtype=torch.bfloat16, generator=generator) * 1e-3
    inputs = (x, *rope_table(config, tokens, x.device))
    contenders = {name: Contender(name, recipe, config, layers, device) for name in names(recipe)}
    against = check(contenders, inputs, gradient)
    calls = {n: lambda c=c: c.step(inputs, gradient) for n, c in contenders.items()}
    for call in [call for call in calls.values() for _ in range(WARM_UP)]:
        call()
    peaks = {n: peak_gb(call) for n, call in calls.items()} if device == "cuda" else {}
    rounds = [{n: timed(call, device) for n, call in calls.items()} for _ in range(count)]
    ms, host = ({n: statistics.median(r[n][i] for r in rounds) for n in calls} for i in (0, 1))
    over = {n: ms[n] / ms["none"] - 1 for n in calls if n != "none"}
    # Of the same round, so that a drift of the clocks meets both.
    paired = {n: statistics.median(r[n][0] / r["none"][0] for r in rounds) - 1 for n in over}
    products = sum(p.numel() for p in contenders["none"].model.parameters() if p.dim() > 1)
    return {
        "group": "world_of_one", "case": f"{recipe} {layers} blocks {tokens} tokens", "recipe": recipe,
        "ms": ms, "host_ms": host, "peak_gb": peaks, "over_none": over, "over_none_paired": paired,
        "bar": BAR, "within_bar": {n: value <= BAR for n, value in over.items()},
        "against_none": against, "bytes": 2 * products, "flops": 6 * products * tokens, "checked": True, "taken": True,
    }  # fmt: skip


def show(case: dict[str, Any]) -> None:
    """Prints a case on one line."""
    parts = [f"{n} {ms:.2f} ms" for n, ms in case["ms"].items()]
    parts += [
        f"{n} {value:+.2%} ({case['over_none_paired'][n]:+.2%} paired)"
        for n, value in case["over_none"].items()
    ]
    print(
        case["case"], *parts, f"host {case['host_ms']}", f"peak GB {case['peak_gb']}", sep=" | ", flush=True
    )


def main() -> int:
    """Runs every recipe that fits the time; returns the exit status: 1 if one could not be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", default=Path("benchmarks/results"))
    parser.add_argument("--seconds", type=float, default=50.0, help="no recipe is begun after so many")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU, nothing is written")
    arguments = parser.parse_args()
    started = time.monotonic()
    device = "cpu" if arguments.rehearse else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("this needs a GPU and PyTorch sees none here: --rehearse runs it on the CPU")
    preset, layers, tokens, count = "llama3-8b", 4, 8192, ROUNDS
    if arguments.rehearse:
        preset, layers, tokens, count = "llama3-debug", 2, 32, 2
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # a world of one talks to nobody
    backend = "gloo" if arguments.rehearse else "nccl"
    cases, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        if device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            for recipe in RECIPES:
                if time.monotonic() - started > arguments.seconds:
                    print(f"out of time before {recipe}", flush=True)
                    break
                try:
                    cases.append(measure(recipe, PRESETS[preset], layers, tokens, device, count))
                except Exception as error:  # one recipe that fails must not lose the others' numbers
                    failed = True
                    print(f"FAILED {recipe}: {type(error).__name__} {str(error)[:500]}", flush=True)
                    continue
                finally:
                    gc.collect()
                    if device == "cuda":
                        torch.cuda.empty_cache()
                show(cases[-1])
                if device == "cuda":
                    _write(cases, arguments.out)
        finally:
            dist.destroy_process_group()
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    return int(failed or not cases)


def _write(cases: list[dict[str, Any]], out: Path) -> None:
    from octavo.bench import report

    protocol = PROTOCOL.format(rounds=ROUNDS, warm_up=WARM_UP)
    on = {"gpu": torch.cuda.get_device_name(), "copy_gb_s": None, "bf16_tflops": None}
    content = report.results("fsdp-round", "python benchmarks/fsdp_round.py OUT", protocol, on, cases)
    print("wrote", report.write(content, out), flush=True)


if __name__ == "__main__":
    sys.exit(main())
