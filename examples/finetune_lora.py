"""Fine-tune a causal language model with LoRA: the frozen base in 8 bits, adapters in high precision.

    python examples/finetune_lora.py
    python examples/finetune_lora.py --model path/to/Llama-3.2-1B --data notes.txt --steps 500
    torchrun --nproc-per-node 2 examples/finetune_lora.py

`transformers.Trainer` and PEFT are used as always; the two lines that make it 8-bit training are marked. Without
--model a small Llama with random weights is made, whose tokens are bytes, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

import octavo


def load(path: str | None) -> tuple[Any, Any]:
    """(model, function from text to tokens) of a folder in Hugging Face's layout, or a small random Llama."""
    if path:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        return model, lambda text: tokenizer(text)["input_ids"]
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config), lambda text: list(text.encode())


def dataset(path: str | None, tokenize: Any, length: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of ``length`` tokens of a text file, or of a module of Python's standard library."""
    file = Path(path or Path(os.__file__).with_name("argparse.py"))
    tokens = torch.tensor(tokenize(file.read_text(encoding="utf-8")))
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    if len(rows) < 2:
        raise SystemExit(f"{file} has {len(tokens)} tokens: two sequences of {length} are needed")
    return [{"input_ids": row, "labels": row} for row in rows]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", help="a folder with a model and its tokenizer (default: a small random Llama)"
    )
    parser.add_argument("--data", help="a text file (default: a module of Python's standard library)")
    parser.add_argument("--recipe", default="rowwise", choices=octavo.RECIPES, help="bf16 converts nothing")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--grad-accum", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--out", help="folder for the adapter, and for the merged model beside it")
    return parser.parse_args()


def main() -> None:
    options = parse()
    model, tokenize = load(options.model)
    if options.recipe != "bf16":
        print(octavo.convert(model, options.recipe))  # 1: before or after PEFT, the same
    adapter = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, adapter)
    model.print_trainable_parameters()

    rows = dataset(options.data, tokenize, options.length)
    held_out = max(1, len(rows) // 10)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = transformers.TrainingArguments(
            output_dir=options.out or scratch, use_cpu=not torch.cuda.is_available(), bf16=True,
            max_steps=options.steps, per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.grad_accum, learning_rate=options.lr, logging_steps=5,
            save_strategy="no", report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows[held_out:], eval_dataset=rows[:held_out]
        )
        before = trainer.evaluate()["eval_loss"]
        with octavo.accumulate():  # 2: the frozen base is quantized once, for all steps
            trainer.train()
        after = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            print(f"held-out loss {before:.4f} before, {after:.4f} after {options.steps} steps")
        if options.out and trainer.is_world_process_zero():
            model.save_pretrained(options.out)
            # Outside of the block above: PEFT merges through `.data`, which the cache does not see.
            merged = Path(options.out) / "merged"
            model.merge_and_unload().save_pretrained(merged)
            print(f"adapter in {options.out}, merged model in {merged}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
