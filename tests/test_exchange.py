"""Import, export and fine-tuning as a user runs them: folders in Hugging Face's layout, made here without torch."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import GPT2, noisy_params
from safetensors.numpy import load_file

import minigpt_jax as mg
from minigpt_jax.cli import main
from minigpt_jax.data import BPETokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")  # what is compared here is files, or far apart

COMMAND = [sys.executable, "-m", "minigpt_jax"]
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
LLAMA = mg.ModelConfig(
    vocab_size=270, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=24, context_len=4096, norm="rmsnorm",
    norm_eps=1e-6, ffn="swiglu", rope_pairs="half", ffn_bias=False, param_dtype="bfloat16",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return BPETokenizer.train([TEXT], 268)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer):
    """A folder with two checkpoints in Hugging Face's layout, a text, a config, and a run directory of each."""
    folder = tmp_path_factory.mktemp("exchange")
    for name, config in (("gpt2", GPT2), ("llama", LLAMA)):
        assert mg.save_pretrained(folder / name, noisy_params(config), config, tokenizer) == []
        assert main(["import", str(folder / name), str(folder / f"{name}-run")]) == 0
    (folder / "text.txt").write_text(TEXT)
    (folder / "tune.yaml").write_text(
        "model: {context_len: 8, dropout: 0.1}\n"
        f"data: {{corpus: text, path: {folder / 'text.txt'}}}\n"
        "train: {steps: 40, peak_lr: 3e-3, floor_lr: 3e-4, warmup_steps: 4, eval_every: 20, batch_size: 8}\n"
    )
    return folder


def told(capsys) -> str:
    """The one line of an error."""
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err, captured.err
    return captured.err


@pytest.mark.parametrize("name, config", [("gpt2", GPT2), ("llama", LLAMA)])
def test_an_imported_run_holds_the_same_weights(place, name, config):
    run = mg.open_run(place / f"{name}-run")
    params, step = run.load_params()
    assert step == 0 and run.config.model.tied
    expected = noisy_params(config)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert jax.tree.leaves(params)[0].dtype == jnp.dtype(config.param_dtype)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_export_of_an_import_is_the_same_file(place, tmp_path, name):
    assert main(["export", str(place / f"{name}-run"), str(tmp_path / "out")]) == 0
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / file).read_bytes() == (place / name / file).read_bytes(), file


@pytest.mark.slow
def test_the_usual_commands_read_an_imported_run(place, capsys):
    run = str(place / "gpt2-run")
    assert main(["sample", run, "--prompt", "the quick", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the quick")
    assert main(["sample", run, "--tokens", "5"]) == 0
    assert main(["lens", run, "--prompt", "the lazy dog"]) == 0
    assert "block_1/ffn" in capsys.readouterr().out
    assert main(["neighbours", run, "q"]) == 0
    assert main(["eval", run, "--text", str(place / "text.txt")]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["grads", run, "--text", str(place / "text.txt")]) == 0
    assert "head share" in capsys.readouterr().out


def losses(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"step +\d+ +loss ([\d.]+)", out)]


@pytest.mark.slow
@pytest.mark.parametrize("name, source", [("gpt2", "gpt2"), ("llama", "llama-run")])
def test_fine_tuning_lowers_the_loss(place, tmp_path, capsys, name, source):
    arguments = ["train", str(place / "tune.yaml"), "--init", str(place / source), "--run-dir", str(tmp_path / "tuned")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    measured = losses(out)
    assert re.search(r"step +0 +loss", out), "how good the weights are before training"
    assert f"weights and tokenizer of {place / source}, in windows of 8 tokens" in out
    assert measured[-1] < 0.8 * measured[0]
    run = mg.open_run(tmp_path / "tuned")
    assert run.config.window == 8 and run.config.model.dropout == 0.1
    assert run.config.model.context_len == {"gpt2": 32, "llama": 4096}[name]
    assert run.config.model.param_dtype == "float32"
    assert main(["export", str(tmp_path / "tuned"), str(tmp_path / "out")]) == 0
    params, config, tokenizer = mg.load_pretrained(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, params, run.load_params()[0])
    assert config.context_len == run.config.model.context_len
    ids = tokenizer.encode("the quick brown fox")
    np.testing.assert_array_equal(ids, run.tokenizer.encode("the quick brown fox"))
    if name == "gpt2":
        capsys.readouterr()
        assert main(["train", str(run.path), "--init", str(place / "gpt2"), "--train.steps", "42"]) == 2
        assert "goes on with its own weights; leave out --init" in told(capsys)
        assert main(["train", str(run.path), "--train.steps", "42"]) == 0
        assert "at step 40 of 42" in capsys.readouterr().out


def test_a_fine_tuning_that_is_killed_goes_on_from_the_weights(place, tmp_path):
    """Not from random ones, however early it dies."""
    run = tmp_path / "tuned"
    arguments = ["train", str(place / "tune.yaml"), "--init", str(place / "gpt2"), "--run-dir", str(run)]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--train.steps", "200000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ,
    )  # fmt: skip
    while not (run / "config.yaml").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    opened = mg.open_run(run)
    assert opened.steps()[0] == 0
    state = opened.load_state(mg.load_dataset(opened.config.data, 8, opened.tokenizer).text_sha256)
    if int(state.step) == 0:
        jax.tree.map(np.testing.assert_array_equal, state.params, noisy_params(GPT2))


def test_an_imported_run_is_not_trained_in_place(place, capsys):
    assert main(["train", str(place / "gpt2-run"), "--text", str(place / "text.txt")]) == 2
    assert "minigpt train CONFIG --init" in told(capsys)


def test_nothing_is_overwritten(place, tmp_path, capsys):
    assert main(["import", str(place / "gpt2"), str(place / "llama-run")]) == 2
    assert "already holds a run" in told(capsys)
    assert main(["export", str(place / "gpt2-run"), str(place / "llama")]) == 2
    assert "holds a model already" in told(capsys)
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    assert main(["import", str(place / "gpt2"), str(tmp_path / "half")]) == 2
    assert "cut short; delete it" in told(capsys)


def test_the_course_s_model_has_no_family(tmp_path, capsys):
    config = mg.ModelConfig()
    with pytest.raises(mg.InputError, match=r"no family of transformers has this model's options.*rope_pairs"):
        mg.save_pretrained(tmp_path / "x", mg.init(config, jax.random.key(0)), config)
    assert not (tmp_path / "x").exists()


def test_float16_becomes_float32(tmp_path, tokenizer):
    """AdamW's epsilon is 0 in float16, and float32 holds every value of it."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), noisy_params(GPT2))
    mg.save_pretrained(tmp_path / "half", params, GPT2, tokenizer)
    assert load_file(tmp_path / "half" / "model.safetensors")["transformer.wte.weight"].dtype == np.float16
    assert mg.load_pretrained(tmp_path / "half").config.param_dtype == "float16"
    assert main(["import", str(tmp_path / "half"), str(tmp_path / "run")]) == 0
    jax.tree.map(np.testing.assert_array_equal, mg.open_run(tmp_path / "run").load_params()[0], params)


def test_a_tokenizer_that_the_table_has_no_rows_for(place, tmp_path, tokenizer, capsys):
    small = mg.resize_vocab(noisy_params(GPT2), 260)
    config = mg.ModelConfig(**{**vars(GPT2), "vocab_size": 260})
    mg.save_pretrained(tmp_path / "small", small, config, tokenizer)
    assert main(["import", str(tmp_path / "small"), str(tmp_path / "run")]) == 2
    assert f"has {tokenizer.vocab_size} ids and the table 260 rows" in told(capsys)
    assert not (tmp_path / "run").exists()


def test_padded_rows_are_never_drawn(place, tokenizer):
    """The table has 270 rows and the tokenizer fewer ids: the rest stand for no token."""
    params, config, found = mg.load_pretrained(place / "gpt2")
    assert found.vocab_size == tokenizer.vocab_size < config.vocab_size
    loud = {**params, "embed": {"embedding": params["embed"]["embedding"].at[found.vocab_size :].multiply(100.0)}}
    ids = mg.generate(
        loud, [1, 2, 3], config, key=jax.random.key(0), max_new_tokens=20, vocab_limit=found.vocab_size
    )  # fmt: skip
    assert ids.max() < found.vocab_size
    free = mg.generate(loud, [1, 2, 3], config, key=jax.random.key(0), max_new_tokens=20)
    assert free.max() >= found.vocab_size, "or the test would show nothing"


def test_no_tokenizer(place, tmp_path, capsys):
    mg.save_gpt2(tmp_path / "bare", noisy_params(GPT2), GPT2)
    params, config = mg.load_gpt2(tmp_path / "bare")
    jax.tree.map(np.testing.assert_array_equal, params, noisy_params(GPT2))
    assert config == GPT2
    assert main(["import", str(tmp_path / "bare"), str(tmp_path / "run")]) == 2
    assert "has no tokenizer" in told(capsys)
    with pytest.raises(mg.InputError, match=r"no GPT-2's.*norm = 'rmsnorm'"):
        mg.save_gpt2(tmp_path / "llama", noisy_params(LLAMA), LLAMA)
    with pytest.raises(mg.InputError, match="model_type 'llama', not gpt2"):
        mg.load_gpt2(place / "llama")


def test_a_tokenizer_of_another_kind(place, tmp_path):
    """Said at once, before the weights are read; who wants the weights alone gets them."""
    mg.save_gpt2(tmp_path / "model", noisy_params(GPT2), GPT2)
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(mg.InputError, match=r"tokenizer\.model only; it needs tokenizer\.json"):
        mg.load_pretrained(tmp_path / "model")
    assert mg.load_gpt2(tmp_path / "model")[1] == GPT2


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["import", "nowhere", "run"], "nowhere is no folder"),
        (["train", "tune.yaml", "--init", "nowhere"], "nowhere is no folder"),
        (["train", "tune.yaml", "--init", "gpt2", "--model.d-model", "32"], "do not fit the config"),
        (["train", "tune.yaml", "--init", "gpt2", "--data.window", "64"], "window is 64; it must be at most"),
        (["train", "tune.yaml", "--init", "gpt2", "--data.tokenizer", "char"], "data.tokenizer is 'char'"),
        (["export", "gpt2", "out"], "gpt2 is not a run directory"),
    ],
)
def test_mistakes(place, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    assert main(arguments) == 2
    assert words in told(capsys)
    assert sorted(place.iterdir()) == before


def test_help_names_the_families(capsys):
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    assert "GPT-NeoX" in capsys.readouterr().out


def test_all_files_can_be_read_by_the_same_people(place):
    assert len({file.stat().st_mode for file in (place / "gpt2").iterdir()}) == 1


def test_config_json_says_what_transformers_reads(place):
    tree = json.loads((place / "llama" / "config.json").read_text())
    assert tree["architectures"] == ["LlamaForCausalLM"] and tree["tie_word_embeddings"] is True
    assert (tree["head_dim"], tree["num_key_value_heads"], tree["rms_norm_eps"]) == (8, 1, 1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_loads_what_was_fine_tuned(place, tmp_path, name):
    torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")
    tuned, out = tmp_path / "tuned", tmp_path / "out"
    few = ["--train.steps", "8", "--train.warmup-steps", "1"]
    assert main(["train", str(place / "tune.yaml"), "--init", str(place / name), "--run-dir", str(tuned), *few]) == 0
    assert main(["export", str(tuned), str(out)]) == 0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    run = mg.open_run(tuned)
    ids = run.tokenizer.encode("the lazy dog jumps over")
    assert transformers.AutoTokenizer.from_pretrained(out)("the lazy dog jumps over")["input_ids"] == ids.tolist()
    params, config = run.load_params()[0], run.config.model
    with torch.no_grad():
        expected = model.eval()(torch.tensor(ids[None], dtype=torch.long)).logits.numpy()
    # Logits of order 1 in float32, added up in another order.
    np.testing.assert_allclose(mg.forward(params, ids[None], config), expected, atol=1e-5 * max(1, expected.std()))
    assert (np.abs(params["embed"]["embedding"] - noisy_params(GPT2)["embed"]["embedding"]) > 1e-4).any()
