// What the scheduler decided, newest first, with the reason and the jobs of each action.

let older = [];
let next; // What to ask for before: undefined until somebody wants to see more.

function drawChip(job) {
  const times = isNumber(job.slowdown) ? ` ${job.slowdown.toFixed(2)}×` : "";
  return h("span", { class: `chip${job.own ? "" : " stranger"}` }, (job.name || job.id) + times);
}

function drawAction(action) {
  return h(
    "div",
    {},
    h("p", {}, gangChip(action.gang), " ", action.why || `${many(action.jobs.length, "job")} on ${many(action.num_gpus, "GPU")}`),
    h("div", { class: "chips" }, action.jobs.map(drawChip)),
  );
}

function drawDecision(decision) {
  const held = decision.held_back.map((why) => h("p", { class: "held-back" }, `held back: ${why}`));
  return h(
    "li",
    {},
    h("time", { datetime: new Date(1e3 * decision.at).toISOString() }, clock(decision.at)),
    h("div", {}, decision.actions.map(drawAction), held),
  );
}

function drawDecisions(newest) {
  const last = newest.length ? newest.at(-1).seq : Infinity;
  const all = [...newest, ...older.filter((decision) => decision.seq < last)];
  const none = h("li", {}, h("span", {}, ""), "Nothing was decided yet.");
  show(byId("decisions"), all.length ? all.map(drawDecision) : none);
  byId("older").hidden = (next === undefined ? latest.more : next) === null;
}

async function showOlder() {
  const before = next ?? latest.more;
  const page = await get(`/v1/decisions?limit=50&before=${before}${state.mine ? "&mine=true" : ""}`);
  older = [...older, ...page.decisions];
  next = page.next;
  drawDecisions(latest.decisions);
}
