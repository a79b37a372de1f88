"""Filters as pure functions of the logits, against NumPy in float64, row by row, and cases worked by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minigpt_jax as mg
from minigpt_jax.errors import InputError, InputTypeError
from minigpt_jax.sampling import filter_logits, keep_min_p, keep_top_k, keep_top_p, penalize_repetition

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = mg.Sampling(temperature=0)
COURSE_CASE = np.log([0.50, 0.20, 0.15, 0.10, 0.05])


def kept(filtered) -> list:
    """Ids that survive, per row."""
    mask = np.isfinite(np.asarray(filtered))
    return [np.flatnonzero(row).tolist() for row in mask] if mask.ndim == 2 else np.flatnonzero(mask).tolist()


def nucleus(logits, p) -> list[int]:
    """The smallest prefix of the tokens, most likely first and lower ids first among equals, with mass >= p."""
    weights = np.exp(np.float64(logits) - np.max(logits))
    weights /= weights.sum()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    mass, prefix = 0.0, []
    for i in order:
        prefix.append(i)
        mass += weights[i]
        if mass >= p:
            break
    return sorted(prefix)


# Top-k


@pytest.mark.parametrize(("k", "ids"), [(1, [4]), (2, [1, 4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4]), (5, list(range(5)))])
def test_top_k_keeps_exactly_k_and_the_lower_ids_of_equals(k, ids):
    logits = jnp.array([1.0, 2.0, 2.0, 2.0, 3.0])
    assert kept(keep_top_k(logits, k)) == ids
    assert kept(filter_logits(logits, mg.Sampling(top_k=k))) == ids
    assert kept(keep_top_k(jnp.stack([logits, logits[::-1]]), k)) == [ids, kept(keep_top_k(logits[::-1], k))]


def test_top_k_of_equal_logits():
    assert kept(keep_top_k(jnp.zeros(6), 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("k", [5, 6, 10**6, 10**12])
def test_k_from_v_on_keeps_all(k):
    assert kept(filter_logits(jnp.asarray(COURSE_CASE), mg.Sampling(top_k=k))) == [0, 1, 2, 3, 4]


def test_what_stays_is_not_changed():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 9)), jnp.float32)
    for filtered in (keep_top_k(logits, 3), keep_top_p(logits, 0.6)):
        mask = jnp.isfinite(filtered)
        assert (filtered[mask] == logits[mask]).all() and (filtered[~mask] == -jnp.inf).all()


# Top-p


@pytest.mark.parametrize(
    ("p", "count"),
    [(0.0, 1), (1e-9, 1), (0.49, 1), (0.51, 2), (0.69, 2), (0.71, 3), (0.8, 3), (0.86, 4), (0.96, 5), (1.0, 5)],
)
def test_the_course_s_case(p, count):
    assert kept(keep_top_p(jnp.asarray(COURSE_CASE), p)) == list(range(count))
    # The same in another order of ids: sorting must be undone, and from the top.
    assert kept(keep_top_p(jnp.asarray(COURSE_CASE[::-1]), p)) == list(range(5 - count, 5))
    shuffled = [3, 0, 4, 2, 1]
    assert kept(keep_top_p(jnp.asarray(COURSE_CASE[shuffled]), p)) == sorted(shuffled.index(i) for i in range(count))


@pytest.mark.parametrize(("p", "count"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.5001, 3), (0.2, 1)])
def test_mass_that_is_exactly_p_is_enough(p, count):
    assert kept(keep_top_p(jnp.zeros(4), p)) == list(range(count))  # four times 1/4 has no rounding


def test_top_p_against_a_loop_with_ties():
    random = np.random.default_rng(1)
    logits = random.integers(-3, 3, size=(200, 12)).astype(np.float32)
    for p in (0.07, 0.313, 0.6, 0.877, 0.987):
        filtered = keep_top_p(jnp.asarray(logits), p)
        assert kept(filtered) == [nucleus(row, p) for row in logits]


def test_rows_of_a_batch_do_not_see_each_other():
    logits = np.random.default_rng(2).normal(size=(3, 5, 11)).astype(np.float32)
    for sampling in (mg.Sampling(0.7, 4, 0.8), mg.Sampling(0.0), mg.Sampling(top_p=0.5), mg.Sampling(top_k=2)):
        whole = np.asarray(filter_logits(jnp.asarray(logits), sampling))
        assert whole.shape == logits.shape
        for i, j in np.ndindex(3, 5):
            np.testing.assert_array_equal(whole[i, j], filter_logits(jnp.asarray(logits[i, j]), sampling))


@pytest.mark.parametrize("spread", [0.01, 1.0, 100.0])
def test_p_of_one_truncates_nothing(spread):
    # A running sum in float32 reaches 1 before the tail, all the more where the tail underflows.
    logits = spread * jax.random.normal(jax.random.key(0), (50_000,))
    assert jnp.isfinite(filter_logits(logits, mg.Sampling(top_p=1.0))).all()
    assert jnp.isfinite(keep_top_p(logits, 1.0)).all()
    mixed = keep_top_p(jnp.stack([logits, logits]), jnp.array([1.0, 0.5]))
    assert jnp.isfinite(mixed[0]).all() and not jnp.isfinite(mixed[1]).all()


def test_tail_tokens_are_drawn_with_p_of_one():
    """A head of 1/2 and 5,000 tokens of 1e-4: about half of 1,000 draws are from the tail (5 standard deviations)."""
    logits = jnp.log(jnp.array([0.5] + [1e-4] * 5000))
    draws = jax.random.categorical(jax.random.key(3), filter_logits(logits, mg.Sampling(top_p=1.0)), shape=(1000,))
    assert abs(int((draws > 0).sum()) - 500) < 5 * math.sqrt(1000 / 4)
    assert len(set(draws[draws > 0].tolist())) > 300


# Temperature


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-8, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_no_temperature_and_tiny_ones_take_the_most_likely(temperature, scale):
    filtered = filter_logits(scale * jnp.array([1.0, 3.0, 2.0]), mg.Sampling(temperature))
    assert not jnp.isnan(filtered).any()
    assert (jax.random.categorical(jax.random.key(0), filtered, shape=(100,)) == 1).all()


@pytest.mark.parametrize("sampling", [mg.Sampling(top_p=0.0), mg.Sampling(top_p=1e-9), mg.Sampling(top_k=1)], ids=repr)
def test_the_most_likely_always_stays(sampling):
    assert kept(filter_logits(jnp.array([1.0, 3.0, 2.0]), sampling)) == [1]
    assert kept(filter_logits(jnp.array([3.0, 1.0, 3.0]), sampling)) == [0]


def test_greedy_among_equals_is_the_lower_id():
    assert kept(filter_logits(jnp.array([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0]]), GREEDY)) == [[1], [0]]


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.0, 3.0, 1e6])
def test_temperature_divides_differences_and_keeps_all(temperature):
    logits = np.array([-4.0, 0.0, 2.5, 10.0], np.float32)
    scaled = np.asarray(filter_logits(jnp.asarray(logits), mg.Sampling(temperature)))
    # float32 carries 7 digits; differences are of the order of the values themselves.
    np.testing.assert_allclose(scaled - scaled[1], (logits - logits[1]) / temperature, rtol=2e-6)


def test_order_is_temperature_then_k_then_p():
    # At temperature 2 the odds 16:4:1:1 are 4:2:1:1. The first three of them have 4/7, 2/7, 1/7.
    logits = jnp.log(jnp.array([16.0, 4.0, 1.0, 1.0]))
    assert kept(filter_logits(logits, mg.Sampling(temperature=2.0, top_p=0.7))) == [0, 1]  # 3/4; before: 16/22
    assert kept(filter_logits(logits, mg.Sampling(top_p=0.7))) == [0]
    # p counts in what k left: (4 + 2)/7 = 0.857, but (4 + 2)/8 = 0.75.
    assert kept(filter_logits(logits, mg.Sampling(temperature=2.0, top_k=3, top_p=0.8))) == [0, 1]
    assert kept(filter_logits(logits, mg.Sampling(temperature=2.0, top_p=0.8))) == [0, 1, 2]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_filters_work_in_float32(dtype):
    logits = jnp.array([1.0, 3.0, 2.0], dtype)
    filtered = filter_logits(logits, mg.Sampling(temperature=1e-3, top_k=2, top_p=0.9))
    assert filtered.dtype == jnp.float32 and kept(filtered) == [1]


def test_rows_that_stand_for_no_token_stay_out():
    logits = jnp.array([1.0, 3.0, -jnp.inf, -jnp.inf])
    for sampling in (mg.Sampling(5.0), mg.Sampling(top_k=4), mg.Sampling(top_p=1.0), mg.Sampling(top_p=0.999), GREEDY):
        assert max(kept(filter_logits(logits, sampling))) < 2


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (mg.Sampling(temperature=0.5), [2500, 400, 225, 100, 25]),
        (mg.Sampling(temperature=2.0), [math.sqrt(x) for x in (50, 20, 15, 10, 5)]),
        (mg.Sampling(top_k=2), [50, 20, 0, 0, 0]),
        (mg.Sampling(top_p=0.8), [50, 20, 15, 0, 0]),
        (GREEDY, [1, 0, 0, 0, 0]),
    ],
    ids=repr,
)
def test_filtered_distribution(sampling, expected):
    probabilities = jax.nn.softmax(filter_logits(jnp.asarray(COURSE_CASE), sampling))
    np.testing.assert_allclose(probabilities, np.array(expected) / sum(expected), rtol=1e-5)  # float32


def test_filters_are_pure():
    logits = jnp.asarray(COURSE_CASE)
    sampling = mg.Sampling(0.5, 3, 0.9)
    once, jitted = filter_logits(logits, sampling), jax.jit(filter_logits, static_argnums=1)(logits, sampling)
    np.testing.assert_array_equal(kept(once), kept(jitted))
    np.testing.assert_array_equal(logits, jnp.asarray(COURSE_CASE))


# Min-p


@pytest.mark.parametrize(
    ("p", "count"), [(0.0, 5), (0.09, 5), (0.11, 4), (0.19, 4), (0.21, 3), (0.29, 3), (0.31, 2), (0.41, 1), (1.0, 1)]
)
def test_min_p_in_the_course_s_case(p, count):
    """To the most likely token the others are as 0.4, 0.3, 0.2 and 0.1 to 1."""
    assert kept(keep_min_p(jnp.asarray(COURSE_CASE), p)) == list(range(count))
    assert kept(filter_logits(jnp.asarray(COURSE_CASE[::-1]), mg.Sampling(min_p=p))) == list(range(5 - count, 5))


@pytest.mark.parametrize(("p", "count"), [(1.0, 2), (0.5, 3), (0.25, 4), (0.125, 5), (0.51, 2), (0.26, 3)])
def test_min_p_keeps_the_boundary_and_all_equals(p, count):
    logits = jnp.log(jnp.array([1.0, 1.0, 0.5, 0.25, 0.125]))
    assert kept(keep_min_p(logits, p)) == list(range(count))


# Repetition penalty


def test_repetition_penalty_by_hand():
    logits = jnp.array([3.0, -3.0, 0.0, 3.0, -3.0])
    seen = jnp.array([True, True, True, False, False])
    assert penalize_repetition(logits, seen, 1.5).tolist() == [2.0, -4.5, 0.0, 3.0, -3.0]
    assert penalize_repetition(logits, seen, 0.5).tolist() == [6.0, -1.5, 0.0, 3.0, -3.0]
    np.testing.assert_array_equal(penalize_repetition(logits, seen, 1), logits)
    greedy = mg.Sampling(temperature=0, repetition_penalty=1.5)
    assert kept(filter_logits(logits, greedy, seen)) == [3]  # not 0, which the text holds
    assert kept(filter_logits(logits, greedy, jnp.zeros(5, bool))) == [0]


def test_the_penalty_comes_before_the_temperature_and_the_cuts():
    logits, seen = jnp.array([4.0, 3.0, 2.0]), jnp.array([True, False, False])
    penalized = mg.Sampling(temperature=0.5, top_k=2, repetition_penalty=2.0)
    filtered = filter_logits(logits, penalized, seen)  # 2, 3, 2; then doubled; then the lower of the equals stays
    assert kept(filtered) == [0, 1] and (filtered[1] - filtered[0]).item() == 2.0


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_penalties_and_temperatures_are_finite(penalty):
    logits = jnp.array([[3.0, -3.0, 0.0, -jnp.inf], [0.0, 0.0, -1.0, 1.0]])
    seen = jnp.array([[True, True, True, True], [False, True, True, False]])
    for temperature in (0, 1e-300, 1.0, 1e300):
        filtered = filter_logits(logits, mg.Sampling(temperature, repetition_penalty=penalty), seen)
        assert not jnp.isnan(filtered).any() and (jnp.max(filtered, axis=-1) < jnp.inf).all()
        assert jnp.isfinite(filtered).any(axis=-1).all()


# Against NumPy. Logits are multiples of a half, so that there are ties; some are -inf, as for rows without a token.


def oracle_probabilities(logits, seen, sampling):
    """What one row draws from, in float64: the documented order, each filter by sorting ids."""
    logits = [float(x) for x in logits]
    for i in range(len(logits)):
        if seen[i]:
            logits[i] = (
                logits[i] / sampling.repetition_penalty if logits[i] > 0 else (logits[i] * sampling.repetition_penalty)
            )
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if logits[i] > -math.inf]
    if sampling.temperature == 0:
        return {order[0]: 1.0}
    weight = {i: math.exp((logits[i] - logits[order[0]]) / sampling.temperature) for i in order}
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    if sampling.top_p is not None and sampling.top_p < 1:
        whole, mass, kept_ids = math.fsum(weight[i] for i in order), 0.0, []
        for i in order:
            kept_ids.append(i)
            mass += weight[i] / whole
            near(mass, sampling.top_p)
            if mass >= sampling.top_p:
                break
        order = kept_ids
    if sampling.min_p:
        for i in order[1:]:
            near(weight[i], sampling.min_p)
        order = [i for i in order if weight[i] >= sampling.min_p]
    whole = math.fsum(weight[i] for i in order)
    return {i: weight[i] / whole for i in order}


class Undecided(Exception):
    """Float32 may decide either way."""


def near(value, border):
    if abs(value - border) < 1e-5:
        raise Undecided


ROWS = 4
UNHURRIED = settings(deadline=None, max_examples=50)  # a busy machine is no failure


@st.composite
def logits_and_seen(draw):
    V = draw(st.sampled_from([1, 7]))
    entry = st.one_of(st.integers(-8, 8).map(lambda i: i / 2), st.just(-math.inf))
    rows = []
    for _ in range(ROWS):
        row = draw(st.lists(entry, min_size=V, max_size=V))
        row[draw(st.integers(0, V - 1))] = draw(st.integers(-8, 8)) / 2  # something can always be drawn
        rows.append(row)
    seen = draw(st.lists(st.lists(st.booleans(), min_size=V, max_size=V), min_size=ROWS, max_size=ROWS))
    return np.array(rows, np.float32), np.array(seen)


SAMPLINGS = st.builds(
    mg.Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.one_of(st.none(), st.integers(1, 9)),
    top_p=st.one_of(st.none(), st.floats(0, 1)),
    min_p=st.one_of(st.none(), st.floats(0, 1)),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25, 3.0]),
)


@UNHURRIED
@given(logits_and_seen(), SAMPLINGS)
def test_the_whole_chain_against_numpy(given_, sampling):
    logits, seen = given_
    probabilities = np.asarray(jax.nn.softmax(filter_logits(logits, sampling, seen)))
    for row, row_seen, row_probabilities in zip(logits, seen, probabilities, strict=True):
        try:
            expected = oracle_probabilities(row, row_seen, sampling)
        except Undecided:
            continue
        assert np.flatnonzero(row_probabilities > 0).tolist() == sorted(expected)
        for i, probability in expected.items():
            assert row_probabilities[i] == pytest.approx(probability, rel=1e-5)  # float32


top_k_of_rows, top_p_of_rows, min_p_of_rows = jax.jit(keep_top_k), jax.jit(keep_top_p), jax.jit(keep_min_p)
penalty_of_rows = jax.jit(penalize_repetition)


@UNHURRIED
@given(logits_and_seen(), st.data())
def test_each_row_has_its_own_value(given_, data):
    logits, seen = given_

    def by_row(values, dtype):
        return np.array(data.draw(st.lists(values, min_size=ROWS, max_size=ROWS)), dtype)

    k, p = by_row(st.integers(1, 9), np.int32), by_row(st.floats(0, 1, width=32), np.float32)
    penalty = by_row(st.sampled_from([0.5, 1.0, 2.0, 3.0]), np.float32)
    for filtered, name, values in (
        (top_k_of_rows(logits, k), "top_k", k),
        (top_p_of_rows(logits, p), "top_p", p),
        (min_p_of_rows(logits, p), "min_p", p),
    ):
        for row, row_filtered, value in zip(logits, np.asarray(filtered), values.tolist(), strict=True):
            try:
                expected = sorted(oracle_probabilities(row, np.zeros(len(row)), mg.Sampling(**{name: value})))
            except Undecided:
                continue
            assert np.flatnonzero(np.isfinite(row_filtered)).tolist() == expected
            np.testing.assert_array_equal(row_filtered[expected], row[expected])
    halved_or_not = np.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
    np.testing.assert_allclose(penalty_of_rows(logits, seen, penalty), np.where(seen, halved_or_not, logits), rtol=1e-6)


@UNHURRIED
@given(logits_and_seen())
def test_values_that_change_nothing(given_):
    logits, seen = given_
    V = logits.shape[-1]
    for unchanged in (
        keep_top_k(logits, V),
        keep_top_k(logits, V + 3),
        keep_top_p(logits, 1.0),
        keep_min_p(logits, 0.0),
        penalize_repetition(logits, seen, 1.0),
    ):
        np.testing.assert_array_equal(unchanged, logits)


# What is refused


@pytest.mark.parametrize(
    ("logits", "sampling", "seen", "kind", "words"),
    [
        ([1.0, 2.0], mg.Sampling(repetition_penalty=2.0), None, InputError, "give `seen`"),
        ([1.0, 2.0], mg.Sampling(repetition_penalty=2.0), [True], InputError, "(2,)"),
        ([1.0, 2.0], mg.Sampling(repetition_penalty=2.0), [1, 0], InputError, "bool"),
        ([1.0, 2.0], 0.8, None, InputTypeError, "sampling is 0.8"),
        ([1.0, 2.0], None, None, InputTypeError, "give a Sampling"),
        (3.0, mg.Sampling(), None, InputError, "shape ()"),
        (np.zeros((2, 0)), mg.Sampling(), None, InputError, "shape (2, 0)"),
    ],
    ids=str,
)
def test_filter_arguments_that_are_refused(logits, sampling, seen, kind, words):
    with pytest.raises(kind) as caught:
        filter_logits(logits, sampling, seen)
    assert words in str(caught.value) and "\n" not in str(caught.value)
