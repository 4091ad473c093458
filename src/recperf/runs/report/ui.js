// Fills the list and the curves from /api, and again every few seconds. Names are only ever text, never markup.
(() => {
  const rows = document.querySelector("#list tbody"), live = document.getElementById("running");
  const filter = document.getElementById("filter"), compare = document.getElementById("compare");
  const status = document.getElementById("status"), chosen = new Set(), svg = "http://www.w3.org/2000/svg";
  let runs = [];
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  const link = (page, ...names) => `/${page}?${names.map(name => `run=${encodeURIComponent(name)}`).join("&")}`;
  async function ask(path) {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }
  function choose() {
    for (const name of chosen) if (!runs.some(run => run.name === name && run.state === "finished")) chosen.delete(name);
    const ready = chosen.size === 2;
    compare.className = ready ? "" : "off";
    compare.setAttribute("aria-disabled", String(!ready));
    ready ? compare.setAttribute("href", link("compare", ...chosen)) : compare.removeAttribute("href");
    compare.textContent = ready ? "Compare the two" : `Compare two (${chosen.size} chosen)`;
  }
  function row(run) {
    const name = element("th", { scope: "row", class: "left" });
    if (run.state === "finished") {
      const box = element("input", { type: "checkbox", "aria-label": `compare ${run.name}` });
      box.checked = chosen.has(run.name);
      box.disabled = chosen.size === 2 && !box.checked;
      box.addEventListener("change", () => { box.checked ? chosen.add(run.name) : chosen.delete(run.name); list(); });
      name.append(box);
    }
    const page = ["finished", "profile", "bench"].includes(run.state), second = text => text ? [element("span", { class: "second" }, text)] : [];
    name.append(page ? element("a", { href: link("run", run.name) }, run.name) : run.name);
    name.append(...second([run.workload, run.data].filter(Boolean).join(" · ")));
    const state = element("span", { class: `state ${run.state}` }, run.state);
    const cell = (label, kind, ...content) => element("td", { "data-label": label, class: kind }, ...(content.join("") ? [element("span", {}, ...content)] : []));
    const below = [...second(run.date), ...second(run.problem), ...(run.resume ? [element("code", { class: "second" }, run.resume)] : [])];
    return element("tr", { "data-run": run.name }, name, cell("state", "left", state, ...below), cell("quality", "left", run.quality, ...second(run.outcome)),
      cell("speed", "num", run.speed), cell("step", "num", run.step), cell("limit", "left", run.limit));
  }
  function list() {
    choose();
    const words = filter.value.toLowerCase().split(/\s+/), text = run => `${run.name} ${run.workload} ${run.data} ${run.limit} ${run.state}`.toLowerCase();
    rows.replaceChildren(...runs.filter(run => words.every(word => text(run).includes(word))).map(row));
  }
  function plot(title, points) {
    const xs = points.map(point => point[0]), ys = points.map(point => point[1]);
    const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const place = ([x, y]) => `${100 * (x - left) / (right - left || 1)},${96 - 92 * (y - low) / (high - low || 1)}`;
    const picture = document.createElementNS(svg, "svg"), line = document.createElementNS(svg, "polyline");
    const last = `${title} ${ys.at(-1).toPrecision(4)} after step ${Math.round(xs.at(-1)).toLocaleString("en")}`;
    const attributes = { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": last };
    for (const [key, value] of Object.entries(attributes)) picture.setAttribute(key, value);
    line.setAttribute("points", points.map(place).join(" "));
    picture.append(line);
    const range = `${low.toPrecision(3)} to ${high.toPrecision(3)}`;
    return element("figure", {}, picture, element("figcaption", {}, `${last} (${range})`));
  }
  async function curves() {
    const cards = await Promise.all(runs.filter(run => run.state === "running").slice(0, 8).map(async run => {
      const series = Object.entries(await ask(link("api/curves", run.name)));
      const plots = element("div", { class: "plots" }, ...series.map(([title, points]) => plot(title, points)));
      return element("div", { class: "live", "data-run": run.name }, element("h2", {}, run.name), series.length ? plots : "No step yet.");
    }));
    live.replaceChildren(...cards);
  }
  async function refresh() {
    try {
      runs = await ask("/api/runs");
      const busy = rows.contains(document.activeElement) && document.activeElement.type === "checkbox";
      if (!busy) list();
      await curves();
      status.textContent = runs.length === 1 ? "1 run" : `${runs.length} runs`;
    } catch (error) {
      status.textContent = `recperf ui does not answer: ${error.message}`;
    }
    setTimeout(refresh, document.hidden ? 10000 : 3000);
  }
  filter.addEventListener("input", list);
  refresh();
})();
