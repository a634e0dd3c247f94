"""The input pipeline of the LLaMA example."""

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet

data = importlib.import_module("data")

CONTEXT = 7
BATCH = 4
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def text(seed: int, words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def load(cache_dir: Path, context: int = CONTEXT, **config: object) -> "data.Corpus":
    return data.load_corpus(data.DataConfig(**config), context=context, cache_dir=cache_dir)


@pytest.fixture
def corpus(tmp_path: Path) -> "data.Corpus":
    """210 training windows: in batches of 4, the 53rd is the first to reach the second epoch."""
    (tmp_path / "a.txt").write_text(text(0, 150))
    (tmp_path / "b.txt").write_text(text(1, 150))
    return load(tmp_path, data=str(tmp_path / "*.txt"))


def iterate(corpus: "data.Corpus", batch_size: int = BATCH, seed: int = 0, **shard: int):
    return data.train_iterator(corpus, batch_size=batch_size, seed=seed, **shard)


def take(iterator: Iterator["data.Batch"], count: int) -> np.ndarray:
    return np.stack([next(iterator).tokens for _ in range(count)])


def documents(tokens: np.ndarray) -> list[bytes]:
    return tokens.astype(np.uint8).tobytes().split(b"\0")


def in_order(corpus: "data.Corpus") -> np.ndarray:
    """The token stream, put back together from the split."""
    count = len(corpus.train) + len(corpus.val)
    held_out = np.arange(1, len(corpus.val) + 1) * count // len(corpus.val) - 1
    windows = np.empty((count, corpus.train.shape[1]), corpus.train.dtype)
    windows[held_out] = corpus.val
    windows[np.setdiff1d(np.arange(count), held_out)] = corpus.train
    return windows.ravel()


def test_documents_are_separated_and_in_order_of_path(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.md").write_text("second doc")
    (tmp_path / "a.txt").write_text("first doc!")
    (tmp_path / "sub" / "c.py").write_text("third")
    (tmp_path / "empty.txt").write_text("")
    corpus = load(tmp_path, context=1, data=str(tmp_path / "**" / "*.*"))
    assert documents(in_order(corpus)) == [b"first doc!", b"second doc", b"third", b""]
    assert corpus.vocab_size == 256
    assert corpus.bytes_per_token == 1.0
    assert "3 documents" in corpus.name
    assert corpus.train.dtype == corpus.val.dtype == np.uint8


def test_jsonl(tmp_path):
    lines = [{"text": "one é"}, {"text": "two", "id": 3}, {"text": "half \ud800 pair"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    corpus = load(tmp_path, context=1, data=str(tmp_path / "*.jsonl"))
    read = documents(in_order(corpus))
    assert read[:3] == ["one é".encode(), b"two", b"half ? pair"]


@pytest.mark.parametrize("line", ['{"body": "x"}', '{"text": 3}', "[1]", '"text"', "{", "null"])
def test_jsonl_line_without_text(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not a JSON object with a string 'text'"):
        load(tmp_path, data=str(tmp_path / "*.jsonl"))


def test_parquet(tmp_path):
    table = pyarrow.table({"id": [1, 2, 3], "text": ["one", None, "three"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    corpus = load(tmp_path, context=1, data=str(tmp_path / "*.parquet"))
    assert documents(in_order(corpus)) == [b"one", b"three", b""]

    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: no 'text' column"):
        load(tmp_path, data=str(tmp_path / "*.parquet"))


def test_undecodable_bytes_are_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    corpus = load(tmp_path, context=1, data=str(tmp_path / "*"))
    assert documents(in_order(corpus))[:2] == ["caf\ufffd au lait".encode(), "caf\ufffd".encode()]


def test_default_corpus(tmp_path):
    corpus = load(tmp_path, context=255)
    again = load(tmp_path, context=255)
    assert 5e6 < corpus.train.size < 20e6
    assert np.array_equal(corpus.train, again.train)
    assert len(corpus.val) / len(corpus.train) == pytest.approx(0.02, rel=0.05)
    assert 2.5 < corpus.unigram_entropy < 4
    assert "standard library" in corpus.name
    assert not list(tmp_path.iterdir())


def test_windows_split_the_stream(corpus):
    assert corpus.train.shape[1] == corpus.val.shape[1] == CONTEXT + 1
    count = len(corpus.train) + len(corpus.val)
    assert len(corpus.val) == round(0.02 * count)
    stream = (text(0, 150) + "\0" + text(1, 150) + "\0").encode()
    assert in_order(corpus).tobytes() == stream[: count * (CONTEXT + 1)]
    assert count == len(stream) // (CONTEXT + 1)


@pytest.mark.parametrize(("fraction", "expected"), [(0.02, 1), (0.1, 2), (0.5, 10)])
def test_held_out_windows(tmp_path, fraction, expected):
    """Windows of distinct text, so equal windows could only come from a leak."""
    (tmp_path / "a.txt").write_text("".join(f"{i:08}" for i in range(20)))
    corpus = load(tmp_path, data=str(tmp_path / "a.txt"), val_fraction=fraction)
    train = {row.tobytes() for row in corpus.train}
    val = {row.tobytes() for row in corpus.val}
    assert len(corpus.val) == len(val) == expected
    assert len(train | val) == 20
    assert f"{19:08}".encode() in val


def test_unigram_entropy():
    train = np.array([[0, 0, 0, 1]], np.uint8)
    val = np.array([[2, 0, 1, 2]], np.uint8)  # the first token is never a target
    costs = [math.log(7 / 4), math.log(7 / 2), math.log(7 / 1)]
    assert data.unigram_entropy(train, val, 3) == pytest.approx(np.mean(costs))


def test_unigram_entropy_counts_every_window():
    rng = np.random.default_rng(0)
    train, val = rng.integers(0, 4, (3000, 9), np.uint8), rng.integers(0, 4, (50, 9), np.uint8)
    assert data.unigram_entropy(train, val, 4) == pytest.approx(math.log(4), abs=1e-3)
    assert data.unigram_entropy(np.zeros_like(train), val * 0, 4) == pytest.approx(0, abs=1e-3)


def test_trained_tokenizer_is_kept_and_reused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(text(0, 300) + " <|endoftext|> é")
    (tmp_path / "b.txt").write_text(text(1, 300))
    config = {"data": str(tmp_path / "?.txt"), "vocab_size": 280}
    cache = tmp_path / "run" / "cache"
    corpus = load(cache, **config)
    assert [path.name for path in cache.iterdir()] == ["tokenizer.json"]
    assert corpus.vocab_size == 280
    assert corpus.train.dtype == np.uint16
    assert corpus.bytes_per_token > 1.5

    tokenizer = tokenizers.Tokenizer.from_file(str(cache / "tokenizer.json"))
    stream = in_order(corpus)
    separator = tokenizer.token_to_id("<|endoftext|>")
    # Once, after the first document, and not where the text spells it.
    assert (stream == separator).sum() == 1
    first = stream[: stream.tolist().index(separator)].tolist()
    assert tokenizer.decode(first) == text(0, 300) + " <|endoftext|> é"

    monkeypatch.delattr(tokenizers.ByteLevelBPETokenizer, "train_from_iterator")
    again = load(cache, **config)
    assert np.array_equal(corpus.train, again.train)
    assert np.array_equal(corpus.val, again.val)
    with pytest.raises(ValueError, match=r"tokenizer\.json has 280 tokens, not 290"):
        load(cache, **{**config, "vocab_size": 290})


def test_corpus_too_small_for_the_vocabulary(tmp_path):
    (tmp_path / "a.txt").write_text("abc abc")
    with pytest.raises(ValueError, match=r"tokenizer\.json has 259 tokens, not 1000"):
        load(tmp_path, data=str(tmp_path / "a.txt"), vocab_size=1000)


def word_tokenizer(path: Path, *special: str) -> str:
    vocabulary = {word: i for i, word in enumerate([*WORDS, "[UNK]", *special])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize("separator", ["</s>", "<|endoftext|>"])
def test_tokenizer_file(tmp_path, separator):
    file = word_tokenizer(tmp_path / "words.json", separator)
    (tmp_path / "a.txt").write_text("alpha beta gamma")
    (tmp_path / "b.txt").write_text("delta " * 6 + "unheard")
    corpus = load(tmp_path, context=1, data=str(tmp_path / "*.txt"), tokenizer=file)
    unknown, end = len(WORDS), len(WORDS) + 1
    assert in_order(corpus).tolist() == [0, 1, 2, end, *[3] * 6, unknown, end]
    assert corpus.vocab_size == len(WORDS) + 2
    assert corpus.train.dtype == np.uint8
    assert corpus.bytes_per_token == (17 + 44) / 12


def test_tokenizer_file_errors(tmp_path):
    (tmp_path / "a.txt").write_text(text(0, 50))
    pattern = str(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"cannot read tokenizer .*missing\.json: "):
        load(tmp_path, data=pattern, tokenizer=str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match=r"cannot read tokenizer .*a\.txt: "):
        load(tmp_path, data=pattern, tokenizer=pattern)
    file = word_tokenizer(tmp_path / "words.json")
    with pytest.raises(ValueError, match=r"the tokenizer has none of <\|endoftext\|>, .*"):
        load(tmp_path, data=pattern, tokenizer=file)


@pytest.mark.parametrize(
    ("module", "file", "config"),
    [
        ("tokenizers", "a.txt", {"vocab_size": 300}),
        ("tokenizers", "a.txt", {"tokenizer": "x.json"}),
        ("pyarrow.parquet", "a.parquet", {}),
    ],
)
def test_missing_dependency_names_the_extra(tmp_path, monkeypatch, module, file, config):
    (tmp_path / file).write_text("text")
    monkeypatch.setitem(sys.modules, module, None)
    expected = rf'needs? {module.partition(".")[0]}: pip install "zclip-jax\[examples\]"$'
    with pytest.raises(ValueError, match=expected):
        load(tmp_path, data=str(tmp_path / file), **config)


def test_batches(corpus):
    batch = next(iterate(corpus)).tokens
    assert batch.shape == (BATCH, CONTEXT + 1)
    assert batch.dtype == np.int32


@pytest.mark.parametrize("process_count", [1, 2])
def test_batches_name_their_rows(corpus, process_count):
    """In each process those of the whole batch, and which batch it is, also in the second epoch and when resumed."""
    size = BATCH // process_count
    for i in range(process_count):
        batches = iterate(corpus, process_index=i, process_count=process_count)
        for index in range(60):
            batch = next(batches)
            assert batch.data_index == index
            assert len(batch.row_ids) == BATCH
            assert np.array_equal(batch.tokens, corpus.train[batch.row_ids[i * size : (i + 1) * size]])
            if index == 30:
                state = batches.get_state()
        again = iterate(corpus, process_index=i, process_count=process_count)
        again.set_state(state)
        assert next(again).data_index == 31


def test_decoding(tmp_path):
    (tmp_path / "a.txt").write_text(text(0, 300) + " \u00e9")
    for vocab_size in (None, 270):
        loaded = load(tmp_path, data=str(tmp_path / "a.txt"), vocab_size=vocab_size)
        assert loaded.decode(in_order(loaded)).startswith(text(0, 20))


def test_every_epoch_visits_every_window_once_in_its_own_order(corpus):
    count = len(corpus.train)
    rows = take(iterate(corpus, batch_size=1), 2 * count)[:, 0]
    first, second = rows[:count], rows[count:]
    whole = sorted(corpus.train.tolist())
    assert sorted(first.tolist()) == sorted(second.tolist()) == whole
    orders = [
        corpus.train.astype(np.int32),
        first,
        second,
        take(iterate(corpus, 1, 1), count)[:, 0],
    ]
    for i, order in enumerate(orders):
        assert not any(np.array_equal(order, other) for other in orders[:i])


def test_seed_repeats(corpus):
    assert np.array_equal(take(iterate(corpus), 5), take(iterate(corpus), 5))


@pytest.mark.parametrize("process_count", [2, 4])
def test_global_batches_do_not_depend_on_the_process_count(corpus, process_count):
    steps = 2 * len(corpus.train) // BATCH  # into the second epoch
    shards = [
        take(iterate(corpus, process_index=i, process_count=process_count), steps)
        for i in range(process_count)
    ]
    assert shards[0].shape[1] == BATCH // process_count
    assert np.array_equal(np.concatenate(shards, axis=1), take(iterate(corpus), steps))


@pytest.mark.parametrize("step", [0, 1, 60])
@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_state_restores_the_batches_at_any_process_count(corpus, step, process_count):
    saver = iterate(corpus, process_index=1, process_count=2)
    for _ in range(step):
        next(saver)
    state = json.loads(json.dumps(saver.get_state()))
    shards = []
    for i in range(process_count):
        restored = iterate(corpus, process_index=i, process_count=process_count)
        take(restored, 3)  # prefetched batches must be dropped
        restored.set_state(state)
        shards.append(take(restored, 5))
    assert np.array_equal(np.concatenate(shards, axis=1), take(iterate(corpus), step + 5)[step:])


def test_restore_through_orbax(corpus, tmp_path):
    args = ocp.args
    iterator = iterate(corpus)
    weights = {"w": np.arange(3.0)}
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        for step in range(1, 54):
            next(iterator)
            if step in (20, 53):
                saved = {
                    "state": args.StandardSave(weights),
                    "data": args.JsonSave(iterator.get_state()),
                }
                manager.save(step, args=args.Composite(**saved))
    expected = take(iterator, 6)

    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        restored = manager.restore(
            manager.latest_step(),
            args=args.Composite(state=args.StandardRestore(weights), data=args.JsonRestore()),
        )
    whole = iterate(corpus)
    whole.set_state(restored.data)
    assert np.array_equal(take(whole, 6), expected)
    halves = [iterate(corpus, process_index=i, process_count=2) for i in range(2)]
    for half in halves:
        half.set_state(restored.data)
    assert np.array_equal(np.concatenate([take(h, 6) for h in halves], axis=1), expected)


def test_val_batches(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i:08}" for i in range(40)))
    corpus = load(tmp_path, data=str(tmp_path / "a.txt"), val_fraction=0.5)
    assert len(corpus.val) == 20

    def batches(batch_size: int, max_batches: int) -> list[np.ndarray]:
        return list(data.val_batches(corpus, batch_size=batch_size, max_batches=max_batches))

    every = batches(5, 10)
    assert np.array_equal(np.concatenate(every), corpus.val)
    assert all(batch.dtype == np.int32 for batch in every)
    assert np.array_equal(every, batches(5, 10))
    assert np.array_equal(np.concatenate(batches(5, 2)), corpus.val[::2])
    remainder = np.concatenate(batches(8, 10))
    assert remainder.shape == (16, CONTEXT + 1)
    assert len(np.unique(remainder, axis=0)) == 16
    (short,) = batches(32, 10)
    assert np.array_equal(short, corpus.val)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer": "a.json", "vocab_size": 300}, "give either tokenizer .* or vocab_size"),
        ({"vocab_size": 256}, "vocab_size must be at least 257, got 256"),
        ({"val_fraction": 0.0}, r"val_fraction must be in \(0, 0\.5\], got 0\.0"),
        ({"val_fraction": 0.6}, r"val_fraction must be in \(0, 0\.5\], got 0\.6"),
        ({"val_fraction": math.nan}, r"val_fraction must be in \(0, 0\.5\], got nan"),
    ],
)
def test_config_errors(config, message):
    with pytest.raises(ValueError, match=message):
        data.DataConfig(**config)


def test_corpus_errors(tmp_path):
    pattern = str(tmp_path / "*.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match=r"no file matches '.*\*\.txt'"):
        load(tmp_path, data=pattern)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"no text in .*\*\.txt: the corpus is empty"):
        load(tmp_path, data=pattern)
    (tmp_path / "a.txt").write_text("fifteen letters"[:14])
    with pytest.raises(ValueError, match="15 tokens do not fill 2 windows of 8"):
        load(tmp_path, data=pattern)
    with pytest.raises(ValueError, match="context must be at least 1, got 0"):
        load(tmp_path, context=0, data=pattern)
    (tmp_path / "a.txt").write_text("fifteen letters")
    assert len(load(tmp_path, data=pattern).train) == 1


def test_iterator_errors(corpus):
    count = len(corpus.train)
    with pytest.raises(ValueError, match=f"{count} training windows do not fill one batch of 512"):
        data.train_iterator(corpus, batch_size=512, seed=0)
    with pytest.raises(ValueError, match="batch_size 4 does not divide among 3 processes"):
        data.train_iterator(corpus, batch_size=4, seed=0, process_count=3)
    with pytest.raises(ValueError, match="process_index 2 is not below 2"):
        data.train_iterator(corpus, batch_size=4, seed=0, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="need positive batch_size, max_batches; got 4, 0"):
        data.val_batches(corpus, batch_size=4, max_batches=0)
