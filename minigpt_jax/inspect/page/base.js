// Elements, numbers, token texts and colours: what every section uses.

const data = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  // append() makes text nodes of strings, so no text of a token is ever read as markup.
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

const svgEl = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// --- numbers

const grouped = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

const typographic = (text) => text.replace("-", "−");

/** A number to `digits` significant digits; whole ones in full, very large and very small ones with an exponent. */
function number(value, digits = 4) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e12) return typographic(grouped.format(value));
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 2).replace(/-/g, "−");
  return typographic(size >= 10 ** (digits - 1) ? grouped.format(value) : value.toPrecision(digits));
}

const fixed = (value, digits = 3) => (isNumber(value) ? typographic(value.toFixed(digits)) : "–");

const percent = (value, digits = 1) => (isNumber(value) ? `${fixed(100 * value, digits)}%` : "–");

const mean = (values) => {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};

// Math.max(...values) overflows the stack on long arrays.
const largest = (values) => values.reduce((best, value) => (isNumber(value) && value > best ? value : best), -Infinity);

// --- tokens

const shown = new Map([["\n", "⏎"], [" ", "␣"], ["\t", "⇥"], ["\r", "␍"]]);

const tokenText = (id) => {
  const text = data.texts && data.texts[id];
  return typeof text === "string" ? text : null;
};

/** The text of a token with nothing invisible in it; a row without a token goes by its number. */
function visible(id) {
  const text = tokenText(id);
  if (!text) return `#${id}`;
  const marked = text.replace(/[\p{C}\p{Z}]/gu, (character) => {
    // Emoji are joined by U+200D: shown apart they would be other emoji.
    if (character === "\u200d" && text.length > 1) return character;
    return shown.get(character) || `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  });
  return /^\p{M}/u.test(marked) ? `◌${marked}` : marked;
}

/** The real text, quoted, and the id: what the tooltip of a token says. */
const exact = (id) => (tokenText(id) ? `${JSON.stringify(tokenText(id))}, #${id}` : `#${id}, a row without a token`);

const token = (id) =>
  isNumber(id) && id >= 0
    ? el("span", { class: tokenText(id) ? "token" : "token bare", title: exact(id) }, visible(id))
    : el("span", { class: "none" }, "–");

/** Whether a token is meant by what was typed: its text, its text as shown, or its id as "#12". */
function tokenMatches(id, typed) {
  if (/^#\d+$/.test(typed) && Number(typed.slice(1)) === id) return true;
  const low = typed.toLowerCase();
  return [tokenText(id) || "", visible(id)].some((text) => text.toLowerCase().includes(low));
}

// --- colours

const darkPreferred = window.matchMedia("(prefers-color-scheme: dark)");
const repaints = [];

const themeChosen = () => document.querySelector("#theme input:checked").value;

const isDark = () => (themeChosen() === "auto" ? darkPreferred.matches : themeChosen() === "dark");

function applyTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const repaint of repaints) repaint();
}

// One hue, from the page's own background to the strongest ink: more is always further from the background.
const ramps = {
  light: [[244, 241, 235], [201, 219, 234], [126, 174, 211], [52, 120, 178], [16, 58, 110]],
  dark: [[31, 37, 46], [36, 66, 97], [47, 109, 161], [108, 174, 220], [218, 238, 252]],
};

/** [r, g, b] of a share in [0, 1]. */
function heat(share) {
  const ramp = ramps[isDark() ? "dark" : "light"];
  const at = Math.min(1, Math.max(0, share)) * (ramp.length - 1);
  const low = Math.min(Math.floor(at), ramp.length - 2);
  return ramp[low].map((from, i) => Math.round(from + (at - low) * (ramp[low + 1][i] - from)));
}

const css = (rgb) => `rgb(${rgb.join(", ")})`;

/** Black or white, whichever has the higher contrast by WCAG; it is never below 4.58. */
function inkOn(rgb) {
  const [r, g, b] = rgb.map((channel) => {
    const c = channel / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

const rampGradient = (reversed) => {
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => css(heat(reversed ? 1 - share : share)));
  return `linear-gradient(to right, ${stops.join(", ")})`;
};
