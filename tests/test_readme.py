"""What README.md and the examples say must run as written, and its numbers must be true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from models import write_gpt2

import minigpt_jax as mg

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_python_snippets_run_in_order_and_the_shapes_in_their_comments_are_true(capsys, tmp_path, monkeypatch):
    """A line that ends in `# (3, 64)` or `# ...: (64, 64)` has that shape. DIR is a small GPT-2."""
    monkeypatch.chdir(tmp_path)
    write_gpt2("DIR", "The quick brown fox. " * 200)
    source, names, checked = "\n".join(blocks("python")), {}, 0
    for statement in re.findall(r"(?:^\S.*\n(?:^[ ]+.*\n)*)", source, re.MULTILINE):
        stated = re.search(r"#.*?(\(\d+(?:, ?\d+)*,?\))(?=[,:]|$)", statement.rstrip())
        code = re.sub(r"\s+#.*", "", statement).strip()
        if not code or code.startswith("#"):
            continue
        try:
            value = eval(code, names)
        except SyntaxError:
            exec(code, names)
            value = names.get(code.split(" = ")[0])
        if stated and "{" not in statement:
            shape = value if isinstance(value, tuple) else value.shape
            assert shape == eval(stated.group(1)), statement
            checked += 1
    assert checked >= 6
    assert names["logits"].shape == (3, 64)
    assert names["new_ids"].shape == (20,)
    assert "head_share_l2" in capsys.readouterr().out
    assert Path("OUT/model.safetensors").read_bytes() == Path("DIR/model.safetensors").read_bytes()


@pytest.mark.slow
def test_commands_run(tmp_path):
    """Every `minigpt` line, in order, in a folder with the text that the README calls my.txt; fewer steps."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200, encoding="utf-8")
    write_gpt2(tmp_path / "DIR", "The quick brown fox. " * 200)
    env = os.environ | {"MINIGPT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("minigpt ")]
    assert len(commands) >= 8
    for command in commands:
        words = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', command.split("  #")[0])][1:]
        smaller = [] if "--init" in words else ["--model.n-layers", "1"]
        quick = {"train": ["--train.steps", "12", *smaller], "lens": ["--tuned-steps", "5"]}
        result = subprocess.run(
            [sys.executable, "-m", "minigpt_jax", *words, *quick.get(words[0], [])],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"
    for picture in ("runs/mine/loss.png", "runs/mine/tied.png", "grads.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG"), picture
    assert "<html" in (tmp_path / "runs/mine/report.html").read_text(encoding="utf-8")


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z]+)\b", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("row", re.findall(r"^\| `(configs/\S+\.yaml)` \| ([\d,]+) \| ([\d,]+)", README, re.MULTILINE))
def test_table_of_numbers(row):
    path, total, table = row
    counted = mg.param_table(mg.load_config(ROOT / path).model)
    assert (counted.total, counted.embedding) == (int(total.replace(",", "")), int(table.replace(",", "")))


@pytest.mark.slow
def test_look_inside_example(tmp_path):
    env = os.environ | {"MINIGPT_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "examples/look_inside.py"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert all(words in result.stdout for words in ("head share by L2", "softmax alone", "block_1/ffn", "nearest to"))


@pytest.mark.slow
def test_optax_loop_example_learns(tmp_path):
    """Under 40 lines, without our trainer, and the loss falls."""
    example = ROOT / "examples/optax_loop.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 40
    env = os.environ | {"MINIGPT_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, example], env=env, capture_output=True, text=True, check=True)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 6 and losses[-1] < 1.3 < 4.1
    assert "(64, 64)" in result.stdout


@pytest.mark.slow
def test_inspect_gpt2_example(tmp_path):
    write_gpt2(tmp_path / "DIR", "The quick brown fox. " * 200)
    env = os.environ | {"MINIGPT_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for arguments in ([], [tmp_path / "DIR", "The quick"]):
        command = [sys.executable, ROOT / "examples/inspect_gpt2.py", *arguments]
        result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert all(words in result.stdout for words in ("longest rows", "nearest in E", "block_1/ffn", "gradient of E"))
