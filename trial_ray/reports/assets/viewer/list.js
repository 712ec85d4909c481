// The list of trajectories: filters, order, and the visible rows.
"use strict";

(() => {
  const { element, number } = viewer;
  const ROW_HEIGHT = 58;
  const form = document.getElementById("filters");
  const search = document.getElementById("search");
  const list = document.getElementById("list");
  const inner = document.getElementById("rows");
  const status = document.getElementById("status");

  let shown = [];
  let found = null;
  let selected = -1;

  const ORDERS = {
    disagreement: (row) => row.disagreement,
    advantage: (row) => row.advantage,
    return: (row) => row.return,
    turns: (row) => row.turns,
  };

  function option(select, value, label) {
    select.append(element("option", { value }, label));
  }

  // Fill the choices when the whole index has been read.
  viewer.fillFilters = () => {
    const { rows, about } = viewer;
    for (const field of ["iteration", "family"]) {
      const values = [...new Set(rows.map((row) => row[field]))];
      values.sort((a, b) => (a < b ? -1 : 1)).filter((value) => value !== "").forEach((value) => option(form.elements[field], value, value));
    }
    const classes = rows.reduce((bits, row) => bits | row.classes, 0);
    about.classes.forEach((name, index) => { if (classes >> index & 1) option(form.elements.class, index, name); });
    document.getElementById("class-filter").hidden = !classes;
    const played = about.runs.map(() => new Set());
    rows.forEach((row) => played[row.run].add(row.environment + "\n" + row.task));
    viewer.tasksOfBoth = new Set([...played[0]].filter((task) => played.every((tasks) => tasks.has(task))));
    if (about.runs.length > 1) {
      about.runs.forEach((name, index) => option(form.elements.run, index, name));
      document.getElementById("run-filter").hidden = document.getElementById("paired-filter").hidden = false;
    }
    for (const [name, needed] of [["disagreement", "disagreement"], ["advantage", "advantage"]]) {
      const missing = rows.every((row) => row[needed] === null);
      const choice = form.elements.order.querySelector(`[value=${name}]`);
      choice.disabled = missing;
      if (missing) choice.append(" (not recorded)");
    }
  };

  // The class of action of the filter, or null.
  viewer.filteredClass = () => (form.elements.class.value === "" ? null : Number(form.elements.class.value));
  viewer.query = () => search.value.trim().toLowerCase();

  function apply() {
    const chosen = Object.fromEntries(["run", "iteration", "task", "family", "success", "class", "order"]
      .map((name) => [name, form.elements[name].value]));
    const task = chosen.task.trim().toLowerCase();
    const paired = form.elements.paired.checked;
    shown = [];
    viewer.rows.forEach((row, id) => {
      if (chosen.run !== "" && row.run !== Number(chosen.run)) return;
      if (chosen.iteration !== "" && row.iteration !== Number(chosen.iteration)) return;
      if (chosen.family !== "" && row.family !== chosen.family) return;
      if (chosen.success !== "" && row.success !== Number(chosen.success)) return;
      if (chosen.class !== "" && !(row.classes >> Number(chosen.class) & 1)) return;
      if (task && !row.task.toLowerCase().includes(task)) return;
      if (paired && !viewer.tasksOfBoth.has(row.environment + "\n" + row.task)) return;
      if (found && !found.has(id)) return;
      shown.push(id);
    });
    const value = ORDERS[chosen.order];
    // Trajectories without the number come last in every order.
    if (value) shown.sort((a, b) => (value(viewer.rows[b]) ?? -Infinity) - (value(viewer.rows[a]) ?? -Infinity) || a - b);
    const active = ["run", "iteration", "task", "family", "success", "class"].filter((name) => chosen[name] !== "").length + paired;
    document.getElementById("active-filters").textContent = active ? `(${active} on)` : "";
    tell(`${shown.length.toLocaleString("en")} of ${viewer.about.count.toLocaleString("en")} trajectories`);
    list.scrollTop = 0;
    draw();
    if (!shown.includes(selected)) viewer.select(shown.length ? shown[0] : -1);
    else reveal();
  }

  function tell(text) {
    if (status.textContent !== text) status.textContent = text;
  }

  // Draw the visible rows and a few around them; the inner element has the height of all rows.
  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 4);
    const last = Math.min(shown.length, first + Math.ceil((list.clientHeight || 600) / ROW_HEIGHT) + 8);
    inner.style.height = `${shown.length * ROW_HEIGHT}px`;
    inner.replaceChildren(...shown.slice(first, last).map((id, index) => rowElement(id, first + index)));
    const chosen = document.getElementById(`row-${selected}`);
    if (chosen) list.setAttribute("aria-activedescendant", chosen.id); else list.removeAttribute("aria-activedescendant");
  }

  function rowElement(id, position) {
    const row = viewer.rows[id];
    const failed = row.ended === "failed";
    const mark = failed ? "failed" : row.success ? "succeeded" : "did not succeed";
    const made = element("div", {
      role: "option", id: `row-${id}`, "aria-selected": id === selected, "aria-posinset": position + 1,
      "aria-setsize": shown.length, class: "row", "data-id": id,
    },
    element("span", { class: `mark ${failed ? "failed" : row.success ? "won" : "lost"}`, title: mark },
      failed ? "!" : row.success ? "✓" : "✗"),
    element("span", { class: "unseen" }, `${mark}, `),
    element("bdi", { class: "task", title: row.task }, row.task || "(no task)"),
    element("span", { class: "numbers", title: "D: disagreement between profile and outcome, nats a token" }, [
      viewer.about.runs.length > 1 ? viewer.about.runs[row.run] : "",
      `iteration ${row.iteration}`, `#${row.number}`, `${row.turns} turn${row.turns === 1 ? "" : "s"}`,
      row.disagreement === null ? "" : `D ${number(row.disagreement, 3)}`,
    ].filter(Boolean).join(" · ")));
    made.style.top = `${position * ROW_HEIGHT}px`;
    return made;
  }

  function reveal() {
    const top = shown.indexOf(selected) * ROW_HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
    draw();
  }

  // Show a trajectory from a turn on.
  viewer.select = (id, turn = 0) => {
    selected = id;
    reveal();
    viewer.show(id, turn);
  };

  // Move by a number of trajectories in the list.
  viewer.move = (steps) => {
    if (!shown.length) return;
    const now = shown.indexOf(selected);
    const next = Math.min(shown.length - 1, Math.max(0, now + steps));
    if (next !== now) viewer.select(shown[next]);
  };

  let timer;
  async function searched() {
    const query = viewer.query();
    if (!query) {
      found = null;
    } else {
      await viewer.complete;
      const began = performance.now();
      const ids = await viewer.search(query, (done, all) => {
        if (performance.now() - began > 300) tell(`searched ${done.toLocaleString("en")} of ${all.toLocaleString("en")}`);
      });
      if (ids === null) return;
      found = ids;
    }
    apply();
    viewer.redraw();
  }

  // Filter again, for example after more of the index was read.
  viewer.refreshList = apply;

  viewer.startList = (selectedId, turn) => {
    selected = selectedId;
    apply();
    viewer.select(selectedId, turn);
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => searched().catch(viewer.fail), 150);
    });
    form.addEventListener("change", (event) => {
      if (event.target === search) return;
      // After a change of the order, show the first trajectory.
      if (event.target === form.elements.order) selected = -1;
      apply();
      viewer.redraw();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    list.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
    new ResizeObserver(draw).observe(list);
    list.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) viewer.select(Number(row.dataset.id));
    });
    list.addEventListener("keydown", (event) => {
      const page = Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1);
      const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, End: shown.length, Home: -shown.length }[event.key];
      if (!steps) return;
      event.preventDefault();
      viewer.move(steps);
    });
  };
})();
