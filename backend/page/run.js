"use strict";
// Panel 4: shows where the time of a call goes, if the report was saved with a profile.

const Run = (() => {
  const run = DATA.run;
  let query = "", focused = 0;

  const total = () => run.us + run.backward_us;
  const kinds = () => {
    const sum = (name) => run.parts.reduce((all, part) => all + part[name], 0);
    return [["kernels", sum("kernel_us"), "run-kernel", "machine code of sparse operations"],
      ["calls of kernels", sum("call_us"), "run-call", "finding the region, checking the weight, memory for results"],
      ["packing", sum("packing_us"), "run-packing", "weights that have changed"],
      ["dense", run.dense_us + run.dense_backward_us, "run-dense", "what Inductor compiled, or torch runs"],
      ["guards", run.guards_us, "run-guards", "Dynamo's checks before compiled code"],
      ["Python", run.outside_us - run.guards_us, "run-python", "around and between compiled graphs"]].filter(([, us]) => us > 0);
  };

  function strip() {
    const parts = kinds(), all = parts.reduce((sum, [, us]) => sum + us, 0);
    return el("section", {}, el("h3", {}, "A call"),
      el("div", { class: "run-strip", role: "img", "aria-label": parts.map(([name, us]) => `${name} ${micros(us)}`).join(", ") },
        parts.map(([name, us, kind]) => el("span", { class: kind, style: `width:${(100 * us) / all}%`, title: `${name}: ${micros(us)}` }))),
      el("ul", { class: "run-legend" }, parts.map(([name, us, kind, why]) => el("li", { title: why },
        el("span", { class: `run-key ${kind}`, "aria-hidden": "true" }), `${name} `, el("b", {}, micros(us)), el("span", { class: "muted" }, ` ${percent(us / all)}`)))));
  }

  function rows() {
    const shown = run.parts.filter((part) => part.label.toLowerCase().includes(query));
    const most = Math.max(...run.parts.map((part) => part.us));
    const columns = [["Time", (part) => micros(part.us)], ["Share", (part) => percent(part.us / total())],
      ["Kernel", (part) => micros(part.kernel_us)], ["Call", (part) => micros(part.call_us)],
      ["Packing", (part) => (part.packing_us ? micros(part.packing_us) : "")],
      ["Weights", (part) => (part.weights ? bytes(part.weights) : "")], ["Other bytes", (part) => bytes(part.activations)],
      ["Roofline", (part) => (part.roofline === null ? "" : percent(part.roofline))]].filter(([, text]) => run.parts.some(text));
    return [shown, el("div", { class: "scroll" }, el("table", { class: "grid compact", "aria-label": "Sparse operations in the order in which they run" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Part"), columns.map(([name]) => el("th", { scope: "col", class: "figures" }, name)))),
      el("tbody", {}, shown.map((part, at) => el("tr", { tabindex: at === focused ? 0 : -1, "data-at": at },
        el("td", {}, el("div", { class: "code-text" }, part.label), el("span", { class: "run-bar", style: `width:${(100 * part.us) / most}%`, "aria-hidden": "true" }),
          part.dense ? el("div", { class: "muted" }, "torch computes it: its weight has lost its zeros, or changes at every call") : null),
        columns.map(([, text]) => el("td", { class: "figures" }, text(part)))))))) ];
  }

  function draw() {
    const [shown, table] = rows();
    const backward = run.backward_us ? `, ${micros(run.backward_us)} of it backward` : "";
    put(byId("run-parts"), shown.length ? table : el("p", { class: "empty" }, query ? `No part matches “${query}”.` : "No sparse operation runs in a call."));
    put(byId("run-summary"), el("p", {}, `${micros(total())} a call${backward}. Times are medians of ${plural(run.calls, "call")} on ${plural(run.machine.threads, "thread")}.`),
      run.whole ? null : el("p", { class: "muted" }, "Not all calls ran the same operations. Those that did not are left out."));
    return shown.length;
  }

  function focusRow(at) {
    const all = [...byId("run-parts").querySelectorAll("tr[data-at]")];
    focused = Math.max(0, Math.min(all.length - 1, at));
    for (const row of all) row.tabIndex = Number(row.dataset.at) === focused ? 0 : -1;
    all[focused]?.focus();
  }

  function key(event) {
    const act = { ArrowDown: () => focusRow(focused + 1), ArrowUp: () => focusRow(focused - 1) }[event.key];
    if (act) { act(); event.preventDefault(); }
  }

  function start() {
    put(byId("run"), el("div", { id: "run-summary" }), strip(), el("section", {}, el("h3", {}, "Sparse operations, in the order in which they run"),
      !run.parts.some((part) => part.roofline !== null) ? null : el("p", { class: "muted" }, "Roofline: the time that this machine needs at best for the nonzeros and the bytes, as a share of the kernel's."), el("div", { id: "run-parts" })));
    byId("run-parts").addEventListener("keydown", key);
    draw();
  }

  return { start, focus: () => focusRow(focused), search: (text) => { query = text.toLowerCase(); focused = 0; return draw(); } };
})();
