"""Run directories: everything that a trained model needs, in one folder that can be moved.

    config.yaml      every option, so that later defaults do not matter
    tokenizer.json   the vocabulary; ids mean nothing without it
    metrics.jsonl    a JSON object for each step, inspection and evaluation
    loss.png         the same as a picture; tied.png where the tied gradient was inspected
    checkpoints/N/   orbax, after N updates: params, opt_state, meta (step, config, tokenizer and data hashes)

orbax writes a checkpoint under a temporary name and renames it, so a killed save leaves the one before in place. Beside
its files lie their SHA-256 sums: a checkpoint that has changed since is passed over, never read as if it were right.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from .config import Config, load_config, save_config
from .data import load_tokenizer, save_tokenizer
from .errors import InputError, replacing, require
from .functional import abstract_params
from .train import TrainState, abstract_state
from .trees import tree_differences

# orbax and absl log each save at length; what matters reaches the user as errors.
logging.getLogger("absl").setLevel(logging.CRITICAL)

SUMS = "sha256.json"


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each of the folder's files, but for the list itself."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SUMS]
    return {str(path.relative_to(folder)): _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory. `open_run` reads one, `create_run` makes one."""

    path: Path
    config: Config
    tokenizer: object

    @contextlib.contextmanager
    def _manager(self):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.config.train.keep_checkpoints, enable_async_checkpointing=False
        )
        standard, items = ocp.StandardCheckpointHandler, ("params", "opt_state")
        handlers = {name: standard() for name in items} | {"meta": ocp.JsonCheckpointHandler()}
        folder = (self.path / "checkpoints").absolute()
        with ocp.CheckpointManager(folder, options=options, item_handlers=handlers) as manager:
            yield manager

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first."""
        folder = self.path / "checkpoints"
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []

    def save(self, state: TrainState, data_sha256: str) -> None:
        """Write a checkpoint of `state` unless its step has one; older ones beyond `keep_checkpoints` go."""
        step = int(state.step)
        if step in self.steps():
            return
        items = {"params": state.params, "opt_state": state.opt_state}
        self._write(step, items, data_sha256)

    def save_params(self, params) -> None:
        """Write imported weights as the checkpoint of step 0: no optimizer, and no text that they were trained on."""
        self._write(0, {"params": params}, None)

    def _write(self, step: int, items: dict, data_sha256: str | None) -> None:
        meta = {
            "step": step,
            "config": dataclasses.asdict(self.config),
            "tokenizer": self.tokenizer.fingerprint,
            "data_sha256": data_sha256,
            "jax": jax.__version__,
        }
        args = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        try:
            with self._manager() as manager:
                manager.save(step, args=ocp.args.Composite(meta=ocp.args.JsonSave(meta), **args))
        except (OSError, ValueError) as error:  # ValueError is tensorstore's, for a full disk among others
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"can't save step {step} in {self.path}: {reason}; the checkpoint before is whole"
            ) from None
        sums = json.dumps(_sums(self._checkpoint(step)))
        with replacing(self._checkpoint(step) / SUMS) as file:
            file.write(sums.encode())

    def _checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / str(step)

    def _damage(self, step: int) -> str | None:
        """What has changed in the checkpoint's files since they were saved, or None."""
        folder = self._checkpoint(step)
        if not (folder / SUMS).exists():  # killed between orbax's rename and ours: whole, by orbax's own promise
            return None
        try:
            expected, found = json.loads((folder / SUMS).read_text(encoding="utf-8")), _sums(folder)
            changed = sorted(name for name, digest in expected.items() if found.get(name) != digest)
        except (OSError, ValueError, AttributeError):
            changed = [SUMS]
        return f"{changed[0]} is damaged" if changed else None

    @staticmethod
    def _meta(manager, step: int) -> dict:
        return manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta

    def _restore(self, step: int, **abstract):
        """The named items of one checkpoint, and its meta; `InputError` where they do not fit the config."""
        with self._manager() as manager:
            meta = self._meta(manager, step)
            stored = manager.item_metadata(step)
            differences = tree_differences(abstract["params"], stored["params"].tree, "the checkpoint")
            require(
                not differences,
                f"{self.path}/checkpoints/{step} does not match {self.path}/config.yaml: {'; '.join(differences)}",
            )
            require(
                meta["tokenizer"] == self.tokenizer.fingerprint,
                f"{self.path}/tokenizer.json is not the one that checkpoint {step} was trained with; put that one back",
            )
            here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # whatever devices it was saved on
            placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), abstract)
            args = {name: ocp.args.StandardRestore(tree) for name, tree in placed.items()}
            return manager.restore(step, args=ocp.args.Composite(**args)), meta

    def _newest(self, **abstract):
        """As `_restore`, for the newest checkpoint that is whole; says on stderr which ones are not."""
        for step in reversed(self.steps()):
            damage = self._damage(step)
            try:
                if damage is None:
                    return self._restore(step, **abstract)
            except InputError:
                raise
            except (KeyError, ValueError, OSError) as error:  # not whole, and without sums that would have told
                damage = " ".join(str(error).split())[:100]
            print(f"{self._checkpoint(step)} can't be read ({damage}); trying the one before", file=sys.stderr)
        raise InputError(f"{self.path} has no readable checkpoint; train it first: minigpt train CONFIG")

    def load_params(self, data_sha256: str | None = None) -> tuple[dict, int]:
        """Parameters of the newest readable checkpoint, and its step. With `data_sha256`, refuses other data."""
        restored, meta = self._newest(params=abstract_params(self.config.model))
        self._check_data(meta, data_sha256 or meta["data_sha256"])
        return restored.params, meta["step"]

    def check_text(self, step: int, data_sha256: str) -> None:
        """Raise unless the checkpoint of `step` was trained on this text."""
        with self._manager() as manager:
            self._check_data(self._meta(manager, step), data_sha256)

    def _check_data(self, meta: dict, data_sha256: str | None) -> None:
        trained = meta["data_sha256"]
        if trained is not None and trained != data_sha256:  # None: imported weights, trained on whatever it was
            raise InputError(
                f"{self.path} was trained on other text (sha256 {trained[:12]}..., now {data_sha256[:12]}...); "
                "put the same text back, or start a new run"
            )

    def load_state(self, data_sha256: str) -> TrainState:
        """The whole training state, to go on from. Refuses to go on with other data."""
        require(
            self.steps() != [0] or (self._checkpoint(0) / "opt_state").exists(),
            f"{self.path} holds imported weights, which stay as they are; train a copy: "
            f"minigpt train CONFIG --init {self.path}",
        )
        abstract = abstract_state(self.config)
        restored, meta = self._newest(params=abstract.params, opt_state=abstract.opt_state)
        self._check_data(meta, data_sha256)
        step = jax.numpy.asarray(meta["step"], abstract.step.dtype)
        return TrainState(step, restored.params, restored.opt_state)

    def start(self, step: int) -> None:
        """Go on from `step`: save the config, set damaged later checkpoints aside, and drop the records after `step`
        (and a line that a kill cut short): those steps will run again."""
        save_config(self.config, self.path / "config.yaml")
        for later in (n for n in self.steps() if n > step):
            self._checkpoint(later).rename(self.path / "checkpoints" / f"damaged-{later}-{time.time_ns()}")
        path = self.path / "metrics.jsonl"
        if path.is_file():
            kept = [record for record in self.metrics() if record["step"] <= step]
            with replacing(path) as file:
                file.writelines(json.dumps(record).encode() + b"\n" for record in kept)

    def metrics(self) -> list[dict]:
        """The records of `metrics.jsonl`."""
        path, records = self.path / "metrics.jsonl", []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records


def create_run(path: str | Path, config: Config, tokenizer, save: Callable[[Run], None] = lambda run: None) -> Run:
    """Make the directory, with config, tokenizer, and the checkpoint that `save` writes if any. Refuses one that holds
    a run: nothing is overwritten."""
    path = Path(path)
    require(
        not (path / "config.yaml").exists(),
        f"{path} already holds a run; go on with it: minigpt train {path}; or choose another --run-dir",
    )
    require(
        not (path / "checkpoints").exists(),
        f"{path} has checkpoints but no config.yaml: the making of a run was cut short; delete it, or choose another",
    )
    run = Run(path, config, tokenizer)
    try:
        path.mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, path / "tokenizer.json")
        save(run)
        save_config(config, path / "config.yaml")  # last: with it the directory counts as a run
    except OSError as error:
        raise InputError(f"can't write the run directory {path}: {error.strerror}") from None
    return run


def open_run(path: str | Path) -> Run:
    """Read config and tokenizer of a run directory."""
    path = Path(path)
    require(
        (path / "config.yaml").is_file(),
        f"{path} is not a run directory (it has no config.yaml); make one: minigpt train CONFIG --run-dir {path}",
    )
    return Run(path, load_config(path / "config.yaml"), load_tokenizer(path / "tokenizer.json"))
