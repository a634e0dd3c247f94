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
        if self.hot_from is not None and step >= self.hot_from and lr > self.hot_lr and fuse is None:
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
    actions: list = field(default_factory=list)  # (update, action)
    losses: list = field(default_factory=list)  # of all updates
    line: dict = field(default_factory=dict)  # step -> data index, of what was not undone
    log: list = field(default_factory=list)
    stop: Stop | None = None
    recovery: Recovery | None = None

    @property
    def rewinds(self):
        return [action for _, action in self.actions if isinstance(action, Rewind)]

    @property
    def causes(self):
        return [entry["cause"] for entry in self.log if entry["event"] == "over"]

    def events(self, name):
        return [entry for entry in self.log if entry["event"] == name]


def train(world, config, num_steps, *, every=20, verify=False, reload=False, obey_retry=True, most=50_000):
    """The loop; `reload` puts the recovery's state through JSON after every call."""
    run = Run()
    recovery = Recovery(config, run.log.append)
    state, data_index, skips, update = (0, 0.0, False, None), 0, SkipRanges(), 0
    checkpoints = {0: (state, 0)}
    recovery.saved(0, 0)

    def again():
        if not reload:
            return recovery
        return Recovery.load(
            config, json.loads(json.dumps(recovery.state_dict(), allow_nan=False)), record=run.log.append
        )

    while state[0] < num_steps:
        update += 1
        assert update < most, "an endless loop"
        data_index = skips.after(data_index)
        active = recovery.mitigation(state[0] + 1)
        loss, state = world.step(state, data_index, update, lr=active.factor if active else 1.0)
        run.losses.append(loss)
        run.line[state[0]] = data_index
        action = recovery.observe(update, state[0], loss, data_index=data_index)
        recovery = again()
        data_index += 1
        if verify and isinstance(action, Rewind):
            action = judge(world, checkpoints, recovery, action)
            recovery = again()
        if action.name != "continue":
            run.actions.append((update, action))
        if isinstance(action, Stop):
            run.stop = action
            break
        if isinstance(action, Rewind):
            checkpoints = {step: x for step, x in checkpoints.items() if step <= action.to}
            state, data_index = checkpoints[action.to]
            assert data_index == action.data_index
            skips = action.skip
            run.line = {step: x for step, x in run.line.items() if step <= action.to}
            recovery.rewound(action)
        elif isinstance(action, Retry) and obey_retry:
            data_index, skips = action.data_index, action.skip
        elif state[0] % every == 0:
            checkpoints[state[0]] = state, data_index
            recovery.saved(state[0], data_index, kept=checkpoints)
        recovery = again()
        assert skips == recovery.skips or not obey_retry or recovery._policy.second_try is None
    run.recovery = recovery
    return run


def judge(world, checkpoints, recovery, action):
    state, data_index = checkpoints[action.to]
    until = recovery.step
    if not world.blows_up(state, data_index, until, recovery._before[0].skips):
        kind = "not reproduced"
    elif world.blows_up(
        state, data_index, until, recovery._before[0].skips | SkipRanges((action.evidence["suspects"],))
    ):
        kind = "state"
    else:
        kind = "data"
    return recovery.judged(action, kind)
