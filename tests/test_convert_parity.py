"""What `load_pretrained` reads computes what `transformers` computes, in every family; what `save_pretrained` writes is
what it read. Needs the extra `parity`.

Tolerances. In float32 both sides round: 1e-5 on logits whose largest is about 5 is 2e-6 of it, 17 units in the last
place after some 20 sums of 32 products. In float64 the same arithmetic has 1e-16 instead of 6e-8, so 1e-10 leaves no
room for a wrong constant, a wrong epsilon, or a float32 step on the way.
"""

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
import raw_safetensors as raw

import minigpt_jax as mg
from minigpt_jax.trees import leaf_paths

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("quick_compilation")]
torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")
import hf_models as hf  # noqa: E402  (needs torch)

B, T, NEW = 3, 24, 64


class Case(NamedTuple):
    variant: str
    model: Any
    folder: Any
    params: dict
    config: mg.ModelConfig
    ids: np.ndarray
    """(B, T + 1): tokens and targets."""

    @property
    def batch(self) -> mg.Batch:
        return mg.Batch(self.ids[:, :-1], self.ids[:, 1:])


@pytest.fixture(scope="module", params=hf.VARIANTS)
def case(request, tmp_path_factory):
    model = hf.model_of(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "theirs"
    model.save_pretrained(folder)
    params, config, tokenizer = mg.load_pretrained(folder)
    assert tokenizer is None
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, mg.init(config, jax.random.key(0)))
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (B, T + 1))
    return Case(request.param, model, folder, params, config, ids)


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


@functools.partial(jax.jit, static_argnames="config")
def loss_and_grads(params, batch, config):
    return jax.value_and_grad(mg.loss)(params, batch, config)


def in_our_layout(folder, model, values: dict) -> dict:
    """Float64 `values` by the model's parameter names, such as gradients, as a tree like our params: the converter
    only renames, splits and transposes. Files hold float32, so they are sent in two: roundings, and what those leave.
    """
    rounded = {name: value.detach().to(torch.float32) for name, value in values.items()}
    rest = {name: (value.detach() - rounded[name]).to(torch.float32) for name, value in values.items()}
    trees = [
        mg.load_pretrained(hf.save_with(folder / part, model, tensors))[0]
        for part, tensors in (("rounded", rounded), ("rest", rest))
    ]
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) + np.asarray(b, np.float64), *trees)


def to_float64(params):
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params)


def assert_same_gradients(ours, theirs, relative: float, noise: float):
    whole = np.sqrt(sum(float(np.sum(g**2)) for g in jax.tree.leaves(theirs)))
    ours, theirs = leaf_paths(ours), leaf_paths(theirs)
    assert ours.keys() == theirs.keys()
    for path, expected in theirs.items():
        # Of each leaf's norm, since single entries may cancel. The softmax does not feel a bias of the keys without
        # RoPE, so that gradient is rounding noise around zero: `noise` is its share of the whole gradient's norm.
        error, norm = np.linalg.norm(np.asarray(ours[path], np.float64) - expected), np.linalg.norm(expected)
        assert error <= max(relative * norm, noise * whole), f"{path}: {error:.3g} of {norm:.3g}"


def test_float32_logits_loss_and_gradients(case, tmp_path):
    tokens, targets = torch.tensor(case.batch.tokens), torch.tensor(case.batch.targets)
    theirs = case.model(tokens).logits
    ours = mg.forward(case.params, case.batch.tokens, case.config)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-5)
    assert 1 < theirs.abs().max() < 10  # what 1e-5 is held against

    case.model.zero_grad()
    loss = cross_entropy(theirs, targets)
    loss.backward()
    value, grads = loss_and_grads(case.params, case.batch, case.config)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-6)
    named = {name: p.grad.double() for name, p in case.model.named_parameters()}
    assert_same_gradients(grads, in_our_layout(tmp_path, case.model, named), relative=1e-4, noise=1e-6)


def test_float64_logits_loss_and_gradients(case, tmp_path, x64):
    params, config = to_float64(case.params), models.float64(case.config)
    tokens, targets = torch.tensor(case.batch.tokens), torch.tensor(case.batch.targets)
    with hf.float32_means_float64():
        double = hf.double_of(case.model)
        theirs = double(tokens).logits
        loss = cross_entropy(theirs, targets)
        loss.backward()
    ours = mg.forward(params, case.batch.tokens, config)
    assert ours.dtype == np.float64 and theirs.dtype == torch.float64
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-10)
    value, grads = loss_and_grads(params, case.batch, config)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-12)
    named = {name: p.grad for name, p in double.named_parameters()}
    assert_same_gradients(grads, in_our_layout(tmp_path, double, named), relative=1e-10, noise=1e-12)


def test_greedy_continuation(case):
    prompts = case.ids[:2, :8]
    theirs = case.model.generate(torch.tensor(prompts), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)
    theirs = theirs[:, prompts.shape[1] :].numpy()
    ours = mg.generate(
        case.params,
        prompts,
        case.config,
        key=jax.random.key(0),
        max_new_tokens=NEW,
        sampling=mg.Sampling(temperature=0),
    )
    assert theirs.shape == (2, NEW) and len(np.unique(theirs)) >= 5  # a loop of two tokens would show little
    np.testing.assert_array_equal(ours, theirs)


def test_adamw_steps(case, tmp_path, x64):
    """Three updates, since the first one's direction is the gradient's sign whatever the betas are. In float64: AdamW
    divides a gradient by its own size, so where it is float32 noise around zero the update would be noise too."""
    steps = 3
    train = mg.TrainConfig(
        steps=8, peak_lr=1e-2, floor_lr=1e-2, warmup_steps=2, beta1=0.8, beta2=0.9, weight_decay=0.3, clip_norm=None
    )
    params, config = to_float64(case.params), models.float64(case.config)
    optimizer = mg.make_optimizer(train)
    opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(steps):
        _, grads = loss_and_grads(params, case.batch, config)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)

    tokens, targets = torch.tensor(case.batch.tokens), torch.tensor(case.batch.targets)
    with hf.float32_means_float64():
        double = hf.double_of(case.model)
        decayed = [p for p in double.parameters() if p.ndim == 2]  # matrices and tables
        rest = [p for p in double.parameters() if p.ndim == 1]  # biases and scales
        groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, betas=(train.beta1, train.beta2), eps=train.adam_eps)
        for step in range(steps):
            for group in adamw.param_groups:
                group["lr"] = train.peak_lr * min(1, (step + 1) / train.warmup_steps)
            adamw.zero_grad()
            cross_entropy(double(tokens).logits, targets).backward()
            adamw.step()
    ours, theirs = leaf_paths(params), leaf_paths(in_our_layout(tmp_path, double, dict(double.named_parameters())))
    before = leaf_paths(case.params)
    for path, expected in theirs.items():
        # Three updates of up to 1e-2. Where a gradient is about epsilon = 1e-8 or less, AdamW makes 1e6 times as much
        # of its rounding after the first update, 3e-8 at a few places: 1e-6 is 30 times that.
        np.testing.assert_allclose(ours[path], expected, rtol=0, atol=1e-6, err_msg=path)
        assert path.endswith("key/bias") or np.abs(expected - np.asarray(before[path])).max() > 1e-3, path


def test_round_trip(case, tmp_path):
    ours = tmp_path / "ours"
    mg.save_pretrained(ours, case.params, case.config, None)
    assert raw.read_folder(ours) == raw.read_folder(case.folder)
    with hf.logged_warnings() as warnings:
        again, info = transformers.AutoModelForCausalLM.from_pretrained(
            ours, output_loading_info=True, attn_implementation="eager"
        )
    assert not warnings
    assert not any(info.values()), info  # missing, unexpected, mismatched keys, and errors
    assert type(again) is type(case.model)
    tokens = torch.tensor(case.batch.tokens)
    torch.testing.assert_close(again(tokens).logits, case.model(tokens).logits, rtol=0, atol=0)  # the same weights
    params, config, _ = mg.load_pretrained(ours)
    assert config == case.config
    jax.tree.map(np.testing.assert_array_equal, params, case.params)
    assert json.loads((ours / "config.json").read_text())["architectures"] == [type(case.model).__name__]


def test_a_wrong_name_would_show(tmp_path):
    """What the round trip looks at, warnings and loading info, does tell of a tensor of a wrong name."""
    model = hf.model_of("llama")
    values = dict(model.named_parameters())
    values["model.layers.0.mlp.wrong.weight"] = values.pop("model.layers.0.mlp.up_proj.weight")
    folder = hf.save_tensors(tmp_path / "wrong", model, values)
    with hf.logged_warnings() as warnings:
        _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert warnings and info["missing_keys"] and info["unexpected_keys"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "qwen3", "gemma", "gpt_neox"])
def test_half_precision_round_trips_to_the_byte(variant, dtype, tmp_path):
    model = hf.model_of(variant).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs")
    params, config, _ = mg.load_pretrained(tmp_path / "theirs")
    mg.save_pretrained(tmp_path / "ours", params, config, None)
    theirs = raw.read_folder(tmp_path / "theirs")
    assert {kind for kind, _, _ in theirs.values()} == {{"bfloat16": "BF16", "float16": "F16"}[dtype]}
    assert raw.read_folder(tmp_path / "ours") == theirs
    with hf.logged_warnings() as warnings:
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert not warnings and again.dtype == model.dtype


@pytest.mark.parametrize("variant", ["gpt2", "llama-tied", "gpt_neox"])
def test_shards(variant, tmp_path):
    model = hf.model_of(variant)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    one, many = mg.load_pretrained(tmp_path / "one"), mg.load_pretrained(tmp_path / "many")
    assert one[1] == many[1]
    jax.tree.map(np.testing.assert_array_equal, one[0], many[0])


@pytest.mark.parametrize("variant", ["gpt2", "gpt2-untied"])
def test_gpt2_names_with_and_without_prefix(variant, tmp_path):
    """GPT-2's released file has no `transformer.` before its names; what `transformers` writes has."""
    model = hf.model_of(variant)
    values = {name.removeprefix("transformer."): value for name, value in model.named_parameters()}
    assert any(name.startswith("h.0.") for name in values)
    for i in range(model.config.n_layer):  # what the released file holds besides: no weights
        values[f"h.{i}.attn.bias"] = torch.tril(torch.ones(96, 96)).view(1, 1, 96, 96)
    short = mg.load_pretrained(hf.save_tensors(tmp_path / "short", model, values))
    model.save_pretrained(tmp_path / "long")
    long = mg.load_pretrained(tmp_path / "long")
    assert short[1] == long[1]
    jax.tree.map(np.testing.assert_array_equal, short[0], long[0])
    params, config = mg.load_gpt2(tmp_path / "short")
    assert config == long[1]
    mg.save_gpt2(tmp_path / "saved", params, config)
    with hf.logged_warnings() as warnings:
        again, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not warnings and not any(info.values())
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


SIZES = {
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
    "gpt_neox": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
}
LLAMA_SIZES = (*SIZES["gpt_neox"], "num_key_value_heads", "max_position_embeddings")


@pytest.mark.parametrize("variant", ["gpt2", "llama", "qwen2", "qwen3", "gemma", "gpt_neox"])
def test_a_missing_field_has_their_default(variant, tmp_path):
    """Released files leave out what was no option when they were made. `transformers` writes every field out."""
    sizes = {name: hf.VARIANTS[variant][1][name] for name in SIZES.get(variant, LLAMA_SIZES)}
    sizes |= {"head_dim": 12} if variant in ("qwen3", "gemma") else {}
    full = getattr(transformers, f"{hf.VARIANTS[variant][0]}Config")(**sizes)
    model = hf.randomized(hf.empty_model(full))
    model.save_pretrained(tmp_path / "full")
    model.save_pretrained(tmp_path / "short")
    (tmp_path / "short/config.json").write_text(json.dumps({"model_type": variant, **sizes}))
    written = json.loads((tmp_path / "full/config.json").read_text())
    assert len(written) > len(sizes) + 8
    params, config, _ = mg.load_pretrained(tmp_path / "short")
    assert config == mg.load_pretrained(tmp_path / "full")[1]
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (1, 8))
    theirs = model(torch.tensor(tokens)).logits.detach().numpy()
    # Of the largest logit: at the default sizes of epsilon the norms pass rounding on undamped.
    np.testing.assert_allclose(mg.forward(params, tokens, config), theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_gemma_calls_the_tanh_form_gelu(tmp_path):
    """Gemma's released config says hidden_act gelu, and means GELU's tanh form: `transformers` reads it so."""
    hf.model_of("gemma").save_pretrained(tmp_path / "new")
    hf.model_of("gemma").save_pretrained(tmp_path / "old")
    hf.edit_config(tmp_path / "old", hidden_act="gelu")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "old").hidden_act == "gelu_pytorch_tanh"
    assert mg.load_pretrained(tmp_path / "old")[1] == mg.load_pretrained(tmp_path / "new")[1]


@pytest.mark.parametrize("variant", ["llama-tied", "llama-llama3", "qwen3", "gemma", "gpt_neox"])
def test_rope_fields_of_older_files(variant, tmp_path):
    """`rope_parameters` are new in transformers 5; released files have rope_theta, rope_scaling, and NeoX its own."""
    hf.model_of(variant).save_pretrained(tmp_path / "new")
    hf.model_of(variant).save_pretrained(tmp_path / "old")
    rope = json.loads((tmp_path / "old/config.json").read_text())["rope_parameters"]
    fields = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if variant == "gpt_neox":
        fields = {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    if variant == "llama-llama3":
        fields["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    hf.edit_config(tmp_path / "old", drop=("rope_parameters",), **fields)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "old").rope_parameters == rope
    config = mg.load_pretrained(tmp_path / "old")[1]
    assert config == mg.load_pretrained(tmp_path / "new")[1]
    assert config.rope_base == rope["rope_theta"]
