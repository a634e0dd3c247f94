"""What a loop may do with `Recovery`, and what it is told when it does something else."""

import json
import math

import numpy as np
import pytest

from tests.recovery_world import World, train
from tests.test_recovery_policy import SMALL
from zclip_jax.recovery import (
    Continue,
    ExitCode,
    Mitigation,
    Recovery,
    RecoveryConfig,
    RecoveryLog,
    Rewind,
    SkipRanges,
    Stop,
)


def until_action(recovery, start=1, bad_from=100, **options):
    """Steps with a checkpoint every ten, until an action; the loss is high from step `bad_from` on."""
    for step in range(start, 1000):
        loss = 2.0 + 0.01 * (step % 7) + (3.0 if step >= bad_from else 0.0)
        action = recovery.observe(recovery.update + 1, step, loss, data_index=step - 1, **options)
        if action != Continue():
            return action
        if step % 10 == 0:
            recovery.saved(step, step)
    return None


def test_an_action_must_be_carried_out_before_anything_else():
    recovery = Recovery(SMALL)
    action = until_action(recovery)
    assert (action.to, action.data_index) == (90, 90)
    for call in (
        lambda: recovery.observe(500, 500, 2.0, data_index=1),
        lambda: recovery.saved(108, 108),
    ):
        with pytest.raises(
            ValueError, match=r"the last action, rewind, was not carried out: .*rewound\(action\)"
        ):
            call()
    with pytest.raises(ValueError, match="to must be at most the action's step 90, got 95"):
        recovery.rewound(action, to=95)
    with pytest.raises(ValueError, match="action must be the Rewind that observe or judged returned last"):
        recovery.rewound(Rewind(90, 90, SkipRanges(), None, ""))
    recovery.rewound(action)
    with pytest.raises(ValueError, match="action must be the Rewind that observe or judged returned last"):
        recovery.rewound(action)
    assert recovery.observe(500, 91, 2.0, data_index=90) == Continue()


def test_order_of_steps():
    recovery = Recovery(SMALL)
    recovery.observe(0, 5, 2.0, data_index=4)
    with pytest.raises(ValueError, match="update must rise from call to call, got 0 after 0"):
        recovery.observe(0, 6, 2.0, data_index=5)
    with pytest.raises(ValueError, match="step must rise from call to call, got 5 after 5"):
        recovery.observe(1, 5, 2.0, data_index=5)
    with pytest.raises(ValueError, match="data_index must be at least 0, got -1"):
        recovery.observe(1, 6, 2.0, data_index=-1)
    with pytest.raises(ValueError, match="step must be the one that was observed last, 5, got 4"):
        recovery.saved(4, 4)


def test_numbers_of_numpy_will_do():
    recovery = Recovery(SMALL)
    for step in range(1, 30):
        recovery.observe(
            np.int64(step),
            np.int32(step),
            np.float32(2),
            data_index=np.int64(step),
            nonfinite=np.bool_(False),
        )
    recovery.saved(np.int64(29), np.int64(30), kept=np.array([29]))
    action = recovery.observe(30, 30, np.float32(2), data_index=30, nonfinite=np.bool_(True))
    assert json.loads(json.dumps(recovery.state_dict()))["step"] == 30
    assert action.evidence["nonfinite"] is True


@pytest.mark.parametrize("options", [{"nonfinite": True}, {"alarms": ["loss_diverges"]}])
def test_an_alarm_and_a_parameter_that_is_not_finite_count_at_once(options):
    recovery = Recovery(SMALL)
    assert until_action(recovery, bad_from=1000) is None
    action = recovery.observe(2000, 1000, 2.0, data_index=999, **options)
    assert isinstance(action, Rewind)
    assert 999 in action.skip
    assert action.evidence["alarms"] == options.get("alarms", [])


def test_a_rewind_drops_what_was_learnt_since():
    recovery, other = Recovery(SMALL), Recovery(SMALL)
    recovery.rewound(until_action(recovery))
    for step in range(1, 91):
        assert other.observe(step, step, 2.0 + 0.01 * (step % 7), data_index=step - 1) == Continue()
    mine, theirs = recovery.state_dict(), other.state_dict()
    assert mine["detector"] == theirs["detector"]
    assert mine["trail"] == theirs["trail"]
    assert recovery.good_steps == (10, 20, 30, 40, 50, 60, 70, 80, 90)


def test_a_restore_that_fell_back_is_where_training_goes_on():
    recovery = Recovery(SMALL)
    action = until_action(recovery)
    recovery.rewound(action, to=70)
    assert recovery.good_steps[-1] == 70
    assert recovery.observe(500, 71, 2.0, data_index=70) == Continue()


def test_a_checkpoint_that_is_gone_is_not_chosen():
    recovery = Recovery(SMALL)
    for step in range(1, 100):
        recovery.observe(step, step, 2.0 + 0.01 * (step % 7), data_index=step - 1)
        if step % 10 == 0:
            recovery.saved(step, step, kept=[20, 50])  # and the one just saved
    assert recovery.good_steps == (20, 50, 90)
    recovery.observe(100, 100, 2.0, data_index=99)
    recovery.saved(100, 100, kept=[20, 50])
    assert until_action(recovery, start=101).to == 50


def test_a_checkpoint_is_good_once_grace_steps_have_passed_without_an_open_spike():
    recovery = Recovery(SMALL)
    assert until_action(recovery, bad_from=10_000, start=900) is None
    assert recovery.good_steps[-1] == 990
    recovery.saved(999, 999)
    for step in range(1000, 1007):
        recovery.observe(step + 1000, step, 2.0, data_index=step)
    assert recovery.good_steps[-1] == 990
    recovery.observe(2007, 1007, 9.0, data_index=1007)
    assert recovery.good_steps[-1] == 990
    for step in (1008, 1009):
        recovery.observe(step + 1000, step, 2.0, data_index=step)
    assert recovery.good_steps[-1] == 999


def test_without_any_checkpoint_there_is_only_the_stop():
    recovery = Recovery(SMALL)
    for step in range(1, 40):
        recovery.observe(step, step, 2.0, data_index=step)
    action = recovery.observe(40, 40, math.nan, data_index=40)
    assert isinstance(action, Stop)
    assert (action.cause, action.exit_code, action.to) == ("unknown", ExitCode.NEEDS_PERSON, None)
    assert "no checkpoint" in action.report
    with pytest.raises(ValueError, match="the last action, stop, was not obeyed"):
        recovery.observe(41, 41, 2.0, data_index=41)


def test_the_skip_never_reaches_back_behind_the_checkpoint():
    recovery = Recovery(SMALL)
    recovery.saved(0, 0)
    recovery.observe(1, 1, 2.0, data_index=0)
    recovery.saved(1, 1)
    action = recovery.observe(2, 2, math.nan, data_index=1)
    assert (action.to, str(action.skip)) == (0, "[0, 8)")


def test_data_indices_that_begin_anew_each_epoch_break_nothing():
    recovery, index = Recovery(SMALL), 0
    for step in range(1, 58):
        recovery.observe(step, step, 2.0, data_index=index)
        index = (index + 1) % 16
        if step % 10 == 0:
            recovery.saved(step, index)
    action = recovery.observe(58, 58, math.nan, data_index=0)
    assert (action.to, action.data_index) == (40, 8)


def test_judged_takes_only_the_action_that_waits_and_the_three_verdicts():
    recovery = Recovery(SMALL)
    action = until_action(recovery)
    with pytest.raises(
        ValueError, match="verdict must be one of 'not reproduced', 'data', 'state', got 'cosmic'"
    ):
        recovery.judged(action, "cosmic")
    with pytest.raises(ValueError, match="action must be the Rewind that observe or judged returned last"):
        recovery.judged(Continue(), "data")
    again = recovery.judged(action, "not reproduced")
    assert (again.to, len(again.skip)) == (90, 0)
    data = recovery.judged(again, "data")  # a second opinion replaces the first
    assert data.skip == action.skip
    recovery.rewound(data)


def test_a_verdict_of_not_reproduced_is_believed_once_for_the_same_data():
    recovery = Recovery(SMALL)
    first = recovery.judged(until_action(recovery), "not reproduced")
    recovery.rewound(first)
    second = until_action(recovery, start=91)
    second = recovery.judged(second, "not reproduced")
    assert second.name == "rewind"
    assert 99 in second.skip


def test_a_mitigation_expires():
    recovery = Recovery(SMALL)
    mitigations = []
    while True:
        action = until_action(recovery, start=recovery.step + 1)
        if isinstance(action, Stop):
            break
        recovery.rewound(action)
        mitigations.append(recovery.mitigation(recovery.step + 1))
    assert [x and (x.kind, x.factor) for x in mitigations] == [None, None, ("lr", 0.5), ("lr", 0.25)]
    last = mitigations[-1]
    assert last == Mitigation("lr", 0.25, 108 + SMALL.mitigation_steps)
    assert recovery.mitigation(last.until_step) == last
    assert recovery.mitigation(last.until_step + 1) is None


def test_mitigations_of_your_own_are_passed_on():
    config = RecoveryConfig(mitigations=(("routing", 1.0),), warmup=16, grace=8)
    recovery = Recovery(config)
    for _ in range(3):
        action = until_action(recovery, start=recovery.step + 1)
        recovery.rewound(action)
    assert (action.mitigation.kind, action.mitigation.factor) == ("routing", 1.0)


def saved_state(recovery):
    return json.loads(json.dumps(recovery.state_dict(), allow_nan=False))


def test_a_rewind_cut_short_by_a_crash_is_carried_out_first():
    log = []
    recovery = Recovery(SMALL, log.append)
    states = {}
    for step in range(1, 1000):
        loss = 2.0 + 0.01 * (step % 7) + (3.0 if step >= 100 else 0.0)
        action = recovery.observe(step, step, loss, data_index=step - 1)
        if action != Continue():
            break
        if step % 5 == 0:
            states[step] = saved_state(recovery)
            recovery.saved(step, step)
    log = json.loads(json.dumps(log))
    bad = Recovery.load(SMALL, states[105], journal=log)
    assert bad.pending == action == bad.judged(action, "data")
    bad.rewound(bad.pending)
    assert bad.left_out == action.skip
    good = Recovery.load(SMALL, states[90], journal=log)  # all newer ones were retired already
    assert good.pending is None
    assert good.skips == action.skip
    older = Recovery.load(SMALL, states[50], journal=log)
    assert older.pending is None
    assert older.skips == action.skip
    unaware = Recovery.load(SMALL, states[105])
    assert unaware.pending is None
    assert not unaware.skips


def test_after_a_stop_the_run_resumes_at_the_checkpoint_that_is_believed_good():
    run = train(World(hot_from=100), SMALL, 300)
    newest = max(run.disk)
    resumed = Recovery.load(SMALL, run.disk[newest][2], journal=run.log)
    assert newest > run.stop.to
    assert resumed.pending.to == run.stop.to
    assert not resumed.pending.mitigation
    resumed.rewound(resumed.pending)
    assert (
        resumed.observe(5000, run.stop.to + 1, 3.0, data_index=resumed._places.all[-1].data_index)
        == Continue()
    )


def test_a_state_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="state must be what state_dict returned, of version 1, got None"):
        Recovery.load(SMALL, {})


@pytest.mark.parametrize(("every", "recent"), [(1, 1), (3, 2), (1, None), (20, None)])
def test_there_are_good_checkpoints_however_often_is_saved_and_however_few_are_kept(every, recent):
    recovery, disk = Recovery(RecoveryConfig(grace=32)), []
    for step in range(1, 500):
        recovery.observe(step, step, 2.0 + 0.01 * (step % 7), data_index=step - 1)
        if step % every == 0:
            disk.append(step)
            if recent is not None:  # the newest, the newest good one, and the first that is not judged yet
                good = [x for x in disk if x in recovery.good_steps]
                unjudged = [x for x in disk if x not in recovery.good_steps]
                disk = sorted({*disk[-recent:], *good[-1:], *unjudged[:1]})
            recovery.saved(step, step, kept=disk)
            assert len(recovery.state_dict()["places"]) <= 16
        if step > 200:
            assert recovery.good_steps
            assert step - recovery.good_steps[-1] < 2 * (32 + every)
    if recent is None:
        back = [500 - x for x in recovery.good_steps]
        assert back[0] > 400
        assert any(80 < x < 300 for x in back)


def test_a_log_that_can_not_be_written_stops_no_training(tmp_path):
    recovery = Recovery(SMALL, RecoveryLog(tmp_path).append)  # a folder
    with pytest.warns(UserWarning, match="the log of recovery lost its entry 'rewind' of step 108"):
        action = until_action(recovery)
    with pytest.warns(UserWarning, match="lost its entry 'rewound' of step 90"):
        recovery.rewound(action)
    assert recovery.observe(500, 91, 2.0, data_index=90) == Continue()
