// What each layer holds in memory: parameters, activations, and what is saved for backward.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const WIDTH = 720;
  const NAMES = 180;
  const ROW = 18;
  const HEAD = 40;
  const MOST_ROWS = 15; // layers that are named; the rest are one row
  const VALUE = 62; // pixels for the number beside a bar
  const QUANTITIES = [
    { key: "parameters", of: "parameter_bytes", name: "parameters" },
    { key: "activations", of: "activation_bytes", name: "activations" },
    { key: "saved", of: "saved_bytes", name: "saved for backward" },
  ];

  charts.memory = function (layers) {
    const { COLOURS, abbreviateName, bytes, canvas, draw, mark, nothing, plural, write } = charts.drawing;
    const rows = sized(layers);
    if (!rows.length) return nothing("memory", "The memory of no layer was measured.");
    const shown = rows.slice(0, MOST_ROWS);
    const folded = rows.slice(MOST_ROWS);
    if (folded.length) shown.push({ label: `${plural(folded.length, "other layer")}`, name: null, sizes: total(folded), isFolded: true });
    const totals = total(rows);
    const height = HEAD + shown.length * ROW + ROW + 10;
    const { svg, body, marks } = canvas("memory", WIDTH, height, sentence(rows, totals));
    const column = (WIDTH - NAMES) / 3;
    const greatest = Math.max(1, ...rows.slice(0, MOST_ROWS).flatMap((row) => row.sizes.map((size) => size ?? 0)));
    const colours = [COLOURS.accent2, COLOURS.accent, COLOURS.accent];
    QUANTITIES.forEach(({ name }, index) => {
      write(body, NAMES + index * column, 12, name, { "font-weight": 600 });
      const size = totals[index];
      if (size === null) write(body, NAMES + index * column, 28, "not measured", { fill: COLOURS.muted, "font-style": "italic" });
      else write(body, NAMES + index * column, 28, `${bytes(size)} in all`, { fill: COLOURS.muted });
    });
    shown.forEach((row, number) => {
      const y = HEAD + number * ROW;
      write(body, NAMES - 10, y + 12.5, row.isFolded ? row.label : abbreviateName(row.label, 24), {
        "text-anchor": "end", fill: row.isFolded ? COLOURS.muted : COLOURS.ink, "font-style": row.isFolded ? "italic" : null,
      });
      row.sizes.forEach((size, index) => {
        if (totals[index] !== null) drawBar(row, size, index, y);
      });
      const title = [row.label, ...QUANTITIES.map(({ name }, index) => `${name}: ${bytes(row.sizes[index])}`)].join("\n");
      mark(marks, "rect", { x: 0, y, width: WIDTH, height: ROW }, title, { layer: row.name, focusable: row.name !== null });
    });
    QUANTITIES.forEach((_, index) => {
      const x = NAMES + index * column;
      draw(body, "line", { x1: x, x2: x, y1: HEAD, y2: HEAD + shown.length * ROW, stroke: COLOURS.faint });
    });
    write(body, 0, height - 5, "The bars of all columns have one scale. A tied weight counts at the first layer that owns it.", {
      fill: COLOURS.muted, "font-size": 10.5,
    });
    return svg;

    function drawBar(row, size, index, y) {
      const x = NAMES + index * column;
      if (size === null) {
        write(body, x + 4, y + 12.5, "–", { fill: COLOURS.muted });
        return;
      }
      const width = row.isFolded ? 0 : (size / greatest) * (column - VALUE - 8);
      if (size > 0 && !row.isFolded) {
        const isSaved = QUANTITIES[index].key === "saved";
        draw(body, "rect", {
          class: `bar ${QUANTITIES[index].key}`, x, y: y + 3, width: Math.max(width, 1), height: ROW - 6, rx: 1,
          fill: colours[index], "fill-opacity": isSaved ? 0.25 : 0.85,
          stroke: isSaved ? colours[index] : null, "stroke-dasharray": isSaved ? "3 2" : null,
        });
      }
      write(body, x + Math.max(width, 1) + 4, y + 12.5, size === 0 ? "0" : bytes(size), { fill: COLOURS.muted, "font-size": 10.5 });
    }
  };

  // The layers that hold anything, the largest first. What a container gives out was made by a
  // layer in it, and counts there.
  function sized(layers) {
    const { isNumber, labelOf } = charts.drawing;
    const containers = charts.drawing.containersOf(layers);
    const rows = [];
    for (const layer of layers) {
      const sizes = QUANTITIES.map(({ key, of }) => {
        if (key === "activations" && containers.has(layer.name)) return isNumber(layer[of]) ? 0 : null;
        return isNumber(layer[of]) ? layer[of] : null;
      });
      if (sizes.some((size) => size > 0)) rows.push({ name: layer.name, label: labelOf(layer), sizes });
    }
    const weight = ({ sizes }) => sizes.reduce((sum, size) => sum + (size ?? 0), 0);
    return rows.sort((a, b) => weight(b) - weight(a));
  }

  // The sum of each quantity; null where no layer has it.
  function total(rows) {
    return QUANTITIES.map((_, index) => {
      let sum = null;
      for (const { sizes } of rows) if (sizes[index] !== null) sum = (sum ?? 0) + sizes[index];
      return sum;
    });
  }

  function sentence(rows, totals) {
    const { bytes } = charts.drawing;
    const sums = QUANTITIES.map(({ name }, index) => `${name} ${bytes(totals[index])}`).join(", ");
    return `memory: ${sums}; the largest layer is ${rows[0].label}`;
  }
})();
