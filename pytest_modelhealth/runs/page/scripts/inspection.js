// The result of an inspection: its layers, and all tensors of each.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});
  const { make, text } = page;
  const ROLES = ["inputs", "activations", "gradients", "parameters", "parameter_gradients", "buffers"];
  const MOST_BARS = 64;

  page.kinds ??= {};
  page.kinds.inspection = function (anchor, result) {
    if (!result.layers.length) return null;
    const layerOf = (finding) => finding.layer;
    const found = page.grouped(result.violations, layerOf);
    const warned = page.grouped(result.warnings, layerOf);
    const shows = page.grouped(result.violations.flatMap((violation) => violation.consequences), layerOf);
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
        mark: markOf(own, doubts, others), isFound: own.length > 0, isOpen: layer.name === result.violations[0]?.layer, said: result.violations[0], isUnseen: layer.status !== "observed",
        gradient: normOf(layer, "parameter_gradients"), bad: badOf(layer), greatest: greatestOf(seen.activations),
      };
    });
    return page.layerTable({
      rows, columns: COLUMNS.filter((column) => column.title !== STATUS || rows.some((row) => row.isUnseen)), sets: ["numbers", "cost", "all"], title: "Layers",
      describe: (row) => describe(anchor, row),
    });
  };

  function markOf(own, doubts, others) {
    if (own.length) return { kind: "found", tone: "", text: text.words(own[0].check) };
    if (doubts.length) return { kind: "warned", tone: "unsure", text: text.words(doubts[0].check) };
    return others.length ? { kind: "shows", tone: "quiet", text: `shows ${text.words(others[0].check)}` } : null;
  }

  function normOf(layer, role) {
    const tensors = layer.tensors.filter((tensor) => tensor.role === role);
    if (!tensors.length || tensors.some((tensor) => tensor.norm === null || !page.hasFinite(tensor))) return null;
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
    cost("calls", "how often it was called", "calls", text.whole),
    { title: "input", help: "shape of its first input", set: "cost", isText: true, value: (row) => product(row.layer.input_shape), text: (row) => text.shape(row.layer.input_shape) },
    { title: "output", help: "shape of its first output", set: "", isText: true, value: (row) => product(row.layer.shape), text: (row) => text.shape(row.layer.shape) },
    { title: "dtype", help: "of its output", set: "cost", isText: true, value: (row) => row.layer.dtype, text: (row) => row.layer.dtype || text.NONE },
    statistic("mean", "of the activations", "mean"),
    statistic("std", "of the activations", "std"),
    { title: "abs max", help: "greatest magnitude of the activations", set: "numbers", value: (row) => row.greatest, text: (row) => text.number(row.greatest) },
    {
      title: "zeros", help: "part of the activations that is zero", set: "numbers",
      value: (row) => share(row.seen.activations), text: (row) => text.percent(share(row.seen.activations)),
    },
    {
      title: "dead", help: "part of the units that is zero for every sample", set: "numbers",
      value: (row) => row.seen.activations?.dead ?? null, text: (row) => text.percent(row.seen.activations?.dead),
      isFound: (row) => row.own_findings.some((finding) => finding.check === "dead_units"),
    },
    { title: "grad norm", help: "L2 norm of the gradient of its activations", set: "numbers", value: (row) => (row.seen.gradients && page.hasFinite(row.seen.gradients) ? row.seen.gradients.norm : null), text: (row) => text.statistic(row.seen.gradients, "norm"), isFound: isFoundIn("gradients") },
    { title: "param grad", help: "L2 norm of the gradients of its parameters", set: "numbers", value: (row) => row.gradient, text: (row) => text.number(row.gradient), isFound: isFoundIn("parameter_gradients", "parameters") },
    { title: "NaN, inf", help: "values that are not finite, of all its tensors", set: "numbers", value: (row) => row.bad, text: (row) => text.whole(row.bad), isFound: (row) => row.bad > 0 && row.isFound },
    cost("parameters", "number of elements; a tied weight counts once", "parameters", text.large),
    cost("memory", "bytes of its outputs", "activation_bytes", text.bytes),
    cost("multiply-adds", "of its own operations", "multiply_adds", text.large),
    cost("saved", "bytes kept for the backward pass", "saved_bytes", text.bytes),
  ];

  function share(tensor) {
    return tensor?.count ? tensor.zeros / tensor.count : null;
  }

  async function describe(anchor, row) {
    const hasHistograms = await page.addHistograms(anchor, row.key, row.layer);
    const told = "Its histograms are not on this page, to keep it small; the file of --modelhealth-json has them.";
    const key = "Values by size: a bar is a power of two, those of negative values at the left, zeros grey; heights are parts of the highest.";
    return [...sentences(row), tensorTable(row), row.layer.tensors.length ? make("p", { class: "aside" }, hasHistograms ? key : told) : ""];
  }

  // What is wrong with a layer; the gravest finding stands above, in full.
  function sentences({ layer, own_findings, doubts, others, said }) {
    own_findings = own_findings.filter((finding) => finding !== said);
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

  const HEADS = page.heads(["", "", "shape", "dtype"], 4)
    .concat(page.heads(["mean", "std", "min", "max", "norm", "zeros", "dead", "NaN", "inf"], 0), page.heads(["values by size"], 1));
  [HEADS[0].spoken, HEADS[1].spoken] = ["tensor", "name"];
  const ILL_HEADS = page.heads(["NaN on ranks"], 1);

  function tensorTable({ layer, own_findings }) {
    const isMeant = ({ role, name }) => own_findings.some((finding) => finding.role === role && (!finding.tensor || finding.tensor === name));
    if (!layer.tensors.length) return make("p", { class: "aside" }, "No tensor of it was seen.");
    const ill = layer.ill_ranks ?? {};
    const isIll = Object.keys(ill).length > 0;
    const order = [...layer.tensors].sort((a, b) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role));
    return page.table(isIll ? [...HEADS, ...ILL_HEADS] : HEADS, order.map((tensor) => [
      make("th", { scope: "row", class: isMeant(tensor) ? "meant" : null }, text.words(tensor.role)),
      make("td", { class: "code" }, tensor.name),
      ...page.cells([text.shape(tensor.shape), tensor.dtype], ""),
      ...page.cells(["mean", "std", "min", "max", "norm"].map((name) => text.statistic(tensor, name))),
      ...page.cells([text.percent(share(tensor)), text.percent(tensor.dead)]),
      ...["nan", "inf"].map((name) => make("td", { class: `n${tensor[name] && isMeant(tensor) ? " found" : ""}` }, text.whole(tensor[name]))),
      make("td", {}, bars(tensor)),
      ...(isIll ? [make("td", { class: ill[tensor.role] ? "found" : null }, (ill[tensor.role] ?? []).join(", "))] : []),
    ]));
  }

  // The values of a tensor by sign and power of two, zeros between them: bars whose heights CSS has.
  function bars({ role, name, bins, zeros }) {
    if (!bins) return text.NONE;
    const side = (counts, sign) => counts.map((count, index) => {
      const ends = [sign * 2 ** (bins.lowest + index), sign * 2 ** (bins.lowest + index + 1)].sort((a, b) => a - b);
      return { count, kind: "", from: ends[0], to: ends[1] };
    });
    let all = [...side(bins.negative, -1).reverse(), { count: zeros ?? 0, kind: "zeros" }, ...side(bins.positive, 1)];
    const isFull = ({ count }) => count > 0;
    all = all.slice(all.findIndex(isFull), all.findLastIndex(isFull) + 1);
    const group = Math.ceil(all.length / MOST_BARS);
    const groups = page.grouped(all, (bar) => (bar.kind ? "zeros" : Math.floor(all.indexOf(bar) / group)));
    all = [...groups.values()].map((held) => ({ ...held[0], to: held.at(-1).to, count: held.reduce((sum, { count }) => sum + count, 0) }));
    const most = Math.max(...all.map(({ count }) => count));
    const bar = ({ count, kind, from, to }) => make("i", {
      class: kind || null, style: `--h:${Math.round((100 * count) / most)}%`,
      title: kind ? text.plural(count, "zero") : `${text.plural(count, "value")} of ${text.number(from)} to ${text.number(to)}`,
    });
    const called = text.called({ role, name });
    return make("span", { class: "bins", role: "img", "aria-label": `histogram of ${called}` }, all.map(bar));
  }
})();
