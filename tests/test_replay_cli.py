"""The command line: exit codes, one line for what is wrong, JSON and nothing else, files, a log's own settings."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from zclip_jax import cli, rules
from zclip_jax.replay import replay
from zclip_jax.replay._specs import rule_names

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

NUMBER = int | float
LOG_TYPES = {
    "format": str,
    "column": str,
    "num_norms": int,
    "first_step": int,
    "last_step": int,
    "cadence": int,
    "num_nonfinite": int,
    "median": float,
    "max": float,
    "num_outliers": int,
    "spike_score": float,
    "loss_spike_score": float,
    "notes": list,
}
SETTING_TYPES = {
    "settings": dict,
    "num_steps": int,
    "num_fired": int,
    "num_bound": int,
    "num_capped": int,
    "num_nonfinite": int,
    "fired_rate": float,
    "bound_rate": float,
    "capped_rate": float,
    "longest_run": int,
    "locked_in_from": int | None,
    "num_outliers": int,
    "num_caught": int,
    "num_false_alarms": int,
}
RULE_TYPES = {"rule": str, **SETTING_TYPES, "warm_up": dict, "largest_spikes": list}
WARM_UP_TYPES = {"num_norms": int, "outlier_steps": list, "loose_until": int | None}
SPIKE_TYPES = {
    "step": int,
    "row": int,
    "norm": float,
    "local_median": float,
    "ratio": float,
    "allowed": float | None,
    "clip_scale": float,
    "fired": bool,
}


def check(found, types):
    assert list(found) == list(types)
    for key, kind in types.items():
        assert isinstance(found[key], kind), key


def test_replay_as_json(run_json, log):
    told = run_json("replay", log, "--sweep", "z_thresh=2,3.5")
    assert list(told) == ["log", "rules", "sweep", "flags"]
    check(told["log"], LOG_TYPES)
    assert [rule["rule"] for rule in told["rules"]] == ["zclip", "fixed:max_norm=1", "autoclip"]
    for rule in told["rules"]:
        check(rule, RULE_TYPES)
        check(rule["warm_up"], WARM_UP_TYPES)
        for spike in rule["largest_spikes"]:
            check(spike, SPIKE_TYPES)
    for row in told["sweep"]:
        check(row, SETTING_TYPES)
    assert [row["settings"] for row in told["sweep"]] == [{"z_thresh": 2}, {"z_thresh": 3.5}]
    assert all(isinstance(flag, str) for flag in told["flags"])


def test_the_numbers_are_those_of_replay(run_json, log):
    told = run_json("replay", log, "--sweep", "z_thresh=2,3.5", "alpha=0.9")
    norms = norms_of()
    assert told["log"]["num_norms"] == norms.size
    assert told["log"]["median"] == np.median(norms)
    made = [rules.at_most(rules.zscore(), 1.0), rules.fixed(1.0), rules.percentile()]
    made += [rules.at_most(rules.zscore(z_thresh=z, alpha=0.9), 1.0) for z in (2.0, 3.5)]
    for row, rule in zip(told["rules"] + told["sweep"], made, strict=True):
        summary = replay(rule, norms).summary
        for key in ("num_fired", "num_bound", "num_capped", "longest_run"):
            assert row[key] == summary[key]


def test_no_sweep_no_key(run_json, log):
    assert list(run_json("replay", log)) == ["log", "rules", "flags"]


def test_tables(run, log):
    code, out, err = run("replay", log)
    assert (code, err) == (0, "")
    assert out.startswith("JSON lines: 400 norms under 'grad_norm', steps 0 to 399, median ")
    for words in ("fired below 1.3x", "SpikeScore: norm ", "Largest spikes, and what zclip makes of them"):
        assert words in out
    assert "Sweep" not in out
    code, out, _ = run("replay", log, "--sweep", "z_thresh=2,3", "min_rel_std=0,0.12")
    assert "\nSweep of zclip\n" in out


def test_a_rule_and_those_to_compare(run_json, log):
    told = run_json(
        "replay", log, "--rule", "zclip:z_thresh=3,max_grad_norm=none", "--compare", "levelclip", "ema"
    )
    names = ["zclip:z_thresh=3,max_grad_norm=none", "levelclip", "ema", "fixed:max_norm=1", "autoclip"]
    assert [rule["rule"] for rule in told["rules"]] == names
    assert told["rules"][0]["settings"]["z_thresh"] == 3
    assert told["rules"][0]["settings"]["max_grad_norm"] is None


def test_no_rule_is_there_twice(run_json, log):
    told = run_json("replay", log, "--rule", "autoclip", "--compare", "zclip", "autoclip", "zclip")
    assert [rule["rule"] for rule in told["rules"]] == ["autoclip", "zclip", "fixed:max_norm=1"]


def test_every_rule_by_its_name(run_json, log):
    names = [name for name in rule_names() if name != "fixed"]
    told = run_json("replay", log, "--rule", names[0], "--compare", *names[1:], "fixed:max_norm=2")
    assert [rule["rule"] for rule in told["rules"]][: len(names) + 1] == [*names, "fixed:max_norm=2"]
    assert all(rule["settings"]["max_grad_norm"] is None for rule in told["rules"][2:])


@pytest.mark.parametrize("option", ["--column", "--tag"])
@pytest.mark.parametrize("command", ["replay", "recommend"])
def test_a_column(run_json, tmp_path, option, command):
    path = write(tmp_path / "log.jsonl", norms_of(100), columns=("grad_norm", "the other"))
    told = run_json(command, path, option, "the other")
    if command == "replay":
        assert told["log"]["column"] == "the other"


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


def test_a_name_in_brackets_is_no_markup(run, tmp_path):
    path = write(tmp_path / "log.jsonl", norms_of(), columns=("[red]x[/red]",))
    _, out, _ = run("replay", path, "--column", "[red]x[/red]")
    assert out.startswith("JSON lines: 400 norms under '[red]x[/red]', ")


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


def test_a_rule_that_is_asked_for_wins_over_the_log(run_json, tmp_path):
    path = write(tmp_path / "log.jsonl", norms_of(), first=[{"config": CONFIG}])
    rule = run_json("replay", path, "--rule", "zclip")["rules"][0]
    assert (rule["rule"], rule["settings"]["z_thresh"]) == ("zclip", 2.5)


def test_settings_of_another_clipping_are_left_alone(run_json, tmp_path):
    path = write(tmp_path / "log.jsonl", norms_of(), first=[{"config": {"clip": "none", "z_thresh": -3.0}}])
    assert run_json("replay", path)["rules"][0]["rule"] == "zclip"


def test_settings_in_a_log_that_no_rule_accepts(refused, tmp_path):
    path = write(tmp_path / "log.jsonl", norms_of(), first=[{"config": CONFIG | {"alpha": 7.0}}])
    told = refused("replay", path)
    assert "alpha must be a number in [0, 1), got 7.0" in told
    # Nobody wrote that on the command line: it says where it comes from.
    assert "log" in told


# Recommend

CANDIDATE_TYPES = {
    "rule": str,
    "num_caught": int,
    "num_false_alarms": int,
    "num_fired": int,
    "locked_in": bool,
}


def test_recommend_as_json(run_json, log):
    told = run_json("recommend", log)
    assert list(told) == ["best", "num_outliers", "num_candidates", "curve", "check", "doubts"]
    for candidate in (told["best"], *told["curve"]):
        check(candidate, CANDIDATE_TYPES)
    assert told["best"] in told["curve"]
    assert (told["num_outliers"], told["num_candidates"]) == (2, 158)
    assert told["check"].startswith("chosen on the first half alone: ")
    assert told["doubts"] == [
        "the log is too short: 400 norms, and a choice needs 1,000",
        "2 steps are above 2x their local median, too few to tell thresholds apart",
    ]


def test_what_is_recommended_can_be_replayed(run, run_json, log):
    best = run_json("recommend", log)["best"]
    rule = run_json("replay", log, "--rule", best["rule"])["rules"][0]
    for key in ("num_caught", "num_false_alarms", "num_fired"):
        assert rule[key] == best[key]
    code, out, err = run("recommend", log)
    assert (code, err) == (0, "")
    assert out.startswith(f"Best of 158 candidates: {best['rule']}\n- criterion: never locked in; ")
    assert "- the log is too short: 400 norms, and a choice needs 1,000\n" in out


# Files


def test_pictures(run, log, tmp_path):
    png, page = tmp_path / "run.png", tmp_path / "run.html"
    code, out, err = run("replay", log, "--png", str(png), "--html", str(page), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["log"]["num_norms"] == 400
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<html" in page.read_text()


@pytest.mark.parametrize("option", ["--png", "--html"])
@pytest.mark.parametrize("where", ["no such folder/x.png", ".", "a file/x.png"])
def test_a_path_that_cannot_be_written(run, log, tmp_path, option, where):
    (tmp_path / "a file").touch()
    before = sorted(tmp_path.iterdir())
    code, _, err = run("replay", log, option, os.path.join(tmp_path, where))
    assert code == 2
    assert err.startswith("zclip-jax: ")
    assert len(err.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--png", "--html"])
def test_the_log_is_never_written_over(run, tmp_path, option):
    path = tmp_path / "log.png"  # formats are found by content
    write(path, norms_of(50))
    before = path.read_bytes()
    assert run("replay", str(path), option, str(path))[0] == 2
    assert path.read_bytes() == before


def test_a_picture_that_no_one_can_draw(run, log, tmp_path):
    code, _, err = run("replay", log, "--png", str(tmp_path / "run.nothing"))
    assert code == 2
    assert err.startswith("zclip-jax: ")
    assert "nothing" in err


# What is wrong


def test_no_such_log(refused, tmp_path):
    missing = str(tmp_path / "missing.jsonl")
    for command in ("replay", "recommend"):
        told = refused(command, missing)
        assert missing in told
        assert "No such file" in told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"\x00\x01\x02\xff" * 200, "binary data that is neither Parquet nor TensorBoard events"),
        (b"just some words\n" * 5, "no gradient norm"),
        (b'{"step": 1, "loss": 2.0}\n' * 5, "no gradient norm: found step, loss"),
        (b'{"log_history": [', "JSON that is cut off or damaged"),
        (b"PAR1 and no more", "log"),
    ],
)
def test_a_log_that_holds_no_norms(refused, tmp_path, content, words):
    path = tmp_path / "log"
    path.write_bytes(content)
    for command in ("replay", "recommend"):
        told = refused(command, str(path))
        assert str(path) in told
        assert words in told


def test_a_folder_without_events(refused, tmp_path):
    assert "without TensorBoard event files" in refused("replay", str(tmp_path))


def test_a_column_that_is_not_there(refused, log):
    assert "no number under 'gnorm': found step, loss, grad_norm" in refused(
        "replay", log, "--column", "gnorm"
    )


RULE_MISTAKES = [
    (("--rule", "zlip"), "no rule is called 'zlip'; there are zclip, levelclip, "),
    (("--rule", "zclip:beta=1"), "zclip has no setting 'beta'; it has alpha, z_thresh, "),
    (("--rule", "fixed"), "fixed needs max_norm, as in fixed:max_norm=1"),
    (("--rule", "zclip:alpha=2"), "alpha must be a number in [0, 1), got 2"),
    (("--compare", "ema", "zlip"), "no rule is called 'zlip'; there are "),
    (("--rule", "zclip", "--sweep", "alpha"), "a sweep is written name=number,number,…, got 'alpha'"),
    (("--rule", "zclip", "--sweep", "beta=1"), "zclip has no setting 'beta'; it has "),
]


@pytest.mark.parametrize(("options", "start"), RULE_MISTAKES, ids=lambda x: " ".join(x)[:40])
def test_mistakes_in_rules_are_found_before_the_log_is_read(refused, monkeypatch, options, start):
    monkeypatch.setattr(cli, "read", lambda *_, **__: pytest.fail("it was read"))
    assert refused("replay", "a long log", *options).startswith(start)


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ("z_thresh=2,-1", "z_thresh must be a number > 0, got -1"),
        ("beta=1", "zclip has no setting 'beta'; it has "),
        ("robust_warmup=true,false", "robust_warmup can't be swept, since the rule's program depends on it"),
        ("strategy=max,mean", "a sweep is written name=number,number,…, got 'strategy=max,mean'"),
    ],
)
def test_mistakes_in_a_sweep(refused, log, grid, told):
    assert refused("replay", log, "--sweep", grid).startswith(told)


@pytest.mark.parametrize("warm_up", ["10.0", "10000000000"])
def test_a_warm_up_of_an_odd_length(run, log, warm_up):
    code, _, err = run("replay", log, "--rule", f"zclip:warmup_steps={warm_up}", "--json")
    assert (code, err.startswith("zclip-jax: warmup_steps must be ")) in [(0, False), (2, True)]


def test_nothing_to_recommend_on(refused, tmp_path):
    path = write(tmp_path / "log.jsonl", [NAN, NAN])
    assert refused("recommend", path).startswith("norms must have a finite one among them")


@pytest.mark.parametrize("norms", [[NAN] * 3, [1.0], [0.0] * 3, [-1.0], [1e300, 1.0, 1e25], [NAN, 1.0]])
@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_odd_norms(run, tmp_path, norms, json_too):
    path = write(tmp_path / "log.jsonl", norms)
    code, out, err = run("replay", path, *json_too)
    assert (code, err) == (0, "")
    assert out
    if not all(np.isnan(norms)):
        assert run("recommend", path, *json_too)[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["replay"],
        ["recommend"],
        ["draw", "log"],
        ["replay", "log", "--nothing"],
        ["replay", "log", "--rule"],
        ["replay", "log", "--compare"],
        ["recommend", "log", "--rule", "zclip"],
        ["replay", "log", "another"],
    ],
    ids=" ".join,
)
def test_a_command_that_is_none(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.startswith("usage: zclip-jax")
    assert ": error: " in err


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    told = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "replay" in told
    assert "recommend" in told
    with pytest.raises(SystemExit):
        cli.main(["replay", "--help"])
    told = capsys.readouterr().out
    for word in ("--column", "--tag", "--json", "--rule", "--compare", "--sweep", "--png", "--html", "LOG"):
        assert word in told
    words = " ".join(told.split())
    assert f"Names: {', '.join(rule_names())}." in words
    with pytest.raises(SystemExit):
        cli.main(["recommend", "--help"])
    told = capsys.readouterr().out
    for word in ("--column", "--tag", "--json", "LOG"):
        assert word in told


# What an extra installs


def without(monkeypatch, package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("command", ["replay", "recommend"])
def test_without_rich(refused, run_json, monkeypatch, log, command):
    without(monkeypatch, "rich")
    assert refused(command, log) == "the report needs rich: pip install 'zclip-jax[replay]'"
    assert run_json(command, log)


@pytest.mark.parametrize(("option", "package"), [("--png", "matplotlib"), ("--html", "plotly")])
def test_without_what_draws(run, monkeypatch, log, tmp_path, option, package):
    without(monkeypatch, package)
    path = tmp_path / "drawn.png"
    code, _, err = run("replay", log, "--json", option, str(path))
    assert code == 2
    assert err.startswith("zclip-jax: ")
    assert f" needs {package}: pip install 'zclip-jax[replay]'\n" in err
    assert not path.exists()
    assert run("replay", log, "--json")[0] == 0


# As it is installed


def command_line(*arguments):
    script = os.path.join(os.path.dirname(sys.executable), "zclip-jax")
    call = (
        [script]
        if os.path.exists(script)
        else [sys.executable, "-c", "from zclip_jax.cli import main; exit(main())"]
    )
    return [*call, *arguments]


def test_the_command(log):
    done = subprocess.run(command_line("replay", log, "--json"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["log"]["num_norms"] == 400
    done = subprocess.run(command_line("replay", "missing"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("zclip-jax: ")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_enough(log, options):
    """As under `| head -1`: the pipe closes while there is more to say."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            command_line("replay", log, *options), stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")
