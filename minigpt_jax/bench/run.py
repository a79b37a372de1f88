"""The parent: runs every contender in turn (A B C A B C), each time in a fresh process, one at a time."""

import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..config import Config, DataConfig, ModelConfig, TrainConfig, save_config
from ..errors import replacing, require
from .contenders import our_contenders, peer_contenders, revision
from .machine import build_vendor_hook
from .plan import Plan
from .report import Measurements, raw, render
from .shapes import SHAPES, Shape
from .table import Record

CEILINGS = {"numpy": "ours", "jax": "ours", "torch": "peers", "torch, hook": "peers"}


class ChildDied(Exception):
    """A contender's process ended without a result; the message is one line."""


def run_child(program: str, request: dict, env: dict) -> dict:
    """Run a child to its end: the JSON on the last line of its stdout."""
    request = request | {"spawned": time.time()}
    command = [sys.executable, "-m", f"{__package__}.{program}", json.dumps(request)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    with subprocess.Popen(command, env=env, **pipes) as process:
        try:
            out, err = process.communicate()
        except BaseException:  # Ctrl-C: the child goes before us; after one, leaving the block would not wait for it
            process.kill()
            process.wait()
            raise
    if process.returncode < 0:
        raise ChildDied(f"its process was killed by signal {-process.returncode}, as when memory runs out")
    if process.returncode:
        last = " / ".join([line.strip() for line in err.splitlines() if line.strip()][-2:])
        raise ChildDied(f"its process ended with code {process.returncode}: {last[-300:]}")
    return json.loads(out.splitlines()[-1])


class Bench:
    """Fills `found`, step by step."""

    def __init__(self, plan: Plan, folder: Path):
        self.plan, self.folder = plan, folder
        self.found = Measurements(plan, date=f"{datetime.date.today():%Y-%m-%d}")
        self.hook, why = build_vendor_hook(folder)
        rows = plan.rows if plan.peers else ()
        peers, notes = peer_contenders(plan.peers, rows, self.hook, plan.nanogpt)
        self.found.notes += notes
        if peers and self.hook is None:
            self.found.notes.append(why)
        if plan.nanogpt is not None:
            self.found.versions["nanoGPT"] = revision(plan.nanogpt)
        self.found.contenders = our_contenders() + peers

    def env(self, own: dict, cache: str) -> dict:
        """The user's environment, the contender's own settings, and an empty place for compiled programs: the first
        round starts cold, whoever ran before."""
        env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        place = self.folder / "caches" / re.sub(r"\W+", "-", cache)
        env |= {"MINIGPT_CACHE": str(place), "TORCHINDUCTOR_CACHE_DIR": str(place)}
        if own.get("LD_PRELOAD") and env.get("LD_PRELOAD"):
            own = own | {"LD_PRELOAD": f"{own['LD_PRELOAD']}:{env['LD_PRELOAD']}"}
        return env | own

    def child(self, program: str, request: dict, own: dict, cache: str) -> dict:
        result = run_child(program, request, self.env(own, cache))
        self.found.versions |= result.pop("versions")
        return result

    def run(self) -> None:
        self.measure_ceilings()
        for name in self.plan.configs:
            for task in ("train", "decode"):
                if task in self.plan.tasks and (task == "train" or SHAPES[name].new_tokens):
                    self.measure(name, task)
        if "startup" in self.plan.tasks:
            self.measure_commands()

    def measure_ceilings(self) -> None:
        """Matmuls by every library at hand. Torch and transformers come from the disk here, so that no row pays for
        it."""
        torch = any(contender.program == "peers" for contender in self.found.contenders)
        for name, program in CEILINGS.items():
            hooked = name.endswith("hook")
            if program == "peers" and (not torch or (hooked and self.hook is None)):
                continue
            say(f"matmul ceiling: {name}")
            request = {"task": "ceiling", "with": name, "sizes": [1024, 2048], "seconds": 1.0, "peers": self.plan.peers}
            try:
                result = self.child(program, request, {"LD_PRELOAD": str(self.hook)} if hooked else {}, "ceiling")
                self.found.ceilings[name] = result["gflops"]
            except ChildDied as error:
                self.found.notes.append(f"no matmul ceiling of {name}: {error}")

    def measure(self, name: str, task: str) -> None:
        """One config, all rounds."""
        shape: Shape = SHAPES[name]
        model = shape.model if task == "train" else shape.decode_model
        request = {
            "task": task,
            "model": dataclasses.asdict(model),
            "batch": shape.batch,
            "new_tokens": shape.new_tokens,
            "weights": str(self.folder / f"{name}-{task}.safetensors"),
            "seconds": self.plan.seconds,
        }
        try:
            drawn = self.child("ours", request | {"task": "weights"}, {}, "weights")
        except ChildDied as error:
            self.found.notes.append(f"{name} {task} is left out: no weights: {error}")
            return
        if task == "train":
            self.found.weights[name] = drawn
        contenders = [contender for contender in self.found.contenders if task in contender.tasks]
        turns = [(i + 1, contender) for i in range(self.plan.rounds) for contender in contenders]
        began = time.perf_counter()
        for done, (i, contender) in enumerate(turns):
            key = (name, task, contender.name)
            if key in self.found.failures:
                continue
            rest = (time.perf_counter() - began) * (len(turns) / done - 1) if done else None
            left = f"; about {rest:.0f} s left of {name} {task}" if rest else ""
            say(f"{name} {task}, round {i} of {self.plan.rounds}: {contender.name}{left}")
            try:
                result = self.child(contender.program, request | contender.settings, contender.env, "-".join(key))
                self.found.records.append(Record(name, task, contender.name, i, result))
            except ChildDied as error:
                self.found.failures[key] = str(error)
                say(f"  {contender.name} is left out: {error}")
        Path(request["weights"]).unlink()

    def measure_commands(self) -> None:
        """Our own commands as a user meets them: seconds until the help's first byte, and the first token behind a
        prompt of one character."""
        place = self.folder / "run"
        place.mkdir()
        (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100, encoding="utf-8")
        config = Config(
            model=ModelConfig(),
            data=DataConfig(corpus="text", path=str(place / "text.txt")),
            train=TrainConfig(steps=16),
        )
        save_config(config, place / "tiny.yaml")
        env = self.env({}, "commands")
        minigpt = [sys.executable, "-m", __package__.split(".")[0]]
        train = [*minigpt, "train", str(place / "tiny.yaml"), "--run-dir", str(place / "tiny")]
        say("start-up of our own commands")
        made = subprocess.run(train, env=env, capture_output=True, encoding="utf-8", errors="replace")
        if made.returncode:
            last = " ".join(made.stderr.split())[-300:]
            self.found.notes.append(f"no start-up of our commands: training failed: {last}")
            return
        sample = ["sample", str(place / "tiny"), "--tokens", "20", "--prompt", "t"]
        for title, n, arguments in (("minigpt --help", 1, ["--help"]), ("minigpt sample RUN", 2, sample)):
            seconds = [until_byte(n, [*minigpt, *arguments], env) for _ in range(self.plan.rounds)]
            self.found.commands[title] = seconds


def until_byte(n: int, command: list[str], env: dict) -> float:
    began = time.perf_counter()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.read(n)
        seconds = time.perf_counter() - began
        process.stdout.read()
    return seconds


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def bench_run(plan: Plan, out: Path | None, numbers: Path | None) -> None:
    """Measure, and print the tables; `out` takes them as Markdown, `numbers` the raw numbers as JSON."""
    for path in filter(None, (out, numbers)):
        check_writable(path)
    with tempfile.TemporaryDirectory(prefix="minigpt-bench-", ignore_cleanup_errors=True) as folder:
        bench = Bench(plan, Path(folder))
        try:
            bench.run()
        except KeyboardInterrupt:
            print(render(bench.found))
            raise
    text = render(bench.found)
    print(text)
    if out is not None:
        write(out, text + "\n")
    if numbers is not None:
        write(numbers, json.dumps(raw(bench.found), indent=1) + "\n")


def check_writable(path: Path) -> None:
    """Before hours of measuring, not after."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    require(
        folder.is_dir() and os.access(folder, os.W_OK) and not path.is_dir(),
        f"cannot write {path}; choose the name of a file in a folder that can be written",
    )


def write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())
