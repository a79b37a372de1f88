"""The tuned lens: an affine probe for each layer, trained to say what the last layer says (Belrose et al. 2023,
arXiv:2303.08112). It answers what a layer knows; the logit lens, only what it shows in the last layer's own terms."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors
import safetensors.numpy

from ..config import ModelConfig
from ..errors import InputError, replacing, require
from ..functional import check_limit, check_params
from ..model import wide
from .lens import apply_probes, kl_bits, lens_points, log_probs, residual_stack


class Progress(NamedTuple):
    """What `train_probes` yields after each step."""

    step: int
    kl: np.ndarray
    """(R - 1,): KL(final || probe) of the step's batch in bits, for each point but the last, before the step."""
    probes: dict


def init_probes(config: ModelConfig, inside: bool = False) -> dict:
    """Probes that change nothing: {"kernel": (R - 1, D, D), "bias": (R - 1, D)} of zeros, in x + x kernel + bias."""
    R, D = len(lens_points(config, inside)), config.d_model
    dtype = wide(config.dtype)
    return {"kernel": jnp.zeros((R - 1, D, D), dtype), "bias": jnp.zeros((R - 1, D), dtype)}


def train_probes(
    params,
    source,
    config: ModelConfig,
    steps: int = 300,
    batch_size: int = 16,
    peak_lr: float = 3e-3,
    seed: int = 0,
    inside: bool = False,
    vocab_limit: int | None = None,
) -> Iterator[Progress]:
    """Adam on the mean KL(final || probe) over layers and positions; the model itself stays as it is.

    `source` gives batches as a function of (seed, step), as a dataset's `train` does. `vocab_limit` leaves out rows of
    the table without a token, as in `lens_table`.
    """
    check_params(params, config)
    require(steps >= 1, f"steps is {steps}; it must be at least 1")
    limit = check_limit(vocab_limit, config.vocab_size)
    return _updates(params, source, config, steps, batch_size, peak_lr, seed, inside, limit)


def _updates(params, source, config, steps, batch_size, peak_lr, seed, inside, limit) -> Iterator[Progress]:
    probes = init_probes(config, inside)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(peak_lr, steps)))
    opt_state = optimizer.init(probes)

    def loss(probes, params, tokens_BxT, mask_BxT):
        weight_N = jnp.ones(tokens_BxT.size) if mask_BxT is None else mask_BxT.reshape(-1).astype(float)
        rows = residual_stack(params, tokens_BxT, config, inside=inside)
        x_RxNxD = rows.reshape(rows.shape[0], -1, config.d_model)
        final_NxV = log_probs(params, x_RxNxD[-1], config, limit)

        @jax.checkpoint  # the logits of one layer at a time
        def kl(x_NxD):
            kl_N = kl_bits(final_NxV, log_probs(params, x_NxD, config, limit))
            return jnp.sum(weight_N * kl_N) / jnp.maximum(jnp.sum(weight_N), 1)

        kl_R = jax.lax.map(kl, apply_probes(probes, x_RxNxD)[:-1])
        return jnp.mean(kl_R), kl_R

    @jax.jit
    def update(probes, opt_state, params, tokens_BxT, mask_BxT):
        grads, kl_R = jax.grad(loss, has_aux=True)(probes, params, tokens_BxT, mask_BxT)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(probes, updates), opt_state, kl_R

    for step in range(steps):
        batch = source.batch(seed, step, batch_size)
        tokens = jnp.asarray(batch.tokens, jnp.int32)
        probes, opt_state, kl_R = update(probes, opt_state, params, tokens, batch.mask)
        yield Progress(step + 1, np.asarray(kl_R), probes)


def fingerprint(params) -> str:
    """SHA-256 of all parameters: probes read one model, and another one may have the same number of steps."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def save_probes(probes: dict, path: str | Path, params) -> None:
    """Write the probes as safetensors, with the fingerprint of the model that they read."""
    arrays = {name: np.ascontiguousarray(value) for name, value in probes.items()}
    with replacing(path) as file:
        file.write(safetensors.numpy.save(arrays, metadata={"params_sha256": fingerprint(params)}))


def load_probes(path: str | Path) -> tuple[dict, str]:
    """The probes, and the `fingerprint` of the model that they were trained on."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            probes = {name: jnp.asarray(file.get_tensor(name)) for name in ("kernel", "bias")}
            return probes, file.metadata()["params_sha256"]
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} holds no probes of a tuned lens ({' '.join(str(error).split())[:100]})") from None
