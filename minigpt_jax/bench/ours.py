"""One run of this package, in a process of its own: python -m minigpt_jax.bench.ours JSON -> a line of JSON.

The argument says what to do; see run.py.
"""

import dataclasses
import itertools
import json
import sys
import time

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

import minigpt_jax as mg

from ..compiled import keep_compiled_programs
from ..config import ModelConfig, Sampling
from ..train import compile_steps, state_of
from ..trees import leaf_paths, nested
from .machine import peak_mb
from .shapes import POOL, batch_ids, prompt_ids, run_config, timed


def write_weights(request: dict) -> dict:
    """Draw parameters and save them by path. Biases and norm scales are random too: zeros would hide a missing term."""
    model, rng = ModelConfig(**request["model"]), np.random.default_rng(5)
    leaves = {path: np.array(leaf) for path, leaf in leaf_paths(mg.init(model, jax.random.key(0))).items()}
    for path, leaf in leaves.items():
        if leaf.ndim == 1:
            leaf += 0.1 * rng.standard_normal(leaf.shape, np.float32)
        elif path.endswith("kernel"):
            leaf *= 2
    save_file(leaves, request["weights"])
    table = mg.param_table(model)
    return {"parameters": table.total, "flops_per_token": table.flops_per_token}


def load_weights(path: str) -> dict:
    return nested({name: jnp.asarray(leaf) for name, leaf in load_file(path).items()})


def train(request: dict) -> dict:
    """Train as the trainer does, `steps_per_call` steps in a compiled call, and read every loss."""
    plain = ModelConfig(**request["model"])
    model = dataclasses.replace(plain, **request["options"])
    config = run_config(model, request["batch"])
    K = config.train.steps_per_call
    steps, state = compile_steps(config), state_of(load_weights(request["weights"]), config.train)

    def batches(first: int, n: int) -> mg.Batch:
        """Of n <= K steps, the last one repeated to fill K."""
        ids = batch_ids(model, request["batch"], first, n).astype(np.int32)
        ids = np.concatenate([ids, np.repeat(ids[-1:], K - n, axis=0)])
        return mg.Batch(ids[..., :-1], ids[..., 1:])

    def call(stacked: mg.Batch, n: int) -> list[float]:
        nonlocal state
        state, metrics = steps(state, stacked, np.int32(n), np.int32(0))
        return jax.device_get(metrics)["loss"][:n].tolist()

    first = batches(0, 1)
    began = time.perf_counter()
    losses = call(first, 1)
    first_call, since_start = time.perf_counter() - began, time.time() - request["spawned"]
    pool = itertools.cycle([batches(1 + i * K, K) for i in range(POOL)])
    seconds, peak, check = timed(lambda: losses.extend(call(next(pool), K)), request["seconds"]), peak_mb(), losses[0]
    if model != plain:  # the weights are compared in float32
        check = float(mg.loss(load_weights(request["weights"]), jax.tree.map(lambda x: x[0], first), plain))
    return {
        "step_s": [s / K for s in seconds],
        "losses": losses[: 1 + K],
        "check_loss": check,
        "peak_mb": peak,
        "first_call_s": first_call,
        "first_s": since_start,
    }


def decode(request: dict) -> dict:
    """Generate greedily behind a fixed prompt, with a cache."""
    model = ModelConfig(**request["model"] | request["options"])
    params, prompt, n = load_weights(request["weights"]), prompt_ids(model), request["new_tokens"]

    def written(function):
        greedy = Sampling(temperature=0)
        return function(params, prompt, model, key=jax.random.key(0), max_new_tokens=n, sampling=greedy)

    began = time.perf_counter()
    next(written(mg.stream))
    first_call, since_start = time.perf_counter() - began, time.time() - request["spawned"]
    ids = written(mg.generate)
    return {
        "decode_s": timed(lambda: written(mg.generate), request["seconds"]),
        "ids": ids.tolist(),
        "first_call_s": first_call,
        "first_s": since_start,
    }


def ceiling(request: dict) -> dict:
    """GFLOP/s of square float32 matmuls, the best of several."""
    results = {}
    for n in request["sizes"]:
        x = np.random.default_rng(0).standard_normal((n, n), np.float32)
        if request["with"] == "numpy":
            seconds = timed(lambda x=x: x @ x, request["seconds"])
        else:
            matmul, device = jax.jit(jnp.matmul), jnp.asarray(x)
            jax.block_until_ready(matmul(device, device))
            seconds = timed(lambda m=matmul, x=device: jax.block_until_ready(m(x, x)), request["seconds"])
        results[str(n)] = 2 * n**3 / min(seconds) / 1e9
    return {"gflops": results}


TASKS = {"weights": write_weights, "train": train, "decode": decode, "ceiling": ceiling}


def main() -> None:
    request = json.loads(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")  # as the peers
    keep_compiled_programs()
    result = TASKS[request["task"]](request)
    versions = {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__, "numpy": np.__version__}
    print(json.dumps({"peak_mb": peak_mb()} | result | {"versions": versions}))


if __name__ == "__main__":
    main()
