"""Pictures of runs, read off matplotlib's figure; and records of spikes as text."""

import math
import sys

import numpy as np
import pytest
from matplotlib import figure

from tests.looked_at import add, lines, record, row, spiky_rows
from zclip_jax import cli
from zclip_jax.monitor import _plot
from zclip_jax.monitor._logs import read_run
from zclip_jax.monitor._plot import POINTS, plot_runs, thin

NAN = math.nan


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """The panels of a picture of runs whose rows, and records, are given."""
    drawn = []

    def draw_runs(*runs):
        made = []
        for i, (rows, records) in enumerate(runs):
            path = tmp_path / f"run{len(drawn)}_{i}"
            path.mkdir()
            add(path / "metrics.jsonl", rows)
            add(path / "spikes.jsonl", records)
            made.append(read_run(path))
        with monkeypatch.context() as patch:
            patch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
            plot_runs("x.png", made)
        return drawn[-1].axes

    return draw_runs


def curves(panel):
    return {
        line.get_label(): np.column_stack([line.get_xdata(), line.get_ydata()]).tolist()
        for line in panel.lines
    }


def texts(panel):
    return {text.get_text(): text.xy for text in panel.texts}


def test_one_run(draw):
    rows = [row(1, 0.5, trigger=math.inf), row(2, 0.6), row(3, 5.0), row(4, 1.5, cap=1.0), row(5, NAN)]
    rows[3] |= {"val_loss": 2.5, "loss": "inf"}
    loss, norm, rate = draw((rows, [record(3, "blocks/wq")]))
    nan = pytest.approx(NAN, nan_ok=True)
    assert curves(loss) == {
        "training": [[1, 3], [2, 3], [3, 3], [4, nan], [5, 3]],
        "held out": [[4, 2.5]],
    }
    assert norm.get_yscale() == "log"
    found = curves(norm)
    assert found["norm"] == [[1, 0.5], [2, 0.6], [3, 5], [4, 1.5], [5, nan]]
    assert found["spike above"] == [[1, nan], [2, 2], [3, 2], [4, 2], [5, 2]]
    assert found["cap"] == [[step, 1] for step in range(1, 6)]
    assert (found["capped: 1"], found["spike: 1"], found["recorded: 1"]) == ([[4, 1.5]], [[3, 5]], [[3, 5]])
    assert found["not finite: 1"][0][0] == 5
    assert texts(norm) == {"blocks/wq": (3, 5)}
    assert curves(rate)["fired"] == [[1, 0], [2, 0], [3, pytest.approx(100 / 3)], [4, 25], [5, 20]]
    assert curves(rate)["capped"][-1] == [5, 20]
    assert loss.figure.get_suptitle() == "run0_0"


def test_rates_are_of_the_last_100_steps(draw):
    *_, rate = draw((spiky_rows(300, (50, 120)), []))
    fired = np.asarray(curves(rate)["fired"])[:, 1]
    assert (fired[119], fired[148], fired[149], fired[219]) == (2, 2, 1, 0)


def test_several_runs(draw):
    a, b = spiky_rows(200, (50,)), spiky_rows(100, (80,), seed=1)
    loss, norm, rate = draw((a, [record(50, "one")]), (b, [record(80, "two")]))
    for panel in (loss, norm):
        named = [line for line in panel.lines if not line.get_label().startswith("_")]
        assert [line.get_label()[-2:] for line in named] == ["_0", "_1"]
        assert len({line.get_color() for line in named}) == 2
    assert len(rate.lines) == 2
    assert texts(norm) == {"one": (50, pytest.approx(12.3)), "two": (80, pytest.approx(12.3))}


def test_names_do_not_lie_on_each_other(draw):
    spikes = range(100, 150)
    records = [record(step, f"group{step}", times_level=float(step)) for step in spikes]
    _, norm, _ = draw((spiky_rows(1000, tuple(spikes)), records))
    assert list(texts(norm)) == ["group149"]  # the largest


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command(tmp_path, suffix, capsys):
    for name in ("a$b", "b"):
        (tmp_path / name).mkdir()
        add(tmp_path / name / "metrics.jsonl", spiky_rows(200))
    (tmp_path / "train.log").write_text("".join(f"step {i} | norm 0.5\n" for i in range(1, 9)))
    picture = tmp_path / f"picture.{suffix}"
    runs = [str(tmp_path / name) for name in ("a$b", "b", "train.log")]
    assert cli.main(["plot", *runs, "-o", str(picture)]) == 0
    assert picture.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert capsys.readouterr() == ("", "")


def test_what_is_refused(tmp_path, capsys, monkeypatch):
    def refused(*arguments):
        assert cli.main([*map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    run = tmp_path / "metrics.jsonl"
    add(run, spiky_rows(20, ()))
    assert "there is no folder" in refused("plot", run, "-o", tmp_path / "none" / "x.png")
    assert "is a folder" in refused("plot", run, "-o", tmp_path)
    assert "is a run itself" in refused("plot", run, "-o", run)
    assert "No such file" in refused("plot", tmp_path / "none", "-o", tmp_path / "x.png")
    assert "not supported" in refused("plot", run, "-o", tmp_path / "x.abc")
    (tmp_path / "empty.jsonl").touch()
    assert "no rows yet" in refused("plot", tmp_path / "empty.jsonl", "-o", tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'zclip-jax[monitor]'" in refused("plot", run, "-o", tmp_path / "x.png")


def test_of_many_points_the_peaks_are_drawn():
    y = np.random.default_rng(0).standard_normal(100_001)
    y[[5, 77_777, 100_000]] = [50.0, -50.0, 60.0]
    y[1000:1100] = NAN
    kept = thin(y)
    assert kept.size <= POINTS
    assert {5, 77_777, 100_000} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert thin(y[:POINTS]).tolist() == list(range(POINTS))
    assert thin(np.full(POINTS + 1, NAN)).size <= POINTS


def test_the_picture_of_a_long_run_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(_plot, "POINTS", 100)
    path = tmp_path / "metrics.jsonl"
    add(path, spiky_rows(3000, range(1, 3000, 3)))
    plot_runs(tmp_path / "x.svg", [read_run(path)])
    assert (tmp_path / "x.svg").stat().st_size < 400_000


# Records


def spike(path, step, capsys):
    status = cli.main(["spike", str(path), str(step)])
    return status, *capsys.readouterr()


def test_a_record_is_printed(tmp_path, capsys):
    records = [record(2), record(7, "other", update=9, attempt=1), record(7)]
    (tmp_path / "spikes.jsonl").write_text(lines(records) + '{"step": 7, "ki')
    status, out, err = spike(tmp_path, 7, capsys)
    assert (status, err) == (0, "")
    first, second = out.split("\n\n")
    assert first.splitlines() == [
        "step 7: norm 12.3, 31x its level, allowed 0.41 · lm_head: 90 % of it · other: 58x its own level",
        "decision   norm 12.3 scaled by 0.033: fired, bound",
        "data       batch 6, 3 rows: 70, 71, 72",
        "when       update 9, attempt 1",
        "worst rows of the batch, with the parameters after step 8",
        "  row 71: loss 9.5, gradient norm 30, 97 % of the squared norms",
        "  the first reads 'zzz zzz'",
    ]
    assert "layers/7/attn/wq" in second


def test_a_record_with_nothing_but_the_watch(tmp_path, capsys):
    bare = {name: x for name, x in record(7).items() if name in ("watch", "kind", "step", "norm", "level")}
    bare |= {"times_level": None, "allowed": "inf", "share": None, "rise": None, "kind": "nonfinite"}
    bare |= {"num_groups": 3, "num_nonfinite": 1, "nonfinite": ["b"], "norm": "nan"}
    (tmp_path / "spikes.jsonl").write_text(lines([bare]))
    assert spike(tmp_path, 7, capsys) == (0, "step 7: norm nan · 1 of 3 groups not finite: b\n", "")


def test_a_step_without_a_record(tmp_path, capsys):
    file = tmp_path / "spikes.jsonl"
    status, out, err = spike(tmp_path / "none", 3, capsys)
    assert (status, out) == (2, "")
    assert "there is no run" in err
    assert f"{file} does not exist" in spike(tmp_path, 3, capsys)[2]
    file.touch()
    assert spike(tmp_path, 3, capsys)[2].endswith("there is none of any step\n")
    file.write_text(lines([record(8), record(2), record(2)]))
    assert spike(tmp_path, 3, capsys)[2].endswith(f"no record of step 3 in {file}: there are those of 2, 8\n")
    file.write_text(lines([record(step) for step in range(0, 400, 2)]))
    nearest = ", ".join(str(step) for step in range(282, 321, 2))
    assert spike(tmp_path, 301, capsys)[2].endswith(f"the nearest are of {nearest}\n")
