"use strict";
// Below the code of a kernel: its hot loops, the terms of the cost model, and its place in the roofline.

const Kernel = (() => {
  function loops(stage, jump) {
    if (!stage || !stage.loops.length) return null;
    const head = ["Loop", "Depth", "Loads", "Multiply-adds", "Stores", "Instructions", "Loads for each multiply-add"];
    return el("section", {}, el("h3", {}, "Loops that multiply, counted from the assembly"),
      el("p", { class: "muted" }, "Each figure is for one iteration. Multiply-adds that read memory count as loads, too."),
      el("div", { class: "scroll" }, el("table", { class: "grid compact" },
        el("thead", {}, el("tr", {}, head.map((name, at) => el("th", { scope: "col", class: at ? "figures" : null }, name)))),
        el("tbody", {}, stage.loops.slice(0, 12).map((loop) => el("tr", {},
          el("td", {}, el("button", { class: "link code-text", onclick: () => jump(loop) }, loop.label)),
          [loop.depth, loop.loads, loop.multiplies, loop.stores, loop.instructions, number(loop.loads / loop.multiplies, 2)].map((figure) =>
            el("td", { class: "figures" }, String(figure)))))))),
      stage.loops.length > 12 ? el("p", { class: "muted" }, `${stage.loops.length - 12} more loops are labelled in the assembly.`) : null);
  }

  function chosen(decision) {
    const taken = new Set((decision.schedule || "").split(", "));
    return decision.details.contenders.find((each) => taken.has(each.name) && Object.keys(each.terms).length);
  }

  function cost(decision) {
    const contender = decision.details && chosen(decision);
    if (!contender) return null;
    const terms = contender.terms, notes = DATA.families[contender.name];
    const parts = [["multiply", terms.multiply_us, "the schedule's own cycles"], ["read", terms.read_us, `${bytes(terms.read_bytes)} of weight at ${number(terms.read_gbs)} GB/s`],
      ["floor", terms.least_us, "1.25 times as fast as the best dense product"]];
    const most = Math.max(...parts.map(([, us]) => us));
    const own = terms.threads > 1 ? ` One of ${plural(terms.threads, "thread")} computes alone what is too little to share.` : "";
    return el("section", {}, el("h3", {}, "What the cost model says"),
      el("p", {}, el("span", { class: "code-text" }, decision.name), `, ${plural(decision.details.tokens, "token")}, schedule ${contender.name}.`),
      notes?.about ? el("p", { class: "muted" }, "Its lowering: ", withCode(notes.about)) : null,
      parts.map(([name, us, why]) => bar(name, us / most, [micros(us), us === most ? el("span", { class: "chosen" }, "counts") : null], us === most ? "fill-chosen" : "fill-other", why)),
      el("p", {}, `On one core the largest of the three counts; the call takes ${micros(terms.call_us)} more.${own} Predicted: ${micros(contender.predicted_us)}` +
        (contender.measured_us !== null ? `, measured: ${micros(contender.measured_us)}.` : ".")),
      notes?.cost ? el("details", {}, el("summary", {}, "How the cycles are predicted"), el("p", {}, withCode(notes.cost))) : null);
  }

  const WIDTH = { float32: 4, float64: 8, bfloat16: 2, float16: 2, int8: 1 };

  function roofline(decision) {
    const contender = decision.details && chosen(decision);
    if (!contender) return null;
    const terms = contender.terms, tokens = decision.details.tokens, [rows, columns] = decision.shape.slice(-2);
    const flops = 2 * decision.density * decision.shape.reduce((a, b) => a * b, 1) * tokens;
    const moved = (decision.packed_bytes || terms.read_bytes) + tokens * (rows + columns) * (WIDTH[decision.details.element] || 4);
    const us = contender.measured_us ?? contender.predicted_us;
    const peak = terms.peak_gflops * terms.threads, band = terms.read_gbs * terms.threads;
    const x = flops / moved, y = flops / us / 1e3, roof = Math.min(peak, band * x), w = 420, h = 240, pad = 46;
    const xs = [Math.min(0.25, x / 2), Math.max(256, x * 2)], ys = [Math.min(peak / 100, y / 2), peak * 2];
    const px = (value) => pad + ((w - pad - 12) * Math.log(value / xs[0])) / Math.log(xs[1] / xs[0]);
    const py = (value) => h - 34 - ((h - 46) * Math.log(value / ys[0])) / Math.log(ys[1] / ys[0]);
    const knee = peak / band, ticks = (from, to) => Array.from({ length: 12 }, (_, at) => 10 ** (at - 4)).filter((each) => each >= from && each <= to);
    const label = `${number(y)} GFLOP/s at ${number(x)} operations a byte: ${percent(y / roof)} of the roof`;
    return el("section", {}, el("h3", {}, "Roofline"),
      svg("svg", { viewBox: `0 0 ${w} ${h}`, class: "roofline", role: "img", "aria-label": label },
        ticks(...xs).map((each) => [svg("line", { x1: px(each), x2: px(each), y1: 12, y2: h - 34, class: "grid-line" }), svg("text", { x: px(each), y: h - 20, "text-anchor": "middle" }, number(each))]),
        ticks(...ys).map((each) => [svg("line", { x1: pad, x2: w - 12, y1: py(each), y2: py(each), class: "grid-line" }), svg("text", { x: pad - 5, y: py(each) + 4, "text-anchor": "end" }, number(each))]),
        svg("polyline", { class: "roof", points: [[xs[0], Math.max(ys[0], band * xs[0])], [Math.max(xs[0], knee), Math.min(peak, Math.max(band * xs[0], peak))], [xs[1], peak]].map(([a, b]) => `${px(a)},${py(b)}`).join(" ") }),
        svg("line", { x1: px(x), x2: px(x), y1: py(Math.max(roof, ys[0])), y2: py(y), class: "gap" }),
        svg("circle", { cx: px(x), cy: py(y), r: 5, class: "point" }, svg("title", {}, label)),
        svg("text", { x: (w + pad) / 2, y: h - 4, "text-anchor": "middle", class: "axis-title" }, "operations for each byte moved"),
        svg("text", { x: 4, y: 9, class: "axis-title" }, "GFLOP/s")),
      el("p", {}, `${label}.`),
      el("p", { class: "muted" }, `Operations with nonzeros only, and the ${contender.measured_us !== null ? "measured" : "predicted"} time of this product alone. ` +
        `The flat roof is the best dense product that calibration found, ${number(peak)} GFLOP/s; the slope is reading at ${number(band)} GB/s.`));
  }

  return { loops, cost, roofline };
})();
