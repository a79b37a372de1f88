// Line charts and scatters with a crosshair for the mouse, a finger or the arrow keys.

/**
 * An empty chart in `host`: `draw(svg, size)` fills it, now, after each change of width and on `redraw()`, and returns
 * what the crosshair needs: `count`, `nearest(x, y)` -> index, `at(index)` -> {x, y, dots, title, rows}.
 */
function makeChart(host, { height, label, draw }) {
  const svg = svgEl("svg", { role: "img", tabindex: "0", height });
  const tip = el("div", { class: "tip", role: "status" });
  let scene = null, index = null, width = 0;

  function hide() {
    index = null;
    tip.replaceChildren();
    tip.classList.remove("on");
    // Left where it was, it would make a page that has become narrower scroll sideways.
    tip.style.left = "0";
    svg.querySelectorAll(".cross").forEach((node) => node.remove());
  }

  function show(next) {
    if (!scene || !scene.count) return;
    hide();
    index = Math.min(scene.count - 1, Math.max(0, next));
    const { x, dots, title, rows } = scene.at(index);
    const cross = svgEl("g", { class: "cross" });
    if (scene.line) cross.append(svgEl("line", { x1: x, x2: x, y1: scene.top, y2: scene.bottom }));
    for (const dot of dots) cross.append(svgEl("circle", { cx: dot.x, cy: dot.y, r: 4.5, class: dot.class }));
    svg.append(cross);
    tip.append(el("b", {}, title));
    for (const row of rows) {
      tip.append(el("span", { class: `key ${row.class || ""}` }), el("span", {}, row.name), el("span", {}, row.value));
    }
    tip.classList.add("on");
    const beside = x + 14 + tip.offsetWidth <= width ? x + 14 : x - 14 - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(beside, width - tip.offsetWidth))}px`;
    tip.style.top = `${scene.top}px`;
  }

  function redraw() {
    width = Math.floor(host.clientWidth);
    if (!width) return;
    const kept = index;
    hide();
    svg.replaceChildren();
    svg.setAttribute("width", width);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", label());
    scene = draw(svg, { width, height });
    if (kept !== null) show(kept);
  }

  const point = (event) => {
    const box = svg.getBoundingClientRect();
    show(scene.nearest(event.clientX - box.left, event.clientY - box.top));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", () => document.activeElement !== svg && hide());
  svg.addEventListener("focus", () => index === null && show(Infinity));
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(scene.count / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") hide();
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    show((index === null ? scene.count : index) + moves[event.key]);
  });

  host.append(svg, tip);
  redraw();
  let waiting = false;
  // Drawing inside the observer's own call would make the browser report a loop.
  new ResizeObserver(() => {
    if (waiting || Math.floor(host.clientWidth) === width) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      redraw();
    });
  }).observe(host);
  return { redraw, svg };
}

/** The index in sorted `values` nearest to `value`. */
function nearestIndex(values, value) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle;
    else high = middle;
  }
  return high >= 0 && Math.abs(values[high] - value) < Math.abs(values[low] - value) ? high : low;
}

function legend(series) {
  const entries = series.map((one) => el("li", {},
    svgEl("svg", { width: 26, height: 12, "aria-hidden": "true", class: "swatch" },
      svgEl("path", { d: "M1 6H25", class: `line ${one.class}` }),
      one.dots ? svgEl("circle", { cx: 13, cy: 6, r: 3.5, class: `dot ${one.class}` }) : null),
    one.name));
  return el("ul", { class: "legend" }, ...entries);
}

/**
 * `spec()` is asked again at every redraw: {label, titles, height, x, y, right, series, mark, reference, when, value}.
 * A series is {name, class, points: [[x, y], ...], dots}.
 */
function lineChart(host, spec, height = 300) {
  const names = el("div");
  host.before(names);

  function draw(svg, size) {
    const { titles, x: xOptions = {}, y: yOptions = {}, right, series, mark, reference, when, value } = spec();
    names.replaceChildren(...(series.length > 1 ? [legend(series)] : []));
    const all = series.flatMap((one) => one.points);
    const x = makeScale(all.map(([at]) => at), xOptions);
    const ys = all.map(([, at]) => at);
    const y = makeScale(yOptions.log || yOptions.include ? ys : padded(ys), yOptions);
    const frame = drawFrame(svg, size, x, y, titles, right);
    if (isNumber(reference)) {
      const at = frame.py(reference);
      svg.append(svgEl("line", { class: "reference", x1: frame.left, x2: frame.end, y1: at, y2: at }));
    }
    if (isNumber(mark)) {
      const at = frame.px(mark);
      svg.append(svgEl("line", { class: "mark", x1: at, x2: at, y1: frame.top, y2: frame.bottom }));
    }
    const drawn = series.map((one) => drawSeries(svg, frame, one, x, y));
    const steps = [...new Set(drawn.flatMap((one) => one.points.map(([at]) => at)))].sort((a, b) => a - b);
    const pixels = steps.map(frame.px);
    return {
      ...frame, count: steps.length, line: true,
      nearest: (px) => nearestIndex(pixels, px),
      at(index) {
        const rows = [], dots = [];
        for (const one of drawn) {
          // Sparse series, such as the held-out loss, keep their last value, with its step.
          const last = one.points.filter(([at]) => at <= steps[index]).pop();
          if (!last) continue;
          const old = last[0] === steps[index] ? "" : ` (${when(last[0])})`;
          rows.push({ class: one.class, name: one.name + old, value: value(last[1]) });
          dots.push({ x: frame.px(last[0]), y: frame.py(last[1]), class: `dot ${one.class}` });
        }
        return { x: pixels[index], dots, title: when(steps[index]), rows };
      },
    };
  }

  return makeChart(host, { height, draw, label: () => spec().label });
}

/** One path for the line, broken where a value is missing; points without a neighbour would be unseen, so are dots. */
function drawSeries(svg, frame, series, x, y) {
  const usable = (point) => x.has(point[0]) && y.has(point[1]);
  const at = ([px, py]) => `${frame.px(px).toFixed(1)} ${frame.py(py).toFixed(1)}`;
  let path = "";
  series.points.forEach((point, i) => {
    if (usable(point)) path += `${i && usable(series.points[i - 1]) ? "L" : "M"}${at(point)}`;
  });
  const points = series.points.filter(usable);
  if (path) svg.append(svgEl("path", { class: `line ${series.class}`, d: path }));
  const lone = series.points.filter((point, i, all) =>
    usable(point) && !(i && usable(all[i - 1])) && !(i + 1 < all.length && usable(all[i + 1])));
  for (const [px, py] of series.dots ? points : lone) {
    const place = { cx: frame.px(px).toFixed(1), cy: frame.py(py).toFixed(1), r: 3.5 };
    svg.append(svgEl("circle", { class: `dot ${series.class}`, ...place }));
  }
  return { ...series, points };
}

/** `groups`: [{name, class, points: [{x, y, title, rows}]}]; thousands of points are one path for each group. */
function scatterChart(host, { label, titles, x: xOptions, y: yOptions, groups }, height = 340) {
  if (groups.length > 1) host.before(el("ul", { class: "legend" }, ...groups.map((group) => el("li", {},
    svgEl("svg", { width: 14, height: 14, "aria-hidden": "true", class: "swatch" },
      svgEl("path", { d: group.ring ? "M4 7h6" : "M7 7h0", class: `points ${group.class}` })), group.name))));

  function draw(svg, size) {
    const points = groups.flatMap((group) => group.points.map((point) => ({ ...point, class: group.class })));
    const x = makeScale(points.map((point) => point.x), xOptions);
    const y = makeScale(padded(points.map((point) => point.y)), yOptions);
    const frame = drawFrame(svg, size, x, y, titles);
    const placed = points.filter((point) => x.has(point.x) && y.has(point.y))
      .map((point) => ({ ...point, px: frame.px(point.x), py: frame.py(point.y) }))
      .sort((a, b) => a.px - b.px || a.py - b.py);
    for (const group of groups) {
      const d = placed.filter((point) => point.class === group.class)
        .map((point) => `M${point.px.toFixed(1)} ${point.py.toFixed(1)}${group.ring ? "m-3 0h6" : "h0"}`).join("");
      if (d) svg.append(svgEl("path", { class: `points ${group.class}`, d }));
    }
    return {
      ...frame, count: placed.length, line: false,
      nearest(px, py) {
        let best = 0, least = Infinity;
        placed.forEach((point, i) => {
          const distance = (point.px - px) ** 2 + (point.py - py) ** 2;
          if (distance < least) [best, least] = [i, distance];
        });
        return best;
      },
      at(index) {
        const point = placed[index];
        const dots = [{ x: point.px, y: point.py, class: `dot ${point.class}` }];
        return { x: point.px, dots, title: point.title, rows: point.rows };
      },
    };
  }

  return makeChart(host, { height, draw, label: () => label });
}
