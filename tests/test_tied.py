"""The tie: one leaf, two uses, one gradient that is their sum.

V, D, F and T all differ, so that a transposed or misplaced matrix can't fit.
"""

import copy
import dataclasses
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import minigpt_jax as mg
from minigpt_jax.checkpoint import create_run, open_run
from minigpt_jax.data import CharTokenizer
from minigpt_jax.functional import abstract_params
from minigpt_jax.optimizer import leaf_paths
from minigpt_jax.train import init_state

TINY = mg.ModelConfig(vocab_size=11, d_model=6, n_layers=1, n_heads=1, d_ff=5, context_len=8)
RUN = mg.Config(TINY, train=mg.TrainConfig(steps=10, warmup_steps=0, peak_lr=1e-2, batch_size=2))
TABLE = "embed/embedding"

# Compiling is nearly all of these tests' time; what LLVM's optimizer does is no matter of theirs.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
loss_and_grads = quick_jit(jax.value_and_grad(mg.loss), static_argnums=2)
tied_gradient = quick_jit(mg.tied_gradient, static_argnums=2)
forward = quick_jit(mg.forward, static_argnums=2)
unembed = quick_jit(mg.unembed, static_argnums=2)


def untied(config):
    return dataclasses.replace(config, tied=False)


def float64(config):
    return dataclasses.replace(config, dtype="float64", param_dtype="float64")


@functools.cache
def params_of(config):
    """Fresh ones with noise on every leaf, so that no gradient is tiny or zero and no scale or bias is 1 or 0."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf + rng.normal(size=leaf.shape) * (0.4 if leaf.ndim == 2 else 0.1), leaf.dtype),
        mg.init(config, jax.random.key(0)),
    )


def untie(params):
    """The same function with two leaves."""
    return {**params, "head": {"embedding_out": params["embed"]["embedding"]}}


def a_batch(shape=(2, 5), seed=0):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, TINY.vocab_size, (2, *shape)).astype(np.int32)
    mask = np.ones(shape, bool)
    mask[0, 1] = mask[1, 3:] = False
    return mg.Batch(tokens, targets, mask)


@functools.cache
def state_after(steps):
    state, step = init_state(RUN), quick_jit(mg.make_train_step(RUN))
    for i in range(steps):
        state, _ = step(state, a_batch(seed=i))
    return state


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def assert_one_table(params, config):
    """What "tied" means for a pytree. Raises for two leaves, however they are called or turned."""
    V, D = config.vocab_size, config.d_model
    leaves = leaf_paths(params)
    assert [path for path in leaves if path.split("/")[-1] == "embedding"] == [TABLE]
    assert [path for path, leaf in leaves.items() if leaf.shape == (V, D)] == [TABLE]
    assert not [path for path, leaf in leaves.items() if leaf.shape == (D, V)]


def assert_tied(params, config):
    """One table, and the head is it: the unit vectors unembed to its columns, exactly (sums with zeros)."""
    assert_one_table(params, config)
    E = params["embed"]["embedding"]
    np.testing.assert_array_equal(unembed(params, jnp.eye(config.d_model, dtype=E.dtype), config), np.asarray(E).T)


# One leaf.


@pytest.mark.parametrize("steps", [0, 2])
def test_the_head_is_the_lookups_table_also_after_training(steps):
    """flax#1263: copying one leaf onto another at init ties nothing; they part at the first update."""
    assert_tied(state_after(steps).params, TINY)
    if steps:
        moved = state_after(steps).params["embed"]["embedding"] - state_after(0).params["embed"]["embedding"]
        assert np.abs(moved).max(axis=1).min() > 0, "some row of the table was not trained"


@pytest.mark.parametrize("options", [{}, {"positions": "learned"}, {"norm": "rmsnorm", "ffn": "swiglu"}])
def test_every_kind_of_tied_model_has_one_table(options):
    config = dataclasses.replace(TINY, **options)
    assert_one_table(abstract_params(config), config)


def test_tying_takes_away_one_leaf_of_v_times_d_and_one_first_moment():
    """equinox#469: flattening a shared object twice doubles its gradient and its optimizer state."""
    for config in (TINY, mg.ModelConfig(), mg.load_config(Path(__file__).parents[1] / "configs/gpt2.yaml").model):
        one, two = abstract_params(config), abstract_params(untied(config))
        assert len(jax.tree.leaves(two)) == len(jax.tree.leaves(one)) + 1
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (one, two)]
        assert sizes[1] - sizes[0] == config.vocab_size * config.d_model
        assert set(leaf_paths(two)) - set(leaf_paths(one)) == {"head/embedding_out"}
        states = [jax.eval_shape(mg.make_optimizer(mg.TrainConfig()).init, tree) for tree in (one, two)]
        for name in ("mu", "nu"):
            moments = [len(jax.tree.leaves(optax.tree.get(state, name))) for state in states]
            assert moments == [len(jax.tree.leaves(one)), len(jax.tree.leaves(one)) + 1]


def test_counts_by_hand():
    """V D + L (4 D^2 + 2 D F + F + D + 4 D) + 2 D, and V D more untied."""
    expected = 11 * 6 + (4 * 36 + 2 * 30 + 5 + 6 + 24) + 12
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_params(TINY))) == expected
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_params(untied(TINY)))) == expected + 66


def test_a_copied_table_is_detected():
    """The checks above, held against the mistakes they are for: a second leaf, by any name, turned or not."""
    params = params_of(TINY)
    E = params["embed"]["embedding"]
    assert_tied(params, TINY)
    copies = ({"head": {"embedding_out": E}}, {"lm_head": {"kernel": E.T}}, {"wte": {"embedding": E[:5]}})
    for second in copies:
        with pytest.raises(AssertionError):
            assert_one_table({**params, **second}, TINY)
    # And a head that has drifted from the table by a millionth in one entry.
    drifted = {**params, "head": {"embedding_out": E.at[3, 2].multiply(1 + 2**-20)}}
    assert not np.array_equal(unembed(drifted, jnp.eye(TINY.d_model), untied(TINY)), np.asarray(E).T)


def test_another_row_in_the_table_is_another_logit():
    """peft#2399: an edit in the lookup's code path would never reach the head. h is fixed here."""
    params = params_of(TINY)
    h = jnp.asarray(np.random.default_rng(1).normal(size=(3, TINY.d_model)), jnp.float32)
    row = np.arange(1.0, 7.0, dtype=np.float32)
    edited = {**params, "embed": {"embedding": params["embed"]["embedding"].at[4].set(row)}}
    before, after = np.asarray(unembed(params, h, TINY)), np.asarray(unembed(edited, h, TINY))
    np.testing.assert_allclose(after[:, 4], h @ row, rtol=1e-5)  # six float32 products
    assert (after[:, 4] != before[:, 4]).all()
    others = np.arange(TINY.vocab_size) != 4
    np.testing.assert_array_equal(after[:, others], before[:, others])
    # The lookup reads the same row.
    np.testing.assert_array_equal(mg.embed(edited, np.array([4], np.int32), TINY)[0], row)


# Copies of the tree.


def bfloat16_and_back(params):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)


@pytest.mark.parametrize(
    "copied",
    [
        bfloat16_and_back,
        lambda params: jax.device_put(params, jax.devices()[0]),
        jax.device_get,
        copy.deepcopy,
        lambda params: pickle.loads(pickle.dumps(params)),
        lambda params: jax.tree.map(lambda x: x + 0, params),
    ],
    ids=["bfloat16", "device_put", "device_get", "deepcopy", "pickle", "tree_map"],
)
def test_the_tie_survives_every_copy(copied):
    """pytorch-lightning#2705, xla#2719: moving a model made two tables of one, without a message."""
    params = params_of(TINY)
    result = copied(params)
    assert_tied(result, TINY)
    assert jax.tree.structure(result) == jax.tree.structure(params)
    # bfloat16 keeps 8 significant bits: rounding moves a value by 2^-9 of itself.
    tolerance = 2.0**-8 if copied is bfloat16_and_back else 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=0), result, params)


def test_the_tie_survives_a_checkpoint(tmp_path):
    """transformers#43159: a file with one of two tied names was filled up with random values."""
    state = state_after(2)
    create_run(tmp_path, RUN, CharTokenizer("abcdefghijk")).save(state, "")
    params, _ = open_run(tmp_path).load_params()
    assert_tied(params, TINY)
    np.testing.assert_array_equal(params["embed"]["embedding"], state.params["embed"]["embedding"])
    opt_state = open_run(tmp_path).load_state("").opt_state
    for moment in ("mu", "nu"):
        assert_one_table(optax.tree.get(opt_state, moment), TINY)


def test_low_precision_params_change_the_logits_a_little():
    """transformers#37905: casting the input table also casts the head, and its logits; by how much is bounded."""
    config = dataclasses.replace(TINY, param_dtype="bfloat16", dtype="bfloat16")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(TINY))
    assert_one_table(half, config)
    logits, exact = forward(half, a_batch().tokens, config), forward(params_of(TINY), a_batch().tokens, TINY)
    assert logits.dtype == jnp.float32
    # The table, h and every product of the block are rounded by 2^-9 of themselves: 2^-6 in all, measured.
    assert 0 < np.abs(logits - exact).max() < 2.0**-4 * np.abs(exact).max()


# Init in other guises.


@pytest.mark.parametrize("config", [TINY, untied(TINY)], ids=["tied", "untied"])
def test_abstract_init_has_the_structure_of_init(config):
    """Modalities#357: tied as shapes, then each name filled on its own."""
    real = mg.init(config, jax.random.key(0))
    for abstract in (jax.eval_shape(functools.partial(mg.init, config), jax.random.key(0)), abstract_params(config)):
        assert jax.tree.structure(abstract) == jax.tree.structure(real)
        for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_init_gives_the_same_bits_inside_transformations():
    """Under jit and vmap the draw is called back from the compiled program."""
    with jax.debug_key_reuse(False):  # the same keys again are the point here
        keys = jax.random.split(jax.random.key(7), 3)
        expected = [mg.init(TINY, key) for key in keys]
        jitted = quick_jit(functools.partial(mg.init, TINY))(keys[1])
        mapped = jax.vmap(functools.partial(mg.init, TINY))(keys)
        raw = mg.init(TINY, jax.random.key_data(keys[1]))
    jax.tree.map(np.testing.assert_array_equal, jitted, expected[1])
    jax.tree.map(np.testing.assert_array_equal, mapped, jax.tree.map(lambda *x: np.stack(x), *expected))
    jax.tree.map(np.testing.assert_array_equal, raw, expected[1])
    assert not np.array_equal(expected[0]["embed"]["embedding"], expected[1]["embed"]["embedding"])


# One gradient.


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_tied_step_is_the_untied_step_with_both_gradients_summed(optimizer, x64):
    """Megatron-LM#656: copies drift unless their gradients are summed. Two steps, so that moments are tested too."""
    config = float64(TINY)
    adamw = mg.make_optimizer(mg.TrainConfig(peak_lr=0.1, warmup_steps=0))
    rule = {"sgd": optax.sgd(0.1), "adamw": adamw}[optimizer]
    tied = summed = params_of(config)
    tied_state = summed_state = rule.init(tied)
    for i in range(2):
        _, grads = loss_and_grads(tied, a_batch(seed=i), config)
        updates, tied_state = rule.update(grads, tied_state, tied)
        tied = optax.apply_updates(tied, updates)

        _, two = loss_and_grads(untie(summed), a_batch(seed=i), untied(config))
        head, lookup = two.pop("head")["embedding_out"], two["embed"]["embedding"]
        assert np.abs(head).max() > 1e-3 and np.abs(lookup).max() > 1e-3
        two["embed"] = {"embedding": lookup + head}
        updates, summed_state = rule.update(two, summed_state, summed)
        summed = optax.apply_updates(summed, updates)
    # float64, sums in another order; Adam divides by the root of a square, which magnifies entries near zero.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), tied, summed)


@pytest.mark.parametrize("options", [{}, {"positions": "learned"}])
def test_the_parts_add_up_to_the_gradient_of_the_loss(options, x64):
    """To 1e-12 in float64: two routes of autodiff through the same sums."""
    config = dataclasses.replace(float64(TINY), **options)
    value, grads = loss_and_grads(params_of(config), a_batch(), config)
    split = tied_gradient(params_of(config), a_batch(), config)
    np.testing.assert_allclose(split.loss, value, rtol=1e-14)
    assert jax.tree.structure(split.grads) == jax.tree.structure(grads)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12), split.grads, grads)
    np.testing.assert_allclose(split.lookup + split.head, grads["embed"]["embedding"], rtol=0, atol=1e-12)
    assert np.abs(split.lookup).max() > 1e-3 and np.abs(split.head).max() > 1e-3


def test_the_parts_equal_the_oracles(x64):
    """Against a reverse pass written out by hand; both parts swapped would still add up."""
    config = float64(TINY)
    split = tied_gradient(params_of(config), a_batch(), config)
    value, grads, lookup, head = oracle.backward(params_of(config), *a_batch()[:2], config, a_batch().mask)
    # float64 on both sides, values below 1.
    np.testing.assert_allclose(split.loss, value, rtol=1e-12)
    np.testing.assert_allclose(split.lookup, lookup, rtol=0, atol=1e-12)
    np.testing.assert_allclose(split.head, head, rtol=0, atol=1e-12)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12), split.grads, grads)


def test_the_parts_in_float32():
    split = tied_gradient(params_of(TINY), a_batch(), TINY)
    value, grads = loss_and_grads(params_of(TINY), a_batch(), TINY)
    # Sums of some 50 float32 terms, relative to the largest entry.
    atol = 1e-5 * float(jnp.abs(grads["embed"]["embedding"]).max())
    np.testing.assert_allclose(split.loss, value, rtol=1e-6)
    np.testing.assert_allclose(split.lookup + split.head, grads["embed"]["embedding"], rtol=0, atol=atol)
    np.testing.assert_array_equal(split.grads["embed"]["embedding"], split.lookup + split.head)


def test_the_head_part_in_closed_form(x64):
    """Row v is the mean over valid targets of (p_v - y_v) h. A shift or mask on one side only breaks it."""
    config, batch = float64(TINY), a_batch()
    params = params_of(config)
    h = np.asarray(quick_jit(mg.trunk, static_argnums=2)(params, mg.embed(params, batch.tokens, config), config))
    E = np.asarray(params["embed"]["embedding"])
    rows = []
    for v in range(config.vocab_size):
        terms = []
        for at in zip(*np.nonzero(batch.mask), strict=True):
            powers = np.exp(E @ h[at])
            terms.append((powers[v] / powers.sum() - (batch.targets[at] == v)) * h[at])
        rows.append(np.mean(terms, axis=0))
    split = tied_gradient(params, batch, config)
    np.testing.assert_allclose(split.head, rows, rtol=0, atol=1e-14)  # float64, entries below 1
    # Probabilities and one-hot both sum to 1 over V, so every column sums to 0: not so with a missing or masked row.
    np.testing.assert_allclose(split.head.sum(axis=0), 0, atol=1e-15 * config.vocab_size)


def test_only_rows_that_were_read_have_a_lookup_part(x64):
    """Read by a computation that counts: inputs up to the last valid target of their row. The head moves all rows."""
    config, params = float64(TINY), params_of(float64(TINY))
    every = np.ones((1, 5), bool)
    batch = mg.Batch(np.array([[3, 1, 3, 7, 8]], np.int32), np.array([[1, 3, 7, 8, 2]], np.int32), every)
    split = tied_gradient(params, batch, config)
    assert set(np.flatnonzero(np.abs(split.lookup).any(axis=1))) == {1, 3, 7, 8}
    assert np.abs(split.head).any(axis=1).all()
    unread = [v for v in range(config.vocab_size) if v not in (1, 3, 7, 8)]
    np.testing.assert_array_equal(split.grads["embed"]["embedding"][np.array(unread)], split.head[np.array(unread)])
    split = tied_gradient(params, batch._replace(mask=np.arange(5)[None] < 2), config)
    assert set(np.flatnonzero(np.abs(split.lookup).any(axis=1))) == {1, 3}, "the future, or a masked target, was read"


def dot_generals(jaxpr):
    """Matrix products in a jaxpr, those of inner functions too."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "dot_general"
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            count += dot_generals(inner) if hasattr(inner, "eqns") else 0
    return count


def test_both_parts_cost_one_backward_pass():
    """As many matrix products as the plain gradient, not twice as many."""
    plain, split = (
        dot_generals(jax.make_jaxpr(function, static_argnums=2)(params_of(TINY), a_batch(), TINY).jaxpr)
        for function in (jax.value_and_grad(mg.loss), mg.tied_gradient)
    )
    # Forward 9: attention's 4 projections and its 2 products, the feed-forward layer's 2, the head. Backward: 2 each.
    assert plain == 27
    assert split == plain


def test_an_untied_model_has_no_parts_to_split():
    with pytest.raises(mg.InputError, match="tied: false") as caught:
        mg.tied_gradient(params_of(untied(TINY)), a_batch(), untied(TINY))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [11, -1])
@pytest.mark.parametrize("field", ["tokens", "targets"])
def test_tied_gradient_refuses_what_the_loss_refuses(field, bad):
    """A target that no logit stands for would leave its one-hot out, and the head part wrong."""
    batch = a_batch()
    getattr(batch, field)[1, 2] = bad
    with pytest.raises(mg.InputError, match=rf"{field}\[1, 2\] is {bad}"):
        mg.tied_gradient(params_of(TINY), batch, TINY)


# Its sizes.


def split_of(lookup, head):
    return mg.TiedGradient(jnp.float32(0), jnp.asarray(lookup, jnp.float32), jnp.asarray(head, jnp.float32), {})


def test_norms_by_hand():
    """3-4-5: orthogonal parts, whose squares add up, as their lengths do not."""
    norms = mg.tied_stats(split_of([[3, 0], [0, 0]], [[0, 4], [0, 0]]))
    assert norms == {
        "lookup_l2": 3, "head_l2": 4, "sum_l2": 5, "head_share_l2": 4 / 7,
        "lookup_l2_squared": 9, "head_l2_squared": 16, "sum_l2_squared": 25, "head_share_l2_squared": 16 / 25,
        "lookup_l1": 3, "head_l1": 4, "sum_l1": 7, "head_share_l1": 4 / 7,
        "cosine": 0, "lookup_rows": 1,
    }  # fmt: skip
    opposed = mg.tied_stats(split_of([[3, 4], [0, 0]], [[-3, -4], [0, 0]]))
    assert (opposed["cosine"], opposed["sum_l2"], opposed["head_share_l1"]) == (-1, 0, 0.5)
    nothing = mg.tied_stats(split_of(np.zeros((2, 2)), np.zeros((2, 2))))
    assert set(nothing.values()) == {0}, "0/0 where no target counts"


def test_squared_norm_is_both_squares_and_twice_the_product(x64):
    """|G|^2 = |lookup|^2 + |head|^2 + 2 |lookup| |head| cos, to float64's rounding."""
    norms = mg.tied_stats(tied_gradient(params_of(float64(TINY)), a_batch(), float64(TINY)))
    cross = 2 * norms["lookup_l2"] * norms["head_l2"] * norms["cosine"]
    total = norms["lookup_l2_squared"] + norms["head_l2_squared"] + cross
    np.testing.assert_allclose(norms["sum_l2_squared"], total, rtol=1e-12)
    np.testing.assert_allclose(norms["sum_l2"] ** 2, norms["sum_l2_squared"], rtol=1e-12)
    assert abs(norms["cosine"]) > 1e-3, "orthogonal parts would hide the product"


# Several devices.

ON_DEVICES = """
import pickle, sys
import jax, numpy as np
import minigpt_jax as mg
from jax.sharding import Mesh, NamedSharding, PartitionSpec

config, params, batch = pickle.load(open(sys.argv[1], "rb"))
grads = jax.jit(jax.value_and_grad(mg.loss), static_argnums=2, compiler_options={"xla_backend_optimization_level": 0})
results = {}
for n in (1, 2, 4):
    mesh = Mesh(np.array(jax.devices()[:n]), ("data",))
    split = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    assert len(split.tokens.sharding.device_set) == n
    results[n] = jax.device_get(grads(whole, split, config))
pickle.dump(results, open(sys.argv[2], "wb"))
"""


def test_data_parallel_gradients_equal_those_of_one_device(tmp_path):
    """accelerate#993, Megatron-LM#656: lookup part plus head part, on every device, over the whole batch's count.

    One device's rows have no valid target at all, and the others' counts differ: a mean of means would show.
    """
    batch = a_batch((4, 5))
    batch.mask[2] = False
    given, found = tmp_path / "given", tmp_path / "found"
    given.write_bytes(pickle.dumps((TINY, jax.device_get(params_of(TINY)), batch)))
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", ON_DEVICES, given, found], check=True, env=environment, timeout=300)
    results = pickle.loads(found.read_bytes())
    value, grads = loss_and_grads(params_of(TINY), batch, TINY)
    for n in (1, 2, 4):
        # float32 sums over devices come in another order: relative to the largest entry of each leaf.
        np.testing.assert_allclose(results[n][0], value, rtol=1e-6)
        for path, leaf in leaf_paths(grads).items():
            atol = 1e-5 * float(np.abs(leaf).max())
            np.testing.assert_allclose(leaf_paths(results[n][1])[path], leaf, rtol=0, atol=atol, err_msg=path)
