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

  const NONE = "\u2013";
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

  // Three significant digits; counts in full.
  function number(value) {
    if (value === null || value === undefined) return NONE;
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e9) return whole.format(value);
    const size = Math.abs(value);
    if (size >= 1e-4 && size < 1e5) return String(Number(value.toPrecision(3)));
    return value.toExponential(2).replace("e+", "e");
  }

  function scaled(value, base, units) {
    if (value === null || value === undefined) return NONE;
    let index = 0;
    while (value >= 999.5 && index < units.length - 1) {
      value /= base;
      index += 1;
    }
    return `${Number(value.toPrecision(3))}${units[index]}`;
  }

  page.text = {
    NONE,
    number,
    percent: (fraction) => (fraction === null || fraction === undefined ? NONE : charts.drawing.percent(fraction)),
    bytes: (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]),
    large: (value) => scaled(value, 1000, ["", " k", " M", " G", " T", " P"]),
    shape: (sizes) => (sizes === null || sizes === undefined ? NONE : sizes.join("x") || "scalar"),
    words: charts.drawing.words,
    plural: charts.drawing.plural,
    // A statistic of a tensor; where it is no number, why.
    statistic(tensor, name) {
      if (!tensor) return NONE;
      if (tensor[name] !== null && tensor[name] !== undefined && charts.drawing.hasFinite(tensor)) return number(tensor[name]);
      return tensor.nan ? "NaN" : tensor.inf ? "inf" : NONE;
    },
  };

  // A part that can be closed; what it shows is made when it is first opened.
  page.panel = function (title, remark, isOpen, fill) {
    const body = page.make("div", { class: "drawing" });
    const details = page.make(
      "details",
      { open: isOpen },
      page.make("summary", {}, page.make("h3", {}, title), page.make("span", { class: "aside" }, remark)),
      body,
    );
    let isFilled = false;
    const show = () => {
      if (isFilled || !details.open) return;
      isFilled = true;
      body.append(...[fill()].flat());
    };
    details.addEventListener("toggle", show);
    show();
    return page.make("section", { class: "panel" }, details);
  };

  // What `draw` returns; a chart that fails leaves a sentence, and the rest of the page.
  page.drawn = function (draw) {
    try {
      return draw();
    } catch (error) {
      console.error(error);
      return page.make("p", { class: "aside" }, `This could not be drawn: ${error.message}`);
    }
  };
})();
