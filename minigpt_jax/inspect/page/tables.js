// Sortable tables: the parameters and the tokens.

const ROWS_AT_FIRST = 200;

/**
 * A table sorted by the buttons in its head. A column is {key, name, title, text, value(row), cell(row)}: `value`
 * sorts, `cell` shows; `text` columns start with A, number columns with the largest. Missing values come last, both
 * ways.
 */
function sortableTable({ caption, columns, rows, sort = null }) {
  let order = sort, limit = ROWS_AT_FIRST, listed = rows;
  const heads = columns.map((column) => {
    const button = el("button", { type: "button", title: column.title }, column.name);
    const head = el("th", { scope: "col", class: column.text ? "text" : null }, button);
    button.addEventListener("click", () => {
      const down = order && order.key === column.key ? !order.down : !column.text;
      order = { key: column.key, down };
      paint();
    });
    return head;
  });
  const body = el("tbody");
  const more = el("p", { class: "more" });
  const table = el("table", {}, el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, ...heads)), body);
  const box = el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": caption }, table);

  function sorted() {
    if (!order) return listed;
    const { value } = columns.find((column) => column.key === order.key);
    const sign = order.down ? -1 : 1;
    const missing = (x) => x === null || x === undefined;
    return listed.map((row) => [value(row), row]).sort(([a], [b]) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      return sign * (typeof a === "string" ? (a < b ? -1 : a > b ? 1 : 0) : a - b);
    }).map(([, row]) => row);
  }

  function paint() {
    columns.forEach((column, i) => {
      const state = order && order.key === column.key ? (order.down ? "descending" : "ascending") : "none";
      heads[i].setAttribute("aria-sort", state);
    });
    const part = sorted().slice(0, limit);
    body.replaceChildren(...part.map((row) => el("tr", {}, ...columns.map((column) =>
      el("td", { class: column.text ? "text" : null }, column.cell(row))))));
    more.replaceChildren();
    if (!listed.length) more.append("No row fits.");
    if (listed.length > part.length) {
      const button = el("button", { type: "button" }, `Show all ${number(listed.length)}`);
      button.addEventListener("click", () => {
        limit = Infinity;
        paint();
        box.focus();
      });
      more.append(`The first ${number(part.length)} of ${number(listed.length)} rows. `, button);
    }
  }

  paint();
  return {
    node: el("div", {}, box, more),
    list(part) {
      listed = part;
      limit = ROWS_AT_FIRST;
      box.scrollTop = 0;
      paint();
    },
  };
}

const column = (key, name, title, show) =>
  ({ key, name, title, value: (row) => row[key], cell: (row) => show(row[key]) });

const textColumn = (key, name, title, cell, value) =>
  ({ key, name, title, text: true, value: value || ((row) => row[key]), cell });

/** A bar that is full at `full`, for numbers that stand beside it. */
function makeBar(value, full = 1) {
  const bar = el("span", { class: "bar", "aria-hidden": "true" }, el("span"));
  bar.firstChild.style.width = `${isNumber(value) && full > 0 ? 100 * Math.min(1, Math.max(0, value / full)) : 0}%`;
  return bar;
}

function shareBar(share, full = 1) {
  const bar = makeBar(share, full);
  return el("span", { class: "barred" }, bar, el("span", { class: "figure" }, percent(share)));
}

function drawParams({ total, embedding, rows }) {
  const most = largest(rows.map((row) => row.share));
  const columns = [
    textColumn("path", "path", "path in the params pytree", (row) => el("code", {}, row.path)),
    textColumn("shape", "shape", "rows × columns; sorts by size", (row) => row.shape.join(" × ") || "scalar",
      (row) => row.count),
    column("count", "parameters", "number of values", number),
    column("bytes", "bytes", "memory of the values", number),
    textColumn("used_by", "used by", "the uses of a shared array", (row) => row.used_by || ""),
    column("l2", "L2 norm", "root of the sum of squares", number),
    column("rms", "rms", "root of the mean square: the typical size of one value", number),
    column("max", "max |x|", "largest absolute value", number),
    column("share", "share", "part of the squared norm of all parameters", (share) => shareBar(share, most)),
  ];
  const bytes = rows.reduce((sum, row) => sum + (row.bytes || 0), 0);
  const totals = [["total", number(total)], ["bytes", number(bytes)]];
  if (isNumber(embedding) && total) {
    totals.push(["of it the token table E", `${number(embedding)} (${percent(embedding / total)})`],
      ["without E", number(total - embedding)]);
  }
  byId("params-totals").append(definitions(totals));
  byId("params-table").append(sortableTable({ caption: "Parameters", columns, rows }).node);
}

function drawTokens(rows) {
  const marked = (row) => el("span", {}, token(row.id),
    row.softmax_only ? el("span", { class: "tag" }, "softmax only") : null);
  const columns = [
    textColumn("text", "token", "the token’s text", marked, (row) => visible(row.id)),
    column("id", "id", "row of E", number),
    column("inputs", "inputs", "times read in this batch", number),
    column("targets", "targets", "times to be predicted in this batch", number),
    column("lookup_l2", "lookup L2", "L2 norm of the row of the lookup part", number),
    column("head_l2", "head L2", "L2 norm of the row of the head part", number),
    column("cosine", "cosine", "between the two parts of this row; none where the lookup part is zero", fixed),
    column("row_norm", "row norm", "L2 norm of the row of E itself", number),
    column("train_count", "in training", "times the token occurs in the training text", number),
  ];
  const table = sortableTable({ caption: "Tokens", columns, rows, sort: { key: "head_l2", down: true } });
  const filter = el("input", { type: "search", id: "tokens-filter", autocomplete: "off", spellcheck: "false",
    placeholder: "text, or #12 for an id" });
  const count = el("span", { class: "hint", role: "status" });
  filter.addEventListener("input", () => {
    const part = rows.filter((row) => tokenMatches(row.id, filter.value));
    count.textContent = filter.value ? `${number(part.length)} of ${number(rows.length)}` : "";
    table.list(part);
  });
  byId("tokens-table").append(el("p", { class: "controls" }, el("label", {}, "Filter ", filter), count), table.node);
  drawTokenScatter(rows);
}

function drawTokenScatter(rows) {
  const known = rows.filter((row) => isNumber(row.train_count) && isNumber(row.row_norm));
  if (!known.length) {
    byId("tokens-scatter").remove();
    return;
  }
  const point = (row) => ({
    x: row.train_count, y: row.row_norm, title: `${visible(row.id)}  #${row.id}`,
    rows: [{ name: "row norm", value: number(row.row_norm) }, { name: "in training", value: number(row.train_count) }],
  });
  const group = (name, style, part) => ({ name, class: style, ring: style === "p2", points: part.map(point) });
  const longest = known.reduce((a, b) => (a.row_norm >= b.row_norm ? a : b));
  scatterChart(byId("tokens-chart"), {
    label: `Row norm against training count of ${number(known.length)} tokens; the longest row is ` +
      `${visible(longest.id)} with norm ${number(longest.row_norm)}`,
    titles: { x: "occurrences in the training text (logarithmic)", y: "norm of the row of E" },
    x: { log: true, zero: true },
    y: {},
    groups: [group("read or predicted here", "p1", known.filter((row) => !row.softmax_only)),
      group("softmax only", "p2", known.filter((row) => row.softmax_only))].filter((one) => one.points.length),
  });
}
