"""By what names trainers log the gradient norm, the step, the loss and the process.

Each is given a rank, 0 the best; None where a name is none for it.
"""

import functools
import re

# Before the name proper there may be the run, as in W&B's exports ("my-run - train/grad_norm").
RUN = " - "
ABOVE = "\n"  # before the name of what stands on a line above the row's
COUNTER = "i/n"  # the name of a step without one, as in a bar's "5/100 [00:01<00:19"
LAUNCHER = "\trank"  # the name of the process that a launcher has put before the line
PART, MEAN = 4, 5  # ranks of norms of a part, and of means over several steps


def listed(words: str) -> dict[str, int]:
    """Words and their places."""
    return {word: place for place, word in enumerate(words.split())}


# Words that make another quantity of a norm, or its limit. They are looked for in the whole name.
OTHER = listed(
    "param params parameter parameters weight weights update updates activation activations momentum noise"
    " max maximum min minimum limit threshold thresh thr target cap bound allowed history"
    " eval evaluation val valid validation test dev"
    " std stdev var variance ratio count num number eps coef coefficient factor scale rate frac fraction percent"
    " pct percentile quantile quantiles quartile quartiles median range type diff delta change cosine sim similarity"
    " log10 log2 ln args config cfg hparams hyperparameters settings"
)
_OTHER_PARTS = re.compile(
    r"param|weight|update|thresh|(^|_)(layer|rms|batch|group|instance|q|k|qk)_?norm|layernorm|max_?(grad|norm)"
    r"|(^|_)p\d\d?(_|$)"
)
_SCALE = re.compile(r"(^|[/. ])(log|sq|squared|square)[_ -](g|grad|gradient|norm)")  # "log/grad_norm" is none
_UNCLIPPED = re.compile(
    r"(^|_)(raw|orig|original|pre|before)(_|$)|(^|_)(un|non|no|not|without|prior_to)_(\w+_)?clip|(un|pre)_?clip"
)
_CLIPPED = re.compile(
    r"(?<!z)clip|(^|_)(post|after|capped|limited|truncated|rescaled|clamped|effective)(_|$)"
)
_MEAN = re.compile(r"(^|_)(avg|mean|average|averaged|ema|smooth|smoothed|running|epoch)(_|$)")
_TRAIN = r"((train|training|trainer|learning|optim|optimizer|metrics|zclip)_)*"
_USUAL = re.compile(
    _TRAIN
    + r"((global|total|l2)_)*g(rads?|radients?)?_?((global|total|l2)_)*norm(_(global|total|l2|step|all))*"
    + r"|grad_2_0_norm_total"
)
_BARE = re.compile(_TRAIN + r"((global|total|l2)_)*norm(_(global|total|l2|step|all))*")
_OF_PART = re.compile(r"layer|block|embed|head|attn|mlp|bias|kernel")

_STEPS = listed(
    "global_step training_global_step train_global_step trainer_global_step global_steps global_iter"
    " global_iteration step steps train_step training_step trainer_step train_steps optimizer_step optim_step"
    " iteration iterations iter iters train_iter it num_updates update _step s i_n"
)
_LOSSES = listed(
    "loss train_loss training_loss loss_train lm_loss train_lm_loss learning_loss total_loss train_total_loss trl"
)
_EPOCHS = listed("epoch train_epoch training_epoch trainer_epoch current_epoch")
_PROCESSES = listed(
    "rank global_rank world_rank process_index process_id process proc proc_id worker worker_id host_id host"
    " hostname node node_rank node_id local_rank dp_rank local_process_index device device_id gpu gpu_id pid"
    " replica replica_id run run_id run_name seed trial"
)
_OF_TOTAL = re.compile(r"_(max_steps|total_steps|num_steps|max_iters|total_iters|total|max)$")


def run_of(name: str) -> str:
    """The run that a name begins with, as in "my-run - train/grad_norm"; else nothing."""
    return name.rpartition(RUN)[0]


@functools.lru_cache(4096)
def words_of(name: str) -> str:
    """The name proper in lower case, its words divided by one underscore each."""
    own = name.rpartition(RUN)[2].lower()
    return own if own == "_step" else re.sub(r"[^a-z0-9]+", "_", own).strip("_")


@functools.lru_cache(4096)
def norm_rank(name: str) -> int | None:
    """How well a name fits the norm of all gradients before clipping."""
    return None if is_clipped(name) else _norm_rank(name)


@functools.lru_cache(4096)
def is_clipped(name: str) -> bool:
    """Whether it names a norm after clipping, or something else of clipping."""
    words = words_of(name)
    return "norm" in words and not _UNCLIPPED.search(words) and _CLIPPED.search(words) is not None


def _norm_rank(name: str) -> int | None:
    words = words_of(name)
    if "norm" not in words or name.endswith(("__MIN", "__MAX")):
        return None
    if (
        not OTHER.keys().isdisjoint(words.split("_"))
        or _OTHER_PARTS.search(words)
        or _SCALE.search(name.lower())
    ):
        return None
    if _BARE.fullmatch(words):
        return 3
    if _USUAL.fullmatch(words):
        return 1
    unclipped = _UNCLIPPED.search(words)
    if not unclipped and "grad" not in words and "gnorm" not in words:
        return None
    if "normal" in words.replace("normaliz", ""):
        return None
    if _MEAN.search(words):
        return MEAN
    if unclipped:
        return 0
    return PART if _OF_PART.search(words) else 2


def step_rank(name: str) -> int | None:
    """How well a name fits the number of the step."""
    words = words_of(name)
    if "/" not in name:
        return _STEPS.get(words)
    words = _OF_TOTAL.sub("", words)
    last = words_of(name.rpartition("/")[2])
    if words in _STEPS or last not in _STEPS or not OTHER.keys().isdisjoint(words.split("_")):
        return _STEPS.get(words)
    return len(_STEPS) + _STEPS[last]  # "data/step", where nothing is better


def loss_rank(name: str) -> int | None:
    """How well a name fits the training loss."""
    return _LOSSES.get(words_of(name))


def epoch_rank(name: str) -> int | None:
    """How well a name fits the epoch."""
    return _EPOCHS.get(words_of(name))


def process_rank(name: str) -> int | None:
    """How well a name fits what tells one of several processes, or of several runs, from the others."""
    return _PROCESSES.get(words_of(name))  # a launcher's is called "rank", too


def attempt_rank(name: str) -> int | None:
    """Whether a name counts how often a step was tried."""
    return 0 if words_of(name) == "attempt" else None


def matters(name: str) -> bool:
    """Whether a name is one of those above."""
    return is_clipped(name) or any(
        rank(name) is not None
        for rank in (norm_rank, step_rank, loss_rank, epoch_rank, process_rank, attempt_rank)
    )
