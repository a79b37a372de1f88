"""AdamW with warm-up and cosine, clipping by global norm, and weight decay by leaf name."""

import functools
import re

import jax
import optax

from .config import TrainConfig
from .errors import require
from .trees import leaf_paths

EMBEDDING = "embedding"
# (pattern of the whole path, whether it decays). Every leaf must match exactly one.
DECAY_RULES = (
    (r"embed/embedding|head/embedding_out", EMBEDDING),
    (r"positions/table", True),
    (r".*/kernel", True),
    (r".*/(bias|scale)", False),
)


def decay_mask(params, decay_embedding: bool = True, rules=DECAY_RULES):
    """A tree of bools with the structure of `params`: which leaves decay. A leaf that no rule names is an error."""
    decays = {}
    for path in leaf_paths(params):
        matches = [decay for pattern, decay in rules if re.fullmatch(pattern, path)]
        require(
            len(matches) == 1,
            f"parameter {path!r} matches {len(matches)} weight-decay rules; it must match one: see DECAY_RULES",
        )
        decays[path] = decay_embedding if matches[0] == EMBEDDING else matches[0]
    return jax.tree.unflatten(jax.tree.structure(params), list(decays.values()))


def describe_decay(params, config: TrainConfig) -> list[str]:
    """One line for each rule that matched: the pattern, its leaves and parameters, and what becomes of them."""
    lines, leaves = [], leaf_paths(params)
    decays = leaf_paths(decay_mask(params, config.decay_embedding))
    for pattern, _ in DECAY_RULES:
        matched = [path for path in leaves if re.fullmatch(pattern, path)]
        if matched:
            size = sum(leaves[path].size for path in matched)
            verdict = f"decay {config.weight_decay:g}" if decays[matched[0]] else "no decay"
            lines.append(f"{verdict:<10} {len(matched):>4} leaves {size:>14,} parameters  {pattern}")
    return lines


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Updates made so far -> rate of the next. Update t = 1, 2, ...: linear to peak at t = warmup_steps, then cosine
    to floor at t = steps."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.peak_lr,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.steps, config.warmup_steps + 1),
        end_value=config.floor_lr,
    )
    return lambda count: schedule(count + 1)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clip to a global L2 norm, then AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): decay is decoupled."""
    adamw = optax.adamw(
        learning_rate(config),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        mask=functools.partial(decay_mask, decay_embedding=config.decay_embedding),
    )
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, adamw)
