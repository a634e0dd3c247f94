"""Rules as one writes them on a command line: `zscore:z_thresh=3,alpha=0.99`."""

import ast
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zclip_jax import rules
from zclip_jax._checks import check_cap, check_choice
from zclip_jax._rule import Rule

# The presets, by the rule inside and the cap that each has by default.
PRESETS = {"zclip": ("zscore", 1.0), "levelclip": ("level", 1.0)}
SPACES = ("linear", "log")


def rule_names() -> list[str]:
    """Names that `make_rule` takes: the presets, and every rule that doesn't wrap another."""
    plain = (name for name in rules.__all__ if name.islower())
    return [*PRESETS, *(name for name in plain if "rule" not in _parameters(name))]


class Spec(NamedTuple):
    """A rule by name, with all of its settings, those left at their defaults included, and what to call the two."""

    label: str
    name: str
    settings: dict[str, Any]
    rule: Rule

    def factory(self) -> Callable[..., Rule]:
        """Makes the rule, with some of the settings replaced."""
        return functools.partial(make_rule, self.name, **self.settings)


def make_rule(name: str, *, max_grad_norm: Any = None, space: str = "linear", **settings: Any) -> Rule:
    """The rule or preset of that name, in linear or log space, below a cap."""
    inner, _ = PRESETS.get(name, (name, None))
    check_cap(max_grad_norm)
    check_choice("space", space, SPACES)
    rule = getattr(rules, inner)(**settings)
    return rules.at_most(rules.in_log_space(rule) if space == "log" else rule, max_grad_norm)


def parse_spec(text: str) -> Spec:
    """Reads `NAME` or `NAME:SETTING=VALUE,…`.

    Raises:
      ValueError: there is no such rule or setting, or the rule doesn't accept the value.
    """
    name, _, rest = text.partition(":")
    pairs = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"settings of a rule are written name=value, got {pair!r} in {text!r}")
        if (key := key.strip()) in pairs:
            raise ValueError(f"{key} is given twice in {text!r}")
        pairs[key] = parse_value(value)
    return make_spec(text, name, pairs)


def make_spec(label: str, name: str, settings: Mapping[str, Any]) -> Spec:
    """A `Spec` of a rule by name; raises ValueError where it has no such setting or refuses the value."""
    if name not in rule_names():
        raise ValueError(f"no rule is called {name!r}; there are {', '.join(rule_names())}")
    inner, cap = PRESETS.get(name, (name, None))
    parameters = _parameters(inner)
    accepted = [*parameters, "max_grad_norm", "space"]
    check_names(name, settings, accepted)
    missing = [
        key for key, p in parameters.items() if p.default is inspect.Parameter.empty and key not in settings
    ]
    if missing:
        raise ValueError(f"{name} needs {missing[0]}, as in {name}:{missing[0]}=1")
    defaults = {key: p.default for key, p in parameters.items() if key not in missing}
    for key, value in settings.items():
        if isinstance(defaults.get(key), bool) and not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, got {value!r}")
    settings = {**defaults, "max_grad_norm": cap, "space": "linear", **settings}
    return Spec(label, name, settings, make_rule(name, **settings))


def parse_grid(pairs: Sequence[str], spec: Spec) -> dict[str, list[int | float]]:
    """Reads `SETTING=VALUE,VALUE,…` for each setting of `spec` to sweep over."""
    grid = {}
    for pair in pairs:
        key, equals, values = pair.partition("=")
        numbers = [parse_value(value) for value in values.split(",") if value.strip()]
        if not equals or not numbers or not all(isinstance(x, int | float) for x in numbers):
            raise ValueError(
                f"a sweep is written name=number,number,..., got {pair!r}; compare rules for the rest"
            )
        if (key := key.strip()) in grid:
            raise ValueError(f"{key} is given twice in a sweep: write {key}=number,number,...")
        grid[key] = numbers
    check_names(spec.name, grid, list(spec.settings))
    return grid


def check_names(rule: str, given: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Raises ValueError for the first setting that the rule doesn't have."""
    for key in given:
        if key not in accepted:
            raise ValueError(f"{rule} has no setting {key!r}; it has {', '.join(accepted)}")


def parse_value(text: str) -> Any:
    """A number, True, False, None in any case, or else the text itself."""
    text = text.strip()
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return math.inf if text.lower() == "inf" else text


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(rules, name)).parameters
