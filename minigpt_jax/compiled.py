"""Compiled programs outlive the process, so that the second command starts at once."""

import jax

from .data import cache_dir


def keep_compiled_programs() -> None:
    """Keep them in the user's cache. JAX's own variables JAX_COMPILATION_CACHE_DIR and
    JAX_ENABLE_COMPILATION_CACHE=false move it or switch it off."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
