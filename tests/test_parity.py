"""The same weights in `transformers` give the same logits, loss and gradients. Needs the extra `parity`."""

import jax
import numpy as np
import pytest

import minigpt_jax as mg

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")

V, D, L, H, T = 67, 32, 2, 4, 24


def randomized(model):
    """Every weight random, biases and norm scales too: zeros and ones would hide a missing term."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "norm" in name or "ln_" in name else 0.0
            parameter.copy_(scale + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def gpt2():
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_positions=T, n_embd=D, n_layer=L, n_head=H, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )
    config = mg.ModelConfig(
        vocab_size=V,
        d_model=D,
        n_layers=L,
        n_heads=H,
        context_len=T,
        positions="learned",
        ffn="gelu_tanh",
        attention_bias=True,
    )

    def convert(w):
        """Names to arrays, of weights or gradients alike; Conv1D keeps (in, out) as we do."""
        tree = {
            "embed": {"embedding": w["transformer.wte.weight"]},
            "positions": {"table": w["transformer.wpe.weight"]},
            "norm_final": {"scale": w["transformer.ln_f.weight"], "bias": w["transformer.ln_f.bias"]},
        }
        for i in range(L):
            h = f"transformer.h.{i}"
            qkv = zip(
                ("query", "key", "value"),
                np.split(w[f"{h}.attn.c_attn.weight"], 3, axis=1),
                np.split(w[f"{h}.attn.c_attn.bias"], 3),
                strict=True,
            )
            attention = {name: {"kernel": kernel, "bias": bias} for name, kernel, bias in qkv}
            pairs = {"out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
            dense = {ours: {"kernel": w[f"{h}.{n}.weight"], "bias": w[f"{h}.{n}.bias"]} for ours, n in pairs.items()}
            tree[f"block_{i}"] = {
                "norm_attention": {"scale": w[f"{h}.ln_1.weight"], "bias": w[f"{h}.ln_1.bias"]},
                "attention": {**attention, "out": dense["out"]},
                "norm_ffn": {"scale": w[f"{h}.ln_2.weight"], "bias": w[f"{h}.ln_2.bias"]},
                "ffn": {"up": dense["up"], "down": dense["down"]},
            }
        return tree

    return model, config, convert


def llama(tied):
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=V,
            hidden_size=D,
            intermediate_size=48,
            num_hidden_layers=L,
            num_attention_heads=H,
            num_key_value_heads=2,
            max_position_embeddings=T,
            rms_norm_eps=1e-6,
            tie_word_embeddings=tied,
        )
    )
    config = mg.ModelConfig(
        vocab_size=V,
        d_model=D,
        n_layers=L,
        n_heads=H,
        n_kv_heads=2,
        d_ff=48,
        context_len=T,
        norm="rmsnorm",
        norm_eps=1e-6,
        ffn="swiglu",
        ffn_bias=False,
        rope_pairs="half",
        tied=tied,
    )

    def convert(w):
        tree = {
            "embed": {"embedding": w["model.embed_tokens.weight"]},
            "norm_final": {"scale": w["model.norm.weight"]},
        }
        if not tied:
            tree["head"] = {"embedding_out": w["lm_head.weight"]}
        for i in range(L):
            h = f"model.layers.{i}"
            attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
            ffn = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
            tree[f"block_{i}"] = {
                "norm_attention": {"scale": w[f"{h}.input_layernorm.weight"]},
                "attention": {k: {"kernel": w[f"{h}.self_attn.{n}.weight"].T} for k, n in attention.items()},
                "norm_ffn": {"scale": w[f"{h}.post_attention_layernorm.weight"]},
                "ffn": {k: {"kernel": w[f"{h}.mlp.{n}.weight"].T} for k, n in ffn.items()},
            }
        return tree

    return model, config, convert


@pytest.mark.parametrize("make", [gpt2, lambda: llama(True), lambda: llama(False)], ids=["gpt2", "llama-tied", "llama"])
def test_logits_loss_and_gradients(make):
    model, config, convert = make()
    randomized(model)
    params = convert({name: p.detach().numpy() for name, p in model.named_parameters()})
    shapes = jax.tree.map(np.shape, params)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, mg.init(config, jax.random.key(0)))

    ids = np.random.default_rng(0).integers(0, V, (3, T + 1))
    tokens, targets = torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:])
    theirs = model(tokens).logits
    ours, reference = mg.forward(params, ids[:, :-1], config), theirs.detach().numpy()
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-5 * np.abs(reference).max())

    loss = torch.nn.functional.cross_entropy(theirs.reshape(-1, V), targets.reshape(-1))
    loss.backward()
    value, grads = jax.value_and_grad(mg.loss)(params, mg.Batch(ids[:, :-1], ids[:, 1:]), config)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-6)
    expected = convert({name: p.grad.numpy() for name, p in model.named_parameters()})
    whole = np.sqrt(sum(float(np.sum(g**2)) for g in jax.tree.leaves(expected)))
    for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        # Of each leaf's norm, since single entries may cancel. The softmax does not feel a bias of the keys without
        # RoPE, so that gradient is rounding noise around zero: it is held against the whole gradient's norm.
        error = np.linalg.norm(ours - theirs)
        bound = max(1e-4 * np.linalg.norm(theirs), 1e-6 * whole)
        assert error < bound, f"{jax.tree_util.keystr(path)}: {error}"
