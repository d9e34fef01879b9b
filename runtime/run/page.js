"use strict";
// The page's own script: it draws the curves from the data in the page, with another axis, scale or
// smoothing where asked, shows values under the pointer, and renews a page that is served.
// All texts of a run become text nodes: nothing that a run wrote is taken for markup.
(() => {
  const NUM_COLOURS = 6, DASHES = ["", "6 3", "2 2", "7 2 2 2"];
  const HEIGHT = 300, RIGHT = 16, TOP = 10, BOTTOM = 40, DIGIT = 7, SPARSE = 20, MOST_SHOWN = 12;
  const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];
  const view = { axis: "step", log: false, smoothing: 0 };
  let data = { charts: [], clocks: [] };

  function element(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function svg(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // Seconds of training after that step, between those that were recorded.
  function secondsAt(clock, step) {
    const [steps, seconds] = data.clocks[clock];
    let low = 0, high = steps.length - 1;
    if (step <= steps[0]) return steps[0] ? seconds[0] * step / steps[0] : seconds[0];
    if (step >= steps[high]) return seconds[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return seconds[low] + (seconds[high] - seconds[low]) * (step - steps[low]) / (steps[high] - steps[low]);
  }

  function hasClock(line) {
    const clock = data.clocks[line.clock];
    return Boolean(clock && clock[0].length);
  }

  // An exponential moving average that starts at the first value.
  function smoothed(values) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = view.smoothing * sum + (1 - view.smoothing) * value;
      weight = view.smoothing * weight + (1 - view.smoothing);
      return sum / weight;
    });
  }

  function figures(value, digits) {
    if (value === 0) return "0";
    for (const [unit, scale] of [["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (Math.abs(value) >= scale && Math.abs(value) < 1e12) return Number((value / scale).toPrecision(digits)) + unit;
    return String(Number(value.toPrecision(digits))).replace("e+", "e");
  }

  function labels(values) {
    for (let digits = 4; ; digits++) {
      const found = values.map((value) => figures(value, digits));
      if (new Set(found).size === found.length || digits === 10) return found;
    }
  }

  function duration(seconds, step) {
    const two = (number) => String(Math.floor(number)).padStart(2, "0");
    if (step >= 86400) return figures(seconds / 86400, 4);
    const hours = `${Math.floor(seconds / 3600)}:${two(seconds / 60 % 60)}`;
    return step >= 60 ? hours : `${hours}:${two(seconds % 60)}`;
  }

  function roundStep(wanted, kind) {
    if (kind === "time" && wanted <= 43200) return SECONDS.find((each) => each >= wanted * 0.75);
    const unit = kind === "time" ? 86400 : 1;
    const power = 10 ** Math.floor(Math.log10(wanted / unit));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= wanted / unit * 0.75);
    return kind === "value" ? step : Math.max(1, step) * unit;
  }

  // Values to places on the page, and the round values between that are named.
  function scale(values, first, last, kind) {
    if (kind === "log") {
      const inner = scale(values.map(Math.log10), first, last, "value");
      return { at: (value) => inner.at(Math.log10(value)), ticks: logTicks(inner.low, inner.high), unit: "" };
    }
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    if (low > high) [low, high] = [0, 1];
    let margin = (high - low) / 20;
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (margin <= size * 1e-9) margin = Math.max(kind === "value" ? 0.1 : 1, size / 10);
    low -= margin; high += margin;
    const step = roundStep((high - low) / 5, kind), ticks = [];
    for (let number = Math.ceil(low / step); number * step <= high && ticks.length < 12; number++) ticks.push(number * step);
    const texts = kind === "time" ? ticks.map((tick) => duration(tick, step)) : labels(ticks);
    const unit = step >= 86400 ? "days" : step >= 60 ? "h:mm" : "h:mm:ss";
    return {
      low, high, unit, at: (value) => first + (value - low) / (high - low) * (last - first),
      ticks: ticks.map((tick, index) => [tick, texts[index]]).filter(([tick]) => kind !== "time" || tick >= 0),
    };
  }

  function logTicks(low, high) {
    const found = [], every = Math.ceil((high - low) / 8);
    const parts = high - low < 2 ? [1, 2, 5] : [1];
    for (let power = Math.floor(low); power <= high; power++)
      for (const part of parts) {
        const value = part * 10 ** power;
        if (power % every === 0 && Math.log10(value) >= low && Math.log10(value) <= high) found.push(value);
      }
    if (found.length < 2) {
      const step = roundStep((10 ** high - 10 ** low) / 5, "value");
      found.length = 0;
      for (let number = Math.ceil(10 ** low / step); number * step <= 10 ** high && found.length < 12; number++) found.push(number * step);
    }
    const texts = labels(found);
    return found.map((value, index) => [value, texts[index]]);
  }

  function pen(line, index) {
    const number = line.colour === null ? index : line.colour;
    const dashes = DASHES[Math.floor(number / NUM_COLOURS) % DASHES.length];
    return { stroke: `var(--line-${1 + number % NUM_COLOURS})`, ...(dashes && { "stroke-dasharray": dashes }) };
  }

  // The lines as they are to be drawn: places across, values, and smoothed values.
  function prepared(chart) {
    const byTime = view.axis === "time";
    const lines = chart.lines.filter((line) => !byTime || hasClock(line));
    const positive = lines.some((line) => line.values.some((value) => value > 0));
    const log = view.log && positive;
    const drawable = (value) => (value === null || (log && value <= 0) ? null : value);
    const places = (line) => (byTime ? line.steps.map((step) => secondsAt(line.clock, step)) : line.steps);
    return {
      log, byTime,
      lines: lines.map((line) => {
        const raw = line.values.map(drawable), smooth = view.smoothing > 0 && raw.length > 2;
        return { line, index: chart.lines.indexOf(line), x: places(line), raw, y: smooth ? smoothed(raw) : raw, smooth };
      }),
    };
  }

  function pathOf(x, y, across, up) {
    let text = "", penIsUp = true;
    y.forEach((value, place) => {
      if (value === null) { penIsUp = true; return; }
      text += `${penIsUp ? "M" : "L"}${across.at(x[place]).toFixed(1)} ${up.at(value).toFixed(1)}`;
      penIsUp = false;
    });
    return text;
  }

  // All below a line; the areas of the lines before it are drawn over it.
  function area(x, y, across, up, bottom, fill) {
    const places = x.map((at, place) => [across.at(at), y[place]]).filter(([, value]) => value !== null);
    const edge = places.map(([at, value]) => `L${at.toFixed(1)} ${up.at(value).toFixed(1)}`).join("");
    const floor = Math.min(bottom, up.at(0) || bottom);
    const [first, last] = places.length ? [places[0][0], places[places.length - 1][0]] : [0, 0];
    return svg("path", { d: `M${first} ${floor}${edge}L${last} ${floor}Z`, fill });
  }

  function draw(figure, chart) {
    const old = figure.querySelector("svg.chart");
    const width = Math.max(240, old.getBoundingClientRect().width || 500), bottom = HEIGHT - BOTTOM;
    const { lines, log, byTime } = prepared(chart);
    const finite = lines.flatMap((each) => each.raw.filter((value) => value !== null));
    if (chart.stacked && !log) finite.push(0);
    const up = scale(finite, bottom, TOP, log ? "log" : "value");
    const left = 14 + DIGIT * Math.max(0, ...up.ticks.map(([, text]) => text.length));
    const across = scale(lines.flatMap((each) => each.x), left, width - RIGHT, byTime ? "time" : "step");
    const drawing = svg("svg", {
      class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": chart.title,
      "font-family": "sans-serif", "font-size": 12, fill: "currentColor",
    });
    const grid = { stroke: "currentColor", "stroke-width": 0.5, opacity: 0.15 };
    let free = 0;
    for (const [tick, text] of across.ticks) {
      const half = DIGIT * text.length / 2, middle = Math.min(across.at(tick), width - half);
      drawing.append(svg("path", { d: `M${across.at(tick)} ${TOP}V${bottom}`, ...grid }));
      if (middle - half < free) continue;
      free = middle + half + DIGIT;
      drawing.append(svg("text", { x: middle, y: bottom + 16, "text-anchor": "middle" }, text));
    }
    for (const [tick, text] of up.ticks) {
      const y = up.at(tick);
      drawing.append(svg("path", { d: `M${left} ${y}H${width - RIGHT}`, ...grid }));
      drawing.append(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, text));
    }
    drawing.append(svg("path", { d: `M${left} ${TOP}V${bottom}H${width - RIGHT}`, fill: "none", stroke: "currentColor" }));
    const title = byTime ? `time of running (${across.unit})` : "step";
    drawing.append(svg("text", { x: (left + width - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, title));
    for (const { line, index, x, raw, y, smooth } of chart.stacked ? [...lines].reverse() : lines) {
      if (chart.stacked) drawing.append(area(x, y, across, up, bottom, pen(line, index).stroke));
      const colour = pen(line, index), look = { fill: "none", "stroke-width": 1.5, ...colour };
      if (smooth) drawing.append(svg("path", { d: pathOf(x, raw, across, up), ...look, opacity: 0.25 }));
      drawing.append(svg("path", { d: pathOf(x, y, across, up), ...look }));
      if (x.length <= SPARSE)
        y.forEach((value, place) => value !== null && drawing.append(
          svg("circle", { cx: across.at(x[place]), cy: up.at(value), r: 2.5, fill: colour.stroke })));
      if (line.best && (!log || line.best[1] > 0)) {
        const [step, value] = line.best, place = byTime ? secondsAt(line.clock, step) : step;
        drawing.append(svg("circle", {
          class: "best", cx: across.at(place), cy: up.at(value), r: 5, fill: "none", stroke: colour.stroke, "stroke-width": 2,
        }));
      }
    }
    old.replaceWith(drawing);
    hover(figure, drawing, lines, across, up, width, left, chart.stacked);
  }

  // Values under the pointer: those of each line that are nearest to it.
  function hover(figure, drawing, lines, across, up, width, left, stacked) {
    figure.querySelector(".tip")?.remove();
    const tip = element("div", { class: "tip", hidden: "" });
    const rule = svg("path", { stroke: "currentColor", opacity: 0.5, d: "" }), dots = svg("g", {});
    drawing.append(rule, dots);
    figure.append(tip);
    const leave = () => { tip.hidden = true; rule.setAttribute("d", ""); dots.replaceChildren(); };
    const nearest = ({ x, y }, pointer) => {
      let found = -1, gap = Infinity;
      y.forEach((value, place) => {
        const away = value === null ? Infinity : Math.abs(across.at(x[place]) - pointer);
        if (away < gap) [found, gap] = [place, away];
      });
      return found;
    };
    const move = (event) => {
      const box = drawing.getBoundingClientRect(), ratio = width / box.width;
      const pointer = (event.clientX - box.left) * ratio, height = (event.clientY - box.top) * ratio;
      const seen = lines.map((each) => ({ ...each, place: nearest(each, pointer) })).filter((each) => each.place >= 0)
        .map((each) => ({ ...each, cx: across.at(each.x[each.place]), cy: up.at(each.y[each.place]) }));
      if (!seen.length) return leave();
      const at = seen.reduce((best, each) => (Math.abs(each.cx - pointer) < Math.abs(best.cx - pointer) ? each : best));
      const near = seen.filter((each) => Math.abs(each.cx - at.cx) < width / 15)
        .sort((one, other) => Math.abs(one.cy - height) - Math.abs(other.cy - height)).slice(0, MOST_SHOWN);
      const step = at.line.steps[at.place];
      const time = hasClock(at.line) ? `, ${duration(secondsAt(at.line.clock, step), 1)}` : "";
      tip.replaceChildren(element("div", { class: "at" }, `step ${step}${time}`));
      dots.replaceChildren();
      for (const each of near) {
        const under = stacked && lines[lines.findIndex(({ line }) => line === each.line) - 1];
        const below = under ? under.raw[nearest(under, each.cx)] : 0;
        const value = each.raw[each.place] - below, colour = pen(each.line, each.index);
        const more = each.smooth ? ` (smoothed ${figures(each.y[each.place], 5)})` : "";
        const other = each.line.steps[each.place] === step ? "" : ` at step ${each.line.steps[each.place]}`;
        const sample = svg("svg", { class: "sample", viewBox: "0 0 20 10" }, svg("path", { d: "M0 5h20", "stroke-width": 2, ...colour }));
        tip.append(element("div", {}, sample, ` ${each.line.name}: ${figures(value, 6)}${more}${other}`));
        dots.append(svg("circle", { cx: each.cx, cy: each.cy, r: 3.5, fill: colour.stroke }));
      }
      rule.setAttribute("d", `M${at.cx} ${TOP}V${HEIGHT - BOTTOM}`);
      tip.hidden = false;
      const onLeft = at.cx > (left + width) / 2;
      const room = figure.clientWidth;
      tip.style.left = onLeft ? "auto" : `${at.cx / ratio + 24}px`;
      tip.style.right = onLeft ? `${room - at.cx / ratio + 6}px` : "auto";
      tip.style.maxWidth = `${(onLeft ? at.cx / ratio : room - at.cx / ratio) - 30}px`;
      tip.style.top = `${box.top - figure.getBoundingClientRect().top + 12}px`;
    };
    drawing.addEventListener("pointermove", move);
    drawing.addEventListener("pointerdown", move);
    drawing.addEventListener("pointerleave", leave);
  }

  function drawAll() {
    document.querySelectorAll("figure[data-chart]").forEach((figure) => {
      const chart = data.charts[Number(figure.dataset.chart)];
      if (chart) draw(figure, chart);
    });
  }

  function begin() {
    const held = document.getElementById("curves-data");
    data = held ? JSON.parse(held.textContent) : { charts: [], clocks: [] };
    const controls = document.getElementById("controls");
    if (controls) {
      controls.hidden = false;
      const clocked = data.charts.some((chart) => chart.lines.some(hasClock));
      const [step, time] = controls.elements.axis;
      time.disabled = !clocked;
      if (!clocked) view.axis = "step";
      (view.axis === "time" ? time : step).checked = true;
      controls.elements.log.checked = view.log;
      controls.elements.smoothing.value = view.smoothing;
      controls.addEventListener("submit", (event) => event.preventDefault());
      controls.addEventListener("input", () => {
        view.axis = controls.elements.axis.value;
        view.log = controls.elements.log.checked;
        view.smoothing = Number(controls.elements.smoothing.value);
        drawAll();
      });
    }
    drawAll();
    ages();
  }

  // Times of the page by the reader's clock, and how long ago they are.
  function ages() {
    document.querySelectorAll("time[data-at]").forEach((each) => {
      const at = Number(each.dataset.at), ago = Math.max(0, Date.now() / 1000 - at);
      const day = new Date(at * 1000), today = day.toDateString() === new Date().toDateString();
      each.textContent = `${today ? day.toLocaleTimeString() : day.toLocaleString()} (${duration(ago, 1)} ago)`;
    });
  }

  // A page that is served is renewed in its place: what the reader chose and where they are stays.
  const every = Number(document.body.dataset.every), state = document.getElementById("state");
  let shown = null, answered = Date.now();

  function isInUse() {
    const selection = window.getSelection();
    return Boolean(document.querySelector("#controls :active") || (selection && !selection.isCollapsed));
  }

  function renew(text) {
    const page = new DOMParser().parseFromString(text, "text/html"), fresh = page.querySelector("main");
    if (!fresh) return;
    const focus = document.activeElement && document.activeElement.id;
    const scrolled = [...document.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
    const { scrollX, scrollY } = window;
    document.title = page.title;
    document.querySelector("main").replaceWith(document.adoptNode(fresh));
    begin();
    document.querySelectorAll(".scroll").forEach((each, place) => { each.scrollLeft = scrolled[place] || 0; });
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    window.scrollTo(scrollX, scrollY);
  }

  async function look() {
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(30000) });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const text = await answer.text();
      answered = Date.now();
      state.textContent = "";
      if (text !== shown && !isInUse()) {
        renew(text);
        shown = text;
      }
    } catch (error) {
      state.textContent = `No answer for ${duration((Date.now() - answered) / 1000, 1)}: is drivetrain watch still running?`;
    }
    setTimeout(look, every * 1000);
  }

  begin();
  setInterval(ages, 1000);
  let drawnWidth = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== drawnWidth) { drawnWidth = window.innerWidth; drawAll(); }
  });
  if (every > 0 && location.protocol.startsWith("http")) setTimeout(look, every * 1000);
})();
