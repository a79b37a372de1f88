"""The sizes of the two parts of the tied gradient, and their record during training.

Data is the verb grammar, which is made up on the spot; the model is as small as it can be.
"""

import dataclasses
import functools
import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import minigpt_jax as mg
from minigpt_jax import train as train_module
from minigpt_jax.train import init_state, inspection_due, make_train_step, next_stop, train

pytestmark = pytest.mark.usefixtures("one_loop_for_each_config")

MODEL = mg.ModelConfig(vocab_size=64, d_model=8, n_layers=1, n_heads=2, d_ff=12, context_len=20)
VERBS = mg.DataConfig(corpus="verbs_en", tokenizer="word")
# Compiled calls end at 1, 2, 4, 5, 6, 8, 10, 11: the inspected steps 4 and 8 are the second of their calls.
LOOP = mg.TrainConfig(
    steps=11, batch_size=4, peak_lr=1e-2, floor_lr=1e-3, warmup_steps=4, steps_per_call=5, eval_every=10,
    checkpoint_every=6, eval_windows=10, inspect_every=8,
)  # fmt: skip
INSPECTED = [1, 2, 4, 8]
CONFIGS = {
    "plain": mg.Config(MODEL, VERBS, LOOP),
    "blind": mg.Config(MODEL, VERBS, dataclasses.replace(LOOP, inspect_every=0)),
    "everything": mg.Config(
        dataclasses.replace(MODEL, dropout=0.2),
        VERBS,
        dataclasses.replace(LOOP, accumulate=2, lookup_gradient_scale=0.5),
    ),
}


tied_gradient = jax.jit(mg.tied_gradient, static_argnums=(2, 4))


# Its sizes.


def split_of(lookup, head, dtype=jnp.float32):
    return mg.TiedGradient(jnp.float32(0), jnp.asarray(lookup, dtype), jnp.asarray(head, dtype), {})


def sizes_by_numpy(lookup, head, update):
    """Every number of `tied_stats` from its definition, in float64."""
    lookup, head, update = (np.asarray(x, np.float64) for x in (lookup, head, update))
    parts, stats = {"lookup": lookup, "head": head, "sum": lookup + head}, {}
    for name, x in parts.items():
        squared = sum(float(entry) ** 2 for entry in x.flat)
        stats |= {f"{name}_l2": squared**0.5, f"{name}_l2_squared": squared, f"{name}_l1": float(np.abs(x).sum())}
        along = float((update * x).sum()) / float(np.linalg.norm(update)) / squared**0.5
        stats[f"update_cosine_{name}"] = -along
    for norm in ("l2", "l2_squared", "l1"):
        stats[f"head_share_{norm}"] = stats[f"head_{norm}"] / (stats[f"head_{norm}"] + stats[f"lookup_{norm}"])
    stats["inner_product"] = float((lookup * head).sum())
    stats["cosine"] = stats["inner_product"] / (stats["lookup_l2"] * stats["head_l2"])
    return stats | {"lookup_rows": len({i for i, row in enumerate(lookup) if row.any()})}


def test_sizes_by_hand():
    """3-4-5: orthogonal parts, whose squares add up, as their lengths do not."""
    stats = mg.tied_stats(split_of([[3, 0], [0, 0]], [[0, 4], [0, 0]]))
    expected = {
        "lookup_l2": 3, "head_l2": 4, "sum_l2": 5, "head_share_l2": 4 / 7,
        "lookup_l2_squared": 9, "head_l2_squared": 16, "sum_l2_squared": 25, "head_share_l2_squared": 16 / 25,
        "lookup_l1": 3, "head_l1": 4, "sum_l1": 7, "head_share_l1": 4 / 7,
        "inner_product": 0, "cosine": 0, "lookup_rows": 1,
    }  # fmt: skip
    assert stats == pytest.approx(expected, rel=1e-7)  # float32
    assert all(type(value) in (int, float) for value in stats.values()), "JSON takes no arrays"
    opposed = mg.tied_stats(split_of([[3, 4], [0, 0]], [[-3, -4], [0, 0]]))
    assert (opposed["cosine"], opposed["sum_l2"], opposed["sum_l1"], opposed["head_share_l1"]) == (-1, 0, 0, 0.5)


@pytest.mark.parametrize(("shape", "offset"), [((7, 5), 0.0), ((2000, 512), 0.0), ((2000, 512), 9.0)])
@pytest.mark.parametrize("call", [mg.tied_stats, jax.jit(mg.tied_stats)], ids=["plain", "jit"])
def test_sizes_equal_numpys(call, shape, offset):
    """Float32 sums of a million terms, also where one running sum (cumsum is one) would lose the fourth digit."""
    rng = np.random.default_rng(2)
    lookup, head, update = (rng.normal(offset, 0.1, shape) for _ in range(3))
    lookup[[1, 4]] = 0
    lookup, head, update = (x.astype(np.float32) for x in (lookup, head + 0.3 * lookup, update - 0.4 * head))
    if offset:
        running = np.abs(head).ravel().cumsum(dtype=np.float32)[-1]
        assert abs(running / np.abs(head).sum(dtype=np.float64) - 1) > 1e-4
    stats = jax.device_get(call(split_of(lookup, head), jnp.asarray(update)))
    expected = sizes_by_numpy(lookup, head, update)
    assert stats.keys() == expected.keys()
    for name, value in expected.items():
        # Relative; but a product of two long vectors is rounded as its terms are, whatever cancels between them.
        atol = 1e-6 * expected["lookup_l2"] * expected["head_l2"] if name == "inner_product" else 1e-6
        np.testing.assert_allclose(stats[name], value, rtol=1e-5, atol=atol, err_msg=name)


def test_the_cosine_of_a_step_straight_down_is_one():
    rng = np.random.default_rng(3)
    lookup, head = rng.normal(size=(2, 7, 5))
    split = split_of(lookup, head)
    for factor, expected in ((-0.3, 1), (0.3, -1)):
        stats = mg.tied_stats(split, factor * (split.lookup + split.head))
        assert stats["update_cosine_sum"] == pytest.approx(expected, abs=1e-6)  # float32
        assert np.sign(stats["update_cosine_head"]) == expected
    assert mg.tied_stats(split, -split.lookup)["update_cosine_lookup"] == pytest.approx(1, abs=1e-6)
    assert mg.tied_stats(split, -split.head)["update_cosine_head"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("call", [mg.tied_stats, jax.jit(mg.tied_stats)], ids=["plain", "jit"])
def test_a_part_that_is_zero_has_no_share_and_no_direction(call):
    """0/0 where no target counts, or where no update was made; NaN would be no JSON."""
    some, none = np.ones((3, 2)), np.zeros((3, 2))
    shares = ("head_share_l2", "head_share_l2_squared", "head_share_l1")
    for lookup, head, share in ((some, none, 0), (none, some, 1), (none, none, 0)):
        stats = jax.device_get(call(split_of(lookup, head), jnp.asarray(some, jnp.float32)))
        assert [stats[name] for name in shares] == [share] * 3
        assert stats["cosine"] == stats["inner_product"] == 0
        for name, part in (("lookup", lookup), ("head", head)):
            assert stats[f"update_cosine_{name}"] == pytest.approx(-1.0 if part.any() else 0.0, rel=1e-6)  # float32
        assert all(np.isfinite(value) for value in stats.values())
    stats = jax.device_get(call(split_of(some, some), jnp.zeros((3, 2), jnp.float32)))
    assert not any(stats[f"update_cosine_{part}"] for part in ("lookup", "head", "sum"))
    assert not any(jax.device_get(call(split_of(none, none))).values())


def test_sizes_of_half_precision_parts_are_float32():
    """256 times 1 plus 1, in bfloat16's 8 bits, stays 256."""
    stats = mg.tied_stats(split_of(np.ones((300, 2)), np.full((300, 2), 3), jnp.bfloat16))
    assert (stats["lookup_l1"], stats["head_l2_squared"], stats["inner_product"]) == (600, 5400, 1800)
    assert stats["sum_l2_squared"] == 600 * 16


# When.


def test_inspections_are_powers_of_two_and_then_periodic():
    """The head part's share peaks in the first tens of updates, which a period alone would miss."""
    expected = {
        0: [], 1: [*range(1, 41)], 2: [1, *range(2, 41, 2)], 3: [1, 2, *range(3, 41, 3)],
        5: [1, 2, 4, 5, 10, 15, 20, 25, 30, 35, 40], 8: [1, 2, 4, 8, 16, 24, 32, 40], 9: [1, 2, 4, 8, 9, 18, 27, 36],
        33: [1, 2, 4, 8, 16, 32, 33], 100: [1, 2, 4, 8, 16, 32],
    }  # fmt: skip
    for every, steps in expected.items():
        config = dataclasses.replace(LOOP, inspect_every=every)
        assert [step for step in range(41) if inspection_due(step, config)] == steps, every


@pytest.mark.parametrize("call", [1, 3, 50])
@pytest.mark.parametrize("others", [(0, 0, 0), (4, 6, 5)], ids=["alone", "with_others"])
def test_no_compiled_call_runs_past_an_inspected_step(call, others):
    """From every start: only the last step of a call can be inspected."""
    evals, saves, samples = others
    for every in (*range(14), 33, 100):
        config = mg.TrainConfig(
            steps=41, steps_per_call=call, eval_every=evals, checkpoint_every=saves, sample_every=samples,
            inspect_every=every,
        )  # fmt: skip
        periods = [period for period in (*others, call) if period]
        for start in range(41):
            due = [t for t in range(start + 1, 42) if inspection_due(t, config) or t == 41]
            due += [t for t in range(start + 1, 42) if any(t % period == 0 for period in periods)]
            assert next_stop(start, config) == min(due) <= start + call


# The loop.


@functools.cache
def verbs():
    return mg.load_dataset(VERBS, MODEL.context_len)


def run_loop(config, state=None, stop_at=None):
    """All records without the clock's, and the state that was saved last, on the host."""
    saved, records = [], []
    stream = train(
        config, verbs(), init_state(config) if state is None else state, lambda s: saved.append(jax.device_get(s)),
        should_stop=lambda: stop_at is not None and records[-1]["step"] >= stop_at,
    )  # fmt: skip
    for record in stream:
        records.append({name: value for name, value in record.items() if name != "tokens_per_s"})
    return records, saved[-1]


@functools.cache
def unbroken(name):
    """The loop run through, and the names of what was compiled meanwhile."""
    compiled = []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(re.match(r"Compiling (?:jit\()?(\w+)", record.getMessage()))
    logger = logging.getLogger("jax._src.interpreters.pxla")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        with jax.log_compiles():
            return *run_loop(CONFIGS[name]), [match[1] for match in compiled if match]
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def assert_equal(a, b):
    """Bit for bit, and the same structure."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


@functools.cache
def replayed(name):
    """Before and after each step, by the plain step: (params, batch, params)."""
    config = CONFIGS[name]
    state, step, steps = init_state(config), jax.jit(make_train_step(config)), []
    for i in range(LOOP.steps):
        batch = verbs().train.batch(LOOP.seed, i, LOOP.batch_size)
        after, _ = step(state, batch)
        steps.append((state.params, batch, after.params))
        state = after
    return steps


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_inspected_steps_record_their_own_gradient_and_update(name):
    """Each number from its definition: both parts at the parameters before the step, the whole batch's, before
    clipping and interventions; and the update as the parameters' difference. By the oracle, but for dropout."""
    records, _, _ = unbroken(name)
    inspected = of_kind(records, "inspect")
    assert [record["step"] for record in inspected] == INSPECTED
    for record in inspected:
        before, batch, after = replayed(name)[record["step"] - 1]
        if name == "plain":
            _, _, lookup, head = oracle.backward(before, *batch[:2], MODEL, batch.mask)
        else:
            key = jax.random.fold_in(train_module._key(LOOP, 1), record["step"] - 1)
            _, lookup, head, _ = tied_gradient(before, batch, CONFIGS[name].model, key, 2)
        update = np.subtract(*(np.float64(params["embed"]["embedding"]) for params in (after, before)))
        expected = sizes_by_numpy(lookup, head, update)
        assert record.keys() == {"kind", "step", *expected}
        assert record["lookup_rows"] == expected["lookup_rows"]
        for key, value in expected.items():
            # Two programs of float32 sums, up to seven Adam steps apart: some 1e-5 of each, measured.
            np.testing.assert_allclose(record[key], value, rtol=1e-4, atol=1e-5, err_msg=f"{key} {record['step']}")
    assert inspected[0]["update_cosine_sum"] > 0.1, "the first step of Adam goes down"


def test_training_does_not_depend_on_being_watched():
    """The same losses and parameters, to float32 rounding over eleven steps of Adam in two programs."""
    seen, final, _ = unbroken("plain")
    blind, expected, _ = unbroken("blind")
    assert not of_kind(blind, "inspect")
    for kind in ("train", "eval", "saved"):
        pairs = list(zip(of_kind(seen, kind), of_kind(blind, kind), strict=True))
        assert [a["step"] for a, _ in pairs] == [b["step"] for _, b in pairs]
        for a, b in pairs:
            assert a.keys() == b.keys()
            for name in a.keys() - {"kind", "full"}:
                np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)
    # Adam magnifies what is near zero; 1e-5 is a thousandth of a step.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), final.params, expected.params)


@pytest.mark.parametrize(("name", "stops"), [("plain", range(1, 11)), ("everything", (2, 7))], ids=["plain", "dropout"])
def test_a_resumed_run_inspects_as_an_unbroken_one(name, stops):
    """Interrupted after any step: the same bits in the end, and the same inspections, each once."""
    straight, final, _ = unbroken(name)
    for stop_at in stops:
        first, state = run_loop(CONFIGS[name], stop_at=stop_at)
        assert first[-1]["kind"] == "stopped" and first[-1]["step"] in (stop_at, stop_at + 1)
        second, last = run_loop(CONFIGS[name], state=jax.tree.map(jnp.array, state))
        assert_equal(last, final)
        assert of_kind(first + second, "inspect") == of_kind(straight, "inspect"), stop_at
        assert of_kind(first + second, "train") == of_kind(straight, "train"), stop_at


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loop_compiles_once_inspected_or_not(name):
    names = unbroken(name)[2]
    assert names.count("run") == 1


@pytest.mark.parametrize("n", [1, 3])
def test_looking_changes_no_step(n):
    """The state after n of K steps, the last one inspected or not: to rounding, two ways to add up a gradient."""
    unbroken("plain")  # compiles it, and counts
    run, config = train_module.compile_steps(CONFIGS["plain"]), CONFIGS["plain"]
    batches = [verbs().train.batch(0, i, LOOP.batch_size) for i in range(LOOP.steps_per_call)]
    batches = jax.tree.map(lambda *x: np.stack(x), *batches)
    results = [run(init_state(config), batches, np.int32(n), np.int32(look)) for look in (0, 1)]
    (blind, unseen), (seen, metrics) = jax.device_get(results)
    assert blind.step == seen.step == n
    # As above.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), seen, blind)
    assert unseen["tied"].keys() == metrics["tied"].keys() and metrics["tied"]["head_l2"] > 0
    for name in ("loss", "lr", "grad_norm", "targets"):
        np.testing.assert_allclose(metrics[name], unseen[name], rtol=1e-4)
        assert metrics[name][:n].all() and not metrics[name][n:].any()


# Run directories.


@pytest.mark.slow
def test_a_run_writes_its_inspections(tmp_path):
    """As JSON lines, and as a picture; resumed, each step once. By default neither."""
    from minigpt_jax.runs import train_run

    (tmp_path / "text").write_text("the quick brown fox jumps over a lazy dog\n" * 30)
    model = mg.ModelConfig(vocab_size=32, d_model=8, n_layers=1, n_heads=2, d_ff=12, context_len=6)
    for name, every, expected in (("seen", 3, [1, 2, 3]), ("blind", 0, [])):
        config = mg.Config(model, train=mg.TrainConfig(steps=4, batch_size=2, warmup_steps=2, inspect_every=every))
        folder = tmp_path / name
        train_run(config, tmp_path, tmp_path / "text", folder)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        inspected = of_kind(records, "inspect")
        assert [record["step"] for record in inspected] == expected
        assert (folder / "tied.png").exists() == bool(expected)
        assert len(of_kind(records, "train")) == 4
    png = (tmp_path / "seen/tied.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and len(png) > 10_000
    inspected = of_kind(mg.open_run(tmp_path / "seen").metrics(), "inspect")
    assert inspected[0].keys() == of_kind(unbroken("plain")[0], "inspect")[0].keys()
    assert {type(value) for value in inspected[0].values()} == {int, float, str}
    longer = mg.open_run(tmp_path / "seen").config
    longer = dataclasses.replace(longer, train=dataclasses.replace(longer.train, steps=7))
    train_run(longer, tmp_path / "seen", None, None)
    inspected = of_kind(mg.open_run(tmp_path / "seen").metrics(), "inspect")
    assert [record["step"] for record in inspected] == [1, 2, 3, 6]
