"""What stands out about a run and a rule, in sentences."""

import numpy as np
import pytest

from tests.recordings import INF, NAN, about, falling, flags, noise, recorded, spiky

pytestmark = pytest.mark.usefixtures("compiled_once")


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
        ([3.0] * 400, 400),  # not one is below it
    ],
)
def test_norms_logged_after_clipping(largest, pile):
    norms = np.random.default_rng(0).permutation(np.r_[noise(400 - len(largest)), largest])
    which = "norms are 3" if len(largest) == 400 else "norms are 3, the largest"
    told = f"{which}: they look logged after clipping, which hides what there was to clip"
    found = about("after clipping", flags("fixed:max_norm=9", recorded(norms)))
    every = "all " if len(largest) == 400 else ""
    assert found == ([f"{every}{pile} {told}"] if pile else [])


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
