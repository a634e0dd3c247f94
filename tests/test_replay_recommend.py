"""Settings chosen on recorded norms."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests.recordings import INF, NAN, median_by_hand, noise, outliers_by_hand, spiky
from zclip_jax.replay import _recommend, recommend, replay
from zclip_jax.replay._recommend import GRIDS, Candidate
from zclip_jax.replay._specs import parse_spec

pytestmark = pytest.mark.usefixtures("compiled_once")


UNCAPPED = {"max_grad_norm": None}  # since the cap plays no part
NUM_CANDIDATES = 7 * 4 * 5 + 6 * 3 * 3


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
        assert (fired & ~outlier).sum(-1).max() < 0.1 * norms.size
        for setting, row in zip(settings, fired, strict=True):
            changed = sum(grid[name][0] != value for name, value in setting.items())
            scores.append((np.sum(outlier & ~row), np.sum(low & row), changed, preset, setting))
    best = min(scores, key=lambda score: score[:3])
    assert (found.best.preset, found.best.settings) == (best[3], best[4] | UNCAPPED)
    assert (found.num_outliers - found.best.num_caught, found.best.num_false_alarms) == best[:2]


def test_to_miss_is_worse_than_to_cry_wolf(monkeypatch):
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (6.0, 3.0, 2.0)}})
    # What is caught in the noisy half costs alarms in the quiet one.
    norms = np.r_[noise(700, spread=0.05), noise(700, seed=1, spread=0.3)]
    by_threshold = {z: scored(f"zclip:z_thresh={z}", norms) for z in (2.0, 3.0, 6.0)}
    assert by_threshold[6.0][0] < by_threshold[3.0][0] < by_threshold[2.0][0]
    assert by_threshold[6.0][1] < by_threshold[3.0][1] < by_threshold[2.0][1]
    found = recommend(norms)
    assert found.best == Candidate("zclip", {"z_thresh": 2.0} | UNCAPPED, *by_threshold[2.0], False)
    assert [one[2:5] for one in found.curve] == list(by_threshold.values())


def far_spikes():
    """In next to no noise, of which every candidate catches all and none cries wolf."""
    norms = 1 + 0.05 * np.random.default_rng(0).uniform(-1, 1, 2000)
    norms[100::100] = 100.0
    return norms


def test_the_default_wins_where_all_are_equal():
    settings = {"z_thresh": 2.5, "min_rel_std": 0.0, "alpha": 0.97} | UNCAPPED
    found = recommend(far_spikes())
    assert found.best == Candidate("zclip", settings, 19, 0, 19, False)
    assert found.best.rule == "zclip:z_thresh=2.5,min_rel_std=0,alpha=0.97,max_grad_norm=none"
    assert found.best.call == "zclip(z_thresh=2.5, min_rel_std=0, alpha=0.97, max_grad_norm=None)"
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
    assert recommend(norms).best.settings == {"z_thresh": 2.5, "alpha": 0.97, "min_rel_std": 0.5} | UNCAPPED
    # It comes last, and changes none.
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": grid, "levelclip": {"multiple": (1.65, 1.85)}})
    assert recommend(norms).best.rule == "levelclip:multiple=1.65,max_grad_norm=none"


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
    assert (found.best.rule, found.best.locked_in) == (
        "zclip:z_thresh=2.5,patience=25,max_grad_norm=none",
        False,
    )
    # Choosing on the first half knows nothing of the second, not even which candidates will lock in there.
    assert found.check.startswith(
        "chosen on the first half alone: zclip:z_thresh=2.5,patience=100000,max_grad_norm=none, which"
    )
    monkeypatch.setattr(_recommend, "GRIDS", {"zclip": {"z_thresh": (2.5, 3.0), "patience": (100_000,)}})
    found = recommend(norms)
    assert found.best.locked_in is True
    assert found.doubts == (
        "every candidate locks in: the level of this run shifts by more than they can follow",
        "the choice fires on 21% of the steps: so many are no outliers, and clipping them changes the run",
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
        ([], "norms must have a finite one above zero among them, got 0 without"),
        ([NAN, INF], "norms must have a finite one above zero among them, got 2 without"),
        (np.zeros(2000), "norms must have a finite one above zero among them, got 2000 without"),
        ([-1.0, -0.0], "norms must have a finite one above zero among them, got 2 without"),
        ([1e-45, 0.0, NAN], "norms must have a finite one above zero among them, got 3 without"),
        (np.full(100, 1e25), "norms must have a finite one above zero among them, got 100 without"),
    ],
)
def test_norms_that_nothing_can_be_chosen_on(norms, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        recommend(norms)
