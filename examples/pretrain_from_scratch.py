"""Pretrain a Hugging Face Llama from random weights in 8 bits, with Accelerate, on one device or many.

    python examples/pretrain_from_scratch.py
    torchrun --nproc-per-node 2 examples/pretrain_from_scratch.py --recipe blockwise
    python examples/pretrain_from_scratch.py --data corpus.txt --width 512 --layers 8 --steps 2000

Tokens are the bytes of a text, Python's own library unless --data names a file, so nothing is downloaded. The
two lines that make it 8-bit training are marked.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator

import octavo


def text(path: str | None) -> bytes:
    """The file's bytes, or those of a few modules of Python's standard library."""
    files = [Path(path)] if path else sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    return b"\n".join(file.read_bytes() for file in files)


class Sequences(torch.utils.data.Dataset[torch.Tensor]):
    """Pieces of ``length`` bytes, as tokens."""

    def __init__(self, data: bytes, length: int) -> None:
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(tokens) < length:
            raise SystemExit(f"the text has {len(tokens)} bytes, less than one sequence of {length}")
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index].long()


def make(width: int, layers: int, length: int) -> transformers.PreTrainedModel:
    """A Llama with random weights over a vocabulary of bytes."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=width * 5 // 2, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=max(1, width // 64), max_position_embeddings=length,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="a text file (default: Python's standard library)")
    parser.add_argument("--recipe", default="rowwise", choices=octavo.RECIPES, help="bf16 converts nothing")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a process in a micro-batch")
    parser.add_argument("--grad-accum", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--out", help="folder for the trained model")
    return parser.parse_args()


def main() -> None:
    options = parse()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.grad_accum,
    )
    model = make(options.width, options.layers, options.length)
    if options.recipe != "bf16":
        report = octavo.convert(model, options.recipe)  # 1: before DDP wraps the model
        accelerator.print(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    warmup = max(1, options.steps // 10)
    schedule = transformers.get_cosine_schedule_with_warmup(
        optimizer, warmup * accelerator.num_processes, options.steps * accelerator.num_processes
    )
    generator = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(
        Sequences(text(options.data), options.length), options.batch, shuffle=True, generator=generator
    )
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    step, losses = 0, []
    with octavo.accumulate():  # 2: a weight is quantized once a step, not once a micro-batch
        while step < options.steps:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                if accelerator.sync_gradients:
                    step += 1
                    if step % 10 == 0 or step == options.steps:
                        recent = losses[-options.grad_accum :]
                        accelerator.print(f"step {step}: loss {sum(recent) / len(recent):.4f}")
                if step == options.steps:
                    break
    if options.out and accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.out)  # as any Hugging Face model
        print(f"saved to {options.out}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
