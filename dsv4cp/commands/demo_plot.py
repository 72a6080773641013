"""The demo's picture: which keys each query sees, and one Sinkhorn matrix before and after."""

from __future__ import annotations

import matplotlib
import numpy as np

from .demo_text import Packed

MAP_PIXELS = 700  # a longer text is drawn in blocks of tokens; a block is marked when any of its pairs is selected


def draw(path: str, packed: Packed, lists: np.ndarray, logits: np.ndarray, comb: np.ndarray) -> None:
    """Writes the PNG. lists [S, T] are key ids, logits and comb [S, M, M]."""
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    tokens, keys = len(packed.tokens), len(packed.tokens) + len(packed.groups)
    step = max(1, -(-tokens // MAP_PIXELS))
    marked = np.zeros((-(-tokens // step), -(-keys // step)))
    queries = np.broadcast_to(np.arange(tokens)[:, None], lists.shape)
    seen = lists >= 0
    raw = seen & (lists < tokens)
    for kind, value in ((raw, 1.0), (seen & ~raw, 2.0)):
        marked[queries[kind] // step, lists[kind] // step] = value

    figure = pyplot.figure(figsize=(12, 9), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 1))
    axes = figure.add_subplot(grid[:, 0])
    colours = matplotlib.colors.ListedColormap(["white", "tab:blue", "tab:orange"])
    whole = (0, keys, tokens, 0)
    axes.imshow(marked, cmap=colours, vmin=0, vmax=2, extent=whole, aspect="auto", interpolation="nearest")
    axes.axvline(tokens, color="black", linewidth=0.8)
    for start in np.flatnonzero(np.diff(packed.segments)) + 1:
        axes.axhline(float(start), color="grey", linewidth=0.4, linestyle=":")
    axes.set_xlabel(f"key: {tokens} tokens (blue), then {keys - tokens} compressed entries (orange)")
    axes.set_ylabel("query")
    blocks = f", {step} tokens a pixel" if step > 1 else ""
    axes.set_title(f"which keys each query sees{blocks}; dotted: a new document")

    middle = tokens // 2
    for row, (title, matrix) in enumerate(
        ((f"mixing logits of token {middle}", logits[middle]), ("after Sinkhorn", comb[middle]))
    ):
        axes = figure.add_subplot(grid[row, 1])
        axes.imshow(matrix, cmap="viridis")
        axes.set_title(title, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        bright = matrix > (matrix.min() + matrix.max()) / 2
        for (i, j), value in np.ndenumerate(matrix):
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="black" if bright[i, j] else "white")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
