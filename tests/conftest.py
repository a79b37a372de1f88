"""Strictness for the whole suite: shapes broadcast only where the code says so, and no random key is used twice."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
