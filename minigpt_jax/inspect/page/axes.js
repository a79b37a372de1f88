// Scales, ticks and the frame of a chart, in pixels of the chart's real width so that text keeps its size.

const FONT = 12;

function niceStep(span, count) {
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.85);
}

function linearTicks(low, high, count) {
  const step = niceStep(high - low, count);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) {
    const value = i * step;
    ticks.push([value, digits > 4 ? number(value, 3) : typographic(Math.abs(value) < step / 2 ? "0" : digits
      ? value.toFixed(digits) : grouped.format(value))]);
  }
  return ticks;
}

function powerText(value) {
  if (value >= 1e9 || value < 1e-3) return value.toExponential(0).replace("e+", "e").replace("-", "−");
  if (value >= 1e6) return `${Math.round(value / 1e6)}M`;
  return value >= 1e3 ? `${Math.round(value / 1e3)}k` : String(Number(value.toPrecision(1)));
}

/** The densest of a few usual sets of ticks that is not above `count`. */
function logTicks(low, high, count) {
  const from = Math.floor(Math.log10(low) + 1e-9), to = Math.ceil(Math.log10(high) - 1e-9);
  const sparse = Array.from({ length: 8 }, (_, i) => [i + 1, [1]]);
  for (const [every, multiples] of [[1, [1, 2, 5]], [1, [1, 3]], ...sparse]) {
    const ticks = [];
    for (let power = from; power <= to; power += every) {
      for (const multiple of multiples) {
        const value = multiple * 10 ** power;
        if (value >= low * 0.9999 && value <= high * 1.0001) ticks.push([value, powerText(value)]);
      }
    }
    if (ticks.length <= count) return ticks.length > 1 ? ticks : linearTicks(low, high, count);
  }
  return linearTicks(low, high, count);
}

/**
 * A scale over `values` before it knows its pixels. `log` leaves out what has no logarithm, unless `zero`: then 0 gets
 * a place of its own left of the smallest positive value.
 */
function makeScale(values, { log = false, zero = false, include = [], ticks = null } = {}) {
  const known = [...values, ...include].filter(isNumber);
  const usable = log ? known.filter((value) => value > 0) : known;
  let low = usable.reduce((a, b) => Math.min(a, b), Infinity);
  let high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (low === Infinity) [low, high] = log ? [1, 10] : [0, 1];
  const gutter = log && zero && known.some((value) => value === 0);
  const flat = high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high));
  if (flat && log) [low, high] = [low / 2, high * 2];
  if (flat && !log) [low, high] = [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  const place = log ? Math.log10 : (value) => value;
  const from = place(low) - (gutter ? 0.08 * (place(high) - place(low)) + 0.1 : 0);
  const to = place(high);
  return {
    low, high, log,
    has: (value) => isNumber(value) && (!log || value > 0 || (gutter && value === 0)),
    share: (value) => (gutter && value === 0 ? 0 : (place(value) - from) / (to - from)),
    ticks(count) {
      if (ticks) return ticks.filter((_, i) => i % Math.ceil(ticks.length / count) === 0 || i === ticks.length - 1);
      const marks = log ? logTicks(low, high, count) : linearTicks(low, high, count);
      return gutter ? [[0, "0"], ...marks] : marks;
    },
  };
}

/** Some room above and below the data, where a linear axis does not start or end at a natural bound. */
function padded(values, share = 0.04) {
  const known = values.filter(isNumber);
  if (!known.length) return [];
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  return [low - share * (high - low), high + share * (high - low)];
}

const textWidth = (text) => text.length * FONT * 0.58;

/** Grid lines, ticks and axis titles; returns where values lie. `right` is a second reading of the same y axis. */
function drawFrame(svg, size, x, y, titles, right) {
  const yTicks = y.ticks(Math.max(3, Math.floor(size.height / 55)));
  const left = Math.max(...yTicks.map(([, text]) => textWidth(text)), 8) + 10;
  const rightTicks = right ? linearTicks(y.low * right.ratio, y.high * right.ratio, Math.floor(size.height / 55)) : [];
  const end = size.width - (right ? Math.max(...rightTicks.map(([, text]) => textWidth(text)), 8) + 12 : 12);
  const top = titles.y || titles.right ? 28 : 12;
  const bottom = size.height - 40;
  const px = (value) => left + x.share(value) * (end - left);
  const py = (value) => bottom - y.share(value) * (bottom - top);
  const label = (text, at, attributes = {}) => svgEl("text", { x: at[0], y: at[1], ...attributes }, text);

  const grid = svgEl("g", { class: "grid" });
  for (const [value, text] of yTicks) {
    grid.append(svgEl("line", { x1: left, x2: end, y1: py(value), y2: py(value) }));
    grid.append(label(text, [left - 8, py(value) + 4], { "text-anchor": "end" }));
  }
  for (const [value, text] of rightTicks) {
    grid.append(label(text, [end + 8, py(value / right.ratio) + 4]));
  }
  let free = -Infinity;
  const widest = Math.max(...x.ticks(99).slice(-1).map(([, text]) => textWidth(text)), 20);
  for (const [value, text] of x.ticks(Math.max(2, Math.floor((end - left) / (widest + 24))))) {
    const half = textWidth(text) / 2;
    const middle = Math.min(px(value), size.width - half);
    grid.append(svgEl("line", { x1: px(value), x2: px(value), y1: bottom, y2: bottom + 4 }));
    if (middle - half < free) continue;
    free = middle + half + 6;
    grid.append(label(text, [middle, bottom + 18], { "text-anchor": "middle" }));
  }
  grid.append(svgEl("line", { class: "axis", x1: left, x2: end, y1: bottom, y2: bottom }));
  grid.append(label(titles.x, [(left + end) / 2, size.height - 5], { class: "title", "text-anchor": "middle" }));
  if (titles.y) grid.append(label(titles.y, [0, 13], { class: "title" }));
  if (titles.right) grid.append(label(titles.right, [size.width, 13], { class: "title", "text-anchor": "end" }));
  svg.append(grid);
  return { px, py, left, end, top, bottom };
}
