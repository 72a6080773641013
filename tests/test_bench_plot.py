"""python -m dsv4cp bench --plot: the picture of a record and of the run itself."""

from __future__ import annotations

import json

import pytest

from dsv4cp.__main__ import main
from dsv4cp.commands import bench_plot

pyplot = pytest.importorskip("matplotlib.pyplot")

FLASH, PRO = "V4-Flash R4: S4096 H64 T640 K5120, 510 valid a query", "V4-Pro R4: S8192 H128 T1152 K10240"


def row(case: str, size: str, by: str, ms: float, **more: object) -> dict[str, object]:
    return {"case": case, "size": size, "implementation": by, "ms": ms} | more


ROWS = [
    row("matrix product 8192", "ceilings of this card", "cuBLAS bf16 (torch)", 1.4, tflops=790.0),
    row("sparse attention forward", FLASH, "dsv4cp, CuPy", 0.5, tflops=500.0, floor_ms=0.35, share=0.7),
    row("sparse attention forward", FLASH, "dsv4cp.torch_ops", 0.51, floor_ms=0.35, share=0.69),
    row("sparse attention forward", FLASH, "FlashMLA 1.0", 0.65, floor_ms=0.35, share=0.54, ratio=1.3, peer=True),
    row("sparse attention forward", PRO, "dsv4cp, CuPy", 4.0, floor_ms=2.4, share=0.6),
    {"case": "sparse attention backward", "size": FLASH, "implementation": "dsv4cp, CuPy", "failed": "out of memory"},
    row("Sinkhorn forward", "hyper-connections, 8192 matrices", "dsv4cp, CuPy", 0.009, gbs=100.0),
    row("Sinkhorn forward", "hyper-connections, 8192 matrices", "TileKernels 1.0", 0.065, ratio=7.2, peer=True),
    row("host time of a call", "Sinkhorn forward, tiny", "dsv4cp.torch_ops", 0.01),
    row("host time of a call", "Sinkhorn forward, tiny", "its launches alone: 1", 0.005),
]
RECORD = {
    "host": {"system": "Linux", "processor": "A CPU", "cores": 16},
    "device": {"name": "A GPU", "compute_capability": "9.0"},
    "driver": 13000,
    "versions": {"dsv4cp": "0.1.0"},
    "commit": "0123456789abcdef+changes",
    "environment": {},
    "rows": ROWS,
}


@pytest.fixture
def record(tmp_path) -> str:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(RECORD))
    return str(path)


@pytest.fixture
def figures(monkeypatch) -> list:
    """Every figure that was drawn, kept open."""
    kept = []
    monkeypatch.setattr(pyplot, "close", lambda figure: kept.append(figure))
    yield kept
    monkeypatch.undo()
    for figure in kept:
        pyplot.close(figure)


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_record_is_drawn_without_measuring(suffix, begin, record, tmp_path, capsys):
    picture = tmp_path / f"bench.{suffix}"
    assert main(["bench", "--from", record, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(begin)
    assert capsys.readouterr().out == f"drew {picture}\n"


def test_the_picture_says_what_the_record_says(record, tmp_path, figures):
    assert main(["bench", "--from", record, "--plot", str(tmp_path / "x.png")]) == 0
    (axes,) = figures[0].axes
    words = [t.get_text() for t in axes.texts]
    assert [w for w in words if "ms" not in w] == [
        f"{case} \u2013 {size}"
        for case, size in (
            ("sparse attention forward", FLASH),
            ("sparse attention forward", PRO),
            ("Sinkhorn forward", "hyper-connections, 8192 matrices"),
        )
    ]
    assert [w for w in words if "ms" in w] == [
        "0.5 ms, 70% of floor",
        "0.51 ms, 69% of floor",
        "0.65 ms, 1.3x",
        "4 ms, 60% of floor",
        "0.009 ms",
        "0.065 ms, 7.2x",
    ]
    lengths = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert lengths == pytest.approx([0.5, 0.51, 0.65, 4.0, 0.009, 0.065])
    floors = [line.get_xdata()[0] for line in axes.lines]
    assert floors == pytest.approx([0.35, 2.4])
    assert [t.get_text() for t in axes.get_yticklabels()][:3] == ["dsv4cp, CuPy", "dsv4cp.torch_ops", "FlashMLA 1.0"]
    assert axes.get_title() == "dsv4cp 0.1.0 (0123456789+changes) on A GPU"


def test_how_many_times_our_best(record):
    ours, peer = {"implementation": "dsv4cp, CuPy", "ms": 1.0}, {"implementation": "torch", "ms": 121.3}
    assert bench_plot.label(ours, 1.0) == "1 ms" and bench_plot.label(peer, 1.0) == "121 ms, 121x"
    assert bench_plot.label(peer | {"ms": 9.44}, 1.0) == "9.44 ms, 9.4x"


def test_the_run_itself_is_drawn(tmp_path, capsys, figures):
    picture = tmp_path / "host.png"
    assert main(["bench", "--cpu", "--tiny", "--repeats", "1", "--plot", str(picture)]) == 0
    assert f"drew {picture}" in capsys.readouterr().out and picture.stat().st_size > 0
    (axes,) = figures[0].axes
    assert any("sparse attention forward" in t.get_text() for t in axes.texts)


def test_a_machine_without_gpu_is_named_by_its_processor():
    assert bench_plot.title(RECORD | {"device": None}).endswith("on A CPU")
    assert "unknown commit" in bench_plot.title({"rows": []})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON file"),
        ("[]", "is no record"),
        ('{"rows": [1]}', "is no record"),
        ('{"rows": []}', "no measured case"),
    ],
)
def test_what_is_no_record_is_refused(content, words, tmp_path, capsys):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "--from", str(path), "--plot", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("bench: --plot: " if content == '{"rows": []}' else "bench: --from: ")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "x.bmp"], "ends in .png"),
        (["--plot", "no/such/folder/x.png"], "no folder"),
        ([], "say where to"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments, words, record, capsys):
    assert main(["bench", "--from", record, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_matplotlib_it_says_so_before_measuring(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setattr("dsv4cp.commands.bench_cpu.rows", lambda **_: pytest.fail("measured all the same"))
    assert main(["bench", "--cpu", "--plot", str(tmp_path / "x.png")]) == 2
    assert "install dsv4cp[plot]" in capsys.readouterr().err
