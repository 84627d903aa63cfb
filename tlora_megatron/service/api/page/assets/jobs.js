// The queue and what has ended, filtered by the reader, and one job in a dialog.

const COLUMNS = [
  ["job", (job) => jobLink(job, "row"), "words"],
  ["tenant", (job) => job.tenant ?? "", "words wide-only"],
  ["state", (job) => h("span", { class: `chip ${job.state}` }, job.wish ? `${job.state}, ${job.wish}` : job.state), "words"],
  ["base", (job) => job.base, "words wide-only"],
  ["GPUs", (job) => count(job.gpus), "wide-only"],
  ["priority", (job) => String(job.priority), "wide-only"],
  ["bound", (job) => `${job.bound}×`, "wide-only"],
  ["steps", (job) => steps(job).replace(" steps", ""), ""],
  ["loss", (job) => precise(job.loss), ""],
  ["age", (job) => duration((job.ended_at ?? now()) - job.submitted_at), ""],
];

const text = (job) => `${job.name} ${job.id} ${job.tenant ?? ""} ${job.base}`.toLowerCase();

function drawJobs(jobs) {
  const all = [...jobs.waiting, ...jobs.ended];
  const [wanted, kind] = [byId("filter").value.trim().toLowerCase(), byId("state").value];
  offerStates(all, kind);
  const found = all.filter((job) => text(job).includes(wanted) && (!kind || job.state === kind));
  const waiting = (jobs.counts.queued || 0) + (jobs.counts.validating || 0) + (jobs.counts.paused || 0);
  const hidden = waiting - jobs.waiting.length;
  const others = jobs.queued_of_all - (jobs.counts.queued || 0);
  byId("found").textContent = [
    `${many(found.length, "job")} shown`,
    hidden > 0 ? `${count(hidden)} more wait` : "",
    others > 0 ? `others have ${count(others)} in the queue` : "",
  ].filter(Boolean).join(", ");
  const columns = COLUMNS.filter(([name]) => name !== "tenant" || all.some((job) => job.tenant));
  const head = h("tr", {}, columns.map(([name, , kinds]) => h("th", { class: kinds, scope: "col" }, name)));
  const rows = found.map((job) =>
    h("tr", {}, columns.map(([, cell, kinds]) => h("td", { class: kinds }, cell(job)))),
  );
  const none = h("p", { class: "none" }, all.length ? "No job is called so." : "No job waits, and none has ended.");
  show(byId("jobs"), found.length ? h("table", {}, h("thead", {}, head), h("tbody", {}, rows)) : none);
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
  opened = id;
  if (!curves.has(id)) await begin(id);
  drawJob();
  if (!byId("job").open) byId("job").showModal();
}

function drawJob() {
  const job = opened && findJob(opened);
  if (!job) return;
  const facts = [
    ["id", job.id],
    ["tenant", job.tenant],
    ["state", job.state],
    ["waits", job.waits],
    ["steps", steps(job)],
    ["loss", precise(job.loss)],
    ["tokens", count(job.tokens)],
    ["beside", job.gang ? `${many(job.beside, "other job")} in ${job.gang}` : null],
    ["alone it would train", job.alone_tokens_per_s ? `${compact(job.alone_tokens_per_s)} tok/s` : null],
  ].filter(([, value]) => value);
  const size = { width: 520, height: 180 };
  show(
    byId("job"),
    h("h2", { id: "job-name" }, job.name),
    h("p", { class: "facts" }, facts.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, value)))),
    job.error ? h("p", { class: "error bad" }, job.error) : null || [],
    h("figure", { class: job.gang ? colour(job.gang) : "" }, curve(curves.get(job.id)?.points ?? [], size)),
    h("button", { type: "button", "data-key": "close", onclick: () => byId("job").close() }, "Close"),
  );
}
