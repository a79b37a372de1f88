// What happened over the steps: the loss, and the two parts of the tied gradient.

const stepText = (step) => `step ${number(step)}`;

/** Mean of as many points before as after: an average of the past alone would lie above the steep start of a run. */
function smooth(points) {
  const known = points.filter(([, value]) => isNumber(value));
  const sums = [0];
  for (const [, value] of known) sums.push(sums[sums.length - 1] + value);
  const widest = Math.min(15, Math.floor(known.length / 20));
  return known.map(([step], i) => {
    const half = Math.min(widest, i, known.length - 1 - i);
    return [step, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)];
  });
}

function drawLoss({ train, val, bits_per_nat: ratio }) {
  const unit = data.unit || "token";
  const bits = (nats) => (isNumber(ratio) ? `, ${number(nats * ratio)} bits` : "");
  const series = [];
  if (train && train.length) {
    series.push({ name: "training, each step", class: "faint", points: train });
    if (train.length > 1) series.push({ name: "training, smoothed", class: "s1", points: smooth(train) });
  }
  if (val && val.length) series.push({ name: "held out", class: "s2", points: val, dots: true });
  const last = (val && val.length ? val : train).slice(-1)[0];
  const kind = val && val.length ? "held-out" : "training";
  lineChart(byId("loss-chart"), () => ({
    label: `Loss over steps; last ${kind} loss ${number(last[1])} nats${bits(last[1])} at ${stepText(last[0])}`,
    titles: { x: "step", y: "nats per token", right: isNumber(ratio) ? `bits per ${unit}` : null },
    right: isNumber(ratio) ? { ratio } : null,
    series,
    when: stepText,
    value: (nats) => `${number(nats)} nats${bits(nats)}`,
  }), 340);
}

const NORMS = [["l2", "L2"], ["l2_squared", "L2 squared"], ["l1", "L1"]];

const PARTS = [["lookup", "lookup part", "s1"], ["head", "head part", "s2"], ["sum", "sum", "s3"]];

function drawTiedCharts(records) {
  const log = byId("tied-log");
  const curve = (key) => records.map((record) => [record.step, record[key]]);
  const last = records[records.length - 1];
  const x = () => ({ log: log.checked, zero: true });
  const titles = (y) => ({ x: log.checked ? "step (logarithmic)" : "step", y });
  const norm = () => document.querySelector("#tied-norm input:checked").value;
  const normName = () => NORMS.find(([key]) => key === norm())[1];

  const share = lineChart(byId("tied-share"), () => ({
    label: "Share of the head part over steps; at the last record " +
      NORMS.map(([key, name]) => `${percent(last[`head_share_${key}`])} by ${name}`).join(", "),
    titles: titles("share of the head"),
    x: x(), y: { include: [0, 1] }, reference: 0.5,
    series: NORMS.map(([key, name], i) => ({ name, class: `s${4 + i}`, points: curve(`head_share_${key}`) })),
    when: stepText, value: (value) => percent(value),
  }), 280);

  const norms = lineChart(byId("tied-norms"), () => ({
    label: `${normName()} of the parts over steps; at the last record ` +
      PARTS.map(([key, name]) => `${name} ${number(last[`${key}_${norm()}`])}`).join(", "),
    titles: titles(`${normName()} (logarithmic)`),
    x: x(), y: { log: true },
    series: PARTS.map(([key, name, style]) => ({ name, class: style, points: curve(`${key}_${norm()}`) })),
    when: stepText, value: number,
  }), 280);

  const charts = [share, norms];
  const known = PARTS.filter(([key]) => records.some((record) => isNumber(record[`update_cosine_${key}`])));
  if (known.length) {
    charts.push(lineChart(byId("tied-update"), () => ({
      label: "Cosine of the update with each part’s descent direction; at the last record " +
        known.map(([key, name]) => `${name} ${fixed(last[`update_cosine_${key}`])}`).join(", "),
      titles: titles("cosine"),
      x: x(), y: { include: [0, ...padded(known.flatMap(([key]) => curve(`update_cosine_${key}`).map((p) => p[1])))] },
      reference: 0,
      series: known.map(([key, name, style]) => ({ name, class: style, points: curve(`update_cosine_${key}`) })),
      when: stepText, value: (value) => fixed(value),
    }), 280));
  } else {
    byId("tied-update-part").remove();
  }
  log.addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
  byId("tied-norm").addEventListener("change", () => norms.redraw());
}

function drawGradient({ source, stats }) {
  byId("gradient-source").textContent = source ? `, on ${source}` : "";
  const head = el("tr", {}, ...["norm", "lookup part", "head part", "sum", "share of the head"].map((name, i) =>
    el("th", { scope: "col", class: i ? null : "text" }, name)));
  const rows = NORMS.map(([key, name]) => el("tr", {}, el("th", { scope: "row", class: "text" }, name),
    ...PARTS.map(([part]) => el("td", {}, number(stats[`${part}_${key}`]))),
    el("td", {}, shareBar(stats[`head_share_${key}`]))));
  const figures = [
    ["cosine of the parts", fixed(stats.cosine)],
    ["inner product", number(stats.inner_product)],
    ["rows read as input", number(stats.lookup_rows)],
  ];
  byId("gradient-tables").append(
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The split at the checkpoint" },
      el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))),
    definitions(figures));
}

const definitions = (pairs) => el("dl", { class: "figures" },
  ...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

function drawTied({ tied, gradient }) {
  if (tied && tied.length) drawTiedCharts(tied);
  else byId("tied-charts").remove();
  if (gradient && gradient.stats) drawGradient(gradient);
  else byId("gradient").remove();
}
