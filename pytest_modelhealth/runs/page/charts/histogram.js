// The values of a tensor by sign and power of two.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const WIDTH = 360;
  const HEIGHT = 140;
  const FLOOR = HEIGHT - 20;
  const TOP = 44;
  const TALLEST = 2; // times the greatest other bar; a higher bar of zeros is cut
  const NARROWEST = 2.5;

  charts.histogram = function (tensor) {
    const { COLOURS, canvas, draw, plural, write } = charts.drawing;
    const finding = sentence(tensor);
    const bins = trimmed(tensor.bins);
    const { svg, body, marks } = canvas("histogram", WIDTH, HEIGHT, finding);
    write(body, 0, 11, summary(tensor), { fill: COLOURS.muted });
    if (bins === null && !tensor.zeros) {
      const isBad = tensor.nan + tensor.inf > 0;
      const why = !tensor.count ? "no values" : isBad ? "no finite values" : "the values were not counted by size";
      write(body, 0, 70, why, { fill: COLOURS.muted, "font-style": "italic" });
      if (!isBad) return svg;
    }
    const bad = (tensor.nan ?? 0) + (tensor.inf ?? 0) > 0;
    const right = bad ? WIDTH - 76 : WIDTH - 8;
    const axis = bars(bins, tensor, 8, right);
    draw(body, "line", { x1: 4, x2: right + 4, y1: FLOOR, y2: FLOOR, stroke: COLOURS.muted });
    const greatest = axis.bars.reduce((most, bar) => Math.max(most, bar.isZero ? 0 : bar.count), 0);
    const highest = Math.max(1, ...axis.bars.map((bar) => Math.min(bar.count, (greatest || Infinity) * TALLEST)));
    for (const bar of axis.bars) drawBar(body, marks, bar, highest, tensor);
    drawTicks(body, axis, bins);
    drawMoments(body, axis, tensor);
    if (bad) drawAlarm(body, marks, right + 14, tensor);
    if (tensor.bins?.sampled) write(body, WIDTH, 11, "a sample", { "text-anchor": "end", fill: COLOURS.muted });
    return svg;

    function drawBar(parent, over, bar, most, { zeros, count }) {
      const height = Math.max(1.5, (Math.min(bar.count, most) / most) * (FLOOR - TOP));
      const isCut = bar.count > most;
      const gap = bar.width > 5 ? 1 : 0;
      draw(parent, "rect", {
        class: bar.isZero ? "zeros" : "bin",
        x: bar.x + gap / 2, y: FLOOR - height, width: bar.width - gap, height,
        fill: bar.isZero ? COLOURS.muted : COLOURS.accent,
      });
      if (isCut) {
        const y = FLOOR - height + 8;
        draw(parent, "path", { d: `M${bar.x - 2} ${y + 3}l${bar.width + 4} -6`, stroke: COLOURS.surface, "stroke-width": 3 });
      }
      const share = bar.isZero && count ? zeros / count : 0;
      if (bar.isZero && share >= 0.005) {
        write(parent, bar.x + bar.width / 2, FLOOR - height - 3, charts.drawing.percent(share), {
          "text-anchor": "middle", fill: COLOURS.muted, "font-size": 10,
        });
      }
      const title = bar.isZero ? plural(zeros, "zero") : `${plural(bar.count, "value")} of ${bar.from} to ${bar.to}`;
      charts.drawing.mark(over, "rect", { x: bar.x, y: TOP - 4, width: bar.width, height: FLOOR - TOP + 4 }, title);
    }
  };

  // Returns {lowest, negative, positive} without the empty bins at the ends; null without any.
  function trimmed(bins) {
    if (!bins) return null;
    const negative = bins.negative ?? [];
    const positive = bins.positive ?? [];
    const isFull = (i) => (negative[i] ?? 0) > 0 || (positive[i] ?? 0) > 0;
    const length = Math.max(negative.length, positive.length);
    let first = 0;
    while (first < length && !isFull(first)) first += 1;
    if (first === length) return null;
    const upTo = (side) => {
      let end = side.length;
      while (end > first && !side[end - 1]) end -= 1;
      return side.slice(first, end);
    };
    return { lowest: bins.lowest + first, negative: upTo(negative), positive: upTo(positive) };
  }

  // The bars from the left to the right, and where a number lies between them.
  function bars(bins, { zeros }, left, right) {
    const { negative, positive, lowest } = bins ?? { negative: [], positive: [], lowest: 0 };
    const hasZero = zeros > 0 || negative.length > 0;
    const gap = hasZero ? 3 : 0;
    const space = right - left;
    const number = negative.length + positive.length;
    const zeroWidth = hasZero ? Math.min(22, Math.max(8, space / (number + 1))) : 0;
    const step = Math.min(number ? (space - zeroWidth - 2 * gap) / number : 0, 22);
    const used = step * number + zeroWidth + 2 * gap;
    const start = left + (space - used) / 2;
    const zeroAt = start + negative.length * step + gap;
    const positiveAt = zeroAt + zeroWidth + gap;
    const group = Math.max(1, Math.ceil(NARROWEST / Math.max(step, 0.01)));
    const made = [];
    const grouped = (side, sign) => {
      for (let i = 0; i < side.length; i += group) {
        const end = Math.min(i + group, side.length);
        let count = 0;
        for (let k = i; k < end; k += 1) count += side[k];
        if (!count) continue;
        const x = sign > 0 ? positiveAt + i * step : zeroAt - gap - end * step;
        const edges = [sign * 2 ** (lowest + i), sign * 2 ** (lowest + end)].sort((a, b) => a - b);
        made.push({ x, width: (end - i) * step, count, from: endText(edges[0]), to: endText(edges[1]) });
      }
    };
    grouped(negative, -1);
    if (hasZero) made.push({ x: zeroAt, width: zeroWidth, count: zeros ?? 0, isZero: true });
    grouped(positive, 1);
    const at = (value) => {
      const power = Math.log2(Math.abs(value)) - lowest;
      if (value === 0 || power < 0) return zeroAt + zeroWidth / 2;
      if (value > 0) return positiveAt + Math.min(power, positive.length) * step;
      return zeroAt - gap - Math.min(power, negative.length) * step;
    };
    const filled = made.filter((bar) => bar.count > 0);
    return { bars: filled, at, zeroAt: hasZero ? zeroAt + zeroWidth / 2 : null };
  }

  // The last bin of float64 ends above its greatest number.
  const endText = (value) => (Number.isFinite(value) ? charts.drawing.number(value) : `${value < 0 ? "-" : ""}2^1024`);

  function drawTicks(body, axis, bins) {
    const { COLOURS, draw, power, write, LETTER } = charts.drawing;
    const taken = [];
    const tick = (x, text) => {
      draw(body, "line", { x1: x, x2: x, y1: FLOOR, y2: FLOOR + 3, stroke: COLOURS.muted });
      const half = (text.length * LETTER) / 2 + 3;
      if (x - half < -4 || x + half > WIDTH + 4) return;
      if (taken.some(([from, to]) => x + half > from && x - half < to)) return;
      taken.push([x - half, x + half]);
      write(body, x, FLOOR + 14, text, { "text-anchor": "middle", fill: COLOURS.muted, "font-size": 10.5 });
    };
    if (axis.zeroAt !== null) tick(axis.zeroAt, "0");
    if (!bins) return;
    for (const [sign, side] of [["", bins.positive], ["-", bins.negative]]) {
      const low = Math.ceil(bins.lowest * Math.log10(2) - 1e-9);
      const high = Math.floor((bins.lowest + side.length) * Math.log10(2) + 1e-9);
      const step = Math.max(1, Math.ceil((high - low) / 5));
      const exponents = [];
      for (let e = low; e <= high; e += 1) if (e % step === 0) exponents.push(e);
      for (const e of exponents.reverse()) tick(axis.at(Number(`${sign}1e${e}`)), sign + power(e));
      if (exponents.length || !side.length) continue;
      const ends = [2 ** bins.lowest, 2 ** (bins.lowest + side.length)];
      for (const end of ends) tick(axis.at(Number(`${sign}${end}`)), sign + charts.drawing.number(end));
    }
  }

  // The mean as a triangle, mean ± std as a line with ends.
  function drawMoments(body, axis, { mean, std }) {
    const { COLOURS, draw, isNumber } = charts.drawing;
    if (!isNumber(mean)) return;
    const y = 26;
    if (isNumber(std)) {
      const [from, to] = [axis.at(mean - std), axis.at(mean + std)];
      draw(body, "path", {
        class: "spread", d: `M${from} ${y - 3}v6m0 -3H${to}m0 -3v6`, stroke: COLOURS.ink, fill: "none",
      });
    }
    const x = axis.at(mean);
    draw(body, "path", { class: "mean", d: `M${x - 4} ${y - 5}h8l-4 7z`, fill: COLOURS.ink });
  }

  function drawAlarm(body, marks, x, { nan, inf }) {
    const { COLOURS, count, cross, draw, mark, plural, write } = charts.drawing;
    draw(body, "line", { x1: x - 7, x2: x - 7, y1: TOP - 8, y2: FLOOR, stroke: COLOURS.faint });
    const kinds = [["NaN", nan], ["inf", inf]].filter(([, found]) => found > 0);
    kinds.forEach(([name, found], index) => {
      const y = FLOOR - 26 - (kinds.length - 1 - index) * 34;
      cross(body, x + 4, y - 4, { class: "alarm" });
      write(body, x + 13, y, name, { fill: COLOURS.alarm, "font-weight": 600 });
      write(body, x, y + 14, count(found), { fill: COLOURS.alarm });
      mark(marks, "rect", { x: x - 4, y: y - 14, width: 66, height: 32 }, `${plural(found, "value")} that ${found === 1 ? "is" : "are"} ${name}`);
    });
  }

  function summary(tensor) {
    const { isNumber, number, percent } = charts.drawing;
    const parts = [];
    if (isNumber(tensor.mean)) parts.push(`mean ${number(tensor.mean)}`);
    if (isNumber(tensor.std)) parts.push(`std ${number(tensor.std)}`);
    if (isNumber(tensor.dead)) parts.push(`${percent(tensor.dead)} dead`);
    return parts.join("  ·  ");
  }

  function sentence(tensor) {
    const { isNumber, number, percent, plural, words } = charts.drawing;
    const { count, zeros, nan, inf } = tensor;
    const parts = [`${words(tensor.role)}${tensor.name ? ` ${tensor.name}` : ""}: ${plural(count ?? 0, "value")}`];
    if (isNumber(tensor.min) && isNumber(tensor.max)) parts.push(`from ${number(tensor.min)} to ${number(tensor.max)}`);
    if (isNumber(tensor.mean)) parts.push(`mean ${number(tensor.mean)}`);
    if (isNumber(tensor.std)) parts.push(`std ${number(tensor.std)}`);
    if (count) parts.push(`${percent((zeros ?? 0) / count)} zeros`);
    if (isNumber(tensor.dead)) parts.push(`${percent(tensor.dead)} of the units dead`);
    if (nan) parts.push(`${plural(nan, "value")} NaN`);
    if (inf) parts.push(`${plural(inf, "value")} infinite`);
    return parts.join(", ");
  }
})();
