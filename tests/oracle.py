"""The model once more, in float64 NumPy: forward, loss and a reverse pass written out by hand.

Nothing of the package is used here, no autodiff and no fused tricks: one row and one head at a time, so that each line
can be held against the formula it stands for. `config` is anything with `ModelConfig`'s fields; `params` are nested
dicts of arrays.

Letters: B batch, T time, V vocabulary, D d_model, H query heads, G key/value heads, K head width, F feed-forward width.
A name `d_something` is the derivative of the loss with respect to `something`, of the same shape.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def to_float64(tree):
    """A copy of nested dicts of arrays, all float64 NumPy."""
    if isinstance(tree, dict):
        return {name: to_float64(branch) for name, branch in tree.items()}
    return np.array(tree, dtype=np.float64)


# Elementwise functions, each with its derivative.


def gelu(x):
    """x times the standard normal's cumulative distribution."""
    return x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))


def gelu_slope(x):
    density = np.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + _erf(x / math.sqrt(2.0))) + x * density


def gelu_tanh(x):
    """GPT-2's approximation."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def gelu_tanh_slope(x):
    t = np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t**2) * math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * x**2)


def silu(x):
    return x / (1.0 + np.exp(-x))


def silu_slope(x):
    gate = 1.0 / (1.0 + np.exp(-x))
    return gate + x * gate * (1.0 - gate)


# name: (is it gated, activation, its slope)
FFN_KINDS = {
    "gelu": (False, gelu, gelu_slope),
    "gelu_tanh": (False, gelu_tanh, gelu_tanh_slope),
    "swiglu": (True, silu, silu_slope),
    "geglu": (True, gelu_tanh, gelu_tanh_slope),
}


# Building blocks. Each `_back` takes the derivative of the output and gives that of the input; parameters' derivatives
# are added into `grads`, a tree like the block's params that starts at zero.


def linear(x_TxI, weights):
    y_TxO = x_TxI @ weights["kernel"]
    return y_TxO + weights["bias"] if "bias" in weights else y_TxO


def linear_back(d_y_TxO, x_TxI, weights, grads):
    grads["kernel"] += x_TxI.T @ d_y_TxO
    if "bias" in weights:
        grads["bias"] += d_y_TxO.sum(axis=0)
    return d_y_TxO @ weights["kernel"].T


def norm_factor(weights, config, kind):
    """What the norm multiplies by."""
    return 1.0 + weights["scale"] if kind == "rmsnorm" and config.norm_unit_offset else weights["scale"]


def norm(x_TxD, weights, config, kind=None):
    """Layer norm, or RMS norm: no mean taken off, and no bias."""
    kind = kind or config.norm
    if kind == "layernorm":
        centred = x_TxD - x_TxD.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)  # biased: divided by D, not D - 1
        return centred / np.sqrt(variance + config.norm_eps) * weights["scale"] + weights["bias"]
    mean_square = (x_TxD**2).mean(axis=-1, keepdims=True)
    return x_TxD / np.sqrt(mean_square + config.norm_eps) * norm_factor(weights, config, kind)


def norm_back(d_y_TxD, x_TxD, weights, config, grads, kind=None):
    kind = kind or config.norm
    centred = x_TxD - x_TxD.mean(axis=-1, keepdims=True) if kind == "layernorm" else x_TxD
    std = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    unit = centred / std
    grads["scale"] += (d_y_TxD * unit).sum(axis=0)
    d_unit = d_y_TxD * norm_factor(weights, config, kind)
    # d std / d centred_j = centred_j / (D * std), hence the part along `unit` that is taken off.
    d_centred = (d_unit - unit * (d_unit * unit).mean(axis=-1, keepdims=True)) / std
    if kind == "layernorm":
        grads["bias"] += d_y_TxD.sum(axis=0)
        return d_centred - d_centred.mean(axis=-1, keepdims=True)
    return d_centred


def scaled_frequency(frequency, config):
    """Frequencies for texts longer than those of training: all divided, or by Llama 3.1's rule."""
    if config.rope_original_len is None:
        return frequency / config.rope_factor
    wavelength = 2.0 * math.pi / frequency
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if wavelength > config.rope_original_len / low:
        return frequency / config.rope_factor
    if wavelength < config.rope_original_len / high:
        return frequency
    smooth = (config.rope_original_len / wavelength - low) / (high - low)
    return (1.0 - smooth) * frequency / config.rope_factor + smooth * frequency


def rope_pairs(width, config):
    """Which two columns turn together: a list of (first, second, frequency). The last columns may be in none."""
    turning = int(width * config.rope_fraction)
    half = turning // 2
    pairs = []
    for k in range(half):
        first, second = (2 * k, 2 * k + 1) if config.rope_pairs == "interleaved" else (k, k + half)
        pairs.append((first, second, scaled_frequency(config.rope_base ** (-2.0 * k / turning), config)))
    return pairs


def rotate(x_TxK, config, direction=1.0):
    """RoPE of one head: row t turns by t times the frequency. `direction` -1 turns back, which is the transpose too."""
    out_TxK = x_TxK.copy()
    time_T = np.arange(x_TxK.shape[0])
    for first, second, frequency in rope_pairs(x_TxK.shape[1], config):
        cos_T = np.cos(direction * time_T * frequency)
        sin_T = np.sin(direction * time_T * frequency)
        out_TxK[:, first] = x_TxK[:, first] * cos_T - x_TxK[:, second] * sin_T
        out_TxK[:, second] = x_TxK[:, first] * sin_T + x_TxK[:, second] * cos_T
    return out_TxK


def visible_keys(mask_T):
    """(T, T) bool: row i may look at column j. Causal, and never at padding."""
    time = len(mask_T)
    return np.tril(np.ones((time, time), dtype=bool)) & mask_T[None, :]


def softmax_where(scores_TxT, allowed_TxT):
    """Softmax of each row over its allowed columns; a row with none gets zeros."""
    weights_TxT = np.zeros_like(scores_TxT)
    for i in range(len(scores_TxT)):
        columns = np.flatnonzero(allowed_TxT[i])
        if len(columns):
            powers = np.exp(scores_TxT[i, columns] - scores_TxT[i, columns].max())
            weights_TxT[i, columns] = powers / powers.sum()
    return weights_TxT


def head_slices(config):
    """For each query head: its columns, and those of the key/value head that it shares with its group."""
    heads = config.n_heads
    kv_heads = heads if config.n_kv_heads is None else config.n_kv_heads
    width = config.d_model // heads if config.d_head is None else config.d_head
    for head in range(heads):
        shared = head // (heads // kv_heads)
        yield slice(head * width, (head + 1) * width), slice(shared * width, (shared + 1) * width)


def attention(x_TxD, weights, config, mask_T):
    """Returns the output and what the reverse pass needs."""
    q_all, k_all, v_all = (linear(x_TxD, weights[name]) for name in ("query", "key", "value"))
    mixed_all = np.zeros_like(q_all)
    per_head = []
    for own, shared in head_slices(config):
        q_TxK, k_TxK, v_TxK = q_all[:, own], k_all[:, shared], v_all[:, shared]
        if config.qk_norm:
            q_TxK = norm(q_TxK, weights["norm_query"], config, "rmsnorm")
            k_TxK = norm(k_TxK, weights["norm_key"], config, "rmsnorm")
        if config.positions == "rope":
            q_TxK, k_TxK = rotate(q_TxK, config), rotate(k_TxK, config)
        scores_TxT = q_TxK @ k_TxK.T / math.sqrt(q_TxK.shape[1])
        weights_TxT = softmax_where(scores_TxT, visible_keys(mask_T))
        mixed_all[:, own] = weights_TxT @ v_TxK
        per_head.append((q_TxK, k_TxK, v_TxK, weights_TxT))
    return linear(mixed_all, weights["out"]), (q_all, k_all, v_all, mixed_all, per_head)


def attention_back(d_y_TxD, x_TxD, weights, config, saved, grads):
    q_all, k_all, v_all, mixed_all, per_head = saved
    d_mixed_all = linear_back(d_y_TxD, mixed_all, weights["out"], grads["out"])
    d_q_all, d_k_all, d_v_all = np.zeros_like(q_all), np.zeros_like(k_all), np.zeros_like(v_all)
    for (own, shared), (q_TxK, k_TxK, v_TxK, weights_TxT) in zip(head_slices(config), per_head, strict=True):
        d_mixed = d_mixed_all[:, own]
        d_weights = d_mixed @ v_TxK.T
        # Softmax: d_s = w * (d_w - sum(w * d_w)). Forbidden columns have w = 0 and so get nothing.
        d_scores = weights_TxT * (d_weights - (weights_TxT * d_weights).sum(axis=-1, keepdims=True))
        d_scores = d_scores / math.sqrt(q_TxK.shape[1])
        d_q, d_k = d_scores @ k_TxK, d_scores.T @ q_TxK
        if config.positions == "rope":
            d_q, d_k = rotate(d_q, config, -1.0), rotate(d_k, config, -1.0)
        if config.qk_norm:
            d_q = norm_back(d_q, q_all[:, own], weights["norm_query"], config, grads["norm_query"], "rmsnorm")
            d_k = norm_back(d_k, k_all[:, shared], weights["norm_key"], config, grads["norm_key"], "rmsnorm")
        d_q_all[:, own] += d_q
        d_k_all[:, shared] += d_k  # heads of a group add up
        d_v_all[:, shared] += weights_TxT.T @ d_mixed
    d_x_TxD = linear_back(d_q_all, x_TxD, weights["query"], grads["query"])
    d_x_TxD = d_x_TxD + linear_back(d_k_all, x_TxD, weights["key"], grads["key"])
    return d_x_TxD + linear_back(d_v_all, x_TxD, weights["value"], grads["value"])


def feed_forward(x_TxD, weights, config):
    gated, activation, _ = FFN_KINDS[config.ffn]
    up_TxF = linear(x_TxD, weights["up"])
    if gated:
        return linear(activation(linear(x_TxD, weights["gate"])) * up_TxF, weights["down"])
    return linear(activation(up_TxF), weights["down"])


def feed_forward_back(d_y_TxD, x_TxD, weights, config, grads):
    gated, activation, slope = FFN_KINDS[config.ffn]
    up_TxF = linear(x_TxD, weights["up"])
    if not gated:
        d_hidden = linear_back(d_y_TxD, activation(up_TxF), weights["down"], grads["down"])
        return linear_back(d_hidden * slope(up_TxF), x_TxD, weights["up"], grads["up"])
    gate_TxF = linear(x_TxD, weights["gate"])
    d_hidden = linear_back(d_y_TxD, activation(gate_TxF) * up_TxF, weights["down"], grads["down"])
    d_x_TxD = linear_back(d_hidden * activation(gate_TxF), x_TxD, weights["up"], grads["up"])
    return d_x_TxD + linear_back(d_hidden * up_TxF * slope(gate_TxF), x_TxD, weights["gate"], grads["gate"])


# The whole model, one row of the batch at a time.


def lookup_factor(config):
    return math.sqrt(config.d_model) if config.scale_embedding else 1.0


def _row_forward(params, tokens_T, config, mask_T):
    """Logits (T, V) of one row; what its reverse pass needs; its residual stream by name."""
    x_TxD = lookup_factor(config) * params["embed"]["embedding"][tokens_T]
    if config.positions == "learned":
        x_TxD = x_TxD + params["positions"]["table"][: len(tokens_T)]
    stream = {"embed": x_TxD}
    saved = []
    for i in range(config.n_layers):
        block = params[f"block_{i}"]
        normed_TxD = norm(x_TxD, block["norm_attention"], config)
        attended_TxD, attention_saved = attention(normed_TxD, block["attention"], config, mask_T)
        z_TxD = x_TxD + attended_TxD
        read_TxD = x_TxD if config.parallel_residual else z_TxD
        y_TxD = z_TxD + feed_forward(norm(read_TxD, block["norm_ffn"], config), block["ffn"], config)
        saved.append((x_TxD, z_TxD, attention_saved))
        stream[f"block_{i}/attention"] = z_TxD
        stream[f"block_{i}/ffn"] = y_TxD
        x_TxD = y_TxD
    h_TxD = norm(x_TxD, params["norm_final"], config)
    stream["norm_final"] = h_TxD
    return h_TxD @ head_table(params, config).T, (saved, x_TxD, h_TxD), stream


def head_table(params, config):
    return params["embed"]["embedding"] if config.tied else params["head"]["embedding_out"]


def _rows(tokens, mask):
    tokens_BxT = np.asarray(tokens)
    mask_BxT = np.ones(tokens_BxT.shape, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    return list(zip(range(len(tokens_BxT)), tokens_BxT, mask_BxT, strict=True))


def forward(params, tokens, config, mask=None):
    """Logits (B, T, V) of tokens (B, T). `mask` (B, T), True at real tokens: padding is never attended to.

    A query that may look at nothing at all (padding before the first real token) gets a zero from attention.
    """
    params = to_float64(params)
    return np.stack([_row_forward(params, row, config, row_mask)[0] for _, row, row_mask in _rows(tokens, mask)])


def residuals(params, tokens, config, mask=None):
    """The residual stream, each (B, T, D): `embed`, then `block_i/attention` and `block_i/ffn`, the stream after each
    addition; and `norm_final`, the final norm's output."""
    params = to_float64(params)
    streams = [_row_forward(params, row, config, row_mask)[2] for _, row, row_mask in _rows(tokens, mask)]
    return {name: np.stack([stream[name] for stream in streams]) for name in streams[0]}


def cross_entropy(logits_V, target):
    """-log softmax(logits)[target]."""
    top = logits_V.max()
    return top + math.log(np.exp(logits_V - top).sum()) - logits_V[target]


def loss(params, tokens, targets, config, mask=None, padding=None):
    """Mean cross-entropy over the valid targets; 0 where there is none.

    `mask` (B, T) is True where a target counts; `padding` (B, T), True at real tokens, is what `forward` calls mask.
    """
    logits = forward(params, tokens, config, padding)
    losses = [
        cross_entropy(logits[b, t], targets[b][t])
        for b, row, valid in _rows(tokens, mask)
        for t in range(len(row))
        if valid[t]
    ]
    return sum(losses) / max(len(losses), 1)


def backward(params, tokens, targets, config, mask=None, padding=None):
    """Returns (loss, grads, lookup, head); arguments as for `loss`.

    `grads` is a tree like `params`. `lookup` and `head` (V, D) are the two parts of the table's gradient: through the
    rows that were looked up, and through the logits. Tied, `grads["embed"]["embedding"]` is their sum.
    """
    params = to_float64(params)
    grads = _zeros_like(params)
    lookup_VxD = np.zeros_like(params["embed"]["embedding"])
    head_VxD = np.zeros_like(lookup_VxD)
    table_VxD = head_table(params, config)
    valid_BxT = [valid_T for _, _, valid_T in _rows(tokens, mask)]
    count = max(sum(int(valid_T.sum()) for valid_T in valid_BxT), 1)
    total = 0.0
    for b, tokens_T, padding_T in _rows(tokens, padding):
        logits_TxV, (saved, x_TxD, h_TxD), _ = _row_forward(params, tokens_T, config, padding_T)
        d_logits_TxV = np.zeros_like(logits_TxV)
        for t in range(len(tokens_T)):
            if valid_BxT[b][t]:
                total += cross_entropy(logits_TxV[t], targets[b][t])
                powers = np.exp(logits_TxV[t] - logits_TxV[t].max())
                d_logits_TxV[t] = powers / powers.sum()
                d_logits_TxV[t, targets[b][t]] -= 1.0
        d_logits_TxV /= count
        head_VxD += d_logits_TxV.T @ h_TxD
        d_x_TxD = norm_back(d_logits_TxV @ table_VxD, x_TxD, params["norm_final"], config, grads["norm_final"])
        for i in reversed(range(config.n_layers)):
            block, block_grads = params[f"block_{i}"], grads[f"block_{i}"]
            x_TxD, z_TxD, attention_saved = saved[i]
            read_TxD = x_TxD if config.parallel_residual else z_TxD
            normed_TxD = norm(read_TxD, block["norm_ffn"], config)
            d_normed = feed_forward_back(d_x_TxD, normed_TxD, block["ffn"], config, block_grads["ffn"])
            d_read_TxD = norm_back(d_normed, read_TxD, block["norm_ffn"], config, block_grads["norm_ffn"])
            # What the feed-forward layer read is z; or x, which attention's branch knows nothing of.
            d_z_TxD = d_x_TxD if config.parallel_residual else d_x_TxD + d_read_TxD
            normed_TxD = norm(x_TxD, block["norm_attention"], config)
            d_normed = attention_back(
                d_z_TxD, normed_TxD, block["attention"], config, attention_saved, block_grads["attention"]
            )
            d_x_TxD = d_z_TxD + norm_back(
                d_normed, x_TxD, block["norm_attention"], config, block_grads["norm_attention"]
            )
            if config.parallel_residual:
                d_x_TxD = d_x_TxD + d_read_TxD
        if config.positions == "learned":
            grads["positions"]["table"][: len(tokens_T)] += d_x_TxD
        for t, token in enumerate(tokens_T):
            lookup_VxD[token] += lookup_factor(config) * d_x_TxD[t]
    grads["embed"]["embedding"] = lookup_VxD + head_VxD if config.tied else lookup_VxD.copy()
    if not config.tied:
        grads["head"]["embedding_out"] = head_VxD.copy()
    return total / count, grads, lookup_VxD, head_VxD


def _zeros_like(tree):
    if isinstance(tree, dict):
        return {name: _zeros_like(branch) for name, branch in tree.items()}
    return np.zeros_like(tree)


def leaves(tree, prefix=""):
    """Flat list of (path, array), paths joined by slashes."""
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [leaf for name, branch in tree.items() for leaf in leaves(branch, f"{prefix}/{name}" if prefix else name)]


def finite_difference(params, path, index, function, step=3e-4):
    """Slope of `function(params)` in one entry: central, fourth order, so that a wide step keeps float64's digits."""
    values = []
    for offset in (-2, -1, 1, 2):
        moved = to_float64(params)
        leaf = dict(leaves(moved))[path]
        leaf[index] += offset * step
        values.append(function(moved))
    below2, below1, above1, above2 = values
    return (8.0 * (above1 - below1) - (above2 - below2)) / (12.0 * step)
