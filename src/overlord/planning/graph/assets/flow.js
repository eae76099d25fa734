// Sources, loaders, buckets, microbatches side by side; a band is as wide as what goes that way.

const HEADS = { source: "sources", loader: "loaders", bucket: "buckets", microbatch: "microbatches" };
let flow = null; // boxes and bands as laid out

function svg(tag, about, ...children) {
  const made = document.createElementNS($("flow").namespaceURI, tag);
  for (const [name, value] of Object.entries(about || {}))
    name.startsWith("on") ? made.addEventListener(name.slice(2), value) : made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const short = (text, n) => (text.length > n ? `${text.slice(0, n - 1)}…` : text);

function boxName(kind, box) {
  if (kind === "source") return box < 0 ? "the other sources" : F.sources[box].name;
  if (kind === "loader") return box < 0 ? "the other loaders" : F.loaders[box];
  const [first, last] = box;
  return first === last ? `${kind} ${first}` : `${kind === "bucket" ? "buckets" : "microbatches"} ${first}-${last}`;
}

function layOut(width) {
  const m = now(), which = state.measure === "cost" ? 3 : 4;
  const layers = m.flow.layers.map((layer) => layer.boxes.map((box) => ({ kind: layer.kind, box, in: 0, out: 0, count: 0, links: [], left: [] })));
  const links = m.flow.links.map((l) => ({ from: layers[l[0]][l[1]], to: layers[l[0] + 1][l[2]], value: l[which], count: l[5], layer: l[0] }));
  for (const link of links) {
    link.from.out += link.value;
    link.to.in += link.value;
    link.from.links.push(link);
    link.to.left.push(link);
    if (!link.layer) link.from.count += link.count;
    link.to.count += link.count;
  }
  const most = Math.max(...layers.map((l) => l.length)), height = Math.max(220, Math.min(620, most * 34));
  const total = layers[0].reduce((sum, box) => sum + box.out, 0) || 1;
  const names = 150, wide = 14, gaps = (width - names - wide) / (layers.length - 1);
  layers.forEach((boxes, k) => {
    const gap = Math.min(16, (0.34 * height) / Math.max(1, boxes.length - 1));
    const room = height - gap * (boxes.length - 1);
    let y = 24;
    for (const box of boxes) {
      box.value = Math.max(box.in, box.out);
      box.h = Math.max(1.5, (box.value / total) * room);
      Object.assign(box, { x: k * gaps, y, w: wide, scale: box.value ? box.h / box.value : 0 });
      y += box.h + gap;
    }
  });
  for (const boxes of layers)
    for (const box of boxes) {
      let down = box.y;
      for (const link of box.links) { link.y0 = down; link.h0 = link.value * box.scale; down += link.h0; }
      down = box.y;
      for (const link of box.left) { link.y1 = down; link.h1 = link.value * box.scale; down += link.h1; }
      if (box.kind === "loader" && box.left.length === 1) box.source = box.left[0].from.box;
      if (box.kind === "source") box.source = box.box;
    }
  return { layers, links, height: height + 34, total };
}

function band(link) {
  const x0 = link.from.x + link.from.w, x1 = link.to.x, half = (x0 + x1) / 2;
  const { y0, h0, y1, h1 } = link;
  return `M${x0},${y0}C${half},${y0} ${half},${y1} ${x1},${y1}L${x1},${y1 + h1}C${half},${y1 + h1} ${half},${y0 + h0} ${x0},${y0 + h0}Z`;
}

const paint = (source) => (source === undefined || source < 0 ? css["--other"] : sourceColour(source));

function boxTip(box) {
  const lines = [`${percent(box.value / flow.total)} of the ${unitOf(state.measure)}, ${plural(box.count, now().noun)}`];
  if (box.kind === "bucket" && box.box[0] === box.box[1]) lines.push(`ranks ${ranksOf(now(), box.box[0])}, ${constructorOf(now(), box.box[0])}`);
  return [boxName(box.kind, box.box), ...lines];
}

function drawFlow() {
  const picture = $("flow"), width = picture.clientWidth || 900;
  flow = layOut(width);
  const parts = [];
  for (const link of flow.links) {
    const source = link.from.source, dim = state.hot !== null && source !== state.hot;
    parts.push(svg("path", {
      d: band(link), fill: paint(source), class: `link${dim ? " dim" : ""}`,
      onmousemove: (e) => tip(e, `${boxName(link.from.kind, link.from.box)} → ${boxName(link.to.kind, link.to.box)}`,
        `${percent(link.value / flow.total, 2)} of the ${unitOf(state.measure)}, ${plural(link.count, now().noun)}`),
      onmouseleave: untip,
    }));
  }
  for (const boxes of flow.layers) for (const box of boxes) parts.push(...boxParts(box));
  flow.layers.forEach((boxes) => parts.push(svg("text", { x: boxes[0].x, y: 12, class: "head" }, HEADS[boxes[0].kind])));
  parts.push(...sampleTrail());
  picture.setAttribute("height", flow.height);
  picture.setAttribute("viewBox", `0 0 ${width} ${flow.height}`);
  picture.replaceChildren(...parts);
}

function boxParts(box) {
  const pick = box.kind === "source" && box.box >= 0 ? () => act({ hot: state.hot === box.box ? null : box.box })
    : box.kind === "bucket" && box.box[0] === box.box[1] ? () => act({ bucket: box.box[0], sample: null }) : null;
  const about = { onmousemove: (e) => tip(e, ...boxTip(box)), onmouseleave: untip, class: `box${pick ? "" : " still"}` };
  if (pick) about.onclick = pick;
  const fill = box.kind === "source" || box.kind === "loader" ? paint(box.source) : css["--muted"];
  const label = svg("text", { x: box.x + box.w + 6, y: box.y + box.h / 2 + 4, "paint-order": "stroke", stroke: css["--surface"], "stroke-width": 3.5, ...about });
  label.append(short(boxName(box.kind, box.box), 24));
  return [svg("rect", { x: box.x, y: box.y, width: box.w, height: box.h, rx: 2, fill, ...about }), ...(box.h > 6 || flow.layers.every((l) => l.length <= 16) ? [label] : [])];
}

// The way of one sample through the picture.
function sampleTrail() {
  const item = state.sample === null ? -1 : now().items.sample.indexOf(state.sample);
  if (item < 0) return [];
  const m = now(), at = { source: ids.source[state.sample], loader: ids.loader ? ids.loader[state.sample] : -1, bucket: m.items.bucket[item], microbatch: m.items.microbatch[item] };
  const holds = (box) => (Array.isArray(box.box) ? box.box[0] <= at[box.kind] && at[box.kind] <= box.box[1] : box.box === at[box.kind]);
  const boxes = flow.layers.map((layer) => layer.find(holds) || layer[layer.length - 1]);
  let d = "";
  boxes.forEach((box, k) => {
    const x = box.x + box.w / 2, y = box.y + box.h / 2;
    if (!k) { d = `M${x},${y}`; return; }
    const before = boxes[k - 1], x0 = before.x + before.w / 2, y0 = before.y + before.h / 2, half = (x + x0) / 2;
    d += `C${half},${y0} ${half},${y} ${x},${y}`;
  });
  return [svg("path", { d, class: "trail" }), ...boxes.map((box) => svg("circle", { cx: box.x + box.w / 2, cy: box.y + box.h / 2, r: 4.5, fill: css["--ink"] }))];
}
