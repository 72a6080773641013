"""The demo's stages in order: run, measure, check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import demo_checks as checks
from . import demo_layer as layer
from . import offers
from .demo_text import Packed
from .measure import measured

REPEAT, EPS = 20, 1e-6  # of Sinkhorn, as in DeepSeek-V4
# Largest error a stage may show, by the dtype the ops get. Half types are rounded at every op's border.
LIMITS = {
    "float32": {"forward": 1e-5, "gradient": 1e-4, "layer": 1e-4},
    "bfloat16": {"forward": 1e-2, "gradient": 2e-2, "layer": 5e-2},
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    stage: str
    backend: str
    ms: float
    peak_mib: float
    error: float
    limit: float


class Demo:
    """A layer on a packed text; `rows` fills up as `run` goes through the stages."""

    # What stages leave for later ones; `64` is float64 on the host.
    logits: np.ndarray
    comb: np.ndarray
    q: Any
    keys: Any
    index: dict[str, Any]
    index64: tuple[np.ndarray, np.ndarray, np.ndarray]
    attention64: tuple[np.ndarray, np.ndarray, np.ndarray]
    chosen: Any
    ids: np.ndarray
    built: Any
    lists: np.ndarray
    plan: Any
    out: Any
    lse: Any
    g: dict[str, Any]

    def __init__(self, packed: Packed, sizes: layer.Sizes, *, backend: str, seed: int, on_gpu: bool) -> None:
        self.packed, self.sizes, self.backend, self.seed = packed, sizes, backend, seed
        self.xp: Any = np
        self.dtype = "float32"
        if on_gpu:
            import cupy

            self.xp, self.dtype = cupy, "bfloat16"
        self.library = self.xp.__name__
        self.where = f"{self.library}, {self.dtype}"
        self.offered = dict(offers.ops())
        self.rows: list[Row] = []
        self.limits = LIMITS[self.dtype]
        self.scale, self.index_scale = sizes.head_dim**-0.5, sizes.index_dim**-0.5
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._prepare()

    def _prepare(self) -> None:
        """Weights and data, on the device as float32 and on the host as float64."""
        xp, packed = self.xp, self.packed
        weights = layer.make_weights(self.sizes, self.seed)
        self.w64 = {name: x.astype(np.float64) for name, x in weights.items()}
        self.w = {name: xp.asarray(x) for name, x in weights.items()}
        self.position = layer.position_code(packed.positions)
        self.groups = xp.asarray(packed.groups)
        self.a: dict[str, Any] = {"tokens": xp.asarray(packed.tokens)}  # what the layer computed, by name
        rng = np.random.default_rng([self.seed, 1])
        shape = (len(packed.tokens), layer.STREAMS, layer.WIDTH)
        self.grad_streams = rng.standard_normal(shape).astype(np.float32)
        self.grad_scores = rng.standard_normal((len(packed.tokens), self.sizes.topk)).astype(np.float32)

    def run(self) -> None:
        """Every stage, forward and then backward."""
        from . import demo_backward, demo_forward

        with self.progress:
            demo_forward.hyper_connections(self)
            demo_forward.pooling(self)
            demo_forward.selection(self)
            demo_forward.attention(self)
            demo_backward.ops(self)
            demo_backward.weights(self)

    # --- Running one stage ---

    def stage(self, name: str, op: str | None, call: Callable, check: Callable, limit: float) -> Any:
        """Measures call(backend), checks its result by check(result, tick), adds the row and returns the result.

        `op` names the library's function behind the call; None is the demo's own arithmetic between the ops.
        """
        task = self.progress.add_task(name, total=1.0)
        backend = self.library if op is None else self.takes(op)
        result, ms, peak = measured(lambda: call(backend), self.library)
        self.progress.update(task, description=f"{name}: checking in float64")
        error = check(result, lambda share: self.progress.update(task, completed=share))
        self.rows.append(Row(name, backend, ms, peak, error, limit))
        self.progress.remove_task(task)
        return result

    def takes(self, op: str) -> str:
        """The backend of an op: the one asked for where the op offers it, else what "auto" takes."""
        if self.backend == "reference" or (self.backend != "auto" and self.backend in self.offered[op]):
            return self.backend
        return offers.auto(self.offered[op], self.library)

    def half(self, x: Any) -> Any:
        """x with a batch axis, in the dtype the ops get."""
        if self.dtype == "bfloat16":
            import ml_dtypes

            x = x.astype(ml_dtypes.bfloat16)
        return x[None]

    def host(self, x: Any) -> np.ndarray:
        """x as NumPy."""
        return x.get() if self.library == "cupy" else np.asarray(x)

    def worst(self, got: dict[str, Any], want: dict[str, np.ndarray]) -> float:
        """The largest error of several arrays."""
        return max(checks.error(self.host(got[name]), want[name]) for name in want)

    # --- What it found ---

    def table(self) -> Table:
        """One line a stage."""
        table = Table()
        table.add_column("stage", no_wrap=True)
        table.add_column("backend", no_wrap=True)
        for name in ("ms", "peak MiB", "max error"):
            table.add_column(name, justify="right", no_wrap=True)
        for r in self.rows:
            shown = f"{r.error:.0f}" if r.limit == 0 else f"{r.error:.1e}"
            style = None if r.error <= r.limit else "red"
            table.add_row(r.stage, r.backend, f"{r.ms:.1f}", f"{r.peak_mib:.1f}", shown, style=style)
        return table

    def failed(self) -> list[str]:
        """What is wrong, one line a stage."""
        return [f"{r.stage}: max error {r.error:.3g}, at most {r.limit:g}" for r in self.rows if not r.error <= r.limit]
