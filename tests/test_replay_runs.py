"""Several runs in one log: each is judged by itself, and counts are added."""

import json

import jax
import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import figure

from tests.recordings import NAN, noise, recorded, report_on, spiky
from zclip_jax import cli
from zclip_jax.replay import _recommend, _table, recommend, replay, sweep
from zclip_jax.replay._drawing import START, TRIGGER, run_starts
from zclip_jax.replay._figure import write_figure
from zclip_jax.replay._page import write_page
from zclip_jax.replay._report import describe_sweep, make_report
from zclip_jax.replay._runs import gather, joined, name_runs, replay_runs
from zclip_jax.replay._specs import parse_spec
from zclip_jax.replay._table import print_report

pytestmark = pytest.mark.usefixtures("compiled_once")

RULES = ("zclip", "level", "percentile")
COUNTS = ("num_steps", "num_fired", "num_bound", "num_capped", "num_nonfinite", "num_outliers", "num_caught")
COUNTS += ("num_false_alarms", "num_scaled")


def several(*runs, **fields):
    """A log of these runs one after the other, whose steps start again with each."""
    sizes = [len(norms) for norms in runs]
    steps = np.concatenate([np.arange(100, 100 + size) for size in sizes])
    starts = tuple(np.cumsum([0, *sizes[:-1]]).tolist())
    return recorded(np.concatenate(runs), steps=steps, starts=starts)._replace(**fields)


@pytest.fixture
def three():
    """Levels of 1, 5 and 1: in one series the second is a shift, and its start a spike."""
    return several(
        spiky(300, 150), 5 * noise(200, 1), spiky(400, 300, seed=2), notes=("the log holds 3 runs",)
    )


def test_the_runs_of_a_recording(three):
    losses = np.arange(900.0)
    runs = three._replace(loss=losses, starts=(0, 300, 500)).runs
    assert [run.norms.size for run in runs] == [300, 200, 400]
    for run, first in zip(runs, (0, 300, 500), strict=True):
        assert (run.steps[0], run.loss[0], run.starts, run.name) == (100, first, (0,), three.name)
        assert (run.cadence, run.notes) == (1, ())
    np.testing.assert_array_equal(np.concatenate([run.norms for run in runs]), three.norms)
    alone = recorded(noise(5))
    assert alone.runs == (alone,)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_report_is_that_of_each_run_alone(data):
    """What is told of each run is what is told of it as a log of its own, and counts are their sums."""
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 30, 60, 200, 256, 257]), min_size=2, max_size=4))
    levels = data.draw(
        st.lists(st.sampled_from([0.01, 1.0, 5.0, 300.0]), min_size=len(sizes), max_size=len(sizes))
    )
    runs = [level * noise(size, seed=i) for i, (size, level) in enumerate(zip(sizes, levels, strict=True))]
    for run in runs:
        for odd in data.draw(st.lists(st.sampled_from([8.0, 0.0, NAN, 1e25]), max_size=3)):
            run[data.draw(st.integers(0, run.size - 1))] *= odd
    recording = several(*runs)
    report = report_on(recording, *RULES)
    alone = [report_on(run, *RULES) for run in recording.runs]
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["runs"] == [{name: one[name] for name in ("log", "rules", "flags")} for one in alone]
    for total, *each in zip(report["rules"], *(one["rules"] for one in alone), strict=True):
        for name in COUNTS:
            assert total[name] == sum(one[name] for one in each)
        assert total["longest_run"] == max(one["longest_run"] for one in each)
        assert total["num_locked_in"] == sum(one["locked_in_from"] is not None for one in each)
        assert total["fired_rate"] == total["num_fired"] / total["num_steps"]
        scales = [one["least_scale"] for one in each if one["least_scale"] is not None]
        assert total["least_scale"] == min(scales, default=None)
        numbered = [(i, spike) for i, one in enumerate(each, 1) for spike in one["largest_spikes"]]
        furthest = sorted(numbered, key=lambda pair: -pair[1]["ratio"])[:10]
        assert total["largest_spikes"] == [{"run": i} | spike for i, spike in furthest]
    for name in ("num_norms", "num_nonfinite", "num_outliers", "num_falling"):
        assert report["log"][name] == sum(one["log"][name] for one in alone)
    for name in ("median", "first_step", "last_step", "cadence", "spike_score"):
        assert report["log"][name] is None


@pytest.mark.parametrize(
    "size", [1, 257, *(pytest.param(n, marks=pytest.mark.slow) for n in (255, 256, 900))]
)
def test_padding_changes_no_bit(size):
    norms = spiky(size, size // 2)
    run = recorded(norms, loss=np.linspace(3.0, 2.0, size))
    for text in ("zclip", "sigma_skip", "level", "percentile", "window_zscore:window=20"):
        rule = parse_spec(text).rule
        alone = replay(rule, norms, value=run.loss)
        (padded,) = replay_runs(rule, [run])
        jax.tree.map(np.testing.assert_array_equal, padded.outcomes, jax.device_get(alone.outcomes))
        jax.tree.map(np.testing.assert_array_equal, padded.state, jax.device_get(alone.state))


def test_one_series_would_say_otherwise(three):
    apart, together = report_on(three, "zscore"), report_on(three._replace(starts=(0,)), "zscore")
    assert apart["rules"][0]["longest_run"] == 1
    assert together["rules"][0]["longest_run"] > 20
    assert apart["rules"][0]["num_fired"] + 20 < together["rules"][0]["num_fired"]


def test_a_sweep_adds_counts(three):
    grid = {"z_thresh": [2.0, 4.0]}
    rows = describe_sweep(three, parse_spec("zscore"), grid)
    for i, row in enumerate(rows):
        assert row["settings"] == {"z_thresh": grid["z_thresh"][i]}
        each = [sweep(parse_spec("zscore").factory(), run.norms, **grid)[1].summary for run in three.runs]
        for name in ("num_fired", "num_capped", "num_nonfinite"):
            assert row[name] == sum(one[name][i] for one in each)
        assert row["num_steps"] == 900
        assert row["num_locked_in"] == 0
    assert describe_sweep(three.runs[0], parse_spec("zscore"), grid)[0]["locked_in_from"] is None


def test_sentences_are_told_once_with_their_runs():
    assert gather([["a", "b"]]) == ["a", "b"]
    assert gather([["a", "b"], ["b"], ["b", "c"]]) == ["run 1: a", "every run: b", "run 3: c"]
    assert gather([["a"], [], ["a"], ["a"], ["a"], [], ["a"]]) == ["runs 1, 3 to 5, 7: a"]
    assert gather([[], []]) == []
    assert name_runs([1, 2], 3) == "runs 1 to 2"


def test_flags_and_notes_name_their_runs(three):
    gap = three.steps.copy()
    gap[600:] += 5
    report = report_on(three._replace(steps=gap), "fixed:max_norm=2")
    assert report["log"]["notes"] == [
        "the log holds 3 runs",
        "run 3: 5 steps are missing in 1 gap, the first after step 199",
    ]
    assert report["flags"] == [
        "run 2: locked in from step 100: every later step is called a spike",
        "run 2: 199 steps fired below 1.3x their local median, 99.5% of all",
    ]


# As text


def cells(text):
    return [line.split() for line in text.splitlines() if line.strip()]


def test_the_tables(three, capsys):
    report = report_on(three, *RULES) | {
        "sweep": describe_sweep(three, parse_spec("zclip"), {"z_thresh": [2.0, 3.0]})
    }
    print_report(report)
    shown = capsys.readouterr().out
    assert shown.startswith("log.jsonl, JSON lines: 900 norms under 'grad_norm' in 3 runs, largest ")
    assert "\n- the log holds 3 runs\n" in shown
    rows = cells(shown)
    assert [" ".join(row) for row in rows].count("The runs, in each of which zclip starts afresh") == 1
    start = [row[0] for row in rows].index("run")
    assert rows[start][:4] == ["run", "norms", "steps", "median"]
    for number, (row, run) in enumerate(zip(rows[start + 2 : start + 5], report["runs"], strict=True), 1):
        log, rule = run["log"], run["rules"][0]
        assert row[:5] == [str(number), str(log["num_norms"]), "100", "to", str(log["last_step"])]
        assert row[5:8] == [f"{log['median']:.4g}", f"{log['max']:.4g}", str(rule["num_fired"])]
    assert "runs that lock in" in shown
    assert "locked in from step" not in shown
    assert ["run", "step", "norm", "local", "median", "ratio", "allowed", "fired"] in rows
    assert "Sweep of zclip" in shown
    print_report(report_on(three, *RULES, "ema", "adagc"))
    assert ["scaled", "fired", "capped", "outliers", "below", "1.3x", "locked", "in"] in cells(
        capsys.readouterr().out
    )


def test_more_runs_than_fit(capsys, monkeypatch):
    monkeypatch.setattr(_table, "MOST", 3)
    print_report(report_on(several(*([0.1 * noise(30)] * 5)), "fixed:max_norm=1"))
    shown = capsys.readouterr().out
    assert "and 2 more: --json tells of all, --run N of one\n" in shown
    assert "- every run: 30 norms are few: rates and settings found on them may be chance\n" in shown


# Settings chosen


def test_a_choice_adds_the_counts_of_each_run(three):
    found = recommend(*(run.norms for run in three.runs))
    for one in (found.best, *found.curve):
        parts = report_on(three, one.rule)["rules"][0]
        assert (one.num_caught, one.num_false_alarms, one.num_fired) == (
            parts["num_caught"],
            parts["num_false_alarms"],
            parts["num_fired"],
        )
        assert one.locked_in == bool(parts["num_locked_in"])
    assert found.num_outliers == 2
    assert recommend(three.norms).best != found.best


def test_a_choice_does_not_depend_on_where_a_run_stands(three):
    runs = [run.norms for run in three.runs]
    first, second = recommend(*runs), recommend(*runs[::-1])
    assert (first.best, first.curve, first.doubts) == (second.best, second.curve, second.doubts)
    assert recommend(runs[0], [], runs[1], runs[2]).best == first.best


def test_locking_in_within_one_run_loses(monkeypatch):
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (2.5,), "patience": (100_000, 25)}})
    shift = np.r_[noise(200), 5 * noise(100, 1)]
    found = recommend(shift, noise(300, 2))
    assert found.best.settings["patience"] == 25
    assert [one.locked_in for one in found.curve] == [False]
    # Fewer than 50 steps at the end of each are no lock-in, also where those of two runs would be.
    short = np.r_[noise(200), 5 * noise(40, 1)]
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (2.5,), "patience": (100_000,)}})
    assert not recommend(short, short).best.locked_in
    assert recommend(shift, short).best.locked_in


@pytest.mark.parametrize("runs", [[], [[]], [[0.0], [NAN]], [[], []]])
def test_runs_without_norms(runs):
    with pytest.raises(ValueError, match=f"above zero among them, got {sum(map(len, runs))} without"):
        recommend(*runs)
    with pytest.raises(ValueError, match="norms must be one-dimensional"):
        recommend(noise(9), np.ones((2, 3)))


# On the command line


@pytest.fixture
def run(capsys, monkeypatch, three):
    def run_command(*arguments):
        monkeypatch.setattr(cli, "read", lambda *_, **__: three)
        code = cli.main(list(arguments))
        return code, *capsys.readouterr()

    return run_command


def test_one_run_by_its_number(run, three):
    for number, part in enumerate(three.runs, 1):
        code, out, _ = run("replay", "log", "--run", str(number), "--json")
        told = json.loads(out)
        name = f"log.jsonl, run {number} of 3"
        notes = ["the log holds 3 runs"]
        expected = report_on(
            part._replace(name=name, notes=tuple(notes)), "zclip", "fixed:max_norm=1", "percentile"
        )
        assert (code, told) == (0, json.loads(json.dumps(expected)))
    best = json.loads(run("recommend", "log", "--run", "1", "--json")[1])["recommend"]["best"]
    assert best["call"] == recommend(three.runs[0].norms).best.call
    best = json.loads(run("recommend", "log", "--json")[1])["recommend"]["best"]
    assert best["call"] == recommend(*(part.norms for part in three.runs)).best.call


@pytest.mark.parametrize("number", ["0", "4", "-1", "99"])
def test_a_run_that_is_none(run, number):
    for command in ("replay", "recommend"):
        code, out, err = run(command, "log", "--run", number)
        assert (code, out) == (2, "")
        assert err == f"zclip-jax: --run must be from 1 to 3, the runs in log, got {number}\n"


def test_a_run_that_is_no_number(run):
    with pytest.raises(SystemExit, match="2"):
        run("replay", "log", "--run", "first")


# Drawn


def test_all_runs_are_drawn_one_after_the_other(three, tmp_path, monkeypatch):
    drawn, saved = [], figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: drawn.append(self) or saved(self, *a, **k)
    )
    report, results = make_report(three, [parse_spec("zscore"), parse_spec("level")])
    write_figure(tmp_path / "figure.png", three, results)
    each = [replay(parse_spec("zscore").rule, part.norms).outcomes for part in three.runs]
    trigger = np.concatenate([one.trigger for one in each])
    np.testing.assert_array_equal(results["zscore"].outcomes.trigger, trigger)
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    np.testing.assert_array_equal(
        lines["zscore fires above"].get_ydata(), np.where(trigger < np.inf, trigger, NAN)
    )
    assert lines["zscore fires above"].get_color() == TRIGGER
    fired = np.concatenate([one.fired for one in each])
    allowed = np.concatenate([one.threshold for one in each])
    np.testing.assert_array_equal(lines["allowed where scaled"].get_ydata(), allowed[fired].astype(float))
    marks = [line.get_xdata()[0] for line in drawn[0].axes[0].lines if line.get_color() == START]
    assert marks == [300, 500] == run_starts(three).tolist()
    assert drawn[0].get_suptitle() == "log.jsonl: 900 norms in 3 runs"
    assert matplotlib.image.imread(tmp_path / "figure.png").any()


def test_the_page_has_the_trigger_and_marks(three, tmp_path, monkeypatch):
    objects = pytest.importorskip("plotly.graph_objects")
    made, make = [], objects.Figure
    monkeypatch.setattr(objects, "Figure", lambda *a: made.append(make(*a)) or made[-1])
    report, results = make_report(three, [parse_spec("zscore"), parse_spec("level")])
    write_page(tmp_path / "page.html", three, results, flags=report["flags"])
    traces = {trace.name: trace for trace in made[0].data}
    for name, result in results.items():
        trigger = result.outcomes.trigger
        np.testing.assert_array_equal(
            traces[f"{name} fires above"].y, np.where(trigger < np.inf, trigger, NAN)
        )
    assert [shape.x0 for shape in made[0].layout.shapes] == [300, 500]
    assert made[0].layout.xaxis.title.text == "row of the log"
    (spikes,) = [
        trace for trace in made[0].data if trace.visible and (trace.name or "").startswith("spikes: ")
    ]
    outcomes = results["zscore"].outcomes
    columns = [outcomes.threshold, outcomes.trigger, outcomes.z_score, outcomes.clip_scale]
    np.testing.assert_array_equal(spikes.customdata, np.stack(columns, -1)[outcomes.fired])
    assert (
        "norm %{y:.4g}<br>allowed %{customdata[0]:.4g}<br>fires above %{customdata[1]:.4g}"
        in spikes.hovertemplate
    )
    assert (
        "<title>Replay of log.jsonl: 900 gradient norms in 3 runs</title>"
        in (tmp_path / "page.html").read_text()
    )


def test_a_rule_that_never_fires_has_no_line(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    recording = recorded(noise(60))
    _, results = make_report(recording, [parse_spec("gradient_stabilizer"), parse_spec("zscore")])
    write_figure(tmp_path / "figure.png", recording, results)
    labels = drawn[0].axes[0].get_legend_handles_labels()[1]
    assert "gradient_stabilizer never fires" in labels
    assert "zscore fires above" in labels


def test_joined_replays():
    one, two = (replay_runs(parse_spec("zscore").rule, [recorded(noise(n))])[0] for n in (30, 40))
    both = joined([one, two])
    assert both.summary["num_steps"] == 70
    jax.tree.map(np.testing.assert_array_equal, both.state, two.state)
