"""One run of a peer in PyTorch, in a process of its own: python -m minigpt_jax.bench.peers JSON -> a line of JSON.

The same function of the same weights, batches and optimizer as in ours.py. The argument says what to do; see
run.py.
"""

import contextlib
import importlib.util
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from ..config import Config, ModelConfig
from .machine import peak_mb
from .shapes import POOL, batch_ids, prompt_ids, run_config, timed


def gpt2_names(leaves: dict[str, np.ndarray], n_layers: int) -> dict[str, np.ndarray]:
    """Our leaves by path as GPT-2's by name, in transformers' layout: kernels (in, out); query, key, value in one."""
    names = {
        "transformer.wte.weight": leaves["embed/embedding"],
        "transformer.wpe.weight": leaves["positions/table"],
        "transformer.ln_f.weight": leaves["norm_final/scale"],
        "transformer.ln_f.bias": leaves["norm_final/bias"],
    }
    dense = {"attn.c_proj": "attention/out", "mlp.c_fc": "ffn/up", "mlp.c_proj": "ffn/down"}
    norms = {"ln_1": "norm_attention", "ln_2": "norm_ffn"}
    for i in range(n_layers):
        there, here = f"transformer.h.{i}", f"block_{i}"
        for theirs, ours in norms.items():
            names[f"{there}.{theirs}.weight"] = leaves[f"{here}/{ours}/scale"]
            names[f"{there}.{theirs}.bias"] = leaves[f"{here}/{ours}/bias"]
        for theirs, ours in dense.items():
            names[f"{there}.{theirs}.weight"] = leaves[f"{here}/{ours}/kernel"]
            names[f"{there}.{theirs}.bias"] = leaves[f"{here}/{ours}/bias"]
        for theirs, ours in {"weight": "kernel", "bias": "bias"}.items():
            parts = [leaves[f"{here}/attention/{name}/{ours}"] for name in ("query", "key", "value")]
            names[f"{there}.attn.c_attn.{theirs}"] = np.concatenate(parts, axis=-1)
    return names


def nanogpt_names(leaves: dict[str, np.ndarray], n_layers: int) -> dict[str, np.ndarray]:
    """As `gpt2_names`, in nanoGPT's layout: its linear layers keep kernels as (out, in)."""
    kernels = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: x.T if name.endswith(kernels) else x for name, x in gpt2_names(leaves, n_layers).items()}


def transformers_model(model: ModelConfig, folder: str | None):
    """transformers' GPT-2 with its own choice of attention. Its GELU is torch's fused one, the same function as the
    default."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.context_len,
        n_embd=model.d_model,
        n_layer=model.n_layers,
        n_head=model.n_heads,
        activation_function="gelu_pytorch_tanh",
        layer_norm_epsilon=model.norm_eps,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def nanogpt_model(model: ModelConfig, folder: str | None):
    """nanoGPT's GPT out of the checkout `folder`, with its GELU set to the tanh form, so that the function is ours."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder) / "model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = module.GPT(
        module.GPTConfig(
            block_size=model.context_len,
            vocab_size=model.vocab_size,
            n_layer=model.n_layers,
            n_head=model.n_heads,
            n_embd=model.d_model,
            dropout=0.0,
            bias=True,
        )
    )
    for block in net.transformer.h:
        block.mlp.gelu = torch.nn.GELU(approximate="tanh")
    return net


PEERS = {"transformers": (transformers_model, gpt2_names), "nanogpt": (nanogpt_model, nanogpt_names)}


def load_weights(net, names: dict[str, np.ndarray]) -> None:
    state = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in names.items()}
    missing, unknown = net.load_state_dict(state, strict=False)
    if unknown or set(missing) - {"lm_head.weight"}:  # which is tied to the table
        raise ValueError(f"weights do not fit: missing {missing}, unknown {unknown}")


class Peer:
    """A peer's model with our weights."""

    def __init__(self, request: dict):
        self.name, self.bf16 = request["peer"], request["bf16"]
        self.model = ModelConfig(**request["model"])
        build, self._names = PEERS[self.name]
        self.net = build(self.model, request.get("nanogpt"))
        self._weights = request["weights"]
        self.load()

    def load(self) -> None:
        load_weights(self.net, self._names(load_file(self._weights), self.model.n_layers))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats."""
        if self.name == "nanogpt":
            return self.net(x, y)[1]
        logits = self.net(x).logits
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))


def adamw(net, config: Config, fused: bool) -> torch.optim.Optimizer:
    """AdamW as ours: matrices and tables decay, biases and scales do not."""
    t, parameters = config.train, list(net.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": t.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    options = {"fused": True} if fused else {}
    return torch.optim.AdamW(groups, lr=t.peak_lr, betas=(t.beta1, t.beta2), eps=t.adam_eps, **options)


def train(request: dict) -> dict:
    """Forward, backward, clipping, AdamW; every loss is read. Times are of as many steps as one of our calls has."""
    peer = Peer(request)
    config = run_config(peer.model, request["batch"])
    net, clip, K = peer.net, config.train.clip_norm, config.train.steps_per_call
    net.train()
    loss_of = torch.compile(peer.loss) if request["compiled"] else peer.loss
    optimizer = adamw(net, config, fused=request["compiled"])

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16) if peer.bf16 else contextlib.nullcontext():
            loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def batches(first: int, n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        ids = torch.from_numpy(batch_ids(peer.model, request["batch"], first, n))
        return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in ids]

    (first,) = batches(0, 1)
    began = time.perf_counter()
    losses = [step(*first)]
    first_call, since_start = time.perf_counter() - began, time.time() - request["spawned"]
    pool = itertools.cycle([batches(1 + i * K, K) for i in range(POOL)])
    seconds = timed(lambda: losses.extend([step(*batch) for batch in next(pool)]), request["seconds"])
    peak, check = peak_mb(), losses[0]
    if peer.bf16:  # the weights are compared in float32
        peer.load()
        with torch.no_grad():
            check = peer.loss(*first).item()
    return {
        "step_s": [s / K for s in seconds],
        "losses": losses[: 1 + K],
        "check_loss": check,
        "first_call_s": first_call,
        "first_s": since_start,
        "peak_mb": peak,
    }


@torch.no_grad()
def decode(request: dict) -> dict:
    """Generate greedily behind the prompt: transformers with its cache, nanoGPT as it is, which has none."""
    peer = Peer(request)
    net = peer.net.eval()
    if peer.bf16:
        net = net.to(torch.bfloat16)
    prompt = torch.from_numpy(prompt_ids(peer.model))[None]

    def generate(n: int) -> list[int]:
        if peer.name == "nanogpt":
            ids = net.generate(prompt, n, top_k=1)
        else:
            ids = net.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        return ids[0, prompt.shape[1] :].tolist()

    began = time.perf_counter()
    generate(1)
    first_call, since_start = time.perf_counter() - began, time.time() - request["spawned"]
    ids = generate(request["new_tokens"])
    return {
        "decode_s": timed(lambda: generate(request["new_tokens"]), request["seconds"]),
        "ids": ids,
        "first_call_s": first_call,
        "first_s": since_start,
    }


def ceiling(request: dict) -> dict:
    """GFLOP/s of square float32 matmuls, the best of several."""
    results = {}
    for n in request["sizes"]:
        x = torch.randn(n, n)
        results[str(n)] = 2 * n**3 / min(timed(lambda x=x: x @ x, request["seconds"])) / 1e9
    if "transformers" in request["peers"]:
        importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    return {"gflops": results}


TASKS = {"train": train, "decode": decode, "ceiling": ceiling}


def main() -> None:
    request = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):  # nanoGPT prints its size
        result = TASKS[request["task"]](request)
    versions = {"torch": torch.__version__}
    if "transformers" in sys.modules:
        versions["transformers"] = sys.modules["transformers"].__version__
    print(json.dumps({"peak_mb": peak_mb()} | result | {"versions": versions, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
