"""Parameters, bytes and FLOPs: published totals to the digit, closed forms, counts by hand; nothing is allocated."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import minigpt_jax as mg
from minigpt_jax.errors import InputError
from minigpt_jax.inspect import kv_cache_bytes, param_table

CONFIGS = {path.stem: path for path in sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))}


def model(name: str) -> mg.ModelConfig:
    return mg.load_config(CONFIGS[name]).model


def leaf_count(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


# Totals. Those with a released model's name are those of its weights.


@pytest.mark.parametrize(
    ("name", "total", "embedding", "other"),
    [
        ("minigpt", 103_680, 4_096, 107_776),
        ("minigpt_v512", 131_392, 32_768, 164_160),
        ("gpt2", 124_439_808, 38_597_376, 163_037_184),
        ("llama2_7b", 6_738_415_616, 131_072_000, 6_607_343_616),
        ("smollm2_135m", 134_515_008, 28_311_552, 162_826_560),
        ("llama3_2_1b", 1_235_814_400, 262_668_288, 1_498_482_688),
        ("llama3_2_3b", 3_212_749_824, 394_002_432, 3_606_752_256),
        ("qwen2_5_0_5b", 494_032_768, 136_134_656, 630_167_424),
        ("qwen3_0_6b", 596_049_920, 155_582_464, 751_632_384),
        ("gemma_2b", 2_506_172_416, 524_288_000, 3_030_460_416),
        ("pythia_160m", 162_322_944, 38_633_472, 123_689_472),
    ],
)
def test_totals_to_the_digit(name, total, embedding, other):
    table = param_table(model(name))
    assert (table.total, table.embedding, table.other_total) == (total, embedding, other)
    text = table.render()
    for number in (total, embedding, other, total - embedding):
        assert f"{number:,}" in text


def test_gpt2_s_table_is_31_percent():
    text = param_table(model("gpt2")).render()
    assert re.search(r"token table +38,597,376 +31\.0% of the total", text)
    assert "23.7% of the untied 163,037,184" in text


def test_llama_is_untied_and_says_what_tying_would_save():
    table = param_table(model("llama2_7b"))
    assert re.search(r"tying would save +131,072,000", table.render())
    assert [row.path for row in table.rows if row.shape == (32000, 4096)] == ["embed/embedding", "head/embedding_out"]


@pytest.mark.parametrize("V", [2, 10, 512])
@pytest.mark.parametrize("D", [8, 24])
@pytest.mark.parametrize("L", [1, 5])
@pytest.mark.parametrize("F", [None, 7])
def test_closed_form_of_the_course(V, D, L, F):
    """V D + L (4 D^2 + 2 D F + F + D + 4 D) + 2 D: attention, both matrices and biases of the FFN, the norms."""
    config = mg.ModelConfig(vocab_size=V, d_model=D, n_layers=L, n_heads=2, d_ff=F)
    F = 4 * D if F is None else F
    assert param_table(config).total == V * D + L * (4 * D**2 + 2 * D * F + F + D + 4 * D) + 2 * D


def test_ten_tokens_of_width_four_by_hand():
    """40 (table) + 4 * 16 (q, k, v, out) + (64 + 16) + (64 + 4) (FFN) + 2 * 8 + 8 (norms) = 276."""
    config = mg.ModelConfig(vocab_size=10, d_model=4, n_layers=1, n_heads=1, context_len=8)
    tied, untied = param_table(config), param_table(dataclasses.replace(config, tied=False))
    assert tied.total == 276
    assert tied.total - untied.total == -40
    assert (tied.other_total, untied.other_total) == (untied.total, tied.total)
    learned = dataclasses.replace(config, positions="learned", attention_bias=True)
    assert param_table(learned).total == 276 + 8 * 4 + 4 * 4


def test_wide_heads_and_small_leaves_by_hand():
    """D = 4, two query heads and one key head of K = 6: q 4 * 12, k and v 4 * 6 each, out 12 * 4, in all 144 where the
    square ones were 64. Biases of q, k, v 12 + 6 + 6, of out 4; two scales of 6."""
    config = mg.ModelConfig(vocab_size=10, d_model=4, n_layers=1, n_heads=2, n_kv_heads=1, d_head=6)
    options = {
        "d_head": ({}, 0),
        "qk_norm": ({"qk_norm": True}, 12),
        "all_biases": ({"attention_bias": True}, 28),
        "no_out_bias": ({"attention_bias": True, "out_bias": False}, 24),
        "out_bias": ({"out_bias": True}, 4),
        "nothing": ({"parallel_residual": True, "scale_embedding": True, "rope_fraction": 0.4, "rope_factor": 2.0}, 0),
    }
    for name, (others, more) in options.items():
        assert param_table(dataclasses.replace(config, **others)).total == 276 - 64 + 144 + more, name
    rms = dataclasses.replace(config, norm="rmsnorm", ffn_bias=False)
    assert param_table(dataclasses.replace(rms, norm_unit_offset=True)).total == param_table(rms).total
    # FLOPs: 2 for each of 144 + 128 weights of kernels and 40 of the head; scores and sums 4 T H K with T = 32.
    assert param_table(config).flops_per_token == 2 * (144 + 128 + 40) + 4 * 32 * 2 * 6
    assert kv_cache_bytes(config, batch=3, length=5) == 2 * 6 * 5 * 3 * 4


OPTIONS = [
    {},
    {"tied": False},
    {"positions": "learned", "attention_bias": True, "ffn": "gelu_tanh"},
    {"norm": "rmsnorm", "ffn": "swiglu", "ffn_bias": False, "n_kv_heads": 1},
    {"ffn": "geglu", "n_kv_heads": 2, "positions": "none"},
    {"param_dtype": "bfloat16", "dtype": "bfloat16"},
    {"vocab_size": 1, "context_len": 1},
    {"remat": True, "dropout": 0.1},
    {"d_head": 6, "qk_norm": True, "norm": "rmsnorm", "norm_unit_offset": True, "out_bias": True, "n_kv_heads": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "course")
def test_counts_are_those_of_a_real_init(options):
    config = mg.ModelConfig(**{"vocab_size": 11, "d_model": 16, "n_layers": 3, "n_heads": 4} | options)
    params, table = mg.init(config, jax.random.key(0)), param_table(config)
    assert table.total == leaf_count(params)
    assert table.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    paths = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree.leaves_with_path(params)}
    assert {row.path: (row.shape, row.bytes) for row in table.rows} == {
        p: (x.shape, x.nbytes) for p, x in paths.items()
    }
    assert len(table.rows) == len(paths)  # none twice


# The rows


def test_the_course_s_27_leaves():
    table = param_table(model("minigpt"))
    D, F, V = 64, 256, 64
    block = {
        **{f"attention/{name}/kernel": (D, D) for name in ("query", "key", "value", "out")},
        "ffn/up/kernel": (D, F), "ffn/up/bias": (F,), "ffn/down/kernel": (F, D), "ffn/down/bias": (D,),
        **{f"{norm}/{leaf}": (D,) for norm in ("norm_attention", "norm_ffn") for leaf in ("scale", "bias")},
    }  # fmt: skip
    expected = {"embed/embedding": (V, D), "norm_final/scale": (D,), "norm_final/bias": (D,)}
    expected |= {f"block_{i}/{path}": shape for i in range(2) for path, shape in block.items()}
    assert {row.path: row.shape for row in table.rows} == expected
    assert len(table.rows) == 27
    assert all(row.count == math.prod(row.shape) and row.bytes == 4 * row.count for row in table.rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_is_listed_once_with_its_uses(name):
    config = model(name)
    rows = param_table(config).rows
    tables = {row.path: row.used_by for row in rows if row.shape == (config.vocab_size, config.d_model)}
    embeddings = [row.path for row in rows if row.path.split("/")[-1] == "embedding"]
    assert embeddings == ["embed/embedding"]
    if config.tied:
        uses = {row.path: row.used_by for row in rows if row.used_by}
        assert uses == {"embed/embedding": "lookup, head"}
        assert "head" not in {row.path.split("/")[0] for row in rows}
    else:
        assert tables == {"embed/embedding": "lookup", "head/embedding_out": "head"}


def test_order_of_the_rows():
    table = param_table(mg.ModelConfig(n_layers=12, positions="learned", tied=False))
    first_seen = list(dict.fromkeys(row.path.split("/")[0] for row in table.rows))
    assert first_seen == ["embed", "positions", *[f"block_{i}" for i in range(12)], "norm_final", "head"]


# Rendering


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("every_leaf", [False, True])
def test_rendering_fits_100_columns(name, every_leaf):
    table = param_table(model(name))
    lines = table.render(every_leaf).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["path", "shape", "parameters", "bytes", "used", "by"]
    assert len([line for line in lines if line.startswith("embed/embedding")]) == 1
    assert str(table) == table.render()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("every_leaf", [False, True])
def test_the_printed_rows_add_up(name, every_leaf):
    table = param_table(model(name))
    rows = table.render(every_leaf).split("\n\n")[0].splitlines()[1:]
    numbers = [[int(n.replace(",", "")) for n in re.findall(r"(?<= )[\d,]+(?= )", row + " ")[-2:]] for row in rows]
    assert sum(count for count, _ in numbers) == table.total
    assert sum(size for _, size in numbers) == table.bytes
    assert len(rows) == len(table.rows) or not every_leaf


def test_deep_models_are_folded():
    text = param_table(model("gpt2")).render()
    assert "block_1 ... block_11" in text and "block_1/" not in text and text.count("\n") < 40
    whole = param_table(model("gpt2")).render(every_leaf=True)
    assert "block_11/ffn/up/kernel" in whole and "..." not in whole


# FLOPs and the cache


def test_flops_of_the_mini_gpt_by_hand():
    """2 (matmul weights + head) + scores and weighted sums, in full: 98,304 kernel weights, 4,096 of the head, and
    2 layers of 2 * 2 * 32 * 64. Biases, norms and softmax are left out."""
    kernels = 2 * (4 * 64 * 64 + 2 * 64 * 256)
    assert param_table(model("minigpt")).flops_per_token == 2 * (kernels + 64 * 64) + 2 * 4 * 32 * 64 == 221_184
    assert "221,184" in param_table(model("minigpt")).render()


def test_tying_saves_parameters_but_no_flops():
    config = mg.ModelConfig()
    untied = dataclasses.replace(config, tied=False)
    assert param_table(config).flops_per_token == param_table(untied).flops_per_token


def test_learned_positions_cost_no_flops_and_grouped_heads_fewer():
    config = mg.ModelConfig()
    flops = param_table(config).flops_per_token
    assert param_table(dataclasses.replace(config, positions="learned")).flops_per_token == flops
    one = param_table(dataclasses.replace(config, n_kv_heads=1)).flops_per_token
    assert flops - one == 2 * 2 * (2 * 64 * 48)  # 2 layers, key and value, 48 of 64 columns fewer


def test_flops_agree_with_the_compiler():
    """XLA's own count of one window is ours plus elementwise work, which shrinks beside the matmuls."""
    config = mg.ModelConfig(vocab_size=256, d_model=256, n_layers=1, n_heads=2, context_len=64)
    tokens = jax.ShapeDtypeStruct((1, 64), "int32")
    params = jax.eval_shape(lambda: mg.init(config, jax.random.key(0)))
    analysis = jax.jit(lambda p, t: mg.MiniGPT(config).apply({"params": p}, t)).lower(params, tokens).cost_analysis()
    counted = analysis["flops"] / 64
    assert 1.0 <= counted / param_table(config).flops_per_token < 1.1


def test_cache_bytes_of_the_course():
    """2 L H K S B bytes: 2 * 2 * 4 * 16 * 64 * 4 * 2 = 131,072 for L=2 H=4 K=16 S=64 B=4 in fp16."""
    config = mg.ModelConfig(dtype="float16")
    assert kv_cache_bytes(config, batch=4, length=64) == 131_072
    assert kv_cache_bytes(config, batch=1, length=1) == 512
    assert kv_cache_bytes(mg.ModelConfig(), batch=1, length=32) == 32 * 1024
    assert kv_cache_bytes(mg.ModelConfig(d_ff=1), batch=1, length=32) == 32 * 1024  # d_ff has no effect
    assert kv_cache_bytes(mg.ModelConfig(n_kv_heads=1), batch=1, length=32) == 8 * 1024
    assert kv_cache_bytes(mg.ModelConfig(dtype="float64"), batch=1, length=32) == 64 * 1024


@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 2}, {"dtype": "bfloat16"}, {"d_head": 24}], ids=str)
def test_cache_bytes_are_those_of_the_real_cache(options):
    from minigpt_jax.decoding import empty_cache

    config = mg.ModelConfig(**options)
    cache = empty_cache(config, 3, 40)
    assert kv_cache_bytes(config, batch=3, length=40) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


# Nothing is allocated


def test_nothing_is_allocated():
    """Llama 2 7B needs 13 GB in bfloat16. Its table comes from a process that can take 1 GB more than JAX's import,
    and counts the same with four devices."""
    program = """
import resource, sys, time
import jax
import minigpt_jax as mg
from minigpt_jax.inspect import param_table
param_table(mg.ModelConfig())
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
live = len(jax.live_arrays())
assert jax.device_count() == 4
start = time.process_time()
table = param_table(mg.load_config(sys.argv[1]).model)
text = table.render(every_leaf=True)
seconds = time.process_time() - start
assert len(jax.live_arrays()) == live
print(table.total, seconds)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc, which tells what a process has used; Linux, and so CI, has it")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    run = subprocess.run(
        [sys.executable, "-c", program, CONFIGS["llama2_7b"]], capture_output=True, text=True, timeout=120, env=env
    )
    assert run.returncode == 0, run.stderr
    total, seconds = run.stdout.split()
    assert int(total) == 6_738_415_616
    assert float(seconds) < 2  # of processor time: 32 blocks are traced, nothing is compiled


def test_shapes_too_large_for_any_machine():
    config = mg.ModelConfig(vocab_size=10**6, d_model=10**6, n_heads=10**3, n_layers=1)
    assert param_table(config).total > 10**13  # and not wrapped at 32 bits


def test_table_of_a_config_that_is_wrong_is_never_made():
    with pytest.raises(InputError):
        param_table(mg.ModelConfig(d_model=0))
