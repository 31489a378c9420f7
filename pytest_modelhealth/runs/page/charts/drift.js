// What a tensor was in the snapshot, above what it is now, on one axis.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const WIDTH = 720;
  const NAMES = 250;
  const ROW = 66;
  const HEAD = 24;
  const MOST_ROWS = 30;
  const SPREAD = 25; // a range of more stds is drawn on an axis that is logarithmic far from zero
  const SIDES = ["before", "now"];

  charts.drift = function (drift) {
    const { COLOURS, canvas, nothing, plural, write } = charts.drawing;
    const drifted = tensors(drift);
    if (!drifted.length) return nothing("drift", "Nothing drifted.");
    const shown = drifted.slice(0, MOST_ROWS);
    const rest = drifted.length - shown.length;
    const height = HEAD + shown.length * ROW + (rest ? 20 : 0);
    const finding = `${plural(drifted.length, "tensor")} drifted; first ${shown[0].title}: ${shown[0].moves[0]}`;
    const chart = canvas("drift", WIDTH, height, finding);
    legend(chart.body);
    shown.forEach((tensor, index) => drawRow(chart, tensor, HEAD + index * ROW));
    if (rest) write(chart.body, 0, height - 6, `and ${plural(rest, "tensor")} more`, { fill: COLOURS.muted, "font-style": "italic" });
    return chart.svg;
  };

  // One entry a drifted tensor: its statistics on both sides, and what moved in words.
  function tensors(drift) {
    const { words } = charts.drawing;
    const sides = SIDES.map((side) => indexed(drift[side] ?? []));
    const found = new Map();
    for (const item of drift.drifts ?? []) {
      const key = JSON.stringify([item.layer, item.role, item.tensor ?? ""]);
      if (!found.has(key)) {
        const title = [item.label || item.layer || "model", words(item.role), item.tensor].filter(Boolean);
        found.set(key, { layer: item.layer, title: title.join(" "), label: title[0], what: title.slice(1).join(" "), moves: [], sides: sides.map((side) => side.get(key)) });
      }
      found.get(key).moves.push(`${words(item.statistic)} ${spelt(item.before)} → ${spelt(item.now)}`);
    }
    return [...found.values()];
  }

  const spelt = (value) => (typeof value === "number" ? charts.drawing.number(value) : String(value ?? "–"));

  function indexed(layers) {
    const found = new Map();
    for (const { name, tensors } of layers) {
      for (const tensor of tensors ?? []) found.set(JSON.stringify([name, tensor.role, tensor.name ?? ""]), tensor);
    }
    return found;
  }

  function legend(body) {
    const { COLOURS, write } = charts.drawing;
    const glyph = (x, name, colour, isNow) => {
      drawRange(body, { min: x, max: x + 44, mean: x + 20, std: 11 }, (value) => value, 9, colour, isNow);
      write(body, x + 50, 13, name, { fill: COLOURS.muted });
    };
    glyph(NAMES, "before", COLOURS.muted, false);
    glyph(NAMES + 110, "now", COLOURS.accent, true);
    write(body, NAMES + 206, 13, "line: least to greatest; bar: mean ± std", { fill: COLOURS.muted });
  }

  function drawRow({ body, marks }, tensor, y) {
    const { COLOURS, abbreviate, abbreviateName, draw, mark, write } = charts.drawing;
    draw(body, "line", { x1: 0, x2: WIDTH, y1: y, y2: y, stroke: COLOURS.faint });
    write(body, 0, y + 16, abbreviateName(tensor.label, 32), { "font-weight": 600 });
    write(body, 0, y + 31, abbreviate(tensor.what, 36), { fill: COLOURS.muted });
    const more = tensor.moves.length > 1 ? `  (+${tensor.moves.length - 1})` : "";
    write(body, 0, y + 46, abbreviate(tensor.moves[0], 31) + more, { fill: COLOURS.alarm });
    const scale = axis(tensor.sides.filter(Boolean), NAMES + 8, WIDTH - 14);
    tensor.sides.forEach((side, index) => {
      const at = y + 17 + index * 17;
      if (!side) {
        const why = index ? "not there now" : "not in the snapshot";
        write(body, NAMES + 8, at + 4, why, { fill: COLOURS.muted, "font-style": "italic" });
      } else drawSide(body, side, scale, at, index === 1);
    });
    if (scale) drawAxis(body, scale, y + 48);
    const title = [tensor.title, ...tensor.moves].join("\n");
    mark(marks, "rect", { x: 0, y: y + 1, width: WIDTH, height: ROW - 2 }, title, { layer: tensor.layer, focusable: true });
  }

  function drawSide(body, side, scale, y, isNow) {
    const { COLOURS, count, cross, isNumber, write } = charts.drawing;
    const colour = isNow ? COLOURS.accent : COLOURS.muted;
    if (scale && isNumber(side.min) && isNumber(side.max)) drawRange(body, side, scale.at, y, colour, isNow);
    else write(body, NAMES + 8, y + 4, "no finite values", { fill: COLOURS.muted, "font-style": "italic" });
    const bad = (side.nan ?? 0) + (side.inf ?? 0);
    if (!bad) return;
    cross(body, WIDTH - 6, y, { class: "bad" });
    write(body, WIDTH - 16, y + 4, `${count(bad)} NaN or inf`, { "text-anchor": "end", fill: COLOURS.alarm, "font-size": 10 });
  }

  // A line from the least to the greatest with ends, a bar of mean ± std, a stroke at the mean.
  // What was before is hollow.
  function drawRange(body, { min, max, mean, std }, at, y, colour, isNow) {
    const { COLOURS, draw, isNumber, tidy } = charts.drawing;
    const group = draw(body, "g", { class: isNow ? "range now" : "range before" });
    draw(group, "path", { class: "extent", d: `M${tidy(at(min))} ${y - 4}v8m0 -4H${tidy(at(max))}m0 -4v8`, stroke: colour, fill: "none" });
    if (!isNumber(mean)) return;
    if (isNumber(std)) {
      const [from, to] = [at(mean - std), at(mean + std)];
      draw(group, "rect", {
        class: "spread", x: from, y: y - 4.5, width: Math.max(1, to - from), height: 9,
        fill: isNow ? colour : COLOURS.surface, "fill-opacity": isNow ? 0.55 : 1, stroke: colour,
      });
    }
    draw(group, "line", { class: "mean", x1: at(mean), x2: at(mean), y1: y - 6.5, y2: y + 6.5, stroke: isNow ? COLOURS.ink : colour, "stroke-width": 2 });
  }

  // The axis of both sides; where extremes are many stds away, asinh(x / std) keeps both visible.
  function axis(sides, from, to) {
    const { extent, isNumber, linearScale, number, power } = charts.drawing;
    const ends = [];
    const stds = [];
    for (const { min, max, mean, std } of sides) {
      if (!isNumber(min) || !isNumber(max)) continue;
      ends.push(min, max);
      if (isNumber(mean) && isNumber(std)) ends.push(mean - std, mean + std);
      if (std > 0) stds.push(std);
    }
    if (!ends.length) return null;
    const unit = Math.min(...stds);
    const [low, high] = extent(ends);
    if (!stds.length || !(high - low > SPREAD * unit)) return linearScale(ends, from, to, 5);
    const [least, most] = [Math.asinh(low / unit), Math.asinh(high / unit)];
    const at = (value) => from + ((Math.asinh(value / unit) - least) / (most - least)) * (to - from);
    const values = low <= 0 && high >= 0 ? [0] : [];
    for (let e = Math.ceil(Math.log10(unit)); 10 ** e <= Math.max(-low, high); e += 1) {
      values.push(...[10 ** e, -(10 ** e)].filter((value) => value >= low && value <= high));
    }
    const text = (value) => (value === 0 ? "0" : (value < 0 ? "-" : "") + power(Math.round(Math.log10(Math.abs(value)))));
    return { at, ticks: values.map((value) => ({ value, at: at(value), text: text(value) ?? number(value) })) };
  }

  function drawAxis(body, scale, y) {
    const { COLOURS, LETTER, draw, write } = charts.drawing;
    draw(body, "line", { x1: NAMES + 8, x2: WIDTH - 14, y1: y - 4, y2: y - 4, stroke: COLOURS.faint });
    const taken = [];
    for (const { at, text } of scale.ticks) {
      draw(body, "line", { x1: at, x2: at, y1: y - 4, y2: y - 1, stroke: COLOURS.muted });
      const half = (text.length * LETTER) / 2 + 2;
      if (at + half > WIDTH || taken.some((other) => Math.abs(other.at - at) < half + other.half)) continue;
      taken.push({ at, half });
      write(body, at, y + 10, text, { "text-anchor": "middle", fill: COLOURS.muted, "font-size": 10.5 });
    }
  }
})();
