"""What a training job is asked to do, checked before anything starts."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo import models

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Weight, gradient and AdamW's two moments in float32; a 16-bit model keeps 16-bit weights and gradients
# beside a float32 master, its gradient and the moments.
BYTES_PER_PARAMETER: dict[str, int] = {"float32": 16, "bfloat16": 20}


class UserError(ValueError):
    """Something asked for cannot be done. The message is one line: what was got, and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training job: every recipe trains the same model on the same batches from the same weights."""

    model: str = "llama3-debug"
    recipes: tuple[str, ...] = ("bf16",)
    """In the order they run; differences are stated against ``baseline``."""
    baseline: str | None = None
    data: Path | None = None
    """A text file or a folder of them; None means the Python standard library's source."""
    steps: int = 200
    seq_len: int = 128
    batch_size: int = 8
    lr: float = 1e-3
    """The largest learning rate, reached after the warm-up."""
    min_lr: float = 0.1
    """The learning rate at the last step, as a share of ``lr``."""
    warmup: int | None = None
    """Steps of linear warm-up; None means a tenth of the steps."""
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest norm of the whole gradient."""
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    """Of the weights and of everything that a recipe leaves in high precision."""
    out: Path = Path("octavo-run")

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, the default resolved."""
        return max(1, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch_size * self.seq_len

    def learning_rate(self, step: int) -> float:
        """Learning rate of ``step`` (from 0): linear warm-up, then a cosine to ``min_lr * lr``."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps + 1) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr + (1.0 - self.min_lr) * cosine)

    def check(self) -> None:
        """Raises ``UserError`` at the first thing that would stop the job later.

        Costs nothing that grows with the model: the weights are counted on the meta device.
        """
        self._check_numbers()
        self._check_names()
        self._check_device()
        self._check_memory()

    def _check_numbers(self) -> None:
        for option, value in (
            ("steps", self.steps),
            ("seq-len", self.seq_len),
            ("batch-size", self.batch_size),
        ):
            if value < 1:
                raise UserError(f"--{option} is {value}: give a number of at least 1")
        for option, value in (("lr", self.lr), ("clip", self.clip)):
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"--{option} is {value}: give a finite number above 0")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise UserError(f"--weight-decay is {self.weight_decay}: give a finite number of at least 0")
        if self.warmup is not None and not 0 <= self.warmup <= self.steps:
            raise UserError(
                f"--warmup is {self.warmup}: give a number from 0 to --steps, which is {self.steps}"
            )
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed is {self.seed}: give a whole number from 0 to 2**63 - 1")

    def _check_names(self) -> None:
        if self.model not in models.PRESETS:
            raise UserError(f"unknown model {self.model!r}: choose one of {', '.join(models.names())}")
        known = recipe_names()
        for recipe in self.recipes:
            if recipe not in known:
                raise UserError(f"unknown recipe {recipe!r}: choose from {', '.join(known)}")
            if self.recipes.count(recipe) > 1:
                raise UserError(f"recipe {recipe!r} is given more than once: name each recipe once")
        longest = models.preset(self.model).max_seq_len
        if self.seq_len > longest:
            raise UserError(
                f"--seq-len is {self.seq_len} but {self.model} takes at most {longest}: give a smaller one"
            )

    def _check_device(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype is {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise UserError(f"--device is {self.device!r}: give cpu, cuda or cuda:N") from None
        if device.type not in ("cpu", "cuda"):
            raise UserError(f"--device is {self.device!r}: give cpu, cuda or cuda:N")
        if device.type == "cuda":
            count = torch.cuda.device_count()
            if count == 0:
                raise UserError(f"--device is {self.device!r} but PyTorch sees no GPU here: use --device cpu")
            if device.index is not None and device.index >= count:
                raise UserError(
                    f"--device is {self.device!r} but there are {count} GPUs: use cuda:0 to cuda:{count - 1}"
                )

    def _check_memory(self) -> None:
        config = models.preset(self.model)
        parameters = sum(p.numel() for p in config.build("meta").parameters())
        needed = parameters * BYTES_PER_PARAMETER[self.dtype]
        device = torch.device(self.device)
        if device.type == "cuda":
            present, where = torch.cuda.get_device_properties(device).total_memory, "this GPU"
        else:
            present, where = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
        if needed > present:
            raise UserError(
                f"{self.model} needs about {needed / 2**30:.0f} GiB for weights and optimizer but {where} "
                f"has {present / 2**30:.0f} GiB: choose a smaller model, such as llama3-debug"
            )


def recipe_names() -> list[str]:
    """Names that ``octavo.convert`` takes."""
    from octavo.training import recipes

    return list(recipes.RECIPES)


def check_writable(folder: Path) -> None:
    """Makes ``folder`` and proves that a file can be written there, so that no finished run is lost.

    Raises:
        UserError: it cannot be made, is no folder, or takes no file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot write to {str(folder)!r} ({reason}): give another folder with --out"
        ) from None
