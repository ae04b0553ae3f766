"use strict";
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const paper = 680; // pixels: what A4 and Letter have between their margins
  const touch = matchMedia("(pointer: coarse)").matches;
  const hidden = new Set();
  let printing = false;

  // Light, dark, or as the system says; remembered where the browser lets a file remember.
  const schemes = ["auto", "light", "dark"];
  const button = document.getElementById("scheme");
  const remembered = (value) => {
    try {
      if (value !== undefined) localStorage.setItem("natgrad-scheme", value);
      return localStorage.getItem("natgrad-scheme");
    } catch {
      return value;
    }
  };
  let scheme = schemes.includes(remembered()) ? remembered() : "auto";
  const show = () => {
    button.textContent = `Colours: ${scheme}`;
    root.dataset.scheme = printing ? "light" : scheme;
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    scheme = schemes[(schemes.indexOf(scheme) + 1) % schemes.length];
    remembered(scheme);
    show();
    drawAll();
  });
  show();

  // The names of colours in the figures become what the style sheet says now.
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  const colour = (text) => {
    const [, name, share] = /^@(\w+)(?:\/([\d.]+))?$/.exec(text) || [];
    if (!name) return text;
    probe.style.color = `var(--${name})`;
    const [red, green, blue] = getComputedStyle(probe).color.match(/[\d.]+/g);
    return `rgba(${red},${green},${blue},${share ?? 1})`;
  };
  const coloured = (value) => {
    if (typeof value === "string") return value[0] === "@" ? colour(value) : value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, coloured(one)]));
  };

  const put = (layout, path, value) => {
    const keys = path.split(/[.[\]]+/).filter(Boolean);
    const last = keys.pop();
    keys.reduce((inside, key) => inside[key], layout)[last] = value;
  };
  const specification = (figure, width, narrow) => {
    const { data, layout } = coloured({ data: figure.data, layout: figure.layout });
    for (const [path, value] of Object.entries(narrow ? figure.narrow : {})) put(layout, path, coloured(value));
    for (const trace of data) if (hidden.has(trace.legendgroup)) trace.visible = false;
    const height = narrow ? figure.narrowHeight : figure.height;
    return { data, layout: { ...layout, width, height, uirevision: "same", dragmode: touch ? false : "zoom" } };
  };
  const isNarrow = () => !printing && matchMedia("(max-width: 40rem)").matches;

  const plot = (name) => document.querySelector(`#figure-${name} .plot`);
  const draw = (name) => {
    const place = plot(name);
    const width = printing ? paper : place.clientWidth;
    if (!width) return;
    const { data, layout } = specification(figures[name], width, isNarrow());
    Plotly.react(place, data, layout, { displayModeBar: false, displaylogo: false, doubleClick: "reset", showTips: false });
    place.parentElement.classList.add("drawn");
  };
  const drawAll = () => typeof Plotly !== "undefined" && Object.keys(figures).forEach(draw);

  // The library is packed to a third of its size.
  try {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    drawAll();
  } catch (error) {
    for (const name of Object.keys(figures)) {
      plot(name).classList.add("failed");
      plot(name).textContent = "This browser cannot draw the figures; one of 2023 or later can.";
    }
    console.error(error);
    return;
  }

  // A picture that leaves the page takes its title and its legend along.
  const save = (name, format) => {
    const figure = figures[name];
    const { data, layout } = specification(figure, 1100, false);
    const legend = data.some((trace) => trace.showlegend !== false && trace.name);
    const more = legend ? 64 : 34;
    const top = layout.margin.t + more;
    const height = layout.height + more;
    Object.assign(layout, {
      title: { text: figure.title, x: 0.012, xanchor: "left", yref: "paper", y: 1, yanchor: "bottom", pad: { b: top - 36 }, font: { size: 16 } },
      margin: { ...layout.margin, t: top },
      height,
      showlegend: legend,
    });
    layout.legend = { ...layout.legend, yref: "container", y: 1 - 42 / layout.height, yanchor: "top" };
    const file = `natgrad-${name}`;
    return Plotly.downloadImage({ data, layout }, { format, filename: file, width: 1100, height: layout.height, scale: 2 });
  };
  for (const one of document.querySelectorAll("[data-save]")) {
    const name = one.closest("figure").id.replace("figure-", "");
    one.addEventListener("click", () => save(name, one.dataset.save));
  }

  for (const one of document.querySelectorAll("[data-contender]")) {
    one.addEventListener("click", () => {
      const group = one.dataset.contender;
      if (!hidden.delete(group)) hidden.add(group);
      for (const same of document.querySelectorAll(`[data-contender="${group}"]`)) {
        same.setAttribute("aria-pressed", String(!hidden.has(group)));
      }
      drawAll();
    });
  }

  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width || printing) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 80);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  // On paper: light, as wide as the sheet, and nothing folded.
  let opened = [];
  const print = (on) => {
    if (on === printing) return;
    printing = on;
    if (on) opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = on;
    show();
    drawAll();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
})();
