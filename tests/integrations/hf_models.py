"""Small random models of Hugging Face transformers, and how two of them are compared."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 97
CONFIGS: dict[str, type[transformers.PreTrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A causal language model of two layers, 64 wide, in float32, with the same weights for the same seed."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](**settings | changes))


def tokens(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """[rows, length] of repeating patterns that a model can learn."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(3, VOCABULARY, (rows, 1), generator=generator)
    return 3 + (start + 7 * torch.arange(length)) % (VOCABULARY - 3)


def loss_and_gradients(model: nn.Module, x: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss on ``x`` and the gradients of all parameters that take one."""
    model.zero_grad()
    loss = model(input_ids=x, labels=x).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
