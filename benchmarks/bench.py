"""Training and generation speed on this machine: python benchmarks/bench.py [--rounds 5]

Variants run in turn (A B A B), and each figure is the median of the rounds: compare within one table only.
"""

import argparse
import statistics
import time

import jax
import numpy as np

import minigpt_jax as mg
from minigpt_jax.train import compile_steps

CONFIGS = {
    "S": (mg.ModelConfig(), 32),
    "C": (mg.ModelConfig(vocab_size=65, d_model=128, n_layers=4, context_len=64, ffn="gelu_tanh"), 12),
}


def training(model: mg.ModelConfig, batch: int, per_call: int):
    """A function that trains `per_call` steps and returns its seconds per step."""
    config = mg.Config(model=model, train=mg.TrainConfig(batch_size=batch, steps_per_call=per_call))
    run, T = compile_steps(config), model.context_len
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (per_call, batch, T + 1), dtype=np.int32)
    batches = mg.Batch(ids[..., :-1], ids[..., 1:])
    state = [mg.init_state(config)]

    def once() -> float:
        start = time.perf_counter()
        state[0], metrics = run(state[0], batches, np.int32(per_call), np.int32(0))
        jax.device_get(metrics)
        return (time.perf_counter() - start) / per_call

    once()  # compiles
    return once


def generation(model: mg.ModelConfig, new_tokens: int):
    """A function that generates greedily and returns its seconds per token."""
    params, prompt = mg.init(model, jax.random.key(0)), np.zeros(8, np.int32)

    def once() -> float:
        start = time.perf_counter()
        mg.generate(
            params,
            prompt,
            model,
            key=jax.random.key(0),
            max_new_tokens=new_tokens,
            sampling=mg.Sampling(temperature=0),
        )
        return (time.perf_counter() - start) / new_tokens

    once()
    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, medians of {rounds} rounds in turn")
    for name, (model, batch) in CONFIGS.items():
        tokens, variants = batch * model.context_len, {}
        flops = 3 * mg.param_table(model).flops_per_token
        for per_call in (1, 8):
            variants[f"train, {per_call} steps a call"] = (training(model, batch, per_call), 32 // per_call, tokens)
        variants["generate 120 tokens"] = (generation(model, 120), 1, 1)
        seconds = {label: [] for label in variants}
        for _ in range(rounds):
            for label, (once, repeats, _) in variants.items():
                seconds[label].append(statistics.median(once() for _ in range(repeats)))
        for label, (_, _, count) in variants.items():
            s = statistics.median(seconds[label])
            rate = f"{count / s:>10,.0f} tokens/s"
            work = f"{flops * count / s / 1e9:>7.0f} GFLOP/s" if count > 1 else ""
            print(f"{name}  {label:<24} {1e3 * s:>8.3f} ms {rate} {work}")


if __name__ == "__main__":
    main()
