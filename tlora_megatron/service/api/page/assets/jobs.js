// The queue and what has ended, filtered by the reader, and one job in a dialog.

const CHIP = (job) =>
  h("span", { class: `chip ${job.state}` }, job.wish ? `${job.state}, ${job.wish}` : job.state);
const FIRST = [
  ["job", (job) => [jobLink(job, "row"), reason(job)], "words name"],
  ["tenant", (job) => job.tenant ?? "", "words"],
  ["state", CHIP, "words"],
  ["base", (job) => job.base, "words"],
  ["GPUs", (job) => count(job.gpus), ""],
];
const STEPS = ["steps", (job) => steps(job).replace(" steps", ""), ""];
const QUEUE = [
  ...FIRST,
  ["priority", (job) => String(job.priority), ""],
  ["bound", (job) => `${job.bound}×`, ""],
  STEPS,
  ["in the queue for", (job) => duration(now() - job.submitted_at), ""],
];
const ENDED = [
  ...FIRST,
  STEPS,
  ["loss", (job) => precise(job.loss), ""],
  ["duration", (job) => duration(job.ended_at - job.submitted_at), ""],
];
const OTHER_REASONS = {
  queued: "the next decision says why",
  validating: "its data are being checked",
  paused: "until it is resumed",
};

const text = (job) => `${job.name} ${job.id} ${job.tenant ?? ""} ${job.base}`.toLowerCase();

// Why a job that waits does so; null of others.
function whyItWaits(job) {
  if (job.state in OTHER_REASONS && !latest.cluster.served) return "no controller runs";
  return job.waits ?? OTHER_REASONS[job.state] ?? null;
}

function reason(job) {
  const words = whyItWaits(job) ?? job.error;
  return words ? h("small", { class: job.error ? "bad" : "" }, words) : null;
}

// A table; in a narrow window each row is a card, whose numbers stand beside their names.
function jobTable(title, columns, jobs) {
  if (!jobs.length) return [];
  const shown = columns.filter(([name]) => name !== "tenant" || jobs.some((job) => job.tenant));
  const head = shown.map(([name, , kinds]) => h("th", { class: kinds, scope: "col" }, name));
  const rows = jobs.map((job) =>
    h("tr", {}, shown.map(([name, cell, kinds]) => h("td", { class: kinds, "data-name": name }, ...[cell(job)].flat().filter(Boolean)))),
  );
  return h("table", {}, h("caption", {}, title), h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows));
}

function drawJobs(jobs) {
  const all = [...jobs.waiting, ...jobs.ended];
  const [wanted, kind] = [byId("filter").value.trim().toLowerCase(), byId("state").value];
  offerStates(all, kind);
  const isWanted = (job) => text(job).includes(wanted) && (!kind || job.state === kind);
  const [queue, ended] = [jobs.waiting.filter(isWanted), jobs.ended.filter(isWanted)];
  const waiting = (jobs.counts.queued || 0) + (jobs.counts.validating || 0) + (jobs.counts.paused || 0);
  const hidden = waiting - jobs.waiting.length;
  const others = jobs.queued_of_all - (jobs.counts.queued || 0);
  byId("found").textContent = [
    `${many(queue.length + ended.length, "job")} shown`,
    hidden > 0 ? `${count(hidden)} more wait` : "",
    others > 0 ? `others have ${count(others)} in the queue` : "",
  ].filter(Boolean).join(", ");
  const none = h("p", { class: "none" }, all.length ? "No job is called so." : "No job waits, and none has ended.");
  const tables = [jobTable("Queue", QUEUE, queue), jobTable("Ended", ENDED, ended)].flat();
  show(byId("jobs"), tables.length ? tables : none);
}

function offerStates(jobs, chosen) {
  const names = [...new Set(jobs.map((job) => job.state)), chosen].filter(Boolean).sort();
  const options = [...new Set(names)].map((name) => h("option", { value: name }, name));
  const select = byId("state");
  if (select.options.length - 1 === options.length) return;
  select.replaceChildren(select.options[0], ...options);
  select.value = chosen;
}

function findJob(id) {
  const members = latest.groups.flatMap((group) =>
    group.members.map((member) => ({ ...member, gang: group.gang, beside: group.members.length - 1 })),
  );
  return [...members, ...latest.jobs.waiting, ...latest.jobs.ended].find((job) => job.id === id);
}

let opened = null;

async function openJob(id) {
  if (opened === id) return;
  opened = id;
  await begin(id);
  if (!byId("job").open) byId("job").showModal();
  drawJob();
}

// The losses of a job as large as the window lets them be, with the names of both curves.
function largeCurve(job) {
  const own = curves.get(job.id) ?? { points: [], evaluations: [] };
  const width = Math.max(240, byId("job").clientWidth - 40);
  const height = Math.round(Math.min(420, innerHeight * 0.5, 0.75 * width));
  const named = own.evaluations.length
    ? h("figcaption", { class: "legend" }, h("span", { class: "of-training" }, "training"), h("span", { class: "of-validation" }, "validation"))
    : null;
  const picture = curve(own, { width, height, left: 52, top: 10, bottom: 20, levels: 5 });
  return h("figure", { class: job.gang ? colour(job.gang) : "" }, named, picture);
}

function drawJob() {
  const job = opened && findJob(opened);
  if (!job) return;
  const validation = curves.get(job.id)?.evaluations.at(-1);
  const end = job.ended_at ? ["duration", duration(job.ended_at - job.submitted_at)] : [];
  const facts = [
    ["id", job.id],
    ["tenant", job.tenant],
    ["state", job.state],
    ["waits", whyItWaits(job)],
    ["steps", steps(job)],
    ["loss", precise(job.loss)],
    ["validation loss", validation ? `${precise(validation[1])} at step ${count(validation[0])}` : null],
    ["tokens", count(job.tokens)],
    ["beside", job.gang ? `${many(job.beside, "other job")} in ${job.gang}` : null],
    ["alone it would train", job.alone_tokens_per_s ? `${compact(job.alone_tokens_per_s)} tok/s` : null],
    end,
  ].filter(([, value]) => value);
  show(
    byId("job"),
    h("h2", { id: "job-name" }, job.name),
    h("p", { class: "facts" }, facts.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, value)))),
    job.error ? h("p", { class: "error bad" }, job.error) : [],
    largeCurve(job),
    h("button", { type: "button", "data-key": "close", onclick: () => byId("job").close() }, "Close"),
  );
}
