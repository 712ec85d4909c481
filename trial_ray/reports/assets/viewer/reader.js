// One trajectory, or two of one task side by side: turns with their multipliers, tinted tokens, prompts of the current turn.
"use strict";

(() => {
  const { element, number } = viewer;
  const place = document.getElementById("trajectory");
  const beside = document.getElementById("beside");
  const legend = document.getElementById("legend");
  const tip = document.getElementById("tip");
  const spoken = document.getElementById("spoken");
  const MAX_BESIDE = 200;

  let sides = [];
  let current = 0;
  let token = null;

  const TINTS = {
    gap: {
      value: (turn, index) => turn.gap?.[index],
      scale: "gap", low: "less probable with hindsight", high: "more probable with hindsight", unit: "nats",
      text: "Signed hindsight gap of each token: its log-probability with the teacher context minus without it.",
    },
    advantage: {
      value: (turn) => turn.advantage,
      scale: "advantage", low: "worse than its group", high: "better than its group", unit: "",
      text: "Advantage of the turn, the same for each of its tokens.",
    },
    ratio: {
      value: (turn, index) => logRatio(turn, index),
      scale: "ratio", low: "less probable to the learner", high: "more probable to the learner", unit: "(log)",
      text: "Probability under the learner before the update over that of the engine, as a logarithm.",
    },
  };

  const has = (value) => value !== null && value !== undefined;

  function logRatio(turn, index) {
    const learner = turn.learner_logprobs?.[index], engine = turn.logprobs?.[index];
    return has(learner) && has(engine) ? learner - engine : null;
  }

  const tint = () => document.querySelector("[name=tint]:checked").value;

  // --- The trajectories on the page -------------------------------------------------------------------------------------------------------

  let asked = 0;
  // Show a trajectory of the list from a turn on, and remove the trajectory beside it.
  viewer.show = async (id, turn = 0) => {
    const own = ++asked;
    hideTip();
    if (id < 0) {
      sides = [];
      beside.replaceChildren(element("option", { value: "" }, "nothing"));
      place.replaceChildren(element("p", { class: "empty" }, "No trajectory fits the filters."));
      legend.textContent = "";
      return;
    }
    const trajectory = await viewer.readTrajectory(id).catch(viewer.fail);
    if (own !== asked || !trajectory) return;
    sides = [trajectory];
    current = Math.min(turn, Math.max(0, trajectory.turns.length - 1));
    fillBeside(id);
    viewer.redraw();
    if (current) markCurrent(true);
    else document.getElementById("reader").scrollTop = 0;
    viewer.remember(id, current);
    performance.mark("trajectory shown");
  };

  // Trajectories of the same task: those of the other run first, then other iterations, then other rollouts.
  function candidates(id) {
    const own = viewer.rows[id];
    const distance = (row) => (row.run !== own.run ? 0 : row.iteration !== own.iteration ? 1 : 2);
    return viewer.rows.map((row, index) => ({ row, index }))
      .filter(({ row, index }) => index !== id && row.task === own.task && row.environment === own.environment)
      .sort((a, b) => distance(a.row) - distance(b.row)
        || Math.abs(a.row.iteration - own.iteration) - Math.abs(b.row.iteration - own.iteration) || a.index - b.index);
  }

  function fillBeside(id) {
    const found = candidates(id);
    beside.replaceChildren(element("option", { value: "" }, found.length ? "nothing" : "no other of this task"),
      ...found.slice(0, MAX_BESIDE).map(({ row, index }) => element("option", { value: index },
        `${viewer.about.runs.length > 1 ? `${viewer.about.runs[row.run]} · ` : ""}iteration ${row.iteration} #${row.number} `
        + `(${row.success ? "succeeded" : "did not succeed"}, ${row.turns} turns)`)));
    beside.disabled = !found.length;
  }

  // Update the choices after the whole index has been read.
  viewer.refreshBeside = () => { if (sides.length === 1) fillBeside(sides[0].id); };

  async function setBeside() {
    const own = ++asked;
    const first = sides[0];
    const other = beside.value === "" ? null : await viewer.readTrajectory(Number(beside.value)).catch(viewer.fail);
    if (own !== asked) return;
    sides = other ? [first, other] : [first];
    viewer.redraw();
  }

  // Show another trajectory of the task beside this one, or remove it.
  viewer.toggleBeside = () => {
    if (beside.options.length < 2) return;
    beside.value = beside.value === "" ? beside.options[1].value : "";
    setBeside();
  };

  // Draw the trajectories again after a setting has changed.
  viewer.redraw = () => {
    if (!sides.length) return;
    hideTip();
    drawLegend();
    const turns = Math.max(...sides.map((side) => side.turns.length));
    const differing = firstDifference();
    const rows = Array.from({ length: turns }, (_, index) =>
      element("div", { class: "pair" }, ...sides.map((side, which) => turnElement(side, index, which))));
    place.className = sides.length > 1 ? "two" : "one";
    place.replaceChildren(
      element("div", { class: "pair" }, ...sides.map(headElement)),
      ...(differing === null ? [] : [element("p", { class: "difference" }, differing)]),
      ...rows);
    markCurrent();
  };

  function firstDifference() {
    if (sides.length < 2) return null;
    const [a, b] = sides.map((side) => side.turns.map((turn) => turn.action));
    const index = a.findIndex((action, turn) => action !== b[turn]);
    if (index < 0 && a.length === b.length) return "Both take the same actions.";
    return `The actions differ from turn ${(index < 0 ? a.length : index) + 1} on.`;
  }

  // --- The head of a trajectory --------------------------------------------------------------------------------------------

  function headElement(side) {
    const { row, turns } = side;
    const result = row.ended === "failed" ? "rollout failed" : row.success ? "succeeded" : "did not succeed";
    const ignored = turns.filter((turn) => turn.invalid_action).length;
    const facts = [
      ["family", row.family || "–"], ["iteration", `${row.iteration} #${row.number}`], ["rollout", row.rollout ?? "–"], ["ended", row.ended.replace("_", " ")],
      ["turns", ignored ? `${turns.length} (${ignored} not understood)` : turns.length], ["return", number(row.return)],
      ["advantage", number(row.advantage)], ["disagreement", has(row.disagreement) ? `${number(row.disagreement, 4)} nats/token` : "–"],
    ];
    if (viewer.about.runs.length > 1) facts.unshift(["run", viewer.about.runs[row.run]]);
    const made = element("section", { class: "head", "aria-label": "Trajectory" },
      element("h2", {}, element("bdi", {}, row.task || "(no task)")),
      element("p", { class: `result ${row.ended === "failed" ? "failed" : row.success ? "won" : "lost"}` }, result),
      element("dl", {}, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value))))));
    if (side.error) made.append(element("p", { class: "flag" }, side.error));
    if (turns.every((turn) => !has(turn.advantage) && !has(turn.turn_weight) && !turn.gap)) {
      made.append(element("p", { class: "hint" }, "Training recorded nothing of this trajectory: no multipliers, gaps or learner log-probabilities."));
    }
    if (side.solution.length) {
      made.append(element("details", {}, element("summary", {}, "The environment's own solution"),
        element("ol", {}, ...side.solution.map((action) => element("li", {}, action)))));
    }
    if (turns.length) made.append(profileElement(side));
    return made;
  }

  // The class of a turn's action; empty if the environment's actions have no classes.
  const className = (turn) => viewer.about.classes[turn.class] ?? "";

  const largestWeight = () => Math.max(2, ...sides.flatMap((side) => side.turns.map((turn) => turn.turn_weight ?? 0)));

  // The multipliers of all turns as one row of columns, each a button.
  function profileElement(side) {
    const most = largestWeight();
    const made = element("div", { class: "profile", role: "group", "aria-label": "Multipliers of all turns" },
      ...side.turns.map((turn, index) => {
        const column = element("button", {
          type: "button", "data-turn": index, title: `turn ${index + 1}: ${turn.action}`,
          "aria-label": [`turn ${index + 1}`, `multiplier ${has(turn.turn_weight) ? number(turn.turn_weight) : "not recorded"}`, className(turn)].filter(Boolean).join(", "),
        }, element("i", { class: has(turn.turn_weight) ? "" : "none" }));
        column.firstChild.style.height = `${has(turn.turn_weight) ? Math.max(2, 100 * turn.turn_weight / most) : 6}%`;
        return column;
      }));
    made.style.setProperty("--mean", `${100 / most}%`);
    return made;
  }

  // --- A turn --------------------------------------------------------------------------------------------------------------

  function turnElement(side, index, which) {
    const turn = side.turns[index];
    if (!turn) return element("div", { class: "absent" });
    const before = side.turns[index - 1];
    const wanted = viewer.filteredClass();
    const title = `turn-${which}-${index}`;
    const made = element("article", {
      class: `turn${wanted !== null && turn.class !== wanted ? " dim" : ""}`, "data-turn": index, "data-side": which, "aria-labelledby": title,
    },
    element("header", {},
      element("h3", { id: title }, element("span", { class: "count" }, `${index + 1}`), element("span", { class: "unseen" }, ". turn: "),
        element("bdi", { class: "action" }, ...marked(turn.action || "(no action)"))),
      className(turn) ? element("span", { class: `class class-${turn.class}` }, className(turn)) : ""),
    barElement(turn));
    const flags = [
      turn.place, turn.valid ? "" : "response without the required form", turn.invalid_action ? "action not understood" : "",
      turn.finish_reason === "length" ? "response cut at its limit" : "", turn.prompt_cut === "none" ? "" : `prompt without ${turn.prompt_cut === "history" ? "part of its history" : "the observation's middle"}`,
      turn.reward ? `reward ${number(turn.reward)}` : "",
    ].filter(Boolean);
    if (flags.length) made.append(element("p", { class: "flags" }, ...flags.map((flag) => element("span", { class: "flag" }, flag))));
    if (!before || before.outcome !== turn.observation) made.append(saidElement("Observation", turn.observation, "observation"));
    if (turn.tokens) made.append(labelled("Response", tokensElement(turn)));
    made.append(saidElement("Outcome", turn.outcome, "outcome"));
    return made;
  }

  function barElement(turn) {
    const known = has(turn.turn_weight);
    const made = element("div", { class: "bar" },
      element("span", { class: "track", "aria-hidden": "true" }, element("i"), element("b")),
      element("span", { class: "value" }, known ? `× ${number(turn.turn_weight)}` : "multiplier not recorded",
        has(turn.turn_score) ? element("small", {}, ` score ${number(turn.turn_score, 3)} nats`) : ""));
    const most = largestWeight(), [fill, mean] = made.firstChild.children;
    fill.style.width = `${known ? 100 * turn.turn_weight / most : 0}%`;
    mean.style.left = `${100 / most}%`;
    return made;
  }

  const labelled = (label, ...content) => element("div", { class: "said" }, element("h4", {}, label), ...content);
  const saidElement = (label, text, kind) => labelled(label, element("p", { class: `text ${kind}`, dir: "auto" }, ...marked(text || "(nothing)")));

  // Positions of the search text in a text, as pairs of start and end.
  function matches(text) {
    const query = viewer.query(), lower = text.toLowerCase(), found = [];
    // If lower case changes the length of the text, positions would be wrong.
    if (!query || lower.length !== text.length) return found;
    for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, at + query.length)) found.push([at, at + query.length]);
    return found;
  }

  // The text as nodes, with the search text marked.
  function marked(text) {
    let end = 0;
    const parts = matches(text).flatMap(([from, to]) => {
      const before = text.slice(end, from);
      end = to;
      return [before, element("mark", { class: "hit" }, text.slice(from, to))];
    });
    return [...parts, text.slice(end)];
  }

  function tokensElement(turn) {
    const made = element("p", { class: "text tokens", tabindex: "0", role: "group", dir: "auto",
      "aria-label": `Response: ${turn.response} Left and right arrow keys read the numbers of each token.` });
    const kind = TINTS[tint()];
    const scale = kind && viewer.about.scales[kind.scale];
    const hits = matches(turn.response);
    // Text at the end of the prompt that belongs to the response has no numbers.
    if (turn.opened) made.append(element("em", { title: "written by the prompt" }, turn.opened.replaceAll("\n", "↵\n")));
    let position = turn.opened.length;
    turn.tokens.forEach((text, index) => {
      // A token that is a part of a character has no text.
      const span = element("span", { "data-token": index }, text === "" ? "·" : text.replaceAll("\n", "↵\n"));
      const value = kind?.value(turn, index);
      if (value && scale) {
        span.className = value < 0 ? "down" : "up";
        const strength = Math.min(1, Math.abs(value) / scale);
        if (strength > 0.3) span.classList.add("strong");
        span.style.setProperty("--strength", strength.toFixed(3));
      }
      const end = position + text.length;
      if (hits.some(([from, to]) => from < end && to > position)) span.classList.add("hit");
      position = end;
      made.append(span);
    });
    return made;
  }

  function drawLegend() {
    const kind = TINTS[tint()];
    if (!kind) { legend.replaceChildren(); return; }
    const scale = viewer.about.scales[kind.scale];
    if (!has(scale)) { legend.replaceChildren(`${kind.text} Not recorded.`); return; }
    legend.replaceChildren(`${kind.text} `, element("span", { class: "key" },
      element("span", {}, `${kind.low} −${scale.toPrecision(2)}`), element("i", { "aria-hidden": "true" }),
      element("span", {}, `+${scale.toPrecision(2)} ${kind.unit} ${kind.high}`)));
  }

  // --- The current turn and its prompts ------------------------------------------------------------------------------------

  function markCurrent(scroll = false) {
    for (const old of place.querySelectorAll(".prompts")) old.remove();
    for (const made of place.querySelectorAll("[data-turn]")) {
      const here = Number(made.dataset.turn) === current;
      made.classList.toggle("current", here);
      if (here) made.setAttribute("aria-current", "true"); else made.removeAttribute("aria-current");
    }
    if (document.getElementById("prompts").checked) {
      for (const made of place.querySelectorAll("article.current")) made.append(promptsElement(sides[made.dataset.side].turns[current]));
      // The teacher context may be at the end of a long prompt: scroll both prompts to its position.
      for (const box of place.querySelectorAll(".prompts .text")) {
        const mark = box.querySelector("mark, .here");
        if (!mark) continue;
        const fits = mark.offsetHeight < box.clientHeight - 60;
        box.scrollTop = fits ? mark.offsetTop + mark.offsetHeight - box.clientHeight + 40 : mark.offsetTop - 12;
      }
    }
    const article = place.querySelector("article.current");
    if (scroll && article) article.scrollIntoView({ block: "start" });
  }

  function promptsElement(turn) {
    if (!turn.prompt) return element("div", { class: "prompts" }, element("p", { class: "hint" }, "The run has no checkpoint whose tokenizer could decode the prompt."));
    const [before, after] = turn.prompt;
    const here = element("span", { class: "here", title: "position of the teacher context" }, "▾");
    const ordinary = labelled(`Ordinary prompt, ${turn.prompt_tokens} tokens`,
      element("p", { class: "text", tabindex: "0", dir: "auto" }, before, turn.evidence === null ? "" : here, after));
    const hindsight = turn.evidence === null
      ? labelled("Hindsight prompt", element("p", { class: "hint" }, "The teacher context was not recorded, or the method has none."))
      : labelled("Hindsight prompt, teacher context marked", element("p", { class: "text", tabindex: "0", dir: "auto" }, before, element("mark", { class: "evidence" }, turn.evidence), after));
    return element("div", { class: "prompts" }, ordinary, hindsight);
  }

  // Make a turn the current turn.
  viewer.setTurn = (turn, scroll = true) => {
    if (!sides.length) return;
    const last = Math.max(...sides.map((side) => side.turns.length)) - 1;
    current = Math.min(last, Math.max(0, turn));
    hideTip();
    markCurrent(scroll);
    viewer.remember(sides[0].id, current);
    const made = sides[0].turns[current];
    if (made) spoken.textContent = `Turn ${current + 1}: ${made.action}. Multiplier ${has(made.turn_weight) ? number(made.turn_weight) : "not recorded"}.`;
  };
  viewer.moveTurn = (steps) => viewer.setTurn(current + steps);

  // --- The numbers of a token ----------------------------------------------------------------------------------------------

  function numbersOf(turn, index) {
    const ratio = logRatio(turn, index);
    return [
      ["token", `${turn.tokens[index].replaceAll("\n", "↵") || "(part of a character)"}  ·  id ${turn.ids[index]}`],
      ["hindsight gap", has(turn.gap?.[index]) ? `${number(turn.gap[index], 4)} nats` : "not recorded"],
      ["advantage", has(turn.advantage) ? number(turn.advantage, 3) : "not recorded"],
      ["multiplier", has(turn.turn_weight) ? number(turn.turn_weight, 3) : "not recorded"],
      ["learner / engine", has(ratio) ? `${number(Math.exp(ratio), 4)}` : "not recorded"],
      ["learner log-prob", has(turn.learner_logprobs?.[index]) ? `${number(turn.learner_logprobs[index], 4)} nats` : "not recorded"],
      ["engine log-prob", has(turn.logprobs?.[index]) ? `${number(turn.logprobs[index], 4)} nats` : "not recorded"],
    ];
  }

  function showTip(span) {
    token?.classList.remove("active");
    token = span;
    span.classList.add("active");
    const article = span.closest("article");
    const turn = sides[article.dataset.side].turns[article.dataset.turn];
    const facts = numbersOf(turn, Number(span.dataset.token));
    tip.replaceChildren(element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
    tip.hidden = false;
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const below = box.bottom + 6 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(6, Math.min(box.left, window.innerWidth - tip.offsetWidth - 6))}px`;
    tip.style.top = `${below ? box.bottom + 6 : Math.max(6, box.top - 6 - tip.offsetHeight)}px`;
    return facts;
  }

  function hideTip() {
    token?.classList.remove("active");
    token = null;
    tip.hidden = true;
  }

  place.addEventListener("mouseover", (event) => {
    const span = event.target.closest("[data-token]");
    if (span) showTip(span); else hideTip();
  });
  place.addEventListener("mouseleave", hideTip);
  place.addEventListener("focusout", hideTip);
  document.getElementById("reader").addEventListener("scroll", hideTip, { passive: true });
  place.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const response = event.target.closest(".tokens");
    if (!steps || !response) return;
    event.preventDefault();
    const spans = response.querySelectorAll("[data-token]");
    const now = token && response.contains(token) ? Number(token.dataset.token) : steps > 0 ? -1 : spans.length;
    const next = spans[Math.min(spans.length - 1, Math.max(0, now + steps))];
    if (next) spoken.textContent = showTip(next).map(([name, value]) => `${name} ${value}`).join(", ");
  });
  place.addEventListener("click", (event) => {
    const column = event.target.closest(".profile button");
    const article = event.target.closest("article");
    if (column) viewer.setTurn(Number(column.dataset.turn));
    // Do nothing while text is being selected.
    else if (article && !event.target.closest("a, button, summary, .prompts") && window.getSelection().isCollapsed) viewer.setTurn(Number(article.dataset.turn), false);
  });
  beside.addEventListener("change", setBeside);
  for (const box of document.querySelectorAll("[name=tint], #prompts")) box.addEventListener("change", viewer.redraw);
})();
