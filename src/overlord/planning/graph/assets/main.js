// Events in, one redraw out.

function act(changes) {
  Object.assign(state, changes);
  if (state.sample !== null && changes.sample !== undefined) {
    const m = now(), i = m.items.sample.indexOf(state.sample);
    if (i >= 0) bringIntoSight(m.items.bucket[i]);
  }
  redraw();
}

function bringIntoSight(b) {
  state.bucket = b;
  const at = sequence().indexOf(b), n = state.to - state.from;
  if (at < state.from || at >= state.to) {
    state.from = Math.max(0, Math.min(now().buckets - n, at - Math.floor(n / 2)));
    state.to = state.from + n;
  }
}

function redraw() {
  readColours();
  drawChart();
  for (const part of [controls, tiles, legend, words, drawFlow, sourcesTable, figuresTable, bucketsTable, detail]) part();
}

function tip(event, title, ...lines) {
  const box = $("tip");
  box.replaceChildren(el("b", null, title), ...lines.filter(Boolean).map((line) => el("div", null, line)));
  box.hidden = false;
  const right = event.clientX + 16 + box.offsetWidth > window.innerWidth, low = event.clientY + 16 + box.offsetHeight > window.innerHeight;
  box.style.left = `${right ? Math.max(4, event.clientX - 12 - box.offsetWidth) : event.clientX + 14}px`;
  box.style.top = `${low ? event.clientY - 12 - box.offsetHeight : event.clientY + 14}px`;
}
const untip = () => { $("tip").hidden = true; };

function tipOf(found) {
  const m = now(), b = found.bucket, what = state.measure;
  const of = found.buckets.length > 1 ? `the dearest of buckets ${Math.min(...found.buckets)} to ${Math.max(...found.buckets)}` : `ranks ${ranksOf(m, b)}`;
  const load = `${ratio(m.totals[what][b] / m.mean[what])} of the mean, ${sized(m, m.totals.size[b])}, ${plural(m.totals.count[b], m.noun)}`;
  if (found.slot !== undefined) {
    const i = b * m.grid.columns + found.slot, last = Math.min(m.microbatches, (found.slot + 1) * m.grid.per) - 1;
    const which = m.grid.per > 1 ? `microbatches ${found.slot * m.grid.per}-${last}` : `microbatch ${found.slot}`;
    const fill = m.capacity && m.grid.per === 1 ? `, ${percent(m.grid.size[i] / m.capacity, 0)} full` : "";
    return [`bucket ${b}, ${which}`, `${ratio(against(m.grid[what][i], shape.means[found.slot]))} of the mean of this slot`, `${sized(m, m.grid.size[i])}${fill}, ${plural(m.grid.count[i], m.noun)}`, of];
  }
  if (!found.piece) return [`bucket ${b}`, load, of];
  if (found.piece.item !== undefined) {
    const i = found.piece.item;
    return [sampleId(m.items.sample[i]), `${sized(m, m.items.size[i])}, cost ${few(m.items.cost[i])}: ${percent(m.items.cost[i] / (m.totals.cost[b] || 1))} of its bucket`,
      `bucket ${b}, microbatch ${m.items.microbatch[i]}, slot ${m.items.slot[i]}`, of];
  }
  if (found.piece.cell === undefined) {
    const p = found.piece;
    return [`${sourceName(p.source)} in bucket ${b}`, `${plural(p.count, m.noun)}, ${sized(m, p.size)}, ${percent(p[what] / (m.totals[what][b] || 1))} of the bucket`, load, of];
  }
  const i = found.piece.cell, which = m.cells.per >= m.microbatches ? "" : m.cells.per > 1 ? `, microbatches ${m.cells.microbatch[i] * m.cells.per} and on` : `, microbatch ${m.cells.microbatch[i]}`;
  return [`${sourceName(m.cells.source[i])} in bucket ${b}${which}`, `${plural(m.cells.count[i], m.noun)}, ${sized(m, m.cells.size[i])}, ${percent(m.cells[what][i] / (m.totals[what][b] || 1))} of the bucket`, load, of];
}

function watchChart() {
  const canvas = $("chart"), zoom = $("zoom");
  let pressed = null;
  const place = (e) => { const r = canvas.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
  const inside = (x) => Math.max(EDGE.left, Math.min(shape.width - EDGE.right, x));
  canvas.addEventListener("pointerdown", (e) => { pressed = place(e)[0]; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointermove", (e) => {
    const [x, y] = place(e);
    if (pressed !== null && Math.abs(x - pressed) > 6 && now().buckets > 8) {
      const [a, b] = [inside(Math.min(x, pressed)), inside(Math.max(x, pressed))];
      Object.assign(zoom.style, { left: `${a}px`, width: `${b - a}px`, height: `${shape.height - AXIS}px` });
      zoom.hidden = false;
      return untip();
    }
    const found = under(x, y);
    found ? tip(e, ...tipOf(found)) : untip();
  });
  canvas.addEventListener("pointerup", (e) => {
    const [x, y] = place(e), from = pressed;
    pressed = null;
    if (!zoom.hidden && from !== null) {
      zoom.hidden = true;
      const at = (p) => state.from + ((inside(p) - EDGE.left) / (shape.width - EDGE.left - EDGE.right)) * (state.to - state.from);
      const low = Math.floor(at(Math.min(x, from))), high = Math.ceil(at(Math.max(x, from)));
      return act({ from: Math.max(0, Math.min(low, now().buckets - 1)), to: Math.min(now().buckets, Math.max(low + 1, high)) });
    }
    const found = under(x, y);
    if (found) act({ bucket: found.bucket, sample: found.piece && found.piece.item !== undefined ? now().items.sample[found.piece.item] : null });
  });
  canvas.addEventListener("dblclick", () => act({ from: 0, to: now().buckets }));
  canvas.addEventListener("pointerleave", untip);
  canvas.addEventListener("keydown", (e) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[e.key];
    if (e.key === "Escape") return act({ bucket: null, sample: null, hot: null });
    if (move === undefined) return;
    e.preventDefault();
    const order = sequence(), at = state.bucket === null ? (move > 0 ? -1 : 1) : order.indexOf(state.bucket);
    state.sample = null;
    bringIntoSight(order[Math.max(0, Math.min(order.length - 1, at + move))]);
    redraw();
  });
}

function watchSearch() {
  const input = $("search"), list = $("found");
  let all = null, hits = [], at = 0;
  const choose = (k) => { list.hidden = true; input.value = sampleId(k); act({ sample: k, hot: null }); };
  const show = () => {
    list.replaceChildren(...hits.map((k, i) => el("li", { role: "option", class: "id", "aria-selected": i === at ? "true" : "false", onpointerdown: (e) => { e.preventDefault(); choose(k); } }, sampleId(k))));
    if (!hits.length) {
      const more = F.kept.samples < F.samples ? ` Listed are only the ${count(F.kept.samples)} dearest of ${count(F.samples)}; overlord explain --sample finds the others.` : "";
      list.append(el("li", { class: "none" }, `No such sample in this step.${more}`));
    }
    list.hidden = false;
  };
  input.addEventListener("input", () => {
    all ??= Array.from(ids.source, (_, k) => sampleId(k).toLowerCase());
    const wanted = input.value.trim().toLowerCase();
    list.hidden = !wanted;
    if (!wanted) return act({ sample: null });
    const exact = all.indexOf(wanted);
    hits = exact >= 0 ? [exact] : [];
    for (let k = 0; k < all.length && hits.length < 8; k++) if (k !== exact && all[k].includes(wanted)) hits.push(k);
    at = 0;
    show();
  });
  input.addEventListener("keydown", (e) => {
    if (e.key === "Escape") list.hidden = true;
    if (e.key === "Enter" && hits.length) choose(hits[at]);
    if (hits.length && (e.key === "ArrowDown" || e.key === "ArrowUp")) {
      e.preventDefault();
      at = (at + (e.key === "ArrowDown" ? 1 : hits.length - 1)) % hits.length;
      show();
    }
  });
  input.addEventListener("blur", () => { list.hidden = true; });
}

function watchTheme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const wear = (theme) => { document.documentElement.dataset.theme = theme; redraw(); };
  $("theme").addEventListener("click", () => wear(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => wear(dark.matches ? "dark" : "light"));
  wear(dark.matches ? "dark" : "light");
}

header();
watchTheme();
watchChart();
watchSearch();
let waits = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(waits); waits = requestAnimationFrame(redraw); });
