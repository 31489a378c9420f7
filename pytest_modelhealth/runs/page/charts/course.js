// The course of a training: its loss, and each statistic of its layers, over steps.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const WIDTH = 720;
  const LOSS = 120;
  const SMALL = 96;
  const COLUMNS = 2;
  const GAP = 26;
  const HEAD = 24;
  const FOOT = 24;
  const LEFT = 44;
  const LOG_FROM = 30; // times the least: positive values that differ by more have a log axis
  const MOST_LINES = 12; // of more layers, the band from the least to the greatest is drawn
  const NAMED = 2;
  const LABEL = 96; // pixels at the right for names

  charts.course = function (course) {
    const { canvas, nothing, words } = charts.drawing;
    const steps = course?.steps ?? [];
    if (!steps.length) return nothing("course", "No step was recorded.");
    const statistics = byStatistic(course.layers ?? {});
    const rows = Math.ceil(statistics.size / COLUMNS);
    const height = HEAD + LOSS + FOOT + rows * (HEAD + SMALL + FOOT);
    const chart = canvas("course", WIDTH, height, sentence(course));
    panel(chart, { title: "loss", x: 0, y: 0, width: WIDTH, height: LOSS, steps, lines: [{ name: null, label: "loss", values: course.loss ?? [] }] });
    const width = (WIDTH - GAP * (COLUMNS - 1)) / COLUMNS;
    [...statistics].forEach(([name, lines], index) => {
      panel(chart, {
        title: words(name),
        x: (index % COLUMNS) * (width + GAP),
        y: HEAD + LOSS + FOOT + Math.floor(index / COLUMNS) * (HEAD + SMALL + FOOT),
        width, height: SMALL, steps, lines,
      });
    });
    return chart.svg;
  };

  // {layer: {statistic: values}} as statistic -> [{name, label, values}], of those with any number.
  function byStatistic(layers) {
    const found = new Map();
    for (const [name, statistics] of Object.entries(layers)) {
      for (const [statistic, values] of Object.entries(statistics)) {
        if (!values?.some(charts.drawing.isNumber)) continue;
        if (!found.has(statistic)) found.set(statistic, []);
        found.get(statistic).push({ name, label: name || "model", values });
      }
    }
    return found;
  }

  function panel({ body, marks }, { title, x, y, width, height, steps, lines }) {
    const { COLOURS, draw, linearScale, logScale, write } = charts.drawing;
    const top = y + HEAD;
    const bottom = top + height;
    const isMany = lines.length > 1;
    const left = x + LEFT;
    const right = x + width - (isMany ? LABEL : 8);
    const { ordinary, isLog } = measure(lines);
    const vertical = (isLog ? logScale : linearScale)(ordinary, bottom - 3, top + 3, height > 110 ? 5 : 4);
    const across = linearScale(steps, left + 3, right - 3, width > 400 ? 8 : 5);
    write(body, x, y + 12, title, { "font-weight": 600 });
    if (isMany) write(body, right, y + 12, charts.drawing.plural(lines.length, "layer"), { "text-anchor": "end", fill: COLOURS.muted, "font-size": 10.5 });
    const group = draw(body, "g", { class: `panel ${lines[0]?.name === null ? "loss" : "statistic"}` });
    for (const { at, text } of vertical.ticks) {
      draw(group, "line", { x1: left, x2: right, y1: at, y2: at, stroke: COLOURS.faint });
      write(group, left - 5, at + 3.5, text, { "text-anchor": "end", fill: COLOURS.muted, "font-size": 10.5 });
    }
    draw(group, "line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: COLOURS.muted });
    for (const { value, at, text } of across.ticks) {
      if (!Number.isInteger(value) || (!isMany && at > right - 40)) continue;
      draw(group, "line", { x1: at, x2: at, y1: bottom, y2: bottom + 3, stroke: COLOURS.muted });
      write(group, at, bottom + 14, text, { "text-anchor": "middle", fill: COLOURS.muted, "font-size": 10.5 });
    }
    if (!isMany) write(group, right, bottom + 14, "step", { "text-anchor": "end", fill: COLOURS.muted, "font-size": 10.5 });
    const place = { steps, across, vertical, isLog, top, bottom };
    const named = isMany ? remarkable(lines) : lines;
    if (lines.length > MOST_LINES) drawBand(group, lines, place);
    else for (const line of lines) if (!named.includes(line)) drawLine(group, line, place, { stroke: COLOURS.muted, "stroke-opacity": 0.55 });
    const styles = [{ stroke: COLOURS.accent }, { stroke: COLOURS.accent2, "stroke-dasharray": "5 2" }];
    named.forEach((line, index) => drawLine(group, line, place, { "stroke-width": 1.5, ...styles[index] }));
    if (isMany) nameLines({ body, marks }, named, place, right, styles);
    const bad = firstBad(lines, steps);
    if (bad) drawBad(body, bad, across.at(bad.step), top);
    charts.drawing.mark(marks, "rect", { x: left, y: top, width: right - left, height }, summary(title, lines, steps, bad));
  }

  function measure(lines) {
    const ordinary = [];
    for (const { values } of lines) for (const value of values) if (charts.drawing.isNumber(value)) ordinary.push(value);
    const positive = ordinary.filter((value) => value > 0);
    const [low, high] = charts.drawing.extent(positive);
    const isLog = positive.length > 0 && ordinary.every((value) => value >= 0) && high > LOG_FROM * low;
    return { ordinary: isLog ? positive : ordinary, isLog };
  }

  const heightOf = (value, { vertical, isLog, bottom }) => (isLog && value === 0 ? bottom : vertical.at(value));

  function drawLine(group, { values }, place, attributes) {
    const { draw, isNumber, tidy } = charts.drawing;
    let d = "";
    let isOpen = false;
    const alone = [];
    place.steps.forEach((step, index) => {
      const value = values[index];
      if (!isNumber(value)) {
        isOpen = false;
        return;
      }
      const spot = `${tidy(place.across.at(step))} ${tidy(heightOf(value, place))}`;
      if (!isOpen && !isNumber(values[index + 1])) alone.push([place.across.at(step), heightOf(value, place)]);
      d += (isOpen ? "L" : "M") + spot;
      isOpen = true;
    });
    draw(group, "path", { class: "line", d: d || null, fill: "none", "stroke-linejoin": "round", "stroke-width": 1.2, ...attributes });
    for (const [cx, cy] of alone) draw(group, "circle", { cx, cy, r: 1.8, fill: attributes.stroke });
  }

  // From the least to the greatest of all layers at each step, and the median.
  function drawBand(group, lines, place) {
    const { COLOURS, draw, isNumber, tidy } = charts.drawing;
    const [lows, highs, medians] = [[], [], []];
    place.steps.forEach((step, index) => {
      const values = [];
      for (const line of lines) if (isNumber(line.values[index])) values.push(line.values[index]);
      if (!values.length) return;
      values.sort((a, b) => a - b);
      const spot = (value) => `${tidy(place.across.at(step))} ${tidy(heightOf(value, place))}`;
      lows.push(spot(values[0]));
      highs.push(spot(values.at(-1)));
      medians.push(spot(values[values.length >> 1]));
    });
    if (!lows.length) return;
    draw(group, "path", { class: "band", d: `M${lows.join("L")}L${highs.reverse().join("L")}z`, fill: COLOURS.muted, "fill-opacity": 0.25 });
    draw(group, "path", { class: "median", d: `M${medians.join("L")}`, fill: "none", stroke: COLOURS.muted, "stroke-dasharray": "1 2" });
  }

  // The layers that end highest and lowest.
  function remarkable(lines) {
    const { isNumber } = charts.drawing;
    const ended = lines.map((line) => ({ line, end: line.values.findLast(isNumber) }));
    ended.sort((a, b) => b.end - a.end);
    return [...new Set([ended[0].line, ended.at(-1).line])].slice(0, NAMED);
  }

  function nameLines({ body, marks }, named, place, right, styles) {
    const { abbreviateName, isNumber, mark, number, write } = charts.drawing;
    let last = -Infinity;
    const ends = named.map((line, index) => ({ line, index, end: line.values.findLast(isNumber) }));
    for (const one of ends) one.y = heightOf(one.end, place);
    ends.sort((a, b) => a.y - b.y);
    for (const { line, index, end, y } of ends) {
      const at = Math.max(y + 3.5, last + 12.5);
      last = at;
      write(body, right + 5, at, abbreviateName(line.label, 14), { fill: styles[index].stroke, "font-size": 10.5 });
      mark(marks, "rect", { x: right + 2, y: at - 10, width: LABEL - 4, height: 13 }, `${line.label}: ends at ${number(end)}`, { layer: line.name, focusable: true });
    }
  }

  // The first step whose loss is no number; of other statistics, that is no news.
  function firstBad(lines, steps) {
    for (let index = 0; index < steps.length; index += 1) {
      for (const line of lines) {
        if (line.name === null && line.values[index] === null) return { step: steps[index] };
      }
    }
    return null;
  }

  function drawBad(body, { step }, x, top) {
    const { COLOURS, cross, write } = charts.drawing;
    cross(body, x, top + 5, { class: "bad" });
    const isLate = x > WIDTH - 160;
    write(body, isLate ? x - 8 : x + 8, top + 9, `NaN or inf from step ${step}`, { "text-anchor": isLate ? "end" : "start", fill: COLOURS.alarm });
  }

  function summary(title, lines, steps, bad) {
    const { isNumber, number } = charts.drawing;
    const first = lines[0]?.values ?? [];
    if (lines.length > 1) return `${title} of ${lines.length} layers, steps ${steps[0]} to ${steps.at(-1)}`;
    const tail = bad ? `; NaN or infinity from step ${bad.step}` : "";
    return `${title}: ${number(first.find(isNumber))} at first, ${number(first.findLast(isNumber))} at last${tail}`;
  }

  function sentence({ steps, loss }) {
    const { isNumber, number, plural } = charts.drawing;
    const known = (loss ?? []).filter(isNumber);
    if (!known.length) return `course of ${plural(steps.length, "step")}; no loss was recorded`;
    const [first, last] = [known[0], known.at(-1)];
    const verb = last > first ? "rises" : last < first ? "falls" : "stays";
    const bad = firstBad([{ name: null, values: loss }], steps);
    return `loss ${verb} from ${number(first)} at step ${steps[0]} to ${number(last)}${bad ? `; NaN or infinity from step ${bad.step}` : ` at step ${steps.at(-1)}`}`;
  }
})();
