"use strict";
// Draws the charts of the page out of the JSON in it. Texts of runs reach Plotly escaped, since it reads some tags in them.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const plots = [...document.querySelectorAll("[data-chart]")];
  const charts = Object.fromEntries(data.charts.map((chart) => [chart.name, chart]));
  const form = document.getElementById("choices");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 40rem)");

  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (text, length) => escaped(text.length > length ? text.slice(0, length - 1) + "…" : text);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const groupColour = (index) => colour("c" + (index % 8));
  const faint = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");
  const dashes = ["solid", "dash", "dot", "dashdot"];

  async function loadLibrary() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  }

  function shown() {
    if (!form) return { group: () => true, single: true };
    const on = new Set([...form.querySelectorAll("[name=group]:checked")].map((box) => Number(box.value)));
    const single = form.querySelector("[name=single]");
    return { group: (index) => on.has(index), single: !single || single.checked };
  }

  function baseLayout(chart) {
    const axis = {
      gridcolor: colour("grid"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true, fixedrange: false,
    };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("text"), size: 12 },
      margin: { l: 55, r: 12, t: 32, b: 40 }, hoverlabel: { bgcolor: colour("page"), font: { color: colour("text") } },
      legend: { orientation: "h", yref: "container", yanchor: "bottom", y: 0, x: 0, traceorder: "normal" }, showlegend: false,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("quiet"), activecolor: colour("link") },
      xaxis: { ...axis }, yaxis: { ...axis, title: { text: escaped(chart.axis) } },
    };
  }

  function drawCurve(chart, show) {
    const layout = baseLayout(chart);
    const form = chart.percent ? ".1%" : ".4~g";
    const traces = [];
    for (const series of chart.series) {
      if (!show.group(series.group)) continue;
      const hex = groupColour(series.group);
      const several = series.runs.length > 1;
      if (series.low) {
        traces.push({
          x: [...series.x, ...[...series.x].reverse()], y: [...series.high, ...[...series.low].reverse()], fill: "toself",
          fillcolor: faint(hex, 0.2), line: { width: 0 }, mode: "lines", hoverinfo: "skip", type: "scatter",
        });
      }
      if (several && show.single) {
        for (const run of series.runs) {
          traces.push({
            x: run.x, y: run.y, mode: "lines", type: "scatter", line: { color: faint(hex, 0.45), width: 1 },
            hovertemplate: `${short(series.name, 40)}, ${short(run.name, 30)}: %{y:${form}}<extra></extra>`,
          });
        }
      }
      const line = several ? series : { x: series.runs[0].x, mean: series.runs[0].y };
      const band = series.low && series.low.map((low, index) => [low, series.high[index]]);
      const interval = band ? ` [%{customdata[0]:${form}}, %{customdata[1]:${form}}]` : "";
      traces.push({
        x: line.x, y: line.mean, customdata: band, name: short(series.name, 40), type: "scatter",
        mode: line.x.length > 40 ? "lines" : "lines+markers", marker: { size: 5 },
        line: { color: hex, width: 2, dash: dashes[Math.floor(series.group / 8) % 4] },
        hovertemplate: `${short(series.name, 40)}: %{y:${form}}${interval}<extra></extra>`,
      });
    }
    layout.hovermode = "x unified";
    layout.xaxis.title = { text: "iteration" };
    layout.xaxis.hoverformat = "~g";
    if (data.iterations <= 12) layout.xaxis.dtick = 1;
    layout.xaxis.range = [Math.min(0.5, ...traces.flatMap((trace) => trace.x.map((x) => x - 0.5))), data.iterations + 0.5];
    layout.yaxis.tickformat = chart.percent ? ".1~%" : "";
    layout.yaxis.rangemode = chart.percent ? "tozero" : "normal";
    layout.shapes = [];
    if (chart.warm_up.length) {
      const first = Math.min(...chart.warm_up);
      layout.shapes.push({
        type: "rect", x0: layout.xaxis.range[0], x1: first - 0.5, y0: 0, y1: 1, yref: "paper", fillcolor: colour("shade"), line: { width: 0 },
        layer: "below",
      });
      for (const start of chart.warm_up) {
        layout.shapes.push({
          type: "line", x0: start - 0.5, x1: start - 0.5, y0: 0, y1: 1, yref: "paper",
          line: { color: colour("quiet"), width: 1, dash: "dash" },
        });
      }
      layout.annotations = [{
        x: layout.xaxis.range[0], y: 1, yref: "paper", xanchor: "left", yanchor: "bottom", text: "warm-up", showarrow: false,
        font: { size: 11, color: colour("quiet") },
      }];
      }
    return [traces, layout];
  }

  function drawClasses(chart, show) {
    const layout = baseLayout(chart);
    const traces = chart.series.filter((series) => show.group(series.group)).map((series) => ({
      type: "bar", x: chart.classes.map((name) => escaped(name.replace("/", "/\u200b"))), y: series.mean, name: short(series.name, 40),
      marker: { color: groupColour(series.group) }, customdata: series.trajectories,
      error_y: { type: "data", array: series.sem.map((sem) => sem || 0), color: colour("text"), thickness: 1.2, width: 4 },
      hovertemplate: `${short(series.name, 40)}, %{x}: %{y:.3f} (%{customdata} trajectories)<extra></extra>`,
    }));
    layout.shapes = [{
      type: "line", x0: 0, x1: 1, xref: "paper", y0: 1, y1: 1, line: { color: colour("quiet"), width: 1, dash: "dash" },
    }];
    layout.yaxis.rangemode = "tozero";
    layout.barmode = "group";
    return [traces, layout];
  }

  function drawProfile(chart) {
    const layout = baseLayout(chart);
    const length = narrow.matches ? 16 : 26;
    const traces = chart.classes.map((name, index) => {
      const turns = chart.turns.map((turn, at) => [turn, at]).filter(([turn]) => turn.class === name);
      return {
        type: "bar", orientation: "h", width: 0.75, name: escaped(name), marker: { color: groupColour(index) },
        x: turns.map(([turn]) => turn.weight), y: turns.map(([, at]) => at),
        customdata: turns.map(([turn, at]) => [at + 1, short(turn.action, 60), turn.score, turn.tokens, short(turn.outcome, 80)]),
        hovertemplate: "turn %{customdata[0]}: %{customdata[1]}<br>multiplier %{x:.3f}, score %{customdata[2]:.3f} nats, " +
          "%{customdata[3]} tokens<br>%{customdata[4]}<extra></extra>",
      };
    }).filter((trace) => trace.x.length);
    layout.barmode = "overlay";
    layout.showlegend = true;
    layout.height = (narrow.matches ? 180 : 150) + 24 * chart.turns.length;
    layout.xaxis.title = { text: escaped(chart.axis) };
    layout.yaxis = {
      ...layout.yaxis, title: { text: "" }, autorange: "reversed", tickvals: chart.turns.map((_, at) => at),
      ticktext: chart.turns.map((turn, at) => `T${at + 1} ${short(turn.action, length)}`), showgrid: false,
    };
    layout.shapes = [{
      type: "line", x0: 1, x1: 1, y0: 0, y1: 1, yref: "paper", line: { color: colour("quiet"), width: 1, dash: "dash" },
    }];
    return [traces, layout];
  }

  function drawTime(chart, show) {
    const layout = baseLayout(chart);
    const rows = chart.rows.map((name, at) => [name, at]).filter(([, at]) => show.group(chart.groups[at]));
    const traces = chart.series.map((series, index) => ({
      type: "bar", orientation: "h", name: escaped(series.name), marker: { color: groupColour(index) },
      y: rows.map(([, at]) => at), x: rows.map(([, at]) => series.values[at]),
      hovertemplate: `${escaped(series.name)}: %{x:.1f} s<extra></extra>`,
    }));
    layout.barmode = "stack";
    layout.showlegend = true;
    layout.height = (narrow.matches ? 290 : 160) + 30 * rows.length;
    layout.xaxis.title = { text: escaped(chart.axis) };
    layout.yaxis = {
      ...layout.yaxis, title: { text: "" }, autorange: "reversed", showgrid: false,
      tickvals: rows.map(([, at]) => at), ticktext: rows.map(([name]) => short(name, narrow.matches ? 16 : 40)),
    };
    return [traces, layout];
  }

  const draw = { curve: drawCurve, classes: drawClasses, profile: drawProfile, time: drawTime };

  function drawAll() {
    const show = shown();
    for (const swatch of document.querySelectorAll(".swatch")) {
      swatch.style.backgroundColor = groupColour(Number(swatch.dataset.group));
    }
    for (const plot of plots) {
      const chart = charts[plot.dataset.chart];
      const [traces, layout] = draw[chart.kind](chart, show);
      if (layout.height) plot.style.minHeight = layout.height + "px";
      Plotly.react(plot, traces, layout, {
        responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
        toImageButtonOptions: { filename: chart.name, format: "svg" },
      });
    }
  }

  try {
    await loadLibrary();
    drawAll();
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    document.getElementById("no-charts").hidden = false;
    throw error;
  }
  if (form) {
    form.hidden = false;
    form.addEventListener("change", drawAll);
    form.addEventListener("submit", (event) => event.preventDefault());
  }
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
})();
