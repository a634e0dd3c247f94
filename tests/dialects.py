"""The dialects in which trainers log: a row of a run in, what is written of it out."""

from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple


class Row(NamedTuple):
    """A step of a run, its numbers as the log spells them; `value` is what the norm means."""

    step: int
    norm: str
    loss: str = "2.5"
    epoch: str = "0.5"
    total: int = 400000
    value: float = 0.0


class Dialect(NamedTuple):
    """How a trainer prints a row.

    Args:
      line: the text, of one line or more, without the last line end.
      steps: whether it shows the step; None where it does in a form that a reader may not know, if it says so.
      loss: whether it shows the loss under a usual name.
      commas: whether a comma inside a number can be told from one between numbers.
      wraps: whether its numbers may be the print-outs of arrays.
      refused: what an error may say in place of a recording.
    """

    line: Callable[[Row], str]
    steps: bool | None = True
    loss: bool = True
    commas: bool = True
    wraps: bool = True
    refused: str = ""


def pipes(name: str, loss: str = "loss") -> Callable[[Row], str]:
    return lambda r: f"step {r.step} | {loss} {r.loss} | lr 3.0e-04 | {name} {r.norm} | 251.3 ms"


def pairs(name: str) -> Callable[[Row], str]:
    return lambda r: f"step={r.step} loss={r.loss} {name}={r.norm} lr=0.0003"


def bar(name: str, of: str = "loss") -> Callable[[Row], str]:
    return lambda r: (
        f"Epoch 0:  12%|█▏       | {r.step}/{r.total} [01:02<09:08,  9it/s, v_num=3, {of}={r.loss}, {name}={r.norm}]"
    )


STAMP = "2026-05-01 10:00:01"
TEXT = {
    "llm.c": Dialect(
        lambda r: (
            f"step {r.step:4d}/{r.total} | loss {r.loss} (+nanz)| norm {r.norm} (-0.31z)| lr 6.00e-04 | "
            "251.25 ms | 45.5% bf16 MFU | 2087141 tok/s"
        )
    ),
    "llm.c, compact": Dialect(lambda r: f"s:{r.step} trl:{r.loss} lr:6.00e-04 norm:{r.norm}"),
    "build-nanogpt": Dialect(
        lambda r: (
            f"step {r.step:5d} | loss: {r.loss} | lr 6.0000e-04 | norm: {r.norm} | dt: 394.95ms | "
            "tok/sec: 1327465.30"
        )
    ),
    "nanoGPT": Dialect(
        lambda r: f"iter {r.step}: loss {r.loss}, time 250.31ms, mfu 33.20%, grad_norm {r.norm}"
    ),
    "Megatron-LM": Dialect(
        lambda r: (
            f" [{STAMP}] iteration {r.step:8d}/{r.total:8d} | consumed samples: {r.step * 64:12d} | elapsed time "
            f"per iteration (ms): 1234.5 | learning rate: 1.500E-04 | global batch size:    64 | lm loss: {r.loss} | "
            f"loss scale: 1.0 | grad norm: {r.norm} | params norm: 812.503 | number of skipped iterations:   0 |"
        )
    ),
    "GPT-NeoX": Dialect(
        lambda r: (
            f" samples/sec: 12.345 | iteration {r.step:8d}/{r.total:8d} | elapsed time per iteration (ms): 99.0 | "
            f"lm_loss: {r.loss} | loss scale: 65536.0 | global_grad_norm: {r.norm} | number of nan iterations:   0 |"
        )
    ),
    "Lightning's bar": Dialect(bar("grad_norm"), commas=False),
    "NeMo's bar": Dialect(bar("gradient_norm", "reduced_train_loss"), loss=False, commas=False),
    "NeMo's bar, step shortened": Dialect(
        lambda r: (
            f"Epoch 0: :   4%|▍ | {r.step}/{r.total} [00:01<00:09, 9.0it/s, v_num=ab, reduced_train_loss={r.loss}, "
            f"global_step={r.step:.2g}, gradient_norm={r.norm}]"
        ),
        loss=False,
        commas=False,
    ),
    "NeMo's lines": Dialect(
        lambda r: (
            f"Training epoch 0, iteration {r.step}/{r.total} | lr: 0.0003 | global_batch_size: 64 | "
            f"global_step: {r.step} | reduced_train_loss: {r.loss} | train_step_timing in s: 1 | grad_norm: {r.norm}"
        ),
        loss=False,
    ),
    "bar alone": Dialect(
        lambda r: (
            f" 12%|#2        | {r.step}/{r.total} [01:02<09:08,  9.12it/s, loss={r.loss}, grad_norm={r.norm}]"
        ),
        commas=False,
    ),
    "two bars": Dialect(
        lambda r: (
            f"Epochs:  33%|###3    | 1/3 [00:10<00:20, 10.0s/it]\r\x1b[A\n 12%|#2    | {r.step}/{r.total} "
            f"[01:02<09:08,  9.12it/s, loss={r.loss}, grad_norm={r.norm}]"
        ),
        commas=False,
    ),
    "bar without an end": Dialect(
        lambda r: f"train: {r.step}it [01:02,  9.12it/s, loss={r.loss}, grad_norm={r.norm}]",
        steps=None,
        commas=False,
    ),
    "Keras' bar": Dialect(
        lambda r: (
            f"{r.step}/{r.total} ━━━━━━━━━━━━━━━━━━━━ 1:05 103ms/step - grad_norm: {r.norm} - loss: {r.loss}"
        ),
        steps=None,
    ),
    "bar counting in thousands": Dialect(
        lambda r: (
            f"Progress on:train {r.step / 1000:.2f}kit/400kit rate:9.1it/s remaining:10:50:00 elapsed:02:13 "
            f"postfix:loss={r.loss}, grad_norm={r.norm}"
        ),
        steps=None,
        commas=False,
    ),
    "Hugging Face, printed": Dialect(
        lambda r: (
            f"{{'loss': {r.loss}, 'grad_norm': {r.norm}, 'learning_rate': 1.2e-05, 'epoch': {r.epoch}}}"
        ),
        steps=False,
        commas=False,
    ),
    "Hugging Face, strings": Dialect(
        lambda r: (
            f"{{'loss': '{r.loss}', 'grad_norm': '{r.norm}', 'learning_rate': '1.2e-05', 'epoch': '{r.epoch}'}}"
        ),
        steps=False,
        wraps=False,
    ),
    "Hugging Face, behind the bar": Dialect(
        lambda r: (
            f" 12%|█▏        | {r.step}/{r.total} [01:02<09:08,  9.12it/s]\r"
            f"{{'loss': {r.loss}, 'grad_norm': {r.norm}, 'learning_rate': 1.2e-05, 'epoch': {r.epoch}}}"
        ),
        steps=None,
        commas=False,
    ),
    "ms-swift, printed": Dialect(
        lambda r: (
            f"{{'loss': {r.loss}, 'token_acc': 0.7, 'grad_norm': {r.norm}, 'learning_rate': 1e-05, 'memory(GiB)': "
            f"9.1, 'train_speed(iter/s)': 0.1, 'epoch': {r.epoch}, 'global_step/max_steps': '{r.step}/{r.total}', "
            "'percentage': '2.28%', 'elapsed_time': '1m 2s'}"
        ),
        commas=False,
    ),
    "torchtitan": Dialect(
        lambda r: (
            f"[titan] {STAMP},123 - root - INFO - step: {r.step:2}  loss: {r.loss:>7}  grad_norm: {r.norm:>7}  "
            "memory:  1.54GiB(1.62%)  tps: 2,345  tflops: 2.10  mfu: 0.21%"
        )
    ),
    "torchtitan, colours": Dialect(
        lambda r: (
            f"[titan] {STAMP},123 - root - INFO - \x1b[31mstep: {r.step:2}  \x1b[32mloss: {r.loss:>7}  "
            f"\x1b[38;2;180;60;0mgrad_norm: {r.norm:>7}  \x1b[34mmemory:  1.54GiB(1.62%)  \x1b[36mtps: 2,345\x1b[39m"
        )
    ),
    "OLMo-core": Dialect(
        lambda r: (
            f"{STAMP}.123\thost-0:0\tolmo_core.train.callbacks.console_logger:75\tINFO\t[step={r.step}/{r.total},"
            f"epoch=1,eta=1 hour]\n    optim/total grad norm={r.norm}\n    throughput/device/TPS=12,345\n"
            f"    train/CE loss={r.loss}"
        ),
        loss=False,
    ),
    "OLMo": Dialect(
        lambda r: (
            f"{STAMP}\tINFO\t[step={r.step}/{r.total}]\n    train/CrossEntropyLoss={r.loss}\n"
            f"    train/Perplexity=12.18\n    optim/total_grad_norm={r.norm}"
        ),
        loss=False,
    ),
    "Composer": Dialect(
        lambda r: (
            f"[batch={r.step}/{r.total}]:\n\t Train time/epoch: 0\n\t Train l2_norm/grad/global: {r.norm}\n"
            f"\t Train loss/train/total: {r.loss}"
        ),
        steps=None,
        loss=False,
        refused="no gradient norm",
    ),
    "MaxText": Dialect(
        lambda r: (
            f"completed step: {r.step}, seconds: 1.103, TFLOP/s/device: 2.212, Tokens/s/device: 365.123, "
            f"total_weights: 65536, loss: {r.loss}, grad_norm: {r.norm}, param_norm: 812.5"
        )
    ),
    "EasyLM": Dialect(
        lambda r: (
            f"{{'accuracy': 0.21,\n 'gradient_norm': {r.norm},\n 'learning_rate': 0.0003,\n 'loss': {r.loss},\n"
            f" 'param_norm': 812.5,\n 'step': {r.step}}}"
        ),
        steps=None,
        loss=False,
        commas=False,
    ),
    "CLU": Dialect(
        lambda r: (
            f"I0501 10:00:01.123456 140012345 logging_writer.py:48] [{r.step}] grad_norm={r.norm}, loss={r.loss}"
        ),
        steps=None,
        commas=False,
    ),
    "absl": Dialect(
        lambda r: (
            f"I0501 10:00:01.123456 140012345 train.py:188] step {r.step}: loss={r.loss}, grad_norm={r.norm}"
        )
    ),
    "verl": Dialect(
        lambda r: (
            f"step:{r.step} - actor/pg_loss:{r.loss} - actor/grad_norm:{r.norm} - perf/max_memory_gb:31.2 - "
            f"training/global_step:{r.step}"
        ),
        loss=False,
    ),
    "InternLM": Dialect(
        lambda r: (
            f"{STAMP},123\tINFO record_metrics.py:361 in record_metrics -- tflops=188.8, step={r.step}, "
            f"loss={r.loss}, tgs (tokens/gpu/second)=4252.7, lr=9e-05, loss_scale=65536.0, "
            f"grad_norm={{'0_default': {r.norm}, '1_fp32': 0.0}}, micro_num=4, num_consumed_tokens=131072"
        ),
        commas=False,
    ),
    "fairseq": Dialect(
        lambda r: (
            f"{STAMP} | INFO | train_inner | epoch 001:  {r.step} / {r.total} loss={r.loss}, ppl=4.3, wps=1012, "
            f"num_updates={r.step}, lr=1e-05, gnorm={r.norm}, clip=100, train_wall=10, wall=100"
        )
    ),
    "fairseq, JSON": Dialect(
        lambda r: (
            f'{STAMP} | INFO | train_inner | {{"epoch": 1, "update": 0.041, "loss": "{r.loss}", "ppl": "4.3", '
            f'"num_updates": "{r.step}", "lr": "1e-05", "gnorm": "{r.norm}", "clip": "0", "train_wall": "1"}}'
        ),
        wraps=False,
    ),
    "DeepSpeed": Dialect(
        lambda r: (
            f"[{STAMP},123] [INFO] [logging.py:96:log_dist] [Rank 0] step={r.step}, skipped=0, lr=[1e-05], "
            f"mom=[(0.9, 0.95)], loss={r.loss}, grad_norm={r.norm}"
        )
    ),
    "PaddleNLP": Dialect(
        lambda r: (
            f"[{STAMP},123] [    INFO] - loss: {r.loss}, learning_rate: 3e-05, global_step: {r.step}, "
            f"interval_runtime: 1.2, interval_steps_per_second: 6, grad_norm: {r.norm}, progress_or_epoch: {r.epoch}"
        )
    ),
    "XTuner": Dialect(
        lambda r: (
            f"[XTuner][{STAMP}][INFO] [Train] (Epoch 1) Step {r.step}/{r.total}  lr: 0.000020  loss: {r.loss}  "
            f"grad_norm: {r.norm}  max_memory: 9.1GB  text_tokens: 1234.0  tgs: 1000  time: 0.5s  eta: 0:10:00"
        )
    ),
    "MMEngine": Dialect(
        lambda r: (
            f"05/01 10:00:01 - mmengine - INFO - Iter(train) [{r.step:6d}/{r.total}]  lr: 1.0e-04  eta: 1:00:00  "
            f"time: 0.51  data_time: 0.01  memory: 12345  grad_norm: {r.norm}  loss: {r.loss}  loss_cls: 0.2"
        ),
        steps=None,
    ),
    "meters with their averages": Dialect(
        lambda r: (
            f"Train: [0][{r.step}/{r.total}]\teta 0:10:00 lr 0.000020\ttime 0.5103 (0.5300)\t"
            f"loss {r.loss} (2.7182)\tgrad_norm {r.norm} (0.7071)\tmem 9123MB"
        ),
        steps=None,
    ),
    "with its spread": Dialect(
        lambda r: f"step {r.step} | loss {r.loss} | grad norm {r.norm} +/- 81.5 | lr 0.1"
    ),
    "log format": Dialect(
        lambda r: f"ts=2026-05-01T10:00:01Z level=info step={r.step} loss={r.loss} grad_norm={r.norm}"
    ),
    "two processes' words": Dialect(
        lambda r: (
            f"step {r.step} | loss {r.loss} | grad norm {r.norm} | stable rank {r.step * 7 % 90 + 3} | "
            f"avg rank {r.step % 11}"
        )
    ),
    "norms of all sorts": Dialect(
        lambda r: (
            f"step {r.step} | param norm 812.5 | weight_norm 90.1 | update norm: 0.031 | max_grad_norm 1.0 | "
            f"loss {r.loss} | grad_norm {r.norm} | lr 0.1 | val norm 7.7"
        )
    ),
    "dictionary behind a logger": Dialect(
        lambda r: (
            f"10:00:01 - INFO - __main__ - {{'step': {r.step}, 'loss': {r.loss}, 'grad_norm': {r.norm}}}"
        ),
        commas=False,
    ),
    "steps with separators": Dialect(
        lambda r: f"step {r.step:,} | loss {r.loss} | grad norm {r.norm} | tokens {r.step * 65536:,}"
    ),
    "step of its total in words": Dialect(
        lambda r: f"Step {r.step} of {r.total}: loss = {r.loss}, gradient norm = {r.norm}"
    ),
    "step behind the norm": Dialect(lambda r: f"grad_norm={r.norm} loss={r.loss} step={r.step} lr=0.0003"),
    "arrow": Dialect(lambda r: f"[{STAMP}] step {r.step} -> loss: {r.loss}; grad-norm: {r.norm}; lr: 1e-4"),
    "steps padded": Dialect(
        lambda r: f"[{r.step:08d}/{r.total:08d}] loss={r.loss} grad_norm={r.norm}", steps=None
    ),
    "steps with a point": Dialect(
        lambda r: f"global_step: {r.step}.0 | loss: {r.loss} | grad_norm: {r.norm}"
    ),
    "norms of parts": Dialect(
        lambda r: (
            f"step {r.step} | grad_norm/encoder 91.5 | grad_norm/decoder 92.5 | loss {r.loss} | grad_norm {r.norm} | "
            "grad_norm_max 93.5 | grad_norm_ema 94.5"
        )
    ),
    "alone": Dialect(lambda r: f"step {r.step} norm {r.norm}", loss=False),
} | {f"pipes, {name}": Dialect(pipes(name)) for name in ("gnorm", "grad norm", "Grad Norm", "total_norm")}


def fixed(value: Decimal) -> tuple[str, Decimal]:
    return f"{value:.5f}", value


def decimal_comma(value: Decimal) -> tuple[str, Decimal]:
    return f"{value:.5f}".replace(".", ","), value


def three_places_with_a_comma(value: Decimal) -> tuple[str, Decimal]:
    text = f"{value:.3f}"
    return text.replace(".", ","), Decimal(text)


def suffixed(thousand: str, million: str) -> Callable[[Decimal], tuple[str, Decimal]]:
    def spell(value: Decimal) -> tuple[str, Decimal]:
        for suffix, unit in ((million, 10**6), (thousand, 10**3)):
            if value >= unit:
                text = f"{value / unit:.2f}"
                return text + suffix, Decimal(text) * unit
        return fixed(value)

    return spell


def wrapped(before: str, behind: str) -> Callable[[Decimal], tuple[str, Decimal]]:
    return lambda value: (f"{before}{value:f}{behind}", value)


# How a number is spelled, and what it then means.
PLAIN = {
    "shortest": lambda value: (f"{value:f}", value),
    "fixed": fixed,
    "exponent": lambda value: (f"{float(value):.4e}", value),
    "EXPONENT": lambda value: (f"{float(value):.6E}", value),
    "short exponent": lambda value: (f"{value:e}".lower(), value),
    "signed": lambda value: (f"{value:+f}", value),
}
COMMAS = {
    "thousands": lambda value: (f"{value:,}", value),
    "thousands, fixed": lambda value: (f"{value:,.5f}", value),
    "decimal comma": decimal_comma,
    "decimal comma, three places": three_places_with_a_comma,
}
SUFFIXED = {"k, M": suffixed("k", "M"), "K, M": suffixed("K", "M")}
SEPARATED = {  # so rare that it is enough to say that they are not read
    "underscores": lambda value: (f"{value:,}".replace(",", "_"), value),
    "spaces": lambda value: (f"{value:,}".replace(",", "\u202f"), value),
    "apostrophes": lambda value: (f"{value:,}".replace(",", "'"), value),
}
WRAPPED = {
    f"{before}…{behind}": wrapped(before, behind)
    for before, behind in (
        ("tensor(", ")"),
        ("tensor(", ", device='cuda:0')"),
        ("tensor(", ", grad_fn=<DivBackward0>)"),
        ("torch.tensor(", ", dtype=torch.float64)"),
        ("np.float64(", ")"),
        ("np.float32(", ")"),
        ("jnp.float32(", ")"),
        ("Array(", ", dtype=float32)"),
        ("Array(", ", dtype=float32, weak_type=True)"),
        ("DeviceArray(", ", dtype=float32)"),
        ("array(", ", dtype=float32)"),
        ("tf.Tensor(", ", shape=(), dtype=float32)"),
        ("numpy.float16(", ")"),
        ("Decimal('", "')"),
        ("[", "]"),
        ("(", ")"),
    )
}
SPELLINGS = PLAIN | COMMAS | SUFFIXED | SEPARATED | WRAPPED

# What stands before the rows of each process, and whether it says so in words that a reader must know.
RANKS = {
    "[rank{}]: ": True,
    "[rank{}]:": True,
    "[default{}]:": True,
    "[Rank {}] ": True,
    "rank={} ": True,
    "rank {}: ": True,
    "(rank{}) ": True,
    "[1,{}]<stdout>:": False,
    "{}: ": False,
    "worker-{}: ": False,
    "(WorkerDict pid=31{}7, ip=10.0.0.{}) ": False,
    "trainer-{}  | ": False,
}
PREFIXES = [
    "",
    "[rank0]: ",
    "[default0]:",
    "0: ",
    "[1,0]<stdout>:",
    "(TaskRunner pid=31337) ",
    "worker-0: ",
    "trainer-1  | ",
    "2026-05-01T10:00:01.1234567Z ",
    f"[{STAMP},123] [INFO] [logging.py:96:log_dist] [Rank 0] ",
    f"{STAMP},123 - INFO - ",
    "I0501 10:00:01.123456 140012345 train.py:188] ",
    "INFO:root:",
    "<6>May  1 10:00:01 node-7 train[4242]: ",
]
CHATTER = [
    "",
    "validation loss: 10.9",
    "val | loss 3.4 | perplexity 29.9",
    "Once upon a time the norm 3 came to town",
    "saving checkpoint to out/step-20.pt",
    "config: lr=0.0003 max_grad_norm=1.0 steps=1000",
    "max_grad_norm: 1.0",
    "/lib/train.py:12: UserWarning: clip_grad_norm_ got 2 tensors",
    "{'eval_loss': 2.0, 'eval_runtime': 3.1, 'epoch': 1.0}",
    "GPU 0: 12,345 MiB of 81,920 MiB",
    "(ln_1): LayerNorm((768,), eps=1e-05, elementwise_affine=True)",
    "  0%|          | 0/10 [00:00<?, ?it/s]",
    "rank 1 sample 2: Hello, I'm a language model, and 7 of them",
    "Traceback (most recent call last):",
]
