"""Calls with bad arguments, for a process of their own: `python -m tests.bad_arguments` prints their errors.

Under pytest a wrong type is stopped by the checks of signatures, which users do not have.
"""

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import zclip_jax
from zclip_jax import clip_by_rule, levelclip, rules, skip_by_rule, zclip
from zclip_jax.replay import sweep


class Call(NamedTuple):
    """A call that must raise a ValueError with these `words`; or may (`optional`), but nothing else."""

    run: Callable[[], Any]
    words: tuple[str, ...]
    optional: bool = False


PARAMS = {"w": np.ones(2, np.float32)}
BAD = [
    np.inf,
    -np.inf,
    np.nan,
    -1,
    0,
    0.5,
    True,
    "x",
    "0.5",
    None,
    [],
    [1.0],
    {},
    1j,
    2**31,
    b"1",
    int,
    PARAMS,
]
FACTORIES = {
    name: getattr(rules, name) for name in rules.__all__ if not isinstance(getattr(rules, name), type)
}
FACTORIES |= {
    "zclip": zclip,
    "levelclip": levelclip,
    "clip_by_rule": clip_by_rule,
    "skip_by_rule": skip_by_rule,
}
NEEDED = {"rule": rules.fixed(1.0), "max_norm": 1.0, "low": 0.0, "high": 2.0, "inner": optax.sgd(1.0)}


def start(made):
    """The first state, so that what is only looked at then is looked at."""
    jax.eval_shape(made.init) if isinstance(made, zclip_jax.Rule) else jax.eval_shape(made.init, PARAMS)


def calls():
    for factory, make in FACTORIES.items():
        parameters = inspect.signature(make).parameters
        needed = {x: NEEDED[x] for x, p in parameters.items() if p.default is p.empty}
        for name in parameters:
            for i, value in enumerate(BAD):
                if callable(value) and name not in ("rule", "inner", "prior_norms"):
                    continue  # a schedule, or a function of paths
                shown = () if name == "prior_norms" else (repr(value),)
                yield (
                    f"{factory}-{name}-{i}",
                    Call(
                        lambda make=make, given={**needed, name: value}: start(make(**given)),
                        (name, *shown),
                        True,
                    ),
                )

    no_rules = {
        "transformation": optax.adam(1e-3),
        "factory": rules.zscore,
        "none": None,
        "name": "zscore",
        "tuple": (),
    }
    takers = {
        "clip_by_rule": clip_by_rule,
        "skip_by_rule": lambda rule: skip_by_rule(optax.sgd(1.0), rule),
        "at_most": lambda rule: rules.at_most(rule, 1.0),
        "at_most None": lambda rule: rules.at_most(rule, None),
        "bounded": lambda rule: rules.bounded(rule, 0.0, 1.0),
        "bounded schedule": lambda rule: rules.bounded(rule, 0.0, lambda step: 1.0),
        "loss_aware": rules.loss_aware,
    }
    for taker, make in takers.items():
        for kind, value in no_rules.items():
            yield (
                f"{taker} of no rule: {kind}",
                Call(lambda make=make, x=value: start(make(x)), ("rule must be a Rule",)),
            )

    no_inner = {
        "rule": rules.sigma_skip(),
        "factory": optax.adam,
        "none": None,
        "state": optax.EmptyState(),
        "name": "adam",
    }
    for kind, value in no_inner.items():
        call = Call(lambda x=value: skip_by_rule(x, rules.sigma_skip()), ("inner must be",))
        yield f"skip_by_rule around no transformation: {kind}", call

    for name, given in {
        "granularity": {"granularity": lambda path: "all"},
        "stacked": {"granularity": "leaf", "stacked": lambda path: True},
    }.items():

        def under_inject(given=given):
            static = [x for x in given if x == "granularity" and given[x] == "leaf"]
            tx = optax.inject_hyperparams(zclip, static_args=static)(**given)
            tx.update(PARAMS, tx.init(PARAMS), PARAMS)

        yield f"inject_hyperparams {name}", Call(under_inject, (name, "static_args"))

    steps = 2_000_000_000
    for name, make, given in (
        ("zscore", rules.zscore, {"robust_warmup": True, "warmup_steps": steps}),
        ("zclip", zclip, {"robust_warmup": True, "warmup_steps": steps}),
        ("percentile", rules.percentile, {"window": steps}),
        ("window_zscore", rules.window_zscore, {"window": steps}),
        ("sigma_skip", rules.sigma_skip, {"window": steps}),
    ):
        field = "window" if "window" in given else "warmup_steps"
        yield f"too long for memory: {name}", Call(lambda make=make, x=given: make(**x), (field, str(steps)))

    for name, grid in {"nothing": [], "a number": 2.0, "a word": "max"}.items():
        call = Call(
            lambda grid=grid: sweep(rules.zscore, [1.0, 2.0], z_thresh=grid), ("z_thresh", repr(grid))
        )
        yield f"sweep over {name}", call


CALLS = dict(calls())


def error_of(call):
    """The type and the text of the error, None where there is none."""
    try:
        call.run()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", UserWarning)
    json.dump({name: error_of(call) for name, call in CALLS.items()}, sys.stdout)
