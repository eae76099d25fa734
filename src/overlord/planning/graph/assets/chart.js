// The main picture on a canvas: bars by bucket, how far each is off the mean, and every microbatch against its slot.

const EDGE = { left: 54, right: 104, top: 18 };
const BARS = 290, OFF = 62, BETWEEN = 34, AXIS = 30;
const DRAWN_ITEMS = 2500; // bars show single samples while no more than this many are in sight

let shape = null; // what was drawn where, for the mouse

function sequence() {
  const m = now(), all = Array.from({ length: m.buckets }, (_, b) => b);
  const loads = m.totals[state.measure];
  return state.order === "number" ? all : all.sort((a, b) => loads[b] - loads[a] || a - b);
}

function columnsInSight(m, order, width) {
  const n = state.to - state.from, wide = width / n;
  const per = wide >= 2 ? 1 : Math.ceil(2 / wide);
  const gap = wide > 90 ? 56 : wide > 12 ? Math.min(0.18 * wide, 16) : wide > 5 ? 1.5 : wide > 3 ? 0.5 : 0;
  const loads = m.totals[state.measure], columns = [];
  for (let p = state.from; p < state.to; p += per) {
    const buckets = order.slice(p, Math.min(p + per, state.to));
    const dearest = buckets.reduce((best, b) => (loads[b] > loads[best] ? b : best), buckets[0]);
    const from = EDGE.left + (p - state.from) * wide, to = from + wide * buckets.length;
    const w = wide > 3 ? Math.min(wide - gap, 120) : Math.round(to) - Math.round(from); // narrow ones meet at whole pixels, without stripes
    columns.push({ buckets, dearest, x: wide > 3 ? from + (wide - w) / 2 : Math.round(from), w, from, to });
  }
  return columns;
}

// The pieces of a bar from the floor up: single samples where they are few, else the sum of each source.
function pieces(m, b, single) {
  const out = [];
  if (single) {
    for (let i = m.itemStart[b]; i < m.itemStart[b + 1]; i++)
      out.push({ microbatch: m.items.microbatch[i], source: ids.source[m.items.sample[i]], value: m.items[state.measure][i], item: i });
  } else {
    for (let i = m.cellStart[b]; i < m.cellStart[b + 1]; i++)
      out.push({ microbatch: m.cells.microbatch[i], source: m.cells.source[i], value: m.cells[state.measure][i], cell: i });
  }
  return out.sort((a, b) => a.microbatch - b.microbatch || a.source - b.source); // by colour inside a microbatch: slots are in the tooltip
}

// A bar too narrow for seams: one piece for each source, so that the colours of neighbours line up.
function bySource(m, b) {
  const sums = new Map();
  for (let i = m.cellStart[b]; i < m.cellStart[b + 1]; i++) {
    const s = m.cells.source[i], sum = sums.get(s) || { microbatch: 0, source: s, value: 0, cost: 0, size: 0, count: 0 };
    for (const what of ["cost", "size", "count"]) sum[what] += m.cells[what][i];
    sum.value += m.cells[state.measure][i];
    sums.set(s, sum);
  }
  const grey = (s) => (colourOf.has(s) ? 0 : 1);
  return [...sums.values()].sort((x, y) => grey(x.source) - grey(y.source) || x.source - y.source);
}

const stack = (m, b) => (shape.narrow ? bySource(m, b) : pieces(m, b, shape.single));

function drawChart() {
  const m = now(), canvas = $("chart"), width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  const rowHeight = Math.max(5, Math.min(22, 150 / m.grid.columns)), heat = Math.min(220, rowHeight * m.grid.columns);
  const height = EDGE.top + BARS + BETWEEN + OFF + BETWEEN + heat + AXIS;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  g.font = "12px system-ui, -apple-system, 'Segoe UI', sans-serif";
  const order = sequence(), columns = columnsInSight(m, order, width - EDGE.left - EDGE.right);
  const inSight = columns.reduce((n, c) => n + c.buckets.reduce((k, b) => k + m.totals.count[b], 0), 0);
  shape = { m, order, columns, width, height, rowHeight: heat / m.grid.columns, heat, single: m.whole && inSight <= DRAWN_ITEMS && columns.every((c) => c.buckets.length === 1) };
  shape.narrow = columns[0].w < 7;
  if (shape.narrow) shape.single = false;
  shape.barsY = EDGE.top + BARS;
  shape.offY = shape.barsY + BETWEEN;
  shape.heatY = shape.offY + OFF + BETWEEN;
  const most = m.totals[state.measure][m.top[state.measure]] / m.mean[state.measure];
  shape.highest = Math.max(1.1, 1.06 * Math.max(most, m.imbalance[state.measure].bound));
  drawAxis(g);
  for (const column of columns) drawBar(g, column);
  drawLines(g, most);
  drawOff(g);
  drawHeat(g);
  drawNumbers(g);
  const b = state.bucket === null ? "" : `; bucket ${state.bucket} is selected`;
  canvas.setAttribute("aria-label", `${unitOf(state.measure)} of ${m.buckets} buckets over their mean, slowest ${ratio(most)}${b}. Arrow keys move, Enter selects.`);
}

const heightOf = (v) => (v / shape.highest) * BARS;

function drawAxis(g) {
  const step = [0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100].find((s) => shape.highest / s <= 6) || shape.highest / 4;
  g.textAlign = "right";
  g.textBaseline = "middle";
  for (let v = 0; v <= shape.highest; v += step) {
    const y = shape.barsY - heightOf(v);
    g.fillStyle = css["--grid"];
    g.fillRect(EDGE.left, Math.round(y), shape.width - EDGE.left - EDGE.right, 1);
    g.fillStyle = css["--faint"];
    g.fillText(String(Math.round(v * 100) / 100), EDGE.left - 8, y);
  }
  caption(g, `${unitOf(state.measure)} over the mean bucket`, EDGE.top - 11);
}

function caption(g, text, y) {
  g.textAlign = "left";
  g.textBaseline = "middle";
  g.fillStyle = css["--muted"];
  g.fillText(text, EDGE.left, y);
}

function label(g, text, x, y) {
  g.textAlign = "right";
  g.textBaseline = "middle";
  g.fillStyle = css["--faint"];
  g.fillText(text, x, y);
}

function drawBar(g, column) {
  const m = shape.m, b = column.dearest, mean = m.mean[state.measure];
  let y = shape.barsY, last = -1;
  const dim = state.hot !== null || (state.sample !== null && shape.single);
  for (const piece of stack(m, b)) {
    const h = heightOf(piece.value / mean);
    const mine = state.hot !== null ? piece.source === state.hot : piece.item !== undefined && m.items.sample[piece.item] === state.sample;
    g.globalAlpha = dim && !mine ? (state.hot === null ? 0.3 : 0.16) : 1;
    g.fillStyle = sourceColour(piece.source);
    g.fillRect(column.x, y - h, column.w, h);
    g.globalAlpha = 1;
    const next = piece.microbatch !== last;
    if (last >= 0 && (next || (column.w > 6 && h > 2))) { // a seam: wide between microbatches, hair-thin between samples
      const seam = next ? (column.w > 20 ? 4 : column.w > 4 ? 2 : 1) : 0.7;
      g.fillStyle = css["--surface"];
      g.fillRect(column.x, y - seam / 2, column.w, seam);
    }
    if (next && m.microbatches > 1 && column.x - column.from > 20) { // room beside the bar: name its microbatches
      const tall = heightOf(m.grid[state.measure][b * m.grid.columns + piece.microbatch] / mean);
      if (tall > 12 && m.cells.per === m.grid.per) label(g, `m${piece.microbatch * m.grid.per}`, column.x - 5, y - tall / 2);
    }
    last = piece.microbatch;
    y -= h;
  }
  if (column.buckets.includes(state.bucket)) {
    g.strokeStyle = css["--ink"];
    g.lineWidth = 1.5;
    g.strokeRect(column.x - 2, y - 2, column.w + 4, shape.barsY - y + 3);
  }
}

function drawLines(g, most) {
  const m = shape.m, bound = m.imbalance[state.measure].bound, right = shape.width - EDGE.right;
  const one = bound < 1.0005;
  const lines = [
    { at: most, text: `slowest ${ratio(most)}`, dash: [1, 3] },
    { at: 1, text: one ? "mean = bound" : "mean", dash: [] },
    ...(one ? [] : [{ at: bound, text: `bound ${ratio(bound)}`, dash: [6, 4] }]),
  ].sort((a, b) => b.at - a.at);
  let free = -Infinity;
  for (const line of lines) {
    const y = Math.round(shape.barsY - heightOf(line.at)) + 0.5;
    g.setLineDash(line.dash);
    g.lineWidth = 1.25;
    g.strokeStyle = css["--ink"];
    g.beginPath();
    g.moveTo(EDGE.left, y);
    g.lineTo(right, y);
    g.stroke();
    g.setLineDash([]);
    const at = Math.max(y, free + 15);
    if (at > y + 1) { g.strokeStyle = css["--axis"]; g.beginPath(); g.moveTo(right, y); g.lineTo(right + 8, at); g.stroke(); }
    free = at;
    g.textAlign = "left";
    g.textBaseline = "middle";
    g.fillStyle = css["--ink"];
    g.fillText(line.text, right + 10, at);
  }
}

function drawOff(g) {
  const m = shape.m, mean = m.mean[state.measure], loads = m.totals[state.measure];
  const off = (b) => loads[b] / mean - 1;
  const widest = Math.max(0.0005, ...loads.map((v) => Math.abs(v / mean - 1)));
  const middle = shape.offY + OFF / 2, tall = (v) => (v / widest) * (OFF / 2);
  caption(g, "how far off the mean, at a scale of its own", shape.offY - 12);
  for (const c of shape.columns) {
    const some = c.buckets.map(off), high = Math.max(0, ...some), low = Math.min(0, ...some);
    g.fillStyle = css["--over"];
    g.fillRect(c.x, middle - tall(high), c.w, tall(high));
    g.fillStyle = css["--under"];
    g.fillRect(c.x, middle, c.w, tall(-low));
  }
  g.fillStyle = css["--axis"];
  g.fillRect(EDGE.left, Math.round(middle), shape.width - EDGE.left - EDGE.right, 1);
  g.textAlign = "right";
  g.textBaseline = "middle";
  g.fillStyle = css["--faint"];
  const worth = widest < 0.01 ? 2 : widest < 0.1 ? 1 : 0;
  g.fillText(`+${percent(widest, worth)}`, EDGE.left - 8, shape.offY + 5);
  g.fillText(`−${percent(widest, worth)}`, EDGE.left - 8, shape.offY + OFF - 5);
}

function slotMeans(m) {
  const means = new Float64Array(m.grid.columns), values = m.grid[state.measure];
  for (let i = 0; i < values.length; i++) means[i % m.grid.columns] += values[i] / m.buckets;
  return means;
}
const against = (value, mean) => (mean ? value / mean : 1); // a slot that is empty everywhere is even

function drawHeat(g) {
  const m = shape.m, k = m.grid.columns, values = m.grid[state.measure], means = slotMeans(m);
  let widest = 0.001;
  const worst = new Float64Array(k);
  for (let i = 0; i < values.length; i++) {
    const v = against(values[i], means[i % k]);
    widest = Math.max(widest, Math.abs(v - 1));
    worst[i % k] = Math.max(worst[i % k], v);
  }
  widest = Math.min(widest, 1);
  shape.means = means;
  const full = percent(widest, widest < 0.01 ? 2 : widest < 0.1 ? 1 : 0);
  const key = `orange dearer, blue lighter, full colour at ${full}`;
  caption(g, shape.width > 720 ? `each microbatch against the mean of its slot: ${key}` : key, shape.heatY - 12);
  for (const c of shape.columns) {
    for (let j = 0; j < k; j++) {
      const v = against(Math.max(...c.buckets.map((b) => values[b * k + j])), means[j]) - 1;
      const y = shape.heatY + j * shape.rowHeight, h = shape.rowHeight - (shape.rowHeight > 8 ? 1.5 : 0.5);
      g.fillStyle = css["--zero"];
      g.fillRect(c.x, y, c.w, h);
      g.globalAlpha = Math.min(1, Math.abs(v) / widest);
      g.fillStyle = css[v > 0 ? "--over" : "--under"];
      g.fillRect(c.x, y, c.w, h);
      g.globalAlpha = 1;
    }
  }
  g.textBaseline = "middle";
  const each = Math.max(1, Math.ceil(13 / shape.rowHeight));
  for (let j = 0; j < k; j += each) {
    const y = shape.heatY + (j + 0.5) * shape.rowHeight - 0.5, first = j * m.grid.per, last = Math.min(m.microbatches, first + m.grid.per) - 1;
    g.fillStyle = css["--faint"];
    g.textAlign = "right";
    g.fillText(first === last ? `m${first}` : `m${first}-${last}`, EDGE.left - 8, y);
    g.textAlign = "left";
    g.fillStyle = css["--ink"];
    g.fillText(means[j] ? `worst ${worst[j] < 10 ? ratio(worst[j]) : few(worst[j])}` : "empty", shape.width - EDGE.right + 10, y);
  }
}

function drawNumbers(g) {
  const y = shape.heatY + shape.heat + 15, wide = shape.columns.length ? shape.columns[0].to - shape.columns[0].from : 1;
  const each = Math.ceil(46 / wide);
  g.textAlign = "center";
  g.textBaseline = "middle";
  shape.columns.forEach((c, i) => {
    if (i % each && !(c.buckets.includes(state.bucket) && each === 1)) return;
    g.fillStyle = c.buckets.includes(state.bucket) ? css["--ink"] : css["--faint"];
    g.fillText(String(state.order === "number" ? c.buckets[0] : c.dearest), (c.from + c.to) / 2, y);
  });
  g.textAlign = "left";
  g.fillStyle = css["--muted"];
  g.fillText("bucket", shape.width - EDGE.right + 24, y);
}

// What stands under the mouse.
function under(x, y) {
  if (!shape) return null;
  const column = shape.columns.find((c) => x >= c.from && x < c.to);
  if (!column || y > shape.heatY + shape.heat + AXIS) return null;
  const m = shape.m, b = column.dearest, found = { bucket: b, buckets: column.buckets };
  if (y >= shape.heatY) found.slot = Math.min(m.grid.columns - 1, Math.floor((y - shape.heatY) / shape.rowHeight));
  else if (y <= shape.barsY) {
    let top = shape.barsY;
    for (const piece of stack(m, b)) {
      top -= heightOf(piece.value / m.mean[state.measure]);
      if (y >= top) { found.piece = piece; break; }
    }
  }
  return found;
}
