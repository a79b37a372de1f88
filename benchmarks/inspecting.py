"""What looking inside costs: python benchmarks/inspecting.py [--rounds 7] [--config G S C]

The tied gradient by use against a plain `value_and_grad`, and a training step that is inspected against one that is
not. Each pair runs in turn (A B A B); the ratio is the median of the rounds' ratios.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import numpy as np

import minigpt_jax as mg
from minigpt_jax.train import compile_steps

GPT2 = mg.ModelConfig(
    vocab_size=50257,
    d_model=768,
    n_layers=12,
    n_heads=12,
    context_len=256,
    ffn="gelu_tanh",
    positions="learned",
    attention_bias=True,
)
CONFIGS = {
    "S": (mg.ModelConfig(), 32),
    "C": (mg.ModelConfig(vocab_size=65, d_model=128, n_layers=4, context_len=64, ffn="gelu_tanh"), 12),
    "G": (GPT2, 4),
    "G1k": (dataclasses.replace(GPT2, context_len=1024), 4),
}


def batches(model: mg.ModelConfig, *axes: int) -> mg.Batch:
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (*axes, model.context_len + 1), dtype=np.int32)
    return mg.Batch(ids[..., :-1], ids[..., 1:])


def gradients(model: mg.ModelConfig, batch_size: int) -> dict:
    """Name -> a function that computes one gradient."""
    params, batch = mg.init(model, jax.random.key(0)), batches(model, batch_size)
    plain = jax.jit(jax.value_and_grad(mg.loss), static_argnums=2)
    by_use = jax.jit(mg.tied_gradient, static_argnums=2)
    return {
        "value_and_grad": lambda: jax.block_until_ready(plain(params, batch, model)),
        "tied_gradient": lambda: jax.block_until_ready(by_use(params, batch, model)),
    }


def steps(model: mg.ModelConfig, batch_size: int, per_call: int) -> dict:
    """Name -> a function that trains `per_call` steps in one call; in the second the last of them is inspected."""
    config = mg.Config(
        model=model,
        train=mg.TrainConfig(steps=10**6, batch_size=batch_size, steps_per_call=per_call, inspect_every=10**6),
    )
    run, data, state = compile_steps(config), batches(model, per_call, batch_size), [mg.init_state(config)]

    def train(look: int) -> None:
        state[0], metrics = run(state[0], data, np.int32(per_call), np.int32(look))
        jax.device_get(metrics)

    return {"plain steps": lambda: train(0), "one inspected": lambda: train(1)}


def compare(pair: dict, rounds: int, repeats: int) -> list[list[float]]:
    """Seconds of each variant, round by round."""
    for run in pair.values():
        run()  # compiles
    seconds = []
    for _ in range(rounds):
        row = []
        for run in pair.values():
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            row.append((time.perf_counter() - start) / repeats)
        seconds.append(row)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--config", nargs="*", default=["S", "C", "G"], choices=list(CONFIGS))
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, medians of {arguments.rounds} rounds in turn")
    for name in arguments.config:
        model, batch_size = CONFIGS[name]
        large = name.startswith("G")
        rows = compare(gradients(model, batch_size), arguments.rounds, 1 if large else 20)
        a, b = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(y / x for x, y in rows)
        print(f"{name}  value_and_grad {1e3 * a:9.2f} ms  tied_gradient {1e3 * b:9.2f} ms  ratio {ratio:.3f}")
        K = 1 if large else 8
        rows = compare(steps(model, batch_size, K), arguments.rounds, 1 if large else 10)
        a = statistics.median(x for x, _ in rows) / K
        ratio = statistics.median((y - x) / x * K + 1 for x, y in rows)
        print(f"{name}  a plain step   {1e3 * a:9.2f} ms  an inspected one                ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
