"""The detector of spikes against a brute-force one, and what it calls benign, malignant and neither."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zclip_jax.recovery import RecoveryConfig
from zclip_jax.recovery._detector import Detector

CONFIG = RecoveryConfig()


def oracle(config, losses):
    """The verdicts, from all losses so far at each step."""
    absorbed, verdicts, opened = [], [], None
    for _i, loss in enumerate(losses):
        window = np.array(absorbed[-config.window :])
        limit = np.inf
        if len(window) >= config.warmup:
            median = np.median(window)
            mad = np.median(np.abs(window - median))
            limit = median + max(config.num_mads * mad, config.min_rise * abs(median))
        inside = [*([] if opened is None else opened), bool(np.isfinite(loss) and loss <= limit)]
        if inside[-1]:
            absorbed.append(loss)
        if all(inside) and opened is None:
            verdicts.append("quiet")
        elif len(inside) >= config.settle and all(inside[-config.settle :]):
            opened = None
            verdicts.append("benign")
        elif not np.isfinite(loss) or len(inside) - 1 >= config.grace:
            return [*verdicts, "malignant"]
        else:
            opened = inside
            verdicts.append("suspicious")
    return verdicts


def verdicts_of(detector, losses):
    """The verdicts up to the first malignant one."""
    verdicts = []
    for loss in losses:
        verdicts.append(detector.observe(loss))
        if verdicts[-1] == "malignant":
            break
    return verdicts


@st.composite
def configs(draw):
    grace = draw(st.integers(1, 12))
    window = draw(st.integers(1, 20))
    return {
        "window": window,
        "warmup": draw(st.integers(1, window)),
        "num_mads": draw(st.sampled_from([0.5, 3.0, 9.0])),
        "min_rise": draw(st.sampled_from([0.0, 0.05, 0.5])),
        "grace": grace,
        "settle": draw(st.integers(1, grace)),
        "skip_before": 0,
    }


LOSSES = st.lists(
    st.one_of(
        st.floats(-2, 2, width=16),
        st.sampled_from([1.0, 1.5, 3.0, 50.0]),
        st.floats(0.875, 1.125, width=16),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(configs(), LOSSES, st.sampled_from([None, math.nan, math.inf, -math.inf]))
def test_the_verdicts_are_those_of_brute_force(config, losses, last):
    config = RecoveryConfig(**config)
    losses = losses if last is None else [*losses, last]
    assert verdicts_of(Detector(config), losses) == oracle(config, losses)


@settings(max_examples=20, deadline=None)
@given(configs(), LOSSES)
def test_a_reload_at_every_step_changes_nothing(config, losses):
    config = RecoveryConfig(**config)
    detector, reloaded = Detector(config), Detector(config)
    for loss in losses:
        assert detector.observe(loss) == reloaded.observe(loss)
        state = json.loads(json.dumps(reloaded.state_dict(), allow_nan=False))
        reloaded = Detector.load(config, state)
        assert reloaded.state_dict() == detector.state_dict()


def noisy(level, seed=0):
    """Losses with normal noise of 0.02 around `level`, one a step."""
    level = np.asarray(level, float)
    return (level + 0.02 * np.random.default_rng(seed).normal(size=level.shape)).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "level",
    [
        2 + 8 * np.exp(-np.arange(3000) / 300),  # a fast descent, then a slow one
        np.linspace(3, 2, 3000),
        np.where(np.arange(3000) < 1500, 3.0, 2.0),  # a step down
        np.zeros(3000),
        -np.linspace(2, 3, 3000),
    ],
)
def test_a_descent_is_no_spike(level, seed):
    assert set(verdicts_of(Detector(CONFIG), noisy(level, seed))) == {"quiet"}


@pytest.mark.parametrize("length", [1, 2, 10, 29])
def test_a_spike_that_is_back_within_grace_is_benign(length):
    level = np.full(400, 2.0)
    level[200 : 200 + length] = 5.0
    verdicts = verdicts_of(Detector(CONFIG), noisy(level))
    assert verdicts.count("benign") == 1
    assert verdicts[200 : 200 + length] == ["suspicious"] * length
    assert verdicts[199 + length + CONFIG.settle] == "benign"


@pytest.mark.parametrize("length", [31, 40, 200])
def test_a_spike_that_is_not_back_within_grace_is_malignant(length):
    level = np.full(600, 2.0)
    level[200 : 200 + length] = 2.5
    verdicts = verdicts_of(Detector(CONFIG), noisy(level))
    assert len(verdicts) == 200 + CONFIG.grace + 1
    assert verdicts[-1] == "malignant"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seen", [0, 5, 300])
def test_a_loss_that_is_not_finite_is_malignant_at_once(bad, seen):
    assert verdicts_of(Detector(CONFIG), [*noisy(np.full(seen, 2.0)), bad])[-1] == "malignant"


def test_a_plateau_of_benign_spikes_does_not_raise_its_own_limit():
    level = np.full(3000, 2.0)
    for start in range(300, 3000, 20):
        level[start : start + 15] = 4.0
    detector = Detector(CONFIG)
    verdicts = verdicts_of(detector, noisy(level))
    assert verdicts.count("benign") == 135
    assert detector.limits[2] < 2.3


def test_the_first_losses_are_judged_only_for_being_finite():
    losses = [10.0, *[1.0] * 20, 100.0, *[1.0] * 8, 100.0, 1e9]
    assert set(verdicts_of(Detector(CONFIG), losses)) == {"quiet"}


def test_losses_without_noise_may_rise_by_a_share_of_the_median():
    detector = Detector(replace(CONFIG, min_rise=0.1))
    assert set(verdicts_of(detector, [2.0] * 50)) == {"quiet"}
    assert detector.observe(2.19) == "quiet"
    assert detector.observe(2.21) == "suspicious"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must be an integer >= 1, got 0"),
        ({"warmup": 200}, "warmup must be an integer of at most window = 128, got 200"),
        ({"num_mads": math.inf}, "num_mads must be a finite number > 0, got inf"),
        ({"num_mads": -1.0}, "num_mads must be a finite number > 0, got -1.0"),
        ({"min_rise": math.nan}, "min_rise must be a finite number >= 0, got nan"),
        ({"grace": 0}, "grace must be an integer >= 1, got 0"),
        ({"settle": 33}, "settle must be an integer of at most grace = 32, got 33"),
        ({"skip_before": -1}, "skip_before must be an integer >= 0, got -1"),
        ({"skip_before": 33}, "skip_before must be an integer of at most grace = 32, got 33"),
        ({"max_rewinds": -3}, "max_rewinds must be an integer >= 1, got -3"),
        (
            {"mitigations": (("lr", -1.0),)},
            "the factor of mitigation 'lr' must be a finite number >= 0, got -1.0",
        ),
        ({"mitigations": (("", 0.5),)}, "mitigations must be pairs (kind, factor)"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        RecoveryConfig(**arguments)
