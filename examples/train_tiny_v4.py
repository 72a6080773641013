"""Train a small DeepSeek-V4-style language model on a text, through dsv4cp.torch_ops.

    python examples/train_tiny_v4.py                                    # two CPU cores, a few minutes
    python examples/train_tiny_v4.py my_text.txt --steps 1000 --resume
    python examples/train_tiny_v4.py --preset gpu --backend tilelang    # a GPU; --preset h200 is larger

Hyper-connections with Sinkhorn, a sliding window, compressed entries (ratio 4 chosen by an indexer that is trained
beside the model, ratio 128 all of them), attention sinks, grouped output: the model is in tiny_v4/. It writes
checkpoint.pt, log.json and loss.png into --out and prints a sample; held-out loss is compared with that of a unigram
model, and with --compare the curve with that of another run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tiny_v4.config import PRESETS, choose_backends
from tiny_v4.run import Run, draw
from tiny_v4.text import prepare, read_text

console = Console(soft_wrap=True, highlight=False, markup=False)


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="a UTF-8 text (default: the texts behind Python's help())")
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="sizes (default cpu); see tiny_v4/config.py")
    parser.add_argument("--backend", choices=("auto", "torch", "tilelang", "cudnn"), default="auto")
    parser.add_argument("--device", help="cpu or cuda (default: cuda for the presets gpu and h200 and for kernels)")
    parser.add_argument("--tokenizer", choices=("bytes", "deepseek"), default="bytes")
    parser.add_argument("--steps", type=positive, metavar="N", help="how many steps in all (default: the preset's)")
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences a step (default: the preset's)")
    parser.add_argument("--evaluate-every", type=positive, metavar="N", default=50, help="held-out loss, checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("tiny_v4_run"), metavar="FOLDER")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--sample", type=int, default=200, metavar="N", help="tokens to sample at the end")
    parser.add_argument("--compare", type=Path, metavar="LOG.json", help="another run's log: how far apart are they?")
    parser.add_argument("--tolerance", type=float, default=0.05, help="most nats that means of 10 steps may differ")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    config = PRESETS[options.preset]
    data, tokenizer = prepare(read_text(options.file), options.tokenizer, config.tokens)
    chosen = {name: value for name in ("steps", "batch") if (value := getattr(options, name)) is not None}
    config = dataclasses.replace(config, vocabulary=data.vocabulary, **chosen)
    gpu = options.preset in ("gpu", "h200") or options.backend in ("tilelang", "cudnn")
    device = options.device or ("cuda" if gpu else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU is visible; --preset cpu --backend torch runs without one")
    backends, notes = choose_backends(options.backend)
    options.out.mkdir(parents=True, exist_ok=True)

    run = Run(config, backends, data, device=device, seed=options.seed)
    if options.resume:
        run.resume(options.out)
    parameters = sum(p.numel() for p in run.model.parameters())
    console.print(
        f"{len(data.train)} tokens ({tokenizer.name}, vocabulary {data.vocabulary}), {len(data.held_out)} held out; "
        f"{parameters / 1e6:.2f} M parameters, layers {', '.join(map(str, config.ratios))}; {device}, backend "
        f"{options.backend}, {config.batch} x {config.tokens} tokens a step, seed {options.seed}"
    )
    for note in notes:
        console.print(note)
    about = {"preset": options.preset, "backend": options.backend, "device": device, "tokenizer": tokenizer.name}
    about["name"] = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    try:
        train(run, options, about)
    except KeyboardInterrupt:
        console.print(f"interrupted at step {run.step}; --resume goes on from the last checkpoint in {options.out}")
        return 130

    batches = data.held_out_batches(config.batch, config.tokens, 8)
    unigram, held_out = data.unigram_loss(batches), run.held_out[-1][1]
    console.print(
        f"held-out loss after {run.step} steps: {held_out:.3f} nats a token; a unigram model's: {unigram:.3f}; "
        f"{run.tokens_per_second():.0f} tokens/s"
    )
    picture = options.out / "loss.png"
    drawn = draw(picture, run, unigram)
    console.print(f"wrote {options.out}/checkpoint.pt, log.json" + (f", {picture.name}" if drawn else ""))
    if options.sample:
        begin = data.held_out[:64].tolist()
        generator = torch.Generator().manual_seed(options.seed)
        more = run.model.sample(begin, options.sample, temperature=0.8, generator=generator)
        console.print(f"sample:\n{tokenizer.decode(begin)}|{tokenizer.decode(more)}")
    return compare(run, options) if options.compare else 0


def train(run: Run, options: argparse.Namespace, about: dict[str, object]) -> None:
    """All steps that are left, with a progress bar; every so often the held-out loss and a checkpoint."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=run.config.steps, completed=run.step)
        while run.step < run.config.steps:
            found = run.train_step()
            speed = f"{run.tokens_per_second():.0f} tokens/s"
            shown = f"loss {found['loss']:.3f}  indexers {found['index_loss']:.3f}  {speed}"
            progress.update(bar, completed=run.step, description=shown)
            if run.step % options.evaluate_every == 0 or run.step == run.config.steps:
                console.print(f"step {run.step}: {shown}  held out {run.evaluate():.3f}")
                run.save(options.out, about)
    if not run.held_out:  # resumed when nothing was left to do
        run.evaluate()


def compare(run: Run, options: argparse.Namespace) -> int:
    """0 when the other run has the same curve: means of 10 steps, since rounding grows in single ones."""
    other = json.loads(options.compare.read_text(encoding="utf-8"))
    apart = [a["loss"] - b["loss"] for a, b in zip(run.curve, other["curve"], strict=False)]
    means = [sum(apart[n : n + 10]) / len(apart[n : n + 10]) for n in range(0, len(apart), 10)]
    single, most = max(map(abs, apart)), max(map(abs, means))
    faster = run.tokens_per_second() / other["tokens_per_second"]
    console.print(
        f"{len(apart)} steps beside {options.compare} ({other['backend']}): losses differ by {single:.4f} nats at "
        f"most, means of 10 steps by {most:.4f}; {faster:.2f} times its tokens/s"
    )
    if most > options.tolerance:
        console.print(f"more than --tolerance {options.tolerance}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
