"use strict";
// Below the tree: the graph of calls. A box is a sparse call, the dense code between such calls, or a folded module.

const Flow = (() => {
  const flows = DATA.flows || [];
  const MOST = 30; // boxes that are shown before anything is unfolded
  const decided = new Map(DATA.decisions.map((decision) => [decision.name, decision]));
  const opened = flows.map(() => new Set());
  const calls = (flow) => flow.filter((part) => part.kind === "sparse").length;
  let shown = Math.max(0, flows.map(calls).indexOf(Math.max(...flows.map(calls)))), query = "", selected = null; // the sparsest graph first

  const shared = (paths) => {
    const [first = [], ...others] = paths.map((path) => path.split("."));
    const end = first.findIndex((step, at) => others.some((other) => other[at] !== step));
    return (end < 0 ? first : first.slice(0, end)).join(".");
  };
  const decisions = (part) => part.weights.map((name) => decided.get(name)).filter(Boolean);
  const module = (name) => name.replace(/\.(parametrizations\..*|weight|bias|weight_orig|weight_mask)$/, "");

  // The module of a part: the module of its weights, or else the module that it computes.
  const path = (part) => {
    const weights = decisions(part).length ? decisions(part).map((each) => each.name) : part.weights;
    return weights.length ? shared(weights.map(module)) : part.module;
  };

  const ends = (part) => {
    const names = [...new Set(decisions(part).map((each) => module(each.name)))];
    return names.length > 1 ? `${names[0]} … ${names.at(-1)}` : "";
  };

  // The modules that a part folds into, from the outermost to the innermost. Backward parts have separate modules.
  const prefixes = (part) => {
    const steps = [part.backward && "backward", ...path(part).split(".")].filter(Boolean);
    return part.kind === "input" || part.kind === "output" ? [] : steps.map((_, at) => steps.slice(0, at + 1).join("."));
  };

  // The box of each part: the outermost module that is folded and holds more than this part, or the part itself.
  function boxes(flow, open) {
    const held = new Map();
    flow.forEach((part) => prefixes(part).forEach((each) => held.set(each, (held.get(each) || 0) + 1)));
    return flow.map((part, at) => prefixes(part).find((each) => each && held.get(each) > 1 && !open.has(each)) ?? `#${at}`);
  }

  // Unfolds modules, outermost first, as long as the picture stays small.
  function unfold(flow) {
    const open = new Set();
    for (;;) {
      const folded = new Set(boxes(flow, open).filter((box) => !box.startsWith("#")));
      let grown = false;
      for (const box of folded) {
        open.add(box);
        if (new Set(boxes(flow, open)).size > MOST) open.delete(box);
        else grown = true;
      }
      if (!grown) return open;
    }
  }

  function drawn(flow, open) {
    const graph = new dagre.graphlib.Graph().setGraph({ rankdir: "TB", nodesep: 24, ranksep: 26, marginx: 8, marginy: 8 }).setDefaultEdgeLabel(() => ({}));
    const box = boxes(flow, open);
    const parts = new Map();
    flow.forEach((part, at) => { if (!parts.has(box[at])) parts.set(box[at], []); parts.get(box[at]).push(part); });
    for (const [name, held] of parts) graph.setNode(name, described(name, held));
    flow.forEach((part, at) => part.from.forEach((source) => {
      const kept = part.backward && !flow[source].backward && part.from.some((other) => flow[other].backward);
      if (box[source] !== box[at] && !kept) graph.setEdge(box[source], box[at]);
    }));
    dagre.layout(graph);
    return graph;
  }

  function described(name, held) {
    const [part] = held, folded = !name.startsWith("#");
    const weights = held.flatMap(decisions), sparse = held.filter((each) => each.kind === "sparse");
    const gains = weights.filter((each) => each.sparse && each.gain !== null).map((each) => Math.log(each.gain));
    const gain = gains.length ? Math.exp(gains.reduce((sum, each) => sum + each, 0) / gains.length) : null;
    const direction = part.backward ? "backward " : "";
    const title = folded ? name.replace(/^backward\./, direction) : direction + (path(part) || ends(part) || (part.kind === "sparse" ? "sparse call" : part.kind));
    const counts = [sparse.length && plural(sparse.length, "sparse call"), held.length > sparse.length && plural(held.length - sparse.length, "dense part")];
    const count = new Set(weights.filter((each) => each.sparse).map((each) => each.name)).size;
    const about = folded ? counts.filter(Boolean).join(", ")
      : [part.kind === "sparse" && count > 0 && plural(count, "weight"), part.about !== "region" && part.about.replace(/^\+ /, "")].filter(Boolean).join(", ");
    const kind = sparse.length ? "sparse" : part.kind;
    const lines = [(folded ? "▸ " : "") + cut(title, false), ...(about ? [cut(about, true)] : [])];
    const width = Math.max(80, 20 + 7.6 * Math.max(lines[0].length, (lines[1] || "").length) + (gain === null ? 0 : 48));
    return { name, title, about, kind, folded, gain, lines, width, height: lines.length > 1 ? 42 : 26, weights };
  }

  // Shortens a text: a path keeps its end, a list keeps its start.
  const cut = (text, start) => (text.length <= 38 ? text : start ? `${text.slice(0, 37)}…` : `…${text.slice(-37)}`);

  const matches = (node) => query && `${node.title} ${node.about} ${node.weights.map((each) => each.name).join(" ")}`.toLowerCase().includes(query);

  function picture(graph) {
    const { width, height } = graph.graph();
    const edges = graph.edges().map((edge) => {
      const points = graph.edge(edge).points;
      return svg("path", { class: "flow-edge", "marker-end": "url(#flow-arrow)",
        d: points.map(({ x, y }, at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") });
    });
    const nodes = graph.nodes().map((name) => graph.node(name)).map((node) => {
      const x = node.x - node.width / 2, y = node.y - node.height / 2;
      const chosen = selected && node.weights.includes(selected);
      const act = node.folded ? () => { opened[shown].add(node.name); draw(); } : node.weights.length ? () => emit("weight", node.weights[0]) : null;
      return svg("g", {
        class: `flow-box flow-${node.kind}${chosen ? " chosen" : ""}${matches(node) ? " match" : ""}${node.folded ? " folded" : ""}`,
        transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, role: act ? "button" : "img", tabindex: act ? 0 : null,
        "aria-label": [node.title, node.about, node.gain === null ? "" : `gain ${gainText(node.gain)}`, node.folded ? "unfold" : ""].filter(Boolean).join(", "),
        onclick: act, onkeydown: (event) => { if (act && (event.key === "Enter" || event.key === " ")) { act(); event.preventDefault(); event.stopPropagation(); } },
      },
        svg("title", {}, [node.title, node.about].filter(Boolean).join("\n")),
        svg("rect", { width: node.width, height: node.height, rx: 6 }),
        node.lines.map((line, at) => svg("text", { x: 10, y: 17 + 16 * at, class: at ? "flow-about" : "flow-name" }, line)),
        node.gain === null ? null : svg("rect", { class: `flow-gain ${gainClass(node.gain)}`, x: node.width - 52, y: 5, width: 46, height: 17, rx: 4 }),
        node.gain === null ? null : svg("text", { x: node.width - 29, y: 17.5, class: `flow-gain-text ${gainClass(node.gain)}`, "text-anchor": "middle" }, gainText(node.gain)));
    });
    return svg("svg", { class: "flow", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "The calls and how they lead to each other" },
      svg("defs", {}, svg("marker", { id: "flow-arrow", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
        svg("path", { d: "M0 0L8 4L0 8z", class: "flow-tip" }))), edges, nodes);
  }

  function draw() {
    if (!flows.length) return 0;
    const graph = drawn(flows[shown], opened[shown]);
    const folds = unfold(flows[shown]);
    const chooser = flows.length > 1 ? el("label", {}, "Graph ", el("select", { onchange: (event) => { shown = Number(event.target.value); draw(); } },
      flows.map((_, at) => el("option", { value: at, selected: at === shown }, `${at + 1} of ${flows.length}`)))) : null;
    const reset = opened[shown].size > folds.size ? el("button", { onclick: () => { opened[shown] = folds; draw(); } }, "Fold again") : null;
    const nodes = graph.nodes().map((name) => graph.node(name)), sparse = calls(flows[shown]);
    put(byId("flow"), el("h3", {}, "How the calls lead to each other"),
      el("p", { class: "muted" }, sparse ? `${plural(sparse, "call")} of Gossamer's kernels. ` : "Gossamer has no kernel here. ", "Grey boxes are the code that Inductor compiles.",
        nodes.some((node) => node.folded) ? " A box with ▸ is a module: press it to unfold it." : "",
        flows[shown].some((part) => part.backward) ? " Results that are only kept for the backward pass are not drawn." : ""),
      chooser || reset ? el("div", { class: "bar" }, chooser, reset) : null, el("div", { class: "flow-view scroll" }, picture(graph)));
    const view = byId("flow").querySelector(".flow-view"), first = nodes.find((node) => node.kind === "input") || nodes[0];
    view.scrollLeft = first.x - view.clientWidth / 2;
    return nodes.filter(matches).length;
  }

  on("weight", (decision) => { selected = decision; draw(); });

  return {
    start() {
      flows.forEach((flow, at) => (opened[at] = unfold(flow)));
      draw();
    },
    search: (text) => { query = text; return draw(); },
  };
})();
