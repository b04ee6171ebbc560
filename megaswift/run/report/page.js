"use strict";
// Draws the curves and completions of report.html from the JSON in #data. All texts are set as text, never as markup.

let data = JSON.parse(document.getElementById("data").textContent);
const SMOOTHING = [0, 0.01, 0.02, 1 / 30, 0.06, 0.12, 0.25]; // window of the median, as a share of the run
const MARGIN = { left: 58, right: 12, top: 10, bottom: 24 };
const HEIGHT = 230;
const view = { x: "step", scale: "auto", smoothing: 3, from: -Infinity, to: Infinity, hidden: new Set() };

// ---- Elements

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

const color = (index) => `var(--run${index % 8})`;
const finite = (value) => typeof value === "number" && Number.isFinite(value);

function number(value) {
  if (!finite(value)) return "none";
  const short = Number(value.toPrecision(4));
  return short && Math.abs(short) < 1e-3 ? short.toExponential() : String(short);
}

// ---- Axes

/** Round numbers (1, 2 or 5 times a power of ten apart) inside the range. */
function linearTicks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) ticks.push(i * step);
  return ticks;
}

/** Ticks of a logarithmic axis: powers of ten, with numbers between them where there is room, and the round numbers of
 *  a linear axis in a narrow range. */
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 0.8) return linearTicks(low, high, 5).filter((v) => v > 0);
  const every = Math.ceil(decades / 6);
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % every) continue;
    for (const m of decades > 5 ? [1] : decades > 2.5 ? [1, 3] : [1, 2, 5]) {
      const value = Number(`${m}e${power}`);
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
    }
  }
  return ticks;
}

/** A short label: 12k, 0.25, 3e-5; with that many significant digits, or as many as the number's size asks for. */
function label(value, digits) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [limit, unit, one] of [[1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]]) {
    if (size >= limit && size < 1e13) return Number((value / one).toPrecision(digits || 4)) + unit;
  }
  const short = Number(value.toPrecision(digits || (size >= 1 ? 4 : size >= 1e-3 ? 3 : 2)));
  return size < 1e-4 || size >= 1e13 || String(short).length > 8 ? short.toExponential() : String(short);
}

/** Labels of one axis: no two alike, with more digits where the range is narrow compared with its values. */
function labels(values) {
  for (const digits of [undefined, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]) {
    const texts = values.map((value) => label(value, digits));
    if (new Set(texts).size === values.length) return texts;
  }
  return values.map((value) => label(value));
}

/** The unit of the horizontal axis, and the number by which positions are divided. */
function unit(highest) {
  if (view.x === "step") return ["optimizer step", 1];
  if (view.x === "tokens") return ["tokens", 1];
  if (highest >= 7200) return ["hours of training", 3600];
  return highest >= 120 ? ["minutes of training", 60] : ["seconds of training", 1];
}

/** The vertical range. No value below 0: neither is the range. Long curves are shown without their first spikes. */
function limits(values, log) {
  const sorted = values.filter(finite).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const low = sorted[0];
  let high = sorted[sorted.length - 1];
  if (log) return high > low ? [low / (high / low) ** 0.05, high * (high / low) ** 0.05] : [low / 2, low * 2];
  const typical = sorted[Math.min(Math.floor(sorted.length * 0.98), sorted.length - 1)];
  if (sorted.length >= 50 && high - low > 4 * (typical - low) && typical > low) high = typical + (typical - low) / 2;
  const room = 0.06 * (high - low) || Math.abs(high) * 0.05 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

// ---- Curves

/** The median of `window` values around each, so that a spike stays a spike; fewer at the ends. */
function smooth(values, window) {
  if (window < 3) return values;
  return values.map((value, i) => {
    if (!finite(value)) return null;
    const half = Math.min(Math.floor(window / 2), i, values.length - 1 - i);
    const near = values.slice(i - half, i + half + 1).filter(finite).sort((a, b) => a - b);
    const middle = near.length >> 1;
    return near.length % 2 ? near[middle] : (near[middle - 1] + near[middle]) / 2;
  });
}

const windowOf = (count) => Math.floor(SMOOTHING[view.smoothing] * count) | 1;
const isShown = (x) => x >= view.from && x <= view.to;

/** What a chart shows of each visible run. */
function seriesOf(name) {
  return data.runs.flatMap((run, index) => {
    const curve = run.curves[name];
    if (!curve || view.hidden.has(index)) return [];
    const x = run.x[view.x];
    const evals = run.evals.curves[name];
    const raw = curve.mean;
    const window = windowOf(raw.length);
    return [{ run, index, x, raw, curve, window, mean: smooth(raw, window), evals, evalX: run.evals.x[view.x] }];
  });
}

/** Whether the axis is logarithmic: on request, or by itself for a loss or norm that spans a factor of 20. */
function isLog(name, values) {
  if (view.scale === "linear" || !values.length || values.some((v) => v <= 0)) return false;
  if (view.scale === "log") return true;
  return /loss|grad_norm/.test(name) && Math.max(...values) > 20 * Math.min(...values);
}

/** One chart: its head with the last values, and the drawing. */
function drawChart(card, name) {
  const width = Math.max(card.clientWidth - 28, 240);
  const series = seriesOf(name);
  const within = (x, values) => (values || []).filter((v, i) => finite(v) && isShown(x[i]));
  const values = series.flatMap((s) => [
    ...within(s.x, s.curve.low), ...within(s.x, s.curve.high), ...within(s.x, s.raw), ...within(s.evalX, s.evals),
  ]);
  const log = isLog(name, values);
  const range = limits(values, log);
  const picture = card.querySelector(".chart");
  picture.replaceChildren();
  drawKey(card.querySelector(".key"), series);
  if (!range) return;

  // From numbers to places.
  const all = series.flatMap((s) => s.x.filter(isShown));
  let [first, last] = [Math.min(...all), Math.max(...all)];
  if (first === last) [first, last] = [first - 1, last + 1];
  const [bottom, top] = log ? range.map(Math.log10) : range;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const px = (x) => MARGIN.left + ((x - first) / (last - first)) * inner.width;
  const py = (value) => {
    const share = ((log ? Math.log10(value) : value) - bottom) / (top - bottom);
    return HEIGHT - MARGIN.bottom - Math.min(Math.max(share, 0), 1) * inner.height;
  };

  // The frame.
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": name });
  const ticks = log ? logTicks(...range) : linearTicks(...range, 6);
  const texts = labels(ticks);
  ticks.forEach((value, i) => {
    const y = py(value).toFixed(1);
    svg.append(drawn("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
    svg.append(drawn("text", { class: "y", x: MARGIN.left - 7, y: Number(y) + 4, "text-anchor": "end" }, texts[i]));
  });
  const [what, divisor] = unit(last);
  const marks = linearTicks(first / divisor, last / divisor, Math.max(4, Math.floor(width / 95)));
  const whole = marks.filter((v) => view.x !== "step" || Number.isInteger(v));
  labels(whole).forEach((text, i) => {
    const anchor = i === whole.length - 1 && px(whole[i] * divisor) > width - 30 ? "end" : "middle";
    const place = { class: "x", x: px(whole[i] * divisor).toFixed(1), y: HEIGHT - 7, "text-anchor": anchor };
    svg.append(drawn("text", place, text));
  });
  if (view.x === "time") svg.append(drawn("text", { x: 2, y: HEIGHT - 7 }, what.replace(" of training", "")));
  const floor = HEIGHT - MARGIN.bottom;
  svg.append(drawn("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: floor, y2: floor }));

  // The curves.
  for (const s of series) {
    const group = drawn("g", { style: `color:${color(s.index)}` });
    const path = (x, numbers) => {
      let open = false;
      let d = "";
      numbers.forEach((v, i) => {
        const ok = finite(v) && isShown(x[i]);
        if (ok) d += `${open ? "L" : "M"}${px(x[i]).toFixed(1)},${py(v).toFixed(1)}`;
        open = ok;
      });
      return d;
    };
    if (s.curve.low) {
      for (const [i, x] of s.x.entries()) {
        if (!finite(s.curve.low[i]) || !isShown(x)) continue;
        const [at, low, high] = [px(x), py(s.curve.low[i]), py(s.curve.high[i])].map((place) => place.toFixed(1));
        group.append(drawn("line", { class: "curve raw", x1: at, x2: at, y1: low, y2: high }));
      }
    } else if (s.window >= 3) {
      group.append(drawn("path", { class: "curve raw", d: path(s.x, s.raw) }));
    }
    group.append(drawn("path", { class: "curve mean", d: path(s.x, s.mean) }));
    if (s.raw.length <= 40) {
      s.raw.forEach((v, i) => {
        if (!finite(v) || !isShown(s.x[i])) return;
        group.append(drawn("circle", { class: "mark", cx: px(s.x[i]).toFixed(1), cy: py(v).toFixed(1), r: 2.2 }));
      });
    }
    svg.append(group);
    if (!s.evals) continue;
    const evals = drawn("g", { style: `color:${data.runs.length > 1 ? color(s.index) : "var(--eval)"}` });
    evals.append(drawn("path", { class: "curve evals", d: path(s.evalX, s.evals) }));
    s.evals.forEach((v, i) => {
      if (!finite(v) || !isShown(s.evalX[i])) return;
      const [x, y] = [px(s.evalX[i]), py(v)];
      evals.append(drawn("path", { class: "mark", d: `M${x},${y - 4.5}l4.5,4.5l-4.5,4.5l-4.5,-4.5z` }));
    });
    svg.append(evals);
  }
  picture.append(svg);
  follow(svg, card, series, { px, first, last, width, name });
}

/** Run, curve and value above the drawing: the last numbers, or those at the place `at`. */
function drawKey(key, series, at) {
  const several = data.runs.length > 1;
  const entry = (mark, text, value) => {
    const line = mark ? [element("i", { style: `color:${mark}` })] : [];
    return element("span", {}, ...line, text, element("b", {}, number(value)));
  };
  const parts = at === undefined ? [] : [element("span", {}, placeText(at))];
  for (const s of series) {
    const stretch = s.run.lines_per_point;
    const last = stretch === 1 ? "last line" : `mean of the last ${stretch} lines`;
    const median = `median of ${s.window * stretch} lines`;
    const training = s.window < 3 ? "training" : at === undefined ? `${median}, ${last}` : median;
    const value = at === undefined ? s.raw.findLast(finite) : s.mean[nearest(s.x, at)];
    parts.push(entry(color(s.index), several ? s.run.name : training, value));
    if (!s.evals || !s.evals.some(finite)) continue;
    const evaluated = at === undefined ? s.evals.findLast(finite) : s.evals[nearest(s.evalX, at)];
    parts.push(entry(several ? "" : "var(--eval)", "evaluation", evaluated));
  }
  key.replaceChildren(...parts);
}

function placeText(at) {
  if (view.x !== "time") return `${view.x} ${at.toLocaleString("en")}`;
  const [what, divisor] = unit(at);
  return `after ${number(at / divisor)} ${what.replace(" of training", "")}`;
}

/** The index of the position closest to `x`. */
function nearest(positions, x) {
  let best = 0;
  for (let i = 1; i < positions.length; i++) if (Math.abs(positions[i] - x) < Math.abs(positions[best] - x)) best = i;
  return best;
}

/** Show the values under the pointer; a range that is drawn with the pointer becomes the range of all charts. */
function follow(svg, card, series, { px, first, last, width }) {
  const key = card.querySelector(".key");
  const inverse = (event) => {
    const box = svg.getBoundingClientRect();
    const inside = (event.clientX - box.left) * (width / box.width) - MARGIN.left;
    const share = inside / (width - MARGIN.left - MARGIN.right);
    return first + Math.min(Math.max(share, 0), 1) * (last - first);
  };
  const line = drawn("line", { class: "at", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  const height = HEIGHT - MARGIN.top - MARGIN.bottom;
  const range = drawn("rect", { class: "picked", y: MARGIN.top, height, width: 0 });
  svg.append(range, line);
  let start = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") start = inverse(event);
  });
  svg.addEventListener("pointermove", (event) => {
    const here = inverse(event);
    const at = series[0].x[nearest(series[0].x, here)];
    for (const end of ["x1", "x2"]) line.setAttribute(end, px(at));
    line.setAttribute("visibility", "visible");
    drawKey(key, series, at);
    if (start === null) return;
    range.setAttribute("x", Math.min(px(start), px(here)));
    range.setAttribute("width", Math.abs(px(start) - px(here)));
  });
  svg.addEventListener("pointerup", (event) => {
    const end = inverse(event);
    if (start !== null && Math.abs(px(end) - px(start)) > 8) {
      [view.from, view.to] = [Math.min(start, end), Math.max(start, end)];
      drawAll();
    }
    start = null;
  });
  svg.addEventListener("pointerleave", () => {
    start = null;
    range.setAttribute("width", 0);
    line.setAttribute("visibility", "hidden");
    drawKey(key, series);
  });
  svg.addEventListener("dblclick", wholeRun);
}

function wholeRun() {
  [view.from, view.to] = [-Infinity, Infinity];
  drawAll();
}

const cards = []; // [card, metric]

function drawAll() {
  document.getElementById("whole").hidden = view.from === -Infinity;
  for (const [card, name] of cards) if (card.clientWidth) drawChart(card, name);
}

function addCharts(place, titles) {
  for (const [name, title] of titles) {
    const card = element("div", { class: "card", "data-metric": name }, element("h3", {}, title));
    card.append(element("div", { class: "key" }), element("div", { class: "chart" }));
    place.append(card);
    cards.push([card, name]);
  }
}

// ---- Controls

/** A select whose change sets a field of `state`. */
function select(text, state, field, choices, changed) {
  const made = element("select", { name: field });
  for (const [value, shown] of choices) made.append(element("option", { value }, shown));
  made.value = state[field];
  made.addEventListener("change", () => {
    state[field] = made.value;
    changed();
  });
  return element("label", {}, text, made);
}

function curveControls() {
  const bar = document.getElementById("curve-controls");
  if (data.runs.length > 1) {
    data.runs.forEach((run, index) => {
      const box = element("input", { type: "checkbox", checked: "" });
      box.addEventListener("change", () => {
        view.hidden[box.checked ? "delete" : "add"](index);
        drawAll();
      });
      bar.append(element("label", { class: "run" }, box, element("i", { style: `color:${color(index)}` }), run.name));
    });
  }
  const axes = [["step", "step"], ["tokens", "tokens"], ["time", "training time"]];
  bar.append(select("x axis", view, "x", axes, wholeRun));
  const scales = [["auto", "automatic"], ["linear", "linear"], ["log", "logarithmic"]];
  bar.append(select("y axis", view, "scale", scales, drawAll));
  const places = { min: 0, max: SMOOTHING.length - 1, value: view.smoothing };
  const slider = element("input", { type: "range", name: "smoothing", ...places });
  const shown = element("output");
  const show = () => {
    const percent = Math.round(SMOOTHING[view.smoothing] * 100);
    shown.textContent = percent ? `${percent} % of the run` : "off";
  };
  slider.addEventListener("input", () => {
    view.smoothing = Number(slider.value);
    show();
    drawAll();
  });
  show();
  bar.append(element("label", {}, "smoothing", slider, shown));
  const whole = element("button", { id: "whole", hidden: "", type: "button" }, "whole run");
  whole.addEventListener("click", wholeRun);
  bar.append(whole);
}

// ---- Completions

const LEGENDS = {
  token_logprobs: "orange: unlikely, full color at 0.7 % or less",
  token_advantages: "green: made more likely by training; red: less likely",
  none: "",
};
const reading = { run: "0", step: 0, colors: "token_logprobs", order: "file" };

/** Background of a token: orange for an unlikely one; green and red for its advantage. */
function tokenColor(kind, value, most) {
  if (!finite(value)) return "";
  const likely = kind === "token_logprobs";
  const share = likely ? -value / 5 : Math.abs(value) / most;
  const sign = value > 0 ? "good" : "bad";
  return `rgba(var(--${likely ? "low" : sign}),${(0.75 * Math.min(share, 1)).toFixed(2)})`;
}

function completionText(row, most) {
  const text = element("div", { class: "text" });
  if (!row.token_texts || reading.colors === "none") {
    text.append(`→ ${row.completion}`);
    return text;
  }
  text.append("→ ");
  row.token_texts.forEach((token, i) => {
    const logprob = row.token_logprobs[i];
    const advantage = row.token_advantages ? row.token_advantages[i] : finite(logprob) ? row.advantage : null;
    const value = reading.colors === "token_logprobs" ? logprob : advantage;
    const percent = (100 * Math.exp(logprob)).toFixed(1);
    const own = `log-probability ${number(logprob)} (${percent} %), advantage ${number(advantage)}`;
    const made = element("span", { class: "token", title: own }, token);
    if (!finite(logprob)) {
      made.className = "token foreign";
      made.title = "not written by the model";
    }
    made.style.background = tokenColor(reading.colors, value, most);
    text.append(made);
  });
  return text;
}

function drawCompletions() {
  const run = data.runs[Number(reading.run)];
  const { step, rows } = run.completions.steps[Math.min(reading.step, run.completions.steps.length - 1)];
  document.getElementById("step").textContent = step.toLocaleString("en");
  const sign = { best: -1, worst: 1 }[reading.order];
  const ordered = sign ? [...rows].sort((a, b) => sign * ((a.reward ?? 0) - (b.reward ?? 0))) : rows;
  const advantages = rows.flatMap((r) => r.token_advantages || [r.advantage]).filter(finite).map(Math.abs);
  const most = Math.max(...advantages, 1e-9);
  const samples = ordered.map((row) => {
    const judged = element("div", { class: "judged" }, element("b", {}, `reward ${number(row.reward)}`));
    judged.append(element("br"), `advantage ${number(row.advantage)}`);
    const single = Object.entries(row.rewards);
    if (single.length > 1) for (const [name, value] of single) judged.append(element("br"), `${name} ${number(value)}`);
    const texts = element("div", {}, element("div", { class: "text prompt" }, row.prompt), completionText(row, most));
    return element("div", { class: "sample" }, judged, texts);
  });
  document.getElementById("samples").replaceChildren(...samples);
  document.getElementById("legend").textContent = rows.some((row) => row.token_texts) ? LEGENDS[reading.colors] : "";
}

function completionControls() {
  const holders = data.runs.map((run, index) => [index, run]).filter(([, run]) => run.completions.steps.length);
  const section = document.getElementById("completions");
  if (!holders.length) {
    section.remove();
    return;
  }
  reading.run = String(holders[0][0]);
  const bar = document.getElementById("completion-controls");
  const slider = element("input", { type: "range", name: "step", min: 0, max: 0 });
  const note = element("span", { id: "note" });
  const legend = element("span", { id: "legend" });
  if (holders.length > 1) bar.append(select("run", reading, "run", holders.map(([i, run]) => [i, run.name]), lastStep));
  slider.addEventListener("input", () => {
    reading.step = Number(slider.value);
    drawCompletions();
  });
  bar.append(element("label", {}, "step", slider, element("output", { id: "step" })));
  const orders = [["file", "as sampled"], ["best", "best reward first"], ["worst", "worst reward first"]];
  bar.append(select("order", reading, "order", orders, drawCompletions));
  const rows = holders.flatMap(([, run]) => run.completions.steps.flatMap((step) => step.rows));
  if (rows.some((row) => row.token_texts)) {
    const colors = [["token_logprobs", "log-probability"], ["token_advantages", "advantage"], ["none", "nothing"]];
    bar.append(select("color tokens by", reading, "colors", colors, drawCompletions));
  }
  bar.append(legend, note);
  lastStep();
}

function lastStep() {
  reading.step = Infinity;
  renewCompletions();
}

/** Adapt the slider to the steps of the chosen run, and draw. Whoever reads the last step gets a new last one. */
function renewCompletions() {
  const slider = document.querySelector("[name=step]");
  if (!slider) return;
  const { steps, of } = data.runs[Number(reading.run)].completions;
  if (reading.step >= Number(slider.max)) reading.step = steps.length - 1;
  slider.max = steps.length - 1;
  slider.value = reading.step;
  const shown = `${steps.length.toLocaleString("en")} of ${of.toLocaleString("en")} steps`;
  document.getElementById("note").textContent = steps.length < of ? `${shown}; completions.jsonl has all` : "";
  drawCompletions();
}

// ---- The page

curveControls();
addCharts(document.getElementById("charts"), data.charts);
addCharts(document.getElementById("further"), data.further);
const further = document.getElementById("further").closest("details");
if (data.further.length) further.addEventListener("toggle", drawAll);
else further.remove();
drawAll();
completionControls();
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) drawAll();
  width = innerWidth;
});
