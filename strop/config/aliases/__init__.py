"""Names and values of other versions of verl: translated to current keys, accepted without effect, refused.

`verl_0_7` and `verl_0_10` hold the names by the version that introduced or dropped them; `without_effect`
holds families of keys that belong to backends and services Strop does not have.
"""

from strop.config.aliases.table import ALIASES
from strop.config.aliases.translation import flatten, nest, translate
from strop.config.aliases.without_effect import WITHOUT_EFFECT, drop_without_effect, notice, reason_for

__all__ = [
    "ALIASES",
    "WITHOUT_EFFECT",
    "drop_without_effect",
    "flatten",
    "nest",
    "notice",
    "reason_for",
    "translate",
]
