"""A training run: its steps, its checkpoint, its picture."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from .config import Backends, Config
from .model import Model
from .text import Data


class Run:
    """A model, its optimiser, and the curve so far."""

    def __init__(self, config: Config, backends: Backends, data: Data, *, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.config, self.data, self.device, self.seed = config, data, device, seed
        self.model = Model(config, backends).to(device)  # made on the CPU: the same weights for every backend
        language, indexers = self.model.parameter_groups()
        self.groups = language, indexers
        self.optimizer = torch.optim.AdamW(
            [{"params": language}, {"params": indexers}], lr=config.rate, betas=(0.9, 0.95), weight_decay=0.05
        )
        self.curve: list[dict[str, float]] = []  # one entry a step: loss, index_loss, seconds
        self.held_out: list[tuple[int, float]] = []  # (steps done, loss)
        self.resumed = 0  # steps of an earlier run

    @property
    def step(self) -> int:
        return len(self.curve)

    def rate(self) -> float:
        """A short rise, then half a cosine down to a tenth."""
        c = self.config
        rise = max(1, c.steps // 20)
        if self.step < rise:
            return c.rate * (self.step + 1) / rise
        share = (self.step - rise) / max(1, c.steps - rise)
        return c.rate * (0.55 + 0.45 * math.cos(math.pi * share))

    def train_step(self) -> dict[str, float]:
        """One step; its losses and seconds."""
        start = time.perf_counter()
        tokens = self.data.batch(self.step, self.seed, self.config.batch, self.config.tokens).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        loss, index_loss = self.model.losses(tokens)
        (loss + index_loss).backward()
        for parameters in self.groups:
            if parameters:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        found = {"loss": loss.item(), "index_loss": index_loss.item()}  # .item() waits for the GPU
        self.curve.append(found | {"seconds": time.perf_counter() - start})
        return self.curve[-1]

    def tokens_per_second(self) -> float:
        """Of the median step of those made here; the first ones compile."""
        made = self.curve[self.resumed :] or self.curve
        seconds = sorted(entry["seconds"] for entry in made[min(3, len(made) - 1) :])
        return self.config.batch * self.config.tokens / seconds[len(seconds) // 2]

    @torch.no_grad()
    def evaluate(self, most: int = 8) -> float:
        """Nats a token on the held-out text."""
        batches = self.data.held_out_batches(self.config.batch, self.config.tokens, most)
        self.model.eval()
        sums = [self.model.losses(b.to(self.device))[0].item() * b.shape[0] for b in batches]
        self.model.train()
        self.held_out.append((self.step, sum(sums) / sum(len(b) for b in batches)))
        return self.held_out[-1][1]

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """checkpoint.pt to go on from, log.json to read."""
        state = {
            "config": dataclasses.asdict(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "curve": self.curve,
            "held_out": self.held_out,
            "seed": self.seed,
        }
        partial = folder / "checkpoint.part"  # an interrupted save leaves the last checkpoint as it was
        torch.save(state, partial)
        partial.replace(folder / "checkpoint.pt")
        log = about | {"curve": self.curve, "held_out": self.held_out, "tokens_per_second": self.tokens_per_second()}
        (folder / "log.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")

    def resume(self, folder: Path) -> None:
        """Weights, optimiser and curve of a checkpoint of the same model."""
        if not (folder / "checkpoint.pt").exists():
            raise SystemExit(f"--resume: there is no {folder}/checkpoint.pt")
        state = torch.load(folder / "checkpoint.pt", map_location=self.device, weights_only=True)
        differs = [
            name for name, value in dataclasses.asdict(self.config).items()
            if name != "steps" and state["config"][name] != value
        ]  # fmt: skip
        if differs or state["seed"] != self.seed:
            raise SystemExit(f"{folder}/checkpoint.pt is of another run: {', '.join(differs) or 'seed'} differ")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curve, self.held_out = state["curve"], [tuple(entry) for entry in state["held_out"]]
        self.resumed = self.step


def draw(path: Path, run: Run, unigram: float) -> bool:
    """Loss over steps beside the unigram model's; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), layout="constrained")
    above.plot([entry["loss"] for entry in run.curve], linewidth=0.8, label="training")
    above.plot(*zip(*run.held_out, strict=True), "o-", markersize=4, label="held out")
    above.axhline(unigram, color="grey", linestyle="--", label="unigram model, held out")
    above.set_ylabel("nats a token")
    above.legend()
    below.plot([entry["index_loss"] for entry in run.curve], color="tab:green", linewidth=0.8)
    below.set_ylabel("indexers: KL to attention")
    below.set_xlabel("step")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
