// Who feeds whom, from the batch at the top to the loss at the bottom.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const MOST_BOXES = 80; // all are shown; of more, about half as many after folding
  const FOLDED_TO = [40, 24, 14];
  const WIDEST = 1000; // pixels, before a graph is folded further
  const BOX = 22; // height
  const GAP = 22; // between rows
  const LINE = 13; // of a label
  const MOST_LABELS = 4; // between two rows
  const LETTERS = 30;
  const MOST_FOCUSABLE = 40;
  const PAD = 10;

  charts.flow = function (flow, violations = []) {
    const { nothing } = charts.drawing;
    const edges = flow?.edges ?? [];
    const way = flow?.way ?? [];
    const names = [...new Set([...edges.flatMap(([source, target]) => [source, target]), ...way])];
    if (!names.length) return nothing("flow", "No flow was recorded.");
    const culprit = violations[0]?.layer;
    const drawn = readable(names, edges, way, culprit);
    return draw(drawn, { names, way, culprit, violations, exact: flow.exact !== false });
  };

  // Folds until the picture is narrow enough to be read, or cannot be folded further.
  function readable(names, edges, way, culprit) {
    const focus = names.includes(culprit) ? culprit : way[way.length >> 1] ?? culprit;
    const places = joinPlaces(edges);
    let drawn;
    for (const most of [Infinity, ...FOLDED_TO]) {
      if (names.length > MOST_BOXES && most === Infinity) continue;
      const folded = most === Infinity ? unfolded(names) : charts.fold(names, focus, most, places);
      if (drawn && folded.boxes.length >= drawn.boxes.length) continue;
      const arrows = joined(folded, edges, way);
      const widths = folded.boxes.map((box) => boxWidth(box));
      drawn = { ...folded, arrows, widths, ...charts.layered(widths, arrows) };
      if (drawn.width <= WIDEST) break;
    }
    return drawn;
  }

  // An operation that joins several ways is folded with the first of the layers that feed it.
  function joinPlaces(edges) {
    const places = new Map();
    for (const [source, target] of edges) {
      if (!isJoin(target) || places.has(target)) continue;
      const feeding = places.get(source) ?? source;
      const outer = feeding.slice(0, Math.max(0, feeding.lastIndexOf(".")));
      places.set(target, (outer && `${outer}.`) + target.replaceAll(".", " "));
    }
    return places;
  }

  function unfolded(names) {
    return {
      boxes: names.map((name) => ({ name, size: 1, first: name, isRange: false, leaves: [name] })),
      boxOf: new Map(names.map((name, index) => [name, index])),
    };
  }

  // One arrow for all edges from a box to another, apart by whether gradients go back.
  function joined({ boxOf }, edges, way) {
    const lit = new Set();
    for (let i = 1; i < way.length; i += 1) lit.add(`${boxOf.get(way[i - 1])} ${boxOf.get(way[i])}`);
    const arrows = new Map();
    for (const [source, target, passes, operations] of edges) {
      const [from, to] = [boxOf.get(source), boxOf.get(target)];
      if (from === to && source !== target) continue;
      const key = `${from} ${to} ${passes ? "" : "cut"}`;
      if (!arrows.has(key)) arrows.set(key, { from, to, isCut: !passes, operations: new Set(), number: 0 });
      const arrow = arrows.get(key);
      arrow.number += 1;
      const done = Array.isArray(operations) ? operations : String(operations ?? "").split(/\s+/);
      for (const operation of done) if (operation && arrow.operations.size < 6) arrow.operations.add(String(operation));
    }
    return [...arrows.values()].map((arrow) => {
      const isWay = arrow.from !== arrow.to && lit.has(`${arrow.from} ${arrow.to}`);
      const style = [isWay ? "way" : "", arrow.isCut ? "cut" : ""].filter(Boolean).join(" ") || "plain";
      return { ...arrow, isWay, style };
    });
  }

  function boxText(box) {
    const { abbreviateName, count } = charts.drawing;
    if (box.isRange) return `${box.ends.map((end) => abbreviateName(end, 17)).join(" … ")} (${count(box.size)})`;
    if (isJoin(box.name)) return abbreviateName(box.name.replace(/ #\d+$/, ""), LETTERS);
    return abbreviateName(box.name || "model", LETTERS) + (box.size > 1 ? ` (${count(box.size)})` : "");
  }

  const boxWidth = (box) => Math.max(isJoin(box.name) ? 26 : 48, boxText(box).length * charts.drawing.LETTER + 18);

  function draw(drawn, { names, way, culprit, violations, exact }) {
    const { COLOURS, canvas, draw: add, write } = charts.drawing;
    const { boxes, boxOf, arrows } = drawn;
    const lit = new Set(way.map((name) => boxOf.get(name)));
    let focused = 0;
    const notes = legend(drawn, { names, way, culprit, exact });
    const head = notes.length * 17 + 8;
    const rows = spread(drawn, head);
    const loops = arrows.some((arrow) => arrow.from === arrow.to) ? 26 : 0;
    const width = Math.max(360, drawn.width + 2 * PAD + loops, labelsEnd(rows), ...notes.map(noteWidth));
    const { svg, body, marks } = canvas("flow", width, rows.height, sentence(drawn, { names, way, culprit, violations }));
    svg.style.minWidth = `${Math.round(Math.min(width, 720 + (width - 720) * 0.6))}px`;
    notes.forEach((note, index) => drawNote(body, note, 12 + index * 17));
    const shift = Math.max(PAD, (Math.min(width, 720) - drawn.width) / 2);
    const at = rows.at;
    const order = arrows.map((_, index) => index).sort((a, b) => rank(arrows[a]) - rank(arrows[b]));
    const offsets = parallel(arrows);
    for (const index of order) drawArrow(index);
    boxes.forEach((box, index) => drawBox(box, index));
    for (const label of rows.labels) {
      const x = label.x + shift + 6;
      const isEnd = x + label.text.length * 5.6 > width;
      write(body, isEnd ? x - 12 : x, label.y, label.text, {
        class: "operations", fill: COLOURS.alarm, "font-size": 10.5, "text-anchor": isEnd ? "end" : "start",
        stroke: COLOURS.surface, "stroke-width": 3, "paint-order": "stroke", "stroke-linejoin": "round",
      });
    }
    return svg;

    function labelsEnd({ labels }) {
      const centre = Math.max(PAD, (720 - drawn.width) / 2);
      return labels.reduce((most, { x, text }) => Math.max(most, Math.min(x + centre + text.length * 5.8 + 12, drawn.width + 300)), 0);
    }

    function drawArrow(index) {
      const { mark, tidy } = charts.drawing;
      const arrow = arrows[index];
      const { points, isBack } = drawn.routes[index];
      const stroke = arrow.isCut ? COLOURS.alarm : arrow.isWay ? COLOURS.accent : COLOURS.muted;
      const weight = arrow.isWay ? 2.6 : 1.1;
      let d;
      let tip;
      if (arrow.from === arrow.to) {
        const x = shift + points[0][0] + drawn.widths[arrow.from] / 2;
        const y = at(points[0][1]);
        d = `M${tidy(x)} ${tidy(y - 5)}c22 -12 22 22 3 10`;
        tip = { x: x + 1, y: y + 5, way: "left" };
      } else {
        const ends = points.map(([x, row], i) => {
          const isFirst = i === 0;
          const isLast = i === points.length - 1;
          const y = at(row) + (isFirst ? BOX / 2 : isLast ? -BOX / 2 : 0);
          return [x + shift + (isFirst || isLast ? offsets[index] : 0), y];
        });
        const [first, last] = [ends[0], ends.at(-1)];
        if (isBack) first[1] += 5;
        else last[1] -= 5;
        tip = isBack ? { x: first[0], y: first[1] - 5, way: "up" } : { x: last[0], y: last[1] + 5, way: "down" };
        d = `M${tidy(first[0])} ${tidy(first[1])}`;
        for (let i = 1; i < ends.length; i += 1) d += bend(ends[i - 1], ends[i], i > 1, i < ends.length - 1);
      }
      const names = { "data-source": boxes[arrow.from].name, "data-target": boxes[arrow.to].name };
      add(body, "path", {
        class: `edge ${arrow.style}${isBack ? " back" : ""}`, ...names, d, fill: "none", stroke, "stroke-width": weight,
        "stroke-dasharray": arrow.isCut ? "5 3" : null, "stroke-opacity": arrow.isWay || arrow.isCut ? 1 : 0.75,
      });
      const s = arrow.isWay ? 4.5 : 3.3;
      const heads = { down: `l${-s} ${-s * 1.7}h${2 * s}z`, up: `l${-s} ${s * 1.7}h${2 * s}z`, left: `l${s * 1.7} ${-s}v${2 * s}z` };
      add(body, "path", { class: "head", d: `M${tidy(tip.x)} ${tidy(tip.y)}${heads[tip.way]}`, fill: stroke });
      const title = [`${boxes[arrow.from].name || "model"} → ${boxes[arrow.to].name || "model"}`];
      if (arrow.operations.size) title.push(`by ${[...arrow.operations].join(", ")}`);
      if (arrow.number > 1) title.push(`${arrow.number} edges`);
      if (isBack) title.push("goes back to a layer that was called before");
      if (arrow.isCut) title.push("no gradient goes back");
      mark(marks, "path", { class: "edge-mark", d, fill: "none", "fill-opacity": null, stroke: "transparent", "stroke-width": 9, "pointer-events": "stroke" }, title.join("\n"));
    }

    // Through the rows between, an edge goes straight down.
    function bend([x0, y0], [x1, y1], isFromLane, isToLane) {
      const { tidy } = charts.drawing;
      const start = isFromLane ? y0 + BOX / 2 : y0;
      const end = isToLane ? y1 - BOX / 2 : y1;
      const middle = (start + end) / 2;
      const lead = isFromLane ? `V${tidy(start)}` : "";
      return `${lead}C${tidy(x0)} ${tidy(middle)} ${tidy(x1)} ${tidy(middle)} ${tidy(x1)} ${tidy(end)}`;
    }

    function drawBox(box, index) {
      const { mark, words } = charts.drawing;
      const x = shift + drawn.xOf[index];
      const y = at(drawn.rowOf[index]);
      const w = drawn.widths[index];
      const found = violations.filter(({ layer }) => holds(box, index, layer));
      const isCulprit = culprit !== undefined && holds(box, index, culprit);
      const isWay = lit.has(index);
      const isEnd = box.size === 1 && !isLayer(box.name);
      const stroke = found.length ? COLOURS.alarm : isWay ? COLOURS.accent : COLOURS.muted;
      const shape = { x: x - w / 2, y: y - BOX / 2, width: w, height: BOX, rx: isEnd ? BOX / 2 : 4 };
      if (box.size > 1) {
        add(body, "rect", { ...shape, x: shape.x + 3, y: shape.y + 3, fill: COLOURS.panel, stroke, "stroke-opacity": 0.6 });
      }
      add(body, "rect", {
        class: ["box", isCulprit ? "culprit" : "", isWay ? "way" : "", box.size > 1 ? "folded" : ""].filter(Boolean).join(" "),
        ...shape, fill: isEnd ? COLOURS.panel : COLOURS.surface, stroke,
        "stroke-width": isCulprit ? 2.6 : isWay || found.length ? 1.7 : 1, "data-name": box.name,
      });
      if (isCulprit) add(body, "rect", { ...shape, fill: COLOURS.alarm, "fill-opacity": 0.13 });
      write(body, x, y + 3.8, boxText(box), {
        "text-anchor": "middle", fill: found.length ? COLOURS.alarm : COLOURS.ink, "font-weight": isCulprit ? 700 : null,
        "font-style": isEnd && !isJoin(box.name) ? "italic" : null,
      });
      const title = [box.name || "model"];
      if (box.size > 1) title.push(`${charts.drawing.plural(box.size, "part")} folded`);
      for (const { check, message, layer, label } of found.slice(0, 5)) title.push(`${box.size > 1 ? `${label || layer}: ` : ""}${message || words(check)}`);
      if (isWay && way.length) title.push("on the way from the batch through the culprit to the end");
      const inside = found.map(({ layer }) => layer).find((layer) => layer !== undefined);
      const layer = isEnd ? null : box.size > 1 && inside !== undefined ? inside : box.isRange ? box.first : box.name;
      const focusable = layer !== null && (isCulprit || isWay || boxes.length <= MOST_FOCUSABLE) && focused++ < MOST_FOCUSABLE;
      mark(marks, "rect", shape, title.join("\n"), { layer, focusable });
    }

    // Whether a box shows a layer, or holds it folded, or is a part of it.
    function holds(box, index, layer) {
      if (layer === undefined || layer === "") return box.name === layer;
      return boxOf.get(layer) === index || box.name === layer
        || (!box.isRange && (box.size > 1 ? layer.startsWith(`${box.name}.`) : box.name.startsWith(`${layer}.`)));
    }
  }

  // An operation that joins several ways is numbered: "+ #45".
  const isJoin = (name) => / #\d+$/.test(name);

  const isEndOrSource = (name) => name === "output" || name === "loss" || /^(input|target)( |$)/.test(name);

  const isLayer = (name) => !isEndOrSource(name) && !isJoin(name);

  const rank = (arrow) => (arrow.isWay ? 2 : 0) + (arrow.isCut ? 1 : 0);

  // Several arrows between the same two boxes leave and arrive beside each other.
  function parallel(arrows) {
    const pairs = new Map();
    arrows.forEach(({ from, to }, index) => {
      const key = `${Math.min(from, to)} ${Math.max(from, to)}`;
      if (!pairs.has(key)) pairs.set(key, []);
      pairs.get(key).push(index);
    });
    const offsets = new Array(arrows.length).fill(0);
    for (const same of pairs.values()) same.forEach((index, i) => (offsets[index] = (i - (same.length - 1) / 2) * 16));
    return offsets;
  }

  // Where each row stands: more space where operations are written between two rows.
  function spread(drawn, head) {
    const between = new Map(); // upper row: arrows that are written there
    drawn.arrows.forEach((arrow, index) => {
      if (!arrow.isCut || arrow.from === arrow.to) return;
      const { points } = drawn.routes[index];
      const row = points.at(-2)[1];
      if (!between.has(row)) between.set(row, []);
      between.get(row).push({ arrow, from: points.at(-2), to: points.at(-1) });
    });
    const places = [];
    const labels = [];
    let y = head + BOX / 2 + 4;
    for (let row = 0; row < drawn.rows; row += 1) {
      places.push(y);
      const written = (between.get(row) ?? []).sort((a, b) => a.to[0] + a.from[0] - b.to[0] - b.from[0]);
      const shown = written.slice(0, MOST_LABELS);
      const gap = GAP + (shown.length ? 6 + shown.length * LINE : 0);
      shown.forEach(({ arrow, from, to }, line) => {
        const down = (16 + line * LINE) / gap;
        const text = `no gradient: ${[...arrow.operations].join(", ") || "cut"}`;
        const more = line === shown.length - 1 && written.length > shown.length ? `, and ${written.length - shown.length} more` : "";
        labels.push({ x: from[0] + (to[0] - from[0]) * smooth(down), y: y + BOX / 2 + 15 + line * LINE, text: charts.drawing.abbreviate(text, 40) + more });
      });
      y += BOX + gap;
    }
    return { at: (row) => places[row], labels, height: y - GAP + 4 };
  }

  // How far across a bend is, so far down (both from 0 to 1).
  function smooth(down) {
    let [low, high] = [0, 1];
    for (let i = 0; i < 20; i += 1) {
      const t = (low + high) / 2;
      if (1.5 * t * (1 - t) + t ** 3 < down) low = t;
      else high = t;
    }
    return 3 * low ** 2 - 2 * low ** 3;
  }

  function legend(drawn, { names, way, culprit, exact }) {
    const { count, plural } = charts.drawing;
    const notes = [[]];
    if (way.length) notes[0].push({ glyph: "way", text: `the way ${culprit === undefined ? "from the batch to the end" : "from the batch through the culprit to the end"}` });
    if (drawn.arrows.some((arrow) => arrow.isCut)) notes[0].push({ glyph: "cut", text: "values pass, gradients do not" });
    if (drawn.routes.some((route) => route.isBack)) notes.push([{ glyph: "back", text: "upward: a layer that is called again" }]);
    const folded = drawn.boxes.filter((box) => box.size > 1);
    if (folded.length) {
      const inside = folded.reduce((sum, box) => sum + box.leaves.filter(isLayer).length, 0);
      const into = folded.length === 1 ? "1 box" : `${folded.length} boxes`;
      notes.push([{ glyph: "folded", text: `${count(inside)} of ${plural(names.filter(isLayer).length, "layer")} are folded into ${into}` }]);
    }
    if (!exact) notes.push([{ text: "The flow was recorded in part: a way may be missing." }]);
    return notes.filter((note) => note.length);
  }

  function drawNote(body, items, y) {
    const { COLOURS, draw, write } = charts.drawing;
    let x = 0;
    for (const { glyph, text } of items) {
      if (glyph === "way") draw(body, "line", { x1: x, x2: x + 22, y1: y - 4, y2: y - 4, stroke: COLOURS.accent, "stroke-width": 2.6 });
      if (glyph === "cut") draw(body, "line", { x1: x, x2: x + 22, y1: y - 4, y2: y - 4, stroke: COLOURS.alarm, "stroke-dasharray": "5 3", "stroke-width": 1.4 });
      if (glyph === "back") draw(body, "path", { d: `M${x + 11} ${y - 9}l-3.3 5.6h6.6zM${x + 11} ${y - 4}v5`, fill: COLOURS.muted, stroke: COLOURS.muted });
      if (glyph === "folded") {
        draw(body, "rect", { x: x + 3, y: y - 7, width: 19, height: 8, rx: 2, fill: COLOURS.panel, stroke: COLOURS.muted });
        draw(body, "rect", { x, y: y - 10, width: 19, height: 8, rx: 2, fill: COLOURS.surface, stroke: COLOURS.muted });
      }
      write(body, glyph ? x + 28 : x, y, text, { fill: COLOURS.muted });
      x += itemWidth(glyph, text);
    }
  }

  const itemWidth = (glyph, text) => (glyph ? 28 : 0) + text.length * charts.drawing.LETTER * 0.92 + 14;

  const noteWidth = (items) => items.reduce((sum, { glyph, text }) => sum + itemWidth(glyph, text), 0);

  function sentence(drawn, { names, way, culprit, violations }) {
    const { plural, words } = charts.drawing;
    const parts = [`flow of ${plural(names.filter(isLayer).length, "layer")}`];
    if (way.length) parts.push(`from ${way[0]} ${culprit === undefined ? "" : `through ${violations[0].label || culprit} `}to ${way.at(-1)}`);
    if (violations.length) parts.push(`culprit ${violations[0].label || culprit || "model"}: ${words(violations[0].check)}`);
    const cut = drawn.arrows.filter((arrow) => arrow.isCut).length;
    if (cut) parts.push(`no gradient goes back along ${plural(cut, "edge")}`);
    return parts.join("; ");
  }
})();
