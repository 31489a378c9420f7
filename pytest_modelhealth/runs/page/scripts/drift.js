// The result of a snapshot check: both sides of each layer.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});
  const { make, text } = page;

  page.kinds ??= {};
  page.kinds.drift = function (anchor, result) {
    if (!result.now.length) return null;
    const before = new Map(result.before.map((layer) => [layer.name, layer]));
    const now = new Map(result.now.map((layer) => [layer.name, layer]));
    const moved = page.grouped(result.drifts, (drift) => drift.layer);
    const rows = [...new Set([...now.keys(), ...before.keys()])].map((name, key) => {
      const drifts = moved.get(name) ?? [];
      const [was, is] = [before.get(name), now.get(name)];
      const either = is ?? was;
      const kind = was && is ? "" : is ? "new" : "gone";
      const words = [name || result.model, either.type, either.status, kind, drifts.length ? "drifted" : "", ...drifts.map((drift) => drift.statistic)];
      return {
        key, name, label: words[0], was, is, drifts, either, search: words.join(" ").toLowerCase(),
        mark: drifts.length ? { kind: "found", tone: "", text: "drifted" } : kind ? { kind: "warned", tone: "unsure", text: kind } : null,
        isFound: drifts.length > 0, isUnseen: either.status !== "observed",
        distance: drifts.length ? Math.max(...drifts.map((drift) => drift.distance ?? Infinity)) : null,
      };
    });
    return page.layerTable({ rows, columns: COLUMNS, sets: [], title: "Layers before and now", describe });
  };

  const output = (layer) => layer?.tensors.find((tensor) => tensor.role === "activations");
  const side = (title, read, name) => ({
    title, help: `${name} of the activations`, set: "",
    value: (row) => output(read(row))?.[name] ?? null, text: (row) => text.statistic(output(read(row)), name),
  });

  const COLUMNS = [
    { title: "layer", help: "name, as named_modules() spells it", set: "", isText: true, value: (row) => row.label },
    { title: "type", help: "class of the module", set: "", isText: true, value: (row) => row.either.type, text: (row) => row.either.type },
    { title: "status", help: "what became of the layer", set: "", isText: true, value: (row) => row.either.status, text: (row) => text.words(row.either.status) },
    { title: "drifts", help: "statistics that moved too far", set: "", value: (row) => row.drifts.length || null, text: (row) => text.number(row.drifts.length), isFound: (row) => row.isFound },
    { title: "furthest", help: "the greatest distance", set: "", value: (row) => row.distance, text: (row) => text.number(row.distance) },
    side("mean before", (row) => row.was, "mean"), side("now", (row) => row.is, "mean"),
    side("std before", (row) => row.was, "std"), side("now", (row) => row.is, "std"),
  ];

  const STATISTICS = ["mean", "std", "min", "max", "zeros", "nan", "inf"];

  function describe({ was, is, drifts }) {
    const told = drifts.map((drift) => make("p", { class: "bad" },
      `${drift.label} ${text.words(drift.role)} ${text.words(drift.statistic)}: ${drift.before} \u2192 ${drift.now}, distance ${text.number(drift.distance)} of ${text.number(drift.allowed)} allowed`));
    const names = new Set([was, is].filter(Boolean).flatMap((layer) => layer.tensors.map((tensor) => JSON.stringify([tensor.role, tensor.name]))));
    const lines = [...names].flatMap((key) => [["before", was], ["now", is]].map(([when, layer]) => {
      const [role, name] = JSON.parse(key);
      const tensor = layer?.tensors.find((each) => each.role === role && each.name === name);
      return [make("th", { scope: "row" }, text.called({ role, name })), ...page.cells([when, text.shape(tensor?.shape)], ""), ...page.cells(STATISTICS.map((statistic) => text.statistic(tensor, statistic)))];
    }));
    return [...told, page.table(page.heads(["tensor", "", "shape", ...STATISTICS], 3), lines)];
  }
})();
