// Folds the layers of a large model into their containers, and long stacks into ranges.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const MOST_CHILDREN = 12; // of a container, if all of them are to be shown
  const NEAR = 2; // siblings shown before and after what is looked at
  const RANGES = 6; // of a long stack of which nothing is looked at

  // Returns {boxes, boxOf}: at most about `most` boxes {name, size, first, leaves, isRange, ends}, in
  // the order of `names`, and a Map from each name to the index of its box. What `focus` names is
  // opened first, and what stands near it is shown apart. `places` is a Map of the names that are
  // folded as if they were called otherwise. The time is linear in the length of all names.
  charts.fold = function (names, focus, most, places = new Map()) {
    const root = tree(names, places);
    const path = pathTo(root, places.get(focus) ?? focus);
    let groups = opened([root], path);
    for (;;) {
      const at = groups.findIndex((group) => isOpenable(group) && group.some((item) => path.has(item)));
      if (at < 0 || groups.length > most) break;
      if (groups[at].length === 1 && groups[at][0] === path.last) break;
      groups.splice(at, 1, ...opened(groups[at], path));
    }
    const waiting = groups.filter((group) => group[0] !== path.last);
    for (let next = 0; next < waiting.length; next += 1) {
      const group = waiting[next];
      if (group.length > 1 || !isOpenable(group) || group[0].children.size > MOST_CHILDREN) continue;
      const parts = opened(group, path);
      if (groups.length + parts.length - 1 > most) continue;
      groups.splice(groups.indexOf(group), 1, ...parts);
      waiting.push(...parts);
    }
    return boxed(groups);
  };

  // Nodes {name, leaf, children}: `leaf` is a name of the model that ends there, or null.
  function tree(names, places) {
    const root = { name: "", leaf: null, children: new Map() };
    for (const leaf of names) {
      const name = places.get(leaf) ?? leaf;
      let node = root;
      let end = -1;
      do {
        const start = end + 1;
        end = name.indexOf(".", start);
        const part = end < 0 ? name.slice(start) : name.slice(start, end);
        if (!node.children.has(part)) {
          node.children.set(part, { name: end < 0 ? name : name.slice(0, end), leaf: null, children: new Map() });
        }
        node = node.children.get(part);
      } while (end >= 0);
      node.leaf = leaf;
    }
    return root;
  }

  // The nodes from the root to `focus`, as a Set whose `last` is that of the longest known prefix.
  function pathTo(root, focus) {
    const path = new Set();
    path.last = null;
    if (focus === undefined || focus === null) return path;
    let node = root;
    for (const part of focus.split(".")) {
      if (!node.children.has(part)) return path;
      node = node.children.get(part);
      path.add(node);
      path.last = node;
    }
    return path;
  }

  const isOpenable = (group) => group.length > 1 || group[0].children.size > 0;

  // A container falls into its children, a range into its items; many of them become ranges.
  function opened(group, path) {
    let items = group;
    while (items.length === 1 && items[0].children.size) {
      const inner = [...items[0].children.values()];
      if (items[0].leaf !== null) inner.unshift({ ...items[0], children: new Map() });
      items = inner;
    }
    if (items.length <= MOST_CHILDREN) return items.map((item) => [item]);
    const at = items.findIndex((item) => path.has(item));
    if (at >= 0) {
      const [from, to] = [Math.max(0, at - NEAR), Math.min(items.length, at + NEAR + 1)];
      const near = items.slice(from, to).map((item) => [item]);
      return [items.slice(0, from), ...near, items.slice(to)].filter((part) => part.length);
    }
    const size = Math.ceil(items.length / RANGES);
    const parts = [];
    for (let start = 0; start < items.length; start += size) parts.push(items.slice(start, start + size));
    return parts;
  }

  function boxed(groups) {
    const boxOf = new Map();
    const spelt = (node) => (node.children.size ? node.name : node.leaf);
    const boxes = groups.map((group, index) => {
      const waiting = [...group].reverse();
      const leaves = [];
      while (waiting.length) {
        const node = waiting.pop();
        if (node.leaf !== null) {
          boxOf.set(node.leaf, index);
          leaves.push(node.leaf);
        }
        for (const child of [...node.children.values()].reverse()) waiting.push(child);
      }
      const ends = [spelt(group[0]), spelt(group.at(-1))];
      const isRange = group.length > 1;
      return { name: isRange ? ends.join(" … ") : ends[0], size: leaves.length, first: leaves[0], leaves, isRange, ends };
    });
    return { boxes, boxOf };
  }
})();
