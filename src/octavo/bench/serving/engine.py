"""Greedy generation of a batch of requests with a transformers model: static cache, decode steps as a CUDA graph."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Generated:
    """What came of a batch of requests.

    Args:
        tokens: [B, osl], the first one from the prompt's last position.
        first_seconds: until every request had its first token.
        total_seconds: until every request had its last one.
    """

    tokens: Tensor
    first_seconds: float
    total_seconds: float


class Engine:
    """Serves batches of ``batch`` requests of ``isl`` tokens in and ``osl`` out; no request ends early.

    Args:
        model: of transformers, in evaluation mode.
        graphs: replay decode steps from a CUDA graph; ignored on a CPU.
    """

    def __init__(self, model: nn.Module, batch: int, isl: int, osl: int, *, graphs: bool = True) -> None:
        from transformers import StaticCache

        self.model, self.isl, self.osl = model, isl, osl
        self.device = next(model.parameters()).device
        self.graphs = graphs and self.device.type == "cuda"
        self._cache_name = _cache_argument(model)
        self._cache: Any = StaticCache(config=cast(Any, model.config), max_cache_len=isl + osl)
        self._token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._position = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def generate(self, prompts: Tensor) -> Generated:
        """Greedy continuations of ``prompts`` [B, isl]."""
        out = torch.empty(prompts.shape[0], self.osl, dtype=torch.int64, device=self.device)
        if self.graphs and self._graph is None:
            self._capture(prompts)
        self._cache.reset()
        self._wait()
        begin = time.perf_counter()
        self._prefill(prompts)
        out[:, 0] = self._token[:, 0]
        self._wait()
        first = time.perf_counter() - begin
        for i in range(1, self.osl):
            self._graph.replay() if self._graph is not None else self._step()
            out[:, i] = self._token[:, 0]
        self._wait()
        return Generated(out, first, time.perf_counter() - begin)

    def _logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, V] of the last position."""
        arguments = {self._cache_name: self._cache, "position_ids": positions, "use_cache": True}
        return self.model(tokens, logits_to_keep=1, **arguments).logits[:, -1]

    def _prefill(self, prompts: Tensor) -> None:
        positions = torch.arange(self.isl, device=self.device)[None]
        self._token.copy_(self._logits(prompts, positions).argmax(-1, keepdim=True))
        self._position.fill_(self.isl)

    def _step(self) -> None:
        """The next token of every request; reads and writes the engine's own buffers alone."""
        self._token.copy_(self._logits(self._token, self._position).argmax(-1, keepdim=True))
        self._position += 1

    def _capture(self, prompts: Tensor) -> None:
        """Records a decode step. Warm steps come first: they compile kernels and allocate the cache."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._prefill(prompts)
            for _ in range(min(2, self.osl - 1)):
                self._step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.inference_mode()
def forced_logits(model: nn.Module, tokens: Tensor, last: int) -> Tensor:
    """Logits [B, last, V] in float32 that predict the last ``last`` of ``tokens`` [B, L], each from those before."""
    return model(tokens[:, :-1], logits_to_keep=last, use_cache=False).logits.float()


def _cache_argument(model: nn.Module) -> str:
    """transformers 5.2x renamed the cache's argument."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
