// The result of a snapshot check: what moved, from cause to effect, and both sides of each layer.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});
  const { make, text, drawn, panel } = page;

  page.kinds ??= {};
  page.kinds.drift = function (anchor, result) {
    result.drifts.forEach(name);
    const table = layerTable(result);
    const parts = [
      result.drifts.length ? panel("Before and after", text.plural(result.drifts.length, "statistic") + " that drifted", true, () => drawn(() => charts.drift(result))) : null,
      result.drifts.length ? panel("What drifted", "from cause to effect", true, () => driftTable(result.drifts)) : null,
      result.now.length ? panel("Layers", "before and now", true, () => table.element) : null,
    ];
    return { evidence: Promise.resolve([]), parts: parts.filter(Boolean), reveal: table.reveal };
  };

  const OWN = new Set(["parameters", "parameter_gradients", "buffers"]);

  // Of "head.weight" keeps "head" as the label, and "weight" as the name of the tensor.
  function name(drift) {
    const start = drift.layer && `${drift.layer}.`;
    const isOwn = OWN.has(drift.role) && drift.label.startsWith(start);
    drift.tensor ??= isOwn ? drift.label.slice(start.length) : "";
    if (isOwn && drift.layer) drift.label = drift.layer;
  }

  const DRIFT_HEADS = ["layer", "tensor", "statistic", "before", "now", "moved", "distance", "allowed"];

  function driftTable(drifts) {
    const heads = DRIFT_HEADS.map((title, index) => make("th", { scope: "col", class: index > 2 ? "n" : null }, title));
    const line = (drift) => make(
      "tr", {},
      make("th", { scope: "row" }, make("button", { type: "button", class: "layer", click: (event) => event.target.dispatchEvent(new CustomEvent("show-layer", { bubbles: true, detail: { layer: drift.layer } })) }, drift.label)),
      make("td", {}, [text.words(drift.role), drift.tensor].filter(Boolean).join(" ")),
      make("td", {}, text.words(drift.statistic)),
      [drift.before, drift.now, drift.moved, drift.distance, drift.allowed].map((value) => make("td", { class: "n" }, text.number(value))),
    );
    const body = make("tbody", {}, drifts.slice(0, 200).map(line));
    const rest = drifts.length - 200;
    return make("div", { class: "frame" }, make("table", {}, make("thead", {}, make("tr", {}, heads)), body),
      rest > 0 ? make("p", { class: "aside" }, `and ${text.plural(rest, "effect")} more, in the table of layers below`) : null);
  }

  function layerTable(result) {
    const before = new Map(result.before.map((layer) => [layer.name, layer]));
    const now = new Map(result.now.map((layer) => [layer.name, layer]));
    const moved = new Map();
    for (const drift of result.drifts) moved.set(drift.layer, [...(moved.get(drift.layer) ?? []), drift]);
    const names = [...new Set([...now.keys(), ...before.keys()])];
    const rows = names.map((name, key) => {
      const drifts = moved.get(name) ?? [];
      const [was, is] = [before.get(name), now.get(name)];
      const either = is ?? was;
      const label = name || result.model;
      const kind = was && is ? "" : is ? "new" : "gone";
      return {
        key, name, label, was, is, drifts, kind, type: either.type,
        search: [label, either.type, either.status, kind, drifts.length ? "drifted" : "", ...drifts.map((drift) => drift.statistic)].join(" ").toLowerCase(),
        mark: drifts.length ? { kind: "found", tone: "", text: "drifted" } : kind ? { kind: "warned", tone: "unsure", text: kind } : null,
        isFound: drifts.length > 0, isUnseen: either.status !== "observed",
        distance: drifts.length ? Math.max(...drifts.map((drift) => drift.distance ?? Infinity)) : null,
      };
    });
    return page.layerTable({ rows, columns: COLUMNS, sets: [], title: "Layers before and now", describe });
  }

  const output = (layer) => layer?.tensors.find((tensor) => tensor.role === "activations");
  const side = (title, read, name) => ({
    title, help: `${name} of the activations`, set: "",
    value: (row) => output(read(row))?.[name] ?? null, text: (row) => text.statistic(output(read(row)), name),
  });

  const COLUMNS = [
    { title: "layer", help: "name, as named_modules() spells it", set: "", isText: true, value: (row) => row.label },
    { title: "type", help: "class of the module", set: "", isText: true, value: (row) => row.type, text: (row) => row.type },
    { title: "status", help: "what became of the layer", set: "", isText: true, value: (row) => (row.is ?? row.was).status, text: (row) => text.words((row.is ?? row.was).status) },
    { title: "drifts", help: "statistics that moved too far", set: "", value: (row) => row.drifts.length || null, text: (row) => text.number(row.drifts.length), isFound: (row) => row.isFound },
    { title: "furthest", help: "the greatest distance", set: "", value: (row) => row.distance, text: (row) => text.number(row.distance) },
    side("mean before", (row) => row.was, "mean"), side("now", (row) => row.is, "mean"),
    side("std before", (row) => row.was, "std"), side("now", (row) => row.is, "std"),
  ];

  const STATISTICS = ["mean", "std", "min", "max", "zeros", "dead", "nan", "inf"];

  function describe({ was, is, drifts }) {
    const told = drifts.map((drift) => make("p", { class: "bad" },
      `${text.words(drift.role)} ${drift.tensor ?? ""} ${text.words(drift.statistic)}: ${drift.before} \u2192 ${drift.now}, distance ${text.number(drift.distance)} of ${text.number(drift.allowed)} allowed`));
    const keys = [...new Set([was, is].filter(Boolean).flatMap((layer) => layer.tensors.map((tensor) => JSON.stringify([tensor.role, tensor.name]))))];
    const heads = ["tensor", "", "shape", ...STATISTICS].map((title, index) =>
      make("th", { scope: "col", class: index > 2 ? "n" : null }, title || make("span", { class: "aloud" }, "side")));
    const lines = keys.flatMap((key) => {
      const [role, name] = JSON.parse(key);
      return [["before", was], ["now", is]].map(([when, layer]) => {
        const tensor = layer?.tensors.find((each) => each.role === role && each.name === name);
        return make("tr", {},
          make("th", { scope: "row" }, [text.words(role), name].filter(Boolean).join(" ")),
          make("td", {}, when), make("td", {}, text.shape(tensor?.shape)),
          STATISTICS.map((statistic) => make("td", { class: "n" }, text.statistic(tensor, statistic))));
      });
    });
    return [...told, make("div", { class: "frame" }, make("table", {}, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, lines)))];
  }
})();
