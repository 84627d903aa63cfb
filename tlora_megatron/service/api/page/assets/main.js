// Puts the parts together: each event of the stream draws what it concerns.

const EMPTY = {
  cluster: { nodes: [], gpus: { all: 0, held: 0, used: 0 }, served: true },
  groups: [],
  jobs: { counts: {}, waiting: [], ended: [], queued_of_all: 0 },
  timeline: [],
  figures: {},
  decisions: [],
  more: null,
};
const latest = { ...EMPTY };
let stream = null;

function status(words, kind) {
  const line = byId("status");
  // A status that is said again is read aloud again.
  if (line.textContent !== words) line.textContent = words;
  line.className = kind;
}

function live() {
  byId("board").hidden = false;
  byId("door").hidden = true;
  if (latest.cluster.served) status(`live, ${latest.cluster.policy || "no policy yet"}`, "live");
  else status("no controller runs: jobs wait until `tlora serve` does", "lost");
}

function drawTimeline() {
  const figure = byId("timeline");
  const width = Math.max(240, figure.clientWidth - 24);
  const none = h("p", { class: "none" }, "No gang has held a GPU in the last half hour.");
  show(figure, latest.timeline.length ? timeline(latest.timeline, width) : none);
}

const on = {
  cluster(body) {
    latest.cluster = body;
    if (body.nodes.some((node) => "host" in node)) byId("mine-label").hidden = false;
    drawMachines(body);
    drawTiles(latest);
    live();
  },
  groups(body) {
    latest.groups = body.groups;
    body.groups.flatMap((group) => group.members).filter((m) => m.own).forEach(addLoss);
    drawGroups(body.groups);
    drawLosses();
    drawTiles(latest);
    drawJob();
  },
  jobs(body) {
    latest.jobs = body;
    drawJobs(body);
    drawTiles(latest);
  },
  sweeps(body) {
    drawSweeps(body.sweeps);
  },
  timeline(body) {
    latest.timeline = body.gangs;
    drawTimeline();
  },
  figures(body) {
    latest.figures = body.figures;
    drawTiles(latest);
  },
  decisions(body) {
    latest.decisions = body.decisions;
    latest.more = body.next;
    drawDecisions(body.decisions);
  },
};

function lost(why, isRefusal) {
  if (!isRefusal) {
    status(`${why}: trying again`, "lost");
    return;
  }
  sessionStorage.removeItem(TOKEN);
  enter(why);
}

function enter(why) {
  status("not connected", "lost");
  byId("board").hidden = true;
  byId("door").hidden = false;
  byId("refusal").textContent = why;
  byId("token").focus();
}

function connect() {
  if (stream) stream.stop.abort();
  Object.assign(latest, EMPTY);
  [older, next] = [[], undefined];
  curves.clear();
  if (!takeToken()) {
    enter("This page needs a token: `tlora serve --http` prints an address that holds one.");
    return;
  }
  status("connecting", "");
  stream = new Stream(on, lost, live);
  stream.follow();
}

byId("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("token").value.trim());
  byId("token").value = "";
  connect();
});
byId("mine").addEventListener("change", (event) => {
  state.mine = event.target.checked;
  connect();
});
byId("filter").addEventListener("input", () => drawJobs(latest.jobs));
byId("state").addEventListener("change", () => drawJobs(latest.jobs));
byId("older").addEventListener("click", () => showOlder().catch((error) => status(error.message, "lost")));
byId("job").addEventListener("close", () => (opened = null));
addEventListener("hashchange", () => location.hash.startsWith("#token=") && connect());
addEventListener("resize", () => {
  drawTimeline();
  drawLosses();
  drawJob();
});
setInterval(() => byId("board").hidden || drawTimeline(), 5000);
connect();
