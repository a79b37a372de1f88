"""Strictness for the whole suite: shapes broadcast only where the code says so, and no random key is used twice."""

import os
import tempfile

import jax

# Nothing that a test does reaches the user's own cache.
os.environ.setdefault("MINIGPT_CACHE", tempfile.mkdtemp(prefix="minigpt-tests-"))

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
