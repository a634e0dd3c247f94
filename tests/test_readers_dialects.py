"""Text logs in every dialect and any mixture: `read` gives the series back or tells what it could not know."""

import gzip
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import given_back
from tests.dialects import (
    CHATTER,
    COMMAS,
    PLAIN,
    PREFIXES,
    RANKS,
    SEPARATED,
    SPELLINGS,
    SUFFIXED,
    TEXT,
    WRAPPED,
    Dialect,
    Row,
    pairs,
    pipes,
)
from tests.dialects_records import SHAPES, json_lines
from tests.given_back import (
    AGAIN,
    CUT,
    EXTENTS,
    RENAMED,
    Log,
    Reading,
    assert_given_back_or_told,
    attempts,
    extent,
    joined,
    numberings,
    series,
    told,
    with_last_cut,
)
from zclip_jax.replay.readers import read

FEATURES = ["attempts", "ranks", "prefix", "colours", "CRLF", "encoding", "redrawn", "chatter", "cut"]
ENCODINGS = ["utf-8-sig", "utf-16", "utf-16-be", "gzip"]
GLUED = [
    "",
    "srun: error: node-7: task 0: CANCELLED\n",
    "Killed\n",
    "[rank0]: Traceback (most recent call last):\n",
    "2026-05-01 10:00:02 slurmstepd: error: JOB 17 CANCELLED\n",
    "^CTerminated\n",
]
COLOURS = {
    "words": (r"[^\s]+", "\x1b[36m{}\x1b[0m"),
    "numbers": (r"(?<![\w.,])\d[\d.,]*(?![\w.,])", "\x1b[1;38;5;12m{}\x1b[0m"),
    "names": (r"[A-Za-z_]{3,}", "\x1b[2m{}\x1b[22m"),
    "lines": (r"[^\r\n]+", "\x1b[K\x1b[33m{}\x1b[39m"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("dialects") / "recorded"


def fits(dialect, spelling):
    return (spelling not in COMMAS or dialect.commas) and (spelling not in WRAPPED or dialect.wraps)


def encoded(text, encoding):
    if encoding == "gzip":
        return gzip.compress(text.encode(), mtime=0)
    return (
        text.encode("utf-8" if encoding is None else encoding, errors="strict")
        if encoding != "utf-16-be"
        else (b"\xfe\xff" + text.encode(encoding))
    )


def prefixed(prefix, text):
    return "\n".join(prefix + line for line in text.split("\n"))


@st.composite
def text_logs(draw, name, features=(), spelling="shortest"):
    """A log in this dialect with these features, as far as they go together."""
    dialect = TEXT[name]
    one_line = "\n" not in dialect.line(Row(1, "1")) and dialect.steps
    runs, kind = [draw(series(draw(numberings()), spelling))], "fresh"
    if "attempts" in features:
        runs, kind = draw(attempts(draw(numberings()), spelling))
    is_cut = "cut" in features
    num_ranks, ranks, prefix = 1, "", ""
    if "ranks" in features and "rank" not in dialect.line(runs[0][0]).lower():
        num_ranks, ranks = draw(st.integers(2, 4)), draw(st.sampled_from(list(RANKS)))
    elif "prefix" in features:
        prefix = draw(st.sampled_from(PREFIXES))
    of_ranks = [runs] * num_ranks
    if ranks and RANKS[ranks]:  # each process has norms of its own, or only losses
        own = spelling in PLAIN and draw(st.booleans())
        of_ranks = [
            [
                [
                    row._replace(loss=f"{float(row.loss) + r:.4f}")
                    if r == 0 or not own
                    else row._replace(norm=f"{r}.5", value=r + 0.5)
                    for row in run
                ]
                for run in runs
            ]
            for r in range(num_ranks)
        ]
    entries = []  # of each printed row its rank and the row, in order
    for i, run in enumerate(runs):
        for j in range(len(run)):
            order = draw(st.permutations(range(num_ranks))) if num_ranks > 1 else [0]
            entries += [(r, of_ranks[r][i][j]) for r in order]
    chatter = st.sampled_from(["", "", *(line + "\n" for line in CHATTER)])
    redrawn = bool("redrawn" in features and one_line and not ranks)
    pieces, before = [], None
    for k, (r, row) in enumerate(entries):
        if "chatter" in features:
            pieces.append(draw(chatter))
        start = ranks.format(r, r) if ranks else prefix
        text = prefixed(start, dialect.line(row))
        if is_cut and k == len(entries) - 1:
            marked = prefixed(start, dialect.line(row._replace(norm="\ue000")))
            norm_at = marked.index("\ue000")
            end = draw(st.integers(len(start), len(text)) | st.integers(norm_at, norm_at + len(row.norm)))
            has_norm = end > norm_at
            pieces.append("\r" * redrawn + text[:end] + draw(st.sampled_from(GLUED)))
            continue
        if redrawn:
            stale = row if before is None else row._replace(norm=before.norm, loss=before.loss)
            draws = [prefixed(start, dialect.line(stale))] * draw(st.integers(0, 2)) + [text]
            pieces.append("".join(f"\r{one}" for one in draws))
            if "chatter" in features or k == len(entries) - 1:
                pieces.append("\n")
        else:
            pieces.append(text + "\n")
        before = row
    text = "".join(pieces)
    if "colours" in features:
        pattern, colour = COLOURS[draw(st.sampled_from(list(COLOURS)))]
        if "\x1b" not in text:
            text = re.sub(pattern, lambda found: colour.format(found[0]), text)
    if "CRLF" in features:
        text = text.replace("\n", "\r\n")
    encoding = draw(st.sampled_from(ENCODINGS)) if "encoding" in features else None
    readings = []
    for r in range(num_ranks):
        if is_cut and r == entries[-1][0]:
            found = with_last_cut(of_ranks[r], kind, dialect, has_norm=has_norm)
        else:
            found = joined(of_ranks[r], kind, dialect.steps)
        readings += told(found, given_back.RANKS) if ranks and RANKS[ranks] else found
    if ranks and not RANKS[ranks]:
        everything = Reading([row for _, row in entries])
        readings = [*told(readings, f"{given_back.RANKS}|{AGAIN}"), *told([everything], AGAIN)]
        if is_cut:
            readings += told([Reading(everything.rows[:-1])], AGAIN, *([CUT] if has_norm else []))
    refused = dialect.refused
    untold = "" if is_cut else r"\bcut off" if features else r"\bcut off|\branks log|\bruns in"
    return Log(encoded(text, encoding), readings, dialect.steps, dialect.loss, refused, untold)


@EXTENTS
@pytest.mark.parametrize("name", TEXT)
def test_each_dialect(name, more, path):
    spellings = st.sampled_from([spelling for spelling in PLAIN if fits(TEXT[name], spelling)])

    @extent(6 * more)
    @given(spellings.flatmap(lambda spelling: text_logs(name, (), spelling)))
    def holds(log):
        assert_given_back_or_told(path, log)


@pytest.mark.parametrize("name", [name for name, kind in (TEXT | SHAPES).items() if not kind.refused])
def test_the_name_that_is_reported_can_be_asked_for(name, path):
    rows = [Row(10 * i, f"{i}.5", f"2.{i}", f"{i / 10:.2f}", value=i + 0.5) for i in range(1, 9)]
    if name in TEXT:
        path.write_bytes(written(rows, TEXT[name].line))
    else:
        path.write_bytes(json_lines([SHAPES[name].record(row) for row in rows]))
    recording = read(path)
    assert recording.norms.tolist() == [row.value for row in rows]
    again = read(path, column=recording.column)
    assert (again.norms.tolist(), again.column) == (recording.norms.tolist(), recording.column)
    assert again.steps.tolist() == recording.steps.tolist()


def written(rows, *lines):
    """One line of each kind for every row, in turns."""
    return "".join(line(row) + "\n" for row in rows for line in lines).encode()


@EXTENTS
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_in_any_dialect(feature, more, path):
    @extent(60 * more)
    @given(st.sampled_from(list(TEXT)).flatmap(lambda name: text_logs(name, (feature,))))
    def holds(log):
        assert_given_back_or_told(path, log)


USUAL = [spelling for spelling in SPELLINGS if spelling not in SEPARATED and spelling != "(…)"]


@EXTENTS
def test_mixtures(more, path):
    @st.composite
    def logs(draw):
        name = draw(st.sampled_from(list(TEXT)))
        features = draw(st.sets(st.sampled_from(FEATURES), min_size=2, max_size=4))
        spelling = draw(st.sampled_from([one for one in USUAL if fits(TEXT[name], one)]))
        return draw(text_logs(name, tuple(sorted(features)), spelling))

    @extent(200 * more)
    @given(logs())
    def holds(log):
        assert_given_back_or_told(path, log)


# Spellings that are rare enough to be refused, if that is said.
NOT_READ = r"no number|not read|not a number|cannot be read|separator|comma|several|left out"


@EXTENTS
@pytest.mark.parametrize("spelling", [*COMMAS, *SUFFIXED, *SEPARATED, *WRAPPED])
def test_spellings(spelling, more, path):
    @st.composite
    def logs(draw):
        names = [
            name
            for name in ("pipes, grad norm", "torchtitan", "log format", "Megatron-LM", "Lightning's bar")
            if fits(TEXT[name], spelling)
        ]
        log = draw(text_logs(draw(st.sampled_from(names)), (), spelling))
        if spelling not in SEPARATED:
            return log
        # Rows that it can't read may be left out, if that is told.
        plain = [row for row in log.readings[0].rows if re.fullmatch(r"\d+(\.\d+)?|-?nan|inf|NaN", row.norm)]
        return log._replace(readings=[*log.readings, Reading(plain, told=(NOT_READ,))], refused=NOT_READ)

    @extent(12 * more)
    @given(logs())
    def holds(log):
        assert_given_back_or_told(path, log)


NAMES = ["norm", "grad_norm", "grad norm", "gnorm", "total_norm", "train/grad_norm", "gradient_norm"]


@EXTENTS
def test_a_name_that_changes_in_mid_file(more, path):
    @extent(40 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), min_size=6, max_size=16))
        first, second = data.draw(st.permutations(NAMES))[:2]
        shape = data.draw(st.sampled_from([pipes, pairs]))
        change = data.draw(st.integers(2, len(rows) - 2))
        content = written(rows[:change], shape(first)) + written(rows[change:], shape(second))
        assert_given_back_or_told(path, Log(content, [Reading(rows, told=(RENAMED,))]))


CLIPPED = ["clipped norm", "clipped grad norm", "clipped_grad_norm", "post-clip norm", "grad_norm_after_clip"]
CLIPPED += ["grad_norm_clipped", "norm after clipping", "grad norm (clipped)", "grad_norm_post_clip"]
UNCLIPPED = ["unclipped norm", "grad norm", "grad_norm", "norm", "pre-clip norm", "raw_grad_norm"]
UNCLIPPED += [
    "grad_norm_before_clip",
    "norm before clipping",
    "unclipped_grad_norm",
    "grad norm (unclipped)",
    "grad_norm_pre_clip",
]


@EXTENTS
def test_norms_before_clipping_win(more, path):
    @extent(40 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), odd=False))
        clipped, unclipped = data.draw(st.sampled_from(CLIPPED)), data.draw(st.sampled_from(UNCLIPPED))
        joint, between = data.draw(st.sampled_from([(" | ", " "), ("  ", ": "), (", ", "=")]))

        def line(row):
            both = [f"{clipped}{between}{min(row.value, 0.25):.4f}", f"{unclipped}{between}{row.norm}"]
            both = both[::order]
            return joint.join([f"step{between}{row.step}", f"loss{between}{row.loss}", *both])

        order = data.draw(st.sampled_from([1, -1]))
        assert_given_back_or_told(
            path, Log(written(rows, line), [Reading(rows)], refused=r"no gradient norm")
        )


@EXTENTS
def test_only_clipped_norms_are_told(more, path):
    @extent(20 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), odd=False))
        name = data.draw(st.sampled_from(CLIPPED))
        content = written(rows, data.draw(st.sampled_from([pipes, pairs]))(name))
        assert_given_back_or_told(
            path, Log(content, [Reading(rows, told=("clip",))], refused="clip|no gradient norm")
        )


SEVERAL = r"several|\d norm columns|numbers|values|quartile|more than one|of (two|three|four|five)"
LISTS = {
    "icefall": "grad-norm quartiles {} 8.1e+01 9.2e+01 9.3e+01 9.9e+02, threshold=1.2e+03",
    "list": "grad_norm: [{}, 81.5, 92.5]",
    "tuple": "grad_norm=({}, 81.5)",
    "spaces": "grad norm {} 81.5 92.5 | lr 0.1",
    "array": "grad_norm: array([{}, 81.5, 92.5], dtype=float32)",
    "tensor": "grad_norm=tensor([{}, 81.5])",
    "slashes": "grad norm {}/81.5/92.5 | lr 0.1",
    "arrow": "grad_norm: {} -> 81.5 | lr 0.1",
    "dictionary": "grad_norm={{'0_default': {}, '1_default': 81.5}}, lr=0.1",
    "range": "grad norm {}-81.5 | lr 0.1",
}


@EXTENTS
@pytest.mark.parametrize("form", LISTS)
def test_several_numbers_after_one_name_are_told(form, more, path):
    @extent(5 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), odd=False))
        content = written(rows, lambda r: f"step {r.step} | loss {r.loss} | " + LISTS[form].format(r.norm))
        log = Log(content, [Reading(rows, told=(SEVERAL,))], refused=f"{SEVERAL}|no number|no gradient norm")
        assert_given_back_or_told(path, log)


MEANS = [
    "Epoch 1 finished: loss 2.7182, grad_norm 0.7071",
    "epoch=1 loss=2.7182 grad_norm=0.7071 time=60.1s",
    "epoch 1 | mean grad_norm 0.7071 | mean loss 2.7182",
    "{'epoch': 1, 'grad_norm': 0.7071, 'loss': 2.7182}",
    "config: lr=0.0003 grad_norm=1.0 steps=1000",
    "trainer.grad_norm = 1.0",
    "Namespace(lr=0.0003, grad_norm=1.0, steps=400000)",
    "eval step 3: loss 2.7182 grad_norm 0.7071",
    "final grad_norm 0.7071",
]


@EXTENTS
def test_lines_of_another_kind_with_the_same_name_are_no_steps(more, path):
    @extent(60 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), min_size=6, max_size=12))
        name = data.draw(st.sampled_from(["grad_norm", "grad_norm", "gnorm", "norm"]))
        line, other = data.draw(st.sampled_from([pipes, pairs]))(name), data.draw(st.sampled_from(MEANS))
        other = (
            other
            if name == "grad_norm" or "trainer" in other or "config" in other
            else other.replace("grad_norm", name)
        )
        places = data.draw(st.lists(st.integers(0, len(rows)), min_size=1, max_size=2, unique=True))
        lines = [line(row) for row in rows]
        for place in sorted(places, reverse=True):
            lines.insert(place, other)
        assert_given_back_or_told(path, Log("".join(one + "\n" for one in lines).encode(), [Reading(rows)]))


@EXTENTS
def test_a_step_that_restarts_while_the_epoch_goes_on_is_one_run(more, path):
    @extent(20 * more)
    @given(st.data())
    def holds(data):
        size, epochs, beside = (
            data.draw(st.integers(3, 5)),
            data.draw(st.integers(2, 3)),
            data.draw(st.booleans()),
        )
        rows = []
        for epoch in range(epochs):
            run = data.draw(series((0, 1, size), min_size=size, max_size=size))
            rows += [row._replace(epoch=str(epoch)) for row in run]
        rows = [row._replace(total=i) for i, row in enumerate(rows)]
        others = "global_step {r.total} | " if beside else ""

        def line(r):
            return f"epoch {r.epoch} | step {r.step} | {others.format(r=r)}loss {r.loss} | grad_norm {r.norm}"

        read_as = [row._replace(step=row.total) if beside else row for row in rows]
        readings = [Reading(read_as, told=() if beside else (f"{AGAIN}|back|restart|epoch",))]
        assert_given_back_or_told(path, Log(written(rows, line), readings, steps=True if beside else None))


@EXTENTS
def test_a_crash_in_mid_row_ahead_of_another_run(more, path):
    @extent(30 * more)
    @given(st.data())
    def holds(data):
        numbering = data.draw(numberings())
        first, second = data.draw(series(numbering)), data.draw(series(numbering))
        dialect: Dialect = TEXT[data.draw(st.sampled_from([name for name in TEXT if TEXT[name].steps]))]
        text = dialect.line(first[-1])
        norm_at = dialect.line(first[-1]._replace(norm="\ue000")).index("\ue000")
        end = data.draw(st.integers(0, len(text) - 1) | st.integers(norm_at, norm_at + len(first[-1].norm)))
        glue = data.draw(st.sampled_from(GLUED[1:]))
        content = (
            written(first[:-1], dialect.line) + (text[:end] + glue).encode() + written(second, dialect.line)
        )
        has_norm = end > norm_at
        readings = joined([first, second], "fresh")
        readings += told(joined([first[:-1], second], "fresh"), *([CUT + "|left out"] if has_norm else []))
        # The step or loss of the cut row may be unknown, too.
        readings = [reading for reading in readings if reading.rows]
        assert_given_back_or_told(path, Log(content, readings, dialect.steps, dialect.loss, dialect.refused))
