// E itself: which rows lie near each other, and how its directions are used.

const MATCHES_SHOWN = 80;

function drawNeighbours({ ids, cosines, of }) {
  const rowOf = new Map(of.map((id, row) => [id, row]));
  const search = byId("neighbour-search");
  let chosen = null;

  /** Ids by the typed text: equal to it first, then containing it, then by number. */
  function found(typed) {
    if (!typed) return of;
    const equal = of.filter((id) => tokenText(id) === typed || visible(id) === typed);
    const taken = new Set(equal);
    const numbered = /^#\d+$/.test(typed) ? Number(typed.slice(1)) : null;
    const rest = of.filter((id) => !taken.has(id) && id !== numbered && tokenMatches(id, typed));
    const last = rowOf.has(numbered) && !taken.has(numbered) ? [numbered] : [];
    return [...equal, ...rest, ...last];
  }

  /** Shows the matches, and gives the best one. */
  function list() {
    const all = found(search.value);
    const part = all.slice(0, MATCHES_SHOWN);
    const more = all.length > part.length ? `, the first ${part.length} of them shown` : "";
    const tokens = `${number(all.length)} token${all.length === 1 ? "" : "s"}`;
    byId("neighbour-count").textContent = all.length ? `${tokens}${more}.` : `No token fits “${search.value}”.`;
    byId("neighbour-matches").replaceChildren(...part.map((id) => {
      const button = el("button", { type: "button", class: "match", "aria-pressed": String(id === chosen) }, token(id));
      button.addEventListener("click", () => choose(id));
      button.dataset.id = id;
      return button;
    }));
    return all[0];
  }

  function press() {
    for (const button of byId("neighbour-matches").children) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.id) === chosen));
    }
  }

  function choose(id) {
    chosen = id;
    press();
    const row = rowOf.get(id);
    const head = el("h3", { tabindex: "-1" }, "Nearest to ", token(id), " ", el("span", { class: "hint" }, `#${id}`));
    const rows = ids[row].map((near, i) => {
      let name = token(near);
      if (rowOf.has(near)) {
        name = el("button", { type: "button", class: "match" }, name);
        name.addEventListener("click", () => {
          choose(near);
          byId("neighbour-chosen").querySelector("h3").focus();
        });
      }
      return barRow([name], cosines[row][i]);
    });
    byId("neighbour-chosen").replaceChildren(head, el("ol", { class: "bars wide" }, ...rows));
  }

  search.addEventListener("input", () => {
    const best = list();
    if (search.value && best !== undefined) choose(best);
  });
  search.addEventListener("keydown", (event) => {
    const best = event.key === "Enter" ? found(search.value)[0] : undefined;
    if (best !== undefined) choose(best);
  });
  list();
  // A frequent letter or word is a better first example than a newline or an unused row.
  const counts = new Map((data.tokens || []).map((row) => [row.id, row.train_count || 0]));
  const words = of.filter((id) => /^\s?\p{L}/u.test(tokenText(id) || ""));
  choose((words.length ? words : of).reduce((a, b) => ((counts.get(b) || 0) > (counts.get(a) || 0) ? b : a)));
}

function drawGeometry({ singular_values: values, consistency }) {
  if (values && values.length) drawSingularValues(values);
  else byId("singular-part").remove();
  if (consistency && isNumber(consistency.share)) drawConsistency(consistency);
  else byId("consistency").remove();
}

function drawSingularValues(values) {
  const squares = values.map((value) => (isNumber(value) ? value * value : 0));
  const total = squares.reduce((sum, value) => sum + value, 0);
  let sum = 0, count = 0;
  while (count < squares.length && sum < 0.9 * total) sum += squares[count++];
  const zeros = values.filter((value) => !(value > 0)).length;
  byId("singular-text").textContent = `90% of the squared norm lies in the first ${number(count)} of ` +
    `${number(values.length)} directions.${zeros ? ` Zero, and so not drawn: ${number(zeros)}.` : ""}`;
  lineChart(byId("singular-chart"), () => ({
    label: `Singular values of E; the largest is ${number(values[0])}, the smallest ` +
      number(values[values.length - 1]),
    titles: { x: "index", y: "singular value (logarithmic)" },
    y: { log: true },
    series: [{ name: "singular value", class: "s1", points: values.map((value, i) => [i + 1, value]),
      dots: values.length <= 80 }],
    when: (index) => `number ${number(index)}`, value: number,
  }));
}

function drawConsistency({ share, failures }) {
  const result = byId("consistency-result");
  result.append(el("p", {}, el("b", { class: "big" }, percent(share)), " of the tokens name themselves."));
  if (!failures || !failures.length) return;
  result.append(el("p", { class: "hint" }, `Those that name another${failures.length >= 50 ? ", the first 50" : ""}:`));
  result.append(el("ul", { class: "chips" }, ...failures.map(([id, other]) =>
    el("li", {}, token(id), el("span", { class: "unseen" }, " names "), el("span", { "aria-hidden": "true" }, " → "),
      token(other)))));
}
