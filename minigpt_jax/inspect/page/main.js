// The page: header, table of contents, and each section that has data.

const some = (list) => Array.isArray(list) && list.length > 0;

const sections = [
  ["loss", "Loss", data.loss && (some(data.loss.train) || some(data.loss.val)), () => drawLoss(data.loss)],
  ["params", "Parameters", data.params && some(data.params.rows), () => drawParams(data.params)],
  ["tied", "Tied gradient", some(data.tied) || (data.gradient && data.gradient.stats), () => drawTied(data)],
  ["tokens", "Tokens", some(data.tokens), () => drawTokens(data.tokens)],
  ["lens", "Lens", [data.lens, data.tuned].some((lens) => lens && some(lens.points) && some(lens.ids)), drawLens],
  ["neighbours", "Neighbours", data.neighbours && some(data.neighbours.of), () => drawNeighbours(data.neighbours)],
  ["geometry", "Geometry", some(data.singular_values) || data.consistency, () => drawGeometry(data)],
];

function drawHeader() {
  const parts = [isNumber(data.step) ? stepText(data.step) : null, data.version ? `minigpt_jax ${data.version}` : null,
    data.made];
  byId("made").textContent = parts.filter(Boolean).join(" · ");
  byId("notes").append(...(data.notes || []).map((note) => el("li", {}, note)));
  if (!some(data.notes)) byId("notes").remove();
  if (some(data.summary)) byId("summary").replaceWith(fill(definitions(data.summary), { id: "summary" }, []));
  else byId("summary").remove();
}

function drawSection([id, name, present, draw]) {
  const section = byId(id);
  if (!present) {
    section.remove();
    return;
  }
  section.hidden = false;
  byId("toc").append(el("li", {}, el("a", { href: `#${id}` }, name)));
  try {
    draw();
  } catch (error) {
    // One section with odd data must not take the others with it.
    console.error(error);
    section.append(el("p", { class: "failed" }, `This section could not be drawn: ${error.message}`));
  }
}

byId("theme").addEventListener("change", applyTheme);
darkPreferred.addEventListener("change", applyTheme);
applyTheme();
drawHeader();
sections.forEach(drawSection);
// The browser looked for the anchor before its section was there.
if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
