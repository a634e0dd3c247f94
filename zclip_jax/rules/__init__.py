"""The rules: each looks at one gradient norm and says what norm is allowed."""

from zclip_jax.rules.combinators import at_most
from zclip_jax.rules.fixed import fixed
from zclip_jax.rules.zscore import ZScoreState, zscore

__all__ = ["ZScoreState", "at_most", "fixed", "zscore"]
