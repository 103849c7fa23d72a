"""A small corpus of code and prose from the Python standard library (PSF licence).

Every Python installation carries it, so no download is needed. Three kinds of
document come out of it:

- ``file``: a whole source file;
- ``definition``: one function or class, dedented;
- ``prose``: a docstring, a paragraph of a docstring, or a help topic.

Each document ends with the EOS token. The short kinds are there so that a model
trained on them has seen many short pieces that end by themselves.
"""

from __future__ import annotations

import ast
import inspect
import random
import runpy
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

EOS = "<|endoftext|>"
EOS_ID = 0
SPECIAL_TOKENS = [EOS, "<|im_start|>", "<|im_end|>"]
KINDS = ("file", "definition", "prose")

MAX_DEFINITION_LINES = 60
MIN_FILE_CHARS = 200
MIN_PROSE_CHARS = 40
TOPIC_REPEATS = 3  # the topics are the best prose there is, and only 0.5 MB of it
HELD_OUT_EVERY = 25
# Installed packages are not the standard library; the charmap codecs are tables.
SKIPPED_PARTS = {"site-packages", "dist-packages", "__pycache__", "encodings"}
SKIPPED_NAMES = {"topics.py"}  # read as prose instead

# Qwen's split into words (and NFC below): transformers rebuilds the tokenizer from the
# model type, and must get the same ids as a reader of tokenizer.json.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Documents = dict[str, list[str]]


@dataclass
class Corpus:
    """Documents by kind, split by file into training and held-out ones."""

    train: Documents = field(default_factory=lambda: {kind: [] for kind in KINDS})
    held_out: Documents = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def characters(self) -> int:
        """Length of the training documents together."""
        return sum(len(text) for texts in self.train.values() for text in texts)


def read_corpus(stdlib: Path, seed: int) -> Corpus:
    """Read all documents below ``stdlib``; one file in 25 is held out.

    Args:
        stdlib: Root of a standard library, as ``sysconfig`` names it.
        seed: Decides which files are held out, and the order of all documents.

    Raises:
        ValueError: If ``stdlib`` holds no Python files.
    """
    sources = list(source_files(stdlib))
    if not sources:
        raise ValueError(f"stdlib={str(stdlib)!r} holds no Python files")
    rng = random.Random(seed)
    rng.shuffle(sources)
    corpus = Corpus()
    for number, source in enumerate(sources):
        held = number % HELD_OUT_EVERY == 0
        add_source(corpus.held_out if held else corpus.train, source)
    for number, topic in enumerate(help_topics(stdlib)):
        held = number % HELD_OUT_EVERY == 0
        part = corpus.held_out if held else corpus.train
        part["prose"] += [topic] * (1 if held else TOPIC_REPEATS)
    for texts in corpus.train.values():
        rng.shuffle(texts)
    return corpus


def source_files(root: Path) -> Iterator[str]:
    """Yield the text of every usable Python file below ``root``, in a fixed order."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_PARTS & set(path.relative_to(root).parts):
            continue
        if path.name in SKIPPED_NAMES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # tests of other encodings
            continue
        if len(text) >= MIN_FILE_CHARS:
            yield text


def help_topics(stdlib: Path) -> list[str]:
    """Return the texts behind ``help('if')`` and its like; none if not there."""
    path = stdlib / "pydoc_data" / "topics.py"
    if not path.exists():
        return []
    topics: dict[str, str] = runpy.run_path(str(path))["topics"]
    return [text.strip() + "\n" for _, text in sorted(topics.items())]


def add_source(documents: Documents, source: str) -> None:
    """Add a file, its short definitions and its docstrings to ``documents``."""
    documents["file"].append(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # tests of the parser
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            documents["definition"] += definition(node, lines)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            documents["prose"] += paragraphs(node)


def definition(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]
) -> list[str]:
    """Return the dedented source of ``node``, or nothing if it is too long."""
    first = min([node.lineno] + [item.lineno for item in node.decorator_list])
    last = node.end_lineno or node.lineno
    if last - first >= MAX_DEFINITION_LINES:
        return []
    return [textwrap.dedent("".join(lines[first - 1 : last])).rstrip() + "\n"]


def paragraphs(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Return the docstring of ``node`` and, if it has several, its paragraphs."""
    docstring = ast.get_docstring(node, clean=False) or ""
    text = inspect.cleandoc(docstring).strip()
    parts = text.split("\n\n")
    texts = [text, *parts] if len(parts) > 1 else [text]
    return [t.strip("\n") + "\n" for t in texts if len(t) >= MIN_PROSE_CHARS]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; ids 0, 1, 2 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True)
class TokenStream:
    """Documents of one kind as one row of tokens, EOS after each.

    Attributes:
        tokens: (N,) int64.
        starts: (documents,) int64, where each document begins.
    """

    tokens: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def encode(cls, texts: list[str], tokenizer: Tokenizer, device: str) -> TokenStream:
        """Tokenize ``texts`` onto ``device``."""
        rows = [np.asarray([*e.ids, EOS_ID]) for e in tokenizer.encode_batch(texts)]
        ends = np.cumsum([len(row) for row in rows])
        starts = np.concatenate([[0], ends[:-1]])
        return cls(
            torch.from_numpy(np.concatenate(rows)).to(device),
            torch.from_numpy(starts).to(device),
        )

    def windows(self, offsets: torch.Tensor, length: int) -> torch.Tensor:
        """Return ``length`` tokens from each offset on, wrapping at the end."""
        steps = torch.arange(length, device=offsets.device)
        return self.tokens[(offsets[:, None] + steps) % len(self.tokens)]

    def sample(self, rows: int, length: int) -> torch.Tensor:
        """Return (rows, length) tokens: half from document starts, half anywhere."""
        at_start = rows // 2
        device = self.tokens.device
        pick = torch.randint(len(self.starts), (at_start,), device=device)
        anywhere = torch.randint(len(self.tokens), (rows - at_start,), device=device)
        return self.windows(torch.cat([self.starts[pick], anywhere]), length)


@dataclass(frozen=True)
class Mixture:
    """Streams by kind with the share of each in a batch."""

    streams: dict[str, TokenStream]
    shares: dict[str, float]

    def sample(self, rows: int, length: int) -> torch.Tensor:
        """Return (rows, length) tokens in the given shares, the file kind last."""
        batch: list[torch.Tensor] = []
        left = rows
        for kind in ("prose", "definition", "file"):
            count = left if kind == "file" else round(rows * self.shares[kind])
            batch.append(self.streams[kind].sample(count, length))
            left -= count
        return torch.cat(batch)

    def prompts(self, rows: int, length: int) -> torch.Tensor:
        """Return (rows, length) tokens, each row the beginning of a document."""
        batch: list[torch.Tensor] = []
        for kind, stream in self.streams.items():
            count = max(1, round(rows * self.shares[kind]))
            pick = torch.randint(len(stream.starts), (count,)).to(stream.starts.device)
            batch.append(stream.windows(stream.starts[pick], length))
        return torch.cat(batch)
