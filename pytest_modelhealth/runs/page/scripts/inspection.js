// The result of an inspection: what the culprit's tensors hold, charts, and the layers.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});
  const { make, text, drawn, panel } = page;

  const ROLES = ["inputs", "activations", "gradients", "parameters", "parameter_gradients", "buffers"];
  const SHOWN_AT_ONCE = 4; // histograms of a layer
  const DRAWN_AT_ONCE = 400; // edges of the flow; more are drawn when asked for

  page.kinds ??= {};
  page.kinds.inspection = function (anchor, result) {
    const { layers, violations } = result;
    const table = layerTable(anchor, result);
    const edges = result.flow?.edges.length ?? 0;
    const parts = [
      result.course ? panel("Training", "", true, () => drawn(() => charts.course(result.course))) : null,
      layers.length > 1
        ? panel("Scale through depth", "activations and gradients, in execution order", true, () => drawn(() => charts.depth(layers, violations)))
        : null,
      edges
        ? panel("Flow of data", flowRemark(result), edges <= DRAWN_AT_ONCE, () => drawn(() => charts.flow(result.flow, violations)))
        : null,
      layers.some((layer) => layer.activation_bytes !== null && layer.activation_bytes !== undefined)
        ? panel("Memory by layer", text.bytes(result.totals.activation_bytes) + " of activations", false, () => drawn(() => charts.memory(layers)))
        : null,
      layers.length ? panel("Layers", text.plural(layers.length, "layer"), true, () => table.element) : null,
    ];
    return { evidence: evidence(anchor, result), parts: parts.filter(Boolean), reveal: table.reveal };
  };

  function flowRemark({ flow }) {
    const count = text.plural(flow.edges.length, "edge");
    return flow.way?.length ? `${count}; the way through the culprit is lit` : count;
  }

  // The tensor that the verdict rests on, beside that of the layer computed before it.
  async function evidence(anchor, result) {
    const worst = result.violations[0];
    if (!worst) return [];
    const names = [nearestBefore(worst.layer, result), worst.layer];
    const figures = [];
    for (const name of names) {
      const index = result.layers.findIndex((layer) => layer.name === name);
      if (index < 0 || !(await page.addHistograms(anchor, index, result.layers[index]))) continue;
      const layer = result.layers[index];
      const wanted = name === worst.layer ? worst.tensor : "";
      const tensor =
        layer.tensors.find((each) => each.role === worst.role && each.name === wanted) ??
        layer.tensors.find((each) => each.role === worst.role) ??
        layer.tensors.find((each) => each.role === "activations");
      if (tensor) figures.push(figure(tensor, layer.label));
    }
    return figures.length ? [make("div", { class: "charts" }, figures)] : [];
  }

  // The nearest layer that feeds the one of this name, perhaps through operations between them.
  function nearestBefore(name, { flow, layers }) {
    const known = new Set(layers.map((layer) => layer.name));
    const feeds = new Map();
    for (const [source, target] of flow?.edges ?? []) push(feeds, target, source);
    const seen = new Set([name]);
    for (const place of seen) {
      if (place !== name && known.has(place)) return place;
      for (const source of feeds.get(place) ?? []) seen.add(source);
    }
    return null;
  }

  function figure(tensor, of) {
    return make(
      "figure", {},
      make("figcaption", {}, make("span", { class: "code" }, [of, tensor.name].filter(Boolean).join(" ")),
        make("span", { class: "aside" }, `${of || tensor.name ? " " : ""}${text.words(tensor.role)}`)),
      drawn(() => charts.histogram(tensor)),
    );
  }

  function layerTable(anchor, result) {
    const found = byLayer(result.violations);
    const warned = byLayer(result.warnings);
    const shows = new Map();
    for (const violation of result.violations) {
      for (const other of violation.consequences) push(shows, other.layer, other);
    }
    const rows = result.layers.map((layer, key) => {
      const own = found.get(layer.name) ?? [];
      const doubts = warned.get(layer.name) ?? [];
      const others = shows.get(layer.name) ?? [];
      const seen = {};
      for (const tensor of layer.tensors) seen[tensor.role] ??= tensor;
      const words = [layer.label, layer.type, layer.status, text.words(layer.status), ...[...own, ...doubts, ...others].map((each) => each.check)];
      return {
        key, layer, own_findings: own, doubts, others, seen,
        name: layer.name, label: layer.label, search: words.join(" ").toLowerCase(),
        mark: markOf(own, doubts, others), isFound: own.length > 0, isUnseen: layer.status !== "observed",
        gradient: normOf(layer, "parameter_gradients"), bad: badOf(layer), greatest: greatestOf(seen.activations),
      };
    });
    return page.layerTable({
      rows, columns: COLUMNS.filter((column) => column.title !== STATUS || rows.some((row) => row.isUnseen)), sets: ["numbers", "cost", "all"], title: "Layers",
      describe: (row) => describe(anchor, row),
    });
  }

  function byLayer(findings) {
    const found = new Map();
    for (const finding of findings) push(found, finding.layer, finding);
    return found;
  }

  function push(map, key, value) {
    if (map.has(key)) map.get(key).push(value);
    else map.set(key, [value]);
  }

  function markOf(own, doubts, others) {
    if (own.length) return { kind: "found", tone: "", text: text.words(own[0].check) };
    if (doubts.length) return { kind: "warned", tone: "unsure", text: text.words(doubts[0].check) };
    return others.length ? { kind: "shows", tone: "quiet", text: `shows ${text.words(others[0].check)}` } : null;
  }

  function normOf(layer, role) {
    const tensors = layer.tensors.filter((tensor) => tensor.role === role);
    if (!tensors.length || tensors.some((tensor) => tensor.norm === null || !charts.drawing.hasFinite(tensor))) return null;
    return Math.hypot(...tensors.map((tensor) => tensor.norm));
  }

  function badOf(layer) {
    return layer.tensors.reduce((count, tensor) => count + (tensor.nan ?? 0) + (tensor.inf ?? 0), 0);
  }

  function greatestOf(tensor) {
    if (!tensor || tensor.min === null || tensor.max === null) return null;
    return Math.max(Math.abs(tensor.min), Math.abs(tensor.max));
  }

  const product = (shape) => (shape ? shape.reduce((all, size) => all * size, 1) : null);
  const isFoundIn = (...roles) => (row) => row.own_findings.some((finding) => roles.includes(finding.role));
  const statistic = (title, help, name) => ({
    title, help, set: "numbers",
    value: (row) => row.seen.activations?.[name] ?? null,
    text: (row) => text.statistic(row.seen.activations, name),
  });
  const cost = (title, help, key, show) => ({
    title, help, set: "cost", value: (row) => row.layer[key] ?? null, text: (row) => show(row.layer[key]),
  });

  const STATUS = "status"; // told where a layer was not observed
  const COLUMNS = [
    { title: "layer", help: "name, as named_modules() spells it", set: "", isText: true, value: (row) => row.label },
    { title: "type", help: "class of the module", set: "", isText: true, value: (row) => row.layer.type, text: (row) => row.layer.type },
    { title: STATUS, help: "what became of the layer", set: "", isText: true, value: (row) => row.layer.status, text: (row) => text.words(row.layer.status) },
    cost("calls", "how often it was called", "calls", text.number),
    { title: "input", help: "shape of its first input", set: "cost", isText: true, value: (row) => product(row.layer.input_shape), text: (row) => text.shape(row.layer.input_shape) },
    { title: "output", help: "shape of its first output", set: "", isText: true, value: (row) => product(row.layer.shape), text: (row) => text.shape(row.layer.shape) },
    { title: "dtype", help: "of its output", set: "cost", isText: true, value: (row) => row.layer.dtype, text: (row) => row.layer.dtype || text.NONE },
    statistic("mean", "of the activations", "mean"),
    statistic("std", "of the activations", "std"),
    { title: "abs max", help: "greatest magnitude of the activations", set: "numbers", value: (row) => row.greatest, text: (row) => text.number(row.greatest), isFound: isFoundIn("activations") },
    {
      title: "zeros", help: "part of the activations that is zero", set: "numbers",
      value: (row) => share(row.seen.activations), text: (row) => text.percent(share(row.seen.activations)),
    },
    {
      title: "dead", help: "part of the units that is zero for every sample", set: "numbers",
      value: (row) => row.seen.activations?.dead ?? null, text: (row) => text.percent(row.seen.activations?.dead),
      isFound: (row) => row.own_findings.some((finding) => finding.check === "dead_units"),
    },
    { title: "grad norm", help: "L2 norm of the gradient of its activations", set: "numbers", value: (row) => (row.seen.gradients && charts.drawing.hasFinite(row.seen.gradients) ? row.seen.gradients.norm : null), text: (row) => text.statistic(row.seen.gradients, "norm"), isFound: isFoundIn("gradients") },
    { title: "param grad", help: "L2 norm of the gradients of its parameters", set: "numbers", value: (row) => row.gradient, text: (row) => text.number(row.gradient), isFound: isFoundIn("parameter_gradients", "parameters") },
    { title: "NaN, inf", help: "values that are not finite, of all its tensors", set: "numbers", value: (row) => row.bad, text: (row) => (row.bad ? text.number(row.bad) : "0"), isFound: (row) => row.bad > 0 },
    cost("parameters", "number of elements; a tied weight counts once", "parameters", text.large),
    cost("memory", "bytes of its outputs", "activation_bytes", text.bytes),
    cost("multiply-adds", "of its own operations", "multiply_adds", text.large),
    cost("saved", "bytes kept for the backward pass", "saved_bytes", text.bytes),
  ];

  function share(tensor) {
    return tensor?.count ? tensor.zeros / tensor.count : null;
  }

  const TENSOR_HEADS = ["", "", "shape", "dtype", "mean", "std", "min", "max", "norm", "zeros", "dead", "NaN", "inf", ""];
  const SPOKEN = { 0: "tensor", 1: "name", 13: "histogram" };

  async function describe(anchor, row) {
    const { layer } = row;
    const hasHistograms = await page.addHistograms(anchor, row.key, layer);
    const holder = make("div", { class: "charts" });
    const buttons = layer.tensors.map((tensor) => (hasHistograms && tensor.bins ? toggle(tensor, holder) : null));
    const parts = [...sentences(row), tensorTable(layer, buttons), holder];
    if (!hasHistograms && layer.tensors.length) {
      parts.push(make("p", { class: "aside" }, "Its histograms are not on this page, to keep it small; the file of --modelhealth-json has them."));
    }
    buttons.filter(Boolean).filter((_, index, all) => all.length <= SHOWN_AT_ONCE).forEach((button) => button.click());
    if (buttons.filter(Boolean).length > SHOWN_AT_ONCE) preferred(layer, buttons).forEach((button) => button.click());
    return parts;
  }

  function preferred(layer, buttons) {
    return ["activations", "gradients"]
      .map((role) => buttons[layer.tensors.findIndex((tensor) => tensor.role === role)])
      .filter(Boolean);
  }

  function sentences({ layer, own_findings, doubts, others }) {
    const told = [
      ...own_findings.map((finding) => ["bad", `${text.words(finding.check)}: ${finding.message}`]),
      ...own_findings.filter((finding) => finding.cause).map((finding) => ["", `likely cause: ${finding.cause}`]),
      ...doubts.map((finding) => ["unsure", `warning, ${text.words(finding.check)}: ${finding.message}`]),
      ...others.map((finding) => ["", `only shows what began elsewhere, ${text.words(finding.check)}: ${finding.message}`]),
      layer.reason ? ["aside", layer.reason] : null,
      ["aside", [layer.functional ? "a function, not a module" : "", layer.defined_at && `defined at ${layer.defined_at}`, layer.called_at && `called at ${layer.called_at}`].filter(Boolean).join("; ")],
      ...Object.entries(layer.tied ?? {}).map(([own, name]) => ["aside", `${own} is tied to ${name}`]),
    ];
    return told.filter((line) => line?.[1]).map(([kind, line]) => make("p", { class: kind || null }, line));
  }

  function tensorTable(layer, buttons) {
    if (!layer.tensors.length) return make("p", { class: "aside" }, "No tensor of it was seen.");
    const order = layer.tensors.map((tensor, index) => [tensor, buttons[index]]);
    order.sort(([a], [b]) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role));
    const assembled = layer.assembled ?? {};
    const isJoint = Object.keys(assembled).length > 0;
    return make("div", { class: "frame" }, make(
      "table", {},
      make("thead", {}, make("tr", {}, TENSOR_HEADS.map((title, index) =>
        make("th", { scope: "col", class: index > 3 ? "n" : null }, title || make("span", { class: "aloud" }, SPOKEN[index]))),
        isJoint ? JOINT_HEADS.map((title) => make("th", { scope: "col" }, title)) : null)),
      make("tbody", {}, order.map(([tensor, button]) => make(
        "tr", {},
        make("th", { scope: "row" }, text.words(tensor.role)),
        make("td", { class: "code" }, tensor.name),
        make("td", {}, text.shape(tensor.shape)),
        make("td", {}, tensor.dtype),
        ["mean", "std", "min", "max", "norm"].map((name) => make("td", { class: "n" }, text.statistic(tensor, name))),
        make("td", { class: "n" }, text.percent(share(tensor))),
        make("td", { class: "n" }, text.percent(tensor.dead)),
        ["nan", "inf"].map((name) => make("td", { class: `n${tensor[name] ? " found" : ""}` }, text.number(tensor[name]))),
        make("td", { class: "n" }, button),
        isJoint ? overRanks(assembled[tensor.role]) : null,
      ))),
    ));
  }

  const JOINT_HEADS = ["ranks", "NaN on", "most on"];
  const PUT_TOGETHER = { pieces: "added up", replicas: "the same", units: "in a row", "one rank": "alone" };

  // How the statistics of a role became one, and on which ranks a NaN or infinity and the largest value were.
  function overRanks(found) {
    const told = found
      ? [`${found.ranks} ${PUT_TOGETHER[found.how]}`, found.nonfinite.join(", "), found.largest === null ? "" : String(found.largest)]
      : ["", "", ""];
    return told.map((line, index) => make("td", { class: index === 1 && line ? "found" : null }, line));
  }

  function toggle(tensor, holder) {
    let shown = null;
    const called = [text.words(tensor.role), tensor.name].filter(Boolean).join(" ");
    const button = make("button", {
      type: "button", class: "plain", "aria-expanded": "false", "aria-label": `histogram of ${called}`,
      click() {
        if (shown) shown.remove();
        shown = shown ? null : figure(tensor, "");
        if (shown) holder.append(shown);
        button.setAttribute("aria-expanded", String(shown !== null));
      },
    }, "histogram");
    return button;
  }
})();
