"""The logit lens: what the model would say if it stopped after a layer (nostalgebraist 2020).

Each row is the residual stream at one point through the whole final norm, with statistics of its own, and the head. A
tied model's first row tends to name the input token itself, since E[x] is most similar to its own row; so the rank of
the input token is shown beside that of the target. A tuned lens (`tuned.py`) puts a learned affine map before the norm.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..config import ModelConfig
from ..errors import require
from ..functional import (
    check_context,
    check_ids,
    check_limit,
    check_params,
    check_tokens,
    embed,
    forward,
    readout,
    trunk,
)
from .tables import WIDTH, Table, compact, shown

NO_TARGET = -1


def lens_points(config: ModelConfig, inside: bool = False) -> tuple[str, ...]:
    """Names of the lens's rows, first to last: "embed" and "block_i/ffn", L + 1 of them; with `inside` also
    "block_i/attention", 2 L + 1. They are the names of `trunk`'s residuals."""
    parts = ("attention", "ffn") if inside else ("ffn",)
    return ("embed", *(f"block_{i}/{part}" for i in range(config.n_layers) for part in parts))


def residual_stack(params, tokens, config: ModelConfig, mask=None, inside: bool = False) -> jax.Array:
    """(R, ..., T, D): the residual stream at each of the lens's points."""
    _, residuals = trunk(params, embed(params, tokens, config), config, mask, return_residuals=True)
    return jnp.stack([residuals[name] for name in lens_points(config, inside)])


def apply_probes(probes, x_RxNxD):
    """x + x A + b by row, for all rows but the last, which is the model's own. `probes` None changes nothing."""
    if probes is None:
        return x_RxNxD
    R, _, D = x_RxNxD.shape
    shapes = {name: jnp.shape(value) for name, value in probes.items()}
    require(
        shapes == {"kernel": (R - 1, D, D), "bias": (R - 1, D)},
        f"the probes have the shapes {shapes} and the lens has {R} points of width {D}; "
        "train them on this model, with the same `inside`",
    )
    x = x_RxNxD[:-1]
    moved = x + jnp.einsum("rnd,rde->rne", x, probes["kernel"]) + probes["bias"][:, None]
    return jnp.concatenate([moved.astype(x.dtype), x_RxNxD[-1:]])


def log_probs(params, x_NxD, config: ModelConfig, limit: int) -> jax.Array:
    """(N, limit): what the lens says of the next token, among the ids that are tokens."""
    return jax.nn.log_softmax(readout(params, x_NxD, config)[:, :limit])


def kl_bits(final_NxV, log_NxV) -> jax.Array:
    """(N,): KL(final || row) of two log-probabilities, in bits."""
    return jnp.sum(jnp.exp(final_NxV) * (final_NxV - log_NxV), axis=1) / np.log(2)


def logit_lens(
    params, tokens, config: ModelConfig, mask=None, inside: bool = False, probes: dict | None = None
) -> jax.Array:
    """Logits after every layer: (T,) -> (R, T, V), (B, T) -> (R, B, T, V), with R = L + 1 rows (`lens_points`).

    Row 0 is the embedding; the last row is `forward`, computed by it. `inside` adds a row after each attention.
    `probes` makes it a tuned lens. For a large vocabulary `lens_table` says what most people want to know of these
    logits without holding them all.
    """
    last = forward(params, tokens, config, mask)  # checks its arguments, too
    rows = residual_stack(params, tokens, config, mask, inside)
    flat = rows.reshape(rows.shape[0], -1, config.d_model)
    read = [readout(params, x, config).reshape(last.shape) for x in apply_probes(probes, flat)[:-1]]
    return jnp.stack([*read, last])


class LensTable(NamedTuple):
    """What the lens says at R points of T tokens (or B, T): arrays of shape (R, ..., T), `top_*` with k more."""

    points: tuple[str, ...]
    tokens: jax.Array
    """(..., T): the input."""
    targets: jax.Array
    """(..., T): what follows each token; -1 where nothing does."""
    top_ids: jax.Array
    """The k most likely tokens, ties to the lower id."""
    top_probs: jax.Array
    entropy: jax.Array
    """Bits."""
    kl: jax.Array
    """KL(final || this row) in bits: what reading this row instead of the last one costs. 0 in the last row."""
    rank_target: jax.Array
    """How many tokens are more likely than the target; -1 where there is none."""
    rank_input: jax.Array
    """The same for the input token."""

    def render(self, texts: list[str], row: int | None = None) -> str:
        """A line for each point, means over the positions; then the grid of most likely tokens in 100 columns. With
        `row`, that point's positions one by one."""
        require(self.tokens.ndim == 1, f"the lens is of tokens {self.tokens.shape}; print one sequence, (T,)")
        largest = max(int(np.max(ids)) for ids in (self.tokens, self.targets, self.top_ids))
        require(
            largest < len(texts),
            f"there are {len(texts)} texts and the lens names id {largest}; give lens_table vocab_limit={len(texts)}",
        )
        R = len(self.points)
        require(row is None or -R <= row < R, f"row is {row}; the lens has {R} rows, from 0 to {R - 1}")
        if row is not None:
            return str(self._positions(texts, row))
        return f"{self._means()}\n\n{self._grid(texts)}"

    def _means(self) -> Table:
        known = np.asarray(self.targets) != NO_TARGET
        top1 = np.asarray(self.top_ids)[..., 0]
        records = [
            {
                "layer": name,
                "KL": float(np.mean(self.kl[i])),
                "entropy": float(np.mean(self.entropy[i])),
                "same top token": f"{np.mean(top1[i] == top1[-1]):.0%}",
                "rank of target": float(np.mean(np.asarray(self.rank_target[i])[known])) if known.any() else None,
                "rank of input": float(np.mean(self.rank_input[i])),
            }
            for i, name in enumerate(self.points)
        ]
        note = "means over positions; KL(final || layer) and entropy in bits; rank 0 is the most likely token"
        return Table(records, note)

    def _grid(self, texts, widest: int = 8) -> str:
        def cells(ids):
            texts_T = ["" if i == NO_TARGET else compact(texts[i]) for i in np.asarray(ids)]
            return [text if len(text) <= widest else text[: widest - 1] + "…" for text in texts_T]

        top1 = np.asarray(self.top_ids)[..., 0]
        rows = {"input": cells(self.tokens)} | {name: cells(top1[i]) for i, name in enumerate(self.points)}
        rows["target"] = cells(self.targets)
        label, cell = max(map(len, rows)), max(2, *(len(text) for row in rows.values() for text in row))
        columns, lines = max(1, (WIDTH - label) // (cell + 1)), []
        for start in range(0, self.tokens.shape[-1], columns):
            for name, row in rows.items():
                part = " ".join(f"{text:<{cell}}" for text in row[start : start + columns])
                lines.append(f"{name:<{label}} {part}".rstrip())
            lines.append("")
        return "\n".join(lines).rstrip()

    def _positions(self, texts, row: int) -> Table:
        records = []
        for t in range(self.tokens.shape[-1]):
            target = int(self.targets[t])
            top = zip(self.top_ids[row, t].tolist(), self.top_probs[row, t].tolist(), strict=True)
            records.append(
                {
                    "input": shown(texts[int(self.tokens[t])]),
                    "target": "" if target == NO_TARGET else shown(texts[target]),
                    "rank": None if target == NO_TARGET else int(self.rank_target[row, t]),
                    "KL": float(self.kl[row, t]),
                    "most likely": " ".join(f"{shown(texts[i])} {p:.0%}" for i, p in top),
                }
            )
        return Table(records, f"{self.points[row]}: rank of the target, KL to the final layer in bits")


def lens_table(
    params,
    tokens,
    config: ModelConfig,
    targets=None,
    top_k: int = 5,
    inside: bool = False,
    probes: dict | None = None,
    vocab_limit: int | None = None,
) -> LensTable:
    """The lens in numbers, one row's logits at a time. `targets` default to the next tokens of the input.

    `vocab_limit` leaves out ids from there on: rows of the table that no token of the vocabulary uses.
    """
    tokens = jnp.asarray(check_tokens(tokens, config))
    check_context(tokens.shape[-1], config)
    check_params(params, config)
    limit = check_limit(vocab_limit, config.vocab_size)
    check_ids(tokens, limit, "tokens")
    require(top_k >= 1, f"top_k is {top_k}; it must be at least 1")
    if targets is None:
        none = jnp.full((*tokens.shape[:-1], 1), NO_TARGET, tokens.dtype)
        targets = jnp.concatenate([tokens[..., 1:], none], axis=-1)
    else:
        targets = np.asarray(targets)  # -1 stands for no target, as in the result
        check_ids(np.where(targets == NO_TARGET, 0, targets), limit, "targets")
        targets = jnp.asarray(targets)
        require(
            targets.shape == tokens.shape, f"targets have shape {targets.shape} and tokens {tokens.shape}; give one"
        )
    numbers = _lens_numbers(params, tokens, targets, probes, config, min(top_k, limit), inside, limit)
    return LensTable(lens_points(config, inside), tokens, targets, *numbers)


@functools.partial(jax.jit, static_argnames=("config", "top_k", "inside", "limit"))
def _lens_numbers(params, tokens, targets, probes, config, top_k, inside, limit):
    rows = residual_stack(params, tokens, config, inside=inside)
    x_RxNxD = apply_probes(probes, rows.reshape(rows.shape[0], -1, config.d_model))
    tokens_N, targets_N = tokens.reshape(-1), targets.reshape(-1)

    def rank(log_NxV, ids_N):
        ids = jnp.arange(limit)
        mine = jnp.take_along_axis(log_NxV, jnp.maximum(ids_N, 0)[:, None], axis=1)
        ahead = (log_NxV > mine) | ((log_NxV == mine) & (ids[None] < ids_N[:, None]))
        return jnp.where(ids_N == NO_TARGET, NO_TARGET, jnp.sum(ahead, axis=1))

    final_NxV = log_probs(params, x_RxNxD[-1], config, limit)

    def numbers(x_NxD):
        log_NxV = log_probs(params, x_NxD, config, limit)
        top, ids = jax.lax.top_k(log_NxV, top_k)
        entropy = -jnp.sum(jnp.exp(log_NxV) * log_NxV, axis=1) / np.log(2)
        kl = jnp.maximum(kl_bits(final_NxV, log_NxV), 0)  # rounding may go below
        return ids, jnp.exp(top), entropy, kl, rank(log_NxV, targets_N), rank(log_NxV, tokens_N)

    return jax.tree.map(lambda a: a.reshape(a.shape[0], *tokens.shape, *a.shape[2:]), jax.lax.map(numbers, x_RxNxD))
