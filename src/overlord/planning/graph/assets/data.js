// The facts of the step, unpacked, and the few numbers that every picture needs.

const $ = (id) => document.getElementById(id);
const F = JSON.parse($("facts").textContent);
const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };
const COLOURS = 8;
const OTHERS = F.sources.length; // in cells: the sources that are summed up

function unpack([kind, text]) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new KINDS[kind](bytes.buffer);
}

function unpackAll(columns) {
  const isColumn = (c) => Array.isArray(c) && c.length === 2 && c[0] in KINDS && typeof c[1] === "string";
  return Object.fromEntries(Object.entries(columns).map(([name, c]) => [name, isColumn(c) ? unpack(c) : c]));
}

// Where the rows of each bucket begin, in columns that are sorted by bucket.
function starts(bucket, n) {
  const at = new Uint32Array(n + 1);
  for (const b of bucket) at[b + 1]++;
  for (let b = 0; b < n; b++) at[b + 1] += at[b];
  return at;
}

function inOrder(items) {
  const order = Uint32Array.from(items.sample, (_, i) => i);
  order.sort((i, j) => items.bucket[i] - items.bucket[j] || items.microbatch[i] - items.microbatch[j] || items.slot[i] - items.slot[j]);
  const sorted = {};
  for (const [name, column] of Object.entries(items)) sorted[name] = column.map((_, i) => column[order[i]]);
  return sorted;
}

const ids = unpackAll(F.kept.ids);
const modules = F.modules.map((m) => {
  const grid = unpackAll(m.grid), cells = unpackAll(m.cells), items = inOrder(unpackAll(m.kept));
  const totals = {};
  for (const what of ["cost", "size", "count"]) {
    const sum = (totals[what] = new Float64Array(m.buckets));
    for (let i = 0; i < grid[what].length; i++) sum[Math.floor(i / grid.columns)] += grid[what][i];
  }
  const mean = {}, top = {};
  for (const what of ["cost", "size"]) {
    mean[what] = totals[what].reduce((a, b) => a + b, 0) / m.buckets || 1;
    top[what] = totals[what].reduce((best, v, b) => (v > totals[what][best] ? b : best), 0);
  }
  const whole = items.sample.length === m.items; // every item is listed, not just the dearest
  const noun = m.per_item ? "items" : "samples";
  const served = m.constructor ? unpack(m.constructor) : null;
  return { ...m, placed: m.items, grid, cells, items, totals, mean, top, whole, noun, served,
    cellStart: starts(cells.bucket, m.buckets), itemStart: starts(items.bucket, m.buckets) };
});

const state = { module: 0, measure: "cost", order: "number", from: 0, to: modules[0].buckets, hot: null, bucket: null, sample: null };
const now = () => modules[state.module];

// Colours go to the sources that cost most; a step of 300 sources has no 300 colours that can be told apart.
const colourOf = (() => {
  const cost = new Float64Array(F.sources.length + 1);
  const m = modules[0];
  m.cells.source.forEach((s, i) => (cost[s] += m.cells.cost[i]));
  const all = F.sources.map((_, i) => i);
  const ranked = all.length <= COLOURS ? all : [...all].sort((a, b) => cost[b] - cost[a] || a - b).slice(0, COLOURS - 1).sort((a, b) => a - b);
  return new Map(ranked.map((s, k) => [s, `--s${k}`]));
})();

let css = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  css = new Proxy({}, { get: (seen, name) => (seen[name] ??= style.getPropertyValue(name).trim()) });
}
const sourceColour = (s) => css[colourOf.get(s) || (s === state.hot ? "--hot" : "--other")];
const sourceName = (s) => (s === OTHERS ? "the other sources" : F.sources[s].name);

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const count = (n) => whole.format(n);
const ratio = (v) => v.toFixed(3);
const percent = (v, digits = 1) => `${(100 * v).toFixed(digits)}%`;
const signed = (v) => (v < 0 ? "−" : "+") + percent(Math.abs(v), Math.abs(v) < 0.0995 ? 2 : 1);
const few = (n) => (n >= 1e6 || (n && n < 1e-3) ? n.toExponential(2) : n >= 100 ? count(n) : Number(n.toPrecision(3)).toString());
const plural = (n, noun) => `${count(n)} ${n === 1 ? noun.replace(/(ch)es$|s$/, "$1") : noun}`;

function sampleId(k) {
  const part = ids.part[k] ? `/p${ids.part[k]}` : "";
  return `${F.sources[ids.source[k]].name}/e${ids.epoch[k]}/f${ids.file[k]}/r${ids.row[k]}${part}`;
}
const ranksOf = (m, b) => (m.ranks ? m.ranks[b] : String(b));
const constructorOf = (m, b) => `constructor/${m.served ? m.served[b] : b}`;
const unitOf = (measure, m = now()) => (measure === "cost" ? "cost" : m.per_item ? "size" : "tokens");
const sized = (m, n) => (m.per_item ? `size ${count(n)}` : plural(n, "tokens"));

function el(tag, about, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(about || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}
const dot = (s) => el("i", { class: "dot", style: { background: s === null ? css["--other"] : sourceColour(s) } });
const put = (where, ...children) => $(where).replaceChildren(...children);
