"""Faults found in replay and recommend, by their numbers: each prints its input and what comes of it now."""

import io
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zclip_jax import cli, rules
from zclip_jax.replay import recommend, sweep

pytestmark = pytest.mark.usefixtures("compiled_once")

NAN, INF = math.nan, math.inf


@pytest.fixture
def show(capsys):
    """Prints a fault's number, an input and its value now, past what the test captures."""

    def print_it(number, given, value):
        with capsys.disabled():
            print(f"\n{number}. {given} -> {value}", end="")

    return print_it


@pytest.fixture
def run(capsys):
    """Runs a command; its exit status, output and errors."""

    def run_command(*arguments):
        try:
            code = cli.main(list(arguments))
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return run_command


def write(path, norms, name="log.jsonl"):
    rows = [json.dumps({"step": i, "grad_norm": float(x)}) for i, x in enumerate(norms)]
    (path / name).write_text("\n".join(rows) + "\n")
    return str(path / name)


def noise(steps):
    return np.exp(0.1 * np.random.default_rng(0).standard_normal(steps))


# 13: an error names the argument and what is accepted


def without_address(x):
    """A test's name, the same in every process that collects it."""
    return repr(x).partition(" at 0x")[0]


@pytest.mark.parametrize(
    "grid",
    [
        [],
        (),
        np.asarray([]),
        range(0),
        iter([]),
        {},
        2.5,
        None,
        "2.5",
        b"3",
        [[2.0, 3.0]],
        [2.0, None],
        ["2.0"],
        [2.0, "x"],
        [2.0 + 1j],
        {"z": 1.0},
        len,
        [10**400],
    ],
    ids=without_address,
)
def test_13_grids_that_are_none(show, grid):
    with pytest.raises(
        ValueError, match=r"^z_thresh must be one or more numbers, such as \[2\.0, 3\.0\], got "
    ) as told:
        sweep(rules.zscore, [1.0, 2.0], z_thresh=grid)
    with pytest.raises(ValueError, match=r"^z_thresh must be one or more numbers"):
        sweep(rules.zscore, [1.0, 2.0], alpha=[0.9], z_thresh=grid)
    show(13, f"sweep(z_thresh={grid!r})", told.value)


@pytest.mark.parametrize(
    "grid",
    [
        [2.0, 3.0],
        (2, 3),
        np.asarray([2.0, 3.0]),
        np.float32([2, 3]),
        range(2, 4),
        {2.0: 0, 3.0: 0}.keys(),
        iter([2, 3]),
    ],
    ids=without_address,
)
def test_13_what_is_a_grid(grid):
    found, result = sweep(rules.zscore, [1.0] * 30 + [9.0], z_thresh=grid)
    assert [row["z_thresh"] for row in found] == [2, 3]
    assert result.outcomes.fired.shape == (2, 31)


def test_13_numbers_beyond_int32():
    found, result = sweep(rules.fixed, [1.0, 1e10], max_norm=[2, 3_000_000_000, 2**40, 2**63 - 1])
    assert [row["max_norm"] for row in found] == [2, 3_000_000_000, 2**40, 2**63 - 1]
    assert result.outcomes.fired[:, 1].tolist() == [True, True, False, False]
    assert result.outcomes.threshold[:, 0].tolist() == [2.0, 3e9, 2.0**40, 2.0**63]


@pytest.mark.parametrize(
    "rule", ["zclip:patience=inf", "zclip:warmup_steps=inf", "window_zscore:window=1e400"]
)
def test_13_an_infinite_count(show, run, tmp_path, rule):
    code, out, err = run("replay", write(tmp_path, noise(30)), "--rule", rule)
    name = rule.partition(":")[2].partition("=")[0]
    assert (code, out) == (2, "")
    assert err.startswith(f"zclip-jax: {name} must be ")
    assert "inf" in err
    show(13, f"--rule {rule}", err.strip())


def test_13_a_buffer_beyond_memory(show, run, tmp_path):
    rule = "zclip:robust_warmup=true,warmup_steps=2000000000"
    code, out, err = run("replay", write(tmp_path, noise(30)), "--rule", rule)
    assert (code, out) == (2, "")
    assert err.startswith("zclip-jax: warmup_steps must be ")
    show(13, f"--rule {rule}", err.strip())


# 31: norms that say nothing


NOTHING = {
    "zeros": [0.0] * 2000,
    "NaN": [NAN] * 50,
    "infinite": [INF, -INF] * 20,
    "negative": [-1.0] * 30,
    "zeros and NaN": [0.0, NAN] * 30,
    "one zero": [0.0],
    "too small for a float": [1e-45] * 30,
    "too large": [1e30] * 30,
}


@pytest.mark.parametrize("name", NOTHING)
def test_31_norms_that_say_nothing(show, run, tmp_path, name):
    """`replay` shows them with a flag, `recommend` refuses."""
    path = write(tmp_path, NOTHING[name])
    code, out, err = run("replay", path)
    assert (code, err) == (0, "")
    flags = out.partition("What stands out, for zclip\n")[2].splitlines()
    assert len(flags) == 1
    assert flags[0].startswith(("- no norm is finite and above zero: ", "- no norm is finite: "))
    refused, nothing, told = run("recommend", path)
    assert (refused, nothing) == (2, "")
    assert told.startswith("zclip-jax: norms must have a finite one above zero among them, got ")
    show(
        31, f"{len(NOTHING[name]):,} norms, {name}", f"replay 0, {flags[0]!r}; recommend 2, {told.strip()!r}"
    )


def test_31_mostly_zeros(show, run, tmp_path):
    norms = np.zeros(2000)
    norms[:30] = noise(30)
    code, out, _ = run("replay", write(tmp_path, norms))
    assert code == 0
    assert "- 30 norms above zero are few: rates and settings found on them may be chance\n" in out
    (doubt,) = [doubt for doubt in recommend(norms).doubts if "short" in doubt]
    assert doubt == "the log is too short: 30 norms, and a choice needs 1,000"
    show(31, "30 norms and 1,970 zeros", doubt)


# 32: choices not to be trusted without a word


def tails(steps=3000):
    rng = np.random.default_rng(0)
    return {
        "log-normal 1.5": rng.lognormal(0, 1.5, steps),
        "log-normal 1.0": rng.lognormal(0, 1.0, steps),
        "log-normal 0.5": rng.lognormal(0, 0.5, steps),
        "Pareto 1.5": 1 + rng.pareto(1.5, steps),
        "Student 2": 1 + np.abs(rng.standard_t(2, steps)),
        "exponential": rng.exponential(1.0, steps),
    }


@pytest.mark.parametrize("name", tails(1))
def test_32_a_heavy_tail_is_told(show, name):
    norms = tails()[name]
    found = recommend(norms)
    told = [doubt for doubt in found.doubts if "heavy tail" in doubt]
    assert len(told) == 1
    often = [doubt for doubt in found.doubts if doubt.startswith("the choice fires on ")]
    assert len(often) == (found.best.num_fired > 300)
    show(
        32,
        f"{norms.size:,} norms, {name}",
        f"{found.best.call} fires on {found.best.num_fired / norms.size:.0%}: {told + often}",
    )


@pytest.mark.parametrize("spread", [0.05, 0.1, 0.2])
def test_32_a_run_with_spikes_has_no_heavy_tail(spread):
    norms = np.exp(spread * np.random.default_rng(0).standard_normal(3000))
    norms[::100] *= 6.0
    assert recommend(norms).doubts == ()


def test_32_a_choice_that_fires_often_is_told(show):
    """Spikes in one step of seven, which no candidate should leave, and in which no tail is heavy."""
    norms = noise(2000)
    norms[6::7] = 8.0
    found = recommend(norms)
    assert found.best.num_fired > 200
    told = [doubt for doubt in found.doubts if doubt.startswith("the choice fires on ")]
    assert told == [
        f"the choice fires on {found.best.num_fired / 2000:.0%} of the steps: so many are no outliers, and clipping "
        "them changes the run"
    ]
    show(32, "a spike in each seventh step", told[0])


def test_32_the_call_names_the_cap(show, run, tmp_path):
    """So that pasted on a run with norms above 1 it doesn't clip every step."""
    norms = 5 * noise(1200)
    norms[100::100] *= 8
    path = write(tmp_path, norms)
    code, out, _ = run("recommend", path)
    (line,) = [line for line in out.splitlines() if line.startswith("Best of ")]
    call = line.partition(": ")[2]
    made = eval(call, {name: getattr(__import__("zclip_jax"), name) for name in ("zclip", "levelclip")})
    state, scaled = made.init(np.ones(1)), 0
    for norm in norms[:200]:
        updates, state = made.update(np.asarray([norm], np.float32), state)
        scaled += updates[0] < 0.999 * norm
    assert code == 0
    assert 0 < scaled < 5
    (spelled,) = [line for line in out.splitlines() if "--rule " in line and line.startswith("- ")]
    rule = spelled.partition("--rule ")[2].partition(";")[0]
    again = json.loads(run("replay", path, "--rule", rule, "--json")[1])["rules"][0]
    best = recommend(norms).best
    assert (best.call, best.rule) == (call, rule)
    assert (again["num_fired"], again["num_capped"]) == (best.num_fired, 0)
    assert best.settings.items() <= again["settings"].items()
    show(32, "Best of", f"{call}, {rule}")


# 33: options given twice, and terminals with few characters


def test_33_repeated_options_add_up(show, run, tmp_path):
    path = write(tmp_path, noise(60))
    options = [
        "--sweep",
        "z_thresh=2,3",
        "--sweep",
        "alpha=0.9",
        "--compare",
        "level",
        "--compare",
        "ema",
        "adagc",
    ]
    told = json.loads(run("replay", path, *options, "--json")[1])
    assert [row["settings"] for row in told["sweep"]] == [{"z_thresh": z, "alpha": 0.9} for z in (2, 3)]
    assert [rule["rule"] for rule in told["rules"]][:4] == ["zclip", "level", "ema", "adagc"]
    show(33, " ".join(options), [row["settings"] for row in told["sweep"]])


@pytest.mark.parametrize(
    "options",
    [
        ["--rule", "zclip", "--rule", "level"],
        ["--column", "a", "--column", "b"],
        ["--column", "a", "--tag", "b"],
        ["--run", "1", "--run", "2"],
        ["--png", "a.png", "--png", "b.png"],
        ["--html", "a", "--html", "a"],
        ["--rule", "", "--rule", "level"],
        ["--sweep", "alpha=0.9", "--sweep", "alpha=0.8"],
        ["--sweep", "alpha=0.9", "alpha=0.8"],
    ],
    ids=" ".join,
)
def test_33_nothing_is_replaced_without_a_word(show, run, tmp_path, options):
    code, out, err = run("replay", write(tmp_path, noise(30)), *options)
    assert (code, out) == (2, "")
    assert "may be given once, got " in err or "is given twice in a sweep" in err
    assert options[0] in err or "alpha" in err
    show(33, " ".join(options), err.splitlines()[-1])


ENCODINGS = ("ascii", "latin-1", "cp1252", "cp437", "utf-8")


def printed(arguments, encoding, width="80"):
    """What a command prints on a terminal with that encoding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True))
        patch.setenv("COLUMNS", width)
        try:
            code = cli.main(arguments)
        except SystemExit as stopped:
            code = stopped.code
        sys.stdout.seek(0)
        text = sys.stdout.read()
    return code, text


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("width", ["1", "20", "200"])
def test_33_help_on_any_terminal(encoding, width):
    for command in ([], ["replay"], ["recommend"]):
        code, text = printed([*command, "--help"], encoding, width)
        assert code == 0
        assert text.startswith("usage: zclip-jax")
        assert "\\u" not in text  # nothing had to be spelled


@settings(max_examples=20, deadline=None)
@given(
    name=st.text(
        st.characters(blacklist_categories=["Cc"], blacklist_characters="/"), min_size=1, max_size=12
    ),
    encoding=st.sampled_from(ENCODINGS),
    command=st.sampled_from(["replay", "recommend"]),
)
def test_33_reports_on_any_terminal(tmp_path_factory, name, encoding, command):
    """Names in a log and of it are printed or spelled, whatever they hold."""
    path = tmp_path_factory.mktemp("logs") / "é…✓.jsonl"
    column = f"grad_norm {name}"
    rows = [json.dumps({"step": i, column: float(x)}) for i, x in enumerate(noise(40))]
    path.write_text("\n".join(rows) + "\n")
    code, text = printed([command, str(path), "--column", column], encoding)
    assert code == 0
    assert "40 norms under " in text


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=str
)
def test_33_in_a_process(show, tmp_path, variables):
    path = write(tmp_path, noise(40), "é\udcff.jsonl")
    environment = {**os.environ, "PYTHONCOERCECLOCALE": "0", "COLUMNS": "30"} | variables
    for arguments in (["replay", "--help"], ["replay", path]):
        command = [sys.executable, "-m", "zclip_jax.cli", *arguments]
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.decode("ascii")
        show(33, f"{variables} {arguments[-1]!a}", done.stdout.splitlines()[0].decode("ascii"))
