"""What a replay says of a run: the log, the rules, the health of a warm-up."""

import json
import re

import numpy as np
import pytest

from tests.recordings import (
    INF,
    NAN,
    about,
    falling,
    flags,
    median_by_hand,
    noise,
    recorded,
    report_on,
    reported,
    spiky,
)
from zclip_jax.replay import replay
from zclip_jax.replay._outliers import look_back
from zclip_jax.replay._report import describe_log, describe_sweep
from zclip_jax.replay._specs import parse_spec
from zclip_jax.replay._table import print_report

pytestmark = pytest.mark.usefixtures("compiled_once")


ODD = {
    "ordinary": spiky(120, 60),
    "NaN and infinite": np.r_[spiky(116, 60), NAN, INF, -INF, 1.0],
    "first NaN": np.r_[NAN, spiky(119, 60)],
    "zero and negative": np.r_[spiky(117, 60), 0.0, -1.0, 1.0],
    "huge": np.r_[noise(60), 1e18, 1e20, 1e300, 1e-300, noise(56)],
    "one": [0.5],
    "one, NaN": [NAN],
    "all NaN": np.full(120, NAN),
    "all zero": np.zeros(120),
    "all negative": -noise(120),
    "constant": np.full(120, 2.0),
    "tiny": 1e-30 * noise(120),
}


@pytest.mark.parametrize("name", ODD)
def test_any_log_can_be_reported(name, capsys):
    recording = recorded(ODD[name], loss=np.asarray(ODD[name]) * 2, notes=("one note",))
    whole = report_on(recording, "zclip", "levelclip")
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole
    log = whole["log"]
    for report in whole["rules"]:
        summary = replay(parse_spec(report["rule"]).rule, recording.norms).summary
        for key in ("num_steps", "num_fired", "num_bound", "num_capped", "num_nonfinite", "longest_run"):
            assert report[key] == summary[key]
        assert (log["num_norms"], log["num_nonfinite"]) == (report["num_steps"], report["num_nonfinite"])
        assert (report["locked_in_from"] is None) == (summary["locked_in_from"] < 0)
    print_report(whole)
    shown = capsys.readouterr().out
    assert shown.startswith(f"log.jsonl, JSON lines: {len(ODD[name]):,} norm")
    assert not re.search(r"\b(nan|inf|None)\b|…", shown)


def test_the_log():
    norms = [1.0, 2.0, NAN, 1.0, 9.0, 1.0]
    recording = recorded(norms, steps=np.arange(10, 70, 10), cadence=10, notes=("a", "b"))
    assert describe_log(recording, look_back(recording.norms)) == {
        "name": "log.jsonl",
        "format": "JSON lines",
        "column": "grad_norm",
        "num_norms": 6,
        "first_step": 10,
        "last_step": 60,
        "cadence": 10,
        "num_nonfinite": 1,
        "median": 1.0,
        "max": 9.0,
        "num_outliers": 1,
        "num_falling": 0,
        "spike_score": None,
        "loss_spike_score": None,
        "olmo_core_spike_score": None,
        "olmo_core_spike_score_last": None,
        "notes": ["a", "b"],
    }


def test_the_spike_scores_are_of_norms_and_losses():
    recording = recorded(spiky(300, 150), loss=np.insert(np.ones(298), [200, 249], [2.0, NAN]))
    log = describe_log(recording, look_back(recording.norms))
    assert (log["spike_score"], log["loss_spike_score"]) == (1 / 200, 1 / 199)
    # A norm of 128 or more before it varies; the losses before theirs do not.
    assert log["olmo_core_spike_score"] == 1 / 300
    assert log["olmo_core_spike_score_last"] is None


def test_one_rule():
    norms = np.r_[np.full(30, 0.5), 5.0, np.full(30, 0.5), NAN, np.full(9, 1.5)]
    recording = recorded(norms, steps=10 * np.arange(71))
    report = reported("fixed:max_norm=1,max_grad_norm=2", recording)
    spikes = report.pop("largest_spikes")
    assert report == {
        "rule": "fixed:max_norm=1,max_grad_norm=2",
        "settings": {"max_norm": 1, "max_grad_norm": 2, "space": "linear"},
        "num_steps": 71,
        "num_fired": 10,
        "num_bound": 10,
        "num_capped": 0,
        "num_nonfinite": 1,
        "fired_rate": 10 / 71,
        "bound_rate": 10 / 71,
        "capped_rate": 0.0,
        "longest_run": 9,
        "locked_in_from": None,
        "num_outliers": 10,
        "num_caught": 10,
        "num_false_alarms": 0,
        "num_scaled": 10,
        "median_scale": pytest.approx(2 / 3),
        "least_scale": pytest.approx(0.2),
        "warm_up": {"num_norms": None, "outlier_steps": [], "loose_until": None},
    }
    assert len(spikes) == 10
    assert spikes[0] == {
        "step": 300,
        "row": 30,
        "norm": 5.0,
        "local_median": 0.5,
        "ratio": 10.0,
        "allowed": 1.0,
        "clip_scale": pytest.approx(0.2),
        "fired": True,
    }
    assert [spike["row"] for spike in spikes[1:]] == list(range(62, 71))


def test_the_largest_spikes_are_the_ten_furthest_out():
    norms = spiky(600)
    rows = np.arange(30, 580, 45)
    norms[rows] = np.random.default_rng(5).permutation(np.linspace(2.5, 9.0, rows.size))
    recording = recorded(norms)
    spikes = reported("fixed:max_norm=1000", recording)["largest_spikes"]
    ratio = norms / median_by_hand(norms)
    assert [spike["row"] for spike in spikes] == np.argsort(-ratio)[:10].tolist()
    for spike in spikes:
        assert (spike["fired"], spike["allowed"], spike["clip_scale"]) == (False, 1000.0, 1.0)


def test_what_a_cap_scales_is_counted_with_the_rest():
    norms = np.r_[np.full(30, 0.5), 4.0, np.full(20, 2.0), NAN]
    report = reported("fixed:max_norm=3,max_grad_norm=1", recorded(norms))
    assert (report["num_fired"], report["num_capped"], report["num_scaled"]) == (1, 21, 21)
    assert (report["median_scale"], report["least_scale"]) == pytest.approx((0.5, 0.25))


def test_each_setting_of_a_sweep():
    recording = recorded(np.r_[spiky(200, 50, 120), 6 * noise(100, seed=1)], steps=np.arange(100, 400))
    rows = describe_sweep(recording, parse_spec("zscore"), {"z_thresh": [2.0], "patience": [25.0, 1000.0]})
    for row, patience in zip(rows, (25, 1000), strict=True):
        assert row.pop("settings") == {"z_thresh": 2.0, "patience": patience}
        assert row.items() <= reported(f"zscore:z_thresh=2,patience={patience}", recording).items()
    assert [row["locked_in_from"] for row in rows] == [None, 300]


# The warm-up


def triggers_by_hand(norms, z_thresh=100.0, warm_up=25, alpha=0.97):
    """Mean plus `z_thresh` standard deviations before each norm, of norms none of which fires."""
    limits, mean, var = [], 0.0, 0.0
    for i, x in enumerate(norms):
        limits.append(mean + z_thresh * (np.sqrt(var) + 1e-6) if i >= warm_up else np.inf)
        if i < warm_up:
            mean, var = np.mean(norms[: i + 1]), np.var(norms[: i + 1])
        else:
            mean = alpha * mean + (1 - alpha) * x
            var = alpha * var + (1 - alpha) * (x - mean) ** 2
    return np.asarray(limits)


@pytest.mark.parametrize("row", [1, 5, 24])
def test_an_outlier_in_the_warm_up_is_felt(row):
    norms, text = spiky(400, row), "zscore:z_thresh=100"  # where nothing fires, as in the oracle
    calm = norms.copy()
    calm[row] = median_by_hand(norms)[row]
    until = 1000 + int(np.flatnonzero(triggers_by_hand(norms) > 1.1 * triggers_by_hand(calm))[-1])
    assert 1100 < until < 1399
    recording = recorded(norms, steps=np.arange(1000, 1400))
    health = {"num_norms": 25, "outlier_steps": [1000 + row], "loose_until": until}
    assert reported(text, recording)["warm_up"] == health
    assert about("in warm-up (", flags(text, recording)) == [
        f"an outlier in warm-up (step {1000 + row}) loosened the threshold until step {until}; "
        "try robust_warmup = True or the rule level"
    ]


def test_all_outliers_of_the_warm_up_are_listed():
    report = report_on(recorded(np.r_[NAN, 0.0, spiky(398, 3, 9, 14, 24)]), "zscore")  # of norms that count
    health = report["rules"][0]["warm_up"]
    assert (health["num_norms"], health["outlier_steps"]) == (25, [5, 11, 16, 26])
    (told,) = about("in warm-up (", report["flags"])
    assert told.startswith("an outlier in warm-up (step 5, 11, 16) loosened the threshold until step ")


@pytest.mark.parametrize(
    ("text", "norms", "num_norms", "outlier_steps"),
    [
        ("zscore", spiky(400, 25), 25, []),  # just after it
        ("zscore:warmup_steps=5", spiky(400, 5), 5, []),
        ("zscore", spiky(400, 5, norm=1.8), 25, []),
        ("zscore:robust_warmup=true", spiky(400, 5), 25, [5]),
        ("zscore:warmup_steps=300", spiky(400, 5, norm=2.2), 300, [5]),  # one of so many is hardly felt
        ("zscore", spiky(400, 0), 25, []),  # nothing comes before it that it could stand out against
        ("zscore", falling(400), 25, []),
        ("zscore", np.where(np.arange(400) % 40, 0.0, 1.0), 10, []),
        ("fixed:max_norm=1", spiky(400, 5), None, []),
        ("level", spiky(400, 5), None, []),
    ],
)
def test_a_healthy_warm_up(text, norms, num_norms, outlier_steps):
    recording = recorded(norms)
    health = reported(text, recording)["warm_up"]
    assert health == {"num_norms": num_norms, "outlier_steps": outlier_steps, "loose_until": None}
    assert about("in warm-up (", flags(text, recording)) == []


def test_a_warm_up_in_log_space():
    norms = spiky(400, 5)
    health = reported("zscore:space=log,z_thresh=100", recorded(norms))["warm_up"]
    calm = norms.copy()
    calm[5] = median_by_hand(norms)[5]
    limits = np.exp(triggers_by_hand(np.log(norms))), np.exp(triggers_by_hand(np.log(calm)))
    assert health["loose_until"] == np.flatnonzero(limits[0] > 1.1 * limits[1])[-1]
