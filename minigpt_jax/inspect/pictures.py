"""Pictures of a run. matplotlib is the extra `plot`."""

import importlib.util
from pathlib import Path

from ..config import require


def plot_loss(records: list[dict], path: str | Path, unit: str = "character") -> None:
    """Training and held-out loss over steps, in nats on the left and bits on the right, as a PNG."""
    require(
        importlib.util.find_spec("matplotlib") is not None,
        "pictures need matplotlib; install it: pip install 'minigpt_jax[plot]'",
    )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [r for r in records if r["kind"] == "train"]
    val = [r for r in records if r["kind"] == "eval"]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps, loss = [r["step"] for r in train], [r["loss"] for r in train]
    axes.plot(steps, loss, color="#9ecae1", linewidth=0.8, label="training, each step")
    axes.plot(
        steps, _smooth(loss, min(25, 1 + len(loss) / 40)), color="#08519c", linewidth=1.5, label="training, smoothed"
    )
    if val:
        axes.plot([r["step"] for r in val], [r["loss"] for r in val], "o-", color="#d94801", label="held out")
        axes.annotate(
            f"{val[-1]['loss']:.3f}", (val[-1]["step"], val[-1]["loss"]), (0, 8), textcoords="offset points", ha="right"
        )
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    last = (val or train)[-1]
    if last["loss"]:
        ratio = last["bits"] / last["loss"]
        right = axes.secondary_yaxis("right", functions=(lambda x: x * ratio, lambda x: x / ratio))
        right.set_ylabel(f"bits per {unit}")
    figure.savefig(path)


def _smooth(values: list[float], horizon: float) -> list[float]:
    """Exponential moving average, corrected for its start at zero (Kingma and Ba 2015)."""
    decay, average, smoothed = 1 - 1 / horizon, 0.0, []
    for i, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        smoothed.append(average / (1 - decay**i))
    return smoothed
