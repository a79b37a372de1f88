"""Training: a pure step, and the loop around it as a stream of records that observers watch."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .config import Config, ModelConfig, TrainConfig
from .data import Batch, Dataset
from .errors import InputError
from .functional import abstract_params, init
from .inspect.tied import split_of, tied_stats
from .losses import LossSum, loss_and_grads, loss_sum
from .optimizer import learning_rate, make_optimizer
from .tying import clip_head_gradient, scale_lookup_gradient, tie_gradients, two_tables, untied

# Tokens of a compiled call that evaluates: the number of windows follows from the context length.
TOKENS_PER_CALL = 2048


class TrainState(NamedTuple):
    """All that training carries from step to step. Batches and dropout are functions of (seed, step)."""

    step: jax.Array
    """Updates made so far, int32."""
    params: dict
    opt_state: optax.OptState


def _key(config: TrainConfig, purpose: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(config.seed), purpose)


def init_state(config: Config) -> TrainState:
    """Fresh parameters from `config.train.seed`, and the optimizer's zeros."""
    return state_of(init(config.model, _key(config.train, 0)), config.train)


def state_of(params, config: TrainConfig) -> TrainState:
    """The state before the first update of `params`, wherever they come from: a fresh optimizer's."""
    opt_state = jax.jit(make_optimizer(config).init)(params)  # one compilation, not one for every shape
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state)


def abstract_state(config: Config) -> TrainState:
    """Shapes and dtypes of the state, with nothing allocated."""
    params = abstract_params(config.model)
    opt_state = jax.eval_shape(make_optimizer(config.train).init, params)
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, opt_state)


def make_train_step(config: Config, inspect: bool = False) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """The pure `train_step(state, batch) -> (state, metrics)`; jit it, or scan over it.

    Metrics, all scalars: "loss" (nats per valid target), "lr", "grad_norm" (global L2, before clipping), "targets"
    (how many were valid). With `inspect`, also "tied": `tied_stats` of the whole batch's gradient, before clipping and
    before the interventions of `config.train`, and of the update that the optimizer made of it.
    """
    t = config.train
    optimizer, schedule = make_optimizer(t), learning_rate(t)
    interventions = [scale_lookup_gradient(t.lookup_gradient_scale)] if t.lookup_gradient_scale != 1 else []
    interventions += [clip_head_gradient()] if t.clip_head_gradient else []
    tie = optax.chain(*interventions, tie_gradients())

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        key = jax.random.fold_in(_key(t, 1), state.step) if config.model.dropout else None
        if inspect or interventions:
            by_use, model = two_tables(state.params), untied(config.model)
            summed, grads_by_use = loss_and_grads(by_use, batch, model, key, t.accumulate)
            grads, _ = tie.update(grads_by_use, tie.init(by_use))
        else:
            summed, grads = loss_and_grads(state.params, batch, config.model, key, t.accumulate)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": summed.mean(),
            "lr": jnp.asarray(schedule(state.step), jnp.float32),
            "grad_norm": optax.tree.norm(grads),
            "targets": summed.count,
        }
        if inspect:
            split = split_of(summed.mean(), grads_by_use)
            metrics["tied"] = tied_stats(split, updates["embed"]["embedding"])
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics

    return train_step


def compile_steps(config: Config):
    """Compile `(state, batches, n, look) -> (state, metrics)`: the first n of K stacked batches, in one call.

    A loop inside the compiled program spares the cost of mapping its memory anew at each step. n is dynamic, so one
    program serves every n <= K and a step's arithmetic does not depend on where training was interrupted. `look` is 1
    where the last of the n steps is to be inspected, else 0: a second loop of that many steps, since a branch inside
    the first one would cost every step a tenth of its time. metrics["tied"] is that step's.
    """
    K, inspecting = config.train.steps_per_call, config.train.inspect_every > 0
    # Of its own accord XLA starts a CPU's recomputations early, beside other work: they would save no memory.
    slim = config.model.remat and jax.default_backend() == "cpu"
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if slim else None
    plain, inspected = make_train_step(config), make_train_step(config, inspect=True)

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    def run(state: TrainState, batches_K: Batch, n: jax.Array, look: jax.Array):
        def one(i, carry, step):
            state, metrics_K, tied = carry
            state, metrics = step(state, jax.tree.map(lambda x: x[i], batches_K))
            tied = metrics.pop("tied", tied)
            return state, jax.tree.map(lambda all_K, one: all_K.at[i].set(one), metrics_K, metrics), tied

        def zeros(tree, *axes):
            return jax.tree.map(lambda leaf: jnp.zeros((*axes, *leaf.shape), leaf.dtype), tree)

        _, shapes = jax.eval_shape(inspected if inspecting else plain, state, jax.tree.map(lambda x: x[0], batches_K))
        tied = shapes.pop("tied", None)
        carry = state, zeros(shapes, K), zeros(tied)
        carry = jax.lax.fori_loop(0, n - look, functools.partial(one, step=plain), carry)
        if inspecting:
            carry = jax.lax.fori_loop(n - look, n, functools.partial(one, step=inspected), carry)
        state, metrics, tied = carry
        return state, metrics | ({"tied": tied} if inspecting else {})

    return run


def inspection_due(step: int, train: TrainConfig) -> bool:
    """Whether update `step`, counted from 1, records its tied gradient: every N = inspect_every, and 1, 2, 4 ... before
    N, since the head part's share peaks in the first tens of updates (Lopardo et al. 2026, arXiv:2603.26663)."""
    every = train.inspect_every
    return every > 0 and step > 0 and (step % every == 0 or (step < every and step.bit_count() == 1))


@functools.partial(jax.jit, static_argnames="config")
def _eval_step(params, batch: Batch, config: ModelConfig) -> LossSum:
    return loss_sum(params, batch, config)


def evaluate(params, source, config: ModelConfig, batch_size: int, max_windows: int | None = None) -> LossSum:
    """Loss over the source's windows, all of them or `max_windows` evenly spread: sum in nats, number of targets."""
    total, count = 0.0, 0.0
    for batch in source.eval_batches(batch_size, max_windows):
        part = _eval_step(params, batch, config)
        total, count = total + float(part.total), count + float(part.count)  # float64: no drift over many batches
    return LossSum(np.float64(total), np.float64(count))


def bits(tokens_per_char: float | None, nats: float) -> float:
    """Nats per token as bits per character, or as bits per token where the data is not made of characters (None)."""
    return nats / math.log(2) * (tokens_per_char or 1.0)


def next_stop(step: int, train: TrainConfig) -> int:
    """Where the compiled call that starts at `step` ends: a function of the step alone, so never of interruptions."""
    periods = [train.steps_per_call, train.eval_every, train.checkpoint_every, train.sample_every, train.inspect_every]
    power = 1 << step.bit_length()  # the next one above step
    early = [power] if power < train.inspect_every else []
    return min([train.steps, *early] + [step - step % period + period for period in periods if period])


def evaluation_due(step: int, train: TrainConfig) -> bool:
    """Whether the held-out loss is measured after this step."""
    return step == train.steps or (step > 0 and train.eval_every > 0 and step % train.eval_every == 0)


def train(
    config: Config,
    dataset: Dataset,
    state: TrainState,
    save: Callable[[TrainState], None] = lambda state: None,
    sample: Callable[[dict, int], str] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    evaluate_first: bool = False,
) -> Iterator[dict]:
    """Train from `state.step` to `config.train.steps`, as a stream of records (dicts with "kind" and "step"):

    "train": after every update: loss, bits, lr, grad_norm, tokens_per_s
    "inspect": after the updates that `inspection_due` names: the values of `tied_stats`
    "eval": on held-out text: loss, bits, full (whether all of it was used); `bits` is bits per character, or per
    token where the data has no characters
    "sample": text, "saved": after `save(state)`, "stopped": `should_stop()` said so, and the state was saved

    Saving comes before evaluating, which takes longer; a run that was stopped in between begins with that evaluation
    (`evaluate_first`). The state is donated: use the saved one. Order of batches and dropout depend on (seed, step)
    alone, so a resumed run equals an unbroken one bit for bit. Raises `InputError` where the loss is not finite.
    """
    t, T = config.train, config.window
    run, step = compile_steps(config), int(state.step)
    eval_size = max(1, TOKENS_PER_CALL // T)

    def stacked(step: int) -> tuple[Batch, int]:
        """Batches of the call that starts at `step`, and their number; the last one repeated to fill K."""
        n = next_stop(step, t) - step
        batches = [dataset.train.batch(t.seed, step + i, t.batch_size) for i in range(n)]
        return jax.tree.map(lambda *x: np.stack([*x, *[x[-1]] * (t.steps_per_call - n)]), *batches), n

    def evaluation(full: bool) -> dict:
        mean = evaluate(state.params, dataset.val, config.model, eval_size, None if full else t.eval_windows).mean()
        return {
            "kind": "eval",
            "step": step,
            "loss": float(mean),
            "bits": bits(dataset.tokens_per_char, float(mean)),
            "full": full,
        }

    if evaluate_first:
        yield evaluation(full=step == t.steps)
    if step < t.steps:
        batches, n = stacked(step)
    clock = time.perf_counter()
    while step < t.steps:
        first, step = step + 1, step + n
        look = inspection_due(step, t)
        state, metrics = run(state, batches, np.int32(n), np.int32(look))
        if step < t.steps:  # the next batches are made while the device works
            done, (batches, n) = n, stacked(step)
        else:
            done = n
        metrics = jax.device_get(metrics)
        tied = metrics.pop("tied", {})
        now = time.perf_counter()
        speed = done * t.batch_size * T / (now - clock)
        for i in range(done):
            record = {name: float(values[i]) for name, values in metrics.items()}
            if not math.isfinite(record["loss"] + record["grad_norm"]):
                raise InputError(
                    f"loss {record['loss']:g} or gradient norm {record['grad_norm']:g} is not finite at step "
                    f"{first + i}; start again with a lower train.peak_lr"
                )
            record |= {"bits": bits(dataset.tokens_per_char, record["loss"]), "tokens_per_s": round(speed)}
            yield {"kind": "train", "step": first + i, **record}
        if look:
            yield {"kind": "inspect", "step": step, **{name: x.item() for name, x in tied.items()}}
        stop = should_stop() and step < t.steps
        if stop or step == t.steps or (t.checkpoint_every and step % t.checkpoint_every == 0):
            save(state)  # before anything else that takes time
            yield {"kind": "saved", "step": step}
        if stop:
            yield {"kind": "stopped", "step": step}
            return
        if dataset.val is not None and evaluation_due(step, t):
            yield evaluation(full=step == t.steps)
        if sample is not None and t.sample_every and step % t.sample_every == 0:
            yield {"kind": "sample", "step": step, "text": sample(state.params, step)}
        clock = time.perf_counter()
