"""Checks what contenders compute, then times whole requests, interleaved."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.bench.serving.contenders import Contender
from octavo.bench.serving.engine import Engine, Generated, forced_logits
from octavo.errors import UserError

MIN_LOGITS_DB = 35.0
CHECKED_REQUESTS, CHECKED_TOKENS = 2, 32


@dataclass(frozen=True)
class Load:
    """Requests that are served at once: ``concurrency`` of ``isl`` tokens in and ``osl`` out, ``rounds`` times."""

    concurrency: int
    isl: int
    osl: int
    rounds: int


@dataclass(frozen=True)
class Check:
    """How a contender's numbers compare with the reference: the same quantized operands in float32 products.

    Args:
        logits_db: SQNR of teacher-forced logits over the reference's own continuation.
        agreed: tokens of a request before greedy decoding differed, for each request; all of them if it never did.
        margins_ok: where it differed, the reference's two best logits were closer than twice the largest error
            there, so that either choice was right within the error.
    """

    logits_db: float
    agreed: tuple[int, ...]
    margins_ok: bool

    @property
    def passed(self) -> bool:
        return self.logits_db >= MIN_LOGITS_DB and self.margins_ok


@dataclass
class Timing:
    """Every round of one contender under one load, in seconds, and what follows from their medians."""

    contender: str
    format: str
    load: Load
    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    graphs: bool = False

    def as_data(self) -> dict[str, Any]:
        """For JSON: medians in the units people compare, and the raw rounds."""
        total, first = statistics.median(self.total), statistics.median(self.first)
        return {
            "contender": self.contender, "format": self.format, **asdict(self.load), "graphs": self.graphs,
            "requests_per_s": self.load.concurrency / total,
            "output_tokens_per_s": self.load.concurrency * self.load.osl / total,
            "time_to_first_token_ms": 1e3 * first,
            "time_per_output_token_ms": 1e3 * (total - first) / max(1, self.load.osl - 1),
            "rounds_first_s": self.first, "rounds_total_s": self.total,
        }  # fmt: skip


def prompts(load: Load, vocabulary: int, device: torch.device) -> Tensor:
    """Random tokens [concurrency, isl], the same for every contender."""
    generator = torch.Generator().manual_seed(load.concurrency)
    return torch.randint(vocabulary, (load.concurrency, load.isl), generator=generator).to(device)


@torch.inference_mode()
def check(contender: Contender, reference: Contender, load: Load, vocabulary: int) -> Check:
    """Greedy decoding and teacher-forced logits of ``contender`` against ``reference`` on a few requests."""
    device = next(reference.model.parameters()).device
    small = Load(CHECKED_REQUESTS, load.isl, min(load.osl, CHECKED_TOKENS), 1)
    asked = prompts(small, vocabulary, device)
    expected, right = _continued(reference, asked, small)
    got, _ = _continued(contender, asked, small)
    with contender.context():
        logits = forced_logits(contender.model, torch.cat([asked, expected], 1), small.osl)
    error = logits - right
    noise = error.double().square().sum()
    db = float("inf") if noise == 0 else float(10 * torch.log10(right.double().square().sum() / noise))
    agreed, margins_ok = [], True
    for request in range(small.concurrency):
        differing = (got[request] != expected[request]).nonzero()
        if not len(differing):
            agreed.append(small.osl)
            continue
        at = int(differing[0])
        agreed.append(at)
        best = right[request, at].topk(2).values
        margins_ok &= bool(best[0] - best[1] <= 2 * error[request, at].abs().max())
    return Check(db, tuple(agreed), margins_ok)


def _continued(contender: Contender, asked: Tensor, load: Load) -> tuple[Tensor, Tensor]:
    """Greedy continuation of the prompts and the teacher-forced logits of just that."""
    with contender.context():
        tokens = (
            Engine(contender.model, asked.shape[0], load.isl, load.osl, graphs=False).generate(asked).tokens
        )
        return tokens, forced_logits(contender.model, torch.cat([asked, tokens], 1), load.osl)


def measure(
    contenders: Sequence[Contender],
    load: Load,
    vocabulary: int,
    *,
    graphs: bool = True,
    on_round: Callable[[Contender, Generated], None] = lambda contender, generated: None,
) -> list[Timing]:
    """Serves ``load`` with each contender in turn, ``rounds`` times after one that is not counted.

    Raises:
        UserError: the device has no memory for it.
    """
    device = next(contenders[0].model.parameters()).device
    asked = prompts(load, vocabulary, device)
    timings = [Timing(c.name, c.format, load) for c in contenders]
    try:
        engines = [Engine(c.model, load.concurrency, load.isl, load.osl, graphs=graphs) for c in contenders]
        for number in range(load.rounds + 1):
            for contender, engine, timing in zip(contenders, engines, timings, strict=True):
                with contender.context():
                    generated = engine.generate(asked)
                timing.graphs = engine.graphs
                if number:
                    timing.first.append(generated.first_seconds)
                    timing.total.append(generated.total_seconds)
                    on_round(contender, generated)
    except torch.OutOfMemoryError:
        free = torch.cuda.mem_get_info(device)[0] / 1e9
        raise UserError(
            f"out of memory at concurrency {load.concurrency} ({free:.1f} GB are free): give a smaller "
            "--concurrency, --isl, --osl or --layers, or fewer formats"
        ) from None
    finally:
        engines = []
        with contextlib.suppress(RuntimeError):
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return timings
