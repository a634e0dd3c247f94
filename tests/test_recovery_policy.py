"""Recovery in a simulated run: each fault ends in a bounded number of steps, with the right skips and cause."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recovery_world import World, check_data, train
from zclip_jax.recovery import ExitCode, RecoveryConfig, Retry, SkipRanges

CONFIG = RecoveryConfig()
SMALL = RecoveryConfig(
    window=32,
    warmup=16,
    grace=8,
    settle=2,
    skip_before=3,
    skip_batches=8,
    retry_after=20,
    clear_after=40,
    mitigation_steps=40,
    budget_window=200,
    max_rewinds=12,
    max_replayed=2000,
)
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
VERIFY = pytest.mark.parametrize("verify", [pytest.param(False, marks=pytest.mark.slow), True])


@VERIFY
@SEEDS
def test_a_run_without_faults_is_left_alone(seed, verify):
    run = train(World(seed), CONFIG, 1200, verify=verify)
    assert not run.actions
    assert not run.log
    assert len(run.losses) == 1200
    assert run.recovery.good_steps[-1] == 1160  # the newest that lies `grace` steps back
    check_data(run)


@SEEDS
def test_a_hundred_benign_spikes_cause_no_rewind(seed):
    spikes = {400 + 30 * i: 1.0 + 3.0 * (i % 7) for i in range(100)}
    run = train(World(seed, once=spikes), CONFIG, 3500)
    assert not run.actions
    assert [entry["event"] for entry in run.log] == ["benign"] * 100
    assert len(run.recovery.good_steps) > 5


@pytest.mark.parametrize("bad", [range(500, 501), range(500, 530)])
@VERIFY
@SEEDS
def test_a_short_bad_range_costs_one_rewind_and_is_left_out(seed, verify, bad):
    run = train(World(seed, bad_data=bad), CONFIG, 1200, verify=verify)
    (rewind,) = run.actions
    assert 460 <= rewind.to <= 480
    assert rewind.mitigation is None
    (span,) = rewind.skip.ranges
    assert 492 <= span[0] <= bad[0]
    assert bad[-1] < span[1] <= 540
    assert run.causes == ["data"]
    assert run.stop is None
    assert len(run.losses) < 1200 + 80
    check_data(run)


@pytest.mark.slow
@SEEDS
def test_a_long_bad_range_is_left_out_with_widening_skips_and_no_mitigation(seed):
    run = train(World(seed, bad_data=range(500, 700)), CONFIG, 1500)
    assert len(run.rewinds) == 3
    assert all(action.mitigation is None for action in run.rewinds)
    ((start, stop),) = run.recovery.left_out.ranges
    assert 492 <= start <= 500
    assert 700 <= stop <= 740
    assert run.causes == ["data"]
    check_data(run)


@VERIFY
@SEEDS
def test_a_batch_that_breaks_the_state_a_few_steps_later_is_left_out(seed, verify):
    run = train(World(seed, bad_data=(500,), poison_delay=5), CONFIG, 1200, verify=verify)
    (rewind,) = run.actions
    assert 500 in rewind.skip
    assert len(rewind.skip) < 60
    assert run.causes == ["data"]


@SEEDS
def test_what_a_rerun_does_not_show_is_hardware_and_no_data_are_left_out(seed):
    for event in ("flip", "nan"):
        run = train(World(seed, once={500: event}), CONFIG, 1200, verify=True)
        (rewind,) = run.actions
        assert not rewind.skip
        assert not run.recovery.left_out
        assert run.causes == ["hardware"]
        check_data(run)


@pytest.mark.slow
@SEEDS
def test_a_second_result_that_is_not_reproducible_asks_for_other_devices(seed):
    run = train(World(seed, once={500: "flip", 700: "flip"}), CONFIG, 1200, verify=True)
    assert run.stop.exit_code == ExitCode.RESTART_ELSEWHERE == 16
    assert run.stop.cause == "hardware"
    assert run.stop.to in run.disk
    far = train(World(seed, once={500: "flip", 2000: "flip"}), CONFIG, 2500, verify=True)
    assert far.stop is None
    assert far.causes == ["hardware", "hardware"]


@SEEDS
def test_without_verify_a_one_off_fault_costs_some_batches_and_is_not_called_certain(seed):
    run = train(World(seed, once={500: "flip"}), CONFIG, 1200)
    assert len(run.rewinds) == 1
    assert len(run.recovery.left_out) < 60
    (over,) = [entry for entry in run.log if entry["event"] == "over"]
    assert "likely" in over["because"]
    assert "one-off" in over["because"]


@pytest.mark.slow
@SEEDS
def test_innocent_batches_are_trained_in_the_end(seed):
    run = train(World(seed, once={500: "flip", 700: "flip"}), CONFIG, 1500)
    retries = [action for action in run.actions if isinstance(action, Retry)]
    assert len(run.rewinds) == 2
    assert len(retries) == 2
    assert not run.recovery.left_out
    check_data(run)
    assert run.causes == ["state"]


@pytest.mark.slow
@SEEDS
def test_batches_that_blow_up_again_are_guilty_and_the_others_not(seed):
    world = World(seed, bad_data=(500,), once={700: "flip"})
    run = train(world, CONFIG, 2500)
    assert 500 in run.recovery.left_out
    assert len(run.recovery.left_out) < 60
    assert run.causes == ["data"]
    (failed,) = [x for x in run.rewinds if "second time" in x.reason]
    assert 500 in failed.skip
    check_data(run)


@pytest.mark.slow
@SEEDS
def test_a_state_that_was_bad_before_the_loss_showed_it_is_cured_further_back(seed):
    world = World(seed, once={500: "sick"})
    judged = train(world, CONFIG, 1500, verify=True)
    assert judged.causes == ["state"]
    assert judged.stop is None
    assert not judged.recovery.left_out
    assert judged.rewinds[-1].to < 500
    assert len(judged.rewinds) <= 2
    run = train(world, CONFIG, 2500)
    assert run.causes == ["state"]
    assert run.stop is None
    assert not run.recovery.left_out
    assert run.rewinds[-1].to < 500
    assert run.rewinds[-1].mitigation.kind == "lr"
    check_data(run)


@VERIFY
@SEEDS
def test_what_no_rung_cures_ends_with_a_report_for_a_person(seed, verify):
    run = train(World(seed, hot_from=500), CONFIG, 1500, verify=verify)
    assert run.stop.exit_code == ExitCode.NEEDS_PERSON == 17
    assert run.stop.cause == "architecture"
    for words in ("QK-norm", "learning rate", "numerics", f"step {run.stop.to}: resume there"):
        assert words in run.stop.report
    assert len(run.losses) < 500 + 1500
    assert {action.mitigation.factor for action in run.rewinds if action.mitigation} == {0.5, 0.25}


@pytest.mark.slow
@VERIFY
@SEEDS
def test_a_learning_rate_that_must_stay_low_is_named(seed, verify):
    run = train(World(seed, hot_from=500, hot_lr=0.5), CONFIG, 2500, verify=verify)
    assert run.stop.cause == "learning rate"
    assert "once it was raised again" in run.stop.report


@pytest.mark.slow
@SEEDS
def test_a_learning_rate_that_is_too_high_for_a_while_is_passed_with_the_mitigation(seed):
    run = train(World(seed, hot_from=500, hot_until=900, hot_lr=0.5), CONFIG, 2500)
    assert run.stop is None
    assert run.causes == ["state"]
    assert run.recovery.mitigation(max(run.line)) is None
    check_data(run)


def test_without_a_checkpoint_the_run_stops():
    run = train(World(once={10: "nan"}), replace(CONFIG, grace=8), 100, every=1000)
    assert run.stop is None  # step 0 was saved
    assert run.rewinds[0].to == 0


def test_budgets():
    world = World(bad_data=range(300, 10_000))
    for name, value in (("max_rewinds", 2), ("max_rewinds_per_window", 3), ("max_replayed", 200)):
        run = train(world, replace(CONFIG, **{name: value}), 1000)
        assert f"({name})" in run.stop.report
        assert run.stop.exit_code == ExitCode.NEEDS_PERSON
        assert run.stop.cause == "data"
        assert run.recovery.state_dict()["decisions"]["replayed"] <= CONFIG.max_replayed


@pytest.mark.slow
def test_a_retry_that_the_loop_does_not_carry_out_is_given_up():
    run = train(World(once={500: "flip", 700: "flip"}), CONFIG, 1500, obey_retry=False)
    assert [x["event"] for x in run.log if "second" in x["event"]] == ["second try not carried out"] * 2
    assert len(run.recovery.left_out) > 30
    check_data(run)


EVENTS = st.one_of(st.sampled_from(["flip", "sick", "nan"]), st.floats(0.1, 20))


@st.composite
def worlds(draw):
    bad = [
        range(start, start + length)
        for start, length in draw(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), max_size=3))
    ]
    return World(
        seed=draw(st.integers(0, 1000)),
        noise=draw(st.sampled_from([0.0, 0.02, 0.2])),
        bad_data=tuple(i for span in bad for i in span),
        poison_delay=draw(st.integers(0, 12)),
        hot_from=draw(st.one_of(st.none(), st.integers(0, 400))),
        hot_lr=draw(st.sampled_from([0.0, 0.25, 0.5])),
        once=draw(st.dictionaries(st.integers(1, 900), EVENTS, max_size=8)),
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(worlds(), st.booleans(), st.sampled_from([1, 7, 20, 64]))
def test_whatever_happens_it_ends_and_the_data_are_accounted_for(world, verify, every):
    run = train(world, SMALL, 400, verify=verify, every=every)
    decisions = run.recovery.state_dict()["decisions"]
    assert decisions["replayed"] <= SMALL.max_replayed
    assert len(run.losses) == max(run.line) + decisions["replayed"]
    assert len(run.rewinds) <= SMALL.max_rewinds
    assert run.stop is not None or max(run.line) == 400
    check_data(run)
    assert not SkipRanges.from_json(decisions["guilty"]) - run.recovery.left_out


@pytest.mark.parametrize(
    ("flips", "every"), [((38, 20), 20), ((38, 20, 89), 7), ((38, 20, 112), 7), ((20, 38, 60, 89), 20)]
)
def test_ranges_that_overlap_are_tried_once(flips, every):
    run = train(World(0, noise=0.0, once=dict.fromkeys(flips, "flip")), SMALL, 400, every=every)
    assert len(run.rewinds) >= 2
    check_data(run)
    guilty = SkipRanges.from_json(run.recovery.state_dict()["decisions"]["guilty"])
    assert not guilty - run.recovery.left_out


def check_same(world, verify):
    run, same = (train(world, SMALL, 200, verify=verify) for _ in range(2))
    reloaded = train(world, SMALL, 200, verify=verify, reload=True)
    assert run.actions == same.actions == reloaded.actions
    assert str(run.losses) == str(same.losses) == str(reloaded.losses)
    assert run.log == same.log == reloaded.log
    assert run.recovery.state_dict() == reloaded.recovery.state_dict()


def check_killed(world, kills, every):
    run = train(world, SMALL, 200, every=every)
    killed = train(world, SMALL, 200, every=every, kills=kills)
    assert killed.line == run.line
    assert killed.recovery.left_out == run.recovery.left_out
    rewinds, whole = ([x["action"] for x in each.log if x["event"] == "rewind"] for each in (killed, run))
    assert rewinds == whole
    assert (killed.stop and killed.stop.report) == (run.stop and run.stop.report)


TROUBLED = World(bad_data=(60, 90), hot_from=120, hot_until=160, hot_lr=0.5)


def test_the_same_numbers_give_the_same_actions_and_a_reload_at_every_step_changes_nothing():
    check_same(replace(TROUBLED, once={100: "flip", 150: 3.0}), verify=False)


def test_a_run_that_is_killed_decides_like_one_that_is_not():
    assert len(train(TROUBLED, SMALL, 200).rewinds) > 3
    for first in (0, 30):
        check_killed(TROUBLED, range(first + 100, 1000, 61), every=5)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(worlds(), st.booleans())
def test_a_reload_at_every_step_changes_nothing_in_any_world(world, verify):
    check_same(world, verify)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(worlds(), st.lists(st.integers(1, 1500), max_size=20), st.sampled_from([5, 20]))
def test_a_run_that_is_killed_decides_like_one_that_is_not_in_any_world(world, kills, every):
    check_killed(
        replace(world, once={}), kills, every
    )  # what happens once may come at another step after a kill
