"""One rank of ``transformers.Trainer`` with DDP; ``test_trainer.py`` starts two of them with torchrun.

Trains the same small Llama in high precision and in 8 bits, with LoRA and in full, and writes what each rank saw
to ``OUT/rank<N>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from hf_models import build, tokens

import octavo
from octavo.training import weight_cache

RUNS = {"lora": 14, "full": 6}
"""Optimizer steps with adapters alone trained, and with everything trained."""


def make(kind: str, recipe: str) -> Any:
    """The model, converted unless the recipe is bf16, with adapters if ``kind`` is "lora"."""
    model = build("llama")
    if recipe != "bf16":
        octavo.convert(model, recipe)
    if kind == "full":
        return model
    torch.manual_seed(1)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def train(kind: str, recipe: str, out: Path) -> dict[str, Any]:
    """Losses of one training, and what must hold of frozen and trained parameters."""
    model, steps = make(kind, recipe), RUNS[kind]
    rows = tokens(256, 32)
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    arguments = transformers.TrainingArguments(
        output_dir=str(out / kind / recipe), use_cpu=True, bf16=True, max_steps=steps, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-2 if kind == "lora" else 1e-3,
        lr_scheduler_type="constant", logging_steps=1,
        save_steps=steps, report_to=[], seed=0, disable_tqdm=True, gradient_checkpointing=kind == "lora",
        gradient_checkpointing_kwargs={"use_reentrant": False}, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=dataset, eval_dataset=dataset[:32])
    quantized: list[int] = []
    quantize = weight_cache.quantize

    def counted(*args: Any, **kwargs: Any) -> Any:
        quantized.append(trainer.state.global_step)
        return quantize(*args, **kwargs)

    weight_cache.quantize = counted
    with octavo.accumulate():
        trainer.train()
    weight_cache.quantize = quantize
    parameters = list(model.parameters())
    trained = torch.cat([p.detach().flatten() for p in parameters if p.requires_grad])
    first_rank = trained.clone()
    dist.broadcast(first_rank, 0)
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "eval_loss": trainer.evaluate()["eval_loss"],
        "wrapped": type(trainer.model_wrapped).__name__,
        "converted": sum(isinstance(m, octavo.Linear) for m in model.modules()),
        "ranks_agree": torch.equal(trained, first_rank),
        "adapters_alone": all(("lora_" in n) == p.requires_grad for n, p in model.named_parameters()),
        "frozen_with_gradient": sum(p.grad is not None for p in parameters if not p.requires_grad),
        "weight_quantizations": [quantized.count(step) for step in range(steps)],
    }


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {kind: {recipe: train(kind, recipe, out) for recipe in ("bf16", "rowwise")} for kind in RUNS}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
