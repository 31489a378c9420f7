// Elements and text. Strings of the data become text and attributes here, and markup nowhere.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});

  // Returns an element: `make("a", { href: "#x", class: "code" }, "text", child)`. A property that is
  // a function listens to the event of its name; null and false leave an attribute out.
  page.make = function (tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (typeof value === "function") element.addEventListener(name, value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  };

  // Text that may be broken after underscores and dots, and nowhere else where that is enough.
  page.breakable = (name) => name.split(/(?<=[_.])/).flatMap((part, index) => (index ? [page.make("wbr"), part] : [part]));

  const NONE = "-";
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const isNone = (value) => value === null || value === undefined;

  // As notation.py writes them: three significant digits, and counts in full.
  function number(value) {
    if (isNone(value)) return NONE;
    if (typeof value !== "number") return String(value);
    if (value === 0) return "0";
    const short = value.toExponential(2).replace("e+", "e");
    const power = Number(short.split("e")[1]);
    return power >= -3 && power <= 4 ? value.toFixed(Math.max(0, 2 - power)) : short;
  }

  function scaled(value, base, units) {
    if (isNone(value)) return NONE;
    let index = 0;
    while (value >= 999.5 && index < units.length - 1) {
      value /= base;
      index += 1;
    }
    return `${value.toFixed(!index || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2)}${units[index]}`;
  }

  // Whole percents; only none is "0%", and only all is "100%".
  function percent(fraction) {
    if (isNone(fraction)) return NONE;
    if (fraction > 0 && fraction < 0.01) return "<1%";
    return fraction > 0.99 && fraction < 1 ? ">99%" : `${Math.round(fraction * 100)}%`;
  }

  const text = (page.text = {
    NONE, number, percent,
    whole: (count) => (isNone(count) ? NONE : whole.format(count)),
    bytes: (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
    large: (value) => scaled(value, 1000, ["", " k", " M", " G", " T", " P"]),
    shape: (sizes) => (isNone(sizes) ? NONE : sizes.join("x") || "scalar"),
    words: (name) => String(name ?? "").replaceAll("_", " "),
    plural: (count, noun) => `${whole.format(count)} ${noun}${count === 1 ? "" : "s"}`,
    called: (tensor) => [text.words(tensor.role), tensor.name ?? tensor.tensor].filter(Boolean).join(" "),
    // A statistic of a tensor; where it is no number, why.
    statistic(tensor, name) {
      if (!tensor) return NONE;
      if (!isNone(tensor[name]) && page.hasFinite(tensor)) return number(tensor[name]);
      return tensor.nan ? "NaN" : tensor.inf ? "inf" : NONE;
    },
  });

  // Whether a tensor has a finite value: the norm of one without is 0, and says nothing.
  page.hasFinite = ({ count, nan, inf }) => !(nan || inf) || (nan ?? 0) + (inf ?? 0) < count;

  // A Map from what `key` says of the items to the lists of them.
  page.grouped = function (items, key) {
    const groups = new Map();
    for (const item of items) {
      if (!groups.has(key(item))) groups.set(key(item), []);
      groups.get(key(item)).push(item);
    }
    return groups;
  };

  // A table in a frame of its own: `heads` are {title, spoken, isText}, `lines` lists of <th> and <td>.
  page.table = (heads, lines) => page.make("div", { class: "frame" }, page.make(
    "table", {},
    page.make("thead", {}, page.make("tr", {}, heads.map(({ title, spoken, isText }) =>
      page.make("th", { scope: "col", class: isText ? null : "n" }, title || page.make("span", { class: "aloud" }, spoken))))),
    page.make("tbody", {}, lines.map((cells) => page.make("tr", {}, cells))),
  ));
  page.heads = (titles, texts) => titles.map((title, index) => ({ title, spoken: "side", isText: index < texts }));
  page.cells = (values, kind = "n") => values.map((value) => page.make("td", { class: kind || null }, value));
})();
