"""What a replay says of a run: rules by name, hindsight, the report, its sentences, and settings chosen."""

import json
import math
import re

import numpy as np
import pytest

from zclip_jax import rules
from zclip_jax.replay import _recommend, _table, recommend, replay, sweep
from zclip_jax.replay._flags import find_flags
from zclip_jax.replay._outliers import Hindsight, local_median, look_back, spike_score
from zclip_jax.replay._recommend import GRIDS, Candidate, Recommendation
from zclip_jax.replay._report import describe_log, describe_rule, describe_settings, to_json
from zclip_jax.replay._specs import make_rule, make_spec, parse_grid, parse_spec, parse_value, rule_names
from zclip_jax.replay._table import print_recommendation, print_report
from zclip_jax.replay.readers import Recording

NAN, INF = math.nan, math.inf
NAMES = [
    "zclip",
    "levelclip",
    "autoclip",
    "adagc",
    "ema",
    "fixed",
    "gradient_stabilizer",
    "level",
    "percentile",
]
NAMES += ["sigma_skip", "window_zscore", "zscore"]


def noise(steps, seed=0, spread=0.1):
    return np.exp(spread * np.random.default_rng(seed).standard_normal(steps))


def spiky(steps, *rows, norm=8.0, seed=0):
    norms = noise(steps, seed)
    norms[list(rows)] = norm
    return norms


def recorded(norms, **fields):
    norms = np.asarray(norms, float)
    return Recording(norms, np.arange(norms.size), None, "JSON lines", "grad_norm")._replace(**fields)


def reported(text, recording):
    """The rule, what it decided, and its report."""
    spec = parse_spec(text)
    replayed = replay(spec.rule, recording.norms)
    return spec, replayed, describe_rule(spec, recording, look_back(recording.norms), replayed)


def flags(text, recording):
    spec, replayed, report = reported(text, recording)
    return find_flags(spec, recording, look_back(recording.norms), replayed, report)


def about(word, sentences):
    return [sentence for sentence in sentences if word in sentence]


# Rules by name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        (" 3.5 ", 3.5),
        ("1e-3", 1e-3),
        ("-1", -1),
        ("none", None),
        ("None", None),
        ("NONE", None),
        ("true", True),
        ("False", False),
        ("max", "max"),
        ("", ""),
        ("1;2", "1;2"),
        ("(((", "((("),
    ],
)
def test_values(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_the_names_are_those_of_rules_that_stand_alone():
    assert rule_names() == NAMES
    assert {"at_most", "bounded", "loss_aware"} == {n for n in rules.__all__ if n.islower()} - set(NAMES)


@pytest.mark.parametrize(
    ("text", "settings", "by_hand"),
    [
        ("zclip", {"max_grad_norm": 1.0}, lambda: rules.at_most(rules.zscore(), 1.0)),
        ("zclip:max_grad_norm=none", {"max_grad_norm": None}, rules.zscore),
        (
            "zclip:z_thresh=3, alpha = 0.9,patience=None,strategy=max,robust_warmup=true",
            {"z_thresh": 3, "alpha": 0.9, "patience": None, "strategy": "max", "robust_warmup": True},
            lambda: rules.at_most(
                rules.zscore(0.9, 3.0, patience=None, strategy="max", robust_warmup=True), 1.0
            ),
        ),
        (
            "zclip:space=log",
            {"space": "log", "eps": 1e-6},
            lambda: rules.at_most(rules.zscore(space="log"), 1),
        ),
        ("levelclip", {"multiple": 1.65, "max_grad_norm": 1.0}, lambda: rules.at_most(rules.level(), 1.0)),
        ("autoclip", {"p": 10.0, "window": 1000, "max_grad_norm": None}, rules.percentile),
        ("autoclip:p=50,window=100", {"p": 50, "window": 100}, lambda: rules.percentile(50, 100)),
        ("adagc", {"max_grad_norm": None}, rules.adagc),
        ("ema", {"max_grad_norm": None}, rules.ema),
        ("fixed:max_norm=1.2", {"max_norm": 1.2, "max_grad_norm": None}, lambda: rules.fixed(1.2)),
        ("gradient_stabilizer", {"max_grad_norm": None}, rules.gradient_stabilizer),
        ("level:multiple=1.5", {"multiple": 1.5}, lambda: rules.level(1.5)),
        ("percentile:p=90", {"p": 90}, lambda: rules.percentile(90)),
        ("sigma_skip:num_std=3", {"num_std": 3, "max_grad_norm": None}, lambda: rules.sigma_skip(3)),
        ("window_zscore", {"max_grad_norm": None}, rules.window_zscore),
        ("zscore", {"z_thresh": 2.5, "max_grad_norm": None}, rules.zscore),
        ("zscore:max_grad_norm=0.9", {"max_grad_norm": 0.9}, lambda: rules.at_most(rules.zscore(), 0.9)),
        ("zscore:", {"max_grad_norm": None}, rules.zscore),
    ],
)
def test_a_rule_by_name_decides_as_the_one_made_by_hand(text, settings, by_hand):
    spec = parse_spec(text)
    assert spec.label == text
    assert spec.name == text.partition(":")[0]
    assert settings.items() <= spec.settings.items()
    norms = spiky(300, 10, 100, 200)
    ours, theirs = replay(spec.rule, norms).outcomes, replay(by_hand(), norms).outcomes
    for name in ("threshold", "clip_scale", "fired", "bound", "capped"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_the_cases_above_are_all_rules():
    (table,) = (m for m in test_a_rule_by_name_decides_as_the_one_made_by_hand.pytestmark)
    assert {case[0].partition(":")[0] for case in table.args[1]} == set(NAMES)


def test_a_factory_replaces_settings():
    factory = parse_spec("zclip:z_thresh=3").factory()
    norms = spiky(200, 100)
    changed = replay(factory(z_thresh=4.0, max_grad_norm=None), norms).outcomes
    np.testing.assert_array_equal(
        changed.threshold, replay(rules.zscore(z_thresh=4.0), norms).outcomes.threshold
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zlip", "no rule is called 'zlip'; there are " + ", ".join(NAMES)),
        ("", "no rule is called ''; there are " + ", ".join(NAMES)),
        ("at_most", "no rule is called 'at_most'; there are " + ", ".join(NAMES)),
        ("ZScoreState", "no rule is called 'ZScoreState'; there are " + ", ".join(NAMES)),
        (
            "level:z_thresh=3",
            "level has no setting 'z_thresh'; it has multiple, alpha, patience, max_grad_norm",
        ),
        ("fixed:=1", "fixed has no setting ''; it has max_norm, max_grad_norm"),
        ("fixed", "fixed needs max_norm, as in fixed:max_norm=1"),
        ("fixed:1", "settings of a rule are written name=value, got '1' in 'fixed:1'"),
        ("zclip:alpha=1.5", "alpha must be a number in [0, 1), got 1.5"),
        ("zclip:alpha=", "alpha must be a number in [0, 1), got ''"),
        ("zclip:alpha=true", "alpha must be a number in [0, 1), got True"),
        ("zclip:strategy=min", "strategy must be one of 'reciprocal', 'max', 'mean', got 'min'"),
        ("zclip:patience=0", "patience must be an integer >= 1 or None, got 0"),
        ("zclip:warmup_steps=2.5", "warmup_steps must be an integer >= 1, got 2.5"),
        ("percentile:window=1e3", "window must be an integer >= 1, got 1000.0"),
        ("zclip:max_grad_norm=-1", "max_grad_norm must be a number >= 0 or None, got -1"),
        ("zclip:max_grad_norm=low", "max_grad_norm must be a number >= 0 or None, got 'low'"),
    ],
)
def test_a_mistake_in_a_rule_is_told_in_one_line(text, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        parse_spec(text)


@pytest.mark.parametrize("value", ["maybe", "no", "5"])
def test_a_flag_is_true_or_false(value):
    with pytest.raises(ValueError, match=rf"^robust_warmup must be .*, got '?{value}'?$"):
        parse_spec(f"zclip:robust_warmup={value}")


def test_a_setting_given_twice_is_refused():
    with pytest.raises(ValueError, match="max_norm"):
        parse_spec("fixed:max_norm=1,max_norm=2")
    with pytest.raises(ValueError, match="z_thresh"):
        parse_grid(["z_thresh=2", "z_thresh=3"], parse_spec("zclip"))


def test_settings_as_a_mapping():
    spec = make_spec("as logged", "zclip", {"z_thresh": 3.0, "patience": None})
    assert (spec.label, spec.settings["z_thresh"], spec.settings["patience"]) == ("as logged", 3.0, None)
    assert spec.settings["max_grad_norm"] == 1.0


def test_a_whole_number_may_have_a_decimal_point():
    """As `zscore(warmup_steps=10.0)` itself takes it."""
    recording = recorded(spiky(300, 5))
    assert reported("zclip:warmup_steps=10.0", recording)[2]["warm_up"]["num_norms"] == 10


def test_grids():
    spec = parse_spec("zclip")
    assert parse_grid(["z_thresh=2,3.5,", " alpha = 0.9"], spec) == {"z_thresh": [2, 3.5], "alpha": [0.9]}
    assert parse_grid(["max_grad_norm=1,2"], spec) == {"max_grad_norm": [1, 2]}
    assert parse_grid([], spec) == {}


@pytest.mark.parametrize("pair", ["z_thresh", "z_thresh=", "z_thresh=,", "z_thresh=a", "patience=none,5"])
def test_a_grid_is_of_numbers(pair):
    with pytest.raises(ValueError, match=rf"^a sweep is written name=number,number,…, got {pair!r}$"):
        parse_grid([pair], parse_spec("zclip"))


def test_a_grid_is_of_settings_that_the_rule_has():
    with pytest.raises(ValueError, match=r"^fixed has no setting 'alpha'; it has max_norm, max_grad_norm$"):
        parse_grid(["alpha=0.9"], parse_spec("fixed:max_norm=1"))


# Hindsight


def median_by_hand(norms):
    kept = [x for x in norms if np.isfinite(x)]
    around = [np.median(kept[max(0, i - 50) : i + 51]) for i in range(len(kept))]
    found, last = [], 0
    for x in norms:
        found.append(around[max(last - 1, 0)] if not np.isfinite(x) else around[last])
        last += bool(np.isfinite(x))
    return np.asarray(found)


@pytest.mark.parametrize("size", [1, 2, 50, 51, 52, 100, 101, 102, 103, 400])
def test_local_median(size):
    norms = noise(size, seed=size, spread=1.0)
    np.testing.assert_array_equal(local_median(norms), median_by_hand(norms))


@pytest.mark.parametrize("bad", [[0], [399], [0, 1, 2], [397, 398, 399], [7, 150, 151, 152, 300]])
def test_local_median_passes_over_bad_norms(bad):
    norms = noise(400, seed=1, spread=1.0)
    norms[bad] = [NAN, INF, -INF, NAN, NAN][: len(bad)]
    np.testing.assert_array_equal(local_median(norms), median_by_hand(norms))


def test_local_median_with_equal_norms():
    norms = np.ceil(noise(400, seed=2, spread=1.0))
    np.testing.assert_array_equal(local_median(norms), median_by_hand(norms))


def test_local_median_of_no_finite_norm():
    np.testing.assert_array_equal(local_median(np.asarray([NAN, INF])), [NAN, NAN])
    assert local_median(np.asarray([])).shape == (0,)


def test_ratios():
    found = look_back(np.asarray([1.0, 2.0, NAN, 1.0, INF, 1.0, 0.0, 1.0]))
    np.testing.assert_array_equal(found.median, np.ones(8))
    np.testing.assert_array_equal(found.ratio, [1, 2, 0, 1, 0, 1, 0, 1])


def test_zero_norms_have_no_part_in_the_level():
    """As in a rule: of two norms in three that are zero, the rest are no outliers, and no false alarms either."""
    norms = np.zeros(600)
    norms[::3] = spiky(200, 100)
    found = look_back(norms)
    assert np.flatnonzero(found.ratio > 2).tolist() == [300]
    assert reported("zscore", recorded(norms))[2]["num_caught"] == 1


def test_score():
    hindsight = Hindsight(np.ones(6), np.asarray([2.0, 2.1, 5.0, 1.3, 1.29, 0.0]))
    assert hindsight.score(np.ones(6, bool)) == {"num_outliers": 2, "num_caught": 2, "num_false_alarms": 2}
    assert hindsight.score(np.zeros(6, bool)) == {"num_outliers": 2, "num_caught": 0, "num_false_alarms": 0}
    fired = np.asarray([[0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0]], bool)
    both = hindsight.score(fired)
    assert both["num_outliers"] == 2
    assert both["num_caught"].tolist() == [1, 0]
    assert both["num_false_alarms"].tolist() == [1, 0]


def spike_score_by_hand(x):
    x = [value for value in x if np.isfinite(value)]
    spikes = [
        abs(x[i] - np.mean(x[max(0, i - 1000) : i])) > 7 * np.std(x[max(0, i - 1000) : i])
        for i in range(100, len(x))
    ]
    return sum(spikes) / len(spikes)


@pytest.mark.parametrize("size", [101, 300, 1000, 1001, 1301, 2500])
def test_spike_score(size):
    x = 3 + 0.1 * np.random.default_rng(size).standard_normal(size)
    x[[5, 100, size // 2, size - 1]] = [9.0, 9.0, -9.0, 100.0]
    expected = spike_score_by_hand(x)
    assert expected > 0
    assert spike_score(x) == expected
    assert spike_score(np.insert(x, [0, 50, 100, size], [NAN, INF, NAN, -INF])) == expected


def test_spike_score_of_nothing_to_judge():
    assert spike_score(np.ones(100)) is None
    assert spike_score(np.full(500, NAN)) is None
    assert spike_score(np.asarray([])) is None
    assert spike_score(np.r_[np.ones(100), NAN]) is None


def test_spike_score_of_constant_values():
    assert spike_score(np.full(2000, 0.1)) == 0
    # Any change is beyond seven times nothing.
    assert spike_score(np.r_[np.ones(150), 1.001]) == 1 / 51


@pytest.mark.parametrize("giant", [1e20, 1e300])
@pytest.mark.parametrize("row", [50, 150, 1500])
def test_spike_score_with_a_giant(giant, row):
    """It is a spike itself, where judged, and hides all others as long as it is in the window."""
    x = noise(2600, seed=4)
    x[row] = giant
    x[[row + 20, 2590]] = 50.0
    assert spike_score(x) == ((row >= 100) + 1) / 2500


# The report


ODD = {
    "ordinary": spiky(300, 150),
    "NaN and infinite": np.r_[spiky(300, 150), NAN, INF, -INF, 1.0],
    "first NaN": np.r_[NAN, spiky(60, 30)],
    "zero and negative": np.r_[spiky(300, 150), 0.0, -1.0, 1.0],
    "huge": np.r_[noise(150), 1e20, 1e300, 1e-300, noise(150)],
    "one": [0.5],
    "one, NaN": [NAN],
    "all NaN": np.full(120, NAN),
    "all zero": np.zeros(120),
    "all negative": -noise(120),
    "constant": np.full(300, 2.0),
    "tiny": 1e-30 * noise(300),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("text", ["zclip", "levelclip"])
def test_any_log_can_be_reported(name, text):
    recording = recorded(ODD[name], loss=np.asarray(ODD[name]) * 2, notes=("one note",))
    hindsight = look_back(recording.norms)
    spec, replayed, report = reported(text, recording)
    log = describe_log(recording, hindsight)
    told = find_flags(spec, recording, hindsight, replayed, report)
    assert json.loads(json.dumps([log, report, told], allow_nan=False)) == [
        {**log, "notes": ["one note"]},
        report,
        told,
    ]
    summary = replayed.summary
    for key in ("num_steps", "num_fired", "num_bound", "num_capped", "num_nonfinite", "longest_run"):
        assert report[key] == summary[key]
    assert log["num_norms"] == report["num_steps"] == recording.norms.size
    assert log["num_nonfinite"] == np.sum(~np.isfinite(recording.norms))
    assert (report["locked_in_from"] is None) == (summary["locked_in_from"] < 0)


def test_the_log():
    norms = [1.0, 2.0, NAN, 1.0, 9.0, 1.0]
    recording = recorded(norms, steps=np.arange(10, 70, 10), cadence=10, notes=("a", "b"))
    assert describe_log(recording, look_back(recording.norms)) == {
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
        "spike_score": None,
        "loss_spike_score": None,
        "notes": ["a", "b"],
    }


def test_the_spike_scores_are_of_norms_and_losses():
    loss = np.ones(300)
    loss[[200, 250]] = 2.0, NAN
    recording = recorded(spiky(300, 150), loss=loss)
    log = describe_log(recording, look_back(recording.norms))
    assert (log["spike_score"], log["loss_spike_score"]) == (1 / 200, 1 / 199)


def test_one_rule():
    norms = np.r_[np.full(30, 0.5), 5.0, np.full(30, 0.5), NAN, np.full(9, 1.5)]
    recording = recorded(norms, steps=10 * np.arange(71))
    report = reported("fixed:max_norm=1,max_grad_norm=2", recording)[2]
    spikes = report.pop("largest_spikes")
    assert report == {
        "rule": "fixed:max_norm=1,max_grad_norm=2",
        "settings": {"max_norm": 1, "max_grad_norm": 2},
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
        "warm_up": {"num_norms": 0, "outlier_steps": [], "loose_until": None},
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
    spikes = reported("fixed:max_norm=1000", recording)[2]["largest_spikes"]
    ratio = norms / median_by_hand(norms)
    assert [spike["row"] for spike in spikes] == np.argsort(-ratio)[:10].tolist()
    assert {(spike["fired"], spike["allowed"], spike["clip_scale"]) for spike in spikes} == {
        (False, 1000.0, 1.0)
    }


def test_no_limit_is_null():
    spikes = reported("zscore", recorded(spiky(200, 10)))[2]["largest_spikes"]
    assert [(spike["allowed"], spike["fired"]) for spike in spikes if spike["row"] == 10] == [(None, False)]


def test_each_setting_of_a_sweep():
    recording = recorded(np.r_[spiky(200, 50, 120), 6 * noise(100, seed=1)], steps=np.arange(100, 400))
    hindsight = look_back(recording.norms)
    settings, swept = sweep(rules.zscore, recording.norms, z_thresh=[2.0, 3.0], patience=[25, 1000])
    rows = describe_settings(settings, recording, hindsight, swept)
    assert [row["settings"] for row in rows] == settings
    for row in rows:
        text = "zscore:" + ",".join(f"{k}={v}" for k, v in row["settings"].items())
        alone = reported(text, recording)[2]
        assert {key: alone[key] for key in row if key != "settings"} == {
            key: value for key, value in row.items() if key != "settings"
        }
    assert [row["locked_in_from"] for row in rows] == [None, 300, None, 300]


def test_numbers_as_json_has_them():
    x = {"a": np.float32(0.5), "b": [np.int64(3), NAN, np.float64(INF)], "c": (np.bool_(True), "x", None)}
    assert to_json(x) == {"a": 0.5, "b": [3, None, None], "c": [True, "x", None]}
    assert type(to_json(np.int64(3))) is int


# The warm-up


def limits_by_hand(norms, warm_up=25, alpha=0.97):
    """Mean plus two standard deviations before each norm, of norms none of which fires."""
    limits, mean, var = [], 0.0, 0.0
    for i, x in enumerate(norms):
        limits.append(mean + 2 * np.sqrt(var))
        if i < warm_up:
            mean, var = np.mean(norms[: i + 1]), np.var(norms[: i + 1])
        else:
            mean = alpha * mean + (1 - alpha) * x
            var = alpha * var + (1 - alpha) * (x - mean) ** 2
    return np.asarray(limits)


@pytest.mark.parametrize("row", [1, 5, 24])
def test_an_outlier_in_the_warm_up_is_felt(row):
    norms = spiky(400, row)
    calm = norms.copy()
    calm[row] = median_by_hand(norms)[row]
    loose = np.flatnonzero(limits_by_hand(norms) > 1.1 * limits_by_hand(calm))[-1]
    # So high a threshold that nothing fires, as in the oracle.
    recording = recorded(norms, steps=np.arange(1000, 1400))
    spec, replayed, report = reported("zscore:z_thresh=100", recording)
    assert not replayed.outcomes.fired.any()
    until = 1000 + int(loose)
    assert report["warm_up"] == {"num_norms": 25, "outlier_steps": [1000 + row], "loose_until": until}
    assert about("in warm-up (", flags("zscore:z_thresh=100", recording)) == [
        f"an outlier in warm-up (step {1000 + row}) loosened the threshold until step {until}; "
        "set robust_warmup = True"
    ]
    assert 1100 < until < 1399


def test_all_outliers_of_the_warm_up_are_listed():
    recording = recorded(spiky(400, 3, 9, 14, 20))
    assert reported("zscore", recording)[2]["warm_up"]["outlier_steps"] == [3, 9, 14, 20]
    (told,) = about("in warm-up (", flags("zscore", recording))
    assert told.startswith("an outlier in warm-up (step 3, 9, 14) loosened the threshold until step ")


@pytest.mark.parametrize(
    ("text", "norms", "outlier_steps"),
    [
        ("zscore", spiky(400, 25), []),  # just after it
        ("zscore:warmup_steps=5", spiky(400, 5), []),
        ("zscore", spiky(400, 5, norm=1.8), []),
        ("zscore:robust_warmup=true", spiky(400, 5), [5]),
        ("zscore:warmup_steps=300", spiky(400, 5, norm=2.2), [5]),  # one of so many is hardly felt
        ("zscore", np.r_[8.0, noise(399)], [0]),
        ("zscore", noise(400) * (0.5 + 8 * np.exp(-np.arange(400) / 10)), []),  # a level that falls
        ("fixed:max_norm=1", spiky(400, 5), []),
        ("level", spiky(400, 5), []),
    ],
)
def test_a_healthy_warm_up(text, norms, outlier_steps):
    recording = recorded(norms)
    health = reported(text, recording)[2]["warm_up"]
    if isinstance(norms[0], float) and norms[0] == 8.0:
        # Nothing comes before the first norm that it could stand out against.
        outlier_steps = []
    assert health["outlier_steps"] == outlier_steps
    assert health["loose_until"] is None
    assert about("in warm-up (", flags(text, recording)) == []


def test_only_norms_that_the_rule_takes_are_in_the_warm_up():
    norms = np.r_[NAN, 0.0, spiky(398, 24)]
    health = reported("zscore", recorded(norms))[2]["warm_up"]
    assert (health["num_norms"], health["outlier_steps"]) == (25, [26])
    assert reported("zscore", recorded(np.ones(10)))[2]["warm_up"]["num_norms"] == 10
    assert reported("zscore", recorded(np.zeros(10)))[2]["warm_up"]["num_norms"] == 0


def test_a_warm_up_in_log_space():
    norms = spiky(400, 5)
    health = reported("zscore:space=log,z_thresh=100", recorded(norms))[2]["warm_up"]
    calm = norms.copy()
    calm[5] = median_by_hand(norms)[5]
    limits = np.exp(limits_by_hand(np.log(norms))), np.exp(limits_by_hand(np.log(calm)))
    assert health["loose_until"] == np.flatnonzero(limits[0] > 1.1 * limits[1])[-1]


# What stands out


def test_nothing_stands_out():
    assert flags("levelclip", recorded(0.5 * spiky(400, 200))) == []


def test_no_finite_norm():
    told = ["no norm is finite: the run was broken from its first logged step on"]
    assert flags("zclip", recorded([NAN, INF])) == told
    assert about("finite", flags("zclip", recorded([NAN, 1.0]))) == []


def test_norms_beyond_what_a_step_can_measure():
    """Their squares overflow, so that every step is not finite to a rule."""
    assert about("finite", flags("zclip", recorded(1e25 * noise(400)))) != []


def test_few_norms():
    told = "199 norms are few: rates and settings found on them may be chance"
    assert flags("level", recorded(np.r_[noise(199), NAN])) == [told]
    assert flags("level", recorded(noise(200))) == []


def at_largest(share_of_400, steps=400):
    norms = noise(steps)
    norms[:: 400 // share_of_400][:share_of_400] = 3.0
    return norms


def test_norms_logged_after_clipping():
    told = (
        "5% of the norms are 3, the largest: they look logged after clipping, when no rule can tell what there "
        "was to clip"
    )
    norms = np.random.default_rng(0).permutation(np.r_[noise(380), np.full(20, 3.0)])
    assert about("after clipping", flags("level", recorded(norms))) == [told]
    nearly = np.where(norms == 3.0, 3.0 - 0.002 * np.random.default_rng(1).random(400), norms)
    assert about("after clipping", flags("level", recorded(nearly)))[0].startswith("5% of the norms are ")
    norms[np.flatnonzero(norms == 3.0)[0]] = 1.0
    assert about("after clipping", flags("level", recorded(norms))) == []


def test_norms_that_do_not_look_clipped():
    assert about("after clipping", flags("level", recorded(np.full(400, 3.0)))) == []  # as made-up norms are
    assert about("after clipping", flags("level", recorded(np.full(199, 3.0)))) == []
    assert about("after clipping", flags("level", recorded(np.r_[np.full(40, 3.0), noise(150)]))) == []


def test_cadence():
    seen = "logged every 10 steps: what was between is unseen, and EMA constants don't carry over"
    recording = recorded(noise(400), steps=10 * np.arange(400), cadence=10)
    assert about("logged every", flags("zscore", recording)) == [
        f"{seen}; use alpha = {0.97**0.1:.6g} in training for what alpha = 0.97 does here, or "
        f"alpha = {0.97**10:.4g} here for what 0.97 does in training"
    ]
    assert about("alpha = 0.996959 in", flags("zscore", recording)) != []
    assert about("alpha = 0.7374 here", flags("zscore", recording)) != []
    assert about("logged every", flags("zscore:alpha=0", recording)) == [seen]
    assert about("logged every", flags("fixed:max_norm=9", recording)) == [seen]
    assert about("logged every", flags("zscore", recording._replace(cadence=1))) == []
    thousands = about("logged every", flags("fixed:max_norm=9", recording._replace(cadence=1000)))
    assert thousands[0].startswith("logged every 1,000 steps: ")


def capped_on(number, steps=400):
    """A rule that never fires under a cap of 1, on norms that are above it so many times."""
    norms = np.random.default_rng(0).permutation(np.r_[np.full(number, 1.2), np.full(steps - number, 0.9)])
    return about("max_grad_norm", flags("fixed:max_norm=100,max_grad_norm=1", recorded(norms)))


def test_capped():
    often = "of the steps are clipped by max_grad_norm = 1: more its doing than the rule's"
    raise_it = "is clipped by max_grad_norm = 1: raise it or drop it"
    assert capped_on(80) == []
    assert capped_on(81) == [f"20% {often}"]
    assert capped_on(120) == [f"30% {often}"]
    assert capped_on(380) == [f"95% {often}"]
    assert capped_on(381) == [f"nearly every step (95.2%) {raise_it}"]
    assert capped_on(400) == [f"every step {raise_it}"]
    assert about("max_grad_norm", flags("zclip:max_grad_norm=none", recorded(2 * noise(400)))) == []


def test_locked_in():
    shift = np.r_[noise(100), 5 * noise(200, seed=1)]
    every = ": every later step is called a spike"
    assert about("locked", flags("zscore:patience=none", recorded(shift))) == [
        f"locked in from step 100{every}; set patience = 25"
    ]
    numbered = recorded(shift, steps=np.arange(1000, 1300))
    assert about("locked", flags("zscore:patience=500", numbered)) == [f"locked in from step 1100{every}"]
    assert about("locked", flags("fixed:max_norm=3", numbered)) == [f"locked in from step 1100{every}"]
    assert about("locked", flags("zscore", recorded(shift))) == []
    assert about("locked", flags("zscore:patience=none", recorded(shift[:149]))) == []
    assert about("locked", flags("zscore:patience=none", recorded(shift[:150]))) != []
    assert about("locked", flags("zscore:patience=none", recorded(np.r_[shift, 0.5]))) == []


def missed(text, norms, **fields):
    return about("did not fire", flags(text, recorded(norms, **fields)))


def test_missed_steps():
    above = "above 2x their local median did not fire"
    assert missed("fixed:max_norm=100", spiky(400, 30)) == [f"1 of 1 steps {above}, step 30"]
    norms, steps = spiky(400, 30, 200, 350), np.arange(1000, 1400)
    assert missed("fixed:max_norm=100", norms, steps=steps) == [
        f"3 of 3 steps {above}, from step 1030 to 1350"
    ]
    norms[200] = 101.0
    assert missed("fixed:max_norm=100", norms) == [f"2 of 3 steps {above}, from step 30 to 350"]
    assert missed("fixed:max_norm=2", norms) == []
    assert missed("fixed:max_norm=2", noise(400)) == []


def test_steps_missed_in_the_warm_up():
    above = "above 2x their local median did not fire"
    robust = "zscore:robust_warmup=true"
    assert missed(robust, spiky(400, 24)) == [f"1 of 1 steps {above}, step 24, 1 of them in the warm-up"]
    assert missed(robust, spiky(400, 25)) == []
    # The warm-up is of norms that the rule takes.
    gap = np.r_[np.full(10, NAN), spiky(400, 24)]
    assert missed(robust, gap) == [f"1 of 1 steps {above}, step 34, 1 of them in the warm-up"]


def test_a_step_that_is_zeroed_is_not_missed():
    """A norm whose square overflows is not finite to a rule, which doesn't let it pass."""
    norms = spiky(400, 100)
    norms[200] = 1e25
    assert missed("zscore", norms) == []


def alarms(text, norms):
    return about("fired below", flags(text, recorded(norms)))


def test_false_alarms():
    norms = np.full(400, 1.0)
    norms[[100, 300]] = 1.2
    assert alarms("fixed:max_norm=1.1", norms) == []  # 0.5 % are as many as may be
    norms[200] = 1.2
    assert alarms("fixed:max_norm=1.1", norms) == ["3 steps fired below 1.3x their local median, 0.8% of all"]
    norms[200] = 1.3
    assert alarms("fixed:max_norm=1.1", norms) == []
    norms[[50, 150, 250]] = 1.25
    cure = "; the rule level has fewer, or set min_rel_std = 0.12"
    assert alarms("zscore", norms) == [
        "5 steps fired below 1.3x their local median, 1.2% of all" + cure,
    ]
    assert alarms("zscore:min_rel_std=0.12", norms) == []
    assert alarms("zscore:min_rel_std=0.01", norms) == [
        "5 steps fired below 1.3x their local median, 1.2% of all"
    ]


# Settings chosen


NUM_CANDIDATES = 7 * 4 * 5 + 6 * 3


def scored(name, norms):
    """How a candidate does, from a replay of its own and the loops above."""
    fired = np.asarray(replay(parse_spec(name).rule, norms).outcomes.fired)
    ratio = norms / median_by_hand(norms)
    return int(np.sum(fired & (ratio > 2))), int(np.sum(fired & (ratio < 1.3))), int(fired.sum())


def all_names():
    for rule, grid in GRIDS.items():
        names = [""]
        for setting, values in grid.items():
            names = [f"{name},{setting}={value}" for name in names for value in values]
        yield from (f"{rule}:{name[1:]}" for name in names)


@pytest.fixture(scope="module")
def mixed():
    """Norms with spikes of several sizes, in noise that makes false alarms, and what is recommended for them."""
    norms = noise(1200, seed=7, spread=0.15)
    norms[60:1200:60] *= np.linspace(2.2, 6.0, 19)
    return norms, recommend(norms)


def test_what_is_told_of_a_candidate_is_what_its_rule_does(mixed):
    norms, found = mixed
    outliers = int(np.sum(norms / median_by_hand(norms) > 2))
    assert (found.num_candidates, found.num_outliers) == (NUM_CANDIDATES, outliers)
    for candidate in found.curve:
        assert candidate[1:4] == scored(candidate.rule, norms)
        assert candidate.locked_in is False


def test_the_best_meets_the_criterion(mixed):
    norms, found = mixed
    # In the order of the candidates: those of z-scores, then those of levels.
    grids = (rules.zscore, GRIDS["zclip"]), (rules.level, GRIDS["levelclip"])
    fired = np.concatenate([sweep(factory, norms, **grid)[1].outcomes.fired for factory, grid in grids])
    ratio = norms / median_by_hand(norms)
    assert not any(row[-50:].all() for row in fired)
    best, caught, alarms = None, -1, 0
    for name, row in zip(all_names(), fired, strict=True):
        score = np.sum(row & (ratio > 2)), np.sum(row & (ratio < 1.3))
        if score[0] > caught or (score[0] == caught and score[1] < alarms):
            best, (caught, alarms) = name, score
    assert found.best[:3] == (best, caught, alarms)


def test_to_miss_is_worse_than_to_cry_wolf(monkeypatch):
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (6.0, 3.0, 2.0)}})
    # What is caught in the noisy half costs alarms in the quiet one.
    norms = np.r_[noise(700, spread=0.05), noise(700, seed=1, spread=0.3)]
    by_threshold = {z: scored(f"zclip:z_thresh={z}", norms) for z in (2.0, 3.0, 6.0)}
    assert by_threshold[6.0][0] < by_threshold[3.0][0] < by_threshold[2.0][0]
    assert by_threshold[6.0][1] < by_threshold[3.0][1] < by_threshold[2.0][1]
    found = recommend(norms)
    assert found.best == Candidate("zclip:z_thresh=2.0", *by_threshold[2.0], False)
    assert [one[1:4] for one in found.curve] == list(by_threshold.values())


def test_the_curve_ascends_and_holds_the_best(mixed):
    _, found = mixed
    rule, _, rest = found.best.rule.partition(":")
    threshold, *others = rest.split(",")
    name = threshold.partition("=")[0]
    values = sorted(GRIDS[rule][name])
    assert [one.rule for one in found.curve] == [
        f"{rule}:{','.join([f'{name}={v}', *others])}" for v in values
    ]
    assert found.best in found.curve


def test_the_check_is_of_the_second_half(mixed):
    norms, found = mixed
    told = re.fullmatch(
        r"chosen on the first half alone: (\S+), which in the second half catches (\d+) of (\d+) with (\d+) false "
        "alarms",
        found.check,
    )
    fired = np.asarray(replay(parse_spec(told[1]).rule, norms).outcomes.fired)
    ratio = norms / median_by_hand(norms)
    caught, alarms = fired & (ratio > 2), fired & (ratio < 1.3)
    assert int(told[2]) == caught[600:].sum()
    assert int(told[3]) == (ratio[600:] > 2).sum()
    assert int(told[4]) == alarms[600:].sum()


def test_the_default_wins_where_all_are_equal():
    """Far spikes in next to no noise, of which every candidate catches all and none cries wolf."""
    rng = np.random.default_rng(0)
    norms = 1 + 0.05 * rng.uniform(-1, 1, 2000)
    norms[100::100] = 100.0
    found = recommend(norms)
    assert found.best == Candidate("zclip:z_thresh=2.5,min_rel_std=0.0,alpha=0.97", 19, 0, 19, False)
    assert found.doubts == ()
    assert found.check == (
        "chosen on the first half alone: zclip:z_thresh=2.5,min_rel_std=0.0,alpha=0.97, which in the second half "
        "catches 10 of 10 with 0 false alarms"
    )


def test_a_candidate_that_locks_in_loses(monkeypatch):
    # The one without end of patience comes first, catches as much, and has fewer false alarms.
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (2.5,), "patience": (100_000, 25)}})
    norms = np.r_[spiky(1200, *range(100, 1200, 100)), 5 * noise(300, seed=1)]
    found = recommend(norms)
    assert found.best.rule == "zclip:z_thresh=2.5,patience=25"
    assert found.best.locked_in is False
    assert found.num_candidates == 2


def test_locking_in_is_said_where_none_does_better(monkeypatch):
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (2.5, 3.0), "patience": (100_000,)}})
    norms = np.r_[spiky(1200, *range(100, 1200, 100)), 5 * noise(300, seed=1)]
    found = recommend(norms)
    assert found.best.locked_in is True
    assert found.doubts == (
        "every candidate locks in: the level of this run shifts by more than they can follow",
    )


def test_choosing_on_the_first_half_knows_nothing_of_the_second(monkeypatch):
    """Not even which candidates will lock in there."""
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (2.5,), "patience": (100_000, 25)}})
    norms = np.r_[spiky(1200, *range(100, 1200, 100)), 5 * noise(300, seed=1)]
    assert recommend(norms).check.startswith(
        "chosen on the first half alone: zclip:z_thresh=2.5,patience=100000, which"
    )


def test_doubts():
    few = "4 steps are above 2x their local median, too few to tell thresholds apart"
    short = "the log is too short: 999 norms, and a choice needs 1,000"
    assert recommend(spiky(1000, 200, 400, 600, 800)).doubts == (few,)
    assert recommend(np.r_[spiky(999, 200, 400, 600, 800, 900), NAN]).doubts == (short,)
    assert recommend(spiky(999, 200, 400, 600, 800)).doubts == (short, few)
    # Nothing fires on the first norm.
    missed = "no candidate catches all: 1 of 6 are missed by this one"
    assert recommend(spiky(1000, 0, 200, 400, 600, 800, 900)).doubts == (missed,)


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        (np.ones((3, 3)), r"norms must be one-dimensional, got an array of shape \(3, 3\)"),
        (np.ones(()), r"norms must be one-dimensional, got an array of shape \(\)"),
        ([], "norms must have a finite one among them, got 0 without"),
        ([NAN, INF], "norms must have a finite one among them, got 2 without"),
        (np.full(100, NAN), "norms must have a finite one among them, got 100 without"),
    ],
)
def test_norms_that_nothing_can_be_chosen_on(norms, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        recommend(norms)


@pytest.mark.parametrize("name", ["one", "all zero", "all negative", "constant", "huge"])
def test_odd_logs_have_a_recommendation(name):
    found = recommend(ODD[name])
    assert found.num_candidates == NUM_CANDIDATES
    assert found.best in found.curve
    assert found.doubts[0].startswith("the log is too short: ")


# The tables


def whole_report(recording, *texts, grid=None):
    hindsight = look_back(recording.norms)
    each = [reported(text, recording) for text in texts]
    report = {"log": describe_log(recording, hindsight), "rules": [one[2] for one in each]}
    if grid:
        settings, swept = sweep(each[0][0].factory(), recording.norms, **grid)
        report["sweep"] = describe_settings(settings, recording, hindsight, swept)
    report["flags"] = find_flags(each[0][0], recording, hindsight, each[0][1], report["rules"][0])
    return report


DEFAULT = ("zclip", "fixed:max_norm=1", "autoclip")


@pytest.fixture(scope="module")
def ordinary():
    recording = recorded(spiky(400, 10, 200), notes=("a note",), loss=np.ones(400))
    return whole_report(recording, *DEFAULT, grid={"z_thresh": [2.0, 3.0]})


def cells(text):
    """The words between columns, of each line that has any."""
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.strip()]


def test_the_report_as_text(ordinary, capsys):
    print_report(ordinary)
    shown = cells(capsys.readouterr().out)
    rule = ordinary["rules"]
    assert shown[0] == [
        f"JSON lines: 400 norms under 'grad_norm', steps 0 to 399, median {ordinary['log']['median']:.4g}, largest 8"
    ]
    assert shown[1] == ["- a note"]
    assert list(DEFAULT) in shown
    for name in ("fired", "bound", "capped"):
        parts = [f"{one[f'num_{name}']} ({one[f'num_{name}'] / 400:.2%})" for one in rule]
        assert [name, *parts] in shown
    warm_up = f"1 of 25, felt until step {rule[0]['warm_up']['loose_until']}"
    assert ["outliers in warm-up", warm_up, "no warm-up", "no warm-up"] in shown
    assert ["not finite", "0", "0", "0"] in shown
    assert ["locked in from step", "-", "-", "-"] in shown
    assert ["above 2x local median, fired", "1 of 2", "2 of 2", "2 of 2"] in shown
    assert [f"SpikeScore: norm {ordinary['log']['spike_score']:.3%}, loss 0.000%"] in shown
    assert ["step", "norm", "local median", "ratio", "allowed", "fired"] in shown
    first = rule[0]["largest_spikes"][0]
    assert [
        str(first["step"]),
        "8",
        f"{first['local_median']:.4g}",
        f"{first['ratio']:.1f}x",
        "-" if first["allowed"] is None else f"{first['allowed']:.4g}",
        "yes" if first["fired"] else "no",
    ] in shown
    for row in ordinary["sweep"]:
        start = [f"{row['settings']['z_thresh']:g}", f"{row['num_fired']} ({row['num_fired'] / 400:.2%})"]
        assert start in [line[:2] for line in shown]
    assert ["What stands out, for zclip"] in shown


def test_text_is_no_markup(ordinary, capsys):
    names = ["[red]x[/red]", "[/]", "a:key:norm:100:"]
    rules_ = [one | {"rule": name} for one, name in zip(ordinary["rules"], names, strict=True)]
    log = ordinary["log"] | {"column": "[bold]y[/]:warning:", "format": "[/]", "notes": ["[link=x]z", ":+1:"]}
    print_report({"log": log, "rules": rules_, "flags": ["[blink]w[/blink]", "[/nothing]", ":boom:"]})
    shown = capsys.readouterr().out
    assert shown.startswith("[/]: 400 norms under '[bold]y[/]:warning:', steps 0 to 399")
    assert names in cells(shown)
    assert "Largest spikes, and what [red]x[/red] makes of them" in shown
    for line in ("- [link=x]z", "- :+1:", "- [blink]w[/blink]", "- [/nothing]", "- :boom:"):
        assert line in shown.splitlines()


@pytest.mark.parametrize("width", [20, 40, 80, 110, 300])
def test_any_width(ordinary, width, capsys, monkeypatch):
    monkeypatch.setattr(_table, "WIDTH", width)
    print_report(ordinary)
    lines = capsys.readouterr().out.splitlines()
    # Sentences may go on as one line; what is drawn keeps to the width.
    assert max(len(line) for line in lines if "──" in line) <= width
    assert any(line.startswith("SpikeScore:") for line in lines)


def test_large_numbers_fit(ordinary, capsys):
    many = {"num_steps": 1_234_567, "longest_run": 1_234_567, "locked_in_from": 1_234_567}
    counts = dict.fromkeys(
        (
            "num_fired",
            "num_bound",
            "num_capped",
            "num_nonfinite",
            "num_caught",
            "num_outliers",
            "num_false_alarms",
        ),
        1_234_567,
    )
    print_report(ordinary | {"rules": [one | many | counts for one in ordinary["rules"]]})
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert ["fired", *["1,234,567 (100.00%)"] * 3] in cells(shown)
    assert ["above 2x local median, fired", *["1,234,567 of 1,234,567"] * 3] in cells(shown)
    assert max(map(len, shown.splitlines())) <= 110


def test_a_giant_norm_fits(capsys):
    print_report(whole_report(recorded(spiky(400, 200, norm=1e18)), "zclip"))
    shown = capsys.readouterr().out
    assert "…" not in shown
    (row,) = [line for line in cells(shown) if line[:2] == ["200", "1e+18"]]
    assert len(row[3]) <= 10


@pytest.mark.parametrize("name", ODD)
def test_any_log_can_be_printed(name, capsys):
    print_report(whole_report(recorded(ODD[name]), "zclip"))
    shown = capsys.readouterr().out
    assert shown.startswith(f"JSON lines: {len(ODD[name]):,} norm")
    assert not re.search(r"\b(nan|inf|None)\b", shown)


def test_the_recommendation_as_text(capsys):
    best, other = (
        Candidate("zclip:z_thresh=2.5,alpha=0.9", 5, 1200, 1300, False),
        Candidate("zclip:z_thresh=3.0,alpha=0.9", 4, 0, 9, True),
    )
    print_recommendation(Recommendation(best, 6, 158, (best, other), "checked [/]", ("a doubt",)))
    shown = cells(capsys.readouterr().out)
    assert shown[0] == ["Best of 158 candidates: zclip:z_thresh=2.5,alpha=0.9"]
    assert ["- checked [/]"] in shown
    assert ["- a doubt"] in shown
    assert ["above 2x local median, fired", "fired below 1.3x", "fired", "locks in"] in shown
    assert ["z_thresh=2.5", "5 of 6", "1,200", "1,300", "no"] in shown
    assert ["z_thresh=3.0", "4 of 6", "0", "9", "yes"] in shown


def test_a_candidate_can_be_replayed_by_its_name(mixed):
    _, found = mixed
    spec = parse_spec(found.best.rule)
    assert make_rule(spec.name, **spec.settings).init is not None
