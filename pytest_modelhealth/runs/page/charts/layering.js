// Places a directed graph in rows: longest ways, few crossings, straight lines.
//
// After Sugiyama, Tagawa and Toda (1981): edges that close a cycle are turned for the time being, a
// node stands below all that feed it, long edges are led through every row between, and rows are
// sorted by barycentres. Places across follow the blocks of Brandes and Köpf (2001).
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const SORTINGS = 12;
  const PLACINGS = 30;
  const BETWEEN = 14; // pixels between boxes of a row
  const LANE = 8; // width of a passing edge
  const PULL = { way: 10, through: 4, direct: 2, plain: 1 };

  // `widths`: pixels of each node. `edges`: [{from, to, style}]; those of one style that leave a node
  // together share their way. Returns {rows: number of them, rowOf: [row], xOf: [centre], width,
  // routes: [{points: [[x, row]], isBack}]}, a route for each edge, from the upper node to the lower.
  charts.layered = function (widths, edges) {
    const back = closing(widths.length, edges);
    const rowOf = longestWays(widths.length, edges, back);
    const graph = led(widths, edges, back, rowOf);
    sort(graph);
    place(graph);
    const [least, most] = charts.drawing.extent(graph.rows.flatMap((row) => row.flatMap((v) => [graph.x[v] - graph.width[v] / 2, graph.x[v] + graph.width[v] / 2])));
    const shift = Number.isFinite(least) ? -least : 0;
    const x = graph.x.map((value) => value + shift);
    const routes = graph.routes.map((route, index) => ({
      points: route.map((vertex) => [x[vertex], graph.row[vertex]]),
      isBack: back[index],
    }));
    return { rows: graph.rows.length, rowOf, xOf: x.slice(0, widths.length), width: Math.max(0, most - least), routes };
  };

  // Which edges lead back to a node that is still being walked, from the sources on.
  function closing(count, edges) {
    const leaving = Array.from({ length: count }, () => []);
    const entered = new Array(count).fill(0);
    edges.forEach(({ from, to }, index) => {
      if (from === to) return;
      leaving[from].push(index);
      entered[to] += 1;
    });
    const back = new Array(edges.length).fill(false);
    const state = new Uint8Array(count); // 1 being walked, 2 done
    const walk = (start) => {
      if (state[start]) return;
      state[start] = 1;
      const stack = [[start, 0]];
      while (stack.length) {
        const top = stack.at(-1);
        const [node, next] = top;
        if (next === leaving[node].length) {
          state[node] = 2;
          stack.pop();
          continue;
        }
        top[1] += 1;
        const edge = leaving[node][next];
        const { to } = edges[edge];
        if (state[to] === 1) back[edge] = true;
        else if (!state[to]) {
          state[to] = 1;
          stack.push([to, 0]);
        }
      }
    };
    for (let node = 0; node < count; node += 1) if (!entered[node]) walk(node);
    for (let node = 0; node < count; node += 1) walk(node);
    return back;
  }

  // The row of each node: one below the lowest that feeds it. Sources stand above what they feed.
  function longestWays(count, edges, back) {
    const leaving = Array.from({ length: count }, () => []);
    const open = new Array(count).fill(0);
    edges.forEach(({ from, to }, index) => {
      if (from === to) return;
      const [upper, lower] = back[index] ? [to, from] : [from, to];
      leaving[upper].push(lower);
      open[lower] += 1;
    });
    const isSource = open.map((number) => number === 0);
    const row = new Array(count).fill(0);
    const ready = [];
    for (let node = 0; node < count; node += 1) if (!open[node]) ready.push(node);
    for (let next = 0; next < ready.length; next += 1) {
      const node = ready[next];
      for (const lower of leaving[node]) {
        row[lower] = Math.max(row[lower], row[node] + 1);
        open[lower] -= 1;
        if (!open[lower]) ready.push(lower);
      }
    }
    for (let node = 0; node < count; node += 1) {
      if (isSource[node] && leaving[node].length) row[node] = Math.min(...leaving[node].map((lower) => row[lower])) - 1;
    }
    return row;
  }

  // Adds a vertex in every row that an edge passes. Edges of a style from one node share them.
  function led(widths, edges, back, rowOf) {
    const graph = { width: [...widths], row: [...rowOf], rows: [], up: [], down: [], x: [], routes: [], pull: [] };
    const add = (row, width) => {
      graph.width.push(width);
      graph.row.push(row);
      return graph.row.length - 1;
    };
    const lanes = new Map(); // upper node and style: the vertices below it, row by row
    const joined = new Map(); // pairs of vertices: the strength of their tie
    edges.forEach(({ from, to, style }, index) => {
      if (from === to) {
        graph.routes.push([from, to]);
        return;
      }
      const [upper, lower] = back[index] ? [to, from] : [from, to];
      const key = `${upper} ${style}${back[index] ? " back" : ""}`;
      if (!lanes.has(key)) lanes.set(key, []);
      const lane = lanes.get(key);
      const route = [upper];
      for (let row = rowOf[upper] + 1; row < rowOf[lower]; row += 1) {
        const step = row - rowOf[upper] - 1;
        if (step === lane.length) lane.push(add(row, LANE));
        route.push(lane[step]);
      }
      route.push(lower);
      graph.routes.push(route);
      for (let i = 1; i < route.length; i += 1) {
        const isThrough = route[i - 1] >= widths.length && route[i] >= widths.length;
        const kind = style.includes("way") ? "way" : isThrough ? "through" : route.length === 2 ? "direct" : "plain";
        const pull = PULL[kind];
        const pair = `${route[i - 1]} ${route[i]}`;
        joined.set(pair, { upper: route[i - 1], lower: route[i], pull: Math.max(pull, joined.get(pair)?.pull ?? 0) });
      }
    });
    const count = graph.row.length;
    graph.up = Array.from({ length: count }, () => []);
    graph.down = Array.from({ length: count }, () => []);
    for (const { upper, lower, pull } of joined.values()) {
      graph.down[upper].push({ vertex: lower, pull });
      graph.up[lower].push({ vertex: upper, pull });
    }
    for (let vertex = 0; vertex < count; vertex += 1) (graph.rows[graph.row[vertex]] ??= []).push(vertex);
    graph.rows = Array.from(graph.rows, (row) => row ?? []);
    return graph;
  }

  // Orders each row by the mean places of the neighbours; keeps the order with fewest crossings.
  function sort(graph) {
    const place = new Array(graph.row.length).fill(0);
    const settle = () => graph.rows.forEach((row) => row.forEach((vertex, index) => (place[vertex] = index)));
    settle();
    let best = graph.rows.map((row) => [...row]);
    let fewest = crossings(graph, place);
    for (let sorting = 0; sorting < SORTINGS && fewest > 0; sorting += 1) {
      const isDownward = sorting % 2 === 0;
      const order = isDownward ? graph.rows : graph.rows.toReversed();
      for (const row of order) {
        const wished = new Map();
        for (const vertex of row) {
          const near = isDownward ? graph.up[vertex] : graph.down[vertex];
          const sum = near.reduce((total, { vertex: other }) => total + place[other], 0);
          wished.set(vertex, near.length ? sum / near.length : place[vertex]);
        }
        row.sort((a, b) => wished.get(a) - wished.get(b));
        row.forEach((vertex, index) => (place[vertex] = index));
      }
      const number = crossings(graph, place);
      if (number >= fewest) continue;
      fewest = number;
      best = graph.rows.map((row) => [...row]);
    }
    graph.rows = best;
  }

  function crossings(graph, place) {
    let number = 0;
    for (const row of graph.rows) {
      const lower = [];
      for (const vertex of row) {
        const ends = graph.down[vertex].map(({ vertex: other }) => place[other]);
        for (const end of ends) for (const other of lower) if (other > end) number += 1;
        lower.push(...ends);
      }
    }
    return number;
  }

  // Vertices that are joined straight up and down make a block, which has one place for all rows.
  function place(graph) {
    let blockOf = aligned(graph);
    let blocks = fromTheLeft(graph, blockOf);
    if (blocks === null) {
      blockOf = graph.row.map((_, vertex) => vertex);
      blocks = fromTheLeft(graph, blockOf);
    }
    const at = new Map(blocks.map(({ id }) => [id, 0]));
    const reach = (block, isLeft) => {
      let limit = isLeft ? -Infinity : Infinity;
      for (const [other, distance] of isLeft ? block.left : block.right) {
        limit = isLeft ? Math.max(limit, at.get(other) + distance) : Math.min(limit, at.get(other) - distance);
      }
      return limit;
    };
    for (const block of blocks) at.set(block.id, Math.max(0, reach(block, true)));
    for (let placing = 0; placing < PLACINGS; placing += 1) {
      for (const block of placing % 2 ? blocks : blocks.toReversed()) {
        const pull = block.ties.reduce((sum, tie) => sum + tie.pull, 0);
        if (!pull) continue;
        const wish = block.ties.reduce((sum, tie) => sum + tie.pull * at.get(blockOf[tie.vertex]), 0) / pull;
        at.set(block.id, Math.min(reach(block, false), Math.max(reach(block, true), wish)));
      }
    }
    graph.x = blockOf.map((block) => at.get(block));
  }

  // Joins each vertex to one above it so that no two joints cross: the strongest ties first, and of
  // equal ones that to the middle.
  function aligned(graph) {
    const blockOf = graph.row.map((_, vertex) => vertex);
    const place = new Map();
    for (const row of graph.rows) row.forEach((vertex, index) => place.set(vertex, index));
    const middle = (ties) => ties.reduce((sum, tie) => sum + place.get(tie.vertex), 0) / ties.length;
    for (const row of graph.rows) {
      const ties = row.flatMap((upper) => graph.down[upper].map(({ vertex, pull }) => ({
        upper, lower: vertex, pull,
        aside: Math.abs(place.get(upper) - middle(graph.up[vertex])) + Math.abs(place.get(vertex) - middle(graph.down[upper])),
      })));
      ties.sort((a, b) => b.pull - a.pull || a.aside - b.aside);
      const joints = [];
      for (const { upper, lower } of ties) {
        const [from, to] = [place.get(upper), place.get(lower)];
        if (joints.some(([a, b]) => (from - a) * (to - b) <= 0)) continue;
        joints.push([from, to]);
        blockOf[lower] = blockOf[upper];
      }
    }
    return blockOf;
  }

  // The blocks, each after those that stand to its left; null where that has no answer.
  function fromTheLeft(graph, blockOf) {
    const blocks = new Map();
    blockOf.forEach((id, vertex) => {
      if (!blocks.has(id)) blocks.set(id, { id, left: [], right: [], ties: [] });
      const { ties } = blocks.get(id);
      for (const tie of [...graph.up[vertex], ...graph.down[vertex]]) if (blockOf[tie.vertex] !== id) ties.push(tie);
    });
    for (const row of graph.rows) {
      for (let i = 1; i < row.length; i += 1) {
        const [left, right] = [row[i - 1], row[i]];
        const distance = (graph.width[left] + graph.width[right]) / 2 + BETWEEN;
        blocks.get(blockOf[left]).right.push([blockOf[right], distance]);
        blocks.get(blockOf[right]).left.push([blockOf[left], distance]);
      }
    }
    const open = new Map([...blocks].map(([id, block]) => [id, block.left.length]));
    const ordered = [...blocks.values()].filter((block) => !block.left.length);
    for (let next = 0; next < ordered.length; next += 1) {
      for (const [id] of ordered[next].right) {
        open.set(id, open.get(id) - 1);
        if (!open.get(id)) ordered.push(blocks.get(id));
      }
    }
    return ordered.length === blocks.size ? ordered : null;
  }
})();
