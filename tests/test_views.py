"""The commands that look inside a run: what they print, what their JSON says, their pictures, their mistakes.

The numbers themselves have tests of their own; here the JSON is checked against functions called beside the command.
"""

import json
import re
import shutil
import struct
import subprocess
import sys

import jax
import numpy as np
import pytest

import minigpt_jax as mg
from minigpt_jax.cli import main
from minigpt_jax.data import load_dataset
from minigpt_jax.inspect.geometry import all_neighbours

pytestmark = pytest.mark.usefixtures(
    "quick_compilation"
)  # in this process; those that tests start are as users have them

CONFIG = """
model: {vocab_size: 40, d_model: 16, n_layers: 2, n_heads: 2, d_ff: 24, context_len: 8}
data: {corpus: text, path: text.txt}
train: {steps: 24, batch_size: 4, peak_lr: 1e-2, warmup_steps: 4, eval_every: 8, checkpoint_every: 0, inspect_every: 8}
"""
WORDS = "the quick brown fox jumps over a lazy dog & <b>sleeps</b>".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a trained run `run`, the text it was trained on, and an untied run `wide`."""
    folder = tmp_path_factory.mktemp("views")
    draw = np.random.default_rng(0).choice
    (folder / "text.txt").write_text("\n".join(" ".join(draw(WORDS, 8)) for _ in range(80)), encoding="utf-8")
    (folder / "config.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "config.yaml", "--run-dir", "run"]) == 0
        untied = ["--model.no-tied", "--train.inspect-every", "0", "--train.steps", "1"]
        assert main(["train", "config.yaml", "--run-dir", "wide", *untied]) == 0
    return folder


@pytest.fixture
def minigpt(folder, monkeypatch, capsys):
    """The command in that folder: `minigpt(*arguments)` -> stdout; with code=2 the one line on stderr."""
    monkeypatch.chdir(folder)

    def run(*arguments, code=0):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == code
        captured = capsys.readouterr()
        if code == 0:
            return captured.out
        assert captured.out == "" and captured.err.count("\n") == 1, captured
        return captured.err.removeprefix("minigpt: ").rstrip()

    return run


@pytest.fixture(scope="module")
def loaded(folder):
    """run, params, dataset, texts: what the commands look at."""
    run = mg.open_run(folder / "run")
    params, step = run.load_params()
    assert step == 24
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        dataset = load_dataset(run.config.data, run.config.model.context_len, run.tokenizer)
    return run, params, dataset, [run.tokenizer.decode([i]) for i in range(run.tokenizer.vocab_size)]


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82"), "a whole PNG"
    return struct.unpack(">II", data[16:24])


def in_100_columns(text):
    assert max(map(len, text.splitlines())) <= 100, text
    return text


# grads


def test_grads_prints_every_norm_by_name_the_rows_and_the_leaves(minigpt):
    out = in_100_columns(minigpt("grads", "run", "--rows", "3"))
    assert all(f"\n{norm} " in out for norm in ("L2", "L2 squared", "L1"))
    for words in ("step 24, ", "held-out tokens", "lookup part + head part", "cosine of the two parts", "of 40"):
        assert words in out
    assert re.search(r"\.\.\. and 2\d more", out) and "softmax alone" not in minigpt("grads", "run", "--rows", "0")
    assert "embed/embedding" in out and "block_1/ffn/down/bias" in out


def test_grads_json_says_what_the_functions_say(minigpt, loaded, tmp_path):
    run, params, dataset, texts = loaded
    minigpt("grads", "run", "--json", tmp_path / "g.json")
    data = json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))
    model = run.config.model
    batch = next(dataset.val.eval_batches(256, 256))  # 2,048 tokens of 8
    split = mg.tied_gradient(params, batch, model)
    expected = mg.tied_stats(split)
    assert data["step"] == 24 and data["stats"].keys() == expected.keys()
    for name, value in expected.items():  # compiled differently: float32 rounding of sums
        assert data["stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    table = {record["id"]: record for record in data["tokens"]}
    assert len(table) == len(texts) and all(table[i]["text"] == texts[i] for i in table)
    assert sum(record["targets"] for record in table.values()) == batch.mask.sum()
    assert len(data["leaves"]) == len(mg.tree_report(params).records)


def test_grads_of_another_text(minigpt, tmp_path):
    (tmp_path / "other.txt").write_text("the lazy fox", encoding="utf-8")
    out = minigpt("grads", "run", "--text", tmp_path / "other.txt")
    assert "11 tokens of" in out and "softmax alone" in out, "most characters do not occur in it"


# lens


def test_lens_prints_means_and_the_grid(minigpt):
    out = in_100_columns(minigpt("lens", "run", "--prompt", "the quick brown fox " * 4))
    rows = [line.split()[0] for line in out.splitlines() if line]
    assert rows.count("embed") >= 2 and rows.count("block_1/ffn") >= 2 and "target" in rows
    assert "block_0/attention" not in out and "block_0/attention" in minigpt(
        "lens", "run", "--prompt", "the", "--inside"
    )
    one = in_100_columns(minigpt("lens", "run", "--prompt", "the fox", "--layer", "block_0/ffn"))
    assert "'t'" in one and "block_0/ffn: rank of the target" in one


def test_lens_json_says_what_the_function_says(minigpt, loaded):
    run, params, _, texts = loaded
    data = json.loads(minigpt("lens", "run", "--prompt", "the <b>", "--top-k", "3", "--json", "-"))
    ids = run.tokenizer.encode("the <b>")
    table = mg.lens_table(params, ids, run.config.model, top_k=3, vocab_limit=len(texts))
    assert data["ids"] == ids.tolist() and data["targets"] == [*ids[1:].tolist(), None]
    assert data["points"] == ["embed", "block_0/ffn", "block_1/ffn"] and data["texts"] == texts
    for name in ("top_ids", "top_probs", "entropy", "kl", "rank_input"):
        np.testing.assert_allclose(data[name], getattr(table, name), rtol=1e-6, err_msg=name)
    assert [row[-1] for row in data["rank_target"]] == [None] * 3
    assert np.max(data["top_ids"]) < len(texts), "rows without a token are never shown"


@pytest.mark.slow
def test_a_tuned_lens_is_trained_once_and_kept_beside_the_run(minigpt, folder, capsys):
    def tuned(*options):
        assert main(["lens", "run", "--prompt", "the", "--tuned", *options]) == 0
        return capsys.readouterr()

    minigpt("lens", "run", "--prompt", "the")
    first = tuned("--tuned-steps", "30")
    assert "through its probe" in first.err and "tuned lens of 3 tokens" in first.out
    saved = (folder / "run/tuned_lens.safetensors").read_bytes()
    again = tuned()
    assert again.err == "" and again.out == first.out
    assert (folder / "run/tuned_lens.safetensors").read_bytes() == saved
    probes, _ = mg.load_probes(folder / "run/tuned_lens.safetensors")
    other = mg.init(mg.open_run(folder / "run").config.model, jax.random.key(5))  # the same step, other parameters
    mg.save_probes(probes, folder / "run/tuned_lens.safetensors", other)
    minigpt("report", "run", "--out", "r.html")
    assert any("of another model" in note for note in page_data(folder / "r.html")["notes"])
    assert "of another model; training new ones" in tuned().err
    (folder / "run/tuned_lens.safetensors").write_bytes(saved[:50])
    minigpt("report", "run", "--out", "r.html")
    assert any("holds no probes" in note for note in page_data(folder / "r.html")["notes"])
    assert "holds no probes of a tuned lens" in tuned().err
    text = (folder / "text.txt").read_text(encoding="utf-8")
    (folder / "text.txt").write_text(text[::-1], encoding="utf-8")
    try:
        changed = minigpt("lens", "run", "--prompt", "the", "--tuned", "--tuned-steps", "2", code=2)
    finally:
        (folder / "text.txt").write_text(text, encoding="utf-8")
    assert "was trained on other text" in changed


# neighbours


def test_neighbours(minigpt, loaded, tmp_path):
    _, params, _, texts = loaded
    token = texts.index("q")
    out = in_100_columns(minigpt("neighbours", "run", "q", "--count", "4", "--json", tmp_path / "n.json"))
    data = json.loads((tmp_path / "n.json").read_text(encoding="utf-8"))
    ids, cosines = all_neighbours(params, 4, len(texts), [token])
    assert [near["id"] for near in data["neighbours"]] == ids[0].tolist() and data["id"] == token
    np.testing.assert_allclose([near["cosine"] for near in data["neighbours"]], cosines[0], rtol=1e-6)
    assert [line.split()[0] for line in out.splitlines() if line.startswith("'")][:4] == [
        repr(texts[i]) for i in ids[0] if texts[i] != " "
    ] or " " in [texts[i] for i in ids[0]]
    assert minigpt("neighbours", "run", f"#{token}", "--count", "4") == out, "by id"


# Pictures


@pytest.mark.parametrize(
    ("command", "least"),
    [
        (["grads", "run"], (1000, 400)),
        (
            ["lens", "run", "--prompt", "the quick brown fox & <b>jumps</b> over a $lazy$ dog".replace("$", "")],
            (1200, 300),
        ),
        (["neighbours", "run", "<", "--count", "5"], (900, 300)),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)
def test_pictures(minigpt, tmp_path, command, least):
    minigpt(*command, "--plot", tmp_path / "new/folder/p.png")
    width, height = png_size(tmp_path / "new/folder/p.png")
    assert width >= least[0] and height >= least[1]
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["p.png"], "nothing half written is left"


# The page


def page_data(path):
    html = path.read_text(encoding="utf-8")
    return json.loads(html.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_report_holds_what_the_run_holds(minigpt, folder, loaded):
    run, params, dataset, texts = loaded
    out = minigpt("report", "run", "--prompt", "the <b>")
    assert "run/report.html" in out
    data = page_data(folder / "run/report.html")
    records = run.metrics()
    assert (
        data["texts"] == texts
        and data["step"] == 24
        and data["params"]["total"] == mg.param_table(run.config.model).total
    )
    assert data["loss"]["train"] == [[r["step"], r["loss"]] for r in records if r["kind"] == "train"]
    assert data["loss"]["val"] == [[r["step"], r["loss"]] for r in records if r["kind"] == "eval"]
    assert [r["step"] for r in data["tied"]] == [1, 2, 4, 8, 16, 24]
    assert data["lens"]["prompt"] == "the <b>" and len(data["lens"]["kl"]) == 3
    counts = np.bincount(dataset.train.tokens[:-1], minlength=len(texts))  # the last one is a target only
    assert {t["id"]: t["train_count"] for t in data["tokens"]} == dict(enumerate(counts.tolist()))
    norms = np.linalg.norm(np.asarray(params["embed"]["embedding"], np.float64), axis=1)
    for token in data["tokens"]:
        assert token["row_norm"] == pytest.approx(norms[token["id"]], rel=1e-6)  # float32
    assert data["neighbours"]["of"] == list(range(len(texts))) and len(data["singular_values"]) == 16


def test_report_without_what_is_missing(minigpt, folder, tmp_path):
    """Text gone, no metrics, an untied model: a page all the same, and notes that say what it lacks."""
    shutil.copytree(folder / "run", tmp_path / "moved")
    (tmp_path / "moved/metrics.jsonl").unlink()
    (folder / "text.txt").rename(folder / "away.txt")
    try:
        minigpt("report", tmp_path / "moved")
    finally:
        (folder / "away.txt").rename(folder / "text.txt")
    data = page_data(tmp_path / "moved/report.html")
    assert not {"loss", "gradient", "tokens"} & data.keys() and data["tied"] is None
    assert any("without gradient and frequencies" in note for note in data["notes"])
    minigpt("report", "wide", "--out", tmp_path / "wide.html")
    wide = page_data(tmp_path / "wide.html")
    assert "gradient" not in wide and wide["lens"]["kl"] and wide["consistency"]["share"] <= 1


@pytest.mark.slow
def test_report_of_the_verb_grammar(minigpt, tmp_path):
    """Rows of their own instead of one text: the prompt is the first of them."""
    shape = ["--model.d-model", "8", "--model.n-layers", "1", "--model.n-heads", "1", "--model.context-len", "32"]
    data = ["--data.corpus", "verbs_en", "--data.tokenizer", "word", "--data.path", "None", "--model.vocab-size", "64"]
    minigpt("train", "config.yaml", "--run-dir", "verbs", "--train.steps", "4", *data, *shape)
    minigpt("report", "verbs", "--out", tmp_path / "v.html")
    page = page_data(tmp_path / "v.html")
    texts = [page["texts"][i] for i in page["lens"]["ids"]]
    assert texts[0] == "<bos>" and "<pad>" not in texts and len(texts) > 2
    assert {t["text"]: t["train_count"] for t in page["tokens"]}["he"] > 0


# Mistakes: one line, code 2, before anything is computed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lens", "run"], ["--prompt"]),
        (["lens", "run", "--prompt", ""], ["the prompt is empty"]),
        (["lens", "run", "--prompt", "Zoë"], ["Z", "ë"]),
        (["lens", "run", "--prompt", "the", "--layer", "block_7"], ["block_7", "embed, block_0/ffn, block_1/ffn"]),
        (["lens", "run", "--prompt", "the", "--top-k", "0"], ["top_k is 0"]),
        (["lens", "run", "--prompt", "the", "--tuned", "--tuned-steps", "0"], ["steps is 0"]),
        (["lens", "nowhere", "--prompt", "the"], ["nowhere is not a run directory"]),
        (["lens", "run", "--prompt", "the", "--tuned-steps", "5"], ["give --tuned"]),
        (["report", "run", "--prompt", ""], ["the prompt is empty"]),
        (["report", "run", "--out", "."], ["is a folder"]),
        (["grads", "run", "--json", "."], ["is a folder"]),
        (["neighbours", "run"], ["TOKEN"]),
        (["neighbours", "run", "the"], ["'the' is 3 tokens", "'t' (#", "#7"]),
        (["neighbours", "run", ""], ["0 tokens"]),
        (["neighbours", "run", "é"], ["é"]),
        (["neighbours", "run", "#99"], ["ids go up to #"]),
        (["neighbours", "run", "t", "--count", "0"], ["--count is 0"]),
        (["grads", "run", "--rows", "-1"], ["--rows is -1"]),
        (["grads", "run", "--text", "nowhere.txt"], ["nowhere.txt"]),
        (["grads", "wide"], ["tied: false"]),
        (["grads", "run", "--json", "/proc/nothing/g.json"], ["cannot write /proc/nothing/g.json"]),
        (["grads", "run", "--plot", "/proc/nothing/g.png"], ["cannot write /proc/nothing/g.png"]),
        (["report", "nowhere"], ["nowhere is not a run directory"]),
        (["report", "run", "--prompt", "Zoë"], ["Z"]),
        (["report", "run", "--out", "/proc/nothing/r.html"], ["cannot write"]),
        (["train", "config.yaml", "--model.no-tied"], ["train.inspect_every", "untied"]),
        (["lense", "run"], ["lens"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes(minigpt, arguments, words):
    line = minigpt(*arguments, code=2)
    assert all(word in line for word in words), line


def test_pictures_without_matplotlib_say_what_to_install(minigpt, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    assert "minigpt_jax[plot]" in minigpt("neighbours", "run", "t", "--plot", "p.png", code=2)


def test_a_console_that_cannot_show_a_token(folder):
    """The grid's marks for blanks are no ASCII; a C locale must still get its table."""
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "minigpt_jax", "lens", "run", "--prompt", "the fox"]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, check=True)
    assert b"block_1/ffn" in result.stdout and result.stdout.isascii() and b"Traceback" not in result.stderr
