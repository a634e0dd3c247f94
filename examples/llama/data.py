"""Input pipeline: documents -> tokens -> packed windows -> shuffled global batches.

Documents are tokenised, each is followed by a separator token, and the stream is cut into
windows of ``context + 1`` tokens that neither overlap nor need padding: ``window[:-1]`` are the
inputs and ``window[1:]`` the targets. Grain shuffles, repeats, shards and prefetches them.

To checkpoint the training iterator, save ``iterator.get_state()`` with ``ocp.args.JsonSave`` and
give what ``ocp.args.JsonRestore`` returns to ``iterator.set_state``. The state only counts global
batches, so it suits any number of processes (Grain's own Orbax handler writes a file per process
and wants as many back). Resume with the same corpus, seed and global batch size.
"""

import dataclasses
import glob
import importlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

# What tokenizers call the end of a document, in order of preference; ours uses the first.
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# What is not the library's own source, or differs between two builds of one version of Python.
SKIPPED = re.compile(
    r"(^|/)((site|dist)-packages|tests?|idle_test|pydoc_data|config-[^/]+|_sysconfigdata[^/]+)(/|$)"
)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens.

    Attributes:
        data: glob of files (``**`` recurses): ``.jsonl`` has an object with a ``text`` field a
            line, ``.parquet`` a ``text`` column, anything else is one document. None is the
            source of Python's standard library.
        tokenizer: JSON file of the Hugging Face ``tokenizers`` library. With neither this nor
            ``vocab_size``, tokens are bytes and the separator is byte 0.
        vocab_size: size of a byte-level BPE to train on the corpus.
        val_fraction: fraction of the windows to hold out, at most one half.
    """

    data: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    val_fraction: float = 0.02

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.vocab_size is not None:
            raise ValueError("give either tokenizer (a file) or vocab_size (to train one)")
        if self.vocab_size is not None and self.vocab_size < 257:
            raise ValueError(f"vocab_size must be at least 257, got {self.vocab_size}")
        if not 0 < self.val_fraction <= 0.5:
            raise ValueError(f"val_fraction must be in (0, 0.5], got {self.val_fraction}")


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A tokenised corpus.

    Attributes:
        train, val: [windows, context + 1] of the smallest unsigned dtype that fits `vocab_size`;
            no window is in both.
        vocab_size: number of token ids, the separator included.
        name: one line to print.
        unigram_entropy: loss on `val`, in nats per token, of a model that ignores the context.
        bytes_per_token: UTF-8 bytes per token, counting one byte for a separator; a loss divided
            by ``log(2) * bytes_per_token`` is in bits per byte.
        decode: the text of tokens [any].
    """

    train: np.ndarray
    val: np.ndarray
    vocab_size: int
    name: str
    unigram_entropy: float
    bytes_per_token: float
    decode: Callable[[np.ndarray], str]


class Batch(NamedTuple):
    """Some rows of a global batch.

    Attributes:
        data_index: which batch of the endless stream this is, from 0.
        row_ids: [batch_size] of the whole batch: which windows of the corpus its rows are.
        tokens: int32 [b, context + 1], the rows of this process.
    """

    data_index: int
    row_ids: np.ndarray
    tokens: np.ndarray


def load_corpus(config: DataConfig, *, context: int, cache_dir: str | os.PathLike[str]) -> Corpus:
    """Reads, tokenises, packs and splits the corpus.

    Of n windows, round(n * val_fraction), at least one, are held out: the last of each of as many
    equal runs, so by default every 50th. A trained tokenizer is kept in, and reused from,
    ``cache_dir/tokenizer.json``: when processes share that folder, let one load first.
    """
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    source = config.data or f"Python {sysconfig.get_python_version()} standard library"
    documents = [text for text in read_documents(config.data) if text]
    if not documents:
        raise ValueError(f"no text in {source}: the corpus is empty")
    if config.tokenizer is None and config.vocab_size is None:
        vocab_size = 256
        tokens = np.frombuffer(b"".join(text.encode() + b"\0" for text in documents), np.uint8)
        decode = decode_bytes
    else:
        tokenizer = load_tokenizer(config, documents, Path(cache_dir, "tokenizer.json"))
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        tokens = encode(tokenizer, documents, np.min_scalar_type(vocab_size - 1))

        def decode(tokens: np.ndarray) -> str:
            return tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    count = len(tokens) // (context + 1)
    if count < 2:
        raise ValueError(f"{len(tokens)} tokens do not fill 2 windows of {context + 1}")
    windows = tokens[: count * (context + 1)].reshape(count, context + 1)
    val_count = max(1, round(count * config.val_fraction))  # below count: the fraction is <= 0.5
    held_out = np.arange(1, val_count + 1) * count // val_count - 1
    train, val = np.delete(windows, held_out, axis=0), windows[held_out]
    size = sum(len(text.encode()) + 1 for text in documents)
    return Corpus(
        train=train,
        val=val,
        vocab_size=vocab_size,
        name=f"{source}: {len(documents)} documents, {size / 1e6:.1f} MB, {len(tokens)} tokens",
        unigram_entropy=unigram_entropy(train, val, vocab_size),
        bytes_per_token=size / len(tokens),
        decode=decode,
    )


def decode_bytes(tokens: np.ndarray) -> str:
    return tokens.astype(np.uint8).tobytes().decode(errors="replace")


def unigram_entropy(train: np.ndarray, val: np.ndarray, vocab_size: int) -> float:
    """Mean of -log p(token) over ``val[:, 1:]``: p is the add-one smoothed frequency in `train`."""
    counts = np.ones(vocab_size, np.int64)
    for row in range(0, len(train), 1024):  # bincount makes an int64 copy of what it is given
        counts += np.bincount(train[row : row + 1024].ravel(), minlength=vocab_size)
    cost = np.log(counts.sum()) - np.log(counts)
    return float(cost[val[:, 1:]].mean())


def train_iterator(
    corpus: Corpus, *, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """Endless iterator over a `Batch` of int32 [batch_size // process_count, context + 1].

    `batch_size` is global: process p of P yields rows ``p * b : (p + 1) * b`` of every global
    batch, b = batch_size // P, so the batches put together are the same for any P. Each epoch
    visits every window once, in an order of its own.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index {process_index} is not below {process_count}")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(f"batch_size {batch_size} does not divide among {process_count} processes")
    if (count := len(corpus.train)) < batch_size:
        raise ValueError(f"{count} training windows do not fill one batch of {batch_size}")
    size = batch_size // process_count
    own = slice(process_index * size, (process_index + 1) * size)
    # `shuffle` adds the epoch to its seed: unhashed, seed 1 would start in seed 0's second epoch.
    return iter(
        grain.MapDataset.range(count)
        .seed(seed)
        .shuffle()
        .repeat()
        .batch(batch_size, drop_remainder=True)  # rounding up can overflow
        .map_with_index(lambda index, ids: Batch(index, ids, corpus.train[ids[own]].astype(np.int32)))
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8))
    )


def val_batches(corpus: Corpus, *, batch_size: int, max_batches: int) -> Iterator[np.ndarray]:
    """Global validation batches, int32 [batch_size, context + 1], the same on every call.

    At most `max_batches`, of windows spread evenly over those held out; what does not fill a batch
    is dropped. If that is everything, the held-out windows come as one smaller batch.
    """
    if batch_size < 1 or max_batches < 1:
        raise ValueError(f"need positive batch_size, max_batches; got {batch_size}, {max_batches}")
    count = len(corpus.val)
    batch_size = min(batch_size, count)
    batches = min(max_batches, count // batch_size)
    chosen = np.arange(batches * batch_size) * count // (batches * batch_size)
    return (corpus.val[rows].astype(np.int32) for rows in chosen.reshape(batches, batch_size))


def read_documents(pattern: str | None) -> Iterator[str]:
    """Yields every document of the files that match, in sorted order of path."""
    if pattern is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = ((path, path.relative_to(root).as_posix()) for path in root.rglob("*.py"))
        paths = [path for path, name in found if not SKIPPED.search(name)]
    else:
        matches = glob.glob(os.path.expanduser(pattern), recursive=True)
        paths = [Path(match) for match in matches if os.path.isfile(match)]
        if not paths:
            raise ValueError(f"no file matches {pattern!r}")
    for path in sorted(paths):
        if path.suffix == ".jsonl":
            yield from jsonl_documents(path)
        elif path.suffix == ".parquet":
            yield from parquet_documents(path)
        else:
            yield path.read_text(encoding="utf-8", errors="replace")


def jsonl_documents(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)["text"] if line.strip() else ""
            except (ValueError, TypeError, KeyError):
                text = None
            if not isinstance(text, str):
                raise ValueError(f"{path}:{number}: not a JSON object with a string 'text'")
            # JSON can spell half a surrogate pair, which UTF-8 cannot.
            yield text.encode(errors="replace").decode()


def parquet_documents(path: Path) -> Iterator[str]:
    with require("pyarrow.parquet", f"{path} needs pyarrow").ParquetFile(path) as file:
        if "text" not in file.schema_arrow.names:
            raise ValueError(f"{path}: no 'text' column")
        column = file.read(["text"])["text"].to_pylist()
    yield from (str(text) for text in column if text is not None)


def load_tokenizer(config: DataConfig, documents: list[str], trained: Path) -> Any:
    """Returns a `tokenizers.Tokenizer`: config.tokenizer, or the one that `trained` keeps."""
    tokenizers = require("tokenizers", "tokens other than bytes need tokenizers")
    path = trained if config.tokenizer is None else Path(config.tokenizer)
    if config.tokenizer is None and not trained.exists():
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(
            documents, config.vocab_size, show_progress=False, special_tokens=[SEPARATORS[0]]
        )
        trained.parent.mkdir(parents=True, exist_ok=True)
        partial = trained.with_name(f"{trained.name}.{os.getpid()}")
        bpe.save(str(partial))
        partial.replace(trained)  # a run stopped while saving leaves nothing to be reused
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"cannot read tokenizer {path}: {error}") from error
    if config.vocab_size not in (None, size := tokenizer.get_vocab_size()):
        raise ValueError(f"{path} has {size} tokens, not {config.vocab_size}: change one of them")
    return tokenizer


def encode(tokenizer: Any, documents: list[str], dtype: np.dtype) -> np.ndarray:
    """Tokenises the documents, a separator after each; returns [tokens] of `dtype`."""
    known = [name for name in SEPARATORS if tokenizer.token_to_id(name) is not None]
    if not known:
        raise ValueError(f"the tokenizer has none of {', '.join(SEPARATORS)} to end a document")
    separator = tokenizer.token_to_id(known[0])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # text that spells a separator does not become one
    pieces = []
    for start in range(0, len(documents), 256):  # an Encoding holds far more than its ids
        batch = documents[start : start + 256]
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            pieces.append(np.array([*encoding.ids, separator], dtype))
    return np.concatenate(pieces)


def require(module: str, need: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f'{need}: pip install "zclip-jax[examples]"') from error
