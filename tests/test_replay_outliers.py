"""What is an outlier in hindsight, held against loops."""

import numpy as np
import pytest

from tests.recordings import INF, NAN, falling, median_by_hand, noise, outliers_by_hand, recorded, spiky
from zclip_jax import rules
from zclip_jax.replay import replay
from zclip_jax.replay._outliers import Hindsight, is_finite, local_median, look_back, spike_score
from zclip_jax.replay._report import describe_log

pytestmark = pytest.mark.usefixtures("compiled_once")


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
