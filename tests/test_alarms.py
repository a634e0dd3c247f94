"""Alarms: their conditions against loops, the same live and over a whole log."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recordings import INF, NAN, about, flags, noise, recorded
from zclip_jax import clip_by_rule, metrics, rules
from zclip_jax._alarms import ALARMS
from zclip_jax.monitor import Alarm, Monitor
from zclip_jax.monitor._bell import Bell
from zclip_jax.replay import replay

NAMES = {alarm.name: alarm for alarm in ALARMS}


def held_by_hand(name, rows, i):
    """Whether an alarm holds at row `i` of a list of mappings."""
    last = rows[: i + 1]
    if name == "clipping":
        return i >= 99 and sum(row["capped"] or row["bound"] for row in last[-100:]) > 50
    if name == "nonfinite":
        return i >= 9 and not any(np.isfinite(row["grad_norm"]) for row in last[-10:])
    if name == "spikes":
        return i >= 9 and all(row["fired"] for row in last[-10:])
    return rows[i]["ratio_rise"] >= 3 if name == "ratio" else rows[i]["alarm"]


@st.composite
def logs(draw):
    """Rows in stretches, in each of which flags are up at a rate of their own."""
    random, rows = np.random.default_rng(draw(st.integers(0, 2**32))), []
    for _ in range(draw(st.integers(1, 5))):
        rates = [draw(st.sampled_from([0, 0.02, 0.5, 0.9, 1])) for _ in range(5)]
        for _ in range(draw(st.integers(1, 90))):
            up = random.random(5) < rates
            rows.append(
                {
                    "fired": bool(up[0]),
                    "bound": bool(up[1]),
                    "capped": bool(up[2]),
                    "alarm": bool(up[3]),
                    "grad_norm": random.choice([NAN, INF]) if up[4] else 1.0,
                    "ratio_rise": 10 ** random.normal(),
                }
            )
    return [{"step": step + 1} | row for step, row in enumerate(rows)]


@given(logs())
def test_conditions_are_those_of_a_loop(rows):
    columns = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
    for name, alarm in NAMES.items():
        held = alarm.holds(columns)
        assert held.tolist() == [held_by_hand(name, rows, i) for i in range(len(rows))]
        assert all(alarm.say({k: x[: i + 1] for k, x in columns.items()}) for i in np.flatnonzero(held)[:3])


def live(rows, cooldown=1, **numbers):
    """What a `Bell` finds, as pairs of the step and the alarm's name."""
    bell, found = Bell(ALARMS, cooldown), []
    for row in rows:
        place = {"update": row["step"], "step": row["step"], "attempt": 0}
        found += bell.add(place | {f"zclip/{name}": x for name, x in row.items() if name != "step"} | numbers)
    return found


@given(logs(), st.integers(1, 150))
def test_live_rows_raise_what_the_whole_log_does_but_for_the_cooldown(rows, cooldown):
    columns = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
    held = {name: alarm.holds(columns) for name, alarm in NAMES.items()}
    expected, silent_until = [], {}
    for i, row in enumerate(rows):
        for name in NAMES:
            if held[name][i] and i >= silent_until.get(name, 0):
                expected.append((row["step"], name))
                silent_until[name] = i + cooldown
    assert [(finding["step"], finding["alarm"]) for finding in live(rows, cooldown)] == expected


QUIET = {
    "fired": False,
    "bound": False,
    "capped": False,
    "alarm": False,
    "grad_norm": 1.0,
    "ratio_rise": 1.0,
}


def run(*stretches):
    """Rows of so many steps each, with something else than usual."""
    rows = [row for steps, changed in stretches for row in [QUIET | changed] * steps]
    return [{"step": step + 1} | row for step, row in enumerate(rows)]


def test_messages():
    def said(*stretches):
        return [(finding["step"], finding["message"]) for finding in live(run(*stretches), 10_000)]

    capped, bound = {"capped": True}, {"bound": True}
    cap = "51 of the last 100 steps were clipped: the cap is acting as a learning rate"
    assert said((60, {}), (60, capped)) == [(111, cap)]
    assert said((60, {}), (60, bound)) == [(111, cap.replace("the cap", "the rule"))]
    assert said((100, capped)) == [
        (
            100,
            "100 of the last 100 steps were clipped: the cap is acting as a learning rate, and SGD may stop learning",
        )
    ]
    assert said((5, {}), (30, {"grad_norm": INF})) == [(15, "no finite norm for 10 steps")]
    runs = "in one run of spikes since step 6: a new level, or a run that diverges"
    assert said((5, {}), (30, {"fired": True})) == [(15, runs)]
    assert said((5, {}), (1, {"ratio_rise": 3.0})) == [
        (6, "the update-to-weight ratio is 3x its level: the loss may follow soon")
    ]
    assert said((5, {}), (1, {"alarm": True})) == [
        (6, "as many steps in a row were skipped as skip_by_rule allows: training stands still")
    ]
    assert said((99, capped | {"ratio_rise": 2.99})) == []


def test_a_long_run_of_spikes_began_at_its_step_or_earlier():
    found = live(run((5, {}), (300, {"fired": True})), 150)
    assert [finding["step"] for finding in found] == [15, 165]
    assert "since step 6:" in found[0]["message"]
    assert "since step 66 or earlier:" in found[1]["message"]


def test_rows_apart_are_logged_steps():
    rows = [row | {"step": 10 * row["step"]} for row in run((60, {}), (60, {"capped": True}))]
    assert "51 of the last 100 logged steps" in live(rows, 10_000)[0]["message"]


def test_each_clip_and_each_watch_has_alarms_of_its_own():
    bell, found = Bell(ALARMS, 1000), []
    for step in range(1, 121):
        row = {"update": step, "step": step, "attempt": 0}
        row |= {
            "zclip/a/capped": True,
            "zclip/a/bound": False,
            "zclip/b/capped": False,
            "zclip/b/bound": False,
        }
        row |= {"watch/updates/ratio_rise": 5.0 if step == 7 else 1.0, "loss": 3.0}
        found += [(step, finding["message"]) for finding in bell.add(row)]
    (ratio_step, ratio), (clip_step, clip) = found
    assert (ratio_step, clip_step) == (7, 100)
    assert ratio.startswith("watch/updates: the update-to-weight ratio is 5x")
    assert clip.startswith("zclip/a: 100 of the last 100 steps")


@pytest.mark.parametrize("clipped", [False, True])
def test_a_watch_on_gradients_stands_in_for_a_clip(clipped):
    bell, found = Bell(ALARMS, 1000), []
    for step in range(1, 20):
        row = {
            "update": step,
            "step": step,
            "attempt": 0,
            "watch/grads/norm": NAN,
            "watch/grads/fired": False,
        }
        found += bell.add(row | ({"zclip/grad_norm": NAN, "zclip/fired": False} if clipped else {}))
    assert [finding["message"] for finding in found] == ["no finite norm for 10 steps"]


def test_groups_count_by_their_share():
    groups = {"zclip/fired": np.zeros(4, bool), "zclip/bound": np.zeros(4, bool)}
    for capped, expected in ((1, []), (2, []), (3, [100])):
        bell = Bell(ALARMS, 1000)
        row = groups | {
            "zclip/capped": np.arange(4) < capped,
            "zclip/grad_norm": np.asarray([NAN, 1, 1, 1.0]),
        }
        found = [bell.add({"update": i, "step": i, "attempt": 0} | row) for i in range(1, 101)]
        assert [finding["step"] for each in found for finding in each] == expected
    bell = Bell(ALARMS, 1000)
    broken = {"zclip/grad_norm": np.full(4, NAN)}
    found = [bell.add({"update": i, "step": i, "attempt": 0} | broken) for i in range(1, 11)]
    assert [finding["alarm"] for each in found for finding in each] == ["nonfinite"]


def test_a_rewind_takes_rows_back():
    found = []
    with Monitor(on_alarm=found.append) as monitor:
        for step in range(1, 10):
            monitor.log(step, {"zclip/grad_norm": NAN})
        monitor.rewind(4)
        for step in range(5, 12):
            monitor.log(step, {"zclip/grad_norm": NAN})
    assert [(x["update"], x["step"], x["attempt"]) for x in found] == [(15, 10, 1)]


def test_findings_are_logged_and_given_to_the_callback(caplog):
    hot = Alarm("hot", ("loss",), 1, lambda rows: rows["loss"] > 9, lambda rows: "the loss is above 9")
    found = []
    with (
        caplog.at_level(logging.WARNING, "zclip_jax.monitor"),
        Monitor(alarms=[hot], cooldown=3, on_alarm=found.append) as monitor,
    ):
        for step in range(1, 7):
            monitor.log(step, {"loss": jnp.float32(10 if step > 1 else 8)})
    expected = {"attempt": 0, "alarm": "hot", "message": "the loss is above 9"}
    assert found == [{"update": step, "step": step} | expected for step in (2, 5)]
    assert caplog.messages == [f"step {step}: the loss is above 9" for step in (2, 5)]


def test_an_alarm_that_fails_stops_nothing(caplog):
    broken = Alarm("broken", ("loss",), 1, lambda rows: rows["lost"], lambda rows: "")
    rows, found = [], []
    with Monitor(alarms=[broken, *ALARMS], on_row=rows.append, on_alarm=found.append) as monitor:
        for step in range(1, 4):
            monitor.log(step, {"loss": 3.0, "alarm": True})
    assert len(rows) == 3
    assert [finding["alarm"] for finding in found] == ["skips"]
    assert caplog.messages[0] == "the alarm 'broken' failed, and is off from now on"
    assert len(caplog.messages) == 2


# Over a recorded log


@pytest.mark.usefixtures("compiled_once")
def test_a_replay_raises_them_too():
    low, high = np.full(100, 0.9), np.full(100, 1.2)
    text = "fixed:max_norm=100,max_grad_norm=1"
    assert about("alarm", flags(text, recorded(np.r_[low, high], steps=np.arange(1, 201)))) == [
        "alarm at step 151: 51 of the last 100 steps were clipped: the cap is acting as a learning rate; "
        "so at 50 of 200 steps"
    ]
    assert about("alarm", flags(text, recorded(np.r_[low, high[:50]]))) == []
    broken = np.r_[0.3 * noise(100), np.full(10, 1e25), 0.3 * noise(100)]
    assert about("alarm", flags("levelclip", recorded(broken))) == [
        "alarm at step 109: no finite norm for 10 steps"
    ]
    shift = np.r_[noise(100), 5 * noise(200, seed=1)]
    fired = np.asarray(replay(rules.zscore(), shift).outcomes.fired)
    times = sum(held_by_hand("spikes", [{"fired": x} for x in fired], i) for i in range(shift.size))
    assert about("alarm", flags("zscore:max_grad_norm=none", recorded(shift))) == [
        "alarm at step 109: in one run of spikes since step 100: a new level, or a run that diverges; "
        f"so at {times} of 300 steps"
    ]


def test_a_live_run_raises_what_its_replay_does():
    """The columns of `metrics` and those of a replay have the same names."""
    norms = np.r_[np.full(12, 1.0), np.full(15, 8.0)]
    tx, found = clip_by_rule(rules.fixed(2.0)), []
    state = tx.init(jnp.zeros(1))
    with Monitor(on_alarm=found.append) as monitor:
        for step, norm in enumerate(norms):
            _, state = tx.update(jnp.asarray([norm]), state)
            monitor.log(step, metrics(state))
    message = "in one run of spikes since step 12: a new level, or a run that diverges"
    assert [(finding["step"], finding["message"]) for finding in found] == [(21, message)]
    assert about("alarm", flags("fixed:max_norm=2", recorded(norms))) == [
        f"alarm at step 21: {message}; so at 6 of 27 steps"
    ]
