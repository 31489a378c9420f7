// How near each check came to its limit.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const WIDTH = 720;
  const NAMES = 320;
  const BAR = 150;
  const ROW = 20;
  const MOST_ROWS = 24;
  const FULL = 1.2; // the part of the limit at which bars end

  charts.margins = function (margins) {
    const { COLOURS, abbreviate, abbreviateName, canvas, draw, isNumber, labelOf, mark, nothing, number, plural, words, write } = charts.drawing;
    if (!margins?.length) return nothing("margins", "No check has a limit to come near to.");
    const shown = margins.slice(0, MOST_ROWS);
    const rest = margins.length - shown.length;
    const height = 20 + shown.length * ROW + (rest ? 18 : 4);
    const limitAt = NAMES + BAR / FULL;
    const { svg, body, marks } = canvas("margins", WIDTH, height, sentence());
    write(body, limitAt, 11, "limit", { "text-anchor": "middle", fill: COLOURS.muted, "font-size": 10.5 });
    shown.forEach((margin, index) => drawRow(margin, 20 + index * ROW));
    draw(body, "line", {
      class: "limit", x1: limitAt, x2: limitAt, y1: 15, y2: 20 + shown.length * ROW, stroke: COLOURS.ink, "stroke-dasharray": "2 2",
    });
    if (rest) write(body, 0, height - 4, `and ${plural(rest, "check")} further from ${rest === 1 ? "its limit" : "their limits"}`, { fill: COLOURS.muted, "font-style": "italic" });
    return svg;

    function drawRow(margin, y) {
      const isOver = margin.used > 1;
      const role = margin.role ? ` (${words(margin.role)})` : "";
      const label = labelOf(margin, margin.layer);
      write(body, 0, y + 13.5, abbreviate(words(margin.check), 16), { fill: isOver ? COLOURS.alarm : COLOURS.ink, "font-weight": 600 });
      write(body, 126, y + 13.5, abbreviateName(label, 28), { fill: COLOURS.muted });
      if (isNumber(margin.used)) {
        const width = (Math.min(Math.max(margin.used, 0), FULL) / FULL) * BAR;
        draw(body, "rect", { class: "track", x: NAMES, y: y + 4, width: BAR, height: ROW - 8, rx: 2, fill: COLOURS.faint, "fill-opacity": 0.5 });
        draw(body, "rect", {
          class: isOver ? "bar over" : "bar", x: NAMES, y: y + 4, width: Math.max(width, 1.5), height: ROW - 8, rx: 2,
          fill: isOver ? COLOURS.alarm : margin.used > 0.8 ? COLOURS.warn : COLOURS.accent,
        });
        if (margin.used > FULL) draw(body, "path", { d: `M${NAMES + BAR} ${y + 4}l9 ${ROW / 2 - 4}l-9 ${ROW / 2 - 4}z`, fill: COLOURS.alarm });
      }
      write(body, NAMES + BAR + 16, y + 13.5, besideLimit(margin) + (isOver ? (margin.least ? ", below" : ", over") : ""), {
        fill: isOver ? COLOURS.alarm : COLOURS.ink, "font-weight": isOver ? 600 : null,
      });
      const used = isNumber(margin.used) ? `${number(margin.used * 100)}% of the limit` : "";
      const title = [`${words(margin.check)}: ${besideLimit(margin)}`, `${label}${role}`, used, margin.setting]
        .filter(Boolean).join("\n");
      mark(marks, "rect", { x: 0, y, width: WIDTH, height: ROW }, title, { layer: margin.layer, focusable: true });
    }

    function sentence() {
      const over = margins.filter((margin) => margin.used > 1).length;
      const nearest = margins[0];
      const what = `${words(nearest.check)} ${besideLimit(nearest)} at ${labelOf(nearest, nearest.layer)}`;
      return `${over ? `${plural(over, "check")} over ${over === 1 ? "its limit" : "their limits"}, first` : "nearest to its limit"}: ${what}`;
    }
  };

  // "0.31 of 0.8"; of a value that may not fall below its limit "3e-5 of at least 1e-6".
  function besideLimit(margin) {
    const { number } = charts.drawing;
    return `${number(margin.value)} of ${margin.least ? "at least " : ""}${number(margin.limit)}`;
  }
})();
