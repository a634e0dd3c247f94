"""The norms that training the example logs, replayed, give the decisions that it took, bit for bit."""

import dataclasses
import importlib
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from tests.cases import RULES
from zclip_jax import Outcome, clip_by_rule, rules
from zclip_jax.replay import read, replay

train = importlib.import_module("train")

SMALL = {"context": 16, "hidden_size": 32, "ffn_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
FIELDS = [field.name for field in dataclasses.fields(Outcome)]
EACH_KIND = list({case.make: case for case in RULES}.values())


def assert_same(replayed: Outcome, logged: dict[str, list]) -> None:
    for name, values in logged.items():
        np.testing.assert_array_equal(getattr(replayed, name), np.asarray(values), err_msg=name)


@pytest.mark.slow
def test_a_whole_run_from_its_log(tmp_path: Path) -> None:
    text = " ".join(np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta"], 4000))
    (tmp_path / "text.txt").write_text(text)
    flags = SMALL | {"steps": 60, "batch_size": 8, "lr": 0.01, "warmup": 4, "clip_warmup": 6, "z_thresh": 2.0}
    flags |= {"data": tmp_path / "text.txt", "run_dir": tmp_path / "run", "mesh": "fsdp=1"}
    given = [part for name, value in flags.items() for part in ("--" + name.replace("_", "-"), str(value))]
    assert train.main([*given, "--spike-steps", "30", "45"]) == 0

    log = tmp_path / "run" / "metrics.jsonl"
    recording = read(log)
    rule = rules.zscore(**{k: v for k, v in recording.settings.items() if k != "max_grad_norm"})
    result = replay(rules.at_most(rule, recording.settings["max_grad_norm"]), recording.norms)
    rows = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert_same(
        result.outcomes, {name: [np.float32(row[f"zclip/{name}"]) for row in rows] for name in FIELDS}
    )
    assert {30, 45} <= set(recording.steps[np.asarray(result.outcomes.fired)])


@pytest.mark.slow
def test_each_rule_in_the_training_step() -> None:
    """All in one program, watching the same norms."""
    llama = train.model_config(train.ModelOptions(**SMALL), vocab_size=64)
    config = train.Config(steps=40, lr=0.01, warmup=4)
    clipper = optax.chain(*(clip_by_rule(case(), observe_only=True) for case in EACH_KIND))
    with jax.set_mesh(train.make_mesh("fsdp=1")):
        init, train_step, _ = train.step_functions(config, llama, clipper)
        in_haste = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
        state = jax.jit(init, compiler_options=in_haste)()
        step, logged = jax.jit(train_step), []
        rng = np.random.default_rng(0)
        for i in range(40):
            period = 64 if i == 30 else 4  # a batch unlike the others
            tokens = rng.integers(0, period, (8, 17)).astype(np.int32)
            state, scalars = step(state, tokens)
            logged.append(jax.device_get(scalars))
    losses = np.asarray([row["loss"] for row in logged])
    fired = set()
    for i, case in enumerate(EACH_KIND):
        rows = {name: np.asarray([row[f"zclip/0/{i}/{name}"] for row in logged]) for name in FIELDS}
        assert_same(replay(case(), rows["grad_norm"], value=losses).outcomes, rows)
        fired |= {case.make} if rows["fired"][30] else set()
    assert {rules.level, rules.percentile} <= fired
