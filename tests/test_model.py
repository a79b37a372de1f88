"""The model against an independent float64 NumPy one, a case worked by hand, and what must hold exactly.

Parameters are random everywhere, norm scales and biases too: at their initial 1 and 0 a forgotten one would not show.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from models import equations

import minigpt_jax as mg
from minigpt_jax.model import rope
from minigpt_jax.rotary import rope_frequencies

pytestmark = pytest.mark.usefixtures("quick_compilation")

COURSE = mg.ModelConfig()
TINY = mg.ModelConfig(vocab_size=7, d_model=16, n_layers=1, n_heads=4, d_ff=12, context_len=8)


def with_options(base=TINY, **options):
    """`base` with other options; float64 unless a dtype is among them."""
    return dataclasses.replace(base, **{"dtype": "float64", "param_dtype": "float64"} | options)


# One option at a time, so that a failing name says what is wrong, and mixtures with two layers, where options could
# collide. Compiling is what takes time here, hence one layer elsewhere.
OPTIONS = {
    "course": {"n_layers": 2},
    "rmsnorm": {"norm": "rmsnorm"},
    "gelu_tanh": {"ffn": "gelu_tanh"},
    "swiglu": {"ffn": "swiglu"},
    "geglu": {"ffn": "geglu"},
    "rope_half": {"rope_pairs": "half"},
    "rope_base": {"rope_base": 50.0},
    "norm_eps": {"norm_eps": 0.3},
    "learned": {"positions": "learned"},
    "no_positions": {"positions": "none"},
    "one_kv_head": {"n_kv_heads": 1},
    "two_kv_heads": {"n_kv_heads": 2},
    "attention_bias": {"attention_bias": True},
    "no_ffn_bias": {"ffn_bias": False},
    "untied": {"tied": False},
    "wide_heads": {"d_head": 6, "n_kv_heads": 2},
    "rope_fraction": {"rope_fraction": 0.5, "d_head": 8, "rope_pairs": "half"},
    "rope_factor": {"rope_factor": 4.0},
    # Wavelengths 6, 20, 63 and 199; up to 8 they stay, and from 32 on they are divided.
    "rope_llama3": {"d_head": 8, "rope_base": 100.0, "rope_factor": 4.0, "rope_original_len": 32},
    "out_bias_alone": {"out_bias": True},
    "no_out_bias": {"attention_bias": True, "out_bias": False},
    "qk_norm": {"qk_norm": True, "n_kv_heads": 2},
    "norm_unit_offset": {"norm": "rmsnorm", "norm_unit_offset": True},
    "scale_embedding": {"scale_embedding": True, "positions": "learned"},
    "parallel_residual": {"parallel_residual": True},
    "everything": {"norm": "rmsnorm", "norm_unit_offset": True, "qk_norm": True, "d_head": 8, "n_kv_heads": 2}
    | {"rope_fraction": 0.5, "rope_base": 10.0, "rope_factor": 4.0, "rope_original_len": 32, "rope_pairs": "half"}
    | {"out_bias": True, "scale_embedding": True, "parallel_residual": True, "ffn": "geglu", "n_layers": 2},
    "like_gpt2": {"n_layers": 2, "positions": "learned", "ffn": "gelu_tanh", "attention_bias": True},
    "like_llama": {"norm": "rmsnorm", "ffn": "swiglu", "ffn_bias": False, "rope_pairs": "half", "n_kv_heads": 2}
    | {"n_layers": 2, "tied": False},
    "like_gemma": {"norm": "rmsnorm", "ffn": "geglu", "rope_pairs": "half", "n_kv_heads": 1}
    | {"n_layers": 2, "d_head": 6, "norm_unit_offset": True, "scale_embedding": True, "ffn_bias": False},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
POSITIONS = {
    "rope": {},
    "rope_half": {"rope_pairs": "half"},
    "learned": {"positions": "learned"},
    "none": {"positions": "none"},
}


# Compiling is nearly all of these tests' time; what LLVM's optimizer does is no matter of theirs.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
loss_and_grads = quick_jit(jax.value_and_grad(mg.loss), static_argnums=2)


@functools.cache
def random_params(config):
    """Params with the structure of `init` and random values, none of them 0 or 1; kernels keep the stream's size."""
    shapes = jax.eval_shape(functools.partial(mg.init, config), jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        kind = path[-1].key
        noise = rng.normal(size=leaf.shape)
        if kind == "scale":
            noise = 1.0 + 0.3 * noise
        elif kind == "bias":
            noise = 0.3 * noise
        elif kind == "kernel":
            noise = noise / math.sqrt(leaf.shape[0])
        return jnp.asarray(noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_batch(config, shape, seed=0):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, config.vocab_size, (2, *shape))
    return tokens.astype(np.int32), targets.astype(np.int32)


def padding_mask(shape):
    """True at real tokens: row 0 has padding on the left, in the middle and on the right, row 1 only in the middle."""
    mask = np.ones(shape, dtype=bool)
    mask[0, [0, shape[1] // 2, shape[1] - 1]] = False
    mask[1, 1] = False
    return mask


def assert_grads_equal(grads, expected, rtol):
    """Every leaf, entry by entry, relative to the leaf's largest entry."""
    grads = oracle.to_float64(jax.device_get(grads))
    assert [path for path, _ in sorted(oracle.leaves(grads))] == [path for path, _ in sorted(oracle.leaves(expected))]
    found = dict(oracle.leaves(grads))
    for path, leaf in oracle.leaves(expected):
        # The 1e-14 is for gradients that are zero in exact arithmetic (a key's bias shifts all scores alike).
        atol = rtol * np.abs(leaf).max() + 1e-14
        np.testing.assert_allclose(found[path], leaf, rtol=0, atol=atol, err_msg=path)
        distance = np.linalg.norm(found[path] - leaf)
        assert distance <= rtol * np.linalg.norm(leaf) + 1e-14, path


# float64 on both sides: what is left is the order of sums, some 1e-15 of values up to about 30.
FORWARD = {"rtol": 1e-10, "atol": 1e-10}
GRADIENT_RTOL = 1e-9


# The oracle itself.


@each_option
def test_oracle_backward_is_the_slope_of_its_own_loss(options, x64):
    """A wrong derivation in the oracle would blame, or excuse, the model."""
    config = with_options(d_model=8, n_heads=4, d_ff=5, vocab_size=5, **options)
    params = oracle.to_float64(jax.device_get(random_params(config)))
    tokens, targets = random_batch(config, (2, 5))
    mask = padding_mask((2, 5))
    value, grads, lookup, head = oracle.backward(params, tokens, targets, config, ~mask | (tokens > 1), mask)

    def loss(moved):
        return oracle.loss(moved, tokens, targets, config, ~mask | (tokens > 1), mask)

    # The same formula on both sides, summed the same way.
    np.testing.assert_allclose(value, loss(params), rtol=1e-14)
    rng = np.random.default_rng(1)
    for path, leaf in oracle.leaves(grads):
        index = tuple(rng.integers(0, leaf.shape))
        # Differences of a loss near 3, good to 1e-15, over steps of 3e-4 leave 1e-11; the step itself errs less.
        np.testing.assert_allclose(
            oracle.finite_difference(params, path, index, loss), leaf[index], rtol=1e-8, atol=1e-9, err_msg=path
        )
    if config.tied:
        np.testing.assert_array_equal(grads["embed"]["embedding"], lookup + head)


# The params' paths and shapes, which are public. The oracle adds the biases it finds; these are the ones it must find.


def expected_shapes(config):
    V, D, F = config.vocab_size, config.d_model, config.ffn_dim
    K = D // config.n_heads if config.d_head is None else config.d_head
    HK, GK = config.n_heads * K, config.kv_heads * K
    out_bias = config.attention_bias if config.out_bias is None else config.out_bias
    shapes = {"embed/embedding": (V, D)}
    if config.positions == "learned":
        shapes["positions/table"] = (config.context_len, D)
    if not config.tied:
        shapes["head/embedding_out"] = (V, D)
    norms = ["norm_final"]
    for i in range(config.n_layers):
        norms += [f"block_{i}/norm_attention", f"block_{i}/norm_ffn"]
        attention = {"query": (D, HK), "key": (D, GK), "value": (D, GK), "out": (HK, D)}
        ffn = {"up": (D, F), "down": (F, D)} | ({"gate": (D, F)} if config.ffn in ("swiglu", "geglu") else {})
        for part, kernels, biases in [("attention", attention, config.attention_bias), ("ffn", ffn, config.ffn_bias)]:
            for name, shape in kernels.items():
                shapes[f"block_{i}/{part}/{name}/kernel"] = shape
                if out_bias if name == "out" else biases:
                    shapes[f"block_{i}/{part}/{name}/bias"] = shape[1:]
        if config.qk_norm:
            shapes |= {f"block_{i}/attention/{name}/scale": (K,) for name in ("norm_query", "norm_key")}
    for path in norms:
        shapes[f"{path}/scale"] = (D,)
        if config.norm == "layernorm":
            shapes[f"{path}/bias"] = (D,)
    return shapes


@each_option
def test_params_have_the_public_paths_and_shapes(options, x64):
    """A leaf that is renamed, missing or too many; a second copy of the table; a bias that an option should remove."""
    config = with_options(**options)
    leaves = oracle.leaves(random_params(config))
    assert {path: leaf.shape for path, leaf in leaves} == expected_shapes(config)
    assert [path for path, _ in leaves if path.split("/")[-1] == "embedding"] == ["embed/embedding"]


# Forward and gradients against the oracle.


@each_option
def test_logits_and_every_gradient_equal_the_oracle(options, x64):
    """Any wrong option: a norm's epsilon or variance, a GELU form, a rotation, a head's group, a lost bias.

    In the gradients: a leaf without one, a stop_gradient, a target that should not count.
    """
    config = with_options(**options)
    params = random_params(config)
    tokens, targets = random_batch(config, (2, 6))
    valid = padding_mask((2, 6))  # of targets only: the model attends to everything

    def loss_and_logits(params):
        logits = mg.forward(params, tokens, config)
        return mg.cross_entropy_from_logits(logits, targets, valid), logits

    grads, logits = quick_jit(jax.grad(loss_and_logits, has_aux=True))(params)
    assert logits.dtype == jnp.float64
    np.testing.assert_allclose(logits, oracle.forward(params, tokens, config), **FORWARD)
    _, expected, _, _ = oracle.backward(params, tokens, targets, config, valid)
    assert_grads_equal(grads, expected, GRADIENT_RTOL)


@pytest.mark.parametrize("name", ["course", "like_gpt2", "like_llama"])
def test_one_sequence_equals_its_row_of_a_batch(name, x64):
    """(T,) tokens, with and without a mask, take another way in; a lost axis there broadcasts silently."""
    config = with_options(**OPTIONS[name])
    params = random_params(config)
    tokens, _ = random_batch(config, (2, 7))
    mask = padding_mask((2, 7))
    logits = mg.forward(params, tokens[0], config)
    assert logits.shape == (7, config.vocab_size)
    np.testing.assert_allclose(logits, oracle.forward(params, tokens, config)[0], **FORWARD)
    masked = mg.forward(params, tokens[0], config, mask=mask[0])
    np.testing.assert_allclose(masked[mask[0]], oracle.forward(params, tokens, config, mask)[0][mask[0]], **FORWARD)


@pytest.mark.parametrize(
    "name",
    [
        "rope_half",
        "no_positions",
        "one_kv_head",
        "two_kv_heads",
        "like_gpt2",
        "like_llama",
        "like_gemma",
        "course",
        "everything",
    ],
)
def test_padding_mask_equals_oracle(name, x64):
    """Padding that is attended to, a mask of the wrong polarity or axis, one row's mask used for all rows."""
    config = with_options(**OPTIONS[name])
    params = random_params(config)
    tokens, _ = random_batch(config, (2, 7))
    mask = padding_mask((2, 7))
    logits = mg.forward(params, tokens, config, mask=mask)
    # At padding itself logits mean nothing, they need only be finite.
    np.testing.assert_allclose(logits[mask], oracle.forward(params, tokens, config, mask)[mask], **FORWARD)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("length", [256, 301])
def test_long_sequences_equal_oracle(length, x64):
    """From 256 on, queries are attended in four blocks: a wrong cut (an odd length too), mask or order shows here."""
    config = with_options(d_model=8, n_heads=4, n_kv_heads=2, d_ff=4)
    params = random_params(config)
    tokens, targets = random_batch(config, (2, length))
    mask = padding_mask((2, length))
    np.testing.assert_allclose(mg.forward(params, tokens, config), oracle.forward(params, tokens, config), **FORWARD)

    def masked_loss(params):
        logits = mg.forward(params, tokens, config, mask=mask)
        return mg.cross_entropy_from_logits(logits, targets, mask), logits

    grads, logits = quick_jit(jax.grad(masked_loss, has_aux=True))(params)
    np.testing.assert_allclose(logits[mask], oracle.forward(params, tokens, config, mask)[mask], **FORWARD)
    _, expected, _, _ = oracle.backward(params, tokens, targets, config, mask, mask)
    assert_grads_equal(grads, expected, GRADIENT_RTOL)


@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_every_gradient_of_the_course_model_equal_the_oracle(masked, x64):
    """`loss`, at full size: one of the table's two contributions lost or doubled, a mean over the wrong count."""
    config = with_options(COURSE)
    params = random_params(config)
    tokens, targets = random_batch(config, (2, 16))
    valid = padding_mask((2, 16)) if masked else None
    loss, grads = loss_and_grads(params, mg.Batch(tokens, targets, valid), config)
    expected_loss, expected, lookup, head = oracle.backward(params, tokens, targets, config, valid)
    # One number out of sums of 32 terms near 30, in float64.
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    assert_grads_equal(grads, expected, GRADIENT_RTOL)
    # Both parts matter in this case, so that the check above would notice either.
    assert min(np.linalg.norm(lookup), np.linalg.norm(head)) > 0.1 * np.linalg.norm(expected["embed"]["embedding"])


def test_gradients_equal_finite_differences_of_the_models_own_loss(x64):
    """An error that model and oracle shared in their derivatives, but not in the loss."""
    config = with_options(**OPTIONS["like_gemma"])
    params = random_params(config)
    batch = mg.Batch(*random_batch(config, (2, 6)))
    grads = jax.device_get(loss_and_grads(params, batch, config)[1])
    rng = np.random.default_rng(2)
    for path, leaf in oracle.leaves(grads):
        index = tuple(rng.integers(0, leaf.shape))
        slope = oracle.finite_difference(params, path, index, lambda moved: float(mg.loss(moved, batch, config)))
        # As in the oracle's own test.
        np.testing.assert_allclose(leaf[index], slope, rtol=1e-8, atol=1e-9, err_msg=path)


# One case on paper.


def hand_case():
    """One block, two tokens, D = 4, two heads of K = 2, F = 2, V = 3; every step is worked out in the tests below.

    p = (1, -1, 1, -1), q = (1, 1, -1, -1), r = (1, -1, -1, 1) are orthogonal, each of mean 0 and variance 1. With
    epsilon 0.36, the layer norm of 0.8 p is 0.8 p / sqrt(0.64 + 0.36) = 0.8 p, unchanged, and that of 0.45 p is
    0.45 p / sqrt(0.2025 + 0.36) = 0.45 p / 0.75 = 0.6 p.
    """
    p, q, r = np.array([[1.0, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    # Head 1's score of query t at key s is a / sqrt(2) times cos(t - s), by RoPE with K = 2, whose one frequency is 1.
    # So token 1 scores itself a (1 - cos 1) / sqrt(2) = ln 3 higher than token 0. Head 0 scores 0 everywhere.
    a = math.sqrt(2) * math.log(3) / (1 - math.cos(1.0))
    plain_norm = {"scale": np.ones(4), "bias": np.zeros(4)}
    params = {
        "embed": {"embedding": np.stack([0.8 * p, 0.8 * q, 1.0 + r])},
        "block_0": {
            "norm_attention": plain_norm,
            "attention": {
                # The norm's output starts with 0.8 for both tokens: from it, head 1's query (a, 0) and key (1, 0).
                "query": {"kernel": np.array([[0, 0, a / 0.8, 0], [0] * 4, [0] * 4, [0] * 4])},
                "key": {"kernel": np.array([[0, 0, 1 / 0.8, 0], [0] * 4, [0] * 4, [0] * 4])},
                "value": {"kernel": np.eye(4)},
                "out": {
                    "kernel": np.array(
                        [
                            [-0.4375, -0.1875, 0.1875, 0.4375],
                            [0.0, -0.125, 0.125, 0.0],
                            [0.0, 0.5, -0.5, 0.0],
                            [0.0, 0.0, 0.0, 0.0],
                        ]
                    )
                },
            },
            "norm_ffn": {"scale": np.full(4, 5 / 3), "bias": np.zeros(4)},
            "ffn": {
                # Unit 0 reads entry 1; unit 1 reads entry 2 and adds 1.
                "up": {"kernel": np.array([[0.0, 0], [1, 0], [0, 1], [0, 0]]), "bias": np.array([0.0, 1.0])},
                "down": {"kernel": np.stack([r, 0.5 * r]), "bias": np.full(4, 0.1)},
            },
        },
        "norm_final": {"scale": np.ones(4), "bias": np.full(4, 0.25)},
    }
    config = with_options(vocab_size=3, d_model=4, n_layers=1, n_heads=2, d_ff=2, norm_eps=0.36)
    return params, np.array([0, 1], dtype=np.int32), config


# The literals below have 15 digits.
BY_HAND = {"rtol": 0, "atol": 1e-13}


def test_block_by_hand(x64):
    """Model and oracle could share a mistake; paper is the third witness for attention, RoPE, norm and feed-forward."""
    params, tokens, config = hand_case()
    x = mg.embed(params, tokens, config)
    np.testing.assert_array_equal(x, [[0.8, -0.8, 0.8, -0.8], [0.8, 0.8, -0.8, -0.8]])
    # The norm leaves x as it is, and so does the value kernel: v_0 = 0.8 p, v_1 = 0.8 q.
    # Token 0 sees itself: it mixes (.8, -.8, .8, -.8). Token 1: head 0 (entries 0, 1) weighs by 1/2 and 1/2, giving
    # 0.8 (1, 0); head 1 (entries 2, 3) by 1/4 and 3/4, giving 0.8 (1/4 - 3/4, -1/4 - 3/4) = (-.4, -.8).
    # With the out kernel's rows o0, o1, o2, 0:
    #   token 0: .8 (o0 - o1 + o2) = .8 (-.4375, .4375, -.4375, .4375) = -.35 p   so z_0 = .45 p
    #   token 1: .8 o0 - .4 o2 = (-.35, -.15 - .2, .15 + .2, .35) = -.35 q        so z_1 = .45 q
    _, residuals = mg.trunk(params, x, config, return_residuals=True)
    np.testing.assert_allclose(
        residuals["block_0/attention"], [[0.45, -0.45, 0.45, -0.45], [0.45, 0.45, -0.45, -0.45]], **BY_HAND
    )
    # The second norm gives .6 p and .6 q, times its scale 5/3: p and q. Units before GELU: token 0 has p[1] = -1 and
    # p[2] + 1 = 2; token 1 has q[1] = 1 and q[2] + 1 = 0. GELU(x) = x Phi(x) with Phi(-1) = 0.158655253931457,
    # Phi(1) = 0.841344746068543, Phi(2) = 0.977249868051821. Down: r times unit 0 + unit 1 / 2, plus .1:
    #   token 0: (-0.158655253931457 + 0.977249868051821) r + .1 = 0.818594614120364 r + .1
    #   token 1: (0.841344746068543 + 0) r + .1
    # Added to .45 (1, -1, 1, -1) and .45 (1, 1, -1, -1):
    np.testing.assert_allclose(
        residuals["block_0/ffn"],
        [
            [1.368594614120364, -1.168594614120364, -0.268594614120364, 0.468594614120364],
            [1.391344746068543, -0.291344746068543, -1.191344746068543, 0.491344746068543],
        ],
        **BY_HAND,
    )


def test_logits_by_hand(x64):
    """As above, for the final norm and the tied head."""
    params, tokens, config = hand_case()
    # The final norm takes off the mean .1. Variances: .45^2 + 0.818594614120364^2 and .45^2 + 0.841344746068543^2. With
    # the .36, roots s_0 = 1.110223915373321 and s_1 = 1.127102915326343. So h_0 = (.45 p + 0.818594614120364 r) / s_0
    # + .25, and h_1 = (.45 q + 0.841344746068543 r) / s_1 + .25.
    # Against row 0 = .8 p: .8 * 4 * .45 / s_0 for token 0, nothing for token 1 (q and r are orthogonal to p); row 1 =
    # .8 q the other way round; row 2 = 1 + r: 4 * .25, plus 4 * 0.818594614120364 / s_0 or 4 * 0.841344746068543 / s_1.
    # 1.44 / s_0 = 1.297035652052036 and 1.44 / s_1 = 1.277611813809443.
    np.testing.assert_allclose(
        mg.forward(params, tokens, config),
        [[1.297035652052036, 0.0, 3.949295553033030], [0.0, 1.277611813809443, 3.985866630732435]],
        **BY_HAND,
    )


def test_oracle_by_hand():
    """The oracle answers to paper too."""
    params, tokens, config = hand_case()
    np.testing.assert_allclose(
        oracle.forward(params, tokens[None], config)[0],
        [[1.297035652052036, 0.0, 3.949295553033030], [0.0, 1.277611813809443, 3.985866630732435]],
        **BY_HAND,
    )


# Causality and positions.


@pytest.mark.parametrize("length", [6, 300])
@pytest.mark.parametrize(("positions", "dtype"), [*((name, "float32") for name in POSITIONS), ("rope", "bfloat16")])
def test_a_token_changes_nothing_before_it(positions, dtype, length):
    """A look ahead, which training rewards with a loss near zero; to the bit, as any leak at all is one too many."""
    config = with_options(TINY, context_len=length, dtype=dtype, param_dtype="float32", **POSITIONS[positions])
    params = random_params(config)
    tokens, _ = random_batch(config, (length,))
    before = np.asarray(mg.forward(params, tokens, config))
    for i in range(6) if length == 6 else (0, 74, 75, 150, 224, 299):  # long sequences are cut at 75, 150 and 225
        changed = tokens.copy()
        changed[i] = (changed[i] + 1) % config.vocab_size
        after = np.asarray(mg.forward(params, changed, config))
        np.testing.assert_array_equal(after[:i], before[:i])
        moved = (after != before).any(axis=-1)
        assert moved[i]
        # At bfloat16 one token among hundreds may round away; shortly after it, it must show.
        assert moved[i:].all() if dtype == "float32" else moved[i : i + 4].all()


@pytest.mark.parametrize("options", POSITIONS.values(), ids=POSITIONS.keys())
def test_no_gradient_flows_back_from_the_future(options):
    """A mask that hides later tokens in the values but not in the derivative."""
    config = with_options(TINY, dtype="float32", param_dtype="float32", **options)
    params = random_params(config)
    tokens, _ = random_batch(config, (6,))

    def logits_at_3(x):
        return mg.unembed(params, mg.trunk(params, x, config), config)[3]

    slopes_VxTxD = np.asarray(quick_jit(jax.jacobian(logits_at_3))(mg.embed(params, tokens, config)))
    np.testing.assert_array_equal(slopes_VxTxD[:, 4:], 0.0)
    assert (np.abs(slopes_VxTxD[:, :4]).max(axis=(0, 2)) > 0).all()


@pytest.mark.parametrize("pairs", ["interleaved", "half"])
def test_rope_scores_depend_on_the_distance_alone(pairs):
    """<R_m q, R_n k> = <q, R_(n-m) k>: a frequency, a pairing or a position counted differently for q and k."""
    config = mg.ModelConfig(rope_pairs=pairs)
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, config.head_dim)).astype(np.float32)

    def turned(x, position):
        return np.asarray(rope(x, jnp.array([position]), config)).ravel()

    for m, n in [(0, 1), (3, 7), (5, 5), (10, 12), (20, 8)]:
        # The course's own tolerance: float32, 16 products near 1.
        np.testing.assert_allclose(turned(q, m) @ turned(k, n), q.ravel() @ turned(k, n - m), rtol=0, atol=1e-5)
        # And the angle is not just zero: the score does depend on the distance.
        assert m == n or abs(turned(q, m) @ turned(k, n) - q.ravel() @ k.ravel()) > 1e-2


def test_rope_by_hand(x64):
    """Which columns make a pair, which way they turn, how fast: K = 4, position 2, base 100, so angles 2 and 0.2."""
    x = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    c, s, C, S = math.cos(2), math.sin(2), math.cos(0.2), math.sin(0.2)
    expected = {
        "interleaved": [1 * c - 2 * s, 1 * s + 2 * c, 3 * C - 4 * S, 3 * S + 4 * C],
        "half": [1 * c - 3 * s, 2 * C - 4 * S, 1 * s + 3 * c, 2 * S + 4 * C],
    }
    for pairs, values in expected.items():
        turned = rope(x, jnp.array([2]), with_options(rope_pairs=pairs, rope_base=100.0))
        np.testing.assert_allclose(turned.ravel(), values, rtol=1e-14)  # one product and one sum in float64
    # Half of a head's 8 dimensions are as a head of 4, frequencies too; the others pass through.
    wide = np.concatenate([x, x + 4], axis=-1)
    for pairs, values in expected.items():
        config = with_options(rope_pairs=pairs, rope_base=100.0, d_head=8, rope_fraction=0.5)
        turned = rope(wide, jnp.array([2]), config).ravel()
        np.testing.assert_allclose(turned[:4], values, rtol=1e-14)
        np.testing.assert_array_equal(turned[4:], [5, 6, 7, 8])


def test_scaled_frequencies_by_hand():
    """Base 1000 and K = 6: frequencies 1, 1/10 and 1/100, wavelengths 2 pi = 6.28, 62.8 and 628.

    By Llama 3.1's rule with an original length of 100, low 1 and high 4: wavelengths below 25 stay, above 100 they are
    divided by the factor, 8. For 62.8, 100 / 62.83185307179586 = 1.591549430918953, so smooth is (that - 1) / 3 =
    0.197183143639651, and the mix 0.802816856360349 / 80 + 0.0197183143639651 = 0.0297535250684695.
    """
    shape = dict(d_model=6, n_heads=1, rope_base=1000.0, rope_factor=8.0)
    llama3 = rope_frequencies(mg.ModelConfig(**shape, rope_original_len=100))
    np.testing.assert_allclose(llama3, [1, 0.0297535250684695, 0.00125], rtol=1e-14)
    np.testing.assert_allclose(rope_frequencies(mg.ModelConfig(**shape)), [1 / 8, 1 / 80, 1 / 800], rtol=1e-14)
    # Low 2 and high 8: below 12.5 they stay, above 50 they are divided.
    others = mg.ModelConfig(**shape, rope_original_len=100, rope_low_freq_factor=2.0, rope_high_freq_factor=8.0)
    np.testing.assert_allclose(rope_frequencies(others), [1, 1 / 80, 1 / 800], rtol=1e-14)


def test_the_lookup_s_factor_is_rounded_to_the_compute_type():
    """sqrt(3072) = 55.4256 is 55.5 in bfloat16, whose step is 1/4 there; and the row is rounded before the product:
    1.0038 is 1, where 1.0038 * 55.5 = 55.71 would be 55.75."""
    table = {"embed": {"embedding": jnp.tile(jnp.array([[1.0], [1.0038]]), (1, 3072))}}
    config = mg.ModelConfig(vocab_size=2, d_model=3072, scale_embedding=True, dtype="bfloat16")
    x = mg.embed(table, [0, 1], config)
    assert x.dtype == jnp.bfloat16 and (x == 55.5).all()
    wide = mg.embed(table, [0], dataclasses.replace(config, dtype="float32"))
    np.testing.assert_allclose(wide, 55.425626, rtol=1e-7)


def test_fresh_scales_are_neutral_with_and_without_the_offset():
    """A leaf that starts at 1 under an offset of 1 doubles every norm."""
    plain = mg.ModelConfig(vocab_size=7, d_model=8, n_layers=1, n_heads=2, d_ff=4, norm="rmsnorm", qk_norm=True)
    offset = dataclasses.replace(plain, norm_unit_offset=True)
    inits = [mg.init(config, jax.random.key(0)) for config in (plain, offset)]
    for params, value in zip(inits, (1, 0), strict=True):
        scales = [leaf for path, leaf in oracle.leaves(params) if path.endswith("scale")]
        assert len(scales) == 5 and all((leaf == value).all() for leaf in scales)
    tokens, _ = random_batch(plain, (6,))
    logits = [mg.forward(params, tokens, config) for params, config in zip(inits, (plain, offset), strict=True)]
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-5, atol=1e-7)  # float32, near 0.1


def test_without_positions_one_layer_forgets_the_order_of_the_past(x64):
    """Position information that leaks in though `positions` is "none".

    Attention without positions and without a causal mask would be equivariant under permutations; the mask is always on
    here. What remains: in one layer the last token sees all others, each computed from its token alone, so their order
    cannot matter. (Rounding apart: the sums run in another order.)
    """
    tokens = np.array([1, 5, 2, 0, 6, 3], dtype=np.int32)
    shuffled = tokens[[3, 0, 4, 2, 1, 5]]
    for options in POSITIONS.values():
        config = with_options(**options)
        params = random_params(config)
        last, other = (mg.forward(params, order, config)[-1] for order in (tokens, shuffled))
        if config.positions == "none":
            np.testing.assert_allclose(other, last, **FORWARD)
        else:
            assert np.abs(other - last).max() > 1e-3


def test_left_padding_shifts_rope_without_effect(x64):
    """Padding on the left must be invisible: masked as keys, and RoPE sees distances only."""
    config = with_options()
    params = random_params(config)
    tokens, _ = random_batch(config, (5,))
    padded = np.concatenate([[6, 6, 6], tokens]).astype(np.int32)
    mask = np.arange(8) >= 3
    np.testing.assert_allclose(
        mg.forward(params, padded, config, mask=mask)[3:], mg.forward(params, tokens, config), **FORWARD
    )


# Padding, NaN, low precision.


@pytest.mark.parametrize("attention_mask", [False, True])
def test_a_row_of_padding_changes_no_gradient(attention_mask, x64):
    """A softmax over no key at all is 0/0, and 0 * NaN poisons every leaf; a mean over rows would count the row."""
    config = with_options()
    params = random_params(config)
    tokens, targets = random_batch(config, (2, 6))
    mask = np.array([[True] * 6, [False] * 6])

    @quick_jit
    @jax.value_and_grad
    def loss(params, tokens, targets, mask):
        if attention_mask:
            return mg.cross_entropy_from_logits(mg.forward(params, tokens, config, mask=mask), targets, mask)
        return mg.loss(params, mg.Batch(tokens, targets, mask), config)

    with jax.debug_nans(True):
        both, both_grads = loss(params, tokens, targets, mask)
        first, first_grads = loss(params, tokens[:1], targets[:1], mask[:1])
    # The added row contributes exact zeros; sums over another number of rows may round in another order.
    np.testing.assert_allclose(both, first, rtol=1e-13)
    assert_grads_equal(both_grads, oracle.to_float64(jax.device_get(first_grads)), 1e-12)


def test_no_valid_target_gives_zero(x64):
    """A mean over nothing."""
    config = with_options()
    params = random_params(config)
    tokens, targets = random_batch(config, (2, 6))
    batch = mg.Batch(tokens, targets, np.zeros((2, 6), dtype=bool))
    with jax.debug_nans(True):
        loss, grads = loss_and_grads(params, batch, config)
    assert loss == 0
    for path, leaf in oracle.leaves(jax.device_get(grads)):
        np.testing.assert_array_equal(leaf, 0.0, err_msg=path)


def test_gradients_with_padding_are_finite_in_float32():
    """A `where` hides a NaN from the value and not from the derivative; float32 is where constants overflow."""
    config = with_options(TINY, dtype="float32", param_dtype="float32")
    params = random_params(config)
    tokens, targets = random_batch(config, (2, 8))
    mask = padding_mask((2, 8))

    @quick_jit
    @jax.grad
    def slope(params):
        return mg.cross_entropy_from_logits(mg.forward(params, tokens, config, mask=mask), targets, mask)

    with jax.debug_nans(True):
        grads = slope(params)
    for path, leaf in oracle.leaves(jax.device_get(grads)):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("float16", 0.025), ("bfloat16", 0.2)])
def test_low_precision_is_finite_and_close(dtype, atol, padded):
    """A mask constant that overflows in float16; a softmax, a norm or a head in low precision.

    Logits here have a standard deviation near 6. Each of some ten roundings of the stream errs by 2^-8 in bfloat16,
    2^-11 in float16 and 2^-24 in float32, relative; the bounds leave a factor of 3 over the largest error seen.
    """
    config = with_options(TINY, dtype=dtype, param_dtype="float32")
    params = random_params(config)
    tokens, _ = random_batch(config, (2, 8))
    mask = padding_mask((2, 8)) if padded else None
    logits = mg.forward(params, tokens, config, mask=mask)
    assert logits.dtype == jnp.float32
    assert np.isfinite(logits).all()
    shown = np.ones((2, 8), dtype=bool) if mask is None else mask
    expected = oracle.forward(params, tokens, config, mask)
    np.testing.assert_allclose(logits[shown], expected[shown], rtol=0, atol=atol)


def test_low_precision_of_every_option():
    """A norm inside attention or a lookup's factor that lifts the stream to float32, or overflows."""
    config = with_options(TINY, **OPTIONS["everything"] | {"dtype": "bfloat16", "param_dtype": "float32"})
    params = random_params(config)
    tokens, _ = random_batch(config, (2, 8))
    h, residuals = mg.trunk(params, mg.embed(params, tokens, config), config, return_residuals=True)
    assert {leaf.dtype for leaf in (h, *residuals.values())} == {jnp.dtype("bfloat16")}
    expected = oracle.forward(params, tokens, config)
    # Logits near 9, and as many roundings as above.
    np.testing.assert_allclose(mg.unembed(params, h, config), expected, rtol=0, atol=0.4)


def test_layer_norm_takes_off_the_mean():
    """Variances of one pass, E[x^2] - E[x]^2, lose digits when the mean is large: three of float32's seven at 30."""
    config = with_options(TINY, n_layers=2, dtype="float32", param_dtype="float32")
    params = random_params(config)
    x = mg.embed(params, random_batch(config, (2, 6))[0], config)
    # A constant in the stream goes at every layer norm; h is near 1, and of its seven digits four are left, less one
    # for two layers' worth of sums.
    np.testing.assert_allclose(mg.trunk(params, x + 30.0, config), mg.trunk(params, x, config), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_are_float32_when_the_params_are_not(dtype):
    """Logits in bfloat16 lose the loss's digits: with params of that type too, the head still adds up in float32."""
    config = with_options(TINY, dtype=dtype, param_dtype=dtype)
    params = random_params(config)
    tokens, targets = random_batch(config, (2, 8))
    h = mg.trunk(params, mg.embed(params, tokens, config), config)
    logits = mg.unembed(params, h, config)
    assert h.dtype == jnp.dtype(dtype)  # the blocks do compute in it
    assert logits.dtype == jnp.float32
    expected = np.asarray(h, np.float64) @ np.asarray(params["embed"]["embedding"], np.float64).T
    # 16 products near 1, added in float32.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert mg.loss(params, mg.Batch(tokens, targets), config).dtype == jnp.float32


# The seams, and programs that must agree.


@pytest.mark.parametrize(
    ("name", "shape"), [("course", (6,)), ("course", (2, 6)), ("like_gpt2", (6,)), ("like_llama", (2, 6))]
)
def test_embed_trunk_unembed_make_up_forward(name, shape, x64):
    """Something that `forward` does between the seams, and the seams do not (or twice: positions, the final norm)."""
    config = with_options(**OPTIONS[name])
    params = random_params(config)
    tokens, _ = random_batch(config, shape)
    x = mg.embed(params, tokens, config)
    h = mg.trunk(params, x, config)
    assert x.shape == h.shape == (*shape, config.d_model)
    # Other programs for the same sums: rounding only.
    np.testing.assert_allclose(
        mg.unembed(params, h, config), mg.forward(params, tokens, config), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ["course", "like_gpt2", "like_llama", "everything"])
def test_residuals_equal_the_oracles_stream(name, x64):
    """A residual that is taken before its addition, after a norm, or under another layer's name."""
    config = with_options(**OPTIONS[name])
    params = random_params(config)
    tokens, _ = random_batch(config, (2, 7))
    mask = padding_mask((2, 7))
    x = mg.embed(params, tokens, config)
    h, residuals = mg.trunk(params, x, config, mask=mask, return_residuals=True)
    expected = oracle.residuals(params, tokens, config, mask)
    np.testing.assert_allclose(h[mask], expected.pop("norm_final")[mask], **FORWARD)
    assert set(residuals) == set(expected)
    for name, stream in expected.items():
        np.testing.assert_allclose(residuals[name][mask], stream[mask], **FORWARD, err_msg=name)
    _, of_one = mg.trunk(params, x[1], config, mask=mask[1], return_residuals=True)
    for name, stream in expected.items():
        np.testing.assert_allclose(of_one[name][mask[1]], stream[1][mask[1]], **FORWARD, err_msg=name)


def test_with_and_without_jit(x64):
    """Code that reads values while it is traced, or that only works on tracers."""
    config = with_options(n_kv_heads=2)
    params = random_params(config)
    tokens, targets = random_batch(config, (2, 3))
    mask = np.array([[True, True, False], [True, True, True]])
    logits = mg.forward(params, tokens, config, mask=mask)
    loss = mg.cross_entropy_from_logits(logits, targets, mask)
    with jax.disable_jit():
        plain_logits = mg.forward(params, tokens, config, mask=mask)
        plain_loss = mg.cross_entropy_from_logits(plain_logits, targets, mask)
    # Fused or not, in float64: rounding only.
    np.testing.assert_allclose(plain_logits, logits, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(plain_loss, loss, rtol=1e-12)


def test_remat_is_another_program_with_the_same_results(x64):
    """A switch that is read nowhere, or that changes values."""
    tokens, targets = random_batch(TINY, (2, 6))
    batch = mg.Batch(tokens, targets)
    params = random_params(with_options())
    results = []
    for remat in (False, True):
        config = with_options(remat=remat)
        slope = jax.value_and_grad(functools.partial(mg.loss, batch=batch, config=config))
        names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(slope)(params).jaxpr)]
        # One block: its GELU and the three norms are recomputed without remat. With it the block is, which holds the
        # GELU: once where the block runs forwards, and once where it is recomputed.
        assert sum("remat" in name or "checkpoint" in name for name in names) == (3 if remat else 4)
        # Forward 8 products in the block and the head, backward 2 each; recomputed, the block's once more, but for the
        # last one, whose result nobody needs.
        assert names.count("dot_general") == (34 if remat else 27)
        results.append(quick_jit(slope)(params))
    (loss, grads), (remat_loss, remat_grads) = results
    # Recomputed, and perhaps fused otherwise: rounding only.
    np.testing.assert_allclose(remat_loss, loss, rtol=1e-13)
    assert_grads_equal(remat_grads, oracle.to_float64(jax.device_get(grads)), 1e-12)


def test_remat_of_every_option(x64):
    """Norms inside attention and the frequencies' host arithmetic, in a block that is traced twice."""
    config = with_options(**OPTIONS["everything"] | {"remat": True, "n_layers": 1})
    params = random_params(config)
    tokens, targets = random_batch(config, (2, 6))
    loss, grads = loss_and_grads(params, mg.Batch(tokens, targets), config)
    expected_loss, expected, _, _ = oracle.backward(params, tokens, targets, config)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    assert_grads_equal(grads, expected, GRADIENT_RTOL)


def test_dropout_needs_a_key():
    """Dropout that stays on in evaluation, ignores its key, or is never on."""
    config = with_options(TINY, dtype="float32", param_dtype="float32", dropout=0.5)
    params = random_params(config)
    tokens, _ = random_batch(config, (2, 6))
    quiet = mg.forward(params, tokens, dataclasses.replace(config, dropout=0.0))
    np.testing.assert_array_equal(mg.forward(params, tokens, config), quiet)
    first, again, other = (mg.forward(params, tokens, config, dropout_key=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != quiet).any() and (first != other).any()


def test_vocabulary_of_one_symbol(x64):
    """A table of one row takes a way of its own through the lookup, which once gave NaN."""
    config = with_options(vocab_size=1)
    params = random_params(config)
    tokens = np.zeros((2, 5), dtype=np.int32)
    with jax.debug_nans(True):
        loss, grads = loss_and_grads(params, mg.Batch(tokens, tokens), config)
    # The only symbol has probability 1: logsumexp of one logit is that logit, up to its own rounding.
    np.testing.assert_allclose(loss, 0.0, rtol=0, atol=1e-12)
    _, expected, _, _ = oracle.backward(params, tokens, tokens, config)
    assert_grads_equal(grads, expected, GRADIENT_RTOL)
