"""verify: on a small model with each fault put in, the verdict is that fault."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zclip_jax.recovery import SkippingIterator, SkipRanges, verify

BAD, END = 30, 40  # the first bad batch, and when the record ends
SUSPECTS = SkipRanges([(28, 36)])
TX = optax.adam(3e-2)


def batch_of(place, scale=1.0):
    rng = np.random.default_rng(place)
    x = rng.normal(size=(8, 4)).astype(np.float32)
    return x, scale * (x @ np.array([1, -2, 3, 0.5], np.float32))


def start():
    params = {"w": jnp.zeros(4), "b": jnp.zeros(())}
    return {"params": params, "opt": TX.init(params), "n": jnp.int32(0)}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) + 1.0


@jax.jit
def step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = TX.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "n": state["n"] + 1}, loss


donating = jax.jit(step.__wrapped__, donate_argnums=0)


@jax.jit
def step_that_blows_up(state, batch):
    """Its parameters grow a hundred times at one step, whatever the batch."""
    state, loss = step(state, batch)
    factor = jnp.where(state["n"] == BAD + 1, 1e2, 1.0)
    return {**state, "params": jax.tree.map(lambda x: x * factor, state["params"])}, loss


def good_batches():
    return ((place, batch_of(place)) for place in range(60))


def bad_batches():
    return ((place, batch_of(place, 1e4 if BAD <= place < BAD + 3 else 1.0)) for place in range(60))


def record(step_fn, batches, state=None, count=END):
    state, losses = state or start(), []
    for _, (_, batch) in zip(range(count), batches, strict=False):
        state, loss = step_fn(state, batch)
        losses.append(float(loss))
    return losses


def test_bad_data():
    recorded = record(step, bad_batches())
    assert max(recorded) > 1e4
    seen = []
    verdict = verify(
        donating, start(), bad_batches(), recorded, without=SUSPECTS,
        rows=lambda state, batch: seen.append((int(state["n"]), batch)) or "row 3 of batch 28",
    )  # fmt: skip
    assert (verdict.kind, verdict.cause, verdict.first_difference) == ("data", "data", None)
    assert list(verdict.losses) == recorded
    clean = ((place, batch) for place, batch in bad_batches() if place not in SUSPECTS)
    assert list(verdict.without) == record(step, clean)[28:]
    ((n, batch),) = seen
    assert n == 28
    np.testing.assert_array_equal(batch[0], batch_of(28)[0])
    assert str(verdict) == (
        "reproduced: 40 updates gave what was recorded, bit for bit.\nWithout batches [28, 36) the spike is gone "
        f"(worst loss {max(verdict.without):.6g}): data\nrow 3 of batch 28"
    )


def test_bad_state():
    recorded = record(step_that_blows_up, good_batches())
    verdict = verify(step_that_blows_up, start(), good_batches(), recorded, without=SUSPECTS, rows=max)
    assert (verdict.kind, verdict.cause, verdict.rows) == ("state", "state", None)
    assert "it is still there" in str(verdict)


def test_nan_of_the_data_and_of_the_state():
    def nans():
        return ((i, (x, y * (math.nan if i == BAD else 1))) for i, (x, y) in good_batches())

    recorded = json.loads(json.dumps([str(x) if math.isnan(x) else x for x in record(step, nans())]))
    assert "nan" in recorded
    assert verify(step, start(), nans(), recorded, without=SUSPECTS).kind == "data"

    @jax.jit
    def step_to_nan(state, batch):
        state, loss = step(state, batch)
        return state, jnp.where(state["n"] > BAD, jnp.nan, loss)

    recorded = record(step_to_nan, good_batches())
    assert verify(step_to_nan, start(), good_batches(), recorded, without=SUSPECTS).kind == "state"


@pytest.mark.parametrize("at", [0, 7, 25])
def test_a_bit_flipped_once_is_hardware(at):
    state, losses = start(), []
    for place, batch in good_batches():
        if place == at:
            x, y = batch
            y = y.copy()
            y.view(np.uint32)[2] ^= 1 << 28  # what a device made of it, this once
            batch = x, y
        state, loss = step(state, batch)
        losses.append(float(loss))
    verdict = verify(step, start(), good_batches(), losses, without=SUSPECTS)
    assert (verdict.kind, verdict.cause) == ("not reproduced", "hardware")
    found = verdict.first_difference
    assert (found.place, found.data_index, found.recorded) == (at, at, losses[at])
    assert f"update {at} (batch {at}) gives loss" in str(verdict)
    assert ("very first update" in str(verdict)) == (at == 0)


def test_the_least_bit_counts():
    recorded = record(step, good_batches())
    recorded[9] = float(np.nextafter(np.float32(recorded[9]), np.float32(np.inf)))
    verdict = verify(step, start(), good_batches(), recorded)
    assert (verdict.kind, verdict.first_difference.place) == ("not reproduced", 9)


def test_a_program_that_is_not_deterministic():
    calls = iter(range(1000))

    def noisy(state, batch):
        state, loss = step(state, batch)
        return state, loss + 1e-3 * next(calls)

    recorded = record(noisy, good_batches())
    verdict = verify(noisy, start(), good_batches(), recorded)
    assert (verdict.kind, verdict.cause) == ("not reproduced", "non-determinism")
    assert "this program is not deterministic" in str(verdict)


def test_several_numbers_are_compared():
    def both(state, batch):
        state, loss = step(state, batch)
        return state, {"loss": loss, "norm": jnp.linalg.norm(state["params"]["w"]), "other": 1}

    state, recorded = start(), []
    for _, batch in good_batches():
        state, out = both(state, batch)
        recorded.append({"loss": float(out["loss"]), "norm": float(out["norm"])})
    assert verify(both, start(), good_batches(), recorded[:20]).kind == "reproduced"
    recorded[5]["norm"] += 1
    found = verify(both, start(), good_batches(), recorded).first_difference
    assert (found.place, found.name) == (5, "norm")
    with pytest.raises(
        ValueError, match=r"recorded has 'norms', but step_fn returns only \['loss', 'norm', 'other'\]"
    ):
        verify(both, start(), good_batches(), [{"norms": 1.0}])


def test_a_skipping_iterator_and_a_plain_replay():
    recorded = record(step, bad_batches())
    batches = SkippingIterator(lambda: (batch for _, batch in bad_batches()))
    verdict = verify(step, start(), batches, recorded[:20])
    assert (verdict.kind, len(verdict.losses)) == ("reproduced", 20)
    assert "Name suspect batches" in str(verdict)
    batches.seek(0)
    assert verify(step, start(), batches, recorded, without=SUSPECTS).kind == "data"
    # From a later checkpoint, without as many losses to judge by.
    state = start()
    batches.seek(0)
    for _ in range(24):
        state, _ = step(state, next(batches)[1])
    with pytest.raises(ValueError, match="limit must be given where fewer than 8 losses"):
        verify(step, state, batches, recorded[24:], without=SUSPECTS)
    batches.seek(24)
    assert verify(step, state, batches, recorded[24:], without=SUSPECTS, limit=50.0).kind == "data"


rounding = st.sampled_from([lambda x: round(x, 4), lambda x: float(f"{x:.3g}"), lambda x: float(f"{x:.6e}")])


@functools.cache
def twenty_losses():
    return record(step, good_batches(), count=20)


@given(round_off=rounding, at=st.integers(0, 19))
def test_a_rounded_record_is_no_hardware_error(round_off, at):
    losses = twenty_losses()
    rounded = [round_off(x) if i >= at else x for i, x in enumerate(losses)]
    if rounded == losses:
        return
    with pytest.raises(
        ValueError, match=r"loss of recorded\[\d+\] must be recorded unrounded, got .* rounded"
    ):
        verify(step, start(), good_batches(), rounded)


def test_as_many_digits_as_float32_needs_are_enough():
    recorded = [float(str(np.float32(x))) for x in twenty_losses()]
    assert verify(step, start(), good_batches(), recorded).kind == "reproduced"


def test_what_cannot_be_known():
    recorded = record(step, good_batches())
    with pytest.raises(ValueError, match="at least one update, got none"):
        verify(step, start(), good_batches(), [])
    with pytest.raises(ValueError, match="batches must give 40 batches, as many as recorded, got 9"):
        verify(step, start(), list(good_batches())[:9], recorded)
    with pytest.raises(
        ValueError, match=r"without must name some of the batches, got \[70, 80\), they are 0 to 39"
    ):
        verify(step, start(), good_batches(), recorded, without=SkipRanges([(70, 80)]))
    with pytest.raises(ValueError, match="recorded must hold a spike"):
        verify(step, start(), good_batches(), recorded, without=SUSPECTS)
    recorded = record(step, bad_batches(), count=34)
    with pytest.raises(ValueError, match="batches must go on after the suspect ones"):
        verify(step, start(), list(bad_batches())[:34], recorded, without=SUSPECTS)
