"""What clipping costs in the optimizer update: bytes from XLA's cost analysis, and paired wall-clock ratios.

    python -m tests.benchmarks.overhead --params 50_000_000

For each way of clipping, chained ahead of adamw, the update is compiled and run on gradients of that many
float32 parameters. "extra reads" is XLA's bytes accessed over bare adamw's, in units of one read of the
gradients: the norm needs one. "time" is the median over rounds of this chain's time divided by that of
`clip_by_global_norm` in the same round, the order within a round shuffled. The second table has the reads of
every rule, and the size of its state. The third has the CPU seconds that compiling the update of many small leaves
takes, also as a multiple of `zclip` with one norm for all. No accelerator is needed; where there is one, it is used.
"""

import argparse
import random
import statistics
import time

import jax
import jax.numpy as jnp
import optax

import zclip_jax
from zclip_jax import clip_by_rule, rules, watch

BASELINE = "optax.clip_by_global_norm"
CHAINS = {
    "adamw alone": lambda: optax.adamw(3e-4),
    BASELINE: lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)),
    "zclip": lambda: optax.chain(zclip_jax.zclip(), optax.adamw(3e-4)),
    "clip_by_rule(fixed)": lambda: optax.chain(
        zclip_jax.clip_by_rule(zclip_jax.rules.fixed(1.0)), optax.adamw(3e-4)
    ),
    "watch": lambda: optax.chain(watch("grads"), optax.adamw(3e-4)),
    "watch, zclip": lambda: optax.chain(watch("grads"), zclip_jax.zclip(), optax.adamw(3e-4)),
    "watch, zclip, watch updates": lambda: optax.chain(
        watch("grads"), zclip_jax.zclip(), optax.adamw(3e-4), watch("updates")
    ),
}


RULES = {
    "fixed": rules.fixed(1.0),
    "zscore": rules.zscore(),
    "zscore, robust_warmup": rules.zscore(robust_warmup=True),
    "in_log_space(zscore)": rules.in_log_space(rules.zscore()),
    "window_zscore": rules.window_zscore(),
    "percentile, window=1000": rules.percentile(),
    "percentile, window=10000": rules.percentile(window=10_000),
    "level": rules.level(),
    "ema": rules.ema(),
    "sigma_skip": rules.sigma_skip(),
    "adagc": rules.adagc(),
    "gradient_stabilizer": rules.gradient_stabilizer(),
    "loss_aware(fixed)": rules.loss_aware(rules.fixed(1.0)),
}


MANY_LEAVES = {
    BASELINE: lambda: optax.clip_by_global_norm(1.0),
    "zclip": zclip_jax.zclip,
    "zclip, granularity='leaf'": lambda: zclip_jax.zclip(granularity="leaf"),
    "watch, zclip": lambda: optax.chain(watch("grads"), zclip_jax.zclip()),
}


def make_params(total: int, matrices: int = 48) -> dict[str, jax.Array]:
    """A tree of about `total` float32 entries, shaped like a model's: matrices and a vector beside each."""
    width = 512
    rows = max(1, total // (matrices * width + matrices))
    params = {f"w{i}": jnp.full((rows, width), 0.01 * (i + 1)) for i in range(matrices)}
    params |= {f"b{i}": jnp.full((rows,), 0.01) for i in range(matrices)}
    return params


def compile_update(tx: optax.GradientTransformation, params):
    """The jitted update of `tx` with its state and the parameters donated, compiled; and a first state."""

    tx = optax.with_extra_args_support(tx)

    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params, value=jnp.asarray(1.0))
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, opt_state, params).compile(), opt_state


def bytes_accessed(compiled) -> float:
    cost = compiled.cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["bytes accessed"]


def time_rounds(runs, grads, rounds: int, updates: int) -> dict[str, list[float]]:
    """Seconds that `updates` updates of each compiled chain take in each round, in a shuffled order."""
    # Each chain is timed on its own copy of the parameters, as donation requires.
    carries = {name: (jax.tree.map(jnp.copy, grads), opt_state) for name, (_, opt_state) in runs.items()}
    times = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name in random.Random(i).sample(list(runs), len(runs)):
            compiled, carry = runs[name][0], carries[name]
            start = time.perf_counter()
            for _ in range(updates):
                carry = compiled(*carry, grads)
            carries[name] = jax.block_until_ready(carry)
            if i > 0:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return times


def ratio_quartiles(times: list[float], baseline: list[float]) -> list[float]:
    """Of the ratios within each round: the lower quartile, the median and the upper one."""
    return statistics.quantiles([a / b for a, b in zip(times, baseline, strict=True)], n=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=50_000_000, help="number of parameters")
    parser.add_argument("--leaves", type=int, default=1500, help="leaves of the tree that is compiled for")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of all chains")
    parser.add_argument("--updates", type=int, default=4, help="updates per chain and round")
    args = parser.parse_args()

    grads = make_params(args.params)
    gradient_bytes = sum(x.nbytes for x in jax.tree.leaves(grads))
    runs = {name: compile_update(make(), grads) for name, make in CHAINS.items()}
    times = time_rounds(runs, grads, args.rounds, args.updates)

    alone = bytes_accessed(runs["adamw alone"][0])
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {gradient_bytes // 4:,} parameters, "
        f"{args.rounds} rounds of {args.updates} updates"
    )
    print(f"{'':28} {'extra reads':>12} {'time':>7} {'quartiles':>15} {'ms/update':>10}")
    for name, (compiled, _) in runs.items():
        low, median, high = ratio_quartiles(times[name], times[BASELINE])
        extra = (bytes_accessed(compiled) - alone) / gradient_bytes
        ms = 1e3 * statistics.median(times[name]) / args.updates
        print(f"{name:28} {extra:12.2f} {median:7.3f} {low:7.3f}-{high:.3f} {ms:10.1f}")

    print(f"\n{'rule':28} {'extra reads':>12} {'numbers in its state':>22}")
    for name, rule in RULES.items():
        compiled, _ = compile_update(optax.chain(clip_by_rule(rule), optax.adamw(3e-4)), grads)
        extra = (bytes_accessed(compiled) - alone) / gradient_bytes
        numbers = sum(x.size for x in jax.tree.leaves(rule.init()))
        print(f"{name:28} {extra:12.2f} {numbers:22,}")

    leaves = {f"w{i}": jnp.full((8, 4), 0.01) for i in range(args.leaves)}
    seconds = {}
    for name, make in MANY_LEAVES.items():
        start = time.process_time()
        compile_update(optax.chain(make(), optax.adamw(3e-4)), leaves)
        seconds[name] = time.process_time() - start
    print(f"\n{f'{args.leaves:,} leaves':28} {'compilation, CPU s':>19} {'over zclip':>11}")
    for name, taken in seconds.items():
        print(f"{name:28} {taken:19.1f} {taken / seconds['zclip']:11.2f}")


if __name__ == "__main__":
    main()
