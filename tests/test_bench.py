"""`minigpt bench`: gates, ratios and tables from made-up runs; our own child; the real command; the peers' weights."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import minigpt_jax as mg
from minigpt_jax.bench import contenders, machine, ours, run
from minigpt_jax.bench.contenders import OURS, OURS_BF16, Contender, our_contenders, peer_contenders
from minigpt_jax.bench.plan import Plan
from minigpt_jax.bench.report import Measurements, raw, render
from minigpt_jax.bench.shapes import SHAPES, batch_ids, gpt2_shaped, prompt_ids
from minigpt_jax.bench.table import Record, Row, ids_gate, loss_gate, markdown, number, rows_of, same_tokens
from minigpt_jax.cli import main

EAGER, HOOK, BF16 = "transformers, eager", "transformers, eager, hook", "transformers, compiled, bf16, hook"
PEERS = [
    Contender(EAGER, "peers", {}),
    Contender(HOOK, "peers", {}, as_installed=False),
    Contender(BF16, "peers", {}, float32=False, as_installed=False, tasks=("train",)),
]
TINY = gpt2_shaped(V=17, D=16, L=2, H=2, T=8)


def trained(name: str, round: int, ms: float, loss: float = 4.0, peak: float | None = 100.0, first: float = 2.0):
    result = {"step_s": [ms / 1e3] * 3, "losses": [loss, 3.5], "check_loss": loss, "peak_mb": peak}
    return Record("S", "train", name, round, result | {"first_call_s": 1.0, "first_s": first})


def wrote(name: str, round: int, ms: float, ids: list[int]):
    result = {"decode_s": [ms / 1e3], "ids": ids, "peak_mb": 50.0, "first_call_s": 0.5, "first_s": 1.5}
    return Record("S", "decode", name, round, result)


def measurements(records, failures=None, tasks=("train", "decode"), **more) -> Measurements:
    plan = Plan(("S",), 2, 1.0, tasks, ("transformers",), ("eager",), None)
    return Measurements(
        plan,
        date="2026-01-31",
        versions={"jax": "0.0"},
        ceilings={"jax": {"1024": 100.0, "2048": 80.0}},
        weights={"S": {"parameters": 1000, "flops_per_token": 10_000}},
        contenders=our_contenders() + PEERS,
        records=records,
        failures=failures or {},
        **more,
    )


# Figures


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.012"), (0.5, "0.500"), (1.0, "1.00"), (9.876, "9.88"), (12.34, "12.3"), (1234.5, "1,234"),
     (0, "0"), (None, "-"), (math.nan, "-"), (math.inf, "-")],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


def test_a_table_lines_up():
    lines = markdown(["name", "x"], [["a", "1"], ["long name", "1,000"]]).splitlines()
    assert lines == [
        "| name      |     x |",
        "| --------- | ----: |",
        "| a         |     1 |",
        "| long name | 1,000 |",
    ]


def test_a_figure_is_the_median_of_the_rounds_medians():
    row = Row([trained("a", 1, 9), trained("a", 2, 1), trained("a", 3, 2)])
    row.records[0].result["step_s"] = [0.003, 0.004, 9.0]
    assert row.by_round == {1: 0.004, 2: 0.001, 3: 0.002} and row.seconds == 0.002


def test_a_ratio_is_taken_within_a_round():
    """On a machine that gets twice as slow in the second round, the ratio stays."""
    a, b = Row([trained("a", 1, 2), trained("a", 2, 4)]), Row([trained("b", 1, 3), trained("b", 2, 6)])
    assert a.times_as_fast_as(b) == (1.5, 1.5, 1.5) and b.times_as_fast_as(a) == pytest.approx((2 / 3,) * 3)
    uneven = Row([trained("b", 1, 3), trained("b", 2, 4)])
    assert a.times_as_fast_as(uneven) == (1.25, 1.0, 1.5)
    assert a.times_as_fast_as(Row([trained("b", 3, 1)])) is None


# Gates


def test_another_loss_is_no_row():
    reference = {"check_loss": 4.0}
    assert loss_gate({"check_loss": 4.0009}, reference) is None
    for loss in (4.0011, 3.9, math.nan):
        assert "not the same function" in loss_gate({"check_loss": loss}, reference)


def test_other_tokens_are_no_row():
    ids = list(range(40))
    assert ids_gate({"ids": ids}, {"ids": ids}) is None
    assert ids_gate({"ids": ids[:16] + [0] * 24}, {"ids": ids}) is None
    assert "token 15" in ids_gate({"ids": ids[:15] + [0] * 25}, {"ids": ids})
    assert ids_gate({"ids": ids[:20]}, {"ids": ids})
    assert ids_gate({"ids": ids[:4]}, {"ids": ids[:4]}) is None
    assert same_tokens([1, 2, 3], [1, 2]) == 2 and same_tokens([], [1]) == 0


def test_rows_that_pass_and_lines_for_those_that_do_not():
    exact = {c.name: c.float32 for c in our_contenders() + PEERS}
    rows, notes = rows_of([trained(EAGER, 1, 8), trained(OURS, 1, 4), trained(HOOK, 1, 6, loss=4.1)], exact)
    assert [row.name for row in rows] == [OURS, EAGER] and len(notes) == 1
    assert HOOK in notes[0] and "4.10000" in notes[0] and "4.00000" in notes[0]
    one_bad_round = [trained(OURS, 1, 4), trained(EAGER, 1, 8), trained(EAGER, 2, 8, loss=4.1)]
    assert [row.name for row in rows_of(one_bad_round, exact)[0]] == [OURS]


def test_bfloat16_may_write_other_tokens():
    exact = {OURS: True, EAGER: True, BF16: False}
    records = [wrote(OURS, 1, 1, [1, 2, 3]), wrote(EAGER, 1, 1, [1, 2, 4]), wrote(BF16, 1, 1, [1, 2, 4])]
    rows, notes = rows_of(records, exact)
    assert [row.name for row in rows] == [OURS, BF16] and EAGER in notes[0]


def test_without_ours_there_are_no_rows():
    rows, notes = rows_of([trained(EAGER, 1, 8)], {EAGER: True})
    assert rows == [] and EAGER in notes[0]
    assert rows_of([], {}) == ([], [])


# The report

FULL = [
    trained(OURS, 1, 4, peak=150, first=3.0), trained(EAGER, 1, 8), trained(HOOK, 1, 5), trained(BF16, 1, 2),
    trained(OURS, 2, 4, peak=150, first=1.0), trained(EAGER, 2, 12), trained(HOOK, 2, 5), trained(BF16, 2, 2),
    wrote(OURS, 1, 2, [1] * 40), wrote(EAGER, 1, 20, [1] * 40),
]  # fmt: skip


def cells(report: str, name: str) -> list[str]:
    (line, *_) = [line for line in report.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_report():
    text = render(measurements(FULL, commands={"minigpt --help": [0.2, 0.1, 0.1]}, notes=["nobody else"]))
    # 32 * 32 tokens in 4 ms; 3 * 10,000 FLOPs for each of them, at a ceiling of 100 GFLOP/s
    assert cells(text, OURS) == [OURS, "4.00", "256,000", "1", "8%", "150", "3.0 / 1.0", "1.00", ""]
    assert cells(text, EAGER)[:6] == [EAGER, "10.0", "102,400", "2.50 [2.00, 3.00]", "3%", "100"]
    assert cells(text, "S training")[1:] == [
        f"1.25 [1.25, 1.25] {HOOK}", f"2.50 [2.00, 3.00] {EAGER}", f"0.500 [0.500, 0.500] {BF16}", "1.50",
    ]  # fmt: skip
    assert cells(text, "S generation")[1].startswith("10.0 [10.0, 10.0]")
    assert "40 of 40" in text and "- nobody else" in text and "cc" not in cells(text, "`minigpt --help`")
    assert cells(text, "`minigpt --help`") == ["`minigpt --help`", "0.20", "0.10"]
    for word in ("LD_PRELOAD", "1e-3", "2026-01-31", "jax 0.0", "not halved"):
        assert word in text


def test_report_without_peers_memory_or_ceiling():
    found = measurements([trained(OURS, 1, 4, peak=None)])
    found.ceilings = {}
    text = render(found)
    assert cells(text, OURS)[1:7] == ["4.00", "256,000", "1", "-", "-", "2.0 / -"]
    assert "fastest peer" not in text


def test_what_fails_is_a_line():
    failures = {("S", "train", EAGER): "its process ended with code 1: out of luck"}
    text = render(measurements(FULL, failures))
    assert f"- {EAGER} is left out: its process ended with code 1: out of luck" in text
    assert EAGER not in cells(text, "S training")[2] and "| generation" in text
    text = render(measurements(FULL, {("S", "train", OURS): "its process was killed"}))
    assert f"- {OURS} is left out: its process was killed" in text and "no run of ours" in text
    assert render(measurements([])).startswith("# What")  # Ctrl-C at once


def test_numbers_for_programs():
    failures = {("S", "train", EAGER): "why"}
    tree = json.loads(json.dumps(raw(measurements(FULL, failures))))
    assert tree["records"][0] == {
        "config": "S", "task": "train", "contender": OURS, "round": 1, "step_s": [0.004] * 3, "losses": [4.0, 3.5],
        "check_loss": 4.0, "peak_mb": 150, "first_call_s": 1.0, "first_s": 3.0,
    }  # fmt: skip
    assert tree["failures"] == [{"config": "S", "task": "train", "contender": EAGER, "why": "why"}]


# Arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--configs", "S", "G2k"], ["unknown config 'G2k'", "did you mean 'G1k'", "known: S, C, C2, G, G1k"]),
        (["--tasks", "trian"], ["unknown task 'trian'", "did you mean 'train'"]),
        (["--peers", "nanpgt"], ["unknown peer 'nanpgt'", "did you mean 'nanogpt'", "none"]),
        (["--rows", "eager-hok"], ["unknown row", "did you mean 'eager-hook'"]),
        (["--rounds", "0"], ["--rounds is 0", "at least 1"]),
        (["--seconds", "0"], ["--seconds is 0", "above 0"]),
        (["--nanogpt", "."], ["--nanogpt . holds no model.py", "nanoGPT checkout"]),
        (["--out", "."], ["cannot write .", "a file"]),
        (["--json", "file/x.json"], ["cannot write file/x.json"]),
        (["--round", "1"], ["--round"]),
    ],
)
def test_mistakes(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and all(word in err for word in words), err


def test_names_in_any_case():
    plan = Plan(("c2", "S", "C2"), 1, 1.0, ("Train",), ("nanoGPT", "none"), ("BF16",), None)
    assert (plan.configs, plan.tasks, plan.peers, plan.rows) == (("C2", "S"), ("train",), ("nanogpt",), ("bf16",))


def test_peers_that_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "model.py").touch()
    found, notes = peer_contenders(contenders.PEERS, tuple(contenders.ROWS), None, tmp_path)
    assert found == [] and len(notes) == 2
    assert "torch and transformers not installed: pip install 'minigpt_jax[parity]'" in notes[0]
    assert "nanogpt is left out: torch not installed" in notes[1]
    found, notes = peer_contenders(("nanogpt",), ("eager",), None, None)
    assert found == [] and "--nanogpt DIR" in notes[0]


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: True)


def test_rows_of_a_peer(installed, tmp_path):
    found, notes = peer_contenders(("transformers",), tuple(contenders.ROWS), tmp_path / "x.so", None)
    assert notes == []
    hooked = [c for c in found if c.env]
    assert all(c.env == {"LD_PRELOAD": str(tmp_path / "x.so")} for c in hooked)
    assert [c.name for c in found if "train" in c.tasks] == [
        "transformers, eager", "transformers, eager, hook", "transformers, compiled", "transformers, compiled, hook",
        "transformers, compiled, bf16, hook",
    ]  # fmt: skip
    assert [c.name for c in found if "decode" in c.tasks] == [
        "transformers, eager", "transformers, eager, hook", "transformers, eager, bf16, hook"
    ]  # fmt: skip
    assert {c.name for c in hooked} == {c.name for c in found if "hook" in c.name}
    assert all(c.as_installed != ("hook" in c.name) and c.float32 != ("bf16" in c.name) for c in found)


def test_without_the_hook_bfloat16_stays(installed):
    found, _ = peer_contenders(("transformers",), tuple(contenders.ROWS), None, None)
    assert not any(c.env or "hook" in c.name for c in found) and any("bf16" in c.name for c in found)


def test_the_hook_is_for_amd_with_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_cpuinfo", lambda key: "GenuineIntel")
    library, why = machine.build_vendor_hook(tmp_path)
    assert library is None and "for AMD processors under Linux" in why
    monkeypatch.setattr(machine, "_cpuinfo", lambda key: "AuthenticAMD")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    library, why = machine.build_vendor_hook(tmp_path)
    assert library is None and "cc" in why


# Children


def test_environment_of_a_child(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("LD_PRELOAD", "theirs.so")
    monkeypatch.setattr(run, "build_vendor_hook", lambda folder: (None, "no hook"))
    bench = run.Bench(Plan(("S",), 1, 1.0, ("train",), ("none",), ("eager",), None), tmp_path)
    assert [c.name for c in bench.found.contenders] == [OURS, OURS_BF16] and bench.found.notes == []
    env = bench.env({"LD_PRELOAD": "hook.so"}, "S-train-a, b")
    assert env["LD_PRELOAD"] == "hook.so:theirs.so" and "JAX_COMPILATION_CACHE_DIR" not in env
    assert env["MINIGPT_CACHE"] == env["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "caches/S-train-a-b")
    assert (
        bench.env({}, "x")["LD_PRELOAD"] == "theirs.so" and bench.env({}, "x")["MINIGPT_CACHE"] != env["MINIGPT_CACHE"]
    )


def test_a_child_that_dies_is_one_line():
    with pytest.raises(run.ChildDied) as died:
        run.run_child("ours", {"task": "nonsense"}, dict(os.environ))
    assert "code 1" in str(died.value) and "KeyError: 'nonsense'" in str(died.value) and "\n" not in str(died.value)


def test_shapes():
    assert mg.param_table(SHAPES["G"].model).total == 124_439_808 - (1024 - 256) * 768
    assert mg.param_table(SHAPES["G1k"].model).total == 124_439_808
    for shape in SHAPES.values():
        assert shape.decode_model.context_len >= len(prompt_ids(shape.model)) + shape.new_tokens
    ids = batch_ids(TINY, 3, 5, 2)
    assert ids.shape == (2, 3, 9) and ids.max() < 17 and (ids[0] != ids[1]).any()
    assert (ids[1] == batch_ids(TINY, 3, 6)[0]).all()


@pytest.fixture
def request_for(tmp_path):
    """A child's request for TINY, with weights drawn."""
    request = {"model": dataclasses.asdict(TINY), "batch": 3, "new_tokens": 4, "weights": str(tmp_path / "w")}
    request |= {"seconds": 1e-9, "spawned": time.time(), "options": {}}
    drawn = ours.write_weights(request)
    assert drawn["parameters"] == mg.param_table(TINY).total
    return request


@pytest.mark.slow
def test_our_child_trains_as_the_trainer(request_for, quick_compilation):
    result = ours.train(request_for)
    params = ours.load_weights(request_for["weights"])
    ids = batch_ids(TINY, 3, 0)[0]
    loss = mg.loss(params, mg.Batch(ids[:, :-1], ids[:, 1:]), TINY)
    assert result["losses"][0] == result["check_loss"] == pytest.approx(float(loss), rel=1e-6)
    assert len(result["losses"]) == 9 and len(set(result["losses"])) == 9 and len(result["step_s"]) == 1
    assert all(float(np.std(leaf)) > 0 for leaf in jax.tree.leaves(params))  # no bias 0, no scale 1
    half = ours.train(request_for | {"options": {"dtype": "bfloat16"}})
    assert half["check_loss"] == pytest.approx(float(loss), rel=1e-6) and half["losses"] != result["losses"]


# The command


@pytest.mark.slow
def test_the_real_command(tmp_path):
    command = [sys.executable, "-m", "minigpt_jax", "bench", "--configs", "S", "--rounds", "2", "--seconds", "0.1"]
    result = subprocess.run(
        [*command, "--peers", "none", "--out", tmp_path / "r.md", "--json", tmp_path / "r.json"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "r.md").read_text(encoding="utf-8") == result.stdout
    assert "round 2 of 2" in result.stderr and "Traceback" not in result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith(f"| {OURS}")]
    assert len(rows) == 2 and "40 of 40" in rows[1]
    cold, warm = map(float, re.search(r"([\d.]+) / ([\d.]+)", rows[0]).groups())
    assert warm < cold  # the second round found the first one's programs
    assert "`minigpt sample RUN`" in result.stdout and "left out" not in result.stdout
    records = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["records"]
    ours = [(r["task"], r["round"]) for r in records if r["contender"] == OURS]
    assert ours == [("train", 1), ("train", 2), ("decode", 1), ("decode", 2)]


@pytest.mark.slow
def test_ctrl_c_prints_what_there_is_and_leaves_no_child(tmp_path):
    command = [sys.executable, "-m", "minigpt_jax", "bench", "--configs", "S", "--seconds", "60", "--peers", "none"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while "S train, round 1" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err.endswith("minigpt: interrupted\n") and "Traceback" not in err
    assert "| GFLOP/s" in out and "| jax" in out
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
