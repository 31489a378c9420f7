// A table of layers: a tree in execution order, a list where it is sorted or searched.
//
// A row: {key, name, label, search, mark, isFound, isOpen, isUnseen}, beside what its columns read. `mark`
// is {tone, text} or null. A column: {title, help, set, value(row), text(row), isText, isFound(row)};
// `value` is what it sorts by (null comes last), `set` one of `sets`, or "" for every one.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});
  const { make } = page;

  const CHUNK = 300; // rows that are drawn at once
  const OPEN_UP_TO = 500; // layers, up to which the whole tree is open at first
  const FIRST_ROWS = 120; // about so many rows are unfolded of a larger tree
  const MOST_ROWS = 2000; // that are drawn at first, so that what was found is among them

  page.layerTable = function ({ rows, columns, sets, describe, title }) {
    const tree = planted(rows);
    const state = { query: "", sort: null, set: sets[0] ?? "", room: CHUNK, folded: initiallyFolded(tree, rows), open: new Set(rows.filter((row) => row.isOpen).map((row) => row.key)) };
    state.room = Math.max(CHUNK, Math.min(MOST_ROWS, unfolded(tree).findIndex((row) => row.isFound) + 20));
    const described = new Map();
    const head = make("thead");
    const body = make("tbody");
    const status = make("p", { class: "status", role: "status" });
    const rest = make("div", { class: "more-rows", hidden: true });
    const search = make("input", {
      type: "search", class: "search", placeholder: "Search name, type, status, check", "aria-label": "Search layers",
      input: () => change({ query: search.value.trim().toLowerCase() }),
    });
    const inOrder = make("button", { type: "button", class: "plain", hidden: true, click: () => change({ sort: null }) }, "Back to execution order");
    const choices = sets.map((set) =>
      make("button", { type: "button", "aria-pressed": String(set === state.set), click: () => choose(set) }, set),
    );
    const table = make("table", { class: "layers" }, make("caption", { class: "aloud" }, title), head, body);
    const frame = make("div", { class: "layers-frame", tabindex: "0", role: "group", "aria-label": title }, table, rest);
    const element = make(
      "div", { class: "layer-table" },
      make("div", { class: "tools" }, search,
        choices.length ? make("div", { class: "switch", role: "group", "aria-label": "Columns" }, choices) : null,
        inOrder, status),
      frame,
    );
    body.addEventListener("keydown", walk);
    draw();
    return { element, reveal, showOpen, remark: page.text.plural(rows.length, "layer") };

    function change(changes) {
      Object.assign(state, { room: CHUNK }, changes);
      draw();
    }

    function choose(set) {
      choices.forEach((choice) => choice.setAttribute("aria-pressed", String(choice.textContent === set)));
      change({ set });
    }

    function draw() {
      const held = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
      const shown = columns.filter((column) => column.set === "" || column.set === state.set || state.set === "all");
      const listed = list();
      const drawn = listed.slice(0, state.room);
      head.replaceChildren(make("tr", {}, shown.map(heading)));
      body.replaceChildren(...drawn.flatMap((row) => lines(row, shown)));
      drawRest(listed.length - drawn.length);
      inOrder.hidden = state.sort === null;
      status.textContent = told(listed.length);
      if (held) element.querySelector(`[data-key="${held}"]`)?.focus();
    }

    function list() {
      if (state.query === "" && state.sort === null) return unfolded(tree);
      const words = state.query.split(/\s+/);
      const found = rows.filter((row) => words.every((word) => row.search.includes(word)));
      return state.sort === null ? found : found.sort(comparing(columns[state.sort.column].value, state.sort.isDown));
    }

    function unfolded(nodes) {
      return nodes.flatMap((node) => [node.row, ...(state.folded.has(node.row.key) ? [] : unfolded(node.children))]);
    }

    function told(count) {
      const all = page.text.plural(rows.length, "layer");
      const sorted = state.sort && `, by ${columns[state.sort.column].title}, ${state.sort.isDown ? "largest first" : "smallest first"}`;
      if (state.query) return `${page.text.whole(count)} of ${all} found${sorted ?? ""}`;
      return sorted ? `${all}${sorted}` : count < rows.length ? `${page.text.whole(count)} of ${all} unfolded` : `${all} in execution order`;
    }

    function heading(column) {
      const at = columns.indexOf(column);
      const sorted = state.sort?.column === at ? (state.sort.isDown ? "descending" : "ascending") : "none";
      const arrow = { descending: "\u25be", ascending: "\u25b4", none: "" }[sorted];
      return make(
        "th", { scope: "col", "aria-sort": sorted, class: column.isText ? null : "n" },
        make("button", { type: "button", "data-key": `sort-${at}`, title: column.help, click: () => sortBy(at) },
          column.title, make("span", { class: "arrow", "aria-hidden": "true" }, arrow)),
      );
    }

    function sortBy(column) {
      const first = !columns[column].isText; // numbers: the largest first
      const now = state.sort?.column === column ? state.sort.isDown : null;
      change({ sort: now === null ? { column, isDown: first } : now === first ? { column, isDown: !first } : null });
    }

    function lines(row, shown) {
      const isTree = state.query === "" && state.sort === null;
      const isOpen = state.open.has(row.key);
      const kind = row.isUnseen ? " unseen" : "";
      const line = make(
        "tr", { class: `${row.mark?.kind ?? ""}${kind}`, "data-layer": row.name },
        make("th", { scope: "row" }, isTree ? fold(row) : null, nameOf(row, isTree, isOpen),
          row.mark ? make("span", { class: `tag ${row.mark.tone}` }, row.mark.text) : null,
          isTree && state.folded.has(row.key) && row.inside ? make("span", { class: "tag" }, `${row.inside} inside`) : null),
        shown.slice(1).map((column) =>
          make("td", { class: `${column.isText ? "" : "n"}${column.isFound?.(row) ? " found" : ""}` || null }, column.text(row))),
      );
      if (isTree) line.firstChild.style.setProperty("--depth", row.depth);
      if (!isOpen) return [line];
      return [line, make("tr", { class: "details" }, make("td", { colspan: String(shown.length) }, detailsOf(row)))];
    }

    function fold(row) {
      if (!row.children) return make("span", { class: "nofold" });
      const isFolded = state.folded.has(row.key);
      return make("button", {
        type: "button", class: "fold", "data-key": `fold-${row.key}`, "aria-expanded": String(!isFolded),
        "aria-label": `layers in ${row.label}`, click: () => setFolded(row, !isFolded),
      }, isFolded ? "\u25b8" : "\u25be");
    }

    function setFolded(row, isFolded) {
      if (isFolded) state.folded.add(row.key);
      else state.folded.delete(row.key);
      draw();
    }

    function nameOf(row, isTree, isOpen) {
      const cut = isTree ? 0 : row.label.lastIndexOf(".") + 1;
      return make("button", {
        type: "button", class: "layer", "data-key": `layer-${row.key}`, "aria-expanded": String(isOpen), title: row.label,
        click: () => setOpen(row, !isOpen),
      }, cut ? make("span", { class: "path" }, row.label.slice(0, cut)) : "", isTree ? row.own : row.label.slice(cut));
    }

    function setOpen(row, isOpen) {
      if (isOpen) state.open.add(row.key);
      else state.open.delete(row.key);
      draw();
    }

    function detailsOf(row) {
      if (!described.has(row.key)) {
        const inside = make("div", { class: "inside" });
        described.set(row.key, inside);
        Promise.resolve(describe(row)).then((parts) => inside.append(...[parts].flat()));
      }
      return described.get(row.key);
    }

    function drawRest(count) {
      rest.hidden = count <= 0;
      const more = (room, text) => make("button", { type: "button", class: "plain", click: () => showMore(room) }, text);
      rest.replaceChildren(
        more(state.room + CHUNK, `Show ${Math.min(CHUNK, Math.max(count, 0))} more`),
        make("span", { class: "aside" }, `${page.text.whole(count)} not shown`),
      );
    }

    function showMore(room) {
      const next = state.room;
      state.room = room;
      draw();
      body.querySelectorAll("button.layer")[next]?.focus();
    }

    function walk(event) {
      const button = event.target.closest?.("button.layer");
      if (!button) return;
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const isFolded = { ArrowLeft: true, ArrowRight: false }[event.key];
      if (step) {
        const all = [...body.querySelectorAll("button.layer")];
        all[all.indexOf(button) + step]?.focus();
      } else if (isFolded !== undefined) {
        const row = rows[Number(button.dataset.key.split("-")[1])];
        if (row.children) setFolded(row, isFolded);
      } else return;
      event.preventDefault();
    }

    // Scrolls the frame, and not the page, to what is open from the start.
    function showOpen() {
      const line = body.querySelector("tr.details")?.previousSibling;
      if (line) frame.scrollTop = line.offsetTop - frame.clientHeight / 3;
    }

    // Opens the row of the layer of this name, if there is one, and goes there.
    function reveal(name) {
      const row = rows.find((each) => each.name === name);
      if (!row) return;
      element.closest("details").open = true;
      search.value = "";
      state.query = "";
      for (let above = row.parent; above; above = above.parent) state.folded.delete(above.key);
      state.open.add(row.key);
      state.room = Math.max(state.room, list().indexOf(row) + 1);
      draw();
      const button = element.querySelector(`[data-key="layer-${row.key}"]`);
      button.scrollIntoView({ block: "center" });
      button.focus({ preventScroll: true });
    }
  };

  // Returns the trees of the rows, by the dots of their names, and tells each row its place in them.
  function planted(rows) {
    const byName = new Map();
    for (const row of rows) if (!byName.has(row.name)) byName.set(row.name, row);
    const nodes = new Map(rows.map((row) => [row, { row, children: [] }]));
    const roots = [];
    for (const row of rows) {
      row.parent = byName.get(row.name) === row ? above(row.name, byName) : null;
      if (row.parent) nodes.get(row.parent).children.push(nodes.get(row));
      else roots.push(nodes.get(row));
    }
    const settle = (node, depth) => {
      const { row, children } = node;
      row.depth = depth;
      row.children = children.length;
      row.own = row.parent?.name && row.label.startsWith(`${row.parent.name}.`) ? row.label.slice(row.parent.name.length + 1) : row.label;
      row.first = row.key;
      row.inside = 0;
      for (const child of children) {
        settle(child, depth + 1);
        row.first = Math.min(row.first, child.row.first);
        row.inside += child.row.inside + (child.row.isFound ? 1 : 0);
      }
      children.sort((a, b) => a.row.first - b.row.first);
    };
    roots.forEach((node) => settle(node, 0));
    return roots.sort((a, b) => a.row.first - b.row.first);
  }

  function above(name, byName) {
    for (let end = name.lastIndexOf("."); end > 0; end = name.lastIndexOf(".", end - 1)) {
      const found = byName.get(name.slice(0, end));
      if (found) return found;
    }
    return name === "" ? null : (byName.get("") ?? null);
  }

  // Large trees are open as deep as a page shows, and where something was found.
  function initiallyFolded(tree, rows) {
    if (rows.length <= OPEN_UP_TO) return new Set();
    const parents = rows.filter((row) => row.children);
    const kept = new Set();
    for (const row of rows.filter((each) => each.isFound).slice(0, 20)) {
      for (let up = row.parent; up; up = up.parent) kept.add(up);
    }
    const depths = rows.map((row) => row.depth);
    let depth = 0;
    while (depths.filter((each) => each <= depth + 1).length <= FIRST_ROWS) depth += 1;
    return new Set(parents.filter((row) => row.depth >= depth && !kept.has(row)).map((row) => row.key));
  }

  function comparing(value, isDown) {
    const letters = new Intl.Collator("en", { numeric: true });
    const isNone = (each) => each === null || each === undefined || each === "" || Number.isNaN(each);
    return (left, right) => {
      const [a, b] = [value(left), value(right)];
      if (isNone(a) || isNone(b)) return isNone(a) - isNone(b) || left.key - right.key;
      const order = typeof a === "number" && typeof b === "number" ? a - b : letters.compare(String(a), String(b));
      return (isDown ? -order : order) || left.key - right.key;
    };
  }
})();
