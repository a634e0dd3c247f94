r"""Pre-trains a LLaMA with ZClip: config, optimizer, jitted step, checkpoints, loop.

    python examples/llama/train.py                                     # minutes on a CPU
    python examples/llama/train.py --run-dir runs/noise --spike-steps 150 250
    python examples/llama/train.py --run-dir runs/fixed --spike-steps 150 250 --clip fixed
    python examples/llama/train.py --run-dir runs/row --bad-row-steps 150
    python examples/llama/train.py --preset llama-130m --data 'text/*.jsonl' --vocab-size 32000 \
        --batch-size 256 --accumulate 4 --steps 20000 --warmup 500 --mesh data=2,fsdp=4

On several hosts it is started once on each of them, with a run folder that they share. SLURM, Open
MPI, Cloud TPU and Kubernetes tell them of each other; else the processes must, two of them by

    python examples/llama/train.py --coordinator host0:1234 --num-processes 2 --process-id 0
    python examples/llama/train.py --coordinator host0:1234 --num-processes 2 --process-id 1

Everything is kept in the run folder: `config.yaml` (give it to --config), `metrics.jsonl`,
`tensorboard/`, `spikes.jsonl`, `alarms.jsonl`, `checkpoints/` and, at the end, `plot.png`. The same
command continues a run that was stopped, killed or preempted: its later steps are the same bit for
bit. Its log is appended to; of each step the last attempt counts.
"""

import contextlib
import dataclasses
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zclip_jax import clip_by_rule, group_names, levelclip, metrics, rules, watch, zclip

import hosts
from data import Corpus, DataConfig, load_corpus, train_iterator, val_batches
from faults import FaultOptions, find_tensor, is_stacked, spoil_gradients, spoil_rows
from flags import check_same_run, parse_flags, parse_known, to_flags
from hosts import AXES, HostOptions, make_mesh
from model import PRESETS, Llama, LlamaConfig, loss_fn, num_params, shard
from report import Report, StopRequest, delete_run, first_line


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Architecture: a preset, and sizes to override. The vocabulary is the corpus's."""

    # Sizes to start from.
    preset: Literal["tiny", "llama-130m", "llama-1b", "llama-7b", "llama-70b"] = "tiny"
    context: int | None = None  # Tokens the model sees at once.
    hidden_size: int | None = None  # Width of the residual stream.
    ffn_size: int | None = None  # Width inside the feed-forward blocks.
    num_layers: int | None = None  # Number of blocks.
    num_heads: int | None = None  # Query heads.
    num_kv_heads: int | None = None  # Key and value heads.
    # What matrices are multiplied in; parameters stay float32.
    dtype: Literal["float32", "bfloat16"] | None = None
    remat: bool | None = None  # Recompute activations in the backward pass, to save memory.


@dataclasses.dataclass(frozen=True)
class ClipOptions:
    """Gradient clipping."""

    # Adaptive, one way or another; at a fixed norm; or none: then zclip only watches.
    clip: Literal["zclip", "levelclip", "fixed", "none"] = "zclip"
    max_grad_norm: float | None = 1.0  # Norm of fixed; for the others a cap on top, which None removes.
    # All below are zclip's; of them levelclip takes patience.
    z_thresh: float = 2.5  # Z-score above which a step is a spike.
    alpha: float = 0.97  # Decay of the norm's mean and variance.
    clip_warmup: int = 25  # Norms to collect before a step can be a spike.
    strategy: Literal["reciprocal", "max", "mean"] = "reciprocal"  # Norm allowed on a spike.
    clip_factor: float = 1.0  # Scales the norm that reciprocal allows.
    absorb: Literal["clipped", "none", "raw"] = "clipped"  # What enters the statistics on a spike.
    patience: int | None = 25  # Consecutive spikes after which a new level is learned; None for never.
    robust_warmup: bool = False  # End the warm-up with median and MAD.
    min_rel_std: float = 0.0  # Least standard deviation, as a multiple of the mean.


@dataclasses.dataclass(frozen=True)
class Config:
    """Training."""

    # YAML or JSON file of flags, such as a run's config.yaml; flags given as well win.
    config: str | None = None
    run_dir: str = "runs/llama-tiny"  # Folder for all output; a checkpoint in it is continued from.
    fresh: bool = False  # Delete what an earlier run left in the run folder, and start over.
    steps: int = 400  # Optimizer updates.
    batch_size: int = 16  # Windows in each update, over all devices.
    accumulate: int = 1  # Passes into which each batch is split, to save memory.
    lr: float = 3e-3  # Peak learning rate; a cosine ends at a tenth of it.
    warmup: int = 40  # Steps over which the learning rate rises.
    weight_decay: float = 0.01  # Weight decay of AdamW.
    seed: int = 0  # Of the initial parameters and the order of the data.
    mesh: str = ""  # Devices by axis, as in data=2,fsdp=2,tensor=2; all on fsdp unless given.
    eval_every: int = 100  # Steps between measurements of the held-out loss.
    eval_batches: int = 16  # Batches each of them reads at most.
    save_every: int = 100  # Steps between checkpoints.
    keep: int = 2  # Checkpoints to keep.
    log_every: int = 20  # Steps between lines where output is no terminal; 0 for none.
    row_reports: int = 10  # Spikes of which the rows are measured, each time that training starts.

    model: ModelOptions = ModelOptions()
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    clip: ClipOptions = ClipOptions()
    faults: FaultOptions = dataclasses.field(default_factory=FaultOptions)
    hosts: HostOptions = dataclasses.field(default_factory=HostOptions)

    def __post_init__(self) -> None:
        least = dict.fromkeys(
            ("steps", "batch_size", "accumulate", "keep", "eval_every", "eval_batches", "save_every"), 1
        )
        for name, low in (least | {"warmup": 0, "row_reports": 0}).items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive, got {self.lr}")


# What may differ when a run is continued. Devices and passes change no more than rounding.
FREE = {"run_dir", "mesh", "accumulate", "remat", "eval_every", "eval_batches"}
FREE |= {"save_every", "keep", "log_every", "row_reports"}


def model_config(options: ModelOptions, vocab_size: int) -> LlamaConfig:
    sizes = {name: value for name, value in vars(options).items() if value is not None}
    preset = PRESETS[sizes.pop("preset")]
    # Rounded up, so that the vocabulary can be split over the devices.
    return dataclasses.replace(preset, vocab_size=-(-vocab_size // 64) * 64, **sizes)


def make_clipper(options: ClipOptions) -> optax.GradientTransformationExtraArgs:
    if options.clip == "fixed":
        if options.max_grad_norm is None:
            raise ValueError("clip=fixed needs max_grad_norm")
        return clip_by_rule(rules.fixed(options.max_grad_norm))
    if options.clip == "levelclip":
        return levelclip(max_grad_norm=options.max_grad_norm, patience=options.patience)
    return zclip(
        alpha=options.alpha,
        z_thresh=options.z_thresh,
        max_grad_norm=options.max_grad_norm if options.clip == "zclip" else None,
        warmup_steps=options.clip_warmup,
        clip_factor=options.clip_factor,
        strategy=options.strategy,
        absorb=options.absorb,
        patience=options.patience,
        robust_warmup=options.robust_warmup,
        min_rel_std=options.min_rel_std,
        observe_only=options.clip == "none",
    )


State = dict[str, nnx.State]
Scalars = dict[str, Any]  # by name; some, with one number for each group, are no scalars


def make_optimizer(
    config: Config, clipper: optax.GradientTransformation | None = None
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=config.lr / max(config.warmup, 1),
        peak_value=config.lr,
        warmup_steps=config.warmup,
        decay_steps=max(config.steps, config.warmup + 1),
        end_value=config.lr / 10,
    )
    adamw = optax.adamw(schedule, b1=0.9, b2=0.999, eps=1e-7, weight_decay=config.weight_decay)
    if clipper is not None:
        return optax.chain(clipper, adamw), schedule
    tx = optax.chain(
        watch("grads", stacked=is_stacked),
        make_clipper(config.clip),
        adamw,
        watch("updates", stacked=is_stacked),
    )
    return tx, schedule


Init = Callable[[], State]
TrainStep = Callable[[State, jax.Array], tuple[State, Scalars]]
EvalStep = Callable[[State, jax.Array], jax.Array]


def step_functions(
    config: Config, llama: LlamaConfig, clipper: optax.GradientTransformation | None = None
) -> tuple[Init, TrainStep, EvalStep]:
    """What a program computes, not jitted: the state to start with, and a step from state and tokens.

    They need a current mesh. `clipper` is instead of the config's and unwatched; it may have no metrics.
    """
    tx, schedule = make_optimizer(config, clipper)

    def build() -> tuple[Llama, nnx.Optimizer[Llama]]:
        model = Llama(llama, rngs=nnx.Rngs(config.seed))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        shard(optimizer)
        return model, optimizer

    def to_state(model: Llama, optimizer: nnx.Optimizer[Llama]) -> State:
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    model_def, optimizer_def = map(nnx.graphdef, nnx.eval_shape(build))

    @jax.value_and_grad
    def loss_and_grads(params: nnx.State, tokens: jax.Array) -> jax.Array:
        return loss_fn(nnx.merge(model_def, params), tokens)

    def accumulated(params: nnx.State, tokens: jax.Array) -> tuple[jax.Array, nnx.State]:
        """The mean loss of int32 [B, T + 1] and its gradients, in several passes."""
        if config.accumulate == 1:
            return loss_and_grads(params, tokens)

        def add(total: Any, tokens: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, loss_and_grads(params, tokens)), None

        # Every accumulate-th row, so that each pass is spread over all devices.
        passes = tokens.reshape(-1, config.accumulate, tokens.shape[1]).swapaxes(0, 1)
        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, (jnp.zeros(()), zeros), passes)
        return jax.tree.map(lambda x: x / config.accumulate, total)

    def clip_metrics(optimizer: nnx.Optimizer[Llama]) -> Scalars:
        try:
            return metrics(optimizer)
        except ValueError:
            if clipper is None:
                raise
            return {}  # a clipper of another kind

    def train_step(state: State, tokens: jax.Array) -> tuple[State, Scalars]:
        model = nnx.merge(model_def, state["model"])
        optimizer = nnx.merge(optimizer_def, state["optimizer"])
        loss, grads = accumulated(state["model"], tokens)
        step = optimizer.step[...].astype(jnp.int32) + 1
        grads = spoil_gradients(config.faults, grads, step)
        optimizer.update(model, grads, value=loss)
        scalars = clip_metrics(optimizer) | {"loss": loss, "lr": schedule(step - 1)}
        return to_state(model, optimizer), scalars

    def eval_step(state: State, tokens: jax.Array) -> jax.Array:
        return loss_fn(nnx.merge(model_def, state["model"]), tokens)

    return lambda: to_state(*build()), train_step, eval_step


def make_program(config: Config, llama: LlamaConfig) -> tuple[State, TrainStep, EvalStep]:
    """The initial state and the jitted steps, of which the training consumes the state it is given.

    Needs a current mesh.
    """
    init, train_step, eval_step = step_functions(config, llama)
    state = jax.jit(init)()
    shardings = jax.tree.map(lambda x: x.sharding, state)
    train_step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    return state, train_step, jax.jit(eval_step)


def restore(checkpoints: ocp.CheckpointManager, step: int, **items: Any) -> Any:
    try:
        return checkpoints.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:  # whatever else a folder holds, Orbax says it in many ways
        folder = checkpoints.directory / str(step)
        raise ValueError(f"cannot read {folder}: {first_line(error)}") from error


@dataclasses.dataclass
class Run:
    """A run about to start or to continue after `step` updates."""

    step: int
    mesh: Mesh
    corpus: Corpus
    state: State
    train_step: TrainStep
    eval_step: EvalStep
    batches: Any  # of `Batch`, with the rows that this process holds; never ends
    part: int  # which rows of a global batch these are: part * b : (part + 1) * b
    held_out: list[jax.Array]  # int32 [b, T + 1] each
    checkpoints: ocp.CheckpointManager
    identity: dict[str, Any]


def prepare(config: Config, stack: contextlib.ExitStack) -> Run:
    """Raises ValueError or OSError where the run cannot start; `stack` closes the checkpoints."""
    run_dir = Path(config.run_dir)
    with hosts.together():
        mesh = make_mesh(config.mesh)
        part, parts = hosts.share(mesh, config.batch_size, config.accumulate)
        make_optimizer(config)  # complains of bad settings before the run folder is touched
        context = model_config(config.model, vocab_size=256).context

    def load() -> Corpus:
        if config.fresh and jax.process_index() == 0:
            delete_run(run_dir)
        return load_corpus(config.data, context=context, cache_dir=run_dir)

    corpus = hosts.first_one(load)
    identity = to_flags(config) | {"corpus": corpus.name}
    hosts.check_same(identity)
    with hosts.together():
        rows_here = {"process_index": part, "process_count": parts}
        batches = train_iterator(corpus, batch_size=config.batch_size, seed=config.seed, **rows_here)
        checkpoints = ocp.CheckpointManager(
            (run_dir / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(config.keep),
                cleanup_tmp_directories=True,
            ),
        )
        stack.callback(checkpoints.close)
        step = checkpoints.latest_step() or 0
    hosts.check_same({f"the latest step in {run_dir}, which they must share": step})
    with hosts.together():
        if step:
            saved = restore(checkpoints, step, config=ocp.args.JsonRestore())
            check_same_run(saved["config"], identity, FREE, config.run_dir)
        with jax.set_mesh(mesh):
            state, train_step, eval_step = make_program(config, model_config(config.model, corpus.vocab_size))
        find_tensor(config.faults, state["model"])  # complains of a name that is none
        if step:
            # The state goes to the devices of the one that it replaces, whatever mesh saved it.
            like = ocp.args.StandardRestore(state)
            saved = restore(checkpoints, step, state=like, batches=ocp.args.JsonRestore())
            state = saved["state"]
            batches.set_state(saved["batches"])

    # As many windows at a time as in a training pass. Every process holds these few tokens whole.
    replicated, passes = NamedSharding(mesh, PartitionSpec()), config.accumulate
    sizes = {
        "batch_size": config.batch_size // passes,
        "max_batches": config.eval_batches * passes,
    }
    held_out = [
        jax.make_array_from_process_local_data(replicated, rows) for rows in val_batches(corpus, **sizes)
    ]
    return Run(
        step, mesh, corpus, state, train_step, eval_step, batches, part, held_out, checkpoints, identity
    )


def save(run: Run, step: int, state: State) -> None:
    """Returns once the state is copied; it is written while training goes on."""
    run.checkpoints.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            batches=ocp.args.JsonSave(run.batches.get_state()),
            config=ocp.args.JsonSave(run.identity),
        ),
    )


def train(config: Config, run: Run, report: Report) -> int | None:
    """Trains to the end, or to the step after which a signal asks to stop; returns the signal."""
    state, step = run.state, run.step
    run.state = {}  # the first step consumes its buffers
    split = NamedSharding(run.mesh, PartitionSpec(AXES[:2]))
    vote, stopped_by = hosts.Vote(run.mesh), 0
    sizes = {"batch_size": config.batch_size, "vocab_size": run.corpus.vocab_size, "seed": config.seed}
    with jax.set_mesh(run.mesh), StopRequest() as stop:
        while step < config.steps:
            step += 1  # counts from 1: a checkpoint of step n holds n updates
            batch = next(run.batches)
            first = run.part * len(batch.tokens)
            rows = spoil_rows(config.faults, batch.tokens, step, first=first, **sizes)
            tokens = jax.make_array_from_process_local_data(split, rows)
            state, scalars = run.train_step(state, tokens)
            if step % config.eval_every == 0 or step == config.steps:
                losses = [run.eval_step(state, rows) for rows in run.held_out]
                scalars["val_loss"] = jnp.mean(jnp.stack(losses))
            # Reading scalars waits for them, so it is the previous step's, while this one runs.
            report.log(step, scalars, batch, tokens, state["model"])
            stopped_by = vote(stop.signal or 0)
            last = step == config.steps or stopped_by
            if last or step % config.save_every == 0:
                # Ahead of the checkpoint, so that a run continued from that has all rows before it.
                report.monitor.flush()
                save(run, step, state)
            if last:
                break
        run.checkpoints.wait_until_finished()
    return stopped_by if step < config.steps else None


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; with `argv`, only that can tell of other processes."""
    arguments = sys.argv[1:] if argv is None else argv
    with contextlib.ExitStack() as stack, hosts.exit_at_once():
        try:
            others = parse_known(HostOptions(), arguments)
            hosts.join(others, detect=argv is None)
            with hosts.together():
                config = parse_flags(Config(), arguments, __doc__)
                if config.hosts != others:
                    raise ValueError(f"{config.config}: only the command line can tell of other processes")
            run = prepare(config, stack)
        except (ValueError, OSError) as error:
            print(f"train.py: {first_line(error)}", file=sys.stderr)
            return 2
        except hosts.ElsewhereError:
            return 2
        corpus, run_dir, is_first = run.corpus, Path(config.run_dir), jax.process_index() == 0
        if is_first:
            mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
            if jax.process_count() > 1:
                mesh += f" in {jax.process_count()} processes"
            print(f"corpus    {corpus.name}")
            print(f"model     {num_params(run.state['model']) / 1e6:.2f}M parameters on {mesh}")
        groups = group_names(run.state["model"], stacked=is_stacked)

        def rows_loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
            return run.eval_step({"model": params}, tokens)

        with Report(run_dir, to_flags(config), run.step, corpus, groups, rows_loss) as report:
            stopped_by = train(config, run, report)
        if stopped_by and is_first:
            command = shlex.join(["python", sys.argv[0], "--config", str(run_dir / "config.yaml")])
            print(f"stopped; to continue: {command}")
        elif is_first:
            report.summary()
        return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # outside of the training, which saves first
        sys.exit(130)
