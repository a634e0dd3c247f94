"""The rules: each looks at one gradient norm and says what norm is allowed."""

from zclip_jax.rules.adagc import AdaGCState, adagc
from zclip_jax.rules.combinators import LossAwareState, at_most, bounded, loss_aware
from zclip_jax.rules.ema import EmaState, ema
from zclip_jax.rules.fixed import fixed
from zclip_jax.rules.gradient_stabilizer import GradientStabilizerState, gradient_stabilizer
from zclip_jax.rules.level import LevelState, level
from zclip_jax.rules.log_space import LogSpaceState, in_log_space
from zclip_jax.rules.percentile import PercentileState, percentile
from zclip_jax.rules.sigma_skip import SigmaSkipState, sigma_skip
from zclip_jax.rules.window_zscore import WindowState, window_zscore
from zclip_jax.rules.zscore import ZScoreState, zscore

__all__ = [
    "AdaGCState",
    "EmaState",
    "GradientStabilizerState",
    "LevelState",
    "LogSpaceState",
    "LossAwareState",
    "PercentileState",
    "SigmaSkipState",
    "WindowState",
    "ZScoreState",
    "adagc",
    "at_most",
    "bounded",
    "ema",
    "fixed",
    "gradient_stabilizer",
    "in_log_space",
    "level",
    "loss_aware",
    "percentile",
    "sigma_skip",
    "window_zscore",
    "zscore",
]
