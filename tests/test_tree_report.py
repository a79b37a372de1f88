"""What prints as a table: the report on a tree's leaves against float64 NumPy, tables of records, the lens."""

import math
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minigpt_jax as mg
from minigpt_jax.functional import abstract_params
from minigpt_jax.inspect.tables import Table, shortened

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = mg.ModelConfig(vocab_size=11, d_model=6, n_layers=1, n_heads=1, d_ff=5, context_len=8)


def records_of(tree, other=None):
    return {record["path"]: record for record in mg.tree_report(tree, other).records}


def assert_measured(tree, leaves):
    """The report on `tree` says of each leaf, by path and in this order, what float64 says."""
    records = records_of(tree)
    assert list(records) == list(leaves)
    wide = {path: np.asarray(leaf, np.float64) for path, leaf in leaves.items()}
    total = sum((x**2).sum() for x in wide.values())
    for path, x in wide.items():
        record = records[path]
        assert record["shape"] == x.shape and record["dtype"] == str(leaves[path].dtype) and record["nonfinite"] == 0
        l2 = math.sqrt((x**2).sum())
        expected = [l2, l2 / math.sqrt(max(x.size, 1)), np.abs(x).max(initial=0), l2**2 / total]
        # Sums of float32, a row at a time.
        np.testing.assert_allclose([record[name] for name in ("l2", "rms", "max", "share")], expected, rtol=1e-6)
    assert math.isclose(sum(record["share"] for record in records.values()), 1, rel_tol=1e-12)
    note = mg.tree_report(tree).note
    assert note.startswith(
        f"{len(leaves)} leaves, {sum(x.size for x in wide.values()):,} values, 0 not finite, L2 norm"
    )
    assert math.isclose(float(note.split()[-1]), math.sqrt(total), rel_tol=1e-5)  # six digits are printed


# Any tree.


def noise(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


class Pair(typing.NamedTuple):
    first: np.ndarray
    second: list


def test_every_kind_of_pytree_is_reported_by_path():
    a, b, c, d = noise(3, 4), noise(5), np.array(-2.5, np.float32), jnp.asarray(noise(2, 3, 2))
    assert_measured(a, {"": a})
    assert_measured(
        {"x": [a, (b, c)], "y": Pair(d, [b])},
        {"x/0": a, "x/1/0": b, "x/1/1": c, "y/first": d, "y/second/0": b},
    )
    assert_measured({"none": None, "a": a}, {"a": a})


def test_params_adam_and_the_split_gradient_are_pytrees_like_any():
    """And stay as they are, TransformerLens#671: these NumPy arrays could be written to."""
    params = jax.tree.map(lambda x: np.asarray(x) + noise(*x.shape), mg.init(TINY, jax.random.key(0)))
    before = jax.tree.map(np.copy, params)
    records = records_of(params)
    assert len(records) == 15
    for path in ("embed/embedding", "block_0/attention/query/kernel", "block_0/norm_ffn/scale"):
        x = params
        for name in path.split("/"):
            x = x[name]
        np.testing.assert_allclose(records[path]["l2"], np.linalg.norm(x.astype(np.float64)), rtol=1e-6)
    batch = mg.Batch(np.array([[1, 2, 3]]), np.array([[2, 3, 4]]))
    split = jax.jit(mg.tied_gradient, static_argnums=2)(params, batch, TINY)
    by_use = records_of(split)
    assert {"loss", "lookup", "head", "grads/embed/embedding", "grads/norm_final/bias"} < set(by_use)
    np.testing.assert_allclose(by_use["head"]["l2"], np.linalg.norm(np.asarray(split.head, np.float64)), rtol=1e-6)
    adam = optax.adam(1e-3)
    _, state = adam.update({"w": jnp.asarray([3.0, -4.0])}, adam.init({"w": jnp.zeros(2)}))
    moments = records_of(state)
    assert list(moments) == ["0/count", "0/mu/w", "0/nu/w"]
    assert moments["0/count"]["dtype"] == "int32" and moments["0/count"]["l2"] == 1
    # Adam's first moments: 0.1 g, whose norm is 0.5, and 0.001 g^2, of 0.001 sqrt(9^2 + 16^2).
    np.testing.assert_allclose(moments["0/mu/w"]["l2"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(moments["0/nu/w"]["l2"], 0.001 * math.sqrt(337), rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_every_type_of_number_is_measured_in_float32_at_least():
    leaves = {
        "a": np.full((3, 5), 60000, np.float16),  # whose squares are no float16
        "b": jnp.asarray(noise(4, 100), jnp.bfloat16),
        "c": np.array([[-7, 3], [2, 100]], np.int32),
        "d": np.array([200, 255], np.uint8),
        "e": np.array([True, False, True]),
        "f": noise(6, dtype=np.float64),
        "g": np.float32(-3.5),
        "h": jnp.asarray(7),
        "i": np.zeros((0, 3), np.float32),
        "j": np.array([-128, 127], np.int8),
        "k": noise(300, 1000),
    }
    assert_measured(leaves, leaves)


def test_numpys_64_bits_are_not_cut_to_32():
    """JAX without its 64-bit mode keeps the lower half of an integer: 2^40 would be 0; and 3e300 infinite."""
    integers = np.array([2**40, 3])
    assert_measured({"a": integers}, {"a": integers})
    record = records_of({"a": np.array([3e300, 4e300])})["a"]
    np.testing.assert_allclose([record["l2"], record["max"]], [5e300, 4e300], rtol=1e-6)
    assert record["nonfinite"] == 0


def test_very_large_and_very_small_values_neither_overflow_nor_vanish():
    records = records_of({"large": jnp.full((4, 25), 1e30), "small": jnp.full((4, 25), -1e-30)})
    np.testing.assert_allclose([records["large"][name] for name in ("l2", "rms", "max")], [1e31, 1e30, 1e30], rtol=1e-6)
    np.testing.assert_allclose(
        [records["small"][name] for name in ("l2", "rms", "max")], [1e-29, 1e-30, 1e-30], rtol=1e-6
    )
    assert records["large"]["share"] == 1 and records["small"]["share"] < 1e-100
    small = records_of({"a": jnp.full(9, 3e-30), "b": jnp.full(4, 6e-30)})  # squared lengths 81 and 144
    np.testing.assert_allclose([small["a"]["share"], small["b"]["share"]], [81 / 225, 144 / 225], rtol=1e-6)
    assert mg.tree_report({"a": jnp.full(4, 1e30)}).note.endswith("L2 norm 2e+30")


def test_values_that_are_not_finite_are_counted_and_leave_the_other_shares_alone():
    report = mg.tree_report(
        {
            "inf": jnp.asarray([[jnp.inf, 1.0], [-jnp.inf, 2.0]]),
            "nan": jnp.asarray([1.0, jnp.nan, 3.0]),
            "a": jnp.asarray([1.0, 2.0, 2.0]),
            "b": jnp.asarray([[4.0]]),
        }
    )
    bad = {record["path"]: record for record in report.records}
    assert {path: record["nonfinite"] for path, record in bad.items()} == {"a": 0, "b": 0, "inf": 2, "nan": 1}
    np.testing.assert_allclose([bad["a"]["share"], bad["b"]["share"]], [9 / 25, 16 / 25], rtol=1e-6)
    assert not math.isfinite(bad["inf"]["l2"]) and not math.isfinite(bad["nan"]["l2"])
    assert report.note == "4 leaves, 11 values, 3 not finite, L2 norm of the finite leaves 5"
    assert [line.split()[-2] for line in str(report).split("\n")[1:5]] == ["0", "0", "2", "1"]


def test_a_tree_of_zeros_and_an_empty_one_have_norm_zero():
    report = mg.tree_report({"a": jnp.zeros((2, 3)), "b": np.zeros((0,))})
    assert [[record[name] for name in ("l2", "rms", "max", "share")] for record in report.records] == [[0.0] * 4] * 2
    assert report.note.endswith("6 values, 0 not finite, L2 norm 0")
    assert str(mg.tree_report({})) == "0 leaves, 0 values, 0 not finite, L2 norm 0"


STRUCT = jax.ShapeDtypeStruct((2,), np.float32)
NO_ARRAYS = ["text", object(), 1.0, np.array(["text"]), np.array([None]), np.array([1j]), STRUCT]


@pytest.mark.parametrize("leaf", NO_ARRAYS, ids=lambda leaf: type(leaf).__name__ + str(getattr(leaf, "dtype", "")))
def test_a_leaf_that_is_no_array_of_numbers_is_refused_by_its_path(leaf):
    with pytest.raises(mg.InputError, match="block/0/kernel"):
        mg.tree_report({"a": np.ones(2), "block": [{"kernel": leaf}]})


# Against a second tree.


def test_the_ratio_is_that_of_the_norms_leaf_by_leaf():
    grads, params = (
        {"a": noise(3, 4), "b": noise(5), "c": np.ones(2)},
        {"a": 100 * noise(3, 4), "b": noise(5), "c": 0 * noise(2)},
    )
    records = records_of(grads, params)
    np.testing.assert_allclose([records["a"]["ratio"], records["b"]["ratio"]], [0.01, 1], rtol=1e-6)  # float32
    np.testing.assert_allclose(records["a"]["other_l2"], np.linalg.norm(100 * noise(3, 4).astype(float)), rtol=1e-6)
    assert records["c"]["other_l2"] == 0 and math.isnan(records["c"]["ratio"])
    assert {name: x for name, x in records["a"].items() if name not in ("ratio", "other_l2")} == records_of(grads)["a"]
    lines = str(mg.tree_report(grads, params)).split("\n")
    assert [line.split()[-1] for line in lines[:4]] == ["ratio", "0.01", "1", "nan"]


@pytest.mark.parametrize(
    "first, second, says",
    [
        (np.ones((2, 3)), {"a": {}}, "a/b has shape (2, 3) and is missing in the second tree"),
        (np.ones((2, 3)), {"a": {"b": np.ones((3, 2))}}, "a/b has shape (2, 3) and is (3, 2) in the second tree"),
        (np.ones((2, 3)), {"a": {"b": "text"}}, "a/b"),
        (np.ones(()), {"a": {"b": "text"}}, "a/b"),
    ],
)
def test_a_second_tree_that_does_not_match_is_refused_by_path(first, second, says):
    with pytest.raises(mg.InputError) as error:
        mg.tree_report({"a": {"b": first}}, second)
    assert says in str(error.value) and "\n" not in str(error.value)


# In print.


def test_it_prints_a_line_for_each_leaf():
    tree = {"b": jnp.asarray([[3.0, -4.0]]), "a": jnp.asarray(12, jnp.int32)}
    assert str(mg.tree_report(tree)).split("\n") == [
        "path  shape  dtype    L2 norm    rms  max |x|  bad  share",
        "a            int32         12     12       12    0  85.2%",
        "b       1x2  float32        5  3.536        4    0  14.8%",
        "2 leaves, 3 values, 0 not finite, L2 norm 13",
    ]


def test_gpt2s_paths_and_longer_ones_fit_100_columns():
    """The shapes are GPT-2's, each axis at most 3 long; the paths are those of a second moment in a larger tree."""
    config = mg.load_config(Path(__file__).parents[1] / "configs" / "gpt2.yaml").model
    small = jax.tree.map(lambda leaf: np.ones([min(n, 3) for n in leaf.shape], np.float32), abstract_params(config))
    report = mg.tree_report(small, small)
    lines = str(report).split("\n")
    assert len(lines) == 1 + len(report.records) + 1 and max(map(len, lines)) <= 100
    paths = [record["path"] for record in report.records]
    assert [line.split()[0] for line in lines[1:-1]] == paths and "block_11/attention/query/kernel" in paths
    deep = {"optimizer_state": {"inner_state": {"scale_by_adam": {"second_moment_of_the_params": small}}}}
    lines = str(mg.tree_report(deep, deep)).split("\n")
    assert max(map(len, lines)) <= 100
    kernels = [line for line in lines if "kernel " in line]
    assert all(line.startswith("optimizer_state/") and "..." in line for line in kernels) and len(kernels) == 72
    assert str(mg.tree_report(small).render(limit=2)).count("\n") == 4


def test_a_table_aligns_numbers_right_and_texts_left():
    table = Table(
        [
            {"token_text": "a", "n": 1234567, "x": 0.000123456, "seen": True, "none": None, "shape": (2, 3)},
            {"token_text": "longer text", "n": -1, "x": float("nan"), "seen": False, "none": 2.0, "shape": ()},
            {"token_text": "b", "n": np.int32(1000), "x": np.float32(1e9), "seen": True, "none": None, "shape": [4]},
        ],
        "what it means",
    )
    assert str(table).split("\n") == [
        "token text           n          x  seen  none  shape",
        "a            1,234,567  0.0001235   yes     -    2x3",
        "longer text         -1        nan           2",
        "b                1,000      1e+09   yes     -      4",
        "what it means",
    ]
    two = table.render({"n": "count"}, limit=2)
    assert two.split("\n") == ["    count", "1,234,567", "       -1", "... and 1 more", "what it means"]
    assert table.render({"n": "count"}, limit=3) == table.render({"n": "count"})
    assert (str(Table([], "nothing to show")), str(Table([{"a": 1}]))) == ("nothing to show", "a\n1")


def test_a_long_text_loses_its_middle():
    assert shortened("block_0/attention/query/kernel", 12) == "bloc...ernel"
    assert [shortened("0123456789", n) for n in (10, 9, 8)] == ["0123456789", "012...789", "01...789"]
    lines = str(Table([{"path": "a" * 100 + "z", "n": 12345}])).split("\n")
    assert max(map(len, lines)) == 100 and lines[1].startswith("aaa") and lines[1].endswith("aaz  12,345")


def test_two_long_texts_fit_too():
    """Both give way, as for a lens on tokens that are long runs of blanks."""
    lines = str(Table([{"input": "x" * 120, "target": "y" * 120, "n": 12345}])).split("\n")
    assert max(map(len, lines)) <= 100 and "xxx...xxx" in lines[1] and "yyy...yyy" in lines[1]


# The lens in print.

POINTS = ("embed", "block_0/ffn", "block_1/ffn")


def a_lens(tokens, targets, top_ids, points=POINTS, **numbers):
    """One made by hand; (R, T) numbers, each row r all r by default."""
    R, T = len(points), len(tokens)
    top_ids = np.asarray(top_ids).reshape(R, T, -1)
    rising = np.broadcast_to(np.arange(R)[:, None], (R, T))
    arrays = {name: np.asarray(numbers.get(name, rising)) for name in ("entropy", "kl", "rank_target", "rank_input")}
    top_probs = np.full(top_ids.shape, 0.25)
    return mg.LensTable(points, np.asarray(tokens), np.asarray(targets), top_ids, top_probs=top_probs, **arrays)


TEXTS = ["a", " the", "\n", "extraordinary"]


def test_the_lens_prints_means_by_layer_and_a_grid_of_texts():
    table = a_lens(
        [0, 1, 2], [1, 2, -1], [[0, 1, 2], [3, 3, 3], [1, 3, 0]],
        kl=[[1.0, 2.0, 6.0], [0.25, 0.5, 0.0], [0.0, 0.0, 0.0]],
        entropy=[[1.0, 1.0, 1.0], [2.0, 3.0, 1.0], [0.5, 0.5, 0.5]],
        rank_target=[[4, 9, -1], [1, 2, -1], [0, 0, -1]], rank_input=[[0, 0, 0], [1, 2, 3], [4, 5, 6]],
    )  # fmt: skip
    assert table.render(TEXTS).split("\n") == [
        "layer          KL  entropy  same top token  rank of target  rank of input",
        "embed           3        1  0%                         6.5              0",
        "block_0/ffn  0.25        2  33%                        1.5              2",
        "block_1/ffn     0      0.5  100%                         0              5",
        "means over positions; KL(final || layer) and entropy in bits; rank 0 is the most likely token",
        "",
        "input       a        ␣the     \\n",
        "embed       a        ␣the     \\n",
        "block_0/ffn extraor… extraor… extraor…",
        "block_1/ffn ␣the     extraor… a",
        "target      ␣the     \\n",
    ]
    assert table.render(TEXTS, row=1).split("\n") == [
        "input   target  rank    KL  most likely",
        "'a'     ' the'     1  0.25  'extraordinary' 25%",
        "' the'  '\\n'       2   0.5  'extraordinary' 25%",
        "'\\n'               -     0  'extraordinary' 25%",
        "block_0/ffn: rank of the target, KL to the final layer in bits",
    ]
    no_target = a_lens([3], [-1], [0, 1, 2], rank_target=[[-1]] * 3).render(TEXTS).split("\n")
    assert [line.split()[-2] for line in no_target[1:4]] == ["-"] * 3 and no_target[-1] == "target"


def test_long_prompts_and_deep_models_fit_100_columns():
    texts = [f"{i:02d} characters"[:12] for i in range(70)]
    points, tokens = ("embed", *(f"block_{i}/ffn" for i in range(25))), np.random.default_rng(0).permutation(70)[:64]
    top_ids = np.random.default_rng(1).integers(0, 70, (26, 64, 5))
    table = a_lens(tokens, [*tokens[1:], -1], top_ids, points)
    lines = table.render(texts).split("\n")
    assert max(map(len, lines)) <= 100
    shown = " ".join(line.removeprefix("input") for line in lines if line.startswith("input")).split()
    assert shown == [f"{i:02d}␣char…" for i in tokens]
    last = " ".join(line.removeprefix("block_24/ffn") for line in lines[28:] if line.startswith("block_24/ffn")).split()
    assert last == [f"{i:02d}␣char…" for i in top_ids[25, :, 0]]
    assert " ".join(line.removeprefix("target") for line in lines if line.startswith("target")).split() == shown[1:]
    by_position = table.render(texts, row=12).split("\n")
    assert len(by_position) == 1 + 64 + 1 and max(map(len, by_position)) <= 100
    assert all(f"'{texts[i]}'" in line for i, line in zip(tokens, by_position[1:-1], strict=True))
    assert by_position[-1].startswith("block_11/ffn")


def test_a_batch_is_not_printed():
    batch = a_lens([0, 1], [1, -1], np.zeros((3, 2), int))._replace(tokens=np.zeros((2, 2), int))
    with pytest.raises(mg.InputError, match=r"\(2, 2\)"):
        batch.render(TEXTS)


@pytest.mark.parametrize("row, top_id, says", [(3, 0, "row"), (-4, 0, "row"), (None, 4, "texts"), (0, 4, "texts")])
def test_a_row_that_is_no_point_and_an_id_without_a_text_are_refused(row, top_id, says):
    """Ids have none in a table with spare rows, where the lens was made without `vocab_limit`."""
    with pytest.raises(mg.InputError, match=says):
        a_lens([0, 1], [1, -1], np.full((3, 2), top_id)).render(TEXTS, row)
