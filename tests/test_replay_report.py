"""What a replay says of a run: rules by name, hindsight, the report, its sentences, and settings chosen."""

import inspect
import itertools
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from zclip_jax import rules
from zclip_jax.replay import _recommend, _table, recommend, replay
from zclip_jax.replay._outliers import Hindsight, is_finite, local_median, look_back, spike_score
from zclip_jax.replay._recommend import CRITERION, GRIDS, Candidate
from zclip_jax.replay._report import describe_log, describe_sweep, make_report
from zclip_jax.replay._specs import PRESETS, make_spec, parse_grid, parse_spec, parse_value, rule_names
from zclip_jax.replay._table import print_report
from zclip_jax.replay.readers import Recording

pytestmark = pytest.mark.usefixtures("compiled_once")

NAN, INF = math.nan, math.inf
NAMES = [
    "zclip",
    "levelclip",
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


def falling(steps):
    return noise(steps) * (0.5 + 8 * np.exp(-np.arange(steps) / 10))


def recorded(norms, **fields):
    norms = np.asarray(norms, float)
    recording = Recording(norms, np.arange(norms.size), None, "JSON lines", "grad_norm", name="log.jsonl")
    return recording._replace(**fields)


def reported(text, recording):
    return report_on(recording, text)["rules"][0]


def report_on(recording, *texts):
    return make_report(recording, [parse_spec(text) for text in texts])[0]


def flags(text, recording):
    return report_on(recording, text)["flags"]


def about(word, sentences):
    return [sentence for sentence in sentences if word in sentence]


# Rules by name


def test_values():
    texts = [
        "3",
        " 3.5 ",
        "1e-3",
        "-1",
        "none",
        "NONE",
        "true",
        "False",
        "max",
        "",
        "1;2",
        "(((",
        "inf",
        "(" * 999,
    ]
    values = [3, 3.5, 1e-3, -1, None, None, True, False, "max", "", "1;2", "(((", INF, "(" * 999]
    parsed = list(map(parse_value, texts))
    assert parsed == values
    assert list(map(type, parsed)) == list(map(type, values))


def test_the_names_are_those_of_rules_that_stand_alone():
    assert rule_names() == NAMES
    assert {"at_most", "bounded", "loss_aware"} == {n for n in rules.__all__ if n.islower()} - set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_the_rule_and_of_the_preset(name):
    inner, cap = PRESETS.get(name, (name, None))
    parameters = inspect.signature(getattr(rules, inner)).parameters
    given = {"max_norm": 2.0} if name == "fixed" else {}
    spec = make_spec("as logged", name, given)
    assert (spec.label, spec.name) == ("as logged", name)
    assert spec.settings == {key: p.default for key, p in parameters.items()} | given | {"max_grad_norm": cap}


@pytest.mark.parametrize(
    ("text", "by_hand"),
    [
        ("zclip", lambda: rules.at_most(rules.zscore(), 1.0)),
        (
            "zclip:z_thresh=3, alpha = 0.9,patience=None,strategy=max,robust_warmup=true",
            lambda: rules.at_most(
                rules.zscore(0.9, 3.0, patience=None, strategy="max", robust_warmup=True), 1.0
            ),
        ),
        ("levelclip", lambda: rules.at_most(rules.level(), 1.0)),
        ("percentile:p=50,window=20", lambda: rules.percentile(50, 20)),
        ("fixed:max_norm=1.2", lambda: rules.fixed(1.2)),
        # As `zscore(warmup_steps=10.0)` itself takes it.
        ("zscore:warmup_steps=10.0", lambda: rules.zscore(warmup_steps=10)),
    ],
)
def test_a_rule_by_name_decides_as_the_one_made_by_hand(text, by_hand):
    norms = spiky(64, 10, 40)
    ours, theirs = replay(parse_spec(text).rule, norms).outcomes, replay(by_hand(), norms).outcomes
    assert ours.fired.any()
    for name in ("threshold", "clip_scale", "fired", "bound", "capped"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zlip", "no rule is called 'zlip'; there are " + ", ".join(NAMES)),
        ("at_most", "no rule is called 'at_most'; there are " + ", ".join(NAMES)),
        (
            "level:z_thresh=3",
            "level has no setting 'z_thresh'; it has multiple, alpha, patience, num_std, max_grad_norm",
        ),
        ("fixed:=1", "fixed has no setting ''; it has max_norm, max_grad_norm"),
        ("fixed", "fixed needs max_norm, as in fixed:max_norm=1"),
        ("fixed:1", "settings of a rule are written name=value, got '1' in 'fixed:1'"),
        ("zclip:alpha=1.5", "alpha must be a number in [0, 1), got 1.5"),
        ("zclip:alpha=", "alpha must be a number in [0, 1), got ''"),
        ("zclip:strategy=min", "strategy must be one of 'reciprocal', 'max', 'mean', got 'min'"),
        ("zclip:patience=0", "patience must be an integer >= 1 or None, got 0"),
        ("zclip:warmup_steps=2.5", "warmup_steps must be an integer >= 1, got 2.5"),
        ("percentile:window=1e3", "window must be an integer >= 1, got 1000.0"),
        ("zclip:max_grad_norm=low", "max_grad_norm must be a number >= 0 or None, got 'low'"),
        ("zclip:robust_warmup=5", "robust_warmup must be true or false, got 5"),
        ("zclip:robust_warmup=no", "robust_warmup must be true or false, got 'no'"),
        ("fixed:max_norm=1, max_norm=2", "max_norm is given twice in 'fixed:max_norm=1, max_norm=2'"),
    ],
)
def test_a_mistake_in_a_rule_is_told_in_one_line(text, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        parse_spec(text)


def test_grids():
    spec = parse_spec("zclip")
    assert parse_grid(["z_thresh=2,3.5,", " alpha = 0.9"], spec) == {"z_thresh": [2, 3.5], "alpha": [0.9]}
    assert parse_grid(["max_grad_norm=1,2"], spec) == {"max_grad_norm": [1, 2]}
    assert parse_grid([], spec) == {}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        *(
            ([pair], f"a sweep is written name=number,number,…, got {pair!r}; compare rules for the rest")
            for pair in ("z_thresh", "z_thresh=", "z_thresh=,", "z_thresh=a", "patience=none,5")
        ),
        (["alpha=1", " alpha=2"], "alpha is given twice in a sweep: write alpha=number,number,…"),
        (["alpha=0.9"], "fixed has no setting 'alpha'; it has max_norm, max_grad_norm"),
    ],
)
def test_what_is_no_grid(pairs, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_grid(pairs, parse_spec("fixed:max_norm=1"))


# Hindsight


def usable_by_hand(x):
    """A finite norm above zero, whose square is finite in float32, too."""
    with np.errstate(over="ignore"):
        return x > 0 and bool(np.isfinite(np.square(np.float32(x))))


def median_by_hand(norms):
    kept = [x for x in norms if usable_by_hand(x)]
    around = [np.median(kept[max(0, i - 50) : i + 51]) for i in range(len(kept))] or [NAN]
    found, last = [], 0
    for x in norms:
        found.append(around[last] if usable_by_hand(x) else around[max(last - 1, 0)])
        last += usable_by_hand(x)
    return np.asarray(found)


def outliers_by_hand(norms):
    median, found, before = median_by_hand(norms), [], []
    for i, x in enumerate(norms):
        usable = usable_by_hand(x)
        found.append(
            bool(usable and before)
            and x > 2 * median[i]
            and (x > 1.3 * np.median(before[-5:]) or x > 1.3 * np.median(before[-50:]))
        )
        before += [x] if usable else []
    return np.asarray(found)


BAD = [NAN, INF, -INF, 0.0, -1.0, 1e25, 1e300]


@pytest.mark.parametrize("size", [1, 2, 50, 51, 52, 100, 101, 102, 103, 400])
@pytest.mark.parametrize("bad", [[], [0], [-1], [0, 1, 2], [-3, -2, -1], [7, 150, 151, 152, 300, 301, 302]])
def test_local_median(size, bad):
    norms = noise(size, seed=size, spread=1.0)
    norms[[row % size for row in bad]] = BAD[: len(bad)]
    np.testing.assert_array_equal(local_median(norms), median_by_hand(norms))
    norms = np.ceil(norms)  # many that are equal
    np.testing.assert_array_equal(local_median(norms), median_by_hand(norms))


def test_ratios():
    norms = np.asarray([1.0, 2.0, NAN, 1.0, INF, 1.0, 0.0, 1.0, 1.8e19, 1.9e19, -1.9e19, -1.0])
    found = look_back(norms)
    np.testing.assert_array_equal(found.median, np.ones(12))
    np.testing.assert_array_equal(found.ratio, [1, 2, 0, 1, 0, 1, 0, 1, 1.8e19, 0, 0, 0])
    # Finite is what a rule calls so.
    np.testing.assert_array_equal(~replay(rules.fixed(1.0), norms).outcomes.nonfinite, is_finite(norms))
    assert look_back(np.asarray([])).ratio.shape == (0,)


@pytest.mark.parametrize(
    ("norms", "num_outliers", "num_falling"),
    [
        # Never the first, nor the next beside it.
        (spiky(400, 0, 1, 100, 101, 102, 103, 104, 105, 399), 7, 2),
        (falling(400), 0, 22),
        (falling(400) * np.where(np.arange(400) == 12, 3.0, 1.0), 1, 21),
        (noise(400) * np.where(np.arange(400) < 200, 5.0, 1.0), 0, 0),
        (np.r_[noise(30), 5 * noise(30, 1), noise(340)], 26, 4),  # a plateau, until it is most of the last 50
        (np.r_[5 * noise(60), noise(3), 5 * noise(3), noise(334)], 3, 0),  # above the last 5 alone
        (np.insert(spiky(400, 100, 200, 300), [0, 100, 101, 200, 200, 300, 400], BAD), 3, 0),
        (noise(600, spread=0.7), 106, 0),
    ],
)
def test_outliers(norms, num_outliers, num_falling):
    expected, found = outliers_by_hand(norms), look_back(norms)
    np.testing.assert_array_equal(found.outlier, expected)
    log = describe_log(recorded(norms), found)
    assert (log["num_outliers"], log["num_falling"]) == (num_outliers, num_falling)


def test_score():
    ratio = np.asarray([2.0, 2.1, 5.0, 1.3, 1.29, 0.0])
    hindsight = Hindsight(np.ones(6), ratio, np.asarray([0, 1, 1, 0, 0, 0], bool))
    assert hindsight.score(np.ones(6, bool)) == {"num_outliers": 2, "num_caught": 2, "num_false_alarms": 2}
    fired = np.asarray([[0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0]], bool)
    both = hindsight.score(fired)
    assert both["num_outliers"] == 2
    assert both["num_caught"].tolist() == [1, 0]
    assert both["num_false_alarms"].tolist() == [1, 0]
    assert hindsight.at(slice(2, None)).score(fired[:, 2:])["num_outliers"] == 1


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


def test_spike_score_of_nothing_to_judge_or_to_find():
    for x in ([], np.ones(100), np.full(500, NAN), np.r_[np.ones(100), NAN]):
        assert spike_score(np.asarray(x)) is None
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
        "notes": ["a", "b"],
    }


def test_the_spike_scores_are_of_norms_and_losses():
    recording = recorded(spiky(300, 150), loss=np.insert(np.ones(298), [200, 249], [2.0, NAN]))
    log = describe_log(recording, look_back(recording.norms))
    assert (log["spike_score"], log["loss_spike_score"]) == (1 / 200, 1 / 199)


def test_one_rule():
    norms = np.r_[np.full(30, 0.5), 5.0, np.full(30, 0.5), NAN, np.full(9, 1.5)]
    recording = recorded(norms, steps=10 * np.arange(71))
    report = reported("fixed:max_norm=1,max_grad_norm=2", recording)
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
    norms, text = spiky(400, row), "zscore:z_thresh=100"  # where nothing fires, as in the oracle
    calm = norms.copy()
    calm[row] = median_by_hand(norms)[row]
    until = 1000 + int(np.flatnonzero(limits_by_hand(norms) > 1.1 * limits_by_hand(calm))[-1])
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
    limits = np.exp(limits_by_hand(np.log(norms))), np.exp(limits_by_hand(np.log(calm)))
    assert health["loose_until"] == np.flatnonzero(limits[0] > 1.1 * limits[1])[-1]


# What stands out


def test_nothing_stands_out():
    assert flags("levelclip", recorded(0.5 * spiky(400, 200))) == []
    assert flags("level", recorded(noise(200))) == []


def test_few_norms():
    none = ["no norm is finite: the run was broken from its first logged step on"]
    assert flags("zclip", recorded([NAN, INF])) == none
    assert flags("zclip", recorded(1e25 * noise(400))) == none  # their squares overflow
    few = ["199 norms are few: rates and settings found on them may be chance"]
    assert flags("level", recorded(np.r_[noise(199), NAN])) == few


@pytest.mark.parametrize(
    ("largest", "pile"),
    [
        ([3.0] * 5, 5),
        ([3.0] * 4, 0),
        ([3.0, *[3 * (1 - 0.9e-4)] * 4], 5),  # as rounding leaves them
        ([3.0, *[3 * (1 - 1.1e-4)] * 4], 0),
        ([*[3.0] * 6, *[2.95] * 5], 6),
        ([*[3.0] * 6, *[2.95] * 6], 0),  # a tail of no clipping
        ([*[3.0] * 6, *[2.93] * 60], 6),  # further below than 2 %
        ([*[3.0] * 5, 1e25], 5),
        ([3.0] * 400, 0),  # as made-up norms are
    ],
)
def test_norms_logged_after_clipping(largest, pile):
    norms = np.random.default_rng(0).permutation(np.r_[noise(400 - len(largest)), largest])
    told = "norms are 3, the largest: they look logged after clipping, which hides what there was to clip"
    found = about("after clipping", flags("fixed:max_norm=9", recorded(norms)))
    assert found == ([f"{pile} {told}"] if pile else [])


def test_cadence():
    seen = "logged every 10 steps: what was between is unseen, and neither EMA constants nor a warm-up carry over"
    recording = recorded(noise(400), steps=10 * np.arange(400), cadence=10)
    assert about("logged every", flags("zscore", recording)) == [
        f"{seen}; for the memory that alpha = 0.97 has here, use alpha = 0.99695871 in training"
    ]
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
    assert about("locked", flags("zscore:patience=none", recorded(np.r_[shift, 0.5]))) == []


def missed(text, norms, **fields):
    return about("did not fire", flags(text, recorded(norms, **fields)))


def test_missed_outliers():
    miss = "outliers did not fire"
    assert missed("fixed:max_norm=100", spiky(400, 30)) == [f"1 of 1 {miss}, step 30"]
    norms, steps = spiky(400, 0, 30, 200, 350), np.arange(1000, 1400)  # nothing could know of the first
    assert missed("fixed:max_norm=100", norms, steps=steps) == [f"3 of 3 {miss}, from step 1030 to 1350"]
    norms[200] = 101.0
    assert missed("fixed:max_norm=100", norms) == [f"2 of 3 {miss}, from step 30 to 350"]
    norms[200] = 1e25  # not finite to a rule, which doesn't let it pass
    assert missed("fixed:max_norm=2", norms) == []
    assert missed("fixed:max_norm=100", falling(400)) == []
    robust = "zscore:robust_warmup=true"
    assert missed(robust, spiky(400, 24)) == [f"1 of 1 {miss}, step 24, 1 of them in the warm-up"]
    assert missed(robust, spiky(400, 25)) == []
    # The warm-up is of norms that the rule takes.
    gap = np.r_[np.full(10, NAN), spiky(390, 24)]
    assert missed(robust, gap) == [f"1 of 1 {miss}, step 34, 1 of them in the warm-up"]


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
    told = "5 steps fired below 1.3x their local median, 1.2% of all"
    assert alarms("zscore", norms) == [f"{told}; try the rule level, or min_rel_std = 0.12"]
    assert alarms("zscore:min_rel_std=0.12", norms) == []
    assert alarms("zscore:min_rel_std=0.01", norms) == [told]


# Settings chosen


NUM_CANDIDATES = 7 * 4 * 5 + 6 * 3


def scored(name, norms, steps=slice(None)):
    """How a candidate does, from a replay of its own and the loops above."""
    fired = np.asarray(replay(parse_spec(name).rule, norms).outcomes.fired)[steps]
    outlier, low = outliers_by_hand(norms)[steps], (norms / median_by_hand(norms) < 1.3)[steps]
    return int(np.sum(fired & outlier)), int(np.sum(fired & low)), int(fired.sum())


def test_defaults_come_first():
    for preset, grid in GRIDS.items():
        defaults = parse_spec(preset).settings
        assert {name: values[0] for name, values in grid.items()} == {name: defaults[name] for name in grid}


@pytest.fixture(scope="module")
def mixed():
    """Norms with spikes of several sizes, in noise that makes false alarms, and what is recommended for them."""
    norms = noise(1200, seed=7, spread=0.15)
    norms[60:1200:60] *= np.linspace(2.2, 6.0, 19)
    return norms, recommend(norms)


def test_the_curve_is_of_what_its_rules_do(mixed):
    norms, found = mixed
    assert (found.num_candidates, found.num_outliers) == (NUM_CANDIDATES, outliers_by_hand(norms).sum())
    assert found.best in found.curve
    name, *_ = best = found.best.settings
    values = sorted(GRIDS[found.best.preset][name])
    assert [(one.preset, one.settings) for one in found.curve] == [
        (found.best.preset, best | {name: value}) for value in values
    ]
    for candidate in found.curve:
        assert (candidate.num_caught, candidate.num_false_alarms, candidate.num_fired) == scored(
            candidate.rule, norms
        )
        assert candidate.locked_in is False


def test_the_best_meets_the_criterion(mixed):
    norms, found = mixed
    outlier, low = outliers_by_hand(norms), norms / median_by_hand(norms) < 1.3
    scores = []
    for preset, grid in GRIDS.items():
        settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        columns = {name: jnp.asarray([setting[name] for setting in settings]) for name in grid}
        # What fires is held against replays above.
        fired = np.asarray(_recommend._fired(preset, columns, jnp.asarray(norms)))
        assert not fired[:, -50:].all(-1).any()
        for setting, row in zip(settings, fired, strict=True):
            changed = sum(grid[name][0] != value for name, value in setting.items())
            scores.append((np.sum(outlier & ~row), np.sum(low & row), changed, preset, setting))
    best = min(scores, key=lambda score: score[:3])
    assert (found.best.preset, found.best.settings) == best[3:]
    assert (found.num_outliers - found.best.num_caught, found.best.num_false_alarms) == best[:2]


def test_to_miss_is_worse_than_to_cry_wolf(monkeypatch):
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (6.0, 3.0, 2.0)}})
    # What is caught in the noisy half costs alarms in the quiet one.
    norms = np.r_[noise(700, spread=0.05), noise(700, seed=1, spread=0.3)]
    by_threshold = {z: scored(f"zclip:z_thresh={z}", norms) for z in (2.0, 3.0, 6.0)}
    assert by_threshold[6.0][0] < by_threshold[3.0][0] < by_threshold[2.0][0]
    assert by_threshold[6.0][1] < by_threshold[3.0][1] < by_threshold[2.0][1]
    found = recommend(norms)
    assert found.best == Candidate("zclip", {"z_thresh": 2.0}, *by_threshold[2.0], False)
    assert [one[2:5] for one in found.curve] == list(by_threshold.values())


def far_spikes():
    """In next to no noise, of which every candidate catches all and none cries wolf."""
    norms = 1 + 0.05 * np.random.default_rng(0).uniform(-1, 1, 2000)
    norms[100::100] = 100.0
    return norms


def test_the_default_wins_where_all_are_equal():
    settings = {"z_thresh": 2.5, "min_rel_std": 0.0, "alpha": 0.97}
    found = recommend(far_spikes())
    assert found.best == Candidate("zclip", settings, 19, 0, 19, False)
    assert found.best.rule == "zclip:z_thresh=2.5,min_rel_std=0,alpha=0.97"
    assert found.doubts == ()
    assert found.check == (
        f"chosen on the first half alone: {found.best.rule}, which in the second half catches 10 of 10 with 0 "
        "false alarms"
    )


def test_what_changes_fewest_settings_wins_where_some_are_equal(monkeypatch):
    grid = {"z_thresh": (2.5, 50.0), "alpha": (0.97, 0.9), "min_rel_std": (0.0, 0.5)}
    norms = noise(2000)
    norms[100::100] = 100.0
    assert scored("zclip", norms)[1] > 0
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": grid})
    assert recommend(norms).best.settings == {"z_thresh": 2.5, "alpha": 0.97, "min_rel_std": 0.5}
    # It comes last, and changes none.
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": grid, "levelclip": {"multiple": (1.65, 1.85)}})
    assert recommend(norms).best.rule == "levelclip:multiple=1.65"


def test_the_check_is_of_the_second_half(mixed):
    norms, found = mixed
    told = re.fullmatch(
        r"chosen on the first half alone: (\S+), which in the second half catches (\d+) of (\d+) with (\d+) false "
        "alarms",
        found.check,
    )
    half = slice(600, None)
    caught, alarms, _ = scored(told[1], norms, half)
    assert [int(x) for x in told.groups()[1:]] == [caught, outliers_by_hand(norms)[half].sum(), alarms]
    assert recommend(spiky(1200, 100, 200, 300, 400, 500)).check == (
        "the second half has no outlier, so that it can't confirm a choice"
    )


def test_locking_in_loses(monkeypatch):
    # The one without end of patience comes first, catches as much, and has fewer false alarms.
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (2.5,), "patience": (100_000, 25)}})
    norms = np.r_[spiky(1200, *range(100, 1200, 100)), 5 * noise(298, seed=1), 100.0, 5.0]
    found = recommend(norms)
    assert (found.best.rule, found.best.locked_in) == ("zclip:z_thresh=2.5,patience=25", False)
    # Choosing on the first half knows nothing of the second, not even which candidates will lock in there.
    assert found.check.startswith("chosen on the first half alone: zclip:z_thresh=2.5,patience=100000, which")
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (2.5, 3.0), "patience": (100_000,)}})
    found = recommend(norms)
    assert found.best.locked_in is True
    assert found.doubts == (
        "every candidate locks in: the level of this run shifts by more than they can follow",
    )


def test_doubts():
    few = "outliers are too few to tell thresholds apart: 4, and a choice needs 5"
    short = "the log is too short: 999 norms, and a choice needs 1,000"
    assert recommend(spiky(1000, 200, 400, 600, 800)).doubts == (few,)
    # A square that overflows is as little of a norm as NaN.
    for bad in (NAN, 1e25):
        assert recommend(np.r_[spiky(999, 200, 400, 600, 800, 900), bad]).doubts == (short,)
    assert recommend(np.r_[spiky(999, 200, 400, 600, 800), NAN]).doubts == (short, few)
    assert recommend(spiky(1000, 0, 200, 400, 600, 800, 900)).doubts == ()  # the first is no outlier


def test_missing_outliers_is_a_doubt(monkeypatch):
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (2.5,)}})
    assert recommend(spiky(1000, 5, 200, 400, 600, 800, 900)).doubts == (
        "no candidate catches all outliers: this one misses 1 of 6",
    )


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        (np.ones((3, 3)), r"norms must be one-dimensional, got an array of shape \(3, 3\)"),
        (np.ones(()), r"norms must be one-dimensional, got an array of shape \(\)"),
        ([], "norms must have a finite one among them, got 0 without"),
        ([NAN, INF], "norms must have a finite one among them, got 2 without"),
        (np.full(100, 1e25), "norms must have a finite one among them, got 100 without"),
    ],
)
def test_norms_that_nothing_can_be_chosen_on(norms, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        recommend(norms)


# The tables


DEFAULT = ("zclip", "fixed:max_norm=1", "percentile:window=50")


@pytest.fixture(scope="module")
def ordinary():
    recording = recorded(spiky(400, 10, 200), notes=("a note",), loss=np.ones(400))
    swept = describe_sweep(recording, parse_spec("zclip"), {"z_thresh": [2.0, 3.0]})
    return report_on(recording, *DEFAULT) | {"sweep": swept}


COUNTED = ("scaled", "fired", "capped")


def cells(text):
    """The words between columns, of each line that has any."""
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.strip()]


def test_the_report_as_text(ordinary, capsys):
    print_report(ordinary)
    shown = cells(capsys.readouterr().out)
    rule = ordinary["rules"]
    level = f"median {ordinary['log']['median']:.4g}, largest 8"
    assert shown[0] == [f"log.jsonl, JSON lines: 400 norms under 'grad_norm', steps 0 to 399, {level}"]
    assert shown[1] == ["- a note"]
    start = shown.index(list(DEFAULT))
    warm_up = f"1 of 25, felt until step {rule[0]['warm_up']['loose_until']}"

    def parts(name):
        return [f"{one[f'num_{name}']} ({one[f'num_{name}'] / 400:.2%})" for one in rule]

    assert shown[start + 2 : start + 12] == [
        ["scaled down, by rule or cap", *parts("scaled")],
        ["to, median (least)", *(f"{one['median_scale']:.2f} ({one['least_scale']:.2g})" for one in rule)],
        ["fired", *parts("fired")],
        ["capped", *parts("capped")],
        ["outliers that fired", *(f"{one['num_caught']} of 2" for one in rule)],
        ["fired below 1.3x", *parts("false_alarms")],
        ["longest run", *(str(one["longest_run"]) for one in rule)],
        ["locked in from step", "-", "-", "-"],
        ["outliers in warm-up", warm_up, "no warm-up", "no warm-up"],
        ["not finite", "0", "0", "0"],
    ]
    assert shown[start + 12] == [f"SpikeScore: norm {ordinary['log']['spike_score']:.3%}, loss 0.000%"]
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
    head = ["z_thresh", "fired", "capped", "outliers that fired", "fired below 1.3x", "longest run"]
    assert [*head, "locked in from"] in shown
    for row in ordinary["sweep"]:
        part = [f"{row[key]} ({row[key] / 400:.2%})" for key in ("num_fired", "num_capped")]
        assert [f"{row['settings']['z_thresh']:g}", *part] in [line[:3] for line in shown]
    assert ["What stands out, for zclip"] in shown
    assert [f"- {flag}" for flag in ordinary["flags"]] == [
        " ".join(line) for line in shown[-len(ordinary["flags"]) :]
    ]


def test_many_rules_have_a_row_each(ordinary, capsys):
    five = [one | {"rule": f"rule {i}"} for i, one in enumerate((ordinary["rules"] * 2)[:5])]
    print_report(ordinary | {"rules": five[:4]})
    assert ["rule 0", "rule 1", "rule 2", "rule 3"] in cells(capsys.readouterr().out)
    print_report(ordinary | {"rules": five})
    shown = cells(capsys.readouterr().out)
    start = shown.index(["scaled", "fired", "capped", "outliers", "below 1.3x", "locked in"]) + 2
    for one, row in zip(five, shown[start : start + 5], strict=True):
        parts = [f"{one[f'num_{x}']} ({one[f'num_{x}'] / 400:.2%})" for x in (*COUNTED, "false_alarms")]
        caught = f"{one['num_caught']} of 2"
        assert row == [one["rule"], *parts[:3], caught, parts[3], "-"]


def test_a_falling_level_is_told(ordinary, capsys):
    for number, are in ((1, "1 norm is"), (1234, "1,234 norms are")):
        print_report(ordinary | {"log": ordinary["log"] | {"num_falling": number}})
        told = f"- {are} above 2x the local median because the level falls, and no outliers"
        assert told in capsys.readouterr().out.splitlines()
    print_report(ordinary)
    assert "falls" not in capsys.readouterr().out


def test_text_is_no_markup(ordinary, capsys):
    names = ["[red]x[/red]", "[/]", "a:key:norm:100:"]
    rules_ = [one | {"rule": name} for one, name in zip(ordinary["rules"], names, strict=True)]
    odd = {"name": "[b]", "column": "[bold]y[/]:warning:", "format": "[/]", "notes": ["[link=x]z", ":+1:"]}
    flags = ["[blink]w[/blink]", "[/nothing]", ":boom:"]
    print_report({"log": ordinary["log"] | odd, "rules": rules_, "flags": flags})
    shown = capsys.readouterr().out
    assert shown.startswith("[b], [/]: 400 norms under '[bold]y[/]:warning:', steps 0 to 399")
    assert names in cells(shown)
    assert "Largest spikes, and what [red]x[/red] makes of them" in shown
    for line in (*odd["notes"], *flags):
        assert f"- {line}" in shown.splitlines()


@pytest.mark.parametrize("width", [20, 40, 80, 110, 300])
def test_any_width(ordinary, width, capsys, monkeypatch):
    monkeypatch.setattr(_table, "WIDTH", width)
    print_report(ordinary)
    lines = capsys.readouterr().out.splitlines()
    # Sentences may go on as one line; what is drawn keeps to the width.
    assert max(len(line) for line in lines if "──" in line) <= width
    assert any(line.startswith("SpikeScore:") for line in lines)


def test_large_numbers_fit(ordinary, capsys):
    names = ["steps", "fired", "capped", "scaled", "nonfinite", "caught", "outliers", "false_alarms"]
    large = {"longest_run": 1_234_567, "locked_in_from": 1_234_567} | {f"num_{x}": 1_234_567 for x in names}
    print_report(ordinary | {"rules": [one | large for one in ordinary["rules"]], "flags": []})
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert ["fired", *["1,234,567 (100.00%)"] * 3] in cells(shown)
    assert ["outliers that fired", *["1,234,567 of 1,234,567"] * 3] in cells(shown)
    assert max(map(len, shown.splitlines())) <= 110


def test_the_recommendation_as_text(ordinary, capsys):
    settings = {"z_thresh": 2.5, "alpha": 0.9}
    best = Candidate("zclip", settings, 5, 1200, 1300, False)
    other = Candidate("zclip", settings | {"z_thresh": 3.0}, 4, 0, 9, True)
    found = {"best": best._asdict(), "curve": [best._asdict(), other._asdict()], "num_outliers": 6}
    found |= {"num_candidates": 158, "check": "checked [/]", "doubts": ["a doubt"]}
    print_report(ordinary | {"recommend": found})
    shown = cells(capsys.readouterr().out)
    start = shown.index(["Best of 158 candidates: zclip(z_thresh=2.5, alpha=0.9)"])
    assert start == 2  # after the log and before the rules
    assert shown[start + 1 : start + 6] == [
        [f"- criterion: {CRITERION}"],
        ["- checked [/]"],
        ["- a doubt"],
        ["The trade-off along z_thresh"],
        ["z_thresh", "outliers that fired", "fired below 1.3x", "fired", "locks in"],
    ]
    assert shown[start + 7 : start + 9] == [
        ["2.5", "5 of 6", "1,200", "1,300", "no"],
        ["3", "4 of 6", "0", "9", "yes"],
    ]
    assert shown[start + 9 : start + 11] == [["Beside the defaults"], list(DEFAULT)]
