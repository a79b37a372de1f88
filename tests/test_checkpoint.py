"""Run directories: what is saved comes back bit for bit, and what does not fit or is damaged is said so.

States are made up, not trained: every leaf holds random numbers, shifted by the step, so that no two steps and no two
leaves can be taken for one another.
"""

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minigpt_jax as mg
from minigpt_jax.checkpoint import create_run, open_run
from minigpt_jax.data import CharTokenizer
from minigpt_jax.train import abstract_state

MODEL = mg.ModelConfig(vocab_size=7, d_model=32, n_layers=1, n_heads=2, d_ff=20, context_len=8)
CONFIG = mg.Config(MODEL, train=mg.TrainConfig(steps=100, keep_checkpoints=2))
LETTERS = CharTokenizer("abcdefg")


def state_at(step, config=CONFIG):
    """A state with other numbers in every leaf and at every step."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.full(leaf.shape, step, leaf.dtype)
        return jnp.asarray(rng.normal(size=leaf.shape) + step, leaf.dtype)

    return jax.tree.map(draw, abstract_state(config))


def assert_equal(a, b):
    """Bit for bit, with type and structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def new_run(path, *steps, config=CONFIG):
    run = create_run(path, config, LETTERS)
    for step in steps:
        run.save(state_at(step, config), "the text's hash")
    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints at 10 and 20; tests that change it take a copy."""
    path = tmp_path_factory.mktemp("saved") / "run"
    new_run(path, 10, 20)
    return path


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "run"))


# What is saved comes back.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_comes_back_bit_for_bit(dtype, tmp_path):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, param_dtype=dtype))
    new_run(tmp_path, 7, config=config)
    run = open_run(tmp_path)
    assert (run.config, run.tokenizer, run.steps()) == (config, LETTERS, [7])
    assert_equal(run.load_state("the text's hash"), state_at(7, config))
    params, step = run.load_params()
    assert step == 7
    assert_equal(params, state_at(7, config).params)


def test_the_newest_checkpoint_is_taken_and_old_ones_go(tmp_path):
    """By number: 9 is older than 10, though not in the order of names."""
    run = new_run(tmp_path, 8, 9, 10)
    assert run.steps() == [9, 10]
    assert run.load_params()[1] == 10
    more = dataclasses.replace(run, config=dataclasses.replace(CONFIG, train=mg.TrainConfig(keep_checkpoints=3)))
    more.save(state_at(11), "")
    assert more.steps() == [9, 10, 11]


def test_saving_a_step_twice_keeps_the_first(tmp_path):
    """At the end of training both the last periodic save and the final one ask for it."""
    run = new_run(tmp_path, 10)
    run.save(state_at(10), "the text's hash")
    assert run.steps() == [10]
    assert_equal(run.load_state("the text's hash"), state_at(10))


def test_a_run_can_be_moved_and_opened_by_a_relative_path(copied, tmp_path, monkeypatch):
    """No absolute path is written anywhere in it, neither by us nor by orbax."""
    moved = tmp_path / "elsewhere" / "moved run"
    moved.parent.mkdir()
    shutil.move(copied, moved)
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = open_run("moved run")
    assert_equal(run.load_state("the text's hash"), state_at(20))
    run.save(state_at(30), "the text's hash")
    assert_equal(open_run(moved).load_state("the text's hash"), state_at(30))


def test_an_existing_run_is_not_overwritten(copied):
    before = (copied / "config.yaml").read_bytes()
    with pytest.raises(mg.InputError, match="already holds a run") as caught:
        create_run(copied, dataclasses.replace(CONFIG, model=mg.ModelConfig()), LETTERS)
    assert str(copied) in str(caught.value) and (copied / "config.yaml").read_bytes() == before


def test_places_that_hold_no_run(tmp_path):
    with pytest.raises(mg.InputError, match="not a run directory"):
        open_run(tmp_path / "missing")
    with pytest.raises(mg.InputError, match="no readable checkpoint"):
        new_run(tmp_path / "untrained").load_params()
    (tmp_path / "file").write_text("")
    with pytest.raises(mg.InputError, match="can't write the run directory"):
        create_run(tmp_path / "file" / "run", CONFIG, LETTERS)


# Restoring into something else.


def edit_config(path, old, new):
    text = (path / "config.yaml").read_text()
    assert text.count(old) == 1
    (path / "config.yaml").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "phrases"),
    [
        (
            "d_model: 32",
            "d_model: 64",
            ["attention/key/kernel is float32[32, 32] in the checkpoint, float32[64, 64]", "more"],
        ),
        ("vocab_size: 7", "vocab_size: 8", ["embed/embedding is float32[7, 32] in the checkpoint, float32[8, 32]"]),
        ("tied: true", "tied: false", ["head/embedding_out is missing"]),
        ("norm: layernorm", "norm: rmsnorm", ["norm_final/bias is unknown"]),
        (
            "param_dtype: float32",
            "param_dtype: bfloat16",
            ["attention/key/kernel is float32[32, 32] in the checkpoint, bfloat16[32, 32]"],
        ),
        ("n_layers: 1", "n_layers: 2", ["block_1/attention/key/kernel is missing", "more"]),
    ],
    ids=["width", "vocabulary", "untied", "norm", "type", "layers"],
)
def test_a_config_that_does_not_fit_is_refused_with_both_shapes(old, new, phrases, copied):
    """flax#2436: names are checked, shapes are not, and the error comes later, far away. Names, shapes and types here.

    It must not be taken for damage either, and answered from an older checkpoint.
    """
    edit_config(copied, old, new)
    for load in (lambda run: run.load_params(), lambda run: run.load_state("the text's hash")):
        with pytest.raises(mg.InputError, match="20 does not match") as caught:
            load(open_run(copied))
        message = str(caught.value)
        assert all(phrase in message for phrase in phrases) and "\n" not in message


def test_a_renamed_leaf_is_named_twice(tmp_path):
    """As what is missing and as what is unknown."""
    state = state_at(10)
    state.params["norm_last"] = state.params.pop("norm_final")
    run = create_run(tmp_path, CONFIG, LETTERS)
    run.save(state, "")
    with pytest.raises(mg.InputError) as caught:
        run.load_params()
    message = str(caught.value)
    for phrase in ("norm_final/scale is missing", "norm_last/scale is unknown"):
        assert phrase in message


def test_another_tokenizer_is_refused(copied):
    """char-rnn's ids mean nothing without their vocabulary; one of the same size gives fluent nonsense."""
    shutil.copy(new_tokenizer_file(copied.parent, "abcdefh"), copied / "tokenizer.json")
    with pytest.raises(mg.InputError, match=r"tokenizer.json is not the one that checkpoint 20 was trained with"):
        open_run(copied).load_params()


def new_tokenizer_file(folder, letters):
    create_run(folder / "other", CONFIG, CharTokenizer(letters))
    return folder / "other" / "tokenizer.json"


def test_other_data_is_refused_for_training_but_not_for_reading(saved):
    run = open_run(saved)
    with pytest.raises(mg.InputError, match="was trained on other text") as caught:
        run.load_state("another hash")
    assert "the text's h" in str(caught.value) and "another hash" in str(caught.value)
    assert run.load_params()[1] == 20


# Damage.


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 255  # in the numbers, where the file holds any
    path.write_bytes(content)


DAMAGES = {
    "cut_by_a_byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "deleted": lambda path: path.unlink(),
    "a_byte_changed": change_a_byte,
}


def report_damage(saved, scratch):
    """For each kind of damage and each file of step 20: what `load_state` makes of it. Printed as JSON.

    Runs in a process of its own, where stderr is what a user would see: storage libraries report from their threads.
    """
    expected = {step: state_at(step) for step in (10, 20)}
    report = {name: {} for name in DAMAGES}
    for name, damage in DAMAGES.items():
        for file in sorted(path for path in Path(saved, "checkpoints", "20").rglob("*") if path.is_file()):
            path = Path(shutil.copytree(saved, Path(scratch, "run")))
            damage(path / file.relative_to(saved))
            try:
                state = open_run(path).load_state("the text's hash")
                assert_equal(state, expected[int(state.step)])
                outcome = int(state.step)
            except AssertionError:
                outcome = "other numbers"
            except Exception as error:
                outcome = f"{type(error).__name__}: {str(error)[:80]}"
            report[name][str(file.relative_to(saved))] = outcome
            shutil.rmtree(path)
    print(json.dumps(report))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(saved, tmp_path):
    """metaseq#53, allennlp#2129: a broken last checkpoint, and resume fails.

    Whatever file it is: the exact state of step 20, where the file does not matter, or else the exact one of step 10
    and one line that says so. Never other numbers, never a traceback.
    """
    code = "import sys, test_checkpoint; test_checkpoint.report_damage(*sys.argv[1:])"
    command = [sys.executable, "-c", code, saved, tmp_path]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300)
    outcomes = {
        f"{damage}: {file}": outcome
        for damage, files in json.loads(result.stdout).items()
        for file, outcome in files.items()
    }
    assert len(outcomes) > 10 * len(DAMAGES)
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in (10, 20)} == {}
    passed_over = list(outcomes.values()).count(10)
    assert passed_over > len(DAMAGES), "no damage was noticed"
    messages = result.stderr.splitlines()
    assert [line for line in messages if "checkpoints/20 can't be read" not in line] == []
    assert len(messages) == passed_over


def test_a_checkpoint_without_its_folder_of_parameters_is_passed_over(copied, capfd):
    shutil.rmtree(copied / "checkpoints" / "20" / "params")
    assert_equal(open_run(copied).load_state("the text's hash"), state_at(10))
    assert "checkpoints/20 can't be read" in capfd.readouterr().err


def test_training_goes_on_saving_after_a_fallback(copied):
    """The damaged checkpoint of step 20 must not stand in for the new one, nor keep step 15 from being saved."""
    (copied / "checkpoints" / "20" / "meta" / "metadata").unlink()
    run = open_run(copied)
    state = run.load_state("the text's hash")
    assert int(state.step) == 10
    run.start(10)
    for step in (15, 20, 25):
        run.save(state_at(step), "the text's hash")
        assert_equal(open_run(copied).load_state("the text's hash"), state_at(step))


def test_no_checkpoint_can_be_read(copied):
    for step in (10, 20):
        (copied / "checkpoints" / str(step) / "meta" / "metadata").unlink()
    with pytest.raises(mg.InputError, match="no readable checkpoint") as caught:
        open_run(copied).load_params()
    assert "\n" not in str(caught.value)


SAVE_FOR_EVER = """
import pickle, sys
from minigpt_jax.checkpoint import open_run

run, state = open_run(sys.argv[1]), pickle.load(open(sys.argv[2], "rb"))
step = 10
while True:
    step += 1
    run.save(state._replace(step=state.step + step), "the text's hash")
    print(step, flush=True)
"""


def unfinished(run):
    """What a save makes before the checkpoint has its name, a number."""
    return [path for path in (run.path / "checkpoints").iterdir() if not path.name.isdigit()]


def test_a_process_killed_while_saving_leaves_a_good_checkpoint(tmp_path):
    """tensorflow#14608: with SIGKILL, as soon as a save has begun or a little later. Then training goes on."""
    state = jax.device_get(state_at(0))
    (tmp_path / "state").write_bytes(pickle.dumps(state))
    runs, processes, left_behind = [], [], []
    for i in range(3):
        runs.append(new_run(tmp_path / f"run{i}"))
        command = [sys.executable, "-c", SAVE_FOR_EVER, runs[i].path, tmp_path / "state"]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path))
    for i, (run, process) in enumerate(zip(runs, processes, strict=True)):
        with process:
            for line in process.stdout:
                if int(line) >= 13:
                    break
            waited = time.monotonic()
            while not unfinished(run) and time.monotonic() < waited + 10:
                pass
            time.sleep(0.01 * i)  # a save takes some 0.05 s
            process.send_signal(signal.SIGKILL)
            last = max(int(line), *map(int, process.stdout.read().split()), 0)
        left_behind += unfinished(run)
        restored = open_run(run.path).load_state("the text's hash")
        # What was reported as saved is there; the next one may be, if its last rename was done.
        assert int(restored.step) in (last, last + 1)
        assert_equal(restored.params, state.params)
        assert_equal(restored.opt_state, state.opt_state)
        run.save(state_at(100), "the text's hash")
        assert_equal(open_run(run.path).load_state("the text's hash"), state_at(100))
    assert left_behind, "no kill came while a save was under way"


# The records of a run.


def test_records_after_the_resumed_step_are_dropped(copied):
    """They will be made again. A kill may have cut the last line short."""
    records = [{"kind": "train", "step": step, "loss": 1.0 / step} for step in range(1, 13)]
    records.insert(10, {"kind": "eval", "step": 10, "loss": 0.5})
    path = copied / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "train", "st')
    run = open_run(copied)
    assert run.metrics() == records
    run.start(10)
    assert run.metrics() == records[:11]
    assert path.read_text().endswith("}\n") and len(path.read_text().splitlines()) == 11
    assert not [name for name in os.listdir(copied) if name.startswith(".")], "temporary files are left"


def test_no_records_are_no_error(copied):
    run = open_run(copied)
    assert run.metrics() == []
    run.start(20)
    assert run.metrics() == []


def test_starting_again_keeps_changed_options(copied):
    """`minigpt train RUN --train.steps 200`: the next resume must know."""
    longer = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, steps=200))
    dataclasses.replace(open_run(copied), config=longer).start(20)
    assert open_run(copied).config == longer


# Several devices.

SAVE_ON_FOUR = """
import pickle, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from minigpt_jax.checkpoint import open_run

assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("data",))

def place(leaf):  # along the first axis that four divides, else everywhere
    axes = [i for i, size in enumerate(leaf.shape) if size % 4 == 0]
    spec = PartitionSpec(*[None] * axes[0], "data") if axes else PartitionSpec()
    return jax.device_put(leaf, NamedSharding(mesh, spec))

state = jax.tree.map(place, pickle.load(open(sys.argv[2], "rb")))
assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
open_run(sys.argv[1]).save(state, "the text's hash")
"""


def test_saved_on_four_devices_loaded_on_one(tmp_path):
    """orbax#648: the stored placement is rebuilt instead of the target's."""
    run = new_run(tmp_path / "run")
    (tmp_path / "state").write_bytes(pickle.dumps(jax.device_get(state_at(20))))
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SAVE_ON_FOUR, run.path, tmp_path / "state"]
    subprocess.run(command, check=True, env=environment, timeout=300)
    assert run.steps() == [20]
    restored = run.load_state("the text's hash")
    assert_equal(restored, state_at(20))
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(restored))
