"""The table as a set of vectors: neighbours, interface consistency, norms by frequency; against NumPy in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import minigpt_jax as mg
from minigpt_jax.inspect.geometry import all_neighbours

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = mg.ModelConfig(vocab_size=11, d_model=6, n_layers=1, n_heads=1, d_ff=5, context_len=8)


def a_table(V=11, D=6, seed=0):
    """Rows of unlike length and direction, with a mean that is not zero."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(V, D)) * rng.uniform(0.2, 2.0, (V, 1)) + 0.3


def with_table(E, dtype=jnp.float32):
    return {"embed": {"embedding": jnp.asarray(E, dtype)}}


def cosines_by_numpy(E, token):
    """Pairs (id, cosine) of every other row, nearest first, ties to the lower id. E is float64."""
    pairs = []
    for v, row in enumerate(E):
        lengths = math.sqrt((row**2).sum()) * math.sqrt((E[token] ** 2).sum())
        if v != token:
            pairs.append((v, float(row @ E[token]) / lengths if lengths else 0.0))
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


# Neighbours.


def test_neighbours_are_the_largest_cosines_in_order_without_the_token_itself(x64):
    E = a_table(V=70)  # more than one piece of the loop over tokens, and a rest
    ids, cosines = all_neighbours(with_table(E, jnp.float64), k=4)
    assert ids.shape == cosines.shape == (70, 4)
    for token in range(70):
        expected = cosines_by_numpy(E, token)[:4]
        assert ids[token].tolist() == [v for v, _ in expected]
        np.testing.assert_allclose(cosines[token], [c for _, c in expected], rtol=1e-12)  # sums of six float64 terms
    one_ids, one_cosines = mg.neighbours(with_table(E, jnp.float64), 66, k=4)
    assert one_ids.shape == (4,) and one_ids.tolist() == ids[66].tolist()
    np.testing.assert_allclose(one_cosines, cosines[66], rtol=1e-12)
    some_ids, _ = all_neighbours(with_table(E, jnp.float64), 4, None, [5, 2])
    np.testing.assert_array_equal(some_ids, ids[[5, 2]])


def test_ties_go_to_the_lower_id_and_a_row_of_zeros_is_at_right_angles_to_all():
    e0, e1, zero = np.eye(3)[0], np.eye(3)[1], np.zeros(3)
    params = with_table([e0, 2 * e1, e0, zero, 4 * e0, -e1])
    for token, ids, cosines in [
        (0, [2, 4, 1, 3, 5], [1, 1, 0, 0, 0]),
        (1, [0, 2, 3, 4, 5], [0, 0, 0, 0, -1]),
        (2, [0, 4, 1, 3, 5], [1, 1, 0, 0, 0]),
        (3, [0, 1, 2, 4, 5], [0, 0, 0, 0, 0]),
    ]:
        ours = mg.neighbours(params, token, k=99)  # as many as there are
        np.testing.assert_array_equal(ours[0], ids)
        np.testing.assert_array_equal(ours[1], cosines)


@pytest.mark.parametrize("dtype, scale", [("float32", 1), ("bfloat16", 1), ("float16", 1), ("float16", 1e-3)])
def test_a_table_of_fewer_bits_loses_none_on_the_way(dtype, scale):
    """The cosines are those of the stored values, in float32 at least; and float16's smallest number is 6e-5."""
    params = with_table(a_table(V=40) * scale, dtype)
    E = np.asarray(params["embed"]["embedding"].astype(jnp.float32), np.float64)
    for token, k in [(3, 5), (17, 5)]:
        expected = cosines_by_numpy(E, token)[:k]
        ids, cosines = mg.neighbours(params, token, k)
        np.testing.assert_allclose(cosines, [c for _, c in expected], atol=1e-6)  # float32
        assert ids.tolist() == [v for v, _ in expected]


def test_spare_rows_are_nobodys_neighbours():
    """build-nanogpt#81: rows that only round V up. Here each is the very direction of a token."""
    E = a_table()
    E[9:] = 3 * E[:2]
    ids, _ = all_neighbours(with_table(E), k=50, vocab_limit=9)
    assert ids.shape == (9, 8) and ids.max() == 8
    assert ids[0].tolist() == [v for v, _ in cosines_by_numpy(E[:9], 0)]
    assert mg.neighbours(with_table(E), 0, k=1)[0] == 9, "no spare row is near, so this would show nothing"
    assert mg.neighbours(with_table(E), 0, k=8, vocab_limit=9)[0].tolist() == ids[0].tolist()


def test_params_may_be_numpy_arrays_and_stay_as_they_are():
    """TransformerLens#671, and params as `safetensors.numpy.load_file` gives them."""
    params = jax.tree.map(np.array, mg.init(TINY, jax.random.key(0)))
    before = jax.tree.map(np.copy, params)
    mg.interface_consistency(params, TINY)
    mg.norms_by_frequency(params, np.arange(11))
    ids, _ = mg.neighbours(params, 3, k=2)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    E = params["embed"]["embedding"].astype(np.float64)
    assert ids.tolist() == [v for v, _ in cosines_by_numpy(E, 3)[:2]]


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"token": 11}, "token.* is 11"),
        ({"token": -1}, "token.* is -1"),
        ({"token": 1.0}, "token of type float"),
        ({"token": [1, 2]}, r"token has shape \(2,\)"),
        ({"token": 1, "k": 0}, "k is 0"),
        ({"token": 1, "k": -3}, "k is -3"),
        ({"token": 9, "vocab_limit": 9}, "beyond the vocabulary of 9"),
        ({"token": 0, "vocab_limit": 1}, "one row"),
    ],
)
def test_what_has_no_neighbours_is_refused(arguments, says):
    with pytest.raises(mg.InputError, match=says):
        mg.neighbours(with_table(a_table()), **arguments)


@pytest.mark.parametrize("tokens", [[-1], [11], [1.0]])
def test_tokens_that_are_none_are_refused(tokens):
    with pytest.raises(mg.InputError, match="token"):
        all_neighbours(with_table(a_table()), 3, None, tokens)


@pytest.mark.parametrize("vocab_limit", [-1, 0, 12])
def test_a_vocabulary_that_the_table_does_not_hold_is_refused(vocab_limit):
    """As in `lens_table`; -1 would leave out the last row, without a word."""
    params = mg.init(TINY, jax.random.key(0))
    for look in (
        lambda: mg.neighbours(params, 1, 3, vocab_limit),
        lambda: mg.interface_consistency(params, TINY, vocab_limit),
    ):
        with pytest.raises(mg.InputError, match=f"vocab_limit is {vocab_limit}"):
            look()


# Interface consistency.


def model(E, config, head=None):
    """Params of the config with this table, and norms that are not trivial unless they are to be."""
    params = dict(mg.init(config, jax.random.key(0)))
    params["embed"] = {"embedding": jnp.asarray(E, jnp.float32)}
    if head is not None:
        params["head"] = {"embedding_out": jnp.asarray(head, jnp.float32)}
    return params


ORTHONORMAL = mg.ModelConfig(vocab_size=5, d_model=8, n_layers=1, n_heads=1, d_ff=6, context_len=7, norm="rmsnorm")


def test_orthonormal_rows_all_come_back():
    look = mg.interface_consistency(model(np.eye(8)[:5], ORTHONORMAL), ORTHONORMAL)
    assert look.share == 1.0
    np.testing.assert_array_equal(look.decoded, range(5))
    np.testing.assert_allclose(look.singular_values, 1, rtol=1e-15)


def test_exactly_the_second_of_two_equal_rows_and_a_row_too_small_do_not():
    E = np.eye(8)[:5]
    E[4] = E[1]
    E[2] = 0.1 * (E[0] + E[2])  # read back, row 0 is ten times as long
    look = mg.interface_consistency(model(E, ORTHONORMAL), ORTHONORMAL)
    np.testing.assert_array_equal(look.decoded, [0, 1, 0, 3, 1])
    assert look.share == 3 / 5


def noisy_norm(params, seed=1):
    rng = np.random.default_rng(seed)
    noisy = {name: jnp.asarray(rng.normal(size=6) + (name == "scale"), jnp.float32) for name in params["norm_final"]}
    return params | {"norm_final": noisy}


@pytest.mark.parametrize(
    "options",
    [{}, {"norm": "rmsnorm"}, {"tied": False}, {"positions": "learned"}, {"scale_embedding": True, "norm_eps": 3.0}],
    ids=["layernorm", "rmsnorm", "untied pair", "positions are not added", "scaled lookup"],
)
def test_decoded_is_lookup_final_norm_and_head(options):
    config = dataclasses.replace(TINY, vocab_size=70, **options)
    E, head = a_table(V=70), a_table(V=70, seed=9) if "tied" in options else None
    params = noisy_norm(model(E, config, head))
    table = E.astype(np.float32).astype(np.float64)
    x = oracle.norm(oracle.lookup_factor(config) * table, oracle.to_float64(params["norm_final"]), config)
    expected = (x @ (table if head is None else head).T).argmax(axis=1)
    look = mg.interface_consistency(params, config)
    np.testing.assert_array_equal(look.decoded, expected)
    assert look.share == (expected == np.arange(70)).mean() < 0.9
    # Squares of the singular values are E'E's eigenvalues; float64, and they are within a factor of ten.
    np.testing.assert_allclose(look.singular_values, np.sqrt(np.linalg.eigvalsh(table.T @ table))[::-1], rtol=1e-12)


def test_spare_rows_are_neither_read_nor_decoded():
    E = a_table()
    E[9:] = 30 * E[:2]
    params = noisy_norm(model(E, TINY))
    x = oracle.norm(E, oracle.to_float64(params["norm_final"]), TINY)
    assert ((x @ E.T).argmax(axis=1) >= 9).any(), "no spare row is ahead, so this would show nothing"
    look = mg.interface_consistency(params, TINY, vocab_limit=9)
    np.testing.assert_array_equal(look.decoded, (x[:9] @ E[:9].T).argmax(axis=1))
    np.testing.assert_allclose(look.singular_values**2, np.linalg.eigvalsh(E[:9].T @ E[:9])[::-1], rtol=1e-5)  # float32


def test_params_of_another_model_are_refused():
    with pytest.raises(mg.InputError, match="do not fit the config"):
        mg.interface_consistency(mg.init(TINY, jax.random.key(0)), dataclasses.replace(TINY, vocab_size=12))


# Norms by frequency.

COUNTS = np.array([2, 4, 1, 0, 6, 0, 0, 3, 0, 0, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_and_pearsons_correlation_with_log_count(dtype):
    params = with_table(a_table(), dtype)
    E = np.asarray(params["embed"]["embedding"].astype(jnp.float32), np.float64)
    look = mg.norms_by_frequency(params, COUNTS)
    lengths = np.sqrt((E**2).sum(axis=1))
    np.testing.assert_allclose(look.norms, lengths, rtol=1e-6)  # float32
    seen = [0, 1, 2, 4, 7, 10]
    x, y = np.log(COUNTS[seen]), lengths[seen]
    np.testing.assert_allclose(look.correlation, np.corrcoef(x, y)[0, 1], rtol=1e-5)
    x, y = x - x.mean(), y - y.mean()
    np.testing.assert_allclose(look.correlation, (x @ y) / np.sqrt((x @ x) * (y @ y)), rtol=1e-5)


def test_a_norm_that_grows_with_log_count_correlates_fully():
    E = np.zeros((4, 3))
    E[:, 1] = [3 + math.log(1), 3 + math.log(2), 3 + math.log(8), 99]  # the last one does not occur
    look = mg.norms_by_frequency(with_table(E), [1, 2, 8, 0])
    np.testing.assert_allclose(look.correlation, 1, rtol=1e-6)  # float32


def test_no_correlation_where_there_is_none_to_speak_of():
    E = a_table(V=6)
    assert mg.norms_by_frequency(with_table(E), [2, 1, 0, 0, 0, 0]).correlation is None, "two are always on a line"
    assert mg.norms_by_frequency(with_table(E), [1, 1, 1, 1, 0, 0]).correlation is None, "all equally frequent"
    assert mg.norms_by_frequency(with_table(np.eye(6)), [1, 2, 1, 0, 0, 0]).correlation is None, "all equally long"
    assert mg.norms_by_frequency(with_table(E), np.zeros(6, int)).correlation is None


def test_spare_rows_have_no_norm_here():
    look, whole = (mg.norms_by_frequency(with_table(a_table()), counts) for counts in (COUNTS[:9], COUNTS))
    np.testing.assert_array_equal(look.norms, whole.norms[:9])
    assert look.correlation != whole.correlation


@pytest.mark.parametrize("counts", [np.ones(12, int), np.ones((11, 1), int), 3])
def test_counts_of_another_table_are_refused(counts):
    with pytest.raises(mg.InputError, match="counts have shape"):
        mg.norms_by_frequency(with_table(a_table()), counts)
