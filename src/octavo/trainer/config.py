"""What a training job is asked to do, checked before anything starts."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo import models
from octavo.errors import UserError as UserError

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Weight, gradient and AdamW's two moments in float32; a 16-bit model keeps 16-bit weights and gradients
# beside a float32 master, its gradient and the moments.
BYTES_PER_PARAMETER: dict[str, int] = {"float32": 16, "bfloat16": 20}


PLACES = ("out", "checkpoint_dir", "resume", "save_final", "log", "tensorboard")
"""Options that say where a run leaves things; another run of the same job has its own."""

NEUTRAL = ("checkpoint_every", "keep", "eval_every", "monitor_every", "activation_checkpoint")
"""Options that change neither a loss nor a weight, so that a resumed run may have others."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training job: every recipe trains the same model on the same batches from the same weights."""

    model: str = "llama3-debug"
    recipes: tuple[str, ...] = ("bf16",)
    """In the order they run; differences are stated against ``baseline``."""
    baseline: str | None = None
    data: Path | None = None
    """A text file, JSONL or a folder of them; None means the Python standard library's source."""
    tokenizer: Path | None = None
    """A ``tokenizer.json``; None means that bytes are the tokens."""
    init_from: Path | None = None
    """Safetensors to start from, a file or a folder; None means random weights from ``seed``."""
    steps: int = 200
    seq_len: int = 128
    batch_size: int = 8
    """Sequences an optimizer step sees."""
    grad_accum: int = 1
    """How many parts a step's batch is computed in, one after the other, in less memory."""
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
    compile: bool = False
    """Whether torch.compile compiles each transformer block."""
    activation_checkpoint: bool = False
    """Whether backward computes each block's activations again instead of keeping them."""
    fast_accum: bool = False
    """Whether every 8-bit product may accumulate in fewer bits, not just those that the recipe says."""
    eval_every: int | None = None
    """Steps between validations; None means one, after the last step."""
    monitor_every: int | None = None
    """Watch the operands of one step of so many; 0 watches none. None means about ten steps of a run that is
    compared with others, at most every fifth so that the median step is an unwatched one, and else none."""
    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    """Steps between checkpoints; None means a tenth of the steps. There is always one of the last step."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    resume: bool = False
    """Whether to go on from the newest good checkpoint."""
    save_final: Path | None = None
    """Folder for the trained weights as safetensors, one below it for each of several recipes."""
    log: Path | None = None
    """A file that gets one JSON object a step."""
    tensorboard: Path | None = None
    out: Path = Path("octavo-run")

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, the default resolved."""
        return max(1, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def monitor_steps(self) -> int:
        """Steps from one whose operands are watched to the next, the default resolved; 0 for none."""
        if self.monitor_every is not None:
            return self.monitor_every
        return max(5, self.steps // 10) if self.baseline else 0

    @property
    def checkpoint_steps(self) -> int:
        """Steps between checkpoints, the default resolved."""
        return max(1, self.steps // 10) if self.checkpoint_every is None else self.checkpoint_every

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch_size * self.seq_len

    def final_folder(self, recipe: str) -> Path:
        """Where the weights that ``recipe`` trained go."""
        assert self.save_final, "--save-final was not given"
        return self.save_final / recipe if len(self.recipes) > 1 else self.save_final

    def learning_rate(self, step: int) -> float:
        """Learning rate of ``step`` (from 0): linear warm-up, then a cosine to ``min_lr * lr``."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps + 1) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr + (1.0 - self.min_lr) * cosine)

    def as_data(self) -> dict[str, Any]:
        """The job as plain values under the names of the options, for a file that ``--config`` reads back.

        Defaults that depend on other options are resolved; ``PLACES`` and options that are off are left out.
        """
        named: dict[str, Any] = dataclasses.asdict(self) | {
            "warmup": self.warmup_steps,
            "monitor_every": self.monitor_steps,
        }
        recipes: list[str] = list(named.pop("recipes"))
        cut = 1 if named.pop("baseline") and len(recipes) > 1 else 0
        named = {"model": named.pop("model"), "recipe": recipes[cut:], "compare": recipes[:cut]} | named
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in named.items()
            if name not in PLACES and value is not None and value != []
        }

    def check(self) -> None:
        """Raises ``UserError`` at the first thing that would stop the job later.

        Costs nothing that grows with the model: the weights are counted on the meta device.
        """
        self._check_numbers()
        self._check_names()
        self._check_places()
        self._check_device()
        self._check_memory()

    def _check_numbers(self) -> None:
        for option, value in (
            ("steps", self.steps),
            ("seq-len", self.seq_len),
            ("batch-size", self.batch_size),
            ("grad-accum", self.grad_accum),
            ("eval-every", self.eval_every),
            ("checkpoint-every", self.checkpoint_every),
            ("keep", self.keep),
        ):
            if value is not None and value < 1:
                raise UserError(f"--{option} is {value}: give a number of at least 1")
        if self.monitor_every is not None and self.monitor_every < 0:
            raise UserError(f"--monitor-every is {self.monitor_every}: give 0 for none, or a number of steps")
        if self.batch_size % self.grad_accum:
            raise UserError(
                f"--grad-accum is {self.grad_accum} but --batch-size is {self.batch_size}: the sequences of a "
                f"step are computed in equal parts, give a divisor of {self.batch_size}"
            )
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

    def _check_places(self) -> None:
        if self.checkpoint_dir is None and (self.resume or self.checkpoint_every is not None):
            option = "--resume" if self.resume else "--checkpoint-every"
            raise UserError(f"{option} needs to know where: give --checkpoint-dir too")
        if self.init_from is not None and not self.init_from.exists():
            raise UserError(
                f"--init-from {str(self.init_from)!r} does not exist: give safetensors, a file or their folder"
            )
        if self.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                "--tensorboard needs the package tensorboard: pip install 'octavo[tensorboard]', or use --log"
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


def check_writable(folder: Path, option: str = "--out") -> None:
    """Makes ``folder`` and proves that a file can be written there, so that no finished run is lost.

    Args:
        option: what names the folder on the command line.

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
            f"cannot write to {str(folder)!r} ({reason}): give another folder with {option}"
        ) from None
