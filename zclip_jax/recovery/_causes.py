"""What the history of blow-ups says of their cause, in words."""

from collections.abc import Sequence
from itertools import pairwise

from zclip_jax.recovery import _decisions as levels
from zclip_jax.recovery._decisions import Incident

ADVICE = {
    "data": "Look at the batches named above: encoding, repeated text, labels, lengths, a new source.",
    "state": (
        "The parameters or the optimizer state were bad before the loss showed it. Look at norms of updates and of "
        "moments before the spike; go back further by hand, or start the optimizer afresh."
    ),
    "hardware": (
        "The same state and batch gave another result when run again: a bad device, or a program that is not "
        "deterministic. Restart on other devices; if it comes back there, look for non-determinism."
    ),
    "learning rate": (
        "It held while the learning rate was lowered and blew up once it was raised again. Lower the peak, or make "
        "the warm-up longer."
    ),
    "architecture": (
        "The same blow-up on other data, from several checkpoints: neither data nor one bad state. Look at the "
        "learning rate and its schedule, attention logits (QK-norm), the output logits (z-loss), epsilon and beta2 "
        "of the optimizer, and numerics (what is kept in 16 bits)."
    ),
    "unknown": "There is not enough to tell. Keep more checkpoints, or save one before the first step.",
}


def likely_cause(incidents: Sequence[Incident]) -> str:
    """The cause of blow-ups that no rung of the ladder has cured."""
    verdicts = {x.verdict for x in incidents} - {None}
    if verdicts == {"not reproduced"}:
        return "hardware"
    if verdicts == {"data"} or any(x.level == levels.RETRY_FAILED for x in incidents):
        return "data"
    eased = [(x, then) for x, then in pairwise(incidents) if x.until_step is not None]
    if eased and all(then.step > (x.until_step or 0) for x, then in eased):
        return "learning rate"
    fresh = [x for x in incidents if x.level != levels.WIDER]
    if len(fresh) < 3 and len(fresh) < len(incidents):
        return "data"
    if "state" in verdicts and not eased:
        return "state"
    return "architecture" if len(fresh) >= 3 else "unknown"


def cured_cause(trouble: Sequence[Incident], harmless: bool) -> tuple[str, str]:
    """The likely cause of a trouble that is over, and why; `harmless`: all that was left out passed later."""
    verdicts, done = {x.verdict for x in trouble} - {None}, {x.level for x in trouble}
    if verdicts == {"not reproduced"}:
        return "hardware", "a re-run gave another result"
    if levels.RETRY_FAILED in done:
        return "data", "the batches blew up from two states"
    if verdicts == {"data"}:
        return "data", "a re-run without the batches did not blow up"
    if levels.WIDER in done:
        return "data", "likely: the batches behind those left out blew up at once, until all were left out"
    if "state" in verdicts:
        return "state", "a re-run without the batches blew up too"
    if levels.MITIGATE in done or levels.SKIP_AND_RETRY in done:
        later = ", and the batches left out were harmless later" if harmless else ""
        return "state", f"likely: it blew up on other data too{later}"
    return "data", "likely: it passed once the batches were left out; a one-off fault would look the same"


def report(cause: str, why: str, incidents: Sequence[Incident], to: int | None) -> str:
    """What happened, what was tried, the likely cause and what to do."""
    lines = [f"Recovery stops the run: {why}.", f"Likely cause: {cause}.", "What happened:"]
    for x in incidents:
        line = f"  step {x.step}, batch {x.first}: {x.kind}, noticed at step {x.noticed}"
        if x.level:
            line += f"; back to step {x.to}: {x.level}"
        if x.skipped:
            line += f" [{x.skipped[0]}, {x.skipped[1]})"
        if x.verdict:
            line += f"; verify: {x.verdict}"
        lines.append(line)
    lines.append(ADVICE[cause])
    lines.append(
        "No checkpoint is known to be good."
        if to is None
        else f"The newest checkpoint believed good is of step {to}: resume there."
    )
    return "\n".join(lines)
