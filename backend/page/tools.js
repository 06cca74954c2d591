"use strict";
// Shared by all panels: elements, numbers, the data of the report, and events between panels.

const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// Makes an element: el("td", {class: "number"}, "12"). Children are elements or texts; null is left out.
const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function filled(made, attributes = {}, children = []) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Replaces the children of an element.
function put(parent, ...children) {
  parent.replaceChildren();
  filled(parent, {}, children);
}

// Returns a text with `names` in backquotes as code.
const withCode = (text) => text.split("`").map((part, at) => (at % 2 ? el("span", { class: "code-text" }, part) : part));

const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
const zerosText = (share) => percent(share, share > 0.99 && share < 1 ? 1 : 0);
const shape = (sizes) => sizes.join(" × ");
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function number(value, digits = 3) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function bytes(count) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (count >= size) return `${number(count / size)} ${unit}`;
  return `${count} B`;
}

function micros(us) {
  return us >= 1000 ? `${number(us / 1000)} ms` : `${number(us)} µs`;
}

const gainText = (gain) => (gain === null ? "" : `${number(gain, 2)}×`);

// Returns the colour class of a gain. The colour is stronger for larger gains; gain-0, below 1, is a loss.
function gainClass(gain) {
  if (gain === null) return "gain-none";
  const limits = [1, 1.1, 2, 4, 8];
  return `gain-${limits.filter((limit) => gain >= limit).length}`;
}

// Events between panels, for example when the user chooses a weight.
const listeners = {};
const on = (event, act) => (listeners[event] ??= []).push(act);
const emit = (event, ...details) => (listeners[event] || []).forEach((act) => act(...details));

// Returns a horizontal bar with a label and a figure. `share` is the part of the whole width.
function bar(label, share, figure, kind = "", title = null) {
  return el("div", { class: "bar-row", title },
    el("span", { class: "bar-label" }, label),
    el("span", { class: "bar-track" }, el("span", { class: `bar-fill ${kind}`, style: `width:${Math.max(0, Math.min(1, share)) * 100}%` })),
    el("span", { class: "bar-figure" }, figure));
}

function card(figure, label, title = null) {
  return el("div", { class: "card", title }, el("div", { class: "card-figure" }, figure), el("div", { class: "card-label" }, label));
}

async function copied(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1200);
}
