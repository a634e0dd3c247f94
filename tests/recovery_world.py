"""A simulated training run for the tests of recovery: a loss, faults, checkpoints, and the loop around `Recovery`.

A state is (step, heat, broken, fuse): `heat` is a spike that cools down, `broken` never heals, and a state whose
`fuse` burns breaks when it has burnt down. A step is a pure function of state and batch but for what `World.once`
holds: faults that happen at one update and never again.
"""

import json
import math
import random
from dataclasses import dataclass, field

from zclip_jax.recovery import Recovery, Retry, Rewind, SkipRanges, Stop


@dataclass
class World:
    seed: int = 0
    noise: float = 0.02
    bad_data: tuple = ()  # data indices that break the state
    poison_delay: int = 0  # steps after which they do; at once also a high loss on the batch itself
    hot_from: int | None = (
        None  # from this step on the state breaks within `hot_steps` steps, unless lr is lowered
    )
    hot_until: float = math.inf
    hot_steps: int = 40
    hot_lr: float = 0.0  # up to this factor of the learning rate it does not
    once: dict = field(default_factory=dict)  # update -> "flip", "sick", "nan" or a height of a benign spike

    def batch_noise(self, data_index):
        return self.noise * random.Random(self.seed * 1_000_003 + data_index).gauss(0, 1)

    def step(self, state, data_index, update=None, lr=1.0):
        step, heat, broken, fuse = state
        step += 1
        event = self.once.get(update)
        base = 2 + 3 * math.exp(-step / 200) + self.batch_noise(data_index)
        loss = base + heat + (3.0 if broken else 0.0)
        heat = 0.5 * heat if heat > 0.01 else 0.0
        if data_index in self.bad_data:
            if self.poison_delay:
                fuse = self.poison_delay if fuse is None else fuse
            else:
                loss, broken = loss + 2.0, True
        if fuse is not None:
            fuse -= 1
            broken = broken or fuse <= 0
        if (
            self.hot_from is not None
            and self.hot_from <= step < self.hot_until
            and lr > self.hot_lr
            and fuse is None
        ):
            fuse = random.Random(self.seed * 7919 + data_index).randint(2, self.hot_steps)
        if event == "flip":
            broken = True
        elif event == "nan":
            loss = math.nan
        elif event == "sick":
            fuse = 60
        elif event is not None:
            heat += event
        return loss, (step, heat, broken, fuse)

    def blows_up(self, state, data_index, until, skips):
        """Whether a re-run reaches a bad loss by step `until`."""
        while state[0] < until:
            data_index = skips.after(data_index)
            loss, state = self.step(state, data_index)
            data_index += 1
            if not loss < 4.0 + 3 * math.exp(-state[0] / 200):
                return True
        return False


@dataclass
class Run:
    actions: list = field(default_factory=list)
    losses: list = field(default_factory=list)  # of all updates
    line: dict = field(default_factory=dict)  # step -> (data index, loss), of what was not undone
    log: list = field(default_factory=list)
    disk: dict = field(default_factory=dict)  # step -> (state, data index, the recovery's state)
    stop: Stop | None = None
    recovery: Recovery | None = None
    kills: set = field(default_factory=set)
    moments: int = 0

    @property
    def rewinds(self):
        return [action for action in self.actions if isinstance(action, Rewind)]

    @property
    def causes(self):
        return [entry["cause"] for entry in self.log if entry["event"] == "over"]

    def moment(self):
        """A moment at which the process may be killed."""
        self.moments += 1
        if self.moments in self.kills:
            raise KilledError

    def rewind(self, to):
        for step in sorted(self.disk, reverse=True):
            if step > to:
                del self.disk[step]
                self.moment()
        self.line = {step: x for step, x in self.line.items() if step <= to}


class KilledError(Exception):
    pass


def train(world, config, num_steps, kills=(), **options):
    """Trains until `num_steps` or a stop; at each of `kills`, counted in moments, it dies and starts anew."""
    run = Run(kills=set(kills))
    while True:
        try:
            return process(run, world, config, num_steps, **options)
        except KilledError:
            pass


def process(run, world, config, num_steps, every=20, verify=False, reload=False, obey_retry=True):
    """One process; `reload` puts the recovery's state through JSON after every call."""

    def written(recovery):
        return json.loads(json.dumps(recovery.state_dict(), allow_nan=False))

    def again(recovery):
        return Recovery.load(config, written(recovery), record=run.log.append) if reload else recovery

    if not run.disk:
        recovery = Recovery(config, run.log.append)
        run.disk[0] = (0, 0.0, False, None), 0, written(recovery)
    step = max(run.disk)
    state, data_index, saved = run.disk[step]
    recovery = Recovery.load(config, saved, journal=run.log, record=run.log.append)
    if isinstance(recovery.pending, Rewind):
        to = recovery.pending.to
        run.rewind(to)
        state, data_index, _ = run.disk[to]
        recovery.rewound(recovery.pending)
    else:
        run.rewind(step)
        recovery.saved(step, data_index, kept=run.disk)
    skips = recovery.skips

    while state[0] < num_steps:
        assert len(run.losses) < 100_000, "an endless loop"
        data_index = skips.after(data_index)
        active = recovery.mitigation(state[0] + 1)
        loss, state = world.step(state, data_index, len(run.losses) + 1, lr=active.factor if active else 1.0)
        run.losses.append(loss)
        run.line[state[0]] = data_index, loss
        run.moment()
        action = recovery.observe(recovery.update + 1, state[0], loss, data_index=data_index)
        data_index += 1
        run.moment()
        recovery = again(recovery)
        if verify and isinstance(action, Rewind):
            action = judge(world, run.disk, recovery, action)
            recovery = again(recovery)
        if action.name != "continue":
            run.actions.append(action)
        if isinstance(action, Stop):
            run.stop = action
            break
        if isinstance(action, Rewind):
            run.rewind(action.to)
            state, data_index, _ = run.disk[action.to]
            assert data_index == action.data_index
            skips = action.skip
            recovery.rewound(action)
            run.moment()
        elif isinstance(action, Retry) and obey_retry:
            data_index, skips = action.data_index, action.skip
        if state[0] % every == 0 and state[0] not in run.disk:
            run.disk[state[0]] = state, data_index, written(recovery)
            run.moment()
            recovery.saved(state[0], data_index, kept=run.disk)
        recovery = again(recovery)
    run.recovery = recovery
    return run


def judge(world, disk, recovery, action):
    """What `verify` finds out: whether a re-run blows up, and whether it does without the suspect batches."""
    state, data_index, _ = disk[action.to]
    known = recovery._before[0].skips
    suspects = SkipRanges([action.evidence["suspects"]])
    if not world.blows_up(state, data_index, recovery.step, known):
        return recovery.judged(action, "not reproduced")
    reproduced = world.blows_up(state, data_index, recovery.step, known | suspects)
    return recovery.judged(action, "state" if reproduced else "data")


def check_data(run):
    """Every batch up to the last was trained exactly once, or is listed as left out."""
    trained = [data_index for data_index, _ in run.line.values()]
    assert len(trained) == len(set(trained))
    if run.recovery._policy.second_try is None:
        left_out = {i for start, stop in run.recovery.left_out.ranges for i in range(start, stop)}
        assert not left_out & set(trained)
        assert left_out | set(trained) >= set(range(max(trained) + 1))
