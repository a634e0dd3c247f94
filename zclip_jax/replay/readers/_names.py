"""By what names trainers log the gradient norm, the step and the loss.

Each is given a rank, 0 the best; None where a name is none for it.
"""

import functools
import re

# Before the name proper there may be the run, as in W&B's exports ("my-run - train/grad_norm").
RUN = " - "

# Words that make another quantity of a norm, or its limit. Norms after clipping are not what a rule is to judge.
_OTHER = re.compile(
    r"param|weight|update|(layer|rms|batch|group|q|k|qk)_?norm|norm_(eps|type)|(?<!z)(?<!un)(?<!pre)(?<!pre_)(?<!before_)clip"
    r"|max_(grad|norm)|thresh|(^|_)(eval|val|valid|validation|test|std|var|ratio|count|num|eps)(_|$)"
)
_UNCLIPPED = re.compile(r"(^|_)raw_|unclipped|pre_?clip|before_clip")
_TRAIN = r"((train|training|trainer|learning|optim|optimizer|metrics|zclip)_)*"
_USUAL = re.compile(
    _TRAIN
    + r"((global|total)_)?g(rads?|radients?)?_?((global|total|l2)_)?norm(_(global|total|l2))?|grad_2_0_norm_total"
)
_BARE = re.compile(_TRAIN + r"((global|total)_)?norm")
_PART = re.compile(r"layer|block|embed|head|attn|mlp|bias|kernel")

_STEPS = (
    "global_step",
    "train_global_step",
    "trainer_global_step",
    "step",
    "steps",
    "train_step",
    "training_step",
    "iteration",
    "iter",
    "it",
    "num_updates",
    "update",
    "_step",
    "s",
)
_LOSSES = (
    "loss",
    "train_loss",
    "training_loss",
    "loss_train",
    "lm_loss",
    "train_lm_loss",
    "learning_loss",
    "total_loss",
    "train_total_loss",
    "trl",
)


def run_of(name: str) -> str:
    return name.rpartition(RUN)[0]


@functools.cache
def _words(name: str) -> str:
    own = name.rpartition(RUN)[2].lower()
    return own if own == "_step" else re.sub(r"[^a-z0-9]+", "_", own).strip("_")


def norm_rank(name: str) -> int | None:
    words = _words(name)
    if "norm" not in words or name.endswith(("__MIN", "__MAX")) or _OTHER.search(words):
        return None
    if _BARE.fullmatch(words):
        return 3
    if _USUAL.fullmatch(words):
        return 1
    if "grad" not in words:
        return None
    if _UNCLIPPED.search(words):
        return 0
    return 4 if _PART.search(words) else 2


def step_rank(name: str) -> int | None:
    return _place(name, _STEPS)


def loss_rank(name: str) -> int | None:
    return _place(name, _LOSSES)


def _place(name: str, names: tuple[str, ...]) -> int | None:
    words = _words(name)
    return names.index(words) if words in names else None
