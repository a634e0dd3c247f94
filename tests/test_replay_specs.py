"""Rules by name, with settings and grids, as one writes them on a command line."""

import inspect
import re

import numpy as np
import pytest

from tests.recordings import INF, spiky
from zclip_jax import rules
from zclip_jax.replay import replay
from zclip_jax.replay._specs import PRESETS, make_spec, parse_grid, parse_spec, parse_value, rule_names

pytestmark = pytest.mark.usefixtures("compiled_once")


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
    assert {"at_most", "bounded", "in_log_space", "loss_aware"} == {
        n for n in rules.__all__ if n.islower()
    } - set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_the_rule_and_of_the_preset(name):
    inner, cap = PRESETS.get(name, (name, None))
    parameters = inspect.signature(getattr(rules, inner)).parameters
    given = {"max_norm": 2.0} if name == "fixed" else {}
    spec = make_spec("as logged", name, given)
    assert (spec.label, spec.name) == ("as logged", name)
    assert spec.settings == {key: p.default for key, p in parameters.items()} | given | {
        "max_grad_norm": cap,
        "space": "linear",
    }


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
            "level has no setting 'z_thresh'; it has multiple, alpha, patience, num_std, max_grad_norm, space",
        ),
        ("fixed:=1", "fixed has no setting ''; it has max_norm, max_grad_norm, space"),
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
            ([pair], f"a sweep is written name=number,number,..., got {pair!r}; compare rules for the rest")
            for pair in ("z_thresh", "z_thresh=", "z_thresh=,", "z_thresh=a", "patience=none,5")
        ),
        (["alpha=1", " alpha=2"], "alpha is given twice in a sweep: write alpha=number,number,..."),
        (["alpha=0.9"], "fixed has no setting 'alpha'; it has max_norm, max_grad_norm, space"),
    ],
)
def test_what_is_no_grid(pairs, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_grid(pairs, parse_spec("fixed:max_norm=1"))
