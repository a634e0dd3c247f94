"""A plain training loop with recovery: `python examples/recovery_loop.py --run-dir runs/loop`.

A regression on 64 rows a step, of which the batches 200 to 203 are corrupt. Run it again to continue it, whatever
killed it; delete the folder to start over. `recovery.jsonl` has the decisions.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from zclip_jax.recovery import (
    GoodCheckpoints,
    MemoryRing,
    Recovery,
    RecoveryConfig,
    RecoveryLog,
    Retry,
    Rewind,
    SkippingIterator,
    SkipRanges,
    Stop,
    verify,
)

CONFIG = RecoveryConfig(warmup=32, grace=10, skip_before=2, skip_batches=8)
SAVE_EVERY = 20
TX = optax.sgd(0.05, momentum=0.9)


def read(i: int) -> dict[str, Any]:
    """Batch i of the uninterrupted pipeline."""
    rng = np.random.default_rng(i)
    x = rng.normal(size=(64, 16)).astype(np.float32)
    noise = 0.1 * rng.normal(size=64).astype(np.float32)
    return {"x": x, "y": (x.sum(axis=1) + noise) * (1e4 if 200 <= i < 204 else 1)}


def init() -> Any:
    return {"params": jnp.zeros(16), "opt": TX.init(jnp.zeros(16))}


@jax.jit
def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """A pure function of state and batch, so that `verify` can run it again; a mitigation comes with the batch."""
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(state["params"])
    updates, opt = TX.update(grads, state["opt"])
    updates = updates * batch["lr_factor"]
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def train(run_dir: Path, steps: int) -> int:
    """Returns the exit status."""
    run_dir.mkdir(parents=True, exist_ok=True)
    batches = SkippingIterator(grain.MapDataset.range(10_000).map(read))
    log, ring = RecoveryLog(run_dir / "recovery.jsonl"), MemoryRing(size=2)
    recovery, state, update, step = Recovery(CONFIG, log.append), init(), 0, 0
    losses: dict[int, float] = {}  # by step, since this process started

    def with_mitigation(batch: Any, step: int) -> Any:
        active = recovery.mitigation(step)
        return {**batch, "lr_factor": np.float32(active.factor if active and active.kind == "lr" else 1)}

    def good_state(to: int) -> tuple[int, Any]:
        if to in ring.steps and to in checkpoints.steps:
            return to, ring.get(to)
        return checkpoints.restore(to, ocp.args.StandardRestore(init()))

    def judge(action: Rewind) -> Any:
        """What was it? Trains again from the good state, and decides anew with the answer."""
        to, good = good_state(action.to)
        if to != action.to or not all(at in losses for at in range(to + 1, step + 1)):
            return action
        batches.seek(action.data_index)
        replay = ((i, with_mitigation(batch, to + 1 + at)) for at, (i, batch) in enumerate(batches))
        suspects = SkipRanges([action.evidence["suspects"]])
        recorded = [losses[at] for at in range(to + 1, step + 1)]
        verdict = verify(
            train_step, good, replay, recorded, without=suspects, limit=float(action.evidence["limit"])
        )
        print(f"step {step}: {verdict}")
        return recovery.judged(action, verdict.kind)

    def rewind(action: Rewind) -> tuple[int, Any]:
        to, good = good_state(action.to)
        checkpoints.rewind(to)
        ring.drop_after(to)
        batches.set_state(checkpoints.metadata(to)["batches"])
        batches.seek(batches.data_index, skips=action.skip)
        recovery.rewound(action, to)
        print(f"rewound to step {to}, left out {action.skip}: {action.reason}")
        return to, good

    with GoodCheckpoints(run_dir / "checkpoints", keep_recent=2, keep_good=3) as checkpoints:
        if checkpoints.steps:
            step, state = checkpoints.restore(None, ocp.args.StandardRestore(state))
            saved = checkpoints.metadata(step)
            recovery = Recovery.load(CONFIG, saved["recovery"], journal=log.read(), record=log.append)
            batches.set_state(saved["batches"])
            batches.seek(batches.data_index, skips=recovery.skips)
            update = saved["update"]
            if isinstance(recovery.pending, Rewind):
                step, state = rewind(recovery.pending)
            recovery.saved(step, batches.data_index, kept=checkpoints.steps)
        while step < steps:
            data_index, batch = next(batches)
            update, step = update + 1, step + 1
            state, loss = train_step(state, with_mitigation(batch, step))
            losses[step] = float(loss)
            action = recovery.observe(update, step, losses[step], data_index=data_index)
            if isinstance(action, Rewind):
                action = judge(action)
            if isinstance(action, Stop):
                print(action.report, file=sys.stderr)
                return action.exit_code
            if isinstance(action, Rewind):
                step, state = rewind(action)
            elif isinstance(action, Retry):
                batches.seek(action.data_index, skips=action.skip)
            elif step % SAVE_EVERY == 0 or step == steps:
                about = {"recovery": recovery.state_dict(), "batches": batches.get_state(), "update": update}
                if checkpoints.save(step, ocp.args.StandardSave(state), about):
                    ring.put(step, state)
                    recovery.saved(step, batches.data_index, kept=checkpoints.steps)
            for good in recovery.good_steps:
                checkpoints.mark_good(good)
    print(
        f"loss {losses.get(step, np.nan):.6f} after {step} steps and {update} updates, left out {recovery.left_out}"
    )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    sys.exit(train(arguments.run_dir, arguments.steps))
