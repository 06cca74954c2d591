"use strict";
// Shows the details of a weight: why it is sparse or dense, the schedules that competed, and the zeros that it would need.

const Weight = (() => {
  function contenders(details, decision) {
    const known = details.contenders.map((each) => [each, each.measured_us ?? each.predicted_us]).filter(([, us]) => us !== null);
    if (!known.length) return null;
    known.sort(([, a], [, b]) => a - b);
    const dense = known.find(([each]) => each.name === "dense");
    const chosen = new Set((decision.schedule || "").split(", "));
    const shown = known.slice(0, 8);
    if (dense && !shown.includes(dense)) shown.push(dense);
    const limit = Math.min(shown.at(-1)[1], 5 * (dense || known[0])[1]); // far slower ones would hide the differences
    const rows = shown.map(([each, us]) => bar(each.name, us / limit,
      [micros(us), el("span", { class: "muted" }, each.measured_us !== null ? " measured" : " predicted"),
        chosen.has(each.name) || (each.name === "dense" && !decision.sparse) ? el("span", { class: "chosen" }, "taken") : null],
      each.name === "dense" ? "fill-dense" : chosen.has(each.name) ? "fill-chosen" : "fill-other",
      each.measured_us !== null && each.predicted_us !== null ? `predicted ${micros(each.predicted_us)}` : null));
    return el("section", {}, el("h3", {}, "Schedules that competed"),
      el("p", { class: "muted" }, `A call with ${plural(details.tokens, "token")}${details.dynamic ? ", a number that may change" : ""}, ${details.element}.`,
        details.whole ? " These times are for this weight alone. The gain above is for the whole kernel, which computes more." : null),
      rows, known.length > shown.length ? el("p", { class: "muted" }, `${known.length - shown.length} slower ones are left out.`) : null);
  }

  function zeros(details, decision) {
    const have = 1 - decision.density, pays = details.pays_from;
    const label = pays === null
      ? "No share of zeros is predicted to be enough for this layer alone."
      : pays < 0.01 ? "At this size the cost model predicts a gain for any share of zeros."
      : have >= pays ? `Pays from ${percent(pays)} of zeros on. It has ${percent(have)}.`
        : `${percent(have)} zeros: from ${percent(pays)} on it is predicted to pay here.`;
    return el("section", {}, el("h3", {}, "Zeros it needs"),
      el("div", { class: "gauge", role: "img", "aria-label": label },
        el("span", { class: `gauge-fill ${pays !== null && have >= pays ? "enough" : ""}`, style: `width:${have * 100}%` }),
        pays === null ? null : el("span", { class: "gauge-mark", style: `left:${pays * 100}%` })),
      el("p", {}, label));
  }

  function kernel(details, decision) {
    const members = [...new Set(DATA.decisions.filter((each) => each.details?.region === details.region).map((each) => each.name))];
    return el("section", {}, el("h3", {}, "Kernel"),
      members.length > 1
        ? el("p", {}, `One kernel call computes ${plural(members.length, "weight")}: `, el("span", { class: "code-text" }, members[0]),
          " to ", el("span", { class: "code-text" }, members.at(-1)), ".")
        : el("p", {}, "This weight has a kernel call of its own."),
      details.end ? el("p", {}, "The kernel ends here: ", withCode(details.end), ".") : null);
  }

  function facts(decision) {
    const list = [["Use", decision.op], ["Shape", shape(decision.shape)],
      ["Nonzeros", percent(decision.density, decision.density < 0.1 ? 1 : 0)],
      ["Pattern", decision.pattern || (decision.sparse ? "anywhere" : null)],
      ["Stored as", decision.format], ["Schedule", decision.schedule],
      ["Bytes", decision.packed_bytes ? `${bytes(decision.packed_bytes)}, dense ${bytes(decision.dense_bytes)}` : null]];
    return el("dl", { class: "facts" }, list.filter(([, value]) => value && value !== "-").map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }

  function draw(decision) {
    const details = decision.details;
    const what = decision.sparse ? "sparse" : "dense";
    const gain = decision.gain === null ? null
      : el("span", { class: `gain ${gainClass(decision.gain)}` }, `${gainText(decision.gain)} ${decision.measured ? "measured" : "predicted"}`);
    put(byId("weight"),
      el("div", { class: "detail-head" }, el("h2", { class: "code-text" }, decision.name),
        el("button", { class: "icon close", "aria-label": "Close", onclick: close }, "×")),
      el("p", { class: "verdict-line" }, el("b", { class: what }, what), " ", gain, el("span", {}, decision.reason)),
      el("div", { class: "actions" },
        DATA.patterns[decision.name] ? el("button", { onclick: () => { emit("panel", "sparsity"); emit("weight", decision); } }, "Show its pattern") : null,
        Code.hasKernel(decision) ? el("button", { onclick: () => { emit("panel", "code"); emit("kernel", decision); } }, "Show its code") : null),
      facts(decision),
      details ? contenders(details, decision) : null,
      details?.contenders.some((each) => Object.keys(each.terms).length) ? zeros(details, decision) : null,
      details && decision.sparse ? kernel(details, decision) : null,
      decision.picture ? el("section", {}, el("h3", {}, "Mask, computed where it is dark"), el("pre", { class: "mask" }, decision.picture)) : null);
    byId("weight").classList.add("open");
  }

  function close() {
    byId("weight").classList.remove("open");
    byId("weight").replaceChildren(hint());
    Model.focus();
  }

  const hint = () => el("p", { class: "empty" }, DATA.decisions.length
    ? "Select a weight to see the schedules that competed, and what would have to change."
    : "There is no weight to show.");

  on("weight", draw);
  return { start: () => byId("weight").replaceChildren(hint()), close, isOpen: () => byId("weight").classList.contains("open") };
})();
