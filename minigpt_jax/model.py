"""The model, in Flax Linen: token ids to logits through one tied table.

    tokens_BxT --lookup--> x_BxTxD --trunk (L pre-LN blocks, final norm)--> h_BxTxD --unembed--> logits_BxTxV

`MiniGPT.setup` makes the only `nn.Embed`; `lookup` reads its rows and `unembed` is `self.embed.attend`, so the params
hold one (V, D) leaf, `embed/embedding`, and autodiff sums its two gradients. Axis letters are in `config.py`.
"""

import functools
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from .config import ModelConfig
from .rotary import rope, text_positions

# Long sequences are attended in four blocks of queries, none of which looks at the keys of later blocks.
QUERY_BLOCKS_FROM, QUERY_BLOCKS = 256, 4


def wide(dtype) -> jnp.dtype:
    """The type of softmax, norm statistics, logits and loss: float32, or float64 where the model is."""
    return jnp.promote_types(dtype, jnp.float32)


def visible(query_positions_T: jax.Array, key_positions_S: jax.Array, window: int | None = None) -> jax.Array:
    """Causal mask (T, S): a query sees keys at its own position and before, at most `window` of them."""
    distance_TxS = query_positions_T[:, None] - key_positions_S[None, :]
    causal_TxS = distance_TxS >= 0
    return causal_TxS if window is None else causal_TxS & (distance_TxS < window)


def initial_std(path: str, shape: tuple[int, ...], config: ModelConfig) -> float:
    """Every leaf's init in one place: N(0, std^2) with this std; 0 means a constant: biases 0, scales 1 (or 0, where
    norm_unit_offset adds the 1).

    The course fixes only the table's 0.02. Kernels at 1/sqrt(fan_in) keep the stream's size at any width (LeCun et
    al. 1998) and train faster here than GPT-2's fixed 0.02; the smaller start of what writes to the residual stream
    is GPT-2's.
    """
    if path.endswith("kernel"):
        std = config.init_std if config.kernel_init == "fixed" else 1 / math.sqrt(shape[0])
        shrink = config.residual_init_scale and path.endswith(("out/kernel", "down/kernel"))
        return std / math.sqrt(2 * config.n_layers) if shrink else std
    return config.init_std if path.endswith(("table", "embedding", "embedding_out")) else 0.0


def _initializer(path: str, config: ModelConfig):
    def draw(key, shape, dtype):
        return nn.initializers.normal(initial_std(path, shape, config))(key, shape, dtype)

    return draw


@jax.custom_vjp
def bf16_dot(x_NxI: jax.Array, w_IxO: jax.Array) -> jax.Array:
    """x w of bfloat16 roundings, added up in float32 (Kalamkar et al. 2019, arXiv:1905.12322); so are its gradients.

    Autodiff's own rule would round the results of the gradients' products too: less exact, and on CPUs no faster.
    """
    return _bf16_dot_forward(x_NxI, w_IxO)[0]


def _bf16_product(a, b, contract: tuple[int, int]) -> jax.Array:
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def _bf16_dot_forward(x_NxI, w_IxO):
    x_NxI, w_IxO = x_NxI.astype(jnp.bfloat16), w_IxO.astype(jnp.bfloat16)
    return _bf16_product(x_NxI, w_IxO, (1, 0)), (x_NxI, w_IxO)


def _bf16_dot_backward(inputs, dy_NxO):
    x_NxI, w_IxO = inputs
    return _bf16_product(dy_NxO, w_IxO, (1, 1)), _bf16_product(x_NxI, dy_NxO, (0, 0))


bf16_dot.defvjp(_bf16_dot_forward, _bf16_dot_backward)


def _bf16_dot_general(x_NxI, w_IxO, dimension_numbers, **_):
    return bf16_dot(x_NxI, w_IxO)  # a dense layer's only product


def _projection(config: ModelConfig, name: str, features: int, use_bias: bool) -> nn.Dense:
    """A dense layer on (N, in); its kernel is (in, features)."""
    return nn.Dense(
        features,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=_initializer(f"{name}/kernel", config),
        dot_general=_bf16_dot_general if config.bf16_dots else None,
    )


class OffsetRMSNorm(nn.Module):
    """RMS norm times 1 + scale, so that decay or a start at 0 leaves the norm plain (Gemma, arXiv:2403.08295)."""

    epsilon: float
    dtype: str
    param_dtype: str

    @nn.compact
    def __call__(self, x):
        scale_D = self.param("scale", nn.initializers.zeros, x.shape[-1:], jnp.dtype(self.param_dtype))
        unit = nn.RMSNorm(self.epsilon, use_scale=False, dtype=wide(self.dtype))(x)
        factor_D = 1 + scale_D.astype(unit.dtype)  # in the wide type: 1 + scale in bfloat16 would lose a small scale
        return (unit * jnp.expand_dims(factor_D, tuple(range(x.ndim - 1)))).astype(self.dtype)


def _norm(config: ModelConfig, kind: str) -> nn.Module:
    """Over the last axis; `kind` as config.norm."""
    rms = OffsetRMSNorm if config.norm_unit_offset else nn.RMSNorm
    norm = nn.LayerNorm if kind == "layernorm" else rms
    # One-pass variance, as in Flax: 1.15 times faster training at the Mini-GPT's size, and a mean of 30 standard
    # deviations would still cost only three of float32's seven digits.
    # Normalised again in the backward pass: a step of nanoGPT's character model takes 15 % less memory, 2 % less time.
    norm = norm if config.remat else nn.remat(norm)
    return norm(epsilon=config.norm_eps, dtype=config.dtype, param_dtype=config.param_dtype)


def embedding_scaled(x, config: ModelConfig):
    """What was looked up, in `config.dtype` and times sqrt(D) in that dtype, where scale_embedding; else x itself."""
    if not config.scale_embedding:
        return x
    return x.astype(config.dtype) * jnp.asarray(math.sqrt(config.d_model), config.dtype)


class Attention(nn.Module):
    """Causal multi-head attention, with grouped key/value heads where n_kv_heads < n_heads."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.query = _projection(c, "query", c.n_heads * c.head_dim, c.attention_bias)
        self.key = _projection(c, "key", c.kv_heads * c.head_dim, c.attention_bias)
        self.value = _projection(c, "value", c.kv_heads * c.head_dim, c.attention_bias)
        self.out = _projection(c, "out", c.d_model, c.has_out_bias)
        if c.qk_norm:
            self.norm_query, self.norm_key = _norm(c, "rmsnorm"), _norm(c, "rmsnorm")
        self.drop = nn.Dropout(c.dropout)

    def __call__(self, x_NxD, batch, slots_T, mask_BxT=None, cache=None, window=None, pad_B=None):
        c = self.config
        B, T = batch, x_NxD.shape[0] // batch
        q_BxTxHxK = self.query(x_NxD).reshape(B, T, c.n_heads, c.head_dim)
        k_BxSxGxK = self.key(x_NxD).reshape(B, T, c.kv_heads, c.head_dim)
        v_BxSxGxK = self.value(x_NxD).reshape(B, T, c.kv_heads, c.head_dim)
        if c.qk_norm:
            q_BxTxHxK, k_BxSxGxK = self.norm_query(q_BxTxHxK), self.norm_key(k_BxSxGxK)
        if c.positions == "rope":
            positions = text_positions(slots_T, pad_B)
            q_BxTxHxK = rope(q_BxTxHxK, positions, c)
            k_BxSxGxK = rope(k_BxSxGxK, positions, c)
        key_slots_S = slots_T
        if cache is not None:  # keys are cached after norm and rotation, each in its own slot
            start = (0, slots_T[0], 0, 0)
            k_BxSxGxK = jax.lax.dynamic_update_slice(cache["key"], k_BxSxGxK.astype(cache["key"].dtype), start)
            v_BxSxGxK = jax.lax.dynamic_update_slice(cache["value"], v_BxSxGxK.astype(cache["value"].dtype), start)
            cache = {"key": k_BxSxGxK, "value": v_BxSxGxK}
            key_slots_S = jnp.arange(k_BxSxGxK.shape[1])

        # (B, T, heads, K) to (B, heads, T, K); the R = H / G query heads that read one key/value head lie one after the
        # other, so that every product below is a batch of B * G plain matrices, with no axis of size 1:
        # XLA's kernels for CPUs are many times slower with one.
        R = c.n_heads // c.kv_heads
        q_BxGxRxTxK = (
            (q_BxTxHxK / math.sqrt(c.head_dim)).reshape(B, T, c.kv_heads, R, c.head_dim).transpose(0, 2, 3, 1, 4)
        )
        k_BxGxSxK, v_BxGxSxK = k_BxSxGxK.transpose(0, 2, 1, 3), v_BxSxGxK.transpose(0, 2, 1, 3)
        seen_TxS = visible(slots_T, key_slots_S, window)
        blocks = [(0, T, k_BxGxSxK.shape[2])]  # (first query, last query, last key)
        if cache is None and T >= QUERY_BLOCKS_FROM:
            n = QUERY_BLOCKS
            blocks = [(i * T // n, (i + 1) * T // n, (i + 1) * T // n) for i in range(n)]
        parts = [
            self._attend(
                q_BxGxRxTxK[:, :, :, start:end],
                k_BxGxSxK[:, :, :keys],
                v_BxGxSxK[:, :, :keys],
                seen_TxS[start:end, :keys],
                None if mask_BxT is None else mask_BxT[:, :keys],
            )
            for start, end, keys in blocks
        ]
        o_BxHxTxK = jnp.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
        return self.out(o_BxHxTxK.transpose(0, 2, 1, 3).reshape(B * T, c.n_heads * c.head_dim)), cache

    def _attend(self, q_BxGxRxTxK, k_BxGxSxK, v_BxGxSxK, seen_TxS, mask_BxS):
        """softmax(q k^T) v over the visible keys, (B, H, T, K).

        The exponentials are summed up and divided by only after the product with v, and their largest is no variable:
        so the gradient makes one pass less over (T, S), forwards and backwards, and stays exact.
        """
        B, G, R, T, K = q_BxGxRxTxK.shape
        dtype = wide(q_BxGxRxTxK.dtype)
        q_BxGxNxK = q_BxGxRxTxK.reshape(B, G, R * T, K)
        scores_BxGxNxS = jnp.einsum("bgnk,bgsk->bgns", q_BxGxNxK, k_BxGxSxK, preferred_element_type=dtype)
        seen = jnp.tile(seen_TxS, (R, 1))[None, None]
        if mask_BxS is not None:
            seen = seen & mask_BxS[:, None, None, :]
        # Selection with a finite constant: a row that sees no key gets finite weights, not NaN ...
        scores_BxGxNxS = jnp.where(seen, scores_BxGxNxS, jnp.finfo(dtype).min)
        largest = jax.lax.stop_gradient(jnp.max(scores_BxGxNxS, axis=-1, keepdims=True))
        weights_BxGxNxS = jnp.exp(scores_BxGxNxS - largest)
        total = jnp.sum(weights_BxGxNxS, axis=-1, keepdims=True)
        if mask_BxS is not None:  # ... which are then taken away: only padding can be without a key
            weights_BxGxNxS = jnp.where(seen, weights_BxGxNxS, 0)
        weights_BxGxNxS = self.drop(weights_BxGxNxS, deterministic=not self.has_rng("dropout"))
        o_BxGxNxK = jnp.einsum("bgns,bgsk->bgnk", weights_BxGxNxS.astype(v_BxGxSxK.dtype), v_BxGxSxK)
        return (o_BxGxNxK / total.astype(o_BxGxNxK.dtype)).reshape(B, G * R, T, K)


class FeedForward(nn.Module):
    """act(x W_up) W_down, or (act(x W_gate) * x W_up) W_down where gated (Shazeer 2020, arXiv:2002.05202)."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.up = _projection(c, "up", c.ffn_dim, c.ffn_bias)
        if c.ffn in ("swiglu", "geglu"):
            self.gate = _projection(c, "gate", c.ffn_dim, c.ffn_bias)
        self.down = _projection(c, "down", c.d_model, c.ffn_bias)

    def __call__(self, x_NxD):
        match self.config.ffn:
            case "gelu" | "gelu_tanh":
                # Computed again in the backward pass, which keeps one (N, F) array less for each block: 10 to 12 % of a
                # training step's memory at GPT-2's width, and 1 to 3 % of its time.
                gelu = functools.partial(nn.gelu, approximate=self.config.ffn == "gelu_tanh")
                hidden_NxF = jax.checkpoint(gelu)(self.up(x_NxD))
            case "swiglu":
                hidden_NxF = nn.silu(self.gate(x_NxD)) * self.up(x_NxD)
            case "geglu":
                hidden_NxF = nn.gelu(self.gate(x_NxD), approximate=True) * self.up(x_NxD)
        return self.down(hidden_NxF)


class Block(nn.Module):
    """Pre-norm: z = x + attention(norm(x)); y = z + ffn(norm(z)).

    Parallel (Wang and Komatsuzaki 2021, GPT-J): y = z + ffn(norm(x)), so that neither waits for the other.
    """

    config: ModelConfig

    def setup(self):
        self.norm_attention = _norm(self.config, self.config.norm)
        self.attention = Attention(self.config)
        self.norm_ffn = _norm(self.config, self.config.norm)
        self.ffn = FeedForward(self.config)
        self.drop = nn.Dropout(self.config.dropout)

    def __call__(self, x_NxD, batch, slots_T, mask_BxT=None, cache=None, window=None, pad_B=None):
        deterministic = not self.has_rng("dropout")
        h_NxD = self.norm_attention(x_NxD)
        update_NxD, cache = self.attention(h_NxD, batch, slots_T, mask_BxT, cache, window, pad_B)
        z_NxD = x_NxD + self.drop(update_NxD, deterministic=deterministic)
        read_NxD = x_NxD if self.config.parallel_residual else z_NxD
        y_NxD = z_NxD + self.drop(self.ffn(self.norm_ffn(read_NxD)), deterministic=deterministic)
        return z_NxD, y_NxD, cache


class Positions(nn.Module):
    """A learned vector for each position below context_len."""

    config: ModelConfig

    @nn.compact
    def __call__(self, positions):
        c = self.config
        table = self.param("table", _initializer("table", c), (c.context_len, c.d_model), jnp.dtype(c.param_dtype))
        return jnp.take(table.astype(wide(table.dtype)), positions, axis=0)


class Head(nn.Module):
    """The untied head: a table of its own, for comparisons with the tied model only."""

    config: ModelConfig

    @nn.compact
    def __call__(self, h_BxTxD):
        c = self.config
        table = self.param(
            "embedding_out", _initializer("embedding_out", c), (c.vocab_size, c.d_model), jnp.dtype(c.param_dtype)
        )
        return h_BxTxD @ table.astype(h_BxTxD.dtype).T


class MiniGPT(nn.Module):
    """Token ids (B, T) to logits (B, T, V). Dropout is on exactly where an rng named "dropout" is given."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.embed = nn.Embed(
            c.vocab_size,
            c.d_model,
            dtype=wide(
                jnp.promote_types(c.dtype, c.param_dtype)
            ),  # so that the gradients of a row's many uses are summed in float32
            param_dtype=c.param_dtype,
            embedding_init=_initializer("embedding", c),
        )
        if c.positions == "learned":
            self.positions = Positions(c)
        block = nn.remat(Block, static_argnums=(2,)) if c.remat else Block
        self.block = [block(c) for _ in range(c.n_layers)]
        self.norm_final = _norm(c, c.norm)
        if not c.tied:
            self.head = Head(c)
        self.drop = nn.Dropout(c.dropout)

    def __call__(self, tokens_BxT, mask_BxT=None):
        h_BxTxD, _, _ = self.trunk(self.lookup(tokens_BxT), mask_BxT)
        return self.unembed(h_BxTxD)

    def lookup(self, tokens_BxT, offset=0, pad_B=None):
        """The start of the residual stream: rows of the table, scaled if asked, plus learned positions if any."""
        chex.assert_rank(tokens_BxT, 2)
        chex.assert_type(tokens_BxT, int)
        # Flax gives NaN for an id past the table, and would wrap a negative one around.
        ids_BxT = tokens_BxT.astype(jnp.int32)
        x_BxTxD = self.embed(jnp.where(ids_BxT < 0, self.config.vocab_size, ids_BxT))
        x_BxTxD = embedding_scaled(x_BxTxD, self.config)
        if self.config.positions == "learned":
            slots_T = offset + jnp.arange(tokens_BxT.shape[1])
            x_BxTxD = x_BxTxD + self.positions(text_positions(slots_T, pad_B))
        return x_BxTxD.astype(self.config.dtype)

    def trunk(self, x_BxTxD, mask_BxT=None, cache=None, offset=0, window=None, pad_B=None):
        """The blocks and the final norm. Returns h_BxTxD, the residual stream by name, and the new cache if any.

        Residuals: "embed" (what enters), "block_i/attention" and "block_i/ffn" (the stream after each addition).
        `offset` is the first token's slot, in the cache if there is one. `pad_B` says how many slots on the left hold
        no text, which moves the positions (the mask hides them). `window` limits how far back attention looks.
        """
        chex.assert_shape(x_BxTxD, (None, None, self.config.d_model))
        B, T, D = x_BxTxD.shape
        slots_T = offset + jnp.arange(T)
        x_NxD = x_BxTxD.reshape(B * T, D)  # every dense layer runs on two axes: its gradient is much faster so
        x_NxD = self.drop(x_NxD, deterministic=not self.has_rng("dropout"))
        residuals = {"embed": x_NxD}
        new_cache = {}
        for i, block in enumerate(self.block):
            name = f"block_{i}"
            z_NxD, x_NxD, layer_cache = block(
                x_NxD, B, slots_T, mask_BxT, None if cache is None else cache[name], window, pad_B
            )
            residuals |= {f"{name}/attention": z_NxD, f"{name}/ffn": x_NxD}
            new_cache[name] = layer_cache
        h_NxD = self.norm_final(x_NxD)
        residuals = {name: r_NxD.reshape(B, T, D) for name, r_NxD in residuals.items()}
        return h_NxD.reshape(B, T, D), residuals, None if cache is None else new_cache

    def readout(self, x_BxTxD):
        """Logits of the residual stream at any layer as if it were the last: the whole final norm, then the head."""
        chex.assert_shape(x_BxTxD, (None, None, self.config.d_model))
        B, T, D = x_BxTxD.shape
        return self.unembed(self.norm_final(x_BxTxD.reshape(B * T, D)).reshape(B, T, D))

    def unembed(self, h_BxTxD):
        """Logits h E^T, in float32 at least: the head is the lookup's own table."""
        chex.assert_shape(h_BxTxD, (None, None, self.config.d_model))
        B, T, D = h_BxTxD.shape
        h_NxD = h_BxTxD.reshape(B * T, D).astype(wide(self.config.dtype))
        logits_NxV = self.embed.attend(h_NxD) if self.config.tied else self.head(h_NxD)
        return logits_NxV.reshape(B, T, -1)
