"""Arms: what is compared, by name, and all clipping rules of one program as a single rule.

An arm is written `name` or `name:setting=value,...`, such as `zclip:cap=none` or `fixed:0.3`.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zclip_jax import Decision, Rule, clip_by_rule, rules, skip_by_rule

NEVER = 2**30  # steps; what None is as a traced patience
STATIC = ("window", "strategy", "absorb", "robust_warmup")


@dataclasses.dataclass(frozen=True)
class Arm:
    """A rule below a cap.

    `family` is the name of the rule and its settings that shape a program, `settings` its numbers. `skip` leaves out
    the steps on which the rule fires, in place of scaling them down. `nonfinite` is that of `clip_by_rule`.
    """

    family: str
    settings: Mapping[str, float]
    cap: float = math.inf
    skip: bool = False
    nonfinite: str = "zero"


# Name: rule, settings other than its defaults, cap.
NAMES: dict[str, tuple[str, dict[str, Any], float]] = {
    "none": ("fixed", {"max_norm": math.inf}, math.inf),
    "fixed": ("fixed", {}, math.inf),
    "every": ("fixed", {"max_norm": 0.01}, math.inf),  # far below the level: each step gets this norm
    "autoclip": ("percentile", {}, math.inf),
    "zclip": ("zscore", {}, 1.0),
    "published": ("zscore", {"patience": None}, 1.0),
    "levelclip": ("level", {}, 1.0),
    "skip": ("sigma_skip", {}, math.inf),
}


def parse_arm(text: str) -> Arm:
    """Raises ValueError for what is no arm."""
    name, _, rest = text.partition(":")
    if name not in NAMES:
        raise ValueError(f"arm {text!r}: no arm {name!r}: expected one of {', '.join(NAMES)}")
    rule, settings, cap = NAMES[name]
    defaults = _defaults(rule)
    known: dict[str, Any] = {"cap": cap, "nonfinite": "zero"} | defaults | settings
    numbers = [key for key in defaults if key not in STATIC]
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        key, value = (key, value) if equals else (numbers[0], key)
        if key not in known:
            raise ValueError(f"arm {text!r}: no setting {key!r}: expected one of {', '.join(known)}")
        known[key] = _value(text, key, value)
    if known["cap"] is None:
        known["cap"] = math.inf
    missing = [key for key in numbers if known[key] is inspect.Parameter.empty]
    if missing:
        raise ValueError(f"arm {text!r}: give {missing[0]}, as in {name}:0.3")
    static = [f"{key}={known[key]}" for key in defaults if key in STATIC and known[key] != defaults[key]]
    return Arm(
        family=":".join([rule, *static]),
        settings={key: NEVER if known[key] is None else known[key] for key in numbers},
        cap=known["cap"],
        skip=name == "skip",
        nonfinite=known["nonfinite"],
    )


def _value(text: str, key: str, value: str) -> Any:
    if value == "none" and key in ("cap", "patience"):
        return None
    if key in ("strategy", "absorb", "nonfinite"):
        return value
    try:
        return int(value) if value.isdigit() else float(value)
    except ValueError:
        raise ValueError(f"arm {text!r}: {key}={value!r}: expected a number") from None


@functools.cache
def _defaults(rule: str) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(getattr(rules, rule)).parameters.items()}


def make_rule(family: str, settings: Mapping[str, jax.Array]) -> Rule:
    """The rule of a family; its numbers may be traced."""
    rule, *static = family.split(":")
    words: dict[str, Any] = dict(item.split("=") for item in static)
    if "window" in words:
        words["window"] = int(words["window"])
    defaults = _defaults(rule)
    numbers = {
        name: value.astype(jnp.int32) if isinstance(defaults[name], int) else value
        for name, value in settings.items()
    }
    return getattr(rules, rule)(**numbers, **words)


def choose(options: Sequence[Rule], index: jax.Array) -> Rule:
    """The rule at a traced index. All of them watch every norm, so that one program serves many arms."""

    def init() -> Any:
        return tuple(rule.init() for rule in options)

    def update(norm: Any, state: Any, /, **extra_args: Any) -> tuple[Decision, Any]:
        results = [rule.update(norm, old, **extra_args) for rule, old in zip(options, state, strict=True)]
        is_chosen = [index == i for i in range(len(options))]

        def chosen(name: str) -> jax.Array:
            return jnp.select(is_chosen, [jnp.asarray(getattr(decision, name)) for decision, _ in results])

        decision = Decision(threshold=chosen("threshold"), fired=chosen("fired"), trigger=chosen("trigger"))
        return decision, tuple(new for _, new in results)

    return Rule(init=init, update=update)


def clipper(
    families: Sequence[str], lane: Mapping[str, jax.Array], nonfinite: str, prior_norms: Any
) -> optax.GradientTransformationExtraArgs:
    """Clips as the lane's arm does; `lane` holds what `lane_settings` gives."""
    options = [_lane_rule(family, lane) for family in families]
    rule = options[0] if len(options) == 1 else choose(options, lane["family"])
    return clip_by_rule(rules.at_most(rule, lane["cap"]), prior_norms=prior_norms, nonfinite=nonfinite)


def skipper(
    inner: optax.GradientTransformation, family: str, lane: Mapping[str, jax.Array], prior_norms: Any
) -> optax.GradientTransformationExtraArgs:
    return skip_by_rule(inner, _lane_rule(family, lane), prior_norms=prior_norms)


def _lane_rule(family: str, lane: Mapping[str, jax.Array]) -> Rule:
    prefix = f"{family}."
    return make_rule(family, {k.removeprefix(prefix): v for k, v in lane.items() if k.startswith(prefix)})


def lane_settings(arm: Arm, families: Sequence[str]) -> dict[str, float]:
    """Numbers of a lane: which family, its cap, and the settings of every family of its program."""
    values: dict[str, float] = {"family": families.index(arm.family), "cap": arm.cap}
    for family in families:
        known = {k: v for k, v in _defaults(family.split(":")[0]).items() if k not in STATIC}
        known = {k: 1.0 if v is inspect.Parameter.empty else v for k, v in known.items()}
        settings = known | (dict(arm.settings) if family == arm.family else {})
        values |= {f"{family}.{name}": NEVER if v is None else v for name, v in settings.items()}
    return values
