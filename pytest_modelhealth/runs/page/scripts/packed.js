// The blocks of data: unpacked when they are first asked for.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});
  const LAYERS_A_BLOCK = 500; // as in blocks.py
  const COLUMNS = "\n";
  const unpacked = new Map(); // element: promise of all that it holds
  const holders = new Map(); // name: the element that holds it
  for (const element of document.querySelectorAll("script[data-of]")) {
    for (const name of element.dataset.of.split(" ")) holders.set(name, element);
  }

  // Returns a promise of a result, its charts and its facts; null where they are not on the page.
  page.result = held;

  // Gives the tensors of the `index`-th layer of a result their histograms; says whether it had any.
  page.addHistograms = async function (anchor, index, layer) {
    const part = await held(`${anchor}:${Math.floor(index / LAYERS_A_BLOCK)}`);
    const bins = part?.[index % LAYERS_A_BLOCK];
    if (!bins) return false;
    layer.tensors.forEach((tensor, nth) => {
      tensor.bins = bins[nth] ?? null;
    });
    return true;
  };

  async function held(name) {
    const element = holders.get(name);
    if (element === undefined) return null;
    if (!unpacked.has(element)) unpacked.set(element, unpack(element));
    return (await unpacked.get(element))[name];
  }

  async function unpack(element) {
    const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return records(await new Response(stream).json());
  }

  // Lists of records come as a record of lists.
  function records(value) {
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.map(records);
    const whole = Object.fromEntries(Object.entries(value).map(([key, one]) => [key, records(one)]));
    const columns = whole[COLUMNS];
    if (columns === undefined) return whole;
    const keys = Object.keys(columns);
    return columns[keys[0]].map((_, row) => Object.fromEntries(keys.map((key) => [key, columns[key][row]])));
  }
})();
