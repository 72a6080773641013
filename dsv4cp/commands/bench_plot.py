"""The benchmark's picture: time of every implementation of every case beside the case's floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .bench_gpu import by_cudnn

OURS, PEERS, FLOOR = "tab:blue", "tab:orange", "black"


def read_record(path: str) -> dict[str, Any]:
    """What --record wrote. Raises ValueError with a message for people."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON file ({error})") from error
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "case" in row for row in rows):
        raise ValueError(f"{path}: is no record of bench --record: it has no rows")
    return found


def check(path: str) -> None:
    """Finds out before the work whether the picture can be drawn; ValueError or RuntimeError says why not."""
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"expected a name that ends in .png, .svg or .pdf, got {path}")
    if not target.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {target.resolve().parent}")
    if target.is_dir():
        raise ValueError(f"{path} is a folder, expected a file name")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"matplotlib is needed ({error}); install dsv4cp[plot]") from error


def drawn_cases(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Measured rows by (case, size), in the order they came; ceilings and host times have no floor and no peers and
    stay out."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "ms" in row and not row.get("size", "").startswith("ceilings") and not row["case"].startswith("host time"):
            cases.setdefault((row["case"], row.get("size", "")), []).append(row)
    return cases


def is_ours(row: dict[str, Any]) -> bool:
    """Whether a row is this package's."""
    return row.get("implementation", "").startswith("dsv4cp")


def label(row: dict[str, Any], best: float | None) -> str:
    """What stands behind a bar: its time; our share of the floor; how many times our best a peer takes."""
    ms = row["ms"]
    words = f"{ms:.3g} ms"
    if is_ours(row) and "share" in row:
        words += f", {row['share']:.0%} of floor"
    elif not is_ours(row) and best:
        words += f", {ms / best:.0f}x" if ms >= 9.5 * best else f", {ms / best:.2g}x"
    return words


def draw(path: str, found: dict[str, Any]) -> None:
    """Writes the picture of a record."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    cases = drawn_cases(found["rows"])
    if not cases:
        raise ValueError("there is no measured case to draw")
    bars = sum(len(rows) for rows in cases.values())
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.27 * bars + 0.38 * len(cases)), layout="constrained")
    times = [row["ms"] for rows in cases.values() for row in rows]
    left = min([*times, *(row["floor_ms"] for rows in cases.values() for row in rows if "floor_ms" in row)]) / 2
    y, ticks, names = 0.0, [], []
    for (case, size), rows in cases.items():
        axes.text(left, y, f"{case} \u2013 {size}", fontsize=8, fontweight="bold", va="center")
        best = min((row["ms"] for row in rows if is_ours(row) and not by_cudnn(row)), default=None)
        top = y + 0.55
        for row in rows:
            y += 1
            axes.barh(y, row["ms"] - left, left=left, height=0.8, color=OURS if is_ours(row) else PEERS)
            axes.text(row["ms"] * 1.04, y, label(row, best), fontsize=7, va="center")
            ticks.append(y)
            names.append(row.get("implementation", ""))
        floor = next((row["floor_ms"] for row in rows if "floor_ms" in row), None)
        if floor is not None:
            axes.plot([floor, floor], [top, y + 0.45], color=FLOOR, linewidth=1.5)
        y += 1.4
    axes.set_xscale("log")
    axes.set_xlim(left, max(times) * 6)
    axes.set_ylim(y - 0.7, -0.8)
    axes.set_yticks(ticks, names, fontsize=7)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    handles: list[Any] = [Patch(color=OURS, label="dsv4cp"), Patch(color=PEERS, label="others, times our best")]
    handles.append(Line2D([], [], color=FLOOR, label="floor: least work over this machine's ceilings"))
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=3)
    axes.set_title(title(found), fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def title(found: dict[str, Any]) -> str:
    """Where the numbers were measured."""
    device, host = found.get("device") or {}, found.get("host") or {}
    version = (found.get("versions") or {}).get("dsv4cp", "of an unknown version")
    commit, plus, changes = (found.get("commit") or "").partition("+")
    where = device.get("name") or host.get("processor") or "an unknown machine"
    return f"dsv4cp {version} ({commit[:10] + plus + changes or 'unknown commit'}) on {where}"
