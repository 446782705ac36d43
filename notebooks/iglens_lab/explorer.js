// The explorer's view: token strip, token × layer map, and the selected tokens' trajectories, as SVG.
// It draws what `data` holds (see iglens_lab/explorer.py, View) and never computes a credit. All text is set as text.
// A saved page runs the same code without a kernel: then `live` is false.

const SVG = "http://www.w3.org/2000/svg";
const BLUE = "#0072B2", ORANGE = "#D55E00", ROW = 18, FONT = 11;

const STYLE = `
.igl { position: relative; font: 13px/1.35 system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; color: #111; background: #fff;
  padding: 4px; }
.igl [role=alert] { color: #a00; font-weight: 600; white-space: pre-wrap; }
.igl [role=alert].note { color: #333; font-weight: 400; }
.igl .badge { display: inline-block; padding: 1px 8px; border-radius: 9px; color: #fff; background: #00664f; }
.igl .badge.off { background: #b00020; }
.igl .panes { display: flex; flex-wrap: wrap; gap: 16px; }
.igl .pane { flex: 1 1 350px; min-width: 0; overflow-x: auto; }
.igl .title { font-weight: 600; margin: 6px 0 2px; overflow-wrap: anywhere; }
.igl .strip { max-height: 128px; overflow-y: auto; margin-bottom: 4px; }
.igl .strip button { font: 12px/1.3 inherit; font-family: inherit; margin: 1px; padding: 1px 4px; border: 1px solid #888; border-radius: 3px;
  background: #f4f4f4; color: #111; cursor: pointer; }
.igl .strip button.answer { background: #e3eefb; }
.igl .strip button[aria-pressed=true] { outline: 3px solid ${ORANGE}; outline-offset: -1px; }
.igl .strip button:disabled { color: #555; cursor: default; border-style: dotted; }
.igl svg { display: block; }
.igl svg text { font-size: ${FONT}px; fill: #111; font-family: inherit; }
.igl svg text.over { paint-order: stroke; stroke: #fff; stroke-width: 3px; }
.igl :focus-visible { outline: 3px solid #111; outline-offset: 1px; }
.igl .charts { display: flex; flex-wrap: wrap; gap: 12px; }
.igl .chart { width: 440px; max-width: 100%; }
.igl .chart p { margin: 0 0 6px; }
.igl .tip { position: absolute; z-index: 9; pointer-events: none; background: #111; color: #fff; padding: 4px 7px; border-radius: 4px;
  font-size: 12px; white-space: pre; }
.igl .pinned { min-height: 1.4em; white-space: pre-wrap; }
.igl table.top { border-collapse: collapse; } .igl table.top td { padding: 0 8px 0 0; }
`;

// A character that no installed font can draw is shown by its code: it would be an empty box like any other.
const drawn = new Map();
function picture(character) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 24;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.font = "16px system-ui, sans-serif";
  context.fillText(character, 2, 18);
  return context.getImageData(0, 0, 24, 24).data.join();
}
function legible(text) {
  return Array.from(text, (character) => {
    if (character < "\u0250") return character;
    if (!drawn.has(character)) drawn.set(character, picture(character) !== picture("\u{10FFFF}"));
    return drawn.get(character) ? character : `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  }).join("");
}

function html(tag, parent, attributes = {}, text) {
  const made = document.createElement(tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  if (text !== undefined) made.textContent = legible(text);
  parent?.append(made);
  return made;
}
function svg(tag, parent, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  if (text !== undefined) made.textContent = legible(text);
  parent?.append(made);
  return made;
}

function colour(stops, share) {
  return stops[Math.round(Math.min(1, Math.max(0, share)) * (stops.length - 1))];
}
function number(value) {
  return (Math.abs(value) >= 0.001 || value === 0 ? value.toFixed(4) : value.toExponential(1)).replace("-", "−");
}
function signed(value) {
  return (value > 0 ? "+" : "") + number(value);
}
function ticks(low, high) {
  const rough = (high - low) / 4, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  return found;
}

function render({ model, el }) {
  const root = html("div", el, { class: "igl" });
  html("style", root).textContent = STYLE;
  const status = html("div", root, { role: "status" });
  const alert = html("div", root, { role: "alert" });
  const panes = html("div", root, { class: "panes" });
  const pinned = html("div", root, { class: "pinned", "aria-live": "polite" });
  const charts = html("div", root, { class: "charts" });
  const tip = html("div", root, { class: "tip", hidden: "" });
  const asked = new Set();
  let width = 0, cell = null, hovered = null; // cell: the pinned one; both as [pane, position, name of the column]

  const live = () => model.get("live");
  const data = () => model.get("data");
  const same = (a, b) => a && b && a.every((value, i) => value === b[i]);
  const isSelected = (pane, position) => model.get("selected").some((one) => same(one, [pane, position]));
  const rowOf = (pane, position) => data().panes[pane]?.rows.find((row) => row.position === position);

  function select(pane, positions, only = false) {
    const kept = only ? [] : model.get("selected").filter((one) => !(one[0] === pane && positions.includes(one[1])));
    const fresh = positions.filter((position) => only || !isSelected(pane, position)).map((position) => [pane, position]);
    model.set("selected", [...kept, ...fresh]);
    model.save_changes();
  }

  // the most probable next tokens at a cell: asked for once a token, when they are first wanted
  function top(pane, position, name) {
    const found = model.get("top")[`${pane}:${position}`];
    if (found) return found[name === "base" ? data().base : name] ?? [];
    if (live() && !asked.has(`${pane}:${position}`)) {
      asked.add(`${pane}:${position}`);
      model.send({ top: [pane, position] });
    }
    return null;
  }
  function describe([pane, position, name]) {
    const row = rowOf(pane, position), column = data().columns.indexOf(name);
    if (!row || column < 0) return ""; // of another prompt, or of a layer that is not shown any more
    const best = top(pane, position, name);
    const lines = [`${row.label}    ${name === "base" ? "baseline" : "layer " + name}`];
    const credit = column > 0 ? `    credit ${signed(row.credits[column - 1])}` : "";
    lines.push(`level ${number(row.levels[column])}${credit}    (${data().scalar})`);
    if (best?.length) lines.push("the lens reads  " + best.map(([text, p]) => `${text} ${p.toFixed(2)}`).join("   "));
    else if (best === null && live()) lines.push("the lens reads  …");
    return lines.join("\n");
  }
  function point(which, x, y) {
    hovered = which;
    tip.hidden = which === null;
    if (which === null) return;
    tip.textContent = legible(describe(which));
    const box = root.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(x - box.left + 12, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y - box.top + 16}px`;
  }
  function pin(which) {
    cell = which;
    pinned.textContent = cell ? legible(describe(cell)) : "";
  }

  function drawStrip(parent, pane, index, scrolled) {
    const strip = html("div", parent, { class: "strip", role: "group", "aria-label": "tokens of prompt and answer" });
    pane.strip.forEach((token, i) => {
      const known = pane.rows.some((row) => row.position === token.position);
      const button = html("button", strip, { class: token.part, "data-position": token.position, tabindex: -1,
        title: token.position < 0 ? "the first token is predicted by none" : `predicted at position ${token.position}` }, token.text);
      button.disabled = token.position < 0 || !(known || live());
      button.onclick = (event) => {
        const last = model.get("selected").at(-1);
        if (event.shiftKey && last?.[0] === index) {
          const [low, high] = [last[1], token.position].sort((a, b) => a - b);
          const between = pane.strip.map((one) => one.position).filter((one) => one >= low && one <= high);
          select(index, between.filter((one) => !isSelected(index, one)));
        } else select(index, [token.position]);
      };
    });
    strip.scrollTop = scrolled ?? strip.scrollHeight; // where the reader left it, at first at the answer
    const buttons = [...strip.children].filter((button) => !button.disabled);
    const first = buttons.find((button) => button.classList.contains("answer")) ?? buttons[0];
    if (first) first.tabIndex = 0; // one stop of the tab key; the arrows move inside
    strip.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (["Enter", " "].includes(event.key)) event.stopPropagation(); // JupyterLab would run the cell
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      const at = buttons.indexOf(event.target);
      buttons[Math.min(buttons.length - 1, Math.max(0, at + step))].focus();
    };
  }

  function drawMap(parent, pane, index, space) {
    const shown = data(), levels = shown.mode === "levels", k = shown.columns.length - (levels ? 0 : 1), first = levels ? 0 : 1;
    const longest = Math.max(...pane.rows.map((row) => Array.from(legible(row.label)).length));
    const left = 14 + longest * 7, size = Math.min(26, Math.max(8, Math.floor((space - left - 10) / k)));
    const across = Math.ceil((levels ? 28 : 20) / size), count = pane.rows.length, high = count * ROW;
    const map = svg("svg", parent, { width: left + k * size + 10, height: high + 70, role: "application", tabindex: 0, class: "map",
      "aria-label": `${shown.mode} by token and layer; arrow keys move, Enter selects the token` });
    pane.rows.forEach((row, i) => {
      svg("text", map, { x: left - 6, y: i * ROW + 13, "text-anchor": "end", "data-row": row.position }, row.label);
      (levels ? row.levels : row.credits).forEach((value, j) => {
        const share = levels ? (value - shown.range[0]) / (shown.range[1] - shown.range[0]) : 0.5 + value / (2 * shown.limit);
        svg("rect", map, { x: left + j * size, y: i * ROW, width: size, height: ROW, fill: colour(shown.colours[shown.mode], share),
          stroke: "#ddd", "stroke-width": 0.5, "data-cell": `${row.position},${shown.columns[j + first]}` });
      });
    });
    for (let j = k - 1; j >= 0; j -= across) {
      svg("text", map, { x: left + (j + 0.5) * size, y: high + 13, "text-anchor": "middle" }, shown.columns[j + first]);
    }
    svg("text", map, { x: left + (k * size) / 2, y: high + 28, "text-anchor": "middle" }, "layer");
    const bar = Math.min(240, k * size) / 60, [low, top] = levels ? shown.range : [-shown.limit, shown.limit];
    for (let i = 0; i < 60; i++) {
      svg("rect", map, { x: left + i * bar, y: high + 36, width: bar + 0.5, height: 9, fill: colour(shown.colours[shown.mode], i / 59) });
    }
    const ends = levels ? [number(low), number(top)] : [signed(low), signed(top)];
    svg("text", map, { x: left, y: high + 58, "text-anchor": "start" }, ends[0]);
    svg("text", map, { x: left + 60 * bar, y: high + 58, "text-anchor": "end" }, ends[1]);
    svg("text", map, { x: left + 30 * bar, y: high + 58, "text-anchor": "middle" }, levels ? "level" : "credit");
    const marks = svg("g", map, { class: "marks", "pointer-events": "none" });
    const cursor = svg("rect", map, { width: size, height: ROW, fill: "none", stroke: "#111", "stroke-width": 2, visibility: "hidden" });

    let at = null; // [row, column] under the cursor
    const move = (to, x, y) => {
      at = to;
      cursor.setAttribute("visibility", to ? "visible" : "hidden");
      if (!to) return point(null);
      cursor.setAttribute("x", left + to[1] * size);
      cursor.setAttribute("y", to[0] * ROW);
      const box = map.getBoundingClientRect();
      const corner = [box.left + left + (to[1] + 1) * size, box.top + (to[0] + 1) * ROW];
      point([index, pane.rows[to[0]].position, shown.columns[to[1] + first]], x ?? corner[0], y ?? corner[1]);
    };
    const under = (event) => {
      const box = map.getBoundingClientRect();
      const row = Math.floor((event.clientY - box.top) / ROW), column = Math.floor((event.clientX - box.left - left) / size);
      return row >= 0 && row < count && column < k && column >= -left / size ? [row, column] : null;
    };
    map.onmousemove = (event) => {
      const to = under(event);
      move(to && to[1] >= 0 ? to : null, event.clientX, event.clientY);
    };
    map.onmouseleave = map.onblur = () => move(null);
    map.onclick = (event) => {
      const to = under(event);
      if (!to) return;
      if (to[1] < 0) return select(index, [pane.rows[to[0]].position]); // on a label
      choose(to);
    };
    const choose = ([row, column]) => {
      const position = pane.rows[row].position;
      pin([index, position, shown.columns[column + first]]);
      if (!isSelected(index, position)) select(index, [position]);
    };
    map.onkeydown = (event) => {
      const [row, column] = at ?? [0, k - 1];
      const to = { ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
        Home: [row, 0], End: [row, k - 1], Enter: [row, column], " ": [row, column] }[event.key];
      if (!to) return;
      event.preventDefault();
      event.stopPropagation(); // JupyterLab would take the key
      move([Math.min(count - 1, Math.max(0, to[0])), Math.min(k - 1, Math.max(0, to[1]))]);
      if (["Enter", " "].includes(event.key)) choose(at);
    };
    return () => {
      marks.replaceChildren();
      pane.rows.forEach((row, i) => {
        if (!isSelected(index, row.position)) return;
        svg("rect", marks, { x: left - 1, y: i * ROW + 1, width: k * size + 2, height: ROW - 2, fill: "none", stroke: ORANGE, "stroke-width": 1.5 });
      });
    };
  }

  function drawChart(pane, row, low, high) {
    const shown = data(), k = shown.columns.length - 1, wide = 440, tall = 170, left = 52, right = 8, above = 8, below = 30;
    const chart = html("div", charts, { class: "chart", "data-position": row.position });
    const side = shown.panes.length > 1 ? ["left: ", "right: "][pane] : "";
    html("div", chart, { class: "title" }, side + row.label);
    const picture = svg("svg", chart, { width: wide, height: tall, role: "img", "aria-label": `levels and credits of ${row.label}: ${row.words}` });
    const x = (j) => left + ((j + 0.5) * (wide - left - right)) / (k + 1);
    const y = (value) => above + ((high - value) * (tall - above - below)) / (high - low);
    const step = (wide - left - right) / (k + 1);
    for (const tick of ticks(low, high)) {
      svg("line", picture, { x1: left, x2: wide - right, y1: y(tick), y2: y(tick), stroke: "#e4e4e4" });
      svg("text", picture, { x: left - 4, y: y(tick) + 4, "text-anchor": "end" }, String(+tick.toPrecision(3)).replace("-", "−"));
    }
    for (let j = k; j >= 0; j -= Math.ceil(26 / step)) {
      svg("text", picture, { x: x(j), y: tall - below + 13, "text-anchor": "middle" }, shown.columns[j]);
    }
    svg("text", picture, { x: (left + wide) / 2, y: tall - 4, "text-anchor": "middle" }, `layer; bars: credit, line: level (${shown.scalar})`);
    row.credits.forEach((credit, j) => {
      const zero = y(0), end = y(credit);
      svg("rect", picture, { x: x(j + 1) - step * 0.4, width: step * 0.8, y: Math.min(zero, end), height: Math.abs(zero - end),
        fill: credit < 0 ? ORANGE : BLUE, "fill-opacity": 0.6 });
    });
    svg("line", picture, { x1: left, x2: wide - right, y1: y(0), y2: y(0), stroke: "#111" });
    const line = (levels, look) => svg("polyline", picture, { points: levels.map((value, j) => `${x(j)},${y(value)}`).join(" "), fill: "none", ...look });
    if (row.own) {
      line(row.own.levels, { stroke: "#666", "stroke-width": 1.5, "stroke-dasharray": "5 3" });
      svg("text", picture, { x: left + 4, y: above + 22, class: "over" }, `dashed: level of ${row.own.label}`);
    }
    line(row.levels, { stroke: "#111", "stroke-width": 1.5 });
    row.levels.forEach((value, j) => svg("circle", picture, { cx: x(j), cy: y(value), r: 2, fill: "#111" }));
    if (row.onset > 0) {
      svg("line", picture, { x1: x(row.onset), x2: x(row.onset), y1: above, y2: tall - below, stroke: "#111", "stroke-dasharray": "2 3" });
      const before = row.onset > k / 2;
      svg("text", picture, { x: x(row.onset) + (before ? -4 : 4), y: above + 10, "text-anchor": before ? "end" : "start", class: "over" }, `onset ${shown.columns[row.onset]}`);
    }
    html("p", chart, { class: "words" }, row.words);
    picture.onmousemove = (event) => {
      const j = Math.round((event.clientX - picture.getBoundingClientRect().left - left) / step - 0.5);
      point(j >= 0 && j <= k ? [pane, row.position, shown.columns[j]] : null, event.clientX, event.clientY);
    };
    picture.onmouseleave = () => point(null);
  }

  let marking = [];
  function draw() {
    const shown = data(), focus = focused();
    const scrolled = new Map([...panes.children].map((box) => [box.getAttribute("aria-label"), box.querySelector(".strip").scrollTop]));
    asked.clear(); // what was asked of an earlier prompt or path got no answer
    point(null);
    panes.replaceChildren();
    marking = [];
    const side = (root.clientWidth - 8) / (shown.panes?.length || 1) - 16, space = side < 350 ? root.clientWidth - 8 : side;
    shown.panes?.forEach((pane, index) => {
      const box = html("section", panes, { class: "pane", "aria-label": pane.title });
      html("div", box, { class: "title" }, pane.title);
      drawStrip(box, pane, index, scrolled.get(pane.title));
      if (pane.rows.length) marking.push(drawMap(box, pane, index, space));
    });
    mark();
    pin(cell);
    if (focus) panes.querySelectorAll(".pane")[focus.pane]?.querySelector(focus.what)?.focus({ preventScroll: true });
  }
  // which button or map has the keyboard, to give it back after a redraw
  function focused() {
    const active = root.getRootNode().activeElement, pane = [...panes.children].findIndex((one) => one.contains(active));
    if (pane < 0) return null;
    return { pane, what: active.dataset.position ? `button[data-position="${active.dataset.position}"]` : "svg.map" };
  }
  function mark() {
    marking.forEach((one) => one());
    panes.querySelectorAll(".pane").forEach((box, index) => {
      for (const button of box.querySelectorAll(".strip button")) {
        button.setAttribute("aria-pressed", isSelected(index, Number(button.dataset.position)));
      }
    });
    charts.replaceChildren();
    const rows = model.get("selected").map(([pane, position]) => [pane, rowOf(pane, position)]).filter(([, row]) => row);
    const values = rows.flatMap(([, row]) => [0, ...row.levels, ...row.credits, ...(row.own?.levels ?? [])]);
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [0, 0]), room = (high - low || 1) * 0.04;
    for (const [pane, row] of rows) drawChart(pane, row, low < 0 ? low - room : low, high + room);
  }
  function say() {
    const badge = model.get("badge");
    status.replaceChildren();
    if (badge.text) html("span", status, { class: badge.ok ? "badge" : "badge off" }, badge.text);
    alert.textContent = legible(model.get("message"));
    alert.classList.toggle("note", model.get("message").startsWith("note: "));
  }
  function refresh() {
    asked.clear();
    if (hovered) tip.textContent = legible(describe(hovered));
    if (cell) pin(cell);
  }
  function download(message, buffers) {
    if (!message.download) return;
    const link = html("a", root, { href: URL.createObjectURL(new Blob(buffers, { type: message.type })), download: message.download });
    link.click();
    setTimeout(() => { URL.revokeObjectURL(link.href); link.remove(); }, 1000);
  }

  const listening = { "change:data": draw, "change:selected": mark, "change:badge": say, "change:message": say, "change:top": refresh,
    "msg:custom": download };
  for (const name in listening) model.on(name, listening[name]);
  const watcher = new ResizeObserver(() => {
    if (Math.abs(root.clientWidth - width) < 2) return;
    width = root.clientWidth;
    draw();
  });
  watcher.observe(el);
  say();
  draw();
  return () => {
    watcher.disconnect();
    for (const name in listening) model.off(name, listening[name]);
  };
}

export default { render };
