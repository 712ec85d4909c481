// Start of the page, keys, and the address of the current trajectory.
"use strict";

(() => {
  const { element } = viewer;
  const search = document.getElementById("search");
  const keys = document.getElementById("keys");

  // Show an error message.
  viewer.fail = (error) => {
    const line = element("p", { class: "error", role: "alert" }, error.message);
    document.getElementById("trajectory").replaceChildren(line);
  };

  // Keep trajectory and turn in the address, so that it can be shared.
  viewer.remember = (id, turn) => {
    try { history.replaceState(null, "", `#${id}.${turn + 1}`); } catch { /* some browsers refuse it for files */ }
  };

  const TINTS = ["gap", "advantage", "ratio", "none"];
  const ACTIONS = {
    j: () => viewer.move(1),
    k: () => viewer.move(-1),
    n: () => viewer.moveTurn(1),
    p: () => viewer.moveTurn(-1),
    c: () => viewer.toggleBeside(),
    h: () => document.getElementById("prompts").click(),
    t: () => {
      const now = document.querySelector("[name=tint]:checked").value;
      document.querySelector(`[name=tint][value=${TINTS[(TINTS.indexOf(now) + 1) % TINTS.length]}]`).click();
    },
    "/": () => { search.focus(); search.select(); },
    "?": () => keys.showModal(),
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || keys.open) return;
    if (event.key === "Escape" && document.activeElement === search) { document.getElementById("list").focus(); return; }
    const typing = event.target.closest("input:not([type=radio], [type=checkbox]), select, textarea");
    const action = ACTIONS[event.key];
    if (typing || !action || !document.getElementById("single-keys").checked) return;
    event.preventDefault();
    action();
  });
  document.getElementById("keys-button").addEventListener("click", () => keys.showModal());

  async function start() {
    viewer.about = await viewer.load("about", 0);
    const { about } = viewer;
    document.title = `Trajectories: ${about.runs.join(" and ")}`;
    document.getElementById("about").textContent = `${about.runs.join(" and ")} · ${about.count.toLocaleString("en")} trajectories`;
    if (about.notes.length) {
      const notes = document.getElementById("notes");
      notes.hidden = false;
      notes.querySelector("ul").append(...about.notes.map((note) => element("li", {}, note)));
    }
    document.getElementById("more").open = window.innerWidth >= 900;
    const [, id, turn] = /^#(\d+)\.(\d+)$/.exec(location.hash) ?? [];
    viewer.rows = await viewer.readIndex(0);
    // The first rows, and the first trajectory, are shown before the others are read.
    const early = id === undefined && about.index_files > 1;
    if (early) viewer.startList(0, 0);
    for (let index = 1; index < about.index_files; index++) viewer.rows = viewer.rows.concat(await viewer.readIndex(index));
    viewer.fillFilters();
    if (early) {
      viewer.refreshList();
      viewer.refreshBeside();
    } else viewer.startList(Math.min(Number(id ?? 0), about.count - 1), Number(turn ?? 1) - 1);
    document.documentElement.dataset.ready = "yes";
  }

  viewer.complete = start().catch(viewer.fail);
})();
