// Words and tables around the pictures. Text goes in as text, never as markup: names of sources are the user's.

function header() {
  $("title").textContent = `Step ${count(F.step)}`;
  put("lead", `${plural(F.samples, "samples")}, ${plural(F.tokens, "tokens")} from ${plural(F.sources.length, "sources")}, placed on ${F.place}. Digest `, el("code", null, F.digest.slice(0, 16)), ".");
  const chain = F.edges.flatMap(([before, after, what], k) => [...(k ? [] : [el("li", null, before)]), el("li", { title: what }, el("code", null, what)), el("li", null, after)]);
  put("way", ...chain);
}

function tiles() {
  const m = now(), i = m.imbalance[state.measure], b = m.top[state.measure], what = unitOf(state.measure);
  const room = m.capacity * m.buckets * m.microbatches, tokens = m.totals.size.reduce((a, v) => a + v, 0);
  const fullest = m.grid.size.reduce((a, v) => Math.max(a, v), 0);
  const shown = [
    [ratio(i.bucket), `imbalance by bucket, in ${what}; bound ${ratio(i.bound)}`],
    [ratio(i.microbatch), `imbalance by microbatch, when ranks wait after each; bound ${ratio(i.slot_bound)}`],
    [`bucket ${b}`, `is the slowest, ${signed(m.totals[state.measure][b] / m.mean[state.measure] - 1)} off the mean; ranks ${ranksOf(m, b)}`],
    [m.capacity ? percent(tokens / room, 0) : count(tokens), m.capacity ? `of ${m.microbatches} × ${count(m.capacity)} tokens a bucket is filled` : `${unitOf("size")} in all; microbatches have no capacity`],
    [count(fullest), m.grid.per > 1 ? `${unitOf("size")} in the fullest run of ${m.grid.per} microbatches` : `${unitOf("size")} of the fullest microbatch`],
  ];
  put("tiles", ...shown.map(([figure, words]) => el("div", { class: "tile" }, el("b", null, figure), el("span", null, words))));
}

function choices(where, role, state_attribute, options, chosen, pick) {
  put(where, ...options.map(([value, words]) => el("button", { type: "button", role, [state_attribute]: value === chosen ? "true" : "false", onclick: () => pick(value) }, words)));
}

function controls() {
  if (modules.length > 1) choices("modules", "tab", "aria-selected", modules.map((m, k) => [k, m.name]), state.module, (module) => act({ module, from: 0, to: modules[module].buckets, bucket: null }));
  choices("measure", "radio", "aria-checked", [["cost", "cost"], ["size", unitOf("size")]], state.measure, (measure) => act({ measure }));
  choices("order", "radio", "aria-checked", [["number", "by bucket number"], ["load", "dearest first"]], state.order, (order) => act({ order, from: 0, to: now().buckets }));
  const m = now(), n = state.to - state.from;
  const zoom = (from, to) => () => act({ from: Math.max(0, Math.round(from)), to: Math.min(m.buckets, Math.max(Math.round(to), Math.round(from) + 1)) });
  const half = n / 4, options = [["◀", zoom(state.from - Math.min(n / 2, state.from), state.to - Math.min(n / 2, state.from)), !state.from, "earlier buckets"],
    ["▶", zoom(state.from + Math.min(n / 2, m.buckets - state.to), state.to + Math.min(n / 2, m.buckets - state.to)), state.to >= m.buckets, "later buckets"],
    ["+", zoom(state.from + half, state.to - half), n <= 4, "zoom in"], ["−", zoom(state.from - n / 2, state.to + n / 2), n >= m.buckets, "zoom out"], ["all", zoom(0, m.buckets), n >= m.buckets, "all buckets"]];
  put("zoomers", ...(m.buckets > 8 ? options.map(([sign, onclick, disabled, title]) => el("button", { type: "button", onclick, disabled, title, "aria-label": title }, sign)) : []));
}

function legend() {
  const named = [...colourOf.keys()];
  if (state.hot !== null && !colourOf.has(state.hot)) named.push(state.hot);
  const rest = F.sources.length - named.length;
  put("legend", ...named.map((s) => el("button", { type: "button", "aria-pressed": state.hot === s ? "true" : "false", title: F.sources[s].name, onclick: () => act({ hot: state.hot === s ? null : s }) }, dot(s), el("span", null, F.sources[s].name))),
    ...(rest > 0 ? [el("button", { type: "button", onclick: () => $("sources").scrollIntoView({ behavior: "smooth" }) }, dot(null), el("span", null, `${count(rest)} other sources`))] : []));
}

function words() {
  const m = now(), axis = { DP: "data-parallel groups", CP: "(data, context) groups", WORLD: "ranks" }[m.axis] || `groups along ${m.axis}`;
  $("loads-text").textContent = `${m.name}: ${plural(m.buckets, "buckets")} (${axis}), ${plural(m.microbatches, "microbatches")} each. A bar is a bucket, colours are sources` +
    (shape.narrow ? "; zoom in to see microbatches and samples." : `${m.microbatches > 1 ? "; wide seams part its microbatches" : ""}${shape.single ? "; thin seams part " + m.noun : ""}.`) + " A step lasts as long as its highest bar.";
  const per = Math.max(...shape.columns.map((c) => c.buckets.length)), n = state.to - state.from;
  const notes = [];
  if (per > 1) notes.push(`A column stands for ${per} buckets and shows the dearest of them.`);
  if (n < m.buckets) notes.push(`${count(n)} of ${count(m.buckets)} buckets in sight.`);
  if (m.buckets > 8) notes.push("Drag over the bars to zoom in, double-click for all.");
  if (!shape.narrow && m.cells.per > m.grid.per) notes.push("Bars are summed over microbatches; the rows below tell them apart.");
  if (m.cells.alone) notes.push(`Only the ${m.cells.alone.length} dearest sources have colours of their own here.`);
  $("chart-note").textContent = notes.join(" ");
  const parts = m.flow.layers.map((l) => HEADS[l.kind]).join(", then ");
  $("flow-text").textContent = `From left to right: ${parts}. A band is as wide as its ${unitOf(state.measure)}.`;
}

function table(where, head, rows) {
  put(where, el("thead", null, el("tr", null, ...head.map((h) => el("th", { scope: "col" }, h)))), el("tbody", null, ...rows));
}

function lengths(source) {
  const first = Math.min(...F.sources.map((s) => s.lengths.findIndex((n) => n)).filter((i) => i >= 0));
  const last = Math.max(...F.sources.map((s) => s.lengths.findLastIndex((n) => n)));
  const most = Math.max(1, ...source.lengths), n = last - first + 1, wide = Math.min(10, 96 / n);
  const bars = source.lengths.slice(first, last + 1).map((v, i) => svg("rect", { x: i * wide, y: 22 - (20 * v) / most - (v ? 1 : 0), width: Math.max(1, wide - 1), height: (20 * v) / most + (v ? 1 : 0), fill: css["--muted"] }));
  const said = source.lengths.map((v, i) => (v ? `${count(2 ** i)}-${count(2 ** (i + 1) - 1)} tokens: ${count(v)}` : "")).filter(Boolean).join(", ");
  return svg("svg", { role: "img", "aria-label": said }, svg("title", null, said), ...bars);
}

function sourcesTable() {
  const m = now(), cost = new Float64Array(F.sources.length + 1);
  m.cells.source.forEach((s, i) => (cost[s] += m.cells.cost[i]));
  const all = cost.reduce((a, b) => a + b, 0) || 1;
  const known = (s) => !m.cells.alone || m.cells.alone.includes(s);
  const toggle = (s) => act({ hot: state.hot === s ? null : s });
  table("sources", ["source", "samples", "wanted", "realised", "tokens", "mean length", `share of ${m.name} cost`, "lengths"], F.sources.map((s, k) =>
    el("tr", { "aria-selected": state.hot === k ? "true" : "false", onclick: () => toggle(k) },
      el("td", null, el("button", { type: "button", title: s.name, onclick: (e) => { e.stopPropagation(); toggle(k); } }, dot(k), el("span", null, s.name))),
      ...[count(s.samples), s.wanted === null ? "" : percent(s.wanted, 2), percent(s.samples / (F.samples || 1), 2), count(s.tokens), s.samples ? count(s.tokens / s.samples) : "",
        known(k) ? percent(cost[k] / all, 1) : "summed up"].map((t) => el("td", null, t)),
      el("td", null, lengths(s)))));
}

function figuresTable() {
  const rows = modules.flatMap((m) => ["cost", "size"].map((what) => {
    const i = m.imbalance[what], loads = m.totals[what], low = Math.min(...loads);
    return el("tr", null, el("td", null, `${m.name}, ${unitOf(what, m)}`), ...[ratio(i.bucket), ratio(i.bound), signed(i.bucket / i.bound - 1), ratio(i.microbatch), ratio(i.slot_bound), signed(i.microbatch / i.slot_bound - 1), String(m.top[what]),
      ratio(low / m.mean[what]), `${m.axis}, ${count(m.buckets)} × ${count(m.microbatches)}`, plural(m.placed, m.noun)].map((t) => el("td", null, t)));
  }));
  table("figures", ["module, measure", "by bucket", "bound", "over it", "by microbatch", "bound", "over it", "slowest bucket", "lightest / mean", "buckets × microbatches", "placed"], rows);
}

function bucketsTable() {
  const m = now(), loads = m.totals[state.measure], falling = [...loads.keys()].sort((a, b) => loads[b] - loads[a] || a - b);
  const shown = m.buckets <= 24 ? falling : [...falling.slice(0, 12), ...falling.slice(-6)];
  $("buckets-text").textContent = m.buckets <= 24 ? "The dearest first." : "The twelve dearest and the six lightest.";
  table("buckets", ["bucket", "ranks", "constructor", "cost / mean", unitOf("size"), m.noun], shown.map((b) => el("tr", null,
    el("td", null, el("button", { type: "button", class: "quiet", onclick: () => act({ bucket: b, sample: null }) }, `bucket ${b}`)),
    ...[ranksOf(m, b), constructorOf(m, b), ratio(m.totals.cost[b] / m.mean.cost), count(m.totals.size[b]), count(m.totals.count[b])].map((t) => el("td", null, t)))));
}

function facts(rows) {
  return el("dl", null, ...rows.filter(Boolean).flatMap(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
}

function detail() {
  const close = el("button", { type: "button", class: "quiet", onclick: () => act({ bucket: null, sample: null }) }, "close");
  if (state.sample !== null) put("detail", ...sampleDetail(state.sample, close));
  else put("detail", ...bucketDetail(state.bucket ?? now().top[state.measure], state.bucket === null ? null : close));
}

function bucketDetail(b, close) {
  const m = now(), k = m.grid.columns, what = state.measure, load = m.totals[what][b] || 1, means = slotMeans(m);
  const slots = Array.from({ length: k }, (_, j) => j).slice(0, 8);
  const listed = Array.from({ length: m.itemStart[b + 1] - m.itemStart[b] }, (_, i) => m.itemStart[b] + i).sort((i, j) => m.items[what][j] - m.items[what][i] || i - j).slice(0, 8);
  const off = m.totals[what][b] / m.mean[what] - 1;
  return [
    el("h2", null, `Bucket ${b}`, close),
    el("p", null, state.bucket === null ? "The slowest. Click a bar for another one." : `${signed(off)} off the mean bucket.`),
    facts([["ranks", ranksOf(m, b)], ["built by", constructorOf(m, b)], ["cost / mean", ratio(m.totals.cost[b] / m.mean.cost)], [unitOf("size"), count(m.totals.size[b])], [m.noun, count(m.totals.count[b])]]),
    el("h3", null, "Microbatches"),
    el("table", null, el("thead", null, el("tr", null, ...["", `${unitOf(what)} / slot`, unitOf("size"), m.noun].map((t) => el("th", { scope: "col" }, t)))), el("tbody", null, ...slots.map((j) => {
      const i = b * k + j;
      return el("tr", null, ...[m.grid.per > 1 ? `${j * m.grid.per}-${Math.min(m.microbatches, (j + 1) * m.grid.per) - 1}` : String(j), means[j] ? ratio(m.grid[what][i] / means[j]) : "", count(m.grid.size[i]), count(m.grid.count[i])].map((t) => el("td", null, t)));
    }))),
    k > 8 ? el("p", { class: "note" }, `and ${plural(k - 8, "more microbatches")}`) : null,
    el("h3", null, m.per_item ? "Dearest items, by their sample" : "Dearest samples"),
    el("table", null, el("tbody", null, ...listed.map((i) => el("tr", null,
      el("td", null, el("button", { type: "button", class: "id", onclick: () => act({ sample: m.items.sample[i], bucket: b }) }, sampleId(m.items.sample[i]))),
      el("td", null, count(m.items.size[i])), el("td", null, percent(m.items[what][i] / load)))))),
    el("p", { class: "note" }, `${m.per_item ? "Size" : "Tokens"}, and the share of the bucket's ${unitOf(what)}` + (m.whole ? "." : `. Of this step only the ${count(F.kept.samples)} dearest samples are listed.`)),
  ].filter(Boolean);
}

function sampleDetail(k, close) {
  const s = ids.source[k];
  const ways = modules.map((m) => {
    const mine = [...m.items.sample.keys()].filter((i) => m.items.sample[i] === k);
    return [m, mine];
  });
  const steps = [
    el("li", null, el("b", null, F.sources[s].name), el("small", null, `file ${ids.file[k]}, row ${ids.row[k]}${ids.part[k] ? `, part ${ids.part[k]}` : ""}, epoch ${ids.epoch[k]}`)),
    ids.loader ? el("li", null, F.loaders[ids.loader[k]], el("small", null, "read it and told its length")) : null,
    el("li", null, `drawn as number ${count(ids.position[k])} of the step`, el("small", null, `of ${count(F.samples)}, counted from 0`)),
    ...ways.flatMap(([m, mine]) => mine.slice(0, 6).map((i) => el("li", null, `${m.name}: bucket ${m.items.bucket[i]}, microbatch ${m.items.microbatch[i]}, slot ${m.items.slot[i]}`,
      el("small", null, `ranks ${ranksOf(m, m.items.bucket[i])}, ${constructorOf(m, m.items.bucket[i])}; ${sized(m, m.items.size[i])}, ${percent(m.items.cost[i] / (m.totals.cost[m.items.bucket[i]] || 1))} of the bucket's cost`)))),
    ...ways.filter(([, mine]) => mine.length > 6).map(([m, mine]) => el("li", null, `and ${mine.length - 6} more ${m.noun} in ${m.name}`)),
  ].filter(Boolean);
  const [first] = ways[0][1], m = modules[0];
  return [
    el("h2", null, "Sample", close),
    el("p", { class: "id" }, sampleId(k)),
    facts([["tokens", count(ids.tokens[k])], ["cost", few(m.items.cost[first])], ["over the mean sample", `${(m.items.cost[first] / ((m.mean.cost * m.buckets) / m.items.sample.length || 1)).toFixed(2)}×`]]),
    el("h3", null, "Its way"), el("ol", null, ...steps),
  ];
}
