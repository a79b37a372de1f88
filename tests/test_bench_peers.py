"""`minigpt bench`'s peers compute our function with our weights, and a wrong weight is noticed. Needs the extra
`parity`. nanoGPT is not shipped: a model with its names and layout stands in for a checkout."""

import dataclasses
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import minigpt_jax as mg
from minigpt_jax.bench import ours
from minigpt_jax.bench.contenders import OURS
from minigpt_jax.bench.shapes import batch_ids, gpt2_shaped
from minigpt_jax.bench.table import Record, rows_of

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
pytest.importorskip("transformers", reason="the extra `parity` is not installed")

from minigpt_jax.bench import peers  # noqa: E402  (needs torch)

MODEL, B = gpt2_shaped(V=61, D=32, L=2, H=4, T=48), 3
STAND_IN = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(c.n_embd, 3 * c.n_embd), nn.Linear(c.n_embd, c.n_embd)
        self.heads = c.n_head
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(c.n_embd, 4 * c.n_embd), nn.Linear(4 * c.n_embd, c.n_embd)
        self.gelu = nn.GELU()
    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn, self.mlp = Attention(c), MLP(c)
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd), wpe=nn.Embedding(c.block_size, c.n_embd),
            h=nn.ModuleList([Block(c) for _ in range(c.n_layer)]), ln_f=nn.LayerNorm(c.n_embd)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        print("a line on stdout, as nanoGPT has")
    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss
    def generate(self, idx, max_new_tokens, top_k):
        for _ in range(max_new_tokens):
            idx = torch.cat([idx, self(idx)[0][:, -1:].argmax(-1)], dim=1)
        return idx
"""


@pytest.fixture(scope="module")
def request_for(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    (folder / "model.py").write_text(STAND_IN)
    request = {"model": dataclasses.asdict(MODEL), "batch": B, "new_tokens": 24, "seconds": 1e-9}
    request |= {"weights": str(folder / "w"), "spawned": time.time(), "options": {}, "nanogpt": str(folder)}
    ours.write_weights(request)
    return request | {"compiled": False, "bf16": False}


@pytest.fixture(scope="module")
def our_training(request_for):
    return ours.train(request_for)


def shown(theirs: dict, reference: dict, task: str = "train") -> bool:
    records = [Record("S", task, OURS, 1, reference), Record("S", task, "peer", 1, theirs)]
    return [row.name for row in rows_of(records, {OURS: True, "peer": True})[0]] == [OURS, "peer"]


@pytest.mark.parametrize("name", peers.PEERS)
def test_logits(name, request_for):
    peer = peers.Peer(request_for | {"peer": name})
    ids = batch_ids(MODEL, B, 0)[0, :, :-1]
    with torch.no_grad():
        result = peer.net.eval()(torch.from_numpy(ids))
    theirs = (result[0] if name == "nanogpt" else result.logits).numpy()
    expected = mg.forward(ours.load_weights(request_for["weights"]), ids, MODEL)
    np.testing.assert_allclose(theirs, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", peers.PEERS)
def test_same_losses_over_nine_steps(name, request_for, our_training):
    """So gradients, clipping, AdamW and its decay are the same too."""
    result = peers.train(request_for | {"peer": name})
    np.testing.assert_allclose(result["losses"], our_training["losses"], rtol=0, atol=1e-4)
    assert len(result["losses"]) == 9 and shown(result, our_training)


def test_bfloat16_is_compared_in_float32(request_for, our_training):
    result = peers.train(request_for | {"peer": "transformers", "bf16": True})
    assert result["check_loss"] == pytest.approx(our_training["check_loss"], abs=1e-5)
    assert result["losses"][0] != pytest.approx(our_training["losses"][0], abs=1e-6)
    assert shown(result, our_training)


def without_a_bias(names):
    return names | {"transformer.h.1.attn.c_attn.bias": np.zeros(96, np.float32)}


def queries_for_keys(names):
    query, key, value = np.split(names["transformer.h.0.attn.c_attn.weight"], 3, axis=1)
    return names | {"transformer.h.0.attn.c_attn.weight": np.concatenate([key, query, value], axis=1)}


def transposed(names):
    return names | {"transformer.h.0.attn.c_proj.weight": names["transformer.h.0.attn.c_proj.weight"].T}


@pytest.mark.parametrize("wrong", [without_a_bias, queries_for_keys, transposed])
def test_a_wrong_weight_makes_the_row_vanish(wrong, request_for, our_training, monkeypatch):
    build, names = peers.PEERS["transformers"]
    monkeypatch.setitem(peers.PEERS, "transformers", (build, lambda *arguments: wrong(names(*arguments))))
    assert not shown(peers.train(request_for | {"peer": "transformers"}), our_training)


@pytest.mark.parametrize("name", peers.PEERS)
def test_same_greedy_text(name, request_for):
    reference = ours.decode(request_for)
    result = peers.decode(request_for | {"peer": name})
    assert result["ids"] == reference["ids"] and len(set(result["ids"])) > 4
    assert shown(result, reference, "decode")


def test_weights_that_do_not_fit(request_for, monkeypatch):
    build, names = peers.PEERS["transformers"]
    monkeypatch.setitem(
        peers.PEERS, "transformers", (build, lambda *a: {k: v for k, v in names(*a).items() if "ln_f" not in k})
    )
    with pytest.raises(ValueError, match=r"missing.*ln_f"):
        peers.Peer(request_for | {"peer": "transformers"})


def test_the_real_command(request_for, tmp_path):
    """Both peers in processes of their own, in one round."""
    command = [sys.executable, "-m", "minigpt_jax", "bench", "--configs", "S", "--rounds", "1", "--seconds", "0.05"]
    command += ["--rows", "eager", "--tasks", "train", "decode", "--nanogpt", request_for["nanogpt"]]
    env = os.environ | {"OMP_WAIT_POLICY": "passive"}  # the machine may be busy with other tests
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert result.returncode == 0, result.stderr
    for name in ("transformers, eager", "nanoGPT, eager"):
        rows = [line for line in result.stdout.splitlines() if line.startswith(f"| {name} ")]
        assert len(rows) == 2 and "40 of 40" in rows[1], result.stdout
    assert "left out" not in result.stdout and "OMP_WAIT_POLICY=passive" in result.stdout
