"""TorchTitan's entry point where there is no accelerator: ``torchrun launch.py`` for ``-m torchtitan.train``.

TorchTitan takes an accelerator for granted in a few places, answered here: which device there is, how FSDP reduces
(gloo has no average), how tokens go to experts (gloo's lists must be even). Attention is ``cpu_overrides.sdpa``.
Data and tokenizer, which its wheel does not carry, are written to the working directory by :func:`write_assets`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class CpuModule:
    """``torch.cpu`` with what TorchTitan asks of an accelerator's module besides."""

    memory = torch.cuda.memory

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: Any) -> str:
        return "CPU"

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def write_assets(folder: Path) -> None:
    """A tokenizer of bytes and a small corpus, where TorchTitan's debug configurations look for them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<|end|>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    place = folder / "tests" / "assets" / "tokenizer"
    place.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": "<|end|>"}))
    text = place.parent / "c4_test" / "data.json"
    text.parent.mkdir(exist_ok=True)
    lines = [
        Path(torch.__file__).with_name(f"{name}.py").read_text()
        for name in ("hub", "functional", "serialization")
    ]
    text.write_text("\n".join(json.dumps({"text": line}) for line in lines))


def answer_for_cpu() -> None:
    """Make the CPU the device that TorchTitan finds."""
    with (
        mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
        mock.patch("torch._utils._get_device_module", return_value=CpuModule()),
    ):
        import torchtitan.tools.utils  # noqa: F401  reads both once, at import
    import torchtitan.distributed.fsdp as fsdp
    from torch.distributed.fsdp import FSDPModule

    divide = fsdp.disable_fsdp_gradient_division

    def sum_without_average(model: torch.nn.Module) -> None:
        divide(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = sum_without_average
    dist.all_to_all = uneven_all_to_all


def uneven_all_to_all(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None, async_op: bool = False
) -> None:
    """``all_to_all`` of lists, which gloo does for equal sizes alone, by ``all_to_all_single``."""
    sizes = [len(part) for part in outputs]
    received = inputs[0].new_empty((sum(sizes), *inputs[0].shape[1:]))
    dist.all_to_all_single(received, torch.cat(inputs), sizes, [len(part) for part in inputs], group)
    for output, part in zip(outputs, received.split(sizes), strict=True):
        output.copy_(part)


def main() -> None:
    answer_for_cpu()
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    if sys.argv[1:] == ["--write-assets"]:
        write_assets(Path.cwd())
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        main()
