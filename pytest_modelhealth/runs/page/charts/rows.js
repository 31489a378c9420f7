// Layers from top to bottom in execution order, with panels of log axes beside their names.
//
// Each layer has a row. Where rows would be thinner than 2 px, several layers share a band, which
// shows the least, the greatest and the (geometric) mean of them: no layer is left out.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const WIDTH = 720;
  const NAMES = 196; // pixels
  const LETTERS = 24; // of a name
  const ROW = 18;
  const TALLEST = 40 * ROW;
  const HEAD = 42;
  const FOOT = 22;
  const POINTS_FROM = 6; // pixels a row, below which there is a line only
  const NAME_PITCH = 13;
  const FREE_PITCH = 20; // of names of which nothing is said
  const MOST_NAMED = 20; // of the layers with findings, before others are named
  const GUTTER = 16; // beside an axis, for zeros and for what is not finite

  // `layers`: [{name, label, isCulprit, isFound, note}]. `panels`: [{title, series, ranges, empty}]; `empty` is
  // said where there are no values.
  //
  // A series: {key, name, colour, shape, dash, values, whiskers}; `key` is a class of CSS; a value is undefined, or {value, bad}:
  // of a value of zero a hollow point stands at the left edge, of a bad one a cross at the right.
  // `whiskers`: {name, values}: numbers that lines lead to. `ranges`: {name, values}: bars up to there.
  // `titleOf(index)`: the lines that are shown of a layer.
  // `footnote`: what the notes beside names mean.
  charts.rows = function (kind, layers, panels, finding, titleOf, footnote = "") {
    const { COLOURS, canvas, write } = charts.drawing;
    const bands = arrange(layers.length);
    const height = HEAD + bands.height + FOOT + (footnote ? 18 : 0);
    const chart = canvas(kind, WIDTH, height, finding);
    const gap = 22;
    const width = (WIDTH - NAMES - gap * (panels.length - 1) - 10) / panels.length;
    const named = chooseNames(layers, bands);
    drawBands(chart.body, layers, bands);
    panels.forEach((panel, index) => {
      drawPanel(chart.body, panel, bands, NAMES + index * (width + gap), width);
    });
    drawNames(chart.body, layers, named, bands);
    if (footnote) write(chart.body, 0, height - 4, footnote, { fill: COLOURS.muted, "font-size": 10.5 });
    layMarks(chart.marks, layers, named, bands, titleOf);
    return chart.svg;
  };

  function arrange(count) {
    const pitch = Math.min(ROW, TALLEST / Math.max(count, 1));
    const size = Math.max(1, Math.ceil(2 / pitch));
    const starts = [];
    for (let start = 0; start < count; start += size) starts.push(start);
    return {
      pitch, size, starts, count,
      height: pitch * Math.max(count, 1),
      hasPoints: pitch >= POINTS_FROM,
      rowAt: (index) => HEAD + (index + 0.5) * pitch,
      bandAt: (start) => HEAD + (start + Math.min(start + size, count)) * 0.5 * pitch,
    };
  }

  // Returns indices whose names stand at least NAME_PITCH apart: what was found first.
  function chooseNames(layers, bands) {
    const taken = new Map(); // slot of NAME_PITCH pixels: where a name stands in it
    const chosen = [];
    const take = (index) => {
      const y = bands.rowAt(index);
      const slot = Math.floor(y / NAME_PITCH);
      for (const near of [slot - 1, slot, slot + 1]) {
        if (taken.has(near) && Math.abs(taken.get(near) - y) < NAME_PITCH - 0.01) return;
      }
      taken.set(slot, y);
      chosen.push(index);
    };
    const found = [];
    layers.forEach((layer, index) => layer.isCulprit && take(index));
    layers.forEach((layer, index) => (layer.isFound || layer.note) && found.push(index));
    found.slice(0, MOST_NAMED).forEach(take);
    if (layers.length) [0, layers.length - 1].forEach(take);
    const step = bands.pitch >= NAME_PITCH ? 1 : Math.ceil(FREE_PITCH / bands.pitch);
    for (let index = 0; index < layers.length; index += step) take(index);
    return chosen;
  }

  function drawBands(body, layers, bands) {
    const { COLOURS, draw } = charts.drawing;
    const band = (first, last, attributes) => {
      const height = Math.max((last - first + 1) * bands.pitch, 3);
      const y = (bands.rowAt(first) + bands.rowAt(last) - height) / 2;
      draw(body, "rect", { x: 0, y, width: WIDTH, height, fill: COLOURS.alarm, ...attributes });
    };
    let first = 0;
    layers.forEach((layer, index) => {
      if (layer.isCulprit) band(index, index, { class: "culprit-band", "fill-opacity": 0.16 });
      if (!layer.isTinted) first = index + 1;
      else if (!layers[index + 1]?.isTinted) band(first, index, { class: "tinted-band", "fill-opacity": 0.06 });
    });
  }

  function drawNames(body, layers, named, bands) {
    const { COLOURS, LETTER, abbreviateName, draw, write } = charts.drawing;
    for (const index of named) {
      const layer = layers[index];
      const y = bands.rowAt(index) + 3.8;
      const note = layer.note ? ` ${layer.note}` : "";
      const text = abbreviateName(layer.label, LETTERS - note.length - (layer.isCulprit ? 3 : 0));
      const isAlarm = layer.isCulprit || layer.isFound;
      write(body, NAMES - 12, y, text + note, {
        class: layer.isCulprit ? "name culprit" : "name",
        "text-anchor": "end",
        fill: isAlarm ? COLOURS.alarm : COLOURS.ink,
        "font-weight": layer.isCulprit ? 700 : null,
      });
      if (!layer.isCulprit) continue;
      const x = Math.max(1, NAMES - 26 - (text + note).length * LETTER * 1.08);
      draw(body, "path", { class: "pointer", d: `M${x} ${y - 8.6}l8 4.5l-8 4.5z`, fill: COLOURS.alarm });
    }
  }

  function drawPanel(body, panel, bands, x, width) {
    const { COLOURS, draw, logScale, write } = charts.drawing;
    const all = [];
    let [hasZeros, hasBad] = [false, false];
    for (const series of panel.series) {
      for (const value of series.values) {
        if (value === undefined) continue;
        if (value.value > 0) all.push(value.value);
        if (value.value === 0) hasZeros = true;
        if (value.bad) hasBad = true;
      }
    }
    for (const extra of [...panel.series.map((series) => series.whiskers), panel.ranges]) {
      for (const value of extra?.values ?? []) if (value > 0) all.push(value);
    }
    const left = x + (hasZeros ? GUTTER : 0);
    const right = x + width - (hasBad ? GUTTER : 0);
    const bottom = HEAD + bands.height;
    write(body, x, 12, panel.title, { "font-weight": 600 });
    if (!all.length && !hasZeros && !hasBad) {
      write(body, x, HEAD + 14, panel.empty, { fill: COLOURS.muted, "font-style": "italic" });
      return;
    }
    const scale = logScale(all, left, right, Math.max(3, Math.floor((right - left) / 46)));
    const grid = draw(body, "g", { class: "axis" });
    draw(grid, "rect", { x, y: HEAD, width, height: bands.height, fill: "none", stroke: COLOURS.faint });
    const tick = (at, text, attributes) =>
      write(grid, at, bottom + 15, text, { "text-anchor": "middle", fill: COLOURS.muted, "font-size": 10.5, ...attributes });
    if (all.length) {
      for (const { at, text } of scale.ticks) {
        draw(grid, "line", { x1: at, x2: at, y1: HEAD, y2: bottom, stroke: COLOURS.faint });
        if ((!hasZeros || at > left + 14) && (!hasBad || at < right - 16)) tick(at, text);
      }
    }
    const zeroAt = x + GUTTER / 2;
    const badAt = x + width - GUTTER / 2;
    if (hasZeros) tick(zeroAt, "0");
    if (hasBad) tick(badAt - 2, "NaN", { fill: COLOURS.alarm });
    if (panel.ranges) drawRanges(body, panel.ranges, bands, scale, left, right);
    for (const series of panel.series) drawSeries(body, series, bands, scale, { zeroAt, badAt });
    drawLegend(body, panel, bands, x);
  }

  function drawLegend(body, panel, bands, x) {
    const { COLOURS, LETTER, draw, point, write } = charts.drawing;
    const y = 30;
    const add = (name, width, glyph) => {
      glyph(x);
      write(body, x + width + 4, y, name, { fill: COLOURS.muted, "font-size": 10.5 });
      x += width + 16 + name.length * LETTER * 0.93;
    };
    for (const series of panel.series) {
      if (!series.values.some((value) => value !== undefined)) continue;
      add(series.name, 18, (at) => {
        draw(body, "line", { x1: at, x2: at + 18, y1: y - 4, y2: y - 4, stroke: series.colour, "stroke-width": 1.4, "stroke-dasharray": series.dash });
        point(body, series.shape, at + 9, y - 4, 2.8, { fill: series.colour });
      });
      if (!series.whiskers?.values.some((value) => value > 0)) continue;
      add(series.whiskers.name, 16, (at) => {
        const d = bands.hasPoints ? `M${at} ${y - 4}h14m0 -3v6` : `M${at} ${y - 4}h16`;
        draw(body, "path", { d, stroke: series.colour, fill: "none", "stroke-dasharray": bands.hasPoints ? null : "2 2" });
      });
    }
    if (panel.ranges?.values.some((value) => value > 0)) {
      add(panel.ranges.name, 14, (at) => draw(body, "rect", { x: at, y: y - 9, width: 14, height: 9, fill: COLOURS.muted, "fill-opacity": 0.28 }));
    }
  }

  // Up to where each row's range goes, from the left.
  function drawRanges(body, { values }, bands, scale, left, right) {
    const { COLOURS, draw, tidy } = charts.drawing;
    const parts = [];
    for (const start of bands.starts) {
      let greatest = 0;
      const end = Math.min(start + bands.size, bands.count);
      for (let i = start; i < end; i += 1) if (values[i] > greatest) greatest = values[i];
      if (!(greatest > 0)) continue;
      const x = Math.min(right, Math.max(left, scale.at(greatest)));
      const height = Math.max(1, (end - start) * bands.pitch - (bands.hasPoints ? 4 : 0));
      parts.push(`M${tidy(left)} ${tidy(bands.bandAt(start) - height / 2)}H${tidy(x)}v${tidy(height)}H${tidy(left)}z`);
    }
    if (parts.length) draw(body, "path", { class: "ranges", d: parts.join(""), fill: COLOURS.muted, "fill-opacity": 0.28 });
  }

  // What a series holds in each band: {at, low, high, mean, zero, bad, whisker}.
  function gather(series, bands) {
    return bands.starts.map((start) => {
      const found = { y: bands.bandAt(start), low: Infinity, high: 0, logs: 0, number: 0, zero: false, bad: false, whisker: 0 };
      const end = Math.min(start + bands.size, bands.count);
      for (let i = start; i < end; i += 1) {
        const whisker = series.whiskers?.values[i];
        if (whisker > found.whisker) found.whisker = whisker;
        const value = series.values[i];
        if (value === undefined) continue;
        if (value.bad) found.bad = true;
        if (value.value === 0) found.zero = true;
        if (!(value.value > 0)) continue;
        found.low = Math.min(found.low, value.value);
        found.high = Math.max(found.high, value.value);
        found.logs += Math.log(value.value);
        found.number += 1;
      }
      found.mean = found.number ? Math.exp(found.logs / found.number) : 0;
      return found;
    });
  }

  function drawSeries(body, series, bands, scale, { zeroAt, badAt }) {
    const { COLOURS, cross, draw, point } = charts.drawing;
    const group = draw(body, "g", { class: `series ${series.key}` });
    const found = gather(series, bands);
    const stroke = series.colour;
    const runs = unbroken(found);
    if (bands.size > 1) {
      for (const run of runs) draw(group, "path", { class: "envelope", d: envelope(run, scale), fill: stroke, "fill-opacity": 0.22 });
    }
    drawWhiskers(group, found, bands, scale, stroke);
    for (const run of runs) {
      if (run.length > 1) {
        draw(group, "path", { class: "line", d: line(run, scale, "mean"), stroke, fill: "none", "stroke-width": 1.3, "stroke-dasharray": series.dash, "stroke-linejoin": "round" });
      }
      if (!bands.hasPoints && run.length > 1) continue;
      for (const { mean, y } of run) point(group, series.shape, scale.at(mean), y, 2.8, { class: "point", fill: stroke });
    }
    for (const { zero, bad, y } of found) {
      if (zero) point(group, series.shape, zeroAt, y, 2.8, { class: "zero", fill: COLOURS.surface, stroke, "stroke-width": 1.2 });
      if (bad) cross(group, badAt, y, { class: "bad" });
    }
  }

  function drawWhiskers(group, found, bands, scale, stroke) {
    const { draw, tidy } = charts.drawing;
    const ends = found.filter(({ whisker, mean }) => whisker > 0 && mean > 0);
    if (!ends.length) return;
    if (!bands.hasPoints) {
      const d = ends.map(({ whisker, y }, i) => `${i ? "L" : "M"}${tidy(scale.at(whisker))} ${tidy(y)}`).join("");
      draw(group, "path", { class: "whiskers", d, stroke, fill: "none", "stroke-dasharray": "2 2", "stroke-opacity": 0.8 });
      return;
    }
    const d = ends.map(({ whisker, mean, y }) => `M${tidy(scale.at(mean))} ${tidy(y)}H${tidy(scale.at(whisker))}m0 -3v6`).join("");
    draw(group, "path", { class: "whiskers", d, stroke, fill: "none" });
  }

  // Bands without a value are passed over; a zero or NaN alone in its band breaks the line.
  function unbroken(found) {
    const runs = [[]];
    for (const band of found) {
      if (band.number) runs.at(-1).push(band);
      else if ((band.zero || band.bad) && runs.at(-1).length) runs.push([]);
    }
    return runs.filter((run) => run.length);
  }

  function line(run, scale, key) {
    const { tidy } = charts.drawing;
    return run.map((band, i) => `${i ? "L" : "M"}${tidy(scale.at(band[key]))} ${tidy(band.y)}`).join("");
  }

  function envelope(run, scale) {
    return `${line(run, scale, "low")}${line(run.toReversed(), scale, "high").replace("M", "L")}z`;
  }

  function layMarks(marks, layers, named, bands, titleOf) {
    const { mark, plural } = charts.drawing;
    const focusable = new Set(named.map((index) => Math.floor(index / bands.size)));
    bands.starts.forEach((start, number) => {
      const end = Math.min(start + bands.size, bands.count);
      const band = layers.slice(start, end);
      const chief = Math.max(0, band.findIndex((layer) => layer.isCulprit || layer.isFound));
      const several = end - start > 1 ? `${plural(end - start, "layer")}, ${band[0].label} to ${band.at(-1).label}; of them:\n` : "";
      mark(
        marks, "rect",
        { x: 0, y: HEAD + start * bands.pitch, width: WIDTH, height: (end - start) * bands.pitch },
        several + titleOf(start + chief),
        { layer: layers[start + chief].name, focusable: focusable.has(number) },
      );
    });
  }
})();
