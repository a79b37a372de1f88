"""Pictures as PNG files. matplotlib is the extra `plot`."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import replacing, require
from .lens import NO_TARGET, LensTable
from .tables import compact

LOOKUP, HEAD, SUM, FAINT = "#0072b2", "#d55e00", "#555555", "#9ecae1"  # apart for colour-blind eyes (Okabe and Ito)
NORMS = {"l2": "L2", "l2_squared": "L2 squared", "l1": "L1"}


@contextlib.contextmanager
def _figure(path: str | Path, width: float, height: float) -> Iterator:
    """A figure that is written to `path` when the block is left without an error."""
    require(
        importlib.util.find_spec("matplotlib") is not None,
        "pictures need matplotlib; install it: pip install 'minigpt_jax[plot]'",
    )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    with replacing(path) as file:
        figure.savefig(file, format="png")


def plot_loss(records: list[dict], path: str | Path, unit: str = "character") -> None:
    """Training and held-out loss over steps, in nats on the left and bits on the right."""
    train = [r for r in records if r["kind"] == "train"]
    val = [r for r in records if r["kind"] == "eval"]
    steps, loss = [r["step"] for r in train], [r["loss"] for r in train]
    with _figure(path, 8, 4.5) as figure:
        axes = figure.subplots()
        axes.plot(steps, loss, color=FAINT, linewidth=0.8, label="training, each step")
        smooth = smoothed(loss, min(25, 1 + len(loss) / 40))
        axes.plot(steps, smooth, color="#08519c", linewidth=1.5, label="training, smoothed")
        if val:
            axes.plot([r["step"] for r in val], [r["loss"] for r in val], "o-", color=HEAD, label="held out")
            end = (val[-1]["step"], val[-1]["loss"])
            axes.annotate(f"{end[1]:.3f}", end, (0, 8), textcoords="offset points", ha="right")
        axes.set(xlabel="step", ylabel="loss, nats per token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        last = (val or train)[-1]
        if last["loss"]:
            ratio = last["bits"] / last["loss"]
            right = axes.secondary_yaxis("right", functions=(lambda x: x * ratio, lambda x: x / ratio))
            right.set_ylabel(f"bits per {unit}")


def smoothed(values: list[float], horizon: float) -> list[float]:
    """Exponential moving average, corrected for its start at zero (Kingma and Ba 2015)."""
    decay, average, result = 1 - 1 / horizon, 0.0, []
    for i, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        result.append(average / (1 - decay**i))
    return result


def plot_tied(records: list[dict], path: str | Path) -> None:
    """Over the inspected steps: the head's share by each norm, L2 norms of the parts, alignment with the update."""
    records = [r for r in records if r["kind"] == "inspect"]
    steps = [r["step"] for r in records]
    with _figure(path, 13, 4) as figure:
        shares, norms, update = figure.subplots(1, 3)
        for (norm, label), style in zip(NORMS.items(), ("-", "--", ":"), strict=True):
            shares.plot(steps, [r[f"head_share_{norm}"] for r in records], style, color=HEAD, label=f"by {label}")
        shares.set(title="head / (head + lookup)", ylabel="share of the head part", ylim=(0, 1))
        shares.axhline(0.5, color=SUM, linewidth=0.6)
        for part, colour in (("lookup", LOOKUP), ("head", HEAD), ("sum", SUM)):
            norms.plot(steps, [r[f"{part}_l2"] for r in records], color=colour, label=part)
            update.plot(steps, [r[f"update_cosine_{part}"] for r in records], color=colour, label=part)
        norms.set(title="size of each part, before clipping", ylabel="L2 norm", yscale="log")
        update.set(title="cosine of the update with minus each part", ylabel="cosine")
        update.axhline(0, color=SUM, linewidth=0.6)
        for axes in (shares, norms, update):
            axes.set(xlabel="step", xscale="log" if len(steps) > 1 else "linear")
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)


def plot_split(stats: dict, tokens: list[dict], path: str | Path) -> None:
    """Head share by each norm, and each token's two norms against each other."""
    with _figure(path, 11, 5) as figure:
        shares, rows = figure.subplots(1, 2, width_ratios=(1, 2.2))
        values = [stats[f"head_share_{norm}"] for norm in NORMS]
        shares.bar([f"by {label}" for label in NORMS.values()], [1.0] * 3, color=LOOKUP, label="lookup part")
        bars = shares.bar([f"by {label}" for label in NORMS.values()], values, color=HEAD, label="head part")
        shares.bar_label(bars, [f"{value:.0%}" for value in values], label_type="center", color="white")
        shares.set(ylim=(0, 1), ylabel="share of the two parts", title=f"cosine of the parts {stats['cosine']:+.3f}")
        shares.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
        read = [record for record in tokens if record["lookup_l2"] and record["head_l2"]]
        rows.scatter([r["lookup_l2"] for r in read], [r["head_l2"] for r in read], s=14, color=SUM, alpha=0.6)
        for r in sorted(read, key=lambda r: -max(r["lookup_l2"], r["head_l2"]))[:40]:
            place = (r["lookup_l2"], r["head_l2"])
            text = plain(r.get("text", str(r["id"])))
            rows.annotate(text, place, (3, 3), textcoords="offset points", fontsize=8, parse_math=False)
        rows.set(xlabel="L2 norm of the row's lookup part", ylabel="L2 norm of the row's head part")
        rows.set(title=f"rows of E that were read: {len(read):,} of {len(tokens):,}")
        if read:
            rows.set(xscale="log", yscale="log")
            ends = [f(r[part] for r in read for part in ("lookup_l2", "head_l2")) for f in (min, max)]
            rows.plot(ends, ends, color=SUM, linewidth=0.6)
        rows.grid(alpha=0.3)


def plain(text: str) -> str:
    """Text for a picture: blanks and line ends visible, and nothing that a font has no glyph for."""
    return "".join(c if ord(c) < 0x2E80 else "□" for c in compact(text))


def plot_lens(table: LensTable, texts: list[str], path: str | Path) -> None:
    """Layers by positions, in bands: the most likely token as text, KL to the final layer in bits as colour."""
    kl, top1, R = np.asarray(table.kl), np.asarray(table.top_ids)[..., 0], len(table.points)
    named = {NO_TARGET: ""} | {int(i): plain(texts[i])[:8] for i in np.unique([*top1.flat, *np.asarray(table.tokens)])}
    named |= {int(i): plain(texts[i])[:8] for i in np.asarray(table.targets) if i != NO_TARGET}
    columns = 32 if max(map(len, named.values())) <= 2 else 14
    starts = range(0, kl.shape[1], columns)
    columns = min(columns, kl.shape[1])
    with _figure(path, 12, 0.8 + len(starts) * (0.8 + 0.34 * R)) as figure:
        bands = figure.subplots(len(starts), 1, squeeze=False)[:, 0]
        for axes, start in zip(bands, starts, strict=True):
            band = kl[:, start : start + columns]
            padded = np.pad(band, ((0, 0), (0, columns - band.shape[1])), constant_values=np.nan)
            image = axes.imshow(padded, aspect="auto", cmap="viridis_r", origin="lower", vmin=0, vmax=kl.max() or 1)
            for i, t in np.ndindex(band.shape):
                colour = "white" if image.norm(band[i, t]) > 0.5 else "black"
                text = named[int(top1[i, start + t])]
                axes.text(t, i, text, ha="center", va="center", color=colour, fontsize=9, parse_math=False)
            pairs = [(int(table.tokens[start + t]), int(table.targets[start + t])) for t in range(band.shape[1])]
            axes.set_xticks(range(len(pairs)), [f"{named[a]}\n{named[b]}" for a, b in pairs], parse_math=False)
            axes.set_yticks(range(R), table.points)
            axes.tick_params(length=0)
        bands[-1].set_xlabel("input token, and below it the target")
        figure.colorbar(image, ax=bands, label="KL(final || layer), bits")


def plot_neighbours(name: str, names: list[str], cosines: np.ndarray, others: np.ndarray, path: str | Path) -> None:
    """The nearest tokens, and where they stand among the cosines with all others."""
    with _figure(path, 9, 1.5 + 0.3 * len(names)) as figure:
        nearest, all_others = figure.subplots(1, 2)
        places = range(len(names))
        nearest.barh(places, cosines, color=LOOKUP)
        nearest.set_yticks(places, [plain(text) for text in names], parse_math=False)
        nearest.invert_yaxis()
        nearest.set(xlabel="cosine")
        nearest.set_title(f"nearest to {plain(name)} in E", parse_math=False)
        all_others.hist(others, bins=40, color=FAINT)
        all_others.axvline(float(cosines[-1]), color=HEAD, label="the last one shown")
        all_others.set(xlabel="cosine with every other token", ylabel="tokens")
        all_others.legend(frameon=False)
