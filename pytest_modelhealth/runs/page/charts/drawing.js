// What the charts share: SVG elements, colours, numbers and names as text, scales, marks.
//
// The files of this folder may be joined in any order; together they define the global `charts`.
// Each chart is a function of data in the format of the file of a run, and returns an SVGElement.
// In it, one <g role="img"> holds what is drawn and says in a sentence what it shows; above it lie
// transparent marks with titles. A mark of a layer sends `show-layer` when clicked, or by Enter.
//
// Names and sentences of the data become text and attributes, never markup.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  // The page sets these variables; without them the charts are those of a light page.
  const COLOURS = {
    ink: "var(--ink, #24292f)",
    muted: "var(--muted, #656d76)",
    faint: "var(--faint, #dfe3e8)",
    surface: "var(--surface, #ffffff)",
    panel: "var(--panel, #f6f8fa)",
    accent: "var(--accent, #2f6db5)",
    accent2: "var(--accent2, #c2660a)",
    alarm: "var(--alarm, #c62828)",
    warn: "var(--warn, #9a6700)",
    good: "var(--good, #1a7f37)",
  };

  const LETTER = 6.7; // the width of a letter of 11 px, in a wide font

  function draw(parent, tag, attributes = {}, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== undefined && value !== null) element.setAttribute(name, tidy(value));
    }
    if (text !== undefined) element.textContent = text;
    parent.appendChild(element);
    return element;
  }

  function tidy(value) {
    return typeof value === "number" ? String(Math.round(value * 100) / 100) : String(value);
  }

  function write(parent, x, y, text, attributes = {}) {
    return draw(parent, "text", { x, y, fill: COLOURS.ink, ...attributes }, text);
  }

  // Returns {svg, body, marks}: draw in `body`; `finding` is the sentence that says what is seen.
  function canvas(kind, width, height, finding) {
    const holder = document.createDocumentFragment();
    const svg = draw(holder, "svg", {
      class: `chart chart-${kind}`,
      viewBox: `0 0 ${tidy(width)} ${tidy(height)}`,
      width,
      height,
      "font-family": "system-ui, sans-serif",
      "font-size": 11,
    });
    svg.style.maxWidth = "100%";
    svg.style.height = "auto";
    const body = draw(svg, "g", { role: "img", "aria-label": finding });
    const marks = draw(svg, "g", { class: "marks" });
    listen(marks);
    return { svg, body, marks };
  }

  function listen(marks) {
    const show = (event) => {
      const mark = event.target.closest?.("[data-layer]");
      if (!mark) return;
      event.preventDefault();
      const layer = mark.getAttribute("data-layer");
      mark.dispatchEvent(new CustomEvent("show-layer", { bubbles: true, detail: { layer } }));
    };
    const shade = (opacity) => (event) => {
      if (event.target.classList?.contains("mark")) event.target.setAttribute("fill-opacity", opacity);
    };
    marks.addEventListener("click", show);
    marks.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") show(event);
    });
    for (const kind of ["pointerover", "focusin"]) marks.addEventListener(kind, shade(0.08));
    for (const kind of ["pointerout", "focusout"]) marks.addEventListener(kind, shade(0));
  }

  // Lays a transparent shape over what is drawn: its title is shown by hovering over it.
  function mark(marks, tag, attributes, title, { layer = null, focusable = false } = {}) {
    const shape = draw(marks, tag, {
      class: "mark",
      fill: COLOURS.ink,
      "fill-opacity": 0,
      "data-layer": layer,
      cursor: layer === null ? null : "pointer",
      ...(focusable ? { tabindex: 0, role: "button", "aria-label": title } : {}),
      ...attributes,
    });
    draw(shape, "title", {}, title);
    return shape;
  }

  // A chart with nothing to show says so.
  function nothing(kind, sentence) {
    const { svg, body } = canvas(kind, 360, 28, sentence);
    write(body, 0, 18, sentence, { fill: COLOURS.muted, "font-style": "italic" });
    return svg;
  }

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  // Whether a tensor has a finite value: the norm of one without is 0, and says nothing.
  const hasFinite = ({ count, nan, inf }) => !(nan || inf) || (nan ?? 0) + (inf ?? 0) < count;

  // Three significant digits at most: 0.0123, -4, 1.5e-7.
  function number(value) {
    if (!isNumber(value)) return "no number";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(size >= 999.5 ? 5 : 3)));
    return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  }

  // Whole percents; only none is "0%", and only all is "100%".
  function percent(fraction) {
    if (!isNumber(fraction)) return "no number";
    if (fraction > 0 && fraction < 0.01) return "<1%";
    if (fraction > 0.99 && fraction < 1) return ">99%";
    return `${Math.round(fraction * 100)}%`;
  }

  const count = (value) => (isNumber(value) ? value.toLocaleString("en-US") : "no number");

  const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

  function bytes(value) {
    if (!isNumber(value)) return "not measured";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1023.95 && unit < units.length - 1) {
      value /= 1024;
      unit += 1;
    }
    return `${unit && value < 99.95 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
  }

  // What is too long loses its middle: "encoder.layers.…ention.query".
  function abbreviate(text, width) {
    const letters = Array.from(String(text));
    if (letters.length <= width) return letters.join("");
    const head = Math.ceil((width - 1) * 0.45);
    return `${letters.slice(0, head).join("")}…${letters.slice(letters.length - (width - 1 - head)).join("")}`;
  }

  // Outer modules give way first and numbers never, since these tell the layers of a stack apart;
  // then the middle does: "e.l.11.attention.query".
  function abbreviateName(name, width) {
    const parts = String(name).split(".");
    let length = String(name).length;
    for (let i = 0; i < parts.length - 1 && length > width; i += 1) {
      if (/^\d+$/.test(parts[i])) continue;
      length -= Math.max(0, parts[i].length - 1);
      parts[i] = parts[i].slice(0, 1);
    }
    return abbreviate(parts.join("."), width);
  }

  // A check, role or statistic as words: "dead_units" is "dead units".
  const words = (name) => String(name ?? "").replaceAll("_", " ");

  const labelOf = (item, name = item.name) => String(item.label || name || "model");

  // The names of the layers that hold others.
  function containersOf(layers) {
    const containers = new Set(layers.length > 1 ? [""] : []);
    for (const { name } of layers) {
      for (let dot = name.lastIndexOf("."); dot > 0; dot = name.lastIndexOf(".", dot - 1)) {
        const outer = name.slice(0, dot);
        if (containers.has(outer)) break;
        containers.add(outer);
      }
    }
    return containers;
  }

  const power = (exponent) =>
    exponent >= -1 && exponent <= 3 ? String(Number(`1e${exponent}`)) : `1e${exponent}`;

  // A scale from positive numbers to pixels, with ticks at powers of ten.
  function logScale(values, from, to, mostTicks = 6) {
    let [low, high] = extent(values.map(Math.log10));
    if (low > high) [low, high] = [-1, 1];
    const margin = Math.max(0.15, (high - low) * 0.04, (1 - (high - low)) / 2);
    [low, high] = [low - margin, high + margin];
    const at = (value) => from + ((Math.log10(value) - low) / (high - low)) * (to - from);
    const step = Math.max(1, Math.ceil((high - low) / mostTicks));
    const ticks = [];
    for (let e = Math.ceil(low / step) * step; e <= high; e += step) {
      ticks.push({ value: 10 ** e, at: from + ((e - low) / (high - low)) * (to - from), text: power(e) });
    }
    if (ticks.length > 1) return { at, ticks };
    const between = [];
    for (let e = Math.floor(low); e <= high; e += 1) {
      for (const value of [1, 2, 5].map((factor) => Number(`${factor}e${e}`))) {
        if (Math.log10(value) >= low && Math.log10(value) <= high) between.push({ value, at: at(value), text: number(value) });
      }
    }
    return { at, ticks: between };
  }

  // A scale with ticks at 1, 2 or 5 times a power of ten.
  function linearScale(values, from, to, mostTicks = 5) {
    let [low, high] = extent(values);
    if (low > high) [low, high] = [0, 1];
    if (low === high) {
      const margin = Math.abs(low) * 0.1 || 1;
      [low, high] = [low - margin, high + margin];
    }
    const at = (value) => from + ((value / 2 - low / 2) / (high / 2 - low / 2)) * (to - from);
    const rough = Math.max((high / 2 - low / 2) * (2 / mostTicks), Number.MIN_VALUE);
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * ([1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.999) ?? 10);
    const ticks = [];
    for (let n = Math.ceil(low / step); n <= Math.floor(high / step) && ticks.length < 20; n += 1) {
      const value = n * step;
      ticks.push({ value, at: at(value), text: number(value) });
    }
    if (ticks.length < 2 && mostTicks < 20) return linearScale(values, from, to, mostTicks * 2);
    return { at, ticks };
  }

  // [least, greatest], of any number of numbers.
  function extent(values) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return [low, high];
  }

  // The shapes of points: colour alone never tells two kinds apart.
  function point(parent, shape, x, y, size, attributes) {
    const s = size * 1.25;
    const paths = {
      diamond: `M${tidy(x)} ${tidy(y - s)}l${s} ${s}l${-s} ${s}l${-s} ${-s}z`,
      triangle: `M${tidy(x)} ${tidy(y - s)}l${s} ${2 * s * 0.9}h${-2 * s}z`,
      cross: `M${tidy(x - s)} ${tidy(y - s)}l${2 * s} ${2 * s}m0 ${-2 * s}l${-2 * s} ${2 * s}`,
    };
    if (shape === "circle") return draw(parent, "circle", { cx: x, cy: y, r: size, ...attributes });
    return draw(parent, "path", { d: paths[shape], ...attributes });
  }

  const cross = (parent, x, y, attributes = {}) =>
    point(parent, "cross", x, y, 2.8, { stroke: COLOURS.alarm, "stroke-width": 1.8, fill: "none", ...attributes });

  charts.drawing = {
    COLOURS, LETTER, abbreviate, abbreviateName, bytes, canvas, containersOf, count, cross, draw, extent, hasFinite, isNumber, labelOf,
    linearScale, logScale, mark, nothing, number, percent, plural, point, power, tidy, words, write,
  };
})();
