"""Reports as text."""

import re

import numpy as np
import pytest

from tests.recordings import recorded, report_on, spiky
from zclip_jax.replay import _terminal
from zclip_jax.replay._recommend import CRITERION, Candidate
from zclip_jax.replay._report import describe_sweep
from zclip_jax.replay._specs import parse_spec
from zclip_jax.replay._table import print_report

pytestmark = pytest.mark.usefixtures("compiled_once")


DEFAULT = ("zclip", "fixed:max_norm=1", "percentile:window=50")


@pytest.fixture(scope="module")
def ordinary():
    recording = recorded(spiky(400, 10, 200), notes=("a note",), loss=np.ones(400))
    swept = describe_sweep(recording, parse_spec("zclip"), {"z_thresh": [2.0, 3.0]})
    return report_on(recording, *DEFAULT) | {"sweep": swept}


COUNTED = ("scaled", "fired", "capped")


def cells(text):
    """The words between columns, of each line that has any."""
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.strip()]


def test_the_report_as_text(ordinary, capsys):
    print_report(ordinary)
    shown = cells(capsys.readouterr().out)
    rule = ordinary["rules"]
    level = f"median {ordinary['log']['median']:.4g}, largest 8"
    assert shown[0] == [f"log.jsonl, JSON lines: 400 norms under 'grad_norm', steps 0 to 399, {level}"]
    assert shown[1] == ["- a note"]
    start = shown.index(list(DEFAULT))
    warm_up = f"1 of 25, felt until step {rule[0]['warm_up']['loose_until']}"

    def parts(name):
        return [f"{one[f'num_{name}']} ({one[f'num_{name}'] / 400:.2%})" for one in rule]

    assert shown[start + 2 : start + 12] == [
        ["scaled down, by rule or cap", *parts("scaled")],
        ["to, median (least)", *(f"{one['median_scale']:.2f} ({one['least_scale']:.2g})" for one in rule)],
        ["fired", *parts("fired")],
        ["capped", *parts("capped")],
        ["outliers that fired", *(f"{one['num_caught']} of 2" for one in rule)],
        ["fired below 1.3x", *parts("false_alarms")],
        ["longest run", *(str(one["longest_run"]) for one in rule)],
        ["locked in from step", "-", "-", "-"],
        ["outliers in warm-up", warm_up, "no warm-up", "no warm-up"],
        ["not finite", "0", "0", "0"],
    ]
    scores = [ordinary["log"][name] for name in ("spike_score", "olmo_core_spike_score")]
    assert shown[start + 12 : start + 14] == [
        [f"SpikeScore (OLMo 2: 7 sigma, 1,000 values): norm {scores[0]:.3%}, loss 0.000%"],
        [f"SpikeScore (OLMo-core: 6 sigma, 128 values): {scores[1]:.3%} of the steps"],
    ]
    assert ["step", "norm", "local median", "ratio", "allowed", "fired"] in shown
    first = rule[0]["largest_spikes"][0]
    assert [
        str(first["step"]),
        "8",
        f"{first['local_median']:.4g}",
        f"{first['ratio']:.1f}x",
        "-" if first["allowed"] is None else f"{first['allowed']:.4g}",
        "yes" if first["fired"] else "no",
    ] in shown
    head = ["z_thresh", "fired", "capped", "outliers that fired", "fired below 1.3x", "longest run"]
    assert [*head, "locked in from"] in shown
    for row in ordinary["sweep"]:
        part = [f"{row[key]} ({row[key] / 400:.2%})" for key in ("num_fired", "num_capped")]
        assert [f"{row['settings']['z_thresh']:g}", *part] in [line[:3] for line in shown]
    assert ["What stands out, for zclip"] in shown
    assert [f"- {flag}" for flag in ordinary["flags"]] == [
        " ".join(line) for line in shown[-len(ordinary["flags"]) :]
    ]


def test_many_rules_have_a_row_each(ordinary, capsys):
    five = [one | {"rule": f"rule {i}"} for i, one in enumerate((ordinary["rules"] * 2)[:5])]
    print_report(ordinary | {"rules": five[:4]})
    assert ["rule 0", "rule 1", "rule 2", "rule 3"] in cells(capsys.readouterr().out)
    print_report(ordinary | {"rules": five})
    shown = cells(capsys.readouterr().out)
    start = shown.index(["scaled", "fired", "capped", "outliers", "below 1.3x", "locked in"]) + 2
    for one, row in zip(five, shown[start : start + 5], strict=True):
        parts = [f"{one[f'num_{x}']} ({one[f'num_{x}'] / 400:.2%})" for x in (*COUNTED, "false_alarms")]
        caught = f"{one['num_caught']} of 2"
        assert row == [one["rule"], *parts[:3], caught, parts[3], "-"]


def test_a_falling_level_is_told(ordinary, capsys):
    for number, are in ((1, "1 norm is"), (1234, "1,234 norms are")):
        print_report(ordinary | {"log": ordinary["log"] | {"num_falling": number}})
        told = f"- {are} above 2x the local median because the level falls, and no outliers"
        assert told in capsys.readouterr().out.splitlines()
    print_report(ordinary)
    assert "falls" not in capsys.readouterr().out


def test_text_is_no_markup(ordinary, capsys):
    names = ["[red]x[/red]", "[/]", "a:key:norm:100:"]
    rules_ = [one | {"rule": name} for one, name in zip(ordinary["rules"], names, strict=True)]
    odd = {"name": "[b]", "column": "[bold]y[/]:warning:", "format": "[/]", "notes": ["[link=x]z", ":+1:"]}
    flags = ["[blink]w[/blink]", "[/nothing]", ":boom:"]
    print_report({"log": ordinary["log"] | odd, "rules": rules_, "flags": flags, "runs": ordinary["runs"]})
    shown = capsys.readouterr().out
    assert shown.startswith("[b], [/]: 400 norms under '[bold]y[/]:warning:', steps 0 to 399")
    assert names in cells(shown)
    assert "Largest spikes, and what [red]x[/red] makes of them" in shown
    for line in (*odd["notes"], *flags):
        assert f"- {line}" in shown.splitlines()


@pytest.mark.parametrize("width", [20, 40, 80, 110, 300])
def test_any_width(ordinary, width, capsys, monkeypatch):
    monkeypatch.setattr(_terminal, "WIDTH", width)
    print_report(ordinary)
    lines = capsys.readouterr().out.splitlines()
    # Sentences may go on as one line; what is drawn keeps to the width.
    assert max(len(line) for line in lines if "──" in line) <= width
    assert any(line.startswith("SpikeScore (OLMo 2") for line in lines)


def test_large_numbers_fit(ordinary, capsys):
    names = ["steps", "fired", "capped", "scaled", "nonfinite", "caught", "outliers", "false_alarms"]
    large = {"longest_run": 1_234_567, "locked_in_from": 1_234_567} | {f"num_{x}": 1_234_567 for x in names}
    print_report(ordinary | {"rules": [one | large for one in ordinary["rules"]], "flags": []})
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert ["fired", *["1,234,567 (100.00%)"] * 3] in cells(shown)
    assert ["outliers that fired", *["1,234,567 of 1,234,567"] * 3] in cells(shown)
    assert max(map(len, shown.splitlines())) <= 110


def test_the_recommendation_as_text(ordinary, capsys):
    settings = {"z_thresh": 2.5, "alpha": 0.9, "max_grad_norm": None}
    best = Candidate("zclip", settings, 5, 1200, 1300, False)
    other = Candidate("zclip", settings | {"z_thresh": 3.0}, 4, 0, 9, True)
    told = best._asdict() | {"call": best.call, "rule": best.rule}
    found = {"best": told, "curve": [best._asdict(), other._asdict()], "num_outliers": 6}
    found |= {"num_candidates": 158, "check": "checked [/]", "doubts": ["a doubt"]}
    print_report(ordinary | {"recommend": found})
    shown = cells(capsys.readouterr().out)
    start = shown.index(["Best of 158 candidates: zclip(z_thresh=2.5, alpha=0.9, max_grad_norm=None)"])
    assert start == 2  # after the log and before the rules
    assert shown[start + 1 : start + 7] == [
        [f"- the same on the command line: --rule {best.rule}; without a cap, which played no part"],
        [f"- criterion: {CRITERION}"],
        ["- checked [/]"],
        ["- a doubt"],
        ["The trade-off along z_thresh"],
        ["z_thresh", "outliers that fired", "fired below 1.3x", "fired", "locks in"],
    ]
    assert shown[start + 8 : start + 10] == [
        ["2.5", "5 of 6", "1,200", "1,300", "no"],
        ["3", "4 of 6", "0", "9", "yes"],
    ]
    assert shown[start + 10 : start + 12] == [["Beside the defaults"], list(DEFAULT)]
