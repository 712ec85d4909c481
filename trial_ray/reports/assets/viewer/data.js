// Data of the runs: the index, blocks of trajectories loaded on demand, and the search in their texts.
//
// A page opened from a folder may not fetch files, but may load scripts. Every file of data/ is a call of viewer.receive with a JSON
// text. Texts of trajectories are untrusted: they become text nodes, never markup.
"use strict";

const viewer = {};

(() => {
  const FIELDS = ["run", "iteration", "number", "environment", "task", "family", "ended", "success", "turns", "return",
    "advantage", "disagreement", "classes", "rollout"];
  const DETAILS_KEPT = 8;
  const AHEAD = 8;

  const nonce = document.currentScript.nonce;
  const waiting = new Map();
  const files = new Map();
  const policy = window.trustedTypes?.createPolicy("viewer", {
    createScriptURL(url) {
      if (!/^data\/[a-z]+-\d+\.js$/.test(url)) throw new TypeError(`not a file of this page: ${url}`);
      return url;
    },
  });

  viewer.receive = (kind, number, text) => {
    const name = `${kind}-${number}`;
    const resolve = waiting.get(name);
    waiting.delete(name);
    resolve(JSON.parse(text));
  };

  // The content of data/KIND-NUMBER.js; each file is read once.
  viewer.load = (kind, number) => {
    const name = `${kind}-${number}`;
    if (!files.has(name)) files.set(name, read(name));
    if (kind === "detail") forgetOldDetails(name);
    return files.get(name);
  };

  function read(name) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      const url = `data/${name}.js`;
      const done = () => { waiting.delete(name); script.remove(); };
      waiting.set(name, resolve);
      script.nonce = nonce;
      // A truncated script loads without an error, but passes no data.
      script.onload = () => (waiting.has(name) ? script.onerror() : done());
      script.onerror = () => { done(); files.delete(name); reject(new Error(`${url} is missing or cut off; write the page again`)); };
      script.src = policy ? policy.createScriptURL(url) : url;
      document.head.append(script);
    });
  }

  function forgetOldDetails(newest) {
    const kept = [...files.keys()].filter((name) => name.startsWith("detail-") && name !== newest);
    for (const name of kept.slice(0, Math.max(0, kept.length + 1 - DETAILS_KEPT))) files.delete(name);
  }

  // Rows of one index file as objects; a row's id is its position in the whole list.
  viewer.readIndex = async (number) => {
    const rows = await viewer.load("index", number);
    return rows.map((row) => Object.fromEntries(FIELDS.map((field, column) => [field, row[column]])));
  };

  function blockOf(id) {
    const starts = viewer.about.blocks;
    let low = 0, high = starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= id) low = middle; else high = middle - 1;
    }
    return low;
  }

  // One trajectory: its row, and turns with texts, prompts and the numbers of their tokens.
  viewer.readTrajectory = async (id) => {
    const block = blockOf(id), offset = id - viewer.about.blocks[block];
    const [text, detail] = await Promise.all([viewer.load("text", block), viewer.load("detail", block)]);
    const whole = (lines, indices) => indices && indices.map((index) => lines[index]).join("\n");
    const { turns, ...rest } = detail.trajectories[offset];
    return {
      ...rest,
      id,
      row: viewer.rows[id],
      turns: turns.map((turn, index) => {
        const [observation, action, response, outcome] = text.trajectories[offset][index].map((part) => whole(text.lines, part));
        return {
          ...turn, observation, action, response, outcome,
          prompt: turn.prompt && turn.prompt.map((part) => whole(detail.lines, part)),
          evidence: whole(detail.lines, turn.evidence),
          tokens: turn.tokens && turn.tokens.map((line) => detail.lines[line]),
        };
      }),
    };
  };

  // Ids of the trajectories in which one line of text, or the task, has the query in it, capitals aside; null where a newer search
  // has begun meanwhile. Blocks are loaded as they are needed, some ahead, and kept.
  let newest = 0;
  viewer.search = async (query, tell) => {
    const own = ++newest, found = new Set(), { blocks, count } = viewer.about;
    for (let block = 0; block < blocks.length; block++) {
      for (let next = block; next < Math.min(block + AHEAD, blocks.length); next++) viewer.load("text", next);
      const text = await viewer.load("text", block);
      if (own !== newest) return null;
      text.lowered ??= text.lines.map((line) => line.toLowerCase());
      const hits = new Set();
      text.lowered.forEach((line, index) => { if (line.includes(query)) hits.add(index); });
      text.trajectories.forEach((turns, offset) => {
        const id = blocks[block] + offset;
        const said = hits.size && turns.some((turn) => turn.some((part) => part.some((line) => hits.has(line))));
        if (said || viewer.rows[id].task.toLowerCase().includes(query)) found.add(id);
      });
      tell(block + 1 < blocks.length ? blocks[block + 1] : count, count);
    }
    return found;
  };

  // An element; attributes are set by name, children are elements or text.
  viewer.element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
    made.append(...children.filter((child) => child !== undefined));
    return made;
  };

  viewer.number = (value, digits = 2) =>
    value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−");
})();
