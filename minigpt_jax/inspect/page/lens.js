// The lens: a grid of layers by positions, the panel of one cell, and one layer at a time.

const rankText = (rank) => (isNumber(rank) ? number(rank) : "–");

// `share` is the ink of a value, given the largest value of its kind in the grid.
const lensColours = {
  probability: {
    name: "probability of the first choice", value: (lens, r, t) => lens.top_probs[r][t][0],
    share: (value) => value, ends: () => ["0", "1"],
    text: "How sure the layer is of the token that it writes in the cell.",
  },
  kl: {
    name: "KL to the final layer", value: (lens, r, t) => lens.kl && lens.kl[r][t],
    share: (value, most) => value / most, ends: (most) => ["0 bits", `${number(most, 3)} bits`],
    text: "What believing this layer in place of the final one costs: KL(final ‖ layer), in bits; 0 in the last row.",
  },
  entropy: {
    name: "entropy", value: (lens, r, t) => lens.entropy && lens.entropy[r][t],
    share: (value, most) => value / most, ends: (most) => ["0 bits", `${number(most, 3)} bits`],
    text: "How undecided the layer is: 0 bits is certainty, one bit is a coin between two tokens.",
  },
  rank_target: {
    name: "rank of the target", value: (lens, r, t) => lens.rank_target && lens.rank_target[r][t], reversed: true,
    share: (value, most) => 1 - Math.log1p(value) / Math.log1p(most), ends: (most) => ["0 (first)", number(most)],
    text: "How many tokens the layer puts before the one that really comes next: 0 is a right guess.",
  },
  rank_input: {
    name: "rank of the input", value: (lens, r, t) => lens.rank_input && lens.rank_input[r][t], reversed: true,
    share: (value, most) => 1 - Math.log1p(value) / Math.log1p(most), ends: (most) => ["0 (first)", number(most)],
    text: "How many tokens stand before the one just read. With a tied table the first layers often name it: the " +
      "stream still is its row of E, and that row fits itself."
  },
};

function drawLens() {
  const kinds = { lens: data.lens, tuned: data.tuned };
  let lens = data.lens || data.tuned;
  const layers = lens.points.length, positions = lens.ids.length;
  let at = { layer: layers - 1, position: 0 }, cells = [], curves = null;
  const slider = byId("lens-layer"), colour = byId("lens-colour");

  const offered = Object.entries(lensColours).filter(([, { value }]) =>
    lens.points.some((_, r) => lens.ids.some((_, t) => isNumber(value(lens, r, t)))));
  colour.append(...offered.map(([key, { name }]) => el("option", { value: key }, name)));

  const header = (name, ids, place) => el("tr", { role: "row" },
    el("th", { scope: "row", role: "rowheader", class: "layer" }, name),
    ...ids.map((id) => el("th", { scope: "col", role: "columnheader", class: place }, token(id))));

  function drawGrid() {
    cells = lens.points.map((name, r) => lens.ids.map((_, t) => {
      const here = r === at.layer && t === at.position;
      return el("td", { role: "gridcell", tabindex: here ? "0" : "-1", "data-layer": r, "data-position": t });
    }));
    const rows = lens.points.map((name, r) => el("tr", { role: "row", "data-layer": r },
      el("th", { scope: "row", role: "rowheader", class: "layer" }, name), ...cells[r]));
    const grid = el("table", { role: "grid", id: "lens-grid", "aria-label": "Layers by positions" },
      el("thead", { role: "rowgroup" }, header("input", lens.ids)),
      el("tbody", { role: "rowgroup" }, ...rows),
      el("tfoot", { role: "rowgroup" }, header("target", lens.targets || lens.ids.map(() => null))));
    // Not pointerover: that also fires when the grid scrolls under a mouse that rests while the arrow keys move.
    grid.addEventListener("pointermove", choose);
    grid.addEventListener("pointerdown", choose);
    grid.addEventListener("focusin", choose);
    grid.addEventListener("keydown", move);
    byId("lens-scroll").replaceChildren(grid);
  }

  function choose(event) {
    const cell = event.target.closest("td");
    const focused = event.type === "focusin";
    if (cell && (focused || !cell.classList.contains("chosen"))) {
      select(Number(cell.dataset.layer), Number(cell.dataset.position), focused);
    }
  }

  function move(event) {
    const { layer, position } = event.target.closest("td").dataset;
    const from = [Number(layer), Number(position)];
    const last = [layers - 1, positions - 1];
    const moves = {
      ArrowUp: [from[0] - 1, from[1]], ArrowDown: [from[0] + 1, from[1]],
      ArrowLeft: [from[0], from[1] - 1], ArrowRight: [from[0], from[1] + 1],
      Home: [event.ctrlKey ? 0 : from[0], 0], End: [event.ctrlKey ? last[0] : from[0], last[1]],
      PageUp: [0, from[1]], PageDown: [last[0], from[1]],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [r, t] = moves[event.key].map((value, i) => Math.min(last[i], Math.max(0, value)));
    cells[r][t].focus();
  }

  function select(r, t, focused) {
    cells[at.layer][at.position].classList.remove("chosen");
    if (focused) {
      for (const row of cells) for (const cell of row) if (cell.tabIndex === 0) cell.tabIndex = -1;
      cells[r][t].tabIndex = 0;
    }
    at = { layer: r, position: t };
    cells[r][t].classList.add("chosen");
    drawPanel();
  }

  function drawPanel() {
    const { layer: r, position: t } = at;
    const value = (key) => lensColours[key].value(lens, r, t);
    const target = lens.targets ? lens.targets[t] : null;
    const bits = (x) => (isNumber(x) ? `${fixed(x)} bits` : "–");
    byId("lens-panel").replaceChildren(
      el("h3", {}, `${lens.points[r]}, position ${t}`),
      definitions([
        ["input", token(lens.ids[t])],
        ["target", isNumber(target) ? token(target) : "none follows"],
        ["entropy", bits(value("entropy"))],
        ["KL to final", bits(value("kl"))],
        ["rank of target", rankText(value("rank_target"))],
        ["rank of input", rankText(value("rank_input"))],
      ]),
      el("ol", { class: "bars" }, ...lens.top_ids[r][t].map((id, i) =>
        barRow([token(id), id === target ? el("span", { class: "tag" }, "target") : ""], lens.top_probs[r][t][i]))));
  }

  function paint() {
    const kind = lensColours[colour.value];
    const values = lens.points.map((_, r) => lens.ids.map((_, t) => kind.value(lens, r, t)));
    const most = Math.max(largest(values.flat()), 1e-9);
    cells.forEach((row, r) => row.forEach((cell, t) => {
      const value = values[r][t];
      const rgb = heat(isNumber(value) ? kind.share(value, most) : 0);
      cell.style.backgroundColor = css(rgb);
      cell.style.color = inkOn(rgb);
      cell.classList.toggle("right", !!lens.targets && lens.top_ids[r][t][0] === lens.targets[t]);
      const text = visible(lens.top_ids[r][t][0]);
      if (cell.textContent !== text) cell.textContent = text;
    }));
    const [from, to] = kind.ends(most);
    const bar = el("span", { class: "ramp", "aria-hidden": "true" });
    bar.style.backgroundImage = rampGradient(kind.reversed);
    byId("lens-scale").replaceChildren(el("span", {}, from), bar, el("span", {}, to));
    byId("lens-colour-text").textContent = `${kind.text} Underlined cells name the target.`;
  }

  function drawLayer() {
    const r = Number(slider.value);
    byId("lens-layer-name").textContent = lens.points[r];
    slider.setAttribute("aria-valuetext", lens.points[r]);
    byId("lens-grid").querySelectorAll("tr[data-layer]").forEach((row, i) => row.classList.toggle("marked", i === r));
    byId("lens-bars").replaceChildren(el("ol", { class: "columns" }, ...lens.ids.map((id, t) => {
      const share = lens.top_probs[r][t][0], first = lens.top_ids[r][t][0];
      const right = !!lens.targets && first === lens.targets[t];
      const bar = el("span", { class: `upright${right ? " right" : ""}`, "aria-hidden": "true" }, el("span"));
      bar.firstChild.style.height = `${isNumber(share) ? 100 * share : 0}%`;
      return el("li", { "data-position": t, title: `after ${visible(id)}: ${visible(first)}, ${fixed(share)}` },
        el("span", { class: "figure" }, fixed(share, 2)), bar, token(first),
        right ? el("span", { class: "unseen" }, "right") : null);
    })));
    if (curves) curves.redraw();
  }

  function drawCurves() {
    const means = (rows) => (rows || []).map((row, r) => [r, mean(row)]);
    const series = () => [
      { name: "mean KL to final", class: "s1", points: means(lens.kl), dots: true },
      { name: "mean entropy", class: "s2", points: means(lens.entropy), dots: true },
    ].filter((one) => one.points.some(([, value]) => isNumber(value)));
    if (!series().length) {
      byId("lens-means").remove();
      return;
    }
    const name = (r) => lens.points[r];
    curves = lineChart(byId("lens-curves"), () => ({
      label: `Means by layer; at ${name(slider.value)} ` + series().map((one) =>
        `${one.name} ${fixed(one.points[slider.value][1])} bits`).join(", "),
      titles: { x: "layer", y: "bits" },
      x: { ticks: lens.points.map((text, r) => [r, text]) },
      y: { include: [0] },
      mark: Number(slider.value), series: series(), when: name, value: (value) => `${fixed(value)} bits`,
    }), 260);
  }

  function drawAll() {
    drawGrid();
    paint();
    select(at.layer, at.position, false);
    drawLayer();
  }

  byId("lens-prompt").textContent = lens.prompt || "";
  slider.max = layers - 1;
  slider.value = layers - 1;
  slider.addEventListener("input", drawLayer);
  colour.addEventListener("change", paint);
  repaints.push(paint);
  if (kinds.lens && kinds.tuned) {
    byId("lens-kind").hidden = byId("lens-tuned-text").hidden = false;
    byId("lens-kind").addEventListener("change", () => {
      lens = kinds[document.querySelector("#lens-kind input:checked").value];
      drawAll();
    });
  }
  drawAll();
  drawCurves();
}

/** A name (nodes), a bar and its figure, which is in [0, 1]. */
const barRow = (name, figure) => el("li", {}, el("span", { class: "name" }, ...name), makeBar(figure),
  el("span", { class: "figure" }, fixed(figure)));
