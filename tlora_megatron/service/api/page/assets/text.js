// Elements and numbers. All text goes through `textContent`: nothing that a user named is markup.

const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const h = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);

const s = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Puts new children into a node; what had the keyboard's focus, by its key, has it again.
function show(node, ...children) {
  const held = node.contains(document.activeElement) && document.activeElement.dataset.key;
  node.replaceChildren(...children.flat());
  if (!held) return;
  const again = node.querySelector(`[data-key="${CSS.escape(held)}"]`);
  if (again) again.focus({ preventScroll: true });
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function count(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US") : "–";
}

function compact(value) {
  if (!isNumber(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(1)}k` : count(value);
}

function precise(value) {
  if (!isNumber(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return value.toExponential(2);
  return value.toPrecision(4);
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 1) return `${(1e3 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 90 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : duration(value);
}

function duration(value) {
  let left = Math.max(0, Math.floor(value));
  const parts = [];
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const number = Math.floor(left / size);
    left -= number * size;
    if (number || (unit === "s" && !parts.length)) parts.push(`${number} ${unit}`);
    else if (parts.length) break;
  }
  return parts.slice(0, 2).join(" ");
}

const clock = (at) => new Date(1e3 * at).toLocaleTimeString("en-GB");

const many = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// The colour of a gang: its name ends in a number, so neighbours differ.
function colour(gang) {
  const number = parseInt(String(gang).replace(/\D+/g, ""), 10) || 0;
  return `k${number % 8}`;
}

function gangChip(gang) {
  return h("span", { class: `chip gang ${colour(gang)}` }, gang);
}
