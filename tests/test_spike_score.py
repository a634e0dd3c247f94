"""SpikeScore as OLMo-core counts it, held to a loop over a window of values."""

import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zclip_jax._spike_score import find_spikes, spike_score


def spikes_by_hand(values):
    """Value by value, with the mean and the deviation of a list."""
    window, spikes = deque(maxlen=128), []
    for value in values:
        if not math.isfinite(value):
            spikes.append(False)
            continue
        spike = False
        if len(window) == 128:
            mean = math.fsum(window) / 128
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in window) / 128)
            spike = std >= 1e-10 and value > mean + 6 * std
        spikes.append(spike)
        window.append(value)
    return spikes


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 700),
    st.sampled_from([0.0, 1e-7, 0.01, 1.0]),
    st.lists(
        st.tuples(
            st.integers(0, 699), st.sampled_from([math.nan, math.inf, -math.inf, 3.5, 9.0, -9.0, 1e9, 1e100])
        ),
        max_size=8,
    ),
)
def test_spikes_are_those_of_a_loop(seed, steps, spread, odd):
    x = 3.0 + spread * np.random.default_rng(seed).standard_t(4, steps)
    for place, value in odd:
        if place < steps:
            x[place] = value
    assert find_spikes(x).tolist() == spikes_by_hand(x.tolist())


def test_the_score_counts_steps_on_which_either_series_has_a_spike():
    rng = np.random.default_rng(0)
    loss, norm = rng.normal(3.0, 0.1, 1000), rng.normal(1.0, 0.1, 1000)
    loss[[300, 500]] = norm[[500, 700]] = 20.0
    norm[900] = math.nan
    assert spike_score(loss, norm) == (3 / 1000, None)
    assert spike_score(loss) == (2 / 1000, None)
    assert spike_score(loss, norm)[0] == np.mean(np.logical_or(spikes_by_hand(loss), spikes_by_hand(norm)))


def test_the_rolling_score_is_of_the_last_10_000_steps():
    x = np.random.default_rng(1).normal(1.0, 0.1, 12_000)
    x[[500, 5000, 11_000]] = 9.0
    assert spike_score(x) == (3 / 12_000, 2 / 10_000)
    assert spike_score(x[:9_999]).last is None


@pytest.mark.parametrize(("steps", "total"), [(0, None), (127, None), (128, 0.0), (129, 1 / 129)])
def test_a_short_run(steps, total):
    """The first 128 can be no spikes, and count among the steps all the same, as in OLMo-core."""
    x = np.random.default_rng(2).normal(1.0, 0.1, steps)
    x[-1:] = 50.0
    assert spike_score(x).total == total


def test_only_upward_and_not_where_nothing_varies():
    x = np.random.default_rng(3).normal(1.0, 0.1, 400)
    x[200] = -50.0
    assert spike_score(x).total == 0
    assert spike_score(np.r_[np.full(200, 0.1), 5.0]).total == 0


def test_a_giant_blinds_only_the_window_that_it_is_in():
    x = np.random.default_rng(4).normal(1.0, 0.1, 600)
    x[[200, 250, 400]] = [1e300, 9.0, 9.0]
    assert np.flatnonzero(find_spikes(x)).tolist() == [200, 400]


def test_a_value_that_is_not_finite_hides_no_spike():
    """In OLMo-core a NaN in the window makes every comparison false for 128 steps."""
    x = np.random.default_rng(5).normal(1.0, 0.1, 400)
    x[[200, 210, 220]] = [math.nan, math.inf, 9.0]
    assert np.flatnonzero(find_spikes(x)).tolist() == [220]
