"""The command line: exit codes, one line for what is wrong, JSON and nothing else, files, a log's own settings."""

import importlib.metadata
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from zclip_jax import cli, rules
from zclip_jax.replay import recommend, replay
from zclip_jax.replay._specs import rule_names

pytestmark = pytest.mark.usefixtures("compiled_once")

NAN = math.nan
COLUMN = "grad_norm"


def norms_of(steps=400, seed=0):
    norms = np.exp(0.1 * np.random.default_rng(seed).standard_normal(steps))
    norms[steps // 2 :: 100] = 8.0
    return norms


def write(path, norms, *, first=(), columns=(COLUMN,), steps=None, loss=2.5):
    steps = range(len(norms)) if steps is None else steps
    rows = [*first]
    for step, norm in zip(steps, norms, strict=True):
        rows.append({"step": int(step), "loss": loss} | dict.fromkeys(columns, float(norm)))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write(tmp_path_factory.mktemp("logs") / "log.jsonl", norms_of())


@pytest.fixture
def run(capsys):
    """Runs a command in this process; its exit code, output and errors."""

    def run_command(*arguments):
        code = cli.main(list(arguments))
        return code, *capsys.readouterr()

    return run_command


@pytest.fixture
def run_json(run):
    def run_command(*arguments):
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return run_command


@pytest.fixture
def unread(monkeypatch):
    """Reading the log fails the test."""
    monkeypatch.setattr(cli, "read", lambda *_, **__: pytest.fail("it was read"))


@pytest.fixture
def refused(run):
    """The one line that a refused command leaves, and nothing besides."""

    def run_command(*arguments):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("zclip-jax: ")
        assert len(err.splitlines()) <= 2
        return err.removeprefix("zclip-jax: ").rstrip("\n")

    return run_command


# Replay

LOG = [
    "name",
    "format",
    "column",
    "num_norms",
    "first_step",
    "last_step",
    "cadence",
    "num_nonfinite",
    "median",
]
LOG += ["max", "num_outliers", "num_falling", "spike_score", "loss_spike_score"]
LOG += ["olmo_core_spike_score", "olmo_core_spike_score_last", "notes"]
SETTING = ["settings", "num_steps", "num_fired", "num_bound", "num_capped", "num_nonfinite", "fired_rate"]
SETTING += ["bound_rate", "capped_rate", "longest_run", "locked_in_from", "num_outliers", "num_caught"]
SETTING += ["num_false_alarms"]
RULE = ["rule", *SETTING, "num_scaled", "median_scale", "least_scale", "warm_up", "largest_spikes"]
WARM_UP = ["num_norms", "outlier_steps", "loose_until"]
SPIKE = ["step", "row", "norm", "local_median", "ratio", "allowed", "clip_scale", "fired"]


def check_report(told):
    assert list(told["log"]) == LOG
    for rule in told["rules"]:
        assert list(rule) == RULE
        assert list(rule["warm_up"]) == WARM_UP
        assert all(list(spike) == SPIKE for spike in rule["largest_spikes"])
    assert all(isinstance(flag, str) for flag in told["flags"])
    assert told["runs"] == [{name: told[name] for name in ("log", "rules", "flags")}]


def names(told):
    return [rule["rule"] for rule in told["rules"]]


def test_replay_as_json(run_json, log):
    told = run_json("replay", log, "--sweep", "z_thresh=2,3.5", "alpha=0.9")
    assert list(told) == ["log", "rules", "flags", "runs", "sweep"]
    check_report(told)
    assert names(told) == ["zclip", "fixed:max_norm=1", "percentile"]
    assert all(list(row) == SETTING for row in told["sweep"])
    settings = [{"z_thresh": 2, "alpha": 0.9}, {"z_thresh": 3.5, "alpha": 0.9}]
    assert [row["settings"] for row in told["sweep"]] == settings
    norms = norms_of()
    assert (told["log"]["name"], told["log"]["num_norms"]) == ("log.jsonl", norms.size)
    assert told["log"]["median"] == np.median(norms)
    made = [rules.at_most(rules.zscore(), 1.0), rules.fixed(1.0), rules.percentile()]
    made += [rules.at_most(rules.zscore(z_thresh=z, alpha=0.9), 1.0) for z in (2.0, 3.5)]
    for row, rule in zip(told["rules"] + told["sweep"], made, strict=True):
        summary = replay(rule, norms).summary
        for key in ("num_fired", "num_bound", "num_capped", "longest_run"):
            assert row[key] == summary[key]


def test_tables(run, log):
    code, out, err = run("replay", log)
    assert (code, err) == (0, "")
    assert out.startswith("log.jsonl, JSON lines: 400 norms under 'grad_norm', steps 0 to 399, median ")
    assert "Largest spikes, and what zclip makes of them" in out
    assert "Sweep" not in out
    assert "\nSweep of zclip\n" in run("replay", log, "--sweep", "z_thresh=2,3")[1]


@pytest.mark.parametrize(
    ("rule", "compare", "shown"),
    [
        ("percentile", ["zclip", "percentile", "zclip"], ["percentile", "zclip", "fixed:max_norm=1"]),
        ("zclip", ["level", "ema"], ["zclip", "level", "ema", "fixed:max_norm=1", "percentile"]),
        ("zclip", ["zclip:alpha=0.97"], ["zclip", "fixed:max_norm=1", "percentile"]),
        ("fixed:max_norm=1.0", [], ["fixed:max_norm=1.0", "percentile"]),
        ("zclip:alpha=0.97", ["zclip"], ["zclip:alpha=0.97", "fixed:max_norm=1", "percentile"]),
        ("zclip", ["percentile:p=10.0"], ["zclip", "percentile:p=10.0", "fixed:max_norm=1"]),
        ("zclip", ["zclip:alpha=0.96"], ["zclip", "zclip:alpha=0.96", "fixed:max_norm=1", "percentile"]),
    ],
)
def test_rules_to_compare_are_there_once(run_json, log, rule, compare, shown):
    told = run_json("replay", log, "--rule", rule, *(["--compare", *compare] if compare else []))
    assert list(told) == ["log", "rules", "flags", "runs"]
    assert names(told) == shown


@pytest.mark.slow
def test_every_rule_by_its_name(run_json, log):
    every = [name for name in rule_names() if name != "fixed"]
    told = run_json("replay", log, "--rule", every[0], "--compare", *every[1:], "fixed:max_norm=2")
    assert names(told)[: len(every) + 1] == [*every, "fixed:max_norm=2"]
    check_report(told)
    assert all(rule["settings"]["max_grad_norm"] is None for rule in told["rules"][2:])


def test_a_column(run_json, run, refused, tmp_path):
    path = write(tmp_path / "log.jsonl", norms_of(), columns=("grad_norm", "[red]x[/red]"))
    assert run_json("replay", path, "--tag", "[red]x[/red]")["log"]["column"] == "[red]x[/red]"
    _, out, _ = run("replay", path, "--column", "[red]x[/red]")  # in brackets, and no markup
    assert out.startswith("log.jsonl, JSON lines: 400 norms under '[red]x[/red]', ")
    for command in ("replay", "recommend"):
        told = refused(command, path, "--column", "gnorm")
        assert "no number under 'gnorm': found step, loss, grad_norm, [red]x[/red]" in told


def test_flags_are_of_the_first_rule(run_json, tmp_path):
    norms = np.r_[norms_of(100)[:100], np.full(100, 5.0)]
    path = write(tmp_path / "log.jsonl", norms, steps=range(1000, 1200))
    locked = run_json("replay", path, "--rule", "zscore:patience=none")
    assert locked["rules"][0]["locked_in_from"] == 1100
    sentence = "locked in from step 1100: every later step is called a spike; set patience = 25"
    assert sentence in locked["flags"]
    beside = run_json("replay", path, "--rule", "zscore", "--compare", "zscore:patience=none")
    assert beside["rules"][1]["locked_in_from"] == 1100
    assert sentence not in beside["flags"]


def test_losses_reach_the_rules_that_look_at_them(run_json, tmp_path):
    losses = np.full(200, 2.0) + 0.01 * np.random.default_rng(0).standard_normal(200)
    losses[150] = 9.0
    rows = [{"step": i, "loss": x, COLUMN: 1.0 + i % 7 / 100} for i, x in enumerate(losses)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_json("replay", str(path), "--rule", "sigma_skip")["rules"][0]["num_fired"] == 1
    del rows[20]["loss"]  # an unknown loss would be taken for a spike
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_json("replay", str(path), "--rule", "sigma_skip")["rules"][0]["num_fired"] == 0


CONFIG = {
    "clip": "zclip",
    "z_thresh": 3.0,
    "clip_warmup": 10,
    "max_grad_norm": 2.0,
    "patience": None,
    "lr": 1e-3,
}


def test_a_log_with_settings_is_replayed_with_them(run_json, tmp_path):
    norms = norms_of()
    path = write(tmp_path / "log.jsonl", norms, first=[{"config": CONFIG}], columns=("zclip/grad_norm",))
    told = run_json("replay", path, "--sweep", "alpha=0.9,0.95")
    logged = told["rules"][0]
    assert logged["rule"] == "zclip as logged"
    settings = {"z_thresh": 3.0, "warmup_steps": 10, "max_grad_norm": 2.0, "patience": None, "alpha": 0.97}
    assert settings.items() <= logged["settings"].items()
    assert "lr" not in logged["settings"]
    rule = rules.at_most(rules.zscore(z_thresh=3.0, warmup_steps=10, patience=None), 2.0)
    summary = replay(rule, norms).summary
    assert (logged["num_fired"], logged["num_capped"]) == (summary["num_fired"], summary["num_capped"])
    assert logged["warm_up"]["num_norms"] == 10
    # The sweep changes one setting and keeps the others.
    swept = rules.at_most(rules.zscore(alpha=0.9, z_thresh=3.0, warmup_steps=10, patience=None), 2.0)
    assert told["sweep"][0]["num_fired"] == replay(swept, norms).summary["num_fired"]


def test_when_a_log_with_settings_is_replayed_with_others(run_json, tmp_path):
    path = write(tmp_path / "log.jsonl", norms_of(), first=[{"config": CONFIG}])
    rule = run_json("replay", path, "--rule", "zclip")["rules"][0]
    assert (rule["rule"], rule["settings"]["z_thresh"]) == ("zclip", 2.5)
    # They are of another clipping.
    path = write(tmp_path / "log.jsonl", norms_of(), first=[{"config": {"clip": "none", "z_thresh": -3.0}}])
    assert names(run_json("replay", path))[0] == "zclip"


def test_settings_in_a_log_that_no_rule_accepts(refused, tmp_path):
    path = write(tmp_path / "log.jsonl", norms_of(), first=[{"config": CONFIG | {"alpha": 7.0}}])
    told = refused("replay", path)
    assert "alpha must be a number in [0, 1), got 7.0" in told
    # Nobody wrote that on the command line: it says where it comes from.
    assert "log" in told


# Recommend

CANDIDATE = ["preset", "settings", "num_caught", "num_false_alarms", "num_fired", "locked_in", "call", "rule"]


def test_recommend_as_json(run_json, log):
    told = run_json("recommend", log)
    assert list(told) == ["log", "rules", "flags", "runs", "recommend"]
    check_report(told)
    found = told["recommend"]
    assert list(found) == ["best", "num_outliers", "num_candidates", "curve", "check", "doubts"]
    assert all(list(one) == CANDIDATE for one in (found["best"], *found["curve"]))
    assert found["best"] in found["curve"]
    assert (found["num_outliers"], found["num_candidates"]) == (2, 194)
    assert found["check"].startswith("chosen on the first half alone: ")
    assert found["doubts"] == [
        "the log is too short: 400 norms, and a choice needs 1,000",
        "outliers are too few to tell thresholds apart: 2, and a choice needs 5",
    ]
    # The report is of the rule that was chosen, which does there what was told of it.
    best = recommend(norms_of()).best
    assert (found["best"]["preset"], found["best"]["settings"]) == (best.preset, best.settings)
    assert told["rules"][0]["rule"] == best.rule
    assert best.settings.items() <= told["rules"][0]["settings"].items()
    for key in ("num_caught", "num_false_alarms", "num_fired"):
        assert told["rules"][0][key] == found["best"][key]


def test_recommend_as_text(run, log, tmp_path):
    code, out, err = run("recommend", log)
    assert (code, err) == (0, "")
    best = recommend(norms_of()).best
    parts = [
        "log.jsonl, JSON lines: 400 norms under 'grad_norm', ",
        f"\nBest of 194 candidates: {best.call}\n",
        f"- the same on the command line: --rule {best.rule}; ",
        "- criterion: neither locked in nor firing on more than 10% of the steps without cause; ",
        "- the log is too short: 400 norms, and a choice needs 1,000\n",
        "\nThe trade-off along ",
        "Beside the defaults\n",
        f"   {best.rule[:33]}",  # and the rest below, where the column is narrow
        "scaled down, by rule or cap",
        f"\nLargest spikes, and what {best.rule} makes of them\n",
    ]
    places = [out.index(part) for part in parts]
    assert places == sorted(places)


# Files


def test_pictures(run, log, tmp_path):
    png, page = tmp_path / "run.png", tmp_path / "run.html"
    code, out, err = run("replay", log, "--png", str(png), "--html", str(page), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["log"]["num_norms"] == 400
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<html" in page.read_text()


@pytest.mark.parametrize("option", ["--png", "--html"])
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("no such folder/x.png", "there is no folder {0}/no such folder to draw {0}/no such folder/x.png in"),
        (".", "{0}/. is a folder, and no file to draw to"),
        ("a file/x.png", "there is no folder {0}/a file to draw {0}/a file/x.png in"),
        ("log.png", "{0}/log.png is the log itself"),
    ],
)
def test_a_path_that_cannot_be_drawn_to(refused, unread, tmp_path, option, where, told):
    (tmp_path / "a file").touch()
    log = write(tmp_path / "log.png", norms_of(50))  # formats are found by content
    before = sorted(tmp_path.iterdir()), (tmp_path / "log.png").read_bytes()
    assert refused("replay", log, option, os.path.join(tmp_path, where)) == told.format(tmp_path)
    assert (sorted(tmp_path.iterdir()), (tmp_path / "log.png").read_bytes()) == before


def test_a_picture_that_no_one_can_draw(run, log, tmp_path):
    code, _, err = run("replay", log, "--png", str(tmp_path / "run.nothing"))
    assert code == 2
    assert err.startswith("zclip-jax: ")
    assert "nothing" in err


# What is wrong


@pytest.mark.parametrize("command", ["replay", "recommend"])
@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), (b"", "empty"), (b"loss 1", "no grad")]
)
def test_a_log_that_holds_no_norms(refused, tmp_path, command, content, words):
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
    told = refused(command, str(path))
    assert str(path) in told
    assert words in told


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (("--rule", "zlip"), "no rule is called 'zlip'; there are zclip, levelclip, "),
        (("--compare", "ema", "fixed"), "fixed needs max_norm, as in fixed:max_norm=1"),
        (("--rule", "zclip:alpha=2"), "alpha must be a number in [0, 1), got 2"),
        (("--rule", "zclip:warmup_steps=10000000000"), "warmup_steps must be below 2**31"),
        (("--rule", "zclip", "--sweep", "alpha"), "a sweep is written name=number,number,..., got 'alpha'"),
    ],
    ids=lambda x: " ".join(x)[:40],
)
def test_mistakes_in_rules_are_found_before_the_log_is_read(refused, unread, options, start):
    assert refused("replay", "a long log", *options).startswith(start)


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ("z_thresh=2,-1", "z_thresh must be a number > 0, got -1"),
        ("robust_warmup=true,false", "robust_warmup can't be swept, since the rule's program depends on it"),
    ],
)
def test_mistakes_in_a_sweep(refused, log, grid, told):
    assert refused("replay", log, "--sweep", grid).startswith(told)


def test_nothing_to_recommend_on(refused, tmp_path):
    for norms in ([NAN, NAN], [0.0] * 30, [-1.0, 0.0]):
        path = write(tmp_path / "log.jsonl", norms)
        assert refused("recommend", path).startswith("norms must have a finite one above zero among them")


@pytest.mark.parametrize("norms", [[NAN] * 3, [0.0] * 3, [-1.0] * 3, [1e300, 1.0, 1e25], [NAN, 1.0, 1.0]])
def test_odd_norms(run, run_json, tmp_path, norms):
    path = write(tmp_path / "log.jsonl", norms)
    assert run_json("replay", path)["log"]["num_norms"] == 3
    code, out, err = run("replay", path)
    assert (code, err) == (0, "")
    assert out.startswith("log.jsonl, JSON lines: 3 norms")
    if norms[0] == 1e300:
        assert run_json("recommend", path)["log"]["num_norms"] == 3


MISTAKES = ["", "replay", "recommend", "draw log", "replay log --nothing", "replay log --rule", "replay a b"]
MISTAKES += ["replay log --compare", "recommend log --rule zclip", "replay --compare zclip log"]


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_command_that_is_none(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments.split())
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.startswith("usage: zclip-jax")
    assert ": error: " in err


BOTH = ["LOG", "--column", "--tag", "--run", "--json"]
REPLAY = ["--rule", "--compare", "--sweep", "--png", "--html", "LOG stands before --compare and --sweep"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["replay", "recommend", "--version"]),
        (["replay"], [*BOTH, *REPLAY, f"Names: {', '.join(rule_names())}."]),
        (["recommend"], BOTH),
    ],
    ids=str,
)
def test_help(capsys, command, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    assert [word for word in words if word not in told] == []


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    told = capsys.readouterr()
    assert stopped.value.code == 0
    assert told == (f"zclip_jax {importlib.metadata.version('zclip_jax')}\n", "")


@pytest.mark.parametrize("command", ["replay", "recommend"])
def test_without_rich(refused, run_json, monkeypatch, log, command):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert refused(command, log) == "the report needs rich: pip install 'zclip-jax[replay]'"
    assert run_json(command, log)


# As it is installed


def start(*command, **options):
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


def script():
    path = os.path.join(os.path.dirname(sys.executable), "zclip-jax")
    return [path] if os.path.exists(path) else [sys.executable, "-m", "zclip_jax.cli"]


def test_the_command(log):
    done = start(*script(), "replay", log, "--json", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["log"]["num_norms"] == 400


@pytest.mark.slow
def test_the_module_as_a_command():
    done = start(sys.executable, "-m", "zclip_jax.cli", "replay", "missing", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("zclip-jax: ")


@pytest.mark.parametrize("options", [[], pytest.param(["--json"], marks=pytest.mark.slow)])
def test_a_reader_that_has_enough(log, options):
    """As under `| head -1`: the pipe closes while there is more to say."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = start(*script(), "replay", log, *options, stdout=pipe)
    assert (done.returncode, done.stderr) == (0, "")
