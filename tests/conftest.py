"""Strictness for the whole suite: shapes broadcast only where the code says so, and no random key is used twice."""

import functools
import os
import tempfile

import jax
import pytest

import minigpt_jax.train as train_module

# Nothing that a test does reaches the user's own cache.
os.environ.setdefault("MINIGPT_CACHE", tempfile.mkdtemp(prefix="minigpt-tests-"))

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture(scope="module")
def quick_compilation():
    """Compiling is nearly all of many tests' time; what LLVM's optimizer does is no matter of theirs."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def one_loop_for_each_config(quick_compilation):
    """The trainer's program is compiled once for each config, whichever test of the file asks first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "compile_steps", functools.cache(train_module.compile_steps))
        yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
